"""Loaders. All read the same sample plan; a new one is a module in utils/data/loaders and a line in LOADERS."""

from __future__ import annotations

from utils.config import nearest
from utils.data.loader import Batch, Loader, Loaders, LoaderSpec
from utils.data.loaders import auto, classification, dali, gpu_resident, synthetic, threaded
from utils.errors import UserError

__all__ = ["LOADERS", "Batch", "Loader", "LoaderSpec", "Loaders", "get_loader"]

LOADERS = {
    "lowmem": LoaderSpec(threaded.build_lowmem),
    "inmem": LoaderSpec(threaded.build_inmem),
    "dali-lowmem": LoaderSpec(dali.build, reads="npy", requires=dali.import_dali),
    "resident": LoaderSpec(gpu_resident.build),
    "synthetic": LoaderSpec(synthetic.build, reads=None),
    "classification": LoaderSpec(classification.build, reads="classification"),
    "auto": LoaderSpec(auto.build),
}


def get_loader(name: str) -> LoaderSpec:
    """The loader `name`; UserError if the name is unknown."""
    if name not in LOADERS:
        known = ", ".join(LOADERS)
        hint = nearest(name, LOADERS) or "; choose one with --data_loader_config"
        raise UserError(f"unknown data_loader_config {name}; known: {known}{hint}")
    return LOADERS[name]
