"""Data sets of images: scikit-learn's digits, MNIST and Fashion-MNIST (IDX files), CIFAR-10 (its binary version)."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from utils.data.datasets.common import ClassificationData, Dataset
from utils.data.plan import ShufflePlan
from utils.errors import UserError

DIGITS_TRAIN, DIGITS_SEED = 1437, 1797  # the split is the same for every run
IDX_PREFIXES = {"train": "train", "valid": "t10k"}
# Of the unpacked files.
MNIST_CHECKSUMS = {
    "train-images-idx3-ubyte": "md5:6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "md5:a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "md5:2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "md5:27ae3e4e09519cfbb04c329615203637",
}
FASHION_MNIST_CHECKSUMS = {
    "train-images-idx3-ubyte": "md5:f4a8712d7a061bf5bd6d2ca38dc4d50a",
    "train-labels-idx1-ubyte": "md5:9018921c3c673c538a1fc5bad174d6f9",
    "t10k-images-idx3-ubyte": "md5:8181f5470baa50b63fa0f6fddb340f0a",
    "t10k-labels-idx1-ubyte": "md5:15d484375f8d13e6eb1aabb0c3f46965",
}
CIFAR_CHECKSUMS = {
    "data_batch_1.bin": "md5:5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "md5:5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "md5:942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "md5:ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "md5:53f37980c15c3d472c316c40844f3f0d",
    "test_batch.bin": "md5:803d5f7f4d78ea53de84dbe85f74fb6d",
}
CIFAR_SHAPE = (3, 32, 32)


def read_digits(contents: Mapping[str, bytes]) -> dict[str, ClassificationData]:
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


def read_idx(contents: Mapping[str, bytes]) -> dict[str, ClassificationData]:
    splits = {}
    for split, prefix in IDX_PREFIXES.items():
        images = _parse_idx(contents[f"{prefix}-images-idx3-ubyte"], axes=3)
        labels = _parse_idx(contents[f"{prefix}-labels-idx1-ubyte"], axes=1)
        splits[split] = ClassificationData(images[:, None], labels.astype(np.int64))
    return splits


def _parse_idx(data: bytes, axes: int) -> np.ndarray:
    """The array of a file. Source of the format: http://yann.lecun.com/exdb/mnist."""
    _, *shape = np.frombuffer(data, ">u4", count=1 + axes).tolist()  # the first word states type and number of axes
    return np.frombuffer(bytearray(data), np.uint8, offset=4 * (1 + axes)).reshape(shape)


def read_cifar(contents: Mapping[str, bytes]) -> dict[str, ClassificationData]:
    *train, valid = (contents[name] for name in CIFAR_CHECKSUMS)
    return {"train": _parse_cifar(b"".join(train)), "valid": _parse_cifar(valid)}


def _parse_cifar(data: bytes) -> ClassificationData:
    """Records of one byte for the label, then red, green, blue. Source: https://www.cs.toronto.edu/~kriz/cifar.html."""
    records = np.frombuffer(bytearray(data), np.uint8).reshape(-1, 1 + int(np.prod(CIFAR_SHAPE)))
    images = np.ascontiguousarray(records[:, 1:]).reshape(-1, *CIFAR_SHAPE)
    return ClassificationData(images, records[:, 0].astype(np.int64))


DIGITS = Dataset((1, 8, 8), 10, read_digits, scale=1 / 16)
MNIST = Dataset((1, 28, 28), 10, read_idx, MNIST_CHECKSUMS, scale=1 / 255)
FASHION_MNIST = replace(MNIST, checksums=FASHION_MNIST_CHECKSUMS)
CIFAR10 = Dataset(CIFAR_SHAPE, 10, read_cifar, CIFAR_CHECKSUMS, scale=1 / 255, archive="cifar-10-binary.tar.gz")
