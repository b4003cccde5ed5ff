"""Shared by all data sets: their description, and how their files are found."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from utils.errors import UserError


@dataclass(frozen=True)
class ClassificationData:
    """One split in memory: inputs, uint8 images [N, C, H, W] or int64 word indices [N, length]; int64 labels [N]."""

    inputs: np.ndarray
    labels: np.ndarray


@dataclass(frozen=True)
class Dataset:
    """A data set: the shape of one sample, the number of classes, and how to read the samples.

    `read(directory)` returns the splits 'train' and 'valid'. Images are multiplied by `scale` on the device.
    `checksums` maps the names of the published files to 'algorithm:digest'.
    """

    shape: tuple[int, ...]
    classes: int
    read: Callable[[Path], dict[str, ClassificationData]]
    checksums: Mapping[str, str] = field(default_factory=dict)
    vocabulary: int | None = None
    scale: float = 1.0


def find(directory: Path, *names: str) -> Path:
    """The first of the files that exists; raises UserError if none does."""
    for name in names:
        if (directory / name).is_file():
            return directory / name
    raise UserError(f"no {' or '.join(names)} in {directory}; set dataset.directory to the directory that has it")
