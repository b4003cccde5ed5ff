"""Shared by all data sets: their description, and the reading of published files with errors in one line."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import os
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from utils.errors import UserError, os_reason

DOWNLOAD_AGAIN = "download it again"
SKIP_VERIFICATION = "dataset.verify=false accepts other files of the same format"


@dataclass(frozen=True)
class ClassificationData:
    """One split in memory: inputs, uint8 images [N, C, H, W] or int64 word indices [N, length]; int64 labels [N]."""

    inputs: np.ndarray
    labels: np.ndarray


@dataclass(frozen=True)
class Dataset:
    """A data set: the shape of one sample, the number of samples per split, and how to read them.

    `read(directory)` returns the splits 'train' and 'valid'. Images are multiplied by `scale` on the device.
    `checksums` maps the names of the published files to 'algorithm:digest'.
    """

    shape: tuple[int, ...]
    classes: int
    samples: dict[str, int]
    read: Callable[[Path], dict[str, ClassificationData]]
    checksums: Mapping[str, str] = field(default_factory=dict)
    vocabulary: int | None = None
    scale: float = 1.0


def find(directory: Path, *names: str) -> Path:
    """The first of the files that exists; raises UserError if none does."""
    for name in names:
        if os.path.isfile(directory / name):
            return directory / name
    raise UserError(f"no {' or '.join(names)} in {directory}; set dataset.directory to the directory that has it")


def verify(path: Path, checksum: str) -> None:
    """Raises UserError unless the file has the digest in 'algorithm:digest'."""
    algorithm, _, expected = checksum.partition(":")
    digest = hashlib.new(algorithm, usedforsecurity=False)
    with reading(path), path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    if digest.hexdigest() != expected:
        raise UserError(
            f"{path} has {algorithm} {digest.hexdigest()}, the published file has {expected}; {DOWNLOAD_AGAIN}; "
            f"{SKIP_VERIFICATION}"
        )


def read_file(path: Path) -> bytes:
    """The file's content, unpacked if its name ends in .gz; raises UserError if it is damaged."""
    with reading(path), gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        return file.read()


def check_labels(labels: np.ndarray, samples: int, classes: int, file: str, samples_file: str) -> None:
    """Raises UserError unless there is one label per sample, from 0 to `classes` - 1."""
    if len(labels) != samples:
        raise UserError(f"{file} has {len(labels)} labels, {samples_file} has {samples} samples; download both again")
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(wrong):
        first = wrong[0]
        raise UserError(f"{file}: sample {first} has label {labels[first]}; labels are 0 to {classes - 1}")


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns the errors that libraries raise for a damaged file into a UserError."""
    try:
        yield
    except UserError:
        raise
    except (OSError, EOFError, ValueError, RuntimeError, zlib.error, tarfile.TarError, zipfile.BadZipFile) as error:
        reason = os_reason(error) if isinstance(error, OSError) else str(error) or type(error).__name__
        raise UserError(f"cannot read {path}: {reason}; {DOWNLOAD_AGAIN}") from None
