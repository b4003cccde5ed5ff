"""Writes a config that trains on imported volumes, for the machine at hand or the one that is named."""

import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from utils.config import load
from utils.config.yaml_files import EXTENDS, SHIPPED, dump
from utils.errors import os_errors_for_users
from utils.files import atomic_write
from utils.volumes.hdf5 import DATASETS
from utils.volumes.opened import PATH_KEYS, box_entry, largest_crop, npy_keys

FAST, SMALL = "bs64_fast", "demo"  # the configs to extend, for a GPU and for a CPU: 117 and 1.6 million parameters
CROPS = {FAST: 64, SMALL: 32}  # their data_size
HEADER = """\
# Trains on imported volumes: {command}
# The config begins with all keys of `{parent}`; to begin with those of another config, change the line `extends` in it.
# {parent} has {recipe}, which belong together.
"""


def write_config(path: Path, volumes: Mapping[Path, Sequence[int]], machine: str | None = None) -> list[str]:
    """Writes a config for volumes of these shapes, training first, unless one exists; returns lines for the user."""
    command = f"python train.py --yaml_config {shlex.quote(str(path))}"
    if path.exists():
        return [f"kept {path}, which exists; to have it written for these volumes, remove it and import again", command]
    smallest = min(map(min, volumes.values()))
    parent, reason = _parent(smallest, machine)
    crop, first, last = min(CROPS[parent], largest_crop(smallest)[0]), next(iter(volumes)), list(volumes)[-1]
    paths = {key: str(file.resolve()).replace("$", "$$") for key, file in (("train_path", first), ("val_path", last))}
    keys: dict[str, Any] = {EXTENDS: parent, **paths, **dict.fromkeys(npy_keys(*PATH_KEYS.values()))}
    keys |= {"box_size": [box_entry([volumes[file]]) for file in (first, last)], "dataset_names": list(DATASETS)}
    keys |= {"symmetries": "full", "expdir": "./runs"}
    if crop < CROPS[parent]:
        keys |= {"data_size": crop, "network": {"scales": largest_crop(smallest)[1]}}
    config = load(str(SHIPPED / "UNet.yaml"), parent)
    recipe = f"global batch {config.global_batch_size}, learning rate {config.lr_schedule.start_lr:g}"
    text = HEADER.format(command=command, parent=parent, recipe=recipe) + dump({EXTENDS: "UNet.yaml", path.stem: keys})
    with os_errors_for_users(f"cannot write {path}"), atomic_write([path]) as (partial,):
        partial.write_text(text, encoding="utf-8")
    lines = [f"wrote {path}, a config that extends {parent} ({recipe}), because {reason}"]
    if crop < CROPS[parent]:
        lines.append(f"warning: crops have {crop} cells per side, because a side has {smallest}; import larger parts")
    return [*lines, "to train:", command]


def _parent(smallest: int, machine: str | None) -> tuple[str, str]:
    """The config to extend for volumes with a smallest side of `smallest` cells, and the reason."""
    # A login node may have no GPU.
    found = "a GPU" if torch.cuda.is_available() else next(filter(shutil.which, ("sbatch", "qsub")), None)
    if machine == "cpu":
        return SMALL, "of --for cpu"
    if not (machine or found):
        return SMALL, "neither a GPU nor sbatch or qsub was found; --for gpu writes one for a GPU"
    if smallest < CROPS[FAST]:
        return SMALL, f"crops of {FAST} have {CROPS[FAST]} cells per side, and a side has {smallest}"
    return FAST, "of --for gpu" if machine else f"{found} was found"
