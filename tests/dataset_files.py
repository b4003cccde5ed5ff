"""Small files in the formats of the published data sets, and the arrays expected from them."""

import gzip
import io
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from utils.data.datasets import DATASETS

COUNTS = {"train": 15, "valid": 7}
Arrays = dict[str, tuple[np.ndarray, np.ndarray]]


def drawn(name: str, seed: int = 0) -> Arrays:
    generator = np.random.default_rng(seed)
    shape = DATASETS[name].shape
    return {
        split: (generator.integers(0, 256, (count, *shape), np.uint8), generator.integers(0, 10, count))
        for split, count in COUNTS.items()
    }


def write_idx(directory: Path, arrays: Arrays, packed: bool = True) -> None:
    for split, prefix in (("train", "train"), ("valid", "t10k")):
        images, labels = arrays[split]
        for name, values in ((f"{prefix}-images-idx3-ubyte", images[:, 0]), (f"{prefix}-labels-idx1-ubyte", labels)):
            header = struct.pack(f">{1 + values.ndim}I", 0x0800 + values.ndim, *values.shape)
            data = header + values.astype(np.uint8).tobytes()
            (directory / (f"{name}.gz" if packed else name)).write_bytes(gzip.compress(data) if packed else data)


def write_cifar(directory: Path, arrays: Arrays, packed: bool = True) -> None:
    files = {"readme.html": b"<html>"}
    for split, names in (("train", [f"data_batch_{n}.bin" for n in (1, 2, 3, 4, 5)]), ("valid", ["test_batch.bin"])):
        images, labels = arrays[split]
        records = [bytes([label]) + image.tobytes() for image, label in zip(images, labels, strict=True)]
        size = len(records) // len(names)
        for number, name in enumerate(names):
            files[name] = b"".join(records[number * size : (number + 1) * size])
    with tarfile.open(directory / "cifar-10-binary.tar.gz", "w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


def object_array(lists: list[Any]) -> np.ndarray:
    array = np.empty(len(lists), dtype=object)
    array[:] = lists
    return array


def write_npz(path: Path, count: int, pickled: bytes, labels: np.ndarray) -> None:
    header, plain = io.BytesIO(), io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|O", "fortran_order": False, "shape": (count,)})
    np.save(plain, labels)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", header.getvalue() + pickled)
        archive.writestr("y.npy", plain.getvalue())


def texts(count: int = 22, seed: int = 0) -> tuple[list[list[int]], np.ndarray]:
    """Texts and labels: an empty text, short and long texts, lengths about 300, indices of one, two and four bytes."""
    generator = np.random.default_rng(seed)
    lengths = [*(0, 1, 298, 299, 300, 301, 650), *generator.integers(2, 40, count)][:count]
    bounds = generator.choice([200, 3000, 30980], count)
    lists = [[int(word) for word in generator.integers(1, b, n)] for n, b in zip(lengths, bounds, strict=True)]
    lists[6][-1] = lists[4][-2] = 30979  # the largest, twice
    return lists, generator.integers(0, 46, count)


def write_reuters(directory: Path, arrays: Arrays, packed: bool = True) -> None:
    lists, labels = texts()
    np.savez_compressed(directory / "reuters.npz", x=object_array(lists), y=labels)


def keras(lists: list[list[int]], labels: np.ndarray) -> Arrays:
    """Reference of Keras's `reuters.load_data()` and `pad_sequences(maxlen=300)`, written word by word."""
    order = np.arange(len(lists))
    np.random.RandomState(113).shuffle(order)
    sequences = [[1] + [word + 3 for word in lists[row]] for row in order]
    words = max(max(sequence) for sequence in sequences)
    known = [[word if word < words else 2 for word in sequence] for sequence in sequences]
    padded = [[0] * (300 - len(sequence)) + sequence[-300:] for sequence in known]
    split = int(len(lists) * (1 - 0.2))
    parts = {"train": slice(0, split), "valid": slice(split, None)}
    return {name: (np.array(padded)[part], labels[order][part]) for name, part in parts.items()}


WRITERS: dict[str, Callable[..., None]] = {
    "mnist": write_idx,
    "fashion_mnist": write_idx,
    "cifar10": write_cifar,
    "reuters": write_reuters,
}


def write(name: str, directory: Path, packed: bool = True) -> Arrays:
    """Writes the data set's files; returns the arrays expected from them."""
    directory.mkdir(exist_ok=True)
    arrays = keras(*texts()) if name == "reuters" else drawn(name)
    WRITERS[name](directory, arrays, packed)
    return arrays
