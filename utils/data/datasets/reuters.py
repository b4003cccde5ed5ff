"""The Reuters newswire topics of Keras: word indices of 11,228 texts in 46 classes."""

import io
import pickle
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np

from utils.data.datasets.common import ClassificationData, Dataset

FILE = "reuters.npz"
TOPICS = 46
VOCABULARY = 30982
SEQUENCE_LENGTH = 300
# Source of the following: keras/src/datasets/reuters.py.
CHECKSUM = "sha256:d6586e694ee56d7a4e65172e12b3e987c03096cb01eab99753921ef915959916"
SEED = 113
START, UNKNOWN = 1, 2  # 0 is padding
INDEX_FROM = 3  # added to the file's indices
TRAINING_PART = 1 - 0.2

# The names that numpy writes into a pickled array of objects.
ALLOWED = {"numpy.ndarray", "numpy.dtype", "numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"}


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


def read(contents: Mapping[str, bytes]) -> dict[str, ClassificationData]:
    """Returns exactly what Keras's `reuters.load_data()` and `pad_sequences(…, maxlen=300)` return."""
    with zipfile.ZipFile(io.BytesIO(contents[FILE])) as archive:
        labels = np.load(io.BytesIO(archive.read("y.npy")), allow_pickle=False).astype(np.int64)
        pickled = io.BytesIO(archive.read("x.npy"))
    np.lib.format.read_magic(pickled)
    np.lib.format.read_array_header_1_0(pickled)
    texts = _Unpickler(pickled, encoding="latin1").load().items
    inputs = _sequences([np.array(words, np.int64) for words in texts])
    # Keras's generator; numpy guarantees that the stream of RandomState does not change.
    order = np.arange(len(inputs))
    np.random.RandomState(SEED).shuffle(order)
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


REUTERS = Dataset((SEQUENCE_LENGTH,), TOPICS, read, {FILE: CHECKSUM}, vocabulary=VOCABULARY)
