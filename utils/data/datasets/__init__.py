"""Labelled data sets: each is read from its published files into arrays, and checked. A new one is a line in DATASETS.

Nothing in a file is ever carried out: the pickle in Keras's `reuters.npz` is read as data.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
import io
import os
import pickletools
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import numpy as np

from utils.data.plan import ShufflePlan
from utils.errors import UserError

# Five times the largest file of them all, unpacked: what declares more is damaged, or made to fill the memory.
LARGEST_BYTES = 2**30
AGAIN = "download it again"
OTHER_FILES = "dataset.verify=false accepts other files of the same format"


@dataclass(frozen=True)
class Labelled:
    """One split in memory: inputs, uint8 images [N, C, H, W] or int64 word indices [N, length]; int64 labels [N]."""

    inputs: np.ndarray
    labels: np.ndarray


@dataclass(frozen=True)
class Dataset:
    """A data set: what one sample is, how many there are, and how to read them.

    `read(directory, verify)` returns the splits 'train' and 'valid'; images are multiplied by `scale` on the device.
    """

    shape: tuple[int, ...]
    classes: int
    samples: dict[str, int]
    files: tuple[str, ...]
    read: Callable[[Path, bool], dict[str, Labelled]]
    vocabulary: int | None = None
    scale: float = 1.0


def find_dataset(name: str) -> Dataset:
    """The data set `name`; UserError where there is no such."""
    if name not in DATASETS:
        raise UserError(f"unknown data set {name}; known: {', '.join(DATASETS)}; choose one with dataset.name")
    return DATASETS[name]


def open_dataset(name: str, directory: str, verify: bool) -> dict[str, Labelled]:
    """Both splits, 'train' and 'valid', checked; UserError with one line where a file is not what it should be.

    With `verify` the files must be the published ones, by checksum, or, where none is published, number of samples.
    """
    dataset = find_dataset(name)
    splits = dataset.read(Path(directory), verify)
    for split, data in splits.items():
        assert data.inputs.shape == (len(data.labels), *dataset.shape)
        if verify and len(data.labels) != dataset.samples[split]:
            raise UserError(
                f"{directory}: {len(data.labels)} {split} samples, {name} has {dataset.samples[split]}; {OTHER_FILES}"
            )
        if len(data.labels) == 0:
            raise UserError(f"{directory}: no {split} samples; dataset.directory says where {name} lies")
    return splits


# --- digits --------------------------------------------------------------------------------------------------------

CLASSES = 10  # of every data set of images
DIGITS = {"train": 1437, "valid": 360}
DIGITS_SEED = 1797  # of the split, which is the same for every run


def _read_digits(directory: Path, verify: bool) -> dict[str, Labelled]:
    """Images of 8 × 8 pixels, 0 to 16, from scikit-learn; one in five, drawn once and for all, is for validation."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UserError("data set digits comes with scikit-learn, which is missing; pip install scikit-learn") from None
    digits = load_digits()
    images, labels = digits.images.astype(np.uint8)[:, None], digits.target.astype(np.int64)
    order = ShufflePlan(len(labels), len(labels), DIGITS_SEED).epoch(0)
    parts = {"train": order[: DIGITS["train"]], "valid": order[DIGITS["train"] :]}
    return {split: Labelled(images[rows], labels[rows]) for split, rows in parts.items()}


# --- MNIST and Fashion-MNIST ---------------------------------------------------------------------------------------

IMAGE_SIDE = 28
IDX_UNSIGNED_BYTES = 0x0800  # plus the number of axes: the number that an IDX file begins with
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


def _read_idx(checksums: Mapping[str, str], directory: Path, verify: bool) -> dict[str, Labelled]:
    """Images and labels from IDX files, packed by gzip or not."""
    splits = {}
    for split, prefix in IDX_PREFIXES.items():
        side = IMAGE_SIDE
        image_path, images = _idx(directory, f"{prefix}-images-idx3-ubyte", (side, side), checksums, verify)
        label_path, labels = _idx(directory, f"{prefix}-labels-idx1-ubyte", (), checksums, verify)
        _check_labels(labels, len(images), CLASSES, str(label_path), str(image_path))
        splits[split] = Labelled(images[:, None].copy(), labels.astype(np.int64))
    return splits


def _idx(
    directory: Path, name: str, shape: tuple[int, ...], checksums: Mapping[str, str], verify: bool
) -> tuple[Path, np.ndarray]:
    """The file's path, and its bytes [N, *shape]. Source of the format: http://yann.lecun.com/exdb/mnist."""
    path = _find(directory, f"{name}.gz", name)
    if verify and path.suffix == ".gz":
        _verify(path, checksums[path.name])
    with _reading(path), _opened(path) as stream:
        axes = 1 + len(shape)
        header = stream.read(4 * (1 + axes))
        if header[:4] != struct.pack(">I", IDX_UNSIGNED_BYTES + axes):
            raise UserError(f"{path}: not an IDX file of {axes} axes; {AGAIN}")
        if len(header) < 4 * (1 + axes):
            raise UserError(f"{path}: the file is truncated; {AGAIN}")
        count, *sizes = struct.unpack(f">{axes}I", header[4:])
        if tuple(sizes) != shape:
            raise UserError(f"{path}: images of {_times(sizes)} pixels, expected {_times(shape)}; {AGAIN}")
        data = _read_all(stream, count * int(np.prod(shape)), path)
    return path, np.frombuffer(data, dtype=np.uint8).reshape(count, *shape)


def _opened(path: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path) if path.suffix == ".gz" else path.open("rb"))


def _times(sizes: tuple[int, ...] | list[int]) -> str:
    return " × ".join(str(size) for size in sizes)


# --- CIFAR-10 ------------------------------------------------------------------------------------------------------

CIFAR10_ARCHIVE = "cifar-10-binary.tar.gz"
CIFAR10_FOLDER = "cifar-10-batches-bin"
CIFAR10_FILES = {"train": [f"data_batch_{number}.bin" for number in range(1, 6)], "valid": ["test_batch.bin"]}
CIFAR10_SHAPE = (3, 32, 32)
CIFAR10_CHECKSUM = "md5:c32a1d4ab5d03f1284b67883e8d87530"  # source: https://www.cs.toronto.edu/~kriz/cifar.html


def _read_cifar10(checksum: str, directory: Path, verify: bool) -> dict[str, Labelled]:
    """Images and labels from the archive, or from what it unpacks to."""
    archive = directory / CIFAR10_ARCHIVE
    if os.path.isfile(archive):
        if verify:
            _verify(archive, checksum)
        files = _from_archive(archive)
    else:
        files = _from_folder(directory)
    splits = {}
    for split, names in CIFAR10_FILES.items():
        parts = [files[name] for name in names]
        inputs, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        splits[split] = Labelled(inputs, labels)
    return splits


def _from_archive(archive: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    members = {f"{CIFAR10_FOLDER}/{name}": name for names in CIFAR10_FILES.values() for name in names}
    files = {}
    with _reading(archive), _opened(archive) as packed:
        stream = _Bounded(packed, archive)
        with tarfile.open(fileobj=stream, mode="r|") as unpacked:  # type: ignore[call-overload]
            for member in unpacked:
                if member.isreg() and not member.issparse() and member.name in members:
                    content = unpacked.extractfile(member)
                    assert content is not None
                    file = f"{archive}: {member.name}"
                    files[members[member.name]] = _records(_read_all(content, member.size, file), file)
        while stream.read(2**20):
            pass  # gzip's checksum comes last
    for member_name, name in members.items():
        if name not in files:
            raise UserError(f"{archive} holds no {member_name}; {AGAIN}")
    return files


def _from_folder(directory: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    files = {}
    for names in CIFAR10_FILES.values():
        for name in names:
            path = _find(directory, CIFAR10_ARCHIVE, f"{CIFAR10_FOLDER}/{name}")
            with _reading(path), path.open("rb") as file:
                files[name] = _records(_read_all(file, path.stat().st_size, path), str(path))
    return files


def _records(data: bytes, file: str) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of a file of records: a byte for the label, then red, green and blue."""
    length = 1 + int(np.prod(CIFAR10_SHAPE))
    if len(data) % length:
        raise UserError(f"{file} has {len(data)} bytes, no multiple of {length}, a record's; {AGAIN}")
    records = np.frombuffer(data, dtype=np.uint8).reshape(-1, length)
    _check_labels(records[:, 0], len(records), CLASSES, file, file)
    return records[:, 1:].reshape(-1, *CIFAR10_SHAPE), records[:, 0].astype(np.int64)


# --- Reuters -------------------------------------------------------------------------------------------------------

REUTERS_FILE = "reuters.npz"
# Source: keras/src/datasets/reuters.py, as of all that is Keras's below.
REUTERS_CHECKSUM = "sha256:d6586e694ee56d7a4e65172e12b3e987c03096cb01eab99753921ef915959916"
TOPICS = 46
VOCABULARY = 30982
SEQUENCE_LENGTH = 300
KERAS_SEED = 113
START, UNKNOWN = 1, 2  # 0 is padding
INDEX_FROM = 3  # added to the file's indices
TRAINING_PART = 1 - 0.2


def _read_reuters(checksum: str, directory: Path, verify: bool) -> dict[str, Labelled]:
    """What Keras's `reuters.load_data()` and `pad_sequences(…, maxlen=300)` return, to the bit."""
    path = _find(directory, REUTERS_FILE)
    if verify:
        _verify(path, checksum)
    with _reading(path), zipfile.ZipFile(path) as archive:
        labels = _labels(_member(archive, "y.npy", path), path)
        texts = _texts(_member(archive, "x.npy", path), path)
    _check_labels(labels, len(texts), TOPICS, f"{path}: y", f"{path}: x")
    inputs = _sequences(texts, path)
    # Keras's generator; numpy keeps its stream as it is for all time.
    order = np.arange(len(texts))
    np.random.RandomState(KERAS_SEED).shuffle(order)
    train = int(len(order) * TRAINING_PART)
    parts = {"train": order[:train], "valid": order[train:]}
    return {split: Labelled(inputs[rows], labels[rows].astype(np.int64)) for split, rows in parts.items()}


def _sequences(texts: list[np.ndarray], path: Path) -> np.ndarray:
    """Word indices [N, 300]: the last ones of each text, behind the start mark and, where it is short, zeros."""
    # Keras takes the largest index of all for the number of words, so that this one word becomes unknown.
    words = max((int(text.max()) + INDEX_FROM for text in texts if len(text)), default=START)
    inputs = np.zeros((len(texts), SEQUENCE_LENGTH), dtype=np.int64)
    for row, text in zip(inputs, texts, strict=True):
        sequence = np.append(START, text[-SEQUENCE_LENGTH:] + INDEX_FROM)[-SEQUENCE_LENGTH:]
        row[-len(sequence) :] = np.where(sequence < words, sequence, UNKNOWN)
    beyond = np.argwhere(inputs >= VOCABULARY)
    if len(beyond):
        sample, place = beyond[0]
        raise UserError(
            f"{path}: sample {sample} has word index {inputs[sample, place]}; they are 0 to {VOCABULARY - 1}; "
            "use Keras's reuters.npz"
        )
    return inputs


def _labels(array: _Array, path: Path) -> np.ndarray:
    if array.dtype.kind not in "iu" or len(array.shape) != 1:
        raise UserError(f"{path}: y is {array.dtype} of shape {array.shape}, expected integers (N,); {AGAIN}")
    if len(array.data) != array.shape[0] * array.dtype.itemsize:
        raise UserError(f"{path}: y.npy is not as long as it says; {AGAIN}")
    return np.frombuffer(array.data, dtype=array.dtype)


def _texts(array: _Array, path: Path) -> list[np.ndarray]:
    """Each text's word indices, int64, from a pickled array of lists."""
    if array.dtype.kind != "O" or len(array.shape) != 1:
        raise UserError(f"{path}: x is {array.dtype} of shape {array.shape}, expected lists (N,); {AGAIN}")
    try:
        lists = _unpickled_objects(array.data)
    except ValueError as error:
        raise UserError(f"{path}: x is no array of lists of integers: {error}; use Keras's reuters.npz") from None
    if len(lists) != array.shape[0]:
        raise UserError(f"{path}: x holds {len(lists)} texts where it says {array.shape[0]}; use Keras's reuters.npz")
    texts = []
    space = LARGEST_BYTES // 8  # a few bytes of pickle can name one long list again and again
    for number, words in enumerate(lists):
        if type(words) is not list or not {int}.issuperset(map(type, words)):
            raise UserError(f"{path}: sample {number} is no list of integers; use Keras's reuters.npz")
        if words and not 0 <= min(words) <= max(words) < 2**31:
            raise UserError(f"{path}: sample {number} has a word index that is none; use Keras's reuters.npz")
        space -= max(len(words), SEQUENCE_LENGTH)
        if space < 0:
            raise _too_large(path)
        texts.append(np.array(words, dtype=np.int64))
    return texts


class _Array(NamedTuple):
    """A `.npy` file: what its header says, and what follows."""

    shape: tuple[int, ...]
    dtype: np.dtype
    data: bytes


def _member(archive: zipfile.ZipFile, name: str, path: Path) -> _Array:
    if name not in archive.namelist():
        raise UserError(f"{path} holds no {name}; it holds {', '.join(archive.namelist()[:5]) or 'nothing'}")
    member = archive.getinfo(name)
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise UserError(f"{path}: {name} is not packed as numpy does; {AGAIN}")
    with archive.open(member) as stream:
        content = io.BytesIO(_read_all(stream, member.file_size, f"{path}: {name}"))
    version = np.lib.format.read_magic(content)
    if version == (1, 0):
        shape, _, dtype = np.lib.format.read_array_header_1_0(content)
    elif version == (2, 0):
        shape, _, dtype = np.lib.format.read_array_header_2_0(content)
    else:
        raise UserError(f"{path}: {name} has npy format {version}, expected 1.0 or 2.0; {AGAIN}")
    return _Array(shape, dtype, content.read())


# --- a pickle, read as data ----------------------------------------------------------------------------------------

# What puts its argument onto the stack.
VALUES = {"BININT", "BININT1", "BININT2", "LONG1", "LONG4"}
VALUES |= {"BINUNICODE", "SHORT_BINUNICODE", "BINBYTES", "SHORT_BINBYTES", "BINSTRING", "SHORT_BINSTRING"}
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
SHORT_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


@dataclass(frozen=True)
class _Global:
    """What a pickle would have imported: here a name, and no more."""

    name: str


@dataclass
class _ObjectArray:
    """An array of objects that the pickle builds."""

    items: list[Any] | None = None


@dataclass(frozen=True)
class _ObjectType:
    """The type of its elements."""


def _unpickled_objects(data: bytes) -> list[Any]:
    """The elements of a pickled array of objects [N]: lists, tuples, integers and strings.

    ValueError where the pickle holds anything else; nothing that it names is imported or called.
    """
    try:
        result = _interpreted(data)
    except (IndexError, KeyError, TypeError, AttributeError):
        raise ValueError("its pickle is malformed") from None
    if not isinstance(result, _ObjectArray) or result.items is None:
        raise ValueError(f"it pickles a {type(result).__name__}")
    return result.items


def _interpreted(data: bytes) -> Any:
    """What a pickle of protocol 2 to 5 leaves on the stack. Source of the opcodes: Python's pickletools."""
    stack: list[Any] = []
    below: list[list[Any]] = []  # the stacks before each mark
    memo: dict[int, Any] = {}
    argument: Any
    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        if name in VALUES:
            stack.append(argument)
        elif name in CONSTANTS:
            stack.append(CONSTANTS[name])
        elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            memo[len(memo) if argument is None else argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name == "EMPTY_LIST":
            stack.append([])
        elif name == "EMPTY_TUPLE":
            stack.append(())
        elif name == "MARK":
            below.append(stack)
            stack = []
        elif name == "APPENDS":
            marked, stack = stack, below.pop()
            stack[-1].extend(marked)
        elif name == "APPEND":
            last = stack.pop()
            stack[-1].append(last)
        elif name == "TUPLE":
            marked, stack = stack, below.pop()
            stack.append(tuple(marked))
        elif name in SHORT_TUPLES:
            marked = [stack.pop() for _ in range(SHORT_TUPLES[name])]
            stack.append(tuple(marked[::-1]))
        elif name == "GLOBAL":
            stack.append(_Global(argument))
        elif name == "STACK_GLOBAL":
            last = stack.pop()
            stack.append(_Global(f"{stack.pop()} {last}"))
        elif name == "REDUCE":
            last = stack.pop()
            stack.append(_reduced(stack.pop(), last))
        elif name == "BUILD":
            last = stack.pop()
            _build(stack[-1], last)
        elif name == "STOP":
            return stack.pop()
        elif name not in ("PROTO", "FRAME"):
            raise ValueError(f"its pickle has the instruction {name}")
    raise ValueError("its pickle has no end")


def _reduced(function: Any, arguments: Any) -> Any:
    """Stands for the calls that numpy's pickles of object arrays consist of; there are no others."""
    match function, arguments:
        case (
            _Global("numpy.core.multiarray _reconstruct" | "numpy._core.multiarray _reconstruct"),
            (_Global("numpy ndarray"), (0,), "b" | b"b"),
        ):
            return _ObjectArray()
        case _Global("numpy dtype"), ("O" | "O8", *_):
            return _ObjectType()
        case _Global("_codecs encode"), (str(text), "latin1"):  # bytes, which protocol 2 has no instruction for
            return text.encode("latin1")
        case _Global(name), _:
            raise ValueError(f"its pickle calls {name.replace(' ', '.')}")
    raise ValueError("its pickle calls what is no function")


def _build(target: Any, state: Any) -> None:
    match target, state:
        case _ObjectArray(), (1, (int(count),), _ObjectType(), _, list(items)) if len(items) == count:
            target.items = items
        case _ObjectType(), (_, "|" | b"|", *_):
            pass
        case _:
            raise ValueError(f"its pickle builds a {type(target).__name__} of another kind")


# --- what they have in common --------------------------------------------------------------------------------------


class _Bounded:
    """A packed stream that gives no more than LARGEST_BYTES."""

    def __init__(self, stream: IO[bytes], path: Path) -> None:
        self._stream, self._path = stream, path
        self._left = LARGEST_BYTES

    def read(self, size: int) -> bytes:
        data = self._stream.read(size)
        self._left -= len(data)
        if self._left < 0:
            raise _too_large(self._path)
        return data


def _read_all(stream: IO[bytes], size: int, file: Path | str) -> bytes:
    """The stream's bytes, which must be `size`; never are more than one beyond them unpacked."""
    if size > LARGEST_BYTES:
        raise _too_large(file)
    data = stream.read(size)
    if len(data) < size:
        raise UserError(f"{file} is truncated: {len(data)} bytes of {size}; {AGAIN}")
    if stream.read(1):
        raise UserError(f"{file} goes on after its {size} bytes; {AGAIN}")
    return data


def _too_large(file: Path | str) -> UserError:
    return UserError(f"{file} unpacks to more than {LARGEST_BYTES} bytes, and no data set does; {AGAIN}")


def _find(directory: Path, *names: str) -> Path:
    """The first of the files that is there."""
    for name in names:
        if os.path.isfile(directory / name):
            return directory / name
    raise UserError(f"no {' or '.join(names)} in {directory}; dataset.directory says where it lies")


def _verify(path: Path, checksum: str) -> None:
    """UserError if the file's digest is not the one in 'algorithm:digest'."""
    algorithm, _, expected = checksum.partition(":")
    digest = hashlib.new(algorithm, usedforsecurity=False)
    with _reading(path), path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    if digest.hexdigest() != expected:
        raise UserError(
            f"{path} has {algorithm} {digest.hexdigest()}, the published file {expected}; {AGAIN}; {OTHER_FILES}"
        )


def _check_labels(labels: np.ndarray, samples: int, classes: int, file: str, samples_file: str) -> None:
    if len(labels) != samples:
        raise UserError(f"{file} has {len(labels)} labels, {samples_file} {samples} samples; download both again")
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(wrong):
        first = wrong[0]
        raise UserError(f"{file}: sample {first} has label {labels[first]}; they are 0 to {classes - 1}")


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turns what the libraries raise at a damaged file into a UserError."""
    try:
        yield
    except UserError:
        raise
    except (OSError, EOFError, ValueError, RuntimeError, zlib.error, tarfile.TarError, zipfile.BadZipFile) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
        raise UserError(f"cannot read {path}: {reason}; {AGAIN}") from None


def _of_idx_files(checksums: Mapping[str, str]) -> Dataset:
    counts = {"train": 60000, "valid": 10000}
    read = functools.partial(_read_idx, checksums)
    return Dataset((1, IMAGE_SIDE, IMAGE_SIDE), CLASSES, counts, tuple(checksums), read, scale=1 / 255)


DATASETS: dict[str, Dataset] = {
    "digits": Dataset((1, 8, 8), CLASSES, DIGITS, (), _read_digits, scale=1 / 16),
    "mnist": _of_idx_files(MNIST_CHECKSUMS),
    "fashion_mnist": _of_idx_files(FASHION_MNIST_CHECKSUMS),
    "cifar10": Dataset(
        CIFAR10_SHAPE,
        CLASSES,
        {"train": 50000, "valid": 10000},
        (CIFAR10_ARCHIVE,),
        functools.partial(_read_cifar10, CIFAR10_CHECKSUM),
        scale=1 / 255,
    ),
    "reuters": Dataset(
        (SEQUENCE_LENGTH,),
        TOPICS,
        {"train": 8982, "valid": 2246},
        (REUTERS_FILE,),
        functools.partial(_read_reuters, REUTERS_CHECKSUM),
        vocabulary=VOCABULARY,
    ),
}
