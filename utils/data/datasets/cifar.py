"""CIFAR-10 in its binary version. Source: https://www.cs.toronto.edu/~kriz/cifar.html."""

from __future__ import annotations

import gzip
import os
import tarfile
from pathlib import Path
from typing import IO, cast

import numpy as np

from utils.data.datasets import common
from utils.data.datasets.common import (
    DOWNLOAD_AGAIN,
    ClassificationData,
    Dataset,
    check_labels,
    find,
    read_exactly,
    reading,
    too_large,
)
from utils.errors import UserError

ARCHIVE = "cifar-10-binary.tar.gz"
FOLDER = "cifar-10-batches-bin"
FILES = {"train": [f"data_batch_{number}.bin" for number in range(1, 6)], "valid": ["test_batch.bin"]}
SHAPE = (3, 32, 32)
CLASSES = 10
Records = tuple[np.ndarray, np.ndarray]  # images [N, 3, 32, 32] and labels [N] of one file


def read(directory: Path) -> dict[str, ClassificationData]:
    """Reads images and labels from the archive, or from the folder that it unpacks to."""
    archive = directory / ARCHIVE
    files = _read_archive(archive) if os.path.isfile(archive) else _read_folder(directory)
    splits = {}
    for split, names in FILES.items():
        inputs, labels = (np.concatenate(arrays) for arrays in zip(*(files[name] for name in names), strict=True))
        splits[split] = ClassificationData(inputs, labels)
    return splits


def _read_archive(archive: Path) -> dict[str, Records]:
    members = {f"{FOLDER}/{name}": name for names in FILES.values() for name in names}
    files = {}
    with reading(archive), gzip.open(archive) as unpacked:
        stream = _BoundedStream(cast(IO[bytes], unpacked), archive)
        with tarfile.open(fileobj=stream, mode="r|") as tar:  # type: ignore[call-overload]
            for member in tar:
                if member.isreg() and not member.issparse() and member.name in members:
                    content = tar.extractfile(member)
                    assert content is not None
                    file = f"{archive}: {member.name}"
                    files[members[member.name]] = _parse(read_exactly(content, member.size, file), file)
        while stream.read(2**20):
            pass  # gzip's checksum comes last
    for member_name, name in members.items():
        if name not in files:
            raise UserError(f"{archive} does not contain {member_name}; {DOWNLOAD_AGAIN}")
    return files


def _read_folder(directory: Path) -> dict[str, Records]:
    files = {}
    for name in [*FILES["train"], *FILES["valid"]]:
        path = find(directory, ARCHIVE, f"{FOLDER}/{name}")
        with reading(path), path.open("rb") as file:
            files[name] = _parse(read_exactly(file, path.stat().st_size, path), str(path))
    return files


def _parse(data: bytes, file: str) -> Records:
    """Images and labels of a file of records: one byte for the label, then red, green and blue."""
    length = 1 + int(np.prod(SHAPE))
    if len(data) % length:
        raise UserError(f"{file} has {len(data)} bytes, not a multiple of {length} bytes per record; {DOWNLOAD_AGAIN}")
    records = np.frombuffer(data, dtype=np.uint8).reshape(-1, length)
    check_labels(records[:, 0], len(records), CLASSES, file, file)
    return records[:, 1:].reshape(-1, *SHAPE), records[:, 0].astype(np.int64)


class _BoundedStream:
    """An unpacked stream that raises UserError after LARGEST_BYTES."""

    def __init__(self, stream: IO[bytes], path: Path) -> None:
        self._stream, self._path = stream, path
        self._left = common.LARGEST_BYTES

    def read(self, size: int) -> bytes:
        data = self._stream.read(size)
        self._left -= len(data)
        if self._left < 0:
            raise too_large(self._path)
        return data


CIFAR10 = Dataset(
    SHAPE,
    CLASSES,
    {"train": 50000, "valid": 10000},
    read,
    {ARCHIVE: "md5:c32a1d4ab5d03f1284b67883e8d87530"},
    scale=1 / 255,
)
