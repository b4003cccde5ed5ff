"""Data sets of images: scikit-learn's digits, MNIST and Fashion-MNIST (IDX files), CIFAR-10 (its binary version)."""

import gzip
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from utils.data.datasets.common import ClassificationData, Dataset, find
from utils.data.plan import ShufflePlan
from utils.errors import UserError

DIGITS_TRAIN, DIGITS_SEED = 1437, 1797  # the split is the same for every run
IDX_PREFIXES = {"train": "train", "valid": "t10k"}
# Source: torchvision/datasets/mnist.py, MNIST.resources and FashionMNIST.resources.
MNIST_CHECKSUMS = {
    "train-images-idx3-ubyte.gz": "md5:f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "md5:d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "md5:9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "md5:ec29112dd5afa0611ce80d1b7f02629c",
}
FASHION_MNIST_CHECKSUMS = {
    "train-images-idx3-ubyte.gz": "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "md5:25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "md5:bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "md5:bb300cfdad3c16e7a12a480ee83cd310",
}
CIFAR_ARCHIVE, CIFAR_CHECKSUM = "cifar-10-binary.tar.gz", "md5:c32a1d4ab5d03f1284b67883e8d87530"
CIFAR_FILES = {"train": [f"data_batch_{number}.bin" for number in range(1, 6)], "valid": ["test_batch.bin"]}
CIFAR_SHAPE = (3, 32, 32)


def read_digits(directory: Path) -> dict[str, ClassificationData]:
    """Images of 8 × 8 pixels with values 0 to 16; a fixed random fifth of them is the validation split."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UserError("data set digits needs scikit-learn; pip install scikit-learn") from None
    digits = load_digits()
    images, labels = digits.images.astype(np.uint8)[:, None], digits.target.astype(np.int64)
    order = ShufflePlan(len(labels), len(labels), DIGITS_SEED).epoch(0)
    parts = {"train": order[:DIGITS_TRAIN], "valid": order[DIGITS_TRAIN:]}
    return {split: ClassificationData(images[rows], labels[rows]) for split, rows in parts.items()}


def read_idx(directory: Path) -> dict[str, ClassificationData]:
    splits = {}
    for split, prefix in IDX_PREFIXES.items():
        images = _read_idx_file(directory, f"{prefix}-images-idx3-ubyte", axes=3)
        labels = _read_idx_file(directory, f"{prefix}-labels-idx1-ubyte", axes=1)
        splits[split] = ClassificationData(images[:, None], labels.astype(np.int64))
    return splits


def _read_idx_file(directory: Path, name: str, axes: int) -> np.ndarray:
    """The array of a file, packed by gzip or not. Source of the format: http://yann.lecun.com/exdb/mnist."""
    path = find(directory, f"{name}.gz", name)
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        data = file.read()
    _, *shape = np.frombuffer(data, ">u4", count=1 + axes).tolist()  # the first word states type and number of axes
    return np.frombuffer(bytearray(data), np.uint8, offset=4 * (1 + axes)).reshape(shape)


def read_cifar(directory: Path) -> dict[str, ClassificationData]:
    contents: dict[str, bytes] = {}
    with tarfile.open(find(directory, CIFAR_ARCHIVE)) as archive:
        for member in archive:
            if member.isreg() and (file := archive.extractfile(member)):
                contents[Path(member.name).name] = file.read()
    return {split: _parse_cifar(b"".join(contents[name] for name in names)) for split, names in CIFAR_FILES.items()}


def _parse_cifar(data: bytes) -> ClassificationData:
    """Records of one byte for the label, then red, green, blue. Source: https://www.cs.toronto.edu/~kriz/cifar.html."""
    records = np.frombuffer(bytearray(data), np.uint8).reshape(-1, 1 + int(np.prod(CIFAR_SHAPE)))
    images = np.ascontiguousarray(records[:, 1:]).reshape(-1, *CIFAR_SHAPE)
    return ClassificationData(images, records[:, 0].astype(np.int64))


DIGITS = Dataset((1, 8, 8), 10, read_digits, scale=1 / 16)
MNIST = Dataset((1, 28, 28), 10, read_idx, MNIST_CHECKSUMS, scale=1 / 255)
FASHION_MNIST = replace(MNIST, checksums=FASHION_MNIST_CHECKSUMS)
CIFAR10 = Dataset(CIFAR_SHAPE, 10, read_cifar, {CIFAR_ARCHIVE: CIFAR_CHECKSUM}, scale=1 / 255)
