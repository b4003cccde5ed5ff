"""Classification data sets, read from their published files. A new one is a Dataset and a line in DATASETS."""

import gzip
import hashlib
import tarfile
import zlib
from pathlib import Path

from utils.config.sections import DatasetConfig
from utils.data.datasets.common import ClassificationData, Dataset
from utils.data.datasets.images import CIFAR10, DIGITS, FASHION_MNIST, MNIST
from utils.data.datasets.reuters import REUTERS
from utils.errors import UserError
from utils.lookup import lookup

__all__ = ["DATASETS", "ClassificationData", "Dataset", "get_dataset", "open_dataset"]

DATASETS: dict[str, Dataset] = {
    "digits": DIGITS,
    "mnist": MNIST,
    "fashion_mnist": FASHION_MNIST,
    "cifar10": CIFAR10,
    "reuters": REUTERS,
}


def get_dataset(name: str) -> Dataset:
    return lookup(DATASETS, "dataset.name", name)


def open_dataset(options: DatasetConfig) -> tuple[Dataset, dict[str, ClassificationData]]:
    """A data set and its splits 'train' and 'valid'; UserError if a file is missing or not the published one."""
    dataset, folder = get_dataset(str(options.name)), Path(options.directory)
    try:
        contents = dataset.unpack(folder)
    except (EOFError, KeyError, gzip.BadGzipFile, tarfile.TarError, zlib.error) as error:
        raise UserError(f"cannot unpack the files in {folder}: {error}; download them again") from error
    for file, checksum in dataset.checksums.items() if options.verify else ():
        algorithm, _, expected = checksum.partition(":")
        digest = hashlib.new(algorithm, contents[file], usedforsecurity=False).hexdigest()
        if digest != expected:
            fault = f"{file} in {folder} has {algorithm} {digest}, the published content has {expected}"
            raise UserError(f"{fault}; download it again; dataset.verify=false accepts other files of the same format")
    return dataset, dataset.read(contents)
