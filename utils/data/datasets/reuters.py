"""The Reuters newswire topics of Keras: word indices of 11,228 texts in 46 classes."""

from __future__ import annotations

import io
import operator
import zipfile
from pathlib import Path

import numpy as np

from utils.data.datasets.common import (
    ClassificationData,
    Dataset,
    check_labels,
    find,
    reading,
)
from utils.data.datasets.restricted_pickle import unpickle_object_array
from utils.errors import UserError

FILE = "reuters.npz"
USE_PUBLISHED_FILE = "use Keras's reuters.npz"
TOPICS = 46
VOCABULARY = 30982
SEQUENCE_LENGTH = 300
# Source of the following: keras/src/datasets/reuters.py.
CHECKSUM = "sha256:d6586e694ee56d7a4e65172e12b3e987c03096cb01eab99753921ef915959916"
SEED = 113
START, UNKNOWN = 1, 2  # 0 is padding
INDEX_FROM = 3  # added to the file's indices
TRAINING_PART = 1 - 0.2


def read(directory: Path) -> dict[str, ClassificationData]:
    """Returns exactly what Keras's `reuters.load_data()` and `pad_sequences(…, maxlen=300)` return."""
    path = find(directory, FILE)
    with reading(path), zipfile.ZipFile(path) as archive:
        dtype, data = _read_member(archive, "y.npy", "iu", path)
        labels = np.frombuffer(data, dtype)
        texts = _texts(_read_member(archive, "x.npy", "O", path)[1], path)
    check_labels(labels, len(texts), TOPICS, f"{path}: y", f"{path}: x")
    inputs = _sequences(texts, path)
    # Keras's generator; numpy guarantees that the stream of RandomState does not change.
    order = np.arange(len(texts))
    np.random.RandomState(SEED).shuffle(order)
    train = int(len(order) * TRAINING_PART)
    parts = {"train": order[:train], "valid": order[train:]}
    return {split: ClassificationData(inputs[rows], labels[rows].astype(np.int64)) for split, rows in parts.items()}


def _sequences(texts: list[np.ndarray], path: Path) -> np.ndarray:
    """Word indices [N, 300]: zeros if the text is short, the start mark, and the last words of the text."""
    # Keras takes the largest index for the number of words, so that this word becomes unknown.
    words = max((int(text.max()) + INDEX_FROM for text in texts if len(text)), default=START)
    inputs = np.zeros((len(texts), SEQUENCE_LENGTH), dtype=np.int64)
    for row, text in zip(inputs, texts, strict=True):
        sequence = np.append(START, text[-SEQUENCE_LENGTH:] + INDEX_FROM)[-SEQUENCE_LENGTH:]
        row[-len(sequence) :] = np.where(sequence < words, sequence, UNKNOWN)
    beyond = np.argwhere(inputs >= VOCABULARY)
    if len(beyond):
        sample, word = beyond[0]
        raise UserError(
            f"{path}: sample {sample} has word index {inputs[sample, word]}; indices are 0 to {VOCABULARY - 1}; "
            f"{USE_PUBLISHED_FILE}"
        )
    return inputs


def _read_member(archive: zipfile.ZipFile, name: str, kinds: str, path: Path) -> tuple[np.dtype, bytes]:
    """The type of a `.npy` member, one of numpy's `kinds`, and the bytes after its header."""
    if name not in archive.namelist():
        raise UserError(f"{path} does not contain {name}; it contains {', '.join(archive.namelist()[:5]) or 'nothing'}")
    content = io.BytesIO(archive.read(name))
    np.lib.format.read_magic(content)
    _, _, dtype = np.lib.format.read_array_header_1_0(content)
    if dtype.kind not in kinds:
        raise UserError(f"{path}: {name} contains values of type {dtype}; {USE_PUBLISHED_FILE}")
    return dtype, content.read()


def _texts(pickled: bytes, path: Path) -> list[np.ndarray]:
    """The word indices of each text, int64, from a pickled array of lists."""
    try:
        lists = unpickle_object_array(pickled)
        return [np.fromiter(map(operator.index, words), np.int64) for words in lists]
    except (ValueError, TypeError) as error:
        raise UserError(f"{path}: x is not an array of lists of integers: {error}; {USE_PUBLISHED_FILE}") from None


REUTERS = Dataset(
    (SEQUENCE_LENGTH,), TOPICS, {"train": 8982, "valid": 2246}, read, {FILE: CHECKSUM}, vocabulary=VOCABULARY
)
