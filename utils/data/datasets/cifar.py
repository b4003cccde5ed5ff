"""CIFAR-10 in its binary version. Source: https://www.cs.toronto.edu/~kriz/cifar.html."""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np

from utils.data.datasets.common import (
    DOWNLOAD_AGAIN,
    ClassificationData,
    Dataset,
    check_labels,
    find,
    read_file,
    reading,
)
from utils.errors import UserError

ARCHIVE = "cifar-10-binary.tar.gz"
FOLDER = "cifar-10-batches-bin"
FILES = {
    "train": [f"{FOLDER}/data_batch_{number}.bin" for number in range(1, 6)],
    "valid": [f"{FOLDER}/test_batch.bin"],
}
SHAPE = (3, 32, 32)
CLASSES = 10


def read(directory: Path) -> dict[str, ClassificationData]:
    """Reads images and labels from the archive, or from the folder that it unpacks to."""
    archive, names = directory / ARCHIVE, [*FILES["train"], *FILES["valid"]]
    if archive.is_file():
        where, contents = f"{archive}: ", _unpack(archive, names)
    else:
        where, contents = f"{directory}/", {name: read_file(find(directory, ARCHIVE, name)) for name in names}
    splits = {}
    for split, names in FILES.items():
        images, labels = zip(*(_parse(contents[name], f"{where}{name}") for name in names), strict=True)
        splits[split] = ClassificationData(np.concatenate(images), np.concatenate(labels))
    return splits


def _unpack(archive: Path, names: list[str]) -> dict[str, bytes]:
    contents = {}
    with reading(archive), tarfile.open(archive) as tar:
        members = {member.name: tar.extractfile(member) for member in tar if member.isreg()}
        for name in names:
            content = members.get(name)
            if content is None:
                raise UserError(f"{archive} does not contain {name}; {DOWNLOAD_AGAIN}")
            contents[name] = content.read()
    return contents


def _parse(data: bytes, file: str) -> tuple[np.ndarray, np.ndarray]:
    """Images [N, 3, 32, 32] and labels [N] of a file of records: one byte for the label, then red, green and blue."""
    length = 1 + int(np.prod(SHAPE))
    if len(data) % length:
        raise UserError(f"{file} has {len(data)} bytes, not a multiple of {length} bytes per record; {DOWNLOAD_AGAIN}")
    records = np.frombuffer(data, dtype=np.uint8).reshape(-1, length)
    check_labels(records[:, 0], len(records), CLASSES, file, file)
    return records[:, 1:].reshape(-1, *SHAPE), records[:, 0].astype(np.int64)


CIFAR10 = Dataset(
    SHAPE,
    CLASSES,
    {"train": 50000, "valid": 10000},
    read,
    {ARCHIVE: "md5:c32a1d4ab5d03f1284b67883e8d87530"},
    scale=1 / 255,
)
