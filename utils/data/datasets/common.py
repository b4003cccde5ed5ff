"""Shared by all data sets: their description, and how their files are found."""

import gzip
import tarfile
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

    `read(contents)` returns the splits 'train' and 'valid'. Images are multiplied by `scale` on the device.
    `checksums` maps the names of the files, which may be in `archive`, to 'algorithm:digest' of the unpacked content.
    """

    shape: tuple[int, ...]
    classes: int
    read: Callable[[Mapping[str, bytes]], dict[str, ClassificationData]]
    checksums: Mapping[str, str] = field(default_factory=dict)
    vocabulary: int | None = None
    scale: float = 1.0
    archive: str | None = None

    def unpack(self, directory: Path) -> dict[str, bytes]:
        """The contents of the files, each packed by gzip or not, or all in the archive."""
        if self.archive:
            with tarfile.open(find(directory, self.archive)) as tar:
                files = ((Path(member.name).name, tar.extractfile(member)) for member in tar if member.isreg())
                contents = {name: file.read() for name, file in files if file}
            return {name: contents[name] for name in self.checksums}
        paths = {name: find(directory, name, f"{name}.gz") for name in self.checksums}
        packed = {name: path.read_bytes() for name, path in paths.items()}
        return {name: gzip.decompress(data) if paths[name].suffix == ".gz" else data for name, data in packed.items()}


def find(directory: Path, *names: str) -> Path:
    """The first of the files that exists; raises UserError if none does."""
    for name in names:
        if (directory / name).is_file():
            return directory / name
    raise UserError(f"no {' or '.join(names)} in {directory}; set dataset.directory to the directory that has it")
