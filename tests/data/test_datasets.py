"""Classification data sets: published formats are read exactly; damaged and malicious files are refused."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pickle
import re
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dataset_files import WRITERS, Arrays, drawn, keras, object_array, texts, write, write_idx, write_npz

from utils.data import datasets
from utils.data.datasets import DATASETS, ClassificationData, get_dataset, open_dataset
from utils.data.datasets.restricted_pickle import unpickle_object_array
from utils.errors import UserError

# The first of scikit-learn's images in each split. They must never change: a resumed run would otherwise train on
# samples of its validation split.
GOLDEN_DIGITS = {"train": [1302, 591, 1180, 711], "valid": [798, 1292, 260, 1112]}
IN_FILES = sorted(WRITERS)
# Each format; IDX as it is downloaded and unpacked. Fashion-MNIST differs from MNIST only in its checksums.
LAYOUTS = [("mnist", True), ("mnist", False), ("cifar10", True), ("reuters", True)]


def read(name: str, directory: Path, verify: bool = False) -> dict[str, ClassificationData]:
    return open_dataset(name, str(directory), verify)


def refused(name: str, directory: Path, verify: bool = False) -> str:
    """The one-line message with which the data set is refused."""
    with pytest.raises(UserError) as caught:
        read(name, directory, verify)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def assert_read(splits: dict[str, ClassificationData], expected: Arrays) -> None:
    assert set(splits) == {"train", "valid"}
    for split, (inputs, labels) in expected.items():
        np.testing.assert_array_equal(splits[split].inputs, inputs)
        np.testing.assert_array_equal(splits[split].labels, labels)


# --- all data sets -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "packed"), [*LAYOUTS, ("fashion_mnist", True)])
def test_samples_are_read_exactly_in_the_declared_types(name: str, packed: bool, tmp_path: Path) -> None:
    assert {*WRITERS, "digits"} == set(DATASETS), "a data set without a test"
    expected = write(name, tmp_path, packed)
    splits = read(name, tmp_path)
    assert_read(splits, expected)
    dataset = get_dataset(name)
    for data in splits.values():
        assert data.inputs.shape[1:] == dataset.shape
        assert data.inputs.dtype == (np.uint8 if dataset.vocabulary is None else np.int64)
        assert data.labels.dtype == np.int64
        assert data.inputs.flags.c_contiguous
        assert data.inputs.flags.writeable, "PyTorch warns about read-only arrays"


def test_an_unknown_name_is_reported_with_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"^unknown data set imagenet; known: digits, .*, reuters; .* dataset\.name$"):
        get_dataset("imagenet")


@pytest.mark.parametrize(("name", "packed"), LAYOUTS)
def test_missing_and_truncated_files_are_refused(name: str, packed: bool, tmp_path: Path) -> None:
    write(name, tmp_path, packed)
    path = min(tmp_path.iterdir())
    whole = path.read_bytes()
    for length in (7, len(whole) // 2):
        path.write_bytes(whole[:length])
        line = refused(name, tmp_path)
        assert line.startswith(f"{tmp_path}: cannot read {name}: ")
        assert line.endswith("download its files again")
    path.unlink()
    path.mkdir()
    line = refused(name, tmp_path)
    assert line.startswith(f"no {path.name}" if packed else f"no {path.name}.gz or {path.name}"), "a directory"
    assert line.endswith(f" in {tmp_path}; set dataset.directory to the directory that has it")


# --- verification --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", IN_FILES)
def test_files_are_verified_by_checksum_and_number_of_samples(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, dataset = write(name, tmp_path), DATASETS[name]
    file, checksum = next(iter(dataset.checksums.items()))
    path, (algorithm, _, published) = tmp_path / file, checksum.partition(":")
    found = hashlib.new(algorithm, path.read_bytes()).hexdigest()
    line = refused(name, tmp_path, verify=True)
    assert line.startswith(f"{path} has {algorithm} {found}, the published file has {published}; ")
    assert "dataset.verify=false" in line
    read(name, tmp_path)

    monkeypatch.setattr(datasets, "_verify", lambda *_: None)
    samples = {split: len(labels) for split, (_, labels) in expected.items()}
    monkeypatch.setitem(DATASETS, name, dataclasses.replace(dataset, samples=samples))
    assert_read(read(name, tmp_path, verify=True), expected)
    monkeypatch.setitem(DATASETS, name, dataclasses.replace(dataset, samples=samples | {"valid": 4}))
    assert f"{len(expected['valid'][1])} valid samples, {name} has 4; " in refused(name, tmp_path, verify=True)


# --- labels and counts ---------------------------------------------------------------------------------------------


def test_samples_that_the_data_set_does_not_have_are_refused(tmp_path: Path) -> None:
    """A label of another data set in the same format, a missing label, another image size, no samples."""
    images, labels = drawn("mnist")["train"]
    wrong = labels.copy()
    wrong[10] = 46
    for changed, says in (
        ((images, wrong), "label 46; labels are 0 to 9"),
        ((images, labels[:-1]), "inputs are (15, 1, 28, 28), with 14 labels"),
        ((images[..., 1:], labels), "inputs are (15, 1, 28, 27)"),
        ((images[:0], labels[:0]), "inputs are (0, 1, 28, 28), with 0 labels"),
    ):
        write_idx(tmp_path, {**drawn("mnist"), "train": changed})
        assert f"train samples of mnist: {says}" in refused("mnist", tmp_path)


# --- digits --------------------------------------------------------------------------------------------------------


def test_digits_are_all_of_scikit_learns_with_a_fixed_split(tmp_path: Path) -> None:
    library = pytest.importorskip("sklearn.datasets", reason="scikit-learn is not installed")
    digits = library.load_digits()
    splits = read("digits", tmp_path / "nowhere", verify=True)
    assert {split: len(data.labels) for split, data in splits.items()} == {"train": 1437, "valid": 360}
    rows = {(*image.ravel().astype(int), label) for image, label in zip(digits.images, digits.target, strict=True)}
    train, valid = (
        {(*image.ravel(), label) for image, label in zip(data.inputs, data.labels, strict=True)}
        for data in (splits["train"], splits["valid"])
    )
    assert (train | valid, train & valid, len(rows)) == (rows, set(), 1797)
    for split, golden in GOLDEN_DIGITS.items():
        np.testing.assert_array_equal(splits[split].inputs[:4, 0], digits.images[golden])


def test_missing_scikit_learn_is_reported_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert refused("digits", tmp_path).endswith("pip install scikit-learn")


# --- Reuters -------------------------------------------------------------------------------------------------------


def python2_pickle(lists: list[list[int]]) -> bytes:
    """A pickle as written by Python 2 and its numpy: byte strings, an older module name, flags as integers."""
    head = (
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\nq\x00cnumpy\nndarray\nq\x01K\x00\x85q\x02U\x01bq\x03\x87q\x04"
    )
    head += b"Rq\x05(K\x01" + b"J" + struct.pack("<i", len(lists)) + b"\x85q\x06cnumpy\ndtype\nq\x07U\x02O8q\x08"
    head += b"K\x00K\x01\x87q\tRq\n(K\x03U\x01|q\x0bNNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK?tq\x0cb\x89]q\r("
    body = b"".join(
        b"](" + b"".join(b"J" + struct.pack("<i", word) for word in words) + b"e" if words else b"]" for words in lists
    )
    return head + body + b"etb."


def test_pickles_of_all_protocols_and_of_python_2_are_read(tmp_path: Path) -> None:
    """Keras's file was pickled by Python 2; 1,200 texts are more than one batch of a pickle, and one is shared."""
    lists, labels = texts()
    lists += [[number, number + 1] for number in range(1, 1180)]
    lists[40] = lists[900]
    labels = np.append(labels, np.zeros(1179, labels.dtype))
    pickles = [pickle.dumps(object_array(lists), protocol) for protocol in (3, 4, 5)]
    old = python2_pickle(lists)
    assert pickle.loads(old, encoding="latin1").tolist() == lists
    for pickled in (*pickles, old):
        write_npz(tmp_path / "reuters.npz", len(lists), pickled, labels)
        assert_read(read("reuters", tmp_path), keras(lists, labels))


def test_words_beyond_the_vocabulary_are_refused(tmp_path: Path) -> None:
    lists, labels = texts()
    lists[6][-1] = 40000  # the largest index becomes the unknown word, as in Keras; another sample has the next one
    np.savez(tmp_path / "reuters.npz", x=object_array(lists), y=labels)
    assert "word 30982; words are 0 to 30981" in refused("reuters", tmp_path)


class Call:
    """Its pickle calls os.mkdir."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("created",)


def test_a_pickle_that_calls_a_function_or_is_malformed_is_refused_and_calls_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lists, labels = texts()
    lists[3] = [1, Call(), 2]
    good = python2_pickle([[1]])
    malformed = [b"", b"\x80\x02K\x01.", good[: len(good) // 2]]
    for pickled in (*(pickle.dumps(object_array(lists), protocol) for protocol in (0, 2, 4)), *malformed):
        write_npz(tmp_path / "reuters.npz", len(lists), pickled, labels)
        assert "cannot read reuters: ValueError('its pickle " in refused("reuters", tmp_path)
        assert os.listdir() == ["reuters.npz"]


def named(module: str, name: str) -> bytes:
    """A pickle of protocol 4 that calls module.name with the path '/created'."""
    strings = b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name))
    return b"\x80\x04" + strings + b"\x93\x8c\x08/created\x85R."


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "mkdir"),
        ("builtins", "eval"),
        ("numpy", "ndarray.__class__"),
        ("numpy.core.multiarray", "_reconstruct.__globals__"),
        ("_codecs", "decode"),
    ],
)
def test_names_that_numpys_pickles_do_not_need_are_not_looked_up(module: str, name: str) -> None:
    """Protocol 4 resolves dotted names; protocol 0 names a module and an attribute on a line each."""
    for pickled in (named(module, name), f"c{module}\n{name}\n(S'/created'\ntR.".encode()):
        with pytest.raises(ValueError, match=rf"its pickle names {re.escape(f'{module}.{name}')}$"):
            unpickle_object_array(pickled)


def test_attributes_that_a_pickle_sets_on_the_allowed_names_call_nothing(tmp_path: Path) -> None:
    """BUILD sets attributes of any object; what the allowed names refer to stays the same."""
    before = unpickle_object_array(python2_pickle([[1]]))
    for target in ("numpy\nndarray", "numpy.core.multiarray\n_reconstruct"):
        state = b"(N}X\x08\0\0\0__code__K\x01st"
        with pytest.raises(ValueError, match="its pickle cannot be read"):
            unpickle_object_array(b"\x80\x02c" + target.encode() + b"\n" + state + b"b.")
    assert unpickle_object_array(python2_pickle([[1]])) == before == [[1]]
