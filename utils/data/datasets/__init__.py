"""Classification data sets, read from their published files into arrays. A new one is a module and a line in DATASETS.

Nothing in a file is executed: the pickle in Keras's `reuters.npz` is read as data.
"""

from __future__ import annotations

from pathlib import Path

from utils.data.datasets.cifar import CIFAR10
from utils.data.datasets.common import SKIP_VERIFICATION, ClassificationData, Dataset, verify
from utils.data.datasets.digits import DIGITS
from utils.data.datasets.idx import FASHION_MNIST, MNIST
from utils.data.datasets.reuters import REUTERS
from utils.errors import UserError

__all__ = ["DATASETS", "ClassificationData", "Dataset", "get_dataset", "open_dataset"]

DATASETS: dict[str, Dataset] = {
    "digits": DIGITS,
    "mnist": MNIST,
    "fashion_mnist": FASHION_MNIST,
    "cifar10": CIFAR10,
    "reuters": REUTERS,
}


def get_dataset(name: str) -> Dataset:
    """Returns the data set `name`; raises UserError if it is unknown."""
    if name not in DATASETS:
        raise UserError(f"unknown data set {name}; known: {', '.join(DATASETS)}; choose one with dataset.name")
    return DATASETS[name]


def open_dataset(name: str, directory: str, verified: bool) -> dict[str, ClassificationData]:
    """Reads both splits, 'train' and 'valid'; raises UserError if a file is missing or damaged.

    If `verified`, the published files are required: their checksums and the numbers of samples must match.
    """
    dataset, folder = get_dataset(name), Path(directory)
    if verified:
        for file, checksum in dataset.checksums.items():
            if (folder / file).is_file():
                verify(folder / file, checksum)
    splits = dataset.read(folder)
    for split, data in splits.items():
        assert data.inputs.shape == (len(data.labels), *dataset.shape)
        if verified and len(data.labels) != dataset.samples[split]:
            raise UserError(
                f"{directory}: {len(data.labels)} {split} samples, {name} has {dataset.samples[split]}; "
                f"{SKIP_VERIFICATION}"
            )
        if len(data.labels) == 0:
            raise UserError(f"{directory}: no {split} samples; set dataset.directory to the directory of {name}")
    return splits
