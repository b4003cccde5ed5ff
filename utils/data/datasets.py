"""Classification data sets, read from their published files. A new one is a Dataset and a line in DATASETS."""

import gzip
import hashlib
import io
import pickle
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from utils.config.sections import DatasetConfig
from utils.data.plan import ShufflePlan
from utils.errors import UserError
from utils.lookup import lookup

DIGITS_TRAIN, DIGITS_SEED = 1437, 1797  # the split is the same for every run
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
# Reuters: Keras's newswire topics, word indices of 11,228 texts in 46 classes. Source: keras/src/datasets/reuters.py.
REUTERS_FILE, REUTERS_SEED, SEQUENCE_LENGTH = "reuters.npz", 113, 300
REUTERS_CHECKSUM = "sha256:d6586e694ee56d7a4e65172e12b3e987c03096cb01eab99753921ef915959916"
START, UNKNOWN = 1, 2  # 0 is padding
INDEX_FROM = 3  # added to the file's indices
TRAINING_PART = 1 - 0.2
# The names that numpy writes into a pickled array of objects.
ALLOWED = {"numpy.ndarray", "numpy.dtype", "numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"}


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
    for split, prefix in (("train", "train"), ("valid", "t10k")):
        images = _parse_idx(contents[f"{prefix}-images-idx3-ubyte"], axes=3)
        labels = _parse_idx(contents[f"{prefix}-labels-idx1-ubyte"], axes=1)
        splits[split] = ClassificationData(images[:, None], labels.astype(np.int64))
    return splits


def _parse_idx(data: bytes, axes: int) -> np.ndarray:
    """The array of a file. Source of the format: http://yann.lecun.com/exdb/mnist."""
    _, *shape = np.frombuffer(data, ">u4", count=1 + axes).tolist()  # the first word states type and number of axes
    return np.frombuffer(bytearray(data), np.uint8, offset=4 * (1 + axes)).reshape(shape)


def read_cifar(contents: Mapping[str, bytes]) -> dict[str, ClassificationData]:
    """Records of one byte for the label, then red, green, blue. Source: https://www.cs.toronto.edu/~kriz/cifar.html."""
    *train, valid = (contents[name] for name in CIFAR_CHECKSUMS)
    splits = {}
    for split, data in (("train", b"".join(train)), ("valid", valid)):
        records = np.frombuffer(bytearray(data), np.uint8).reshape(-1, 1 + int(np.prod(CIFAR_SHAPE)))
        images = np.ascontiguousarray(records[:, 1:]).reshape(-1, *CIFAR_SHAPE)
        splits[split] = ClassificationData(images, records[:, 0].astype(np.int64))
    return splits


class _StandIn:
    """Stands for all that numpy's pickles name. Of an array's state, it keeps the last item: the elements as a list."""

    def __init__(self, *_: Any) -> None:
        """Ignores types and shapes."""

    def __setstate__(self, state: Any) -> None:
        *_, self.items = state


class _Unpickler(pickle.Unpickler):
    """Unpickles numpy's arrays of objects without importing or calling anything that the pickle names.

    Source: Python's documentation, "Restricting Globals". numpy's own functions would not be safe: a crafted dtype
    turns the bytes of a pickle into pointers.
    """

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in ALLOWED:
            raise pickle.UnpicklingError(f"its pickle names {module}.{name}")
        return _StandIn


def read_reuters(contents: Mapping[str, bytes]) -> dict[str, ClassificationData]:
    """Returns exactly what Keras's `reuters.load_data()` and `pad_sequences(…, maxlen=300)` return."""
    with zipfile.ZipFile(io.BytesIO(contents[REUTERS_FILE])) as archive:
        labels = np.load(io.BytesIO(archive.read("y.npy")), allow_pickle=False).astype(np.int64)
        pickled = io.BytesIO(archive.read("x.npy"))
    np.lib.format.read_magic(pickled)
    np.lib.format.read_array_header_1_0(pickled)
    texts = _Unpickler(pickled, encoding="latin1").load().items
    inputs = _sequences([np.array(words, np.int64) for words in texts])
    # Keras's generator; numpy guarantees that the stream of RandomState does not change.
    order = np.arange(len(inputs))
    np.random.RandomState(REUTERS_SEED).shuffle(order)
    train = int(len(order) * TRAINING_PART)
    parts = {"train": order[:train], "valid": order[train:]}
    return {split: ClassificationData(inputs[rows], labels[rows]) for split, rows in parts.items()}


def _sequences(texts: list[np.ndarray]) -> np.ndarray:
    """Word indices [N, 300]: zeros if the text is short, the start mark, and the last words of the text."""
    # Keras takes the largest index for the number of words, so that this word becomes unknown.
    words = max((int(text.max()) + INDEX_FROM for text in texts if len(text)), default=START)
    inputs = np.zeros((len(texts), SEQUENCE_LENGTH), dtype=np.int64)
    for row, text in zip(inputs, texts, strict=True):
        sequence = np.append(START, text[-SEQUENCE_LENGTH:] + INDEX_FROM)[-SEQUENCE_LENGTH:]
        row[-len(sequence) :] = np.where(sequence < words, sequence, UNKNOWN)
    return inputs


MNIST = Dataset((1, 28, 28), 10, read_idx, MNIST_CHECKSUMS, scale=1 / 255)
DATASETS: dict[str, Dataset] = {
    "digits": Dataset((1, 8, 8), 10, read_digits, scale=1 / 16),
    "mnist": MNIST,
    "fashion_mnist": replace(MNIST, checksums=FASHION_MNIST_CHECKSUMS),
    "cifar10": Dataset(CIFAR_SHAPE, 10, read_cifar, CIFAR_CHECKSUMS, scale=1 / 255, archive="cifar-10-binary.tar.gz"),
    "reuters": Dataset((SEQUENCE_LENGTH,), 46, read_reuters, {REUTERS_FILE: REUTERS_CHECKSUM}, vocabulary=30982),
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
