"""The YAML file that the importer writes next to its volumes: a config that trains on them."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from utils.config.yaml_files import EXTENDS, dump
from utils.errors import os_errors_for_users
from utils.files import atomic_write
from utils.volumes.channels import vectors_of
from utils.volumes.hdf5 import DATASETS
from utils.volumes.opened import PATH_KEYS, box_entry, largest_crop, npy_keys

SHIPPED = "UNet.yaml"
CROPS = {"base": 64, "demo": 32}  # data_size of the configs to extend
HEADER = """\
# Trains on imported volumes: {command}
# The config begins with all keys of `{parent}`; to begin with those of another config, change the line `extends` in it.
"""


def write_config(path: Path, volumes: Mapping[Path, Sequence[int]], counts: Sequence[int]) -> list[str]:
    """Writes a config for volumes of these shapes, training first, unless the file exists; returns lines for the user.

    `counts` are the numbers of input and target channels. A file that exists may have been edited, and is kept.
    """
    first, last = next(iter(volumes)), list(volumes)[-1]
    command = f"python train.py --yaml_config {shlex.quote(str(path))}"
    if path.exists():
        return [f"kept {path}, which exists; to have it written for these volumes, remove it and import again", command]
    smallest = min(map(min, volumes.values()))
    parent = "base" if smallest >= CROPS["base"] and torch.cuda.is_available() else "demo"  # base has 117 M parameters
    largest, scales = largest_crop(smallest)
    crop = min(CROPS[parent], largest)
    inputs, targets = counts
    keys: dict[str, Any] = {
        EXTENDS: parent,
        **{key: str(file.resolve()).replace("$", "$$") for key, file in (("train_path", first), ("val_path", last))},
        **dict.fromkeys(npy_keys(*PATH_KEYS.values())),
        "box_size": [box_entry([volumes[file]]) for file in (first, last)],
        "N_in_channels": inputs,
        "N_out_channels": targets,
        "vector_channels": {"inputs": vectors_of(inputs), "targets": vectors_of(targets)},
        "dataset_names": list(DATASETS),
        "symmetries": "full",
        "expdir": "./runs",
    }
    if crop < CROPS[parent]:
        keys |= {"data_size": crop, "network": {"scales": scales}}
    text = HEADER.format(command=command, parent=parent) + dump({EXTENDS: SHIPPED, path.stem: keys})
    with os_errors_for_users(f"cannot write {path}"), atomic_write([path]) as (partial,):
        partial.write_text(text, encoding="utf-8")
    lines = [f"wrote {path}, a config that extends {parent}"]
    if parent == "demo" and smallest >= CROPS["base"]:
        lines.append("demo has a small network, as there is no GPU; with one, let the config extend base")
    if crop < CROPS[parent]:
        lines.append(f"warning: crops have {crop} cells per side, because a side has {smallest}; import larger parts")
    return [*lines, "to train:", command]
