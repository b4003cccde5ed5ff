"""CIFAR-10 in its binary version. Source: https://www.cs.toronto.edu/~kriz/cifar.html."""

import tarfile
from pathlib import Path

import numpy as np

from utils.data.datasets.common import ClassificationData, Dataset, find

ARCHIVE = "cifar-10-binary.tar.gz"
FILES = {"train": [f"data_batch_{number}.bin" for number in range(1, 6)], "valid": ["test_batch.bin"]}
SHAPE = (3, 32, 32)


def read(directory: Path) -> dict[str, ClassificationData]:
    contents: dict[str, bytes] = {}
    with tarfile.open(find(directory, ARCHIVE)) as archive:
        for member in archive:
            if member.isreg() and (file := archive.extractfile(member)):
                contents[Path(member.name).name] = file.read()
    return {split: _parse(b"".join(contents[name] for name in names)) for split, names in FILES.items()}


def _parse(data: bytes) -> ClassificationData:
    """Images [N, 3, 32, 32] and labels [N] of records: one byte for the label, then red, green and blue."""
    records = np.frombuffer(bytearray(data), np.uint8).reshape(-1, 1 + int(np.prod(SHAPE)))
    images = np.ascontiguousarray(records[:, 1:]).reshape(-1, *SHAPE)
    return ClassificationData(images, records[:, 0].astype(np.int64))


CIFAR10 = Dataset(
    SHAPE,
    10,
    {"train": 50000, "valid": 10000},
    read,
    {ARCHIVE: "md5:c32a1d4ab5d03f1284b67883e8d87530"},
    scale=1 / 255,
)
