"""MNIST and Fashion-MNIST: IDX files, packed by gzip or not. Source of the format: http://yann.lecun.com/exdb/mnist."""

import gzip
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from utils.data.datasets.common import ClassificationData, Dataset, find

IMAGE_SIDE = 28
PREFIXES = {"train": "train", "valid": "t10k"}
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


def read(directory: Path) -> dict[str, ClassificationData]:
    splits = {}
    for split, prefix in PREFIXES.items():
        images = _read_file(directory, f"{prefix}-images-idx3-ubyte", axes=3)
        labels = _read_file(directory, f"{prefix}-labels-idx1-ubyte", axes=1)
        splits[split] = ClassificationData(images[:, None], labels.astype(np.int64))
    return splits


def _read_file(directory: Path, name: str, axes: int) -> np.ndarray:
    path = find(directory, f"{name}.gz", name)
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        data = file.read()
    _, *shape = np.frombuffer(data, ">u4", count=1 + axes).tolist()  # the first word states type and number of axes
    return np.frombuffer(bytearray(data), np.uint8, offset=4 * (1 + axes)).reshape(shape)


def _dataset(checksums: Mapping[str, str]) -> Dataset:
    counts = {"train": 60000, "valid": 10000}
    return Dataset((1, IMAGE_SIDE, IMAGE_SIDE), 10, counts, read, checksums, scale=1 / 255)


MNIST, FASHION_MNIST = _dataset(MNIST_CHECKSUMS), _dataset(FASHION_MNIST_CHECKSUMS)
