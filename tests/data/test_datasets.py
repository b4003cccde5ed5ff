"""Classification data sets: published formats are read exactly; other and malicious files are refused."""

import dataclasses
import gzip
import hashlib
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dataset_files import WRITERS, Arrays, keras, object_array, texts, write, write_npz

from utils.config.sections import DatasetConfig
from utils.data.datasets import DATASETS, ClassificationData, get_dataset, open_dataset
from utils.errors import UserError

# The first of scikit-learn's images in each split. They must never change: a resumed run would otherwise train on
# samples of its validation split.
GOLDEN_DIGITS = {"train": [1302, 591, 1180, 711], "valid": [798, 1292, 260, 1112]}


def read(name: str, directory: Path, verify: bool = False) -> dict[str, ClassificationData]:
    return open_dataset(DatasetConfig(name=name, directory=str(directory), verify=verify))[1]


def refused(name: str, directory: Path, verify: bool = False) -> str:
    with pytest.raises(UserError) as caught:
        read(name, directory, verify)
    return str(caught.value)


def assert_read(splits: dict[str, ClassificationData], expected: Arrays) -> None:
    assert set(splits) == {"train", "valid"}
    for split, (inputs, labels) in expected.items():
        np.testing.assert_array_equal(splits[split].inputs, inputs)
        np.testing.assert_array_equal(splits[split].labels, labels)


@pytest.mark.parametrize(
    ("name", "packed"),
    [("mnist", True), ("mnist", False), ("fashion_mnist", True), ("cifar10", True), ("reuters", True)],
)
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


@pytest.mark.parametrize("name", ["mnist", "cifar10", "reuters"])
def test_contents_are_verified_by_checksum_however_they_are_packed(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    """A fixed bug: checksums were those of the packed files, and Debian has packed Fashion-MNIST again."""
    expected, dataset = write(name, tmp_path), DATASETS[name]
    file, published = next(iter(dataset.checksums.items()))
    line = refused(name, tmp_path, verify=True)
    assert line.startswith(f"{file} in {tmp_path} has ")
    assert f"the published content has {published.partition(':')[2]}; " in line
    digests = {name: f"sha1:{hashlib.sha1(data).hexdigest()}" for name, data in dataset.unpack(tmp_path).items()}
    monkeypatch.setitem(DATASETS, name, dataclasses.replace(dataset, checksums=digests))
    assert_read(read(name, tmp_path, verify=True), expected)
    for path in tmp_path.iterdir() if name != "reuters" else ():
        packed, content = path.read_bytes(), gzip.decompress(path.read_bytes())
        path.write_bytes(gzip.compress(content, 1, mtime=1))
        assert path.read_bytes() != packed
        assert_read(read(name, tmp_path, verify=True), expected)
        changed = bytearray(content)
        changed[1600 if name == "cifar10" else -1] ^= 1  # in the first file of the archive that is read
        path.write_bytes(gzip.compress(changed))
        assert " the published content has " in refused(name, tmp_path, verify=True)
        path.write_bytes(packed[: len(packed) // 2])
        assert refused(name, tmp_path).startswith(f"cannot unpack the files in {tmp_path}: ")
        path.unlink()
        assert "set dataset.directory to the directory that has it" in refused(name, tmp_path)
        path.write_bytes(packed)


def test_digits_are_all_of_scikit_learns_with_a_fixed_split(tmp_path: Path) -> None:
    library = pytest.importorskip("sklearn.datasets", reason="scikit-learn is not installed")
    digits = library.load_digits()
    splits = read("digits", tmp_path / "nowhere", verify=True)
    rows = [row for data in splits.values() for row in zip(map(bytes, data.inputs), data.labels, strict=True)]
    published = zip(map(bytes, digits.images.astype(np.uint8)), digits.target, strict=True)
    assert sorted(rows) == sorted(published)
    assert len(splits["train"].labels) == 1437
    for split, golden in GOLDEN_DIGITS.items():
        np.testing.assert_array_equal(splits[split].inputs[:4, 0], digits.images[golden])


def python2_pickle(lists: list[list[int]]) -> bytes:
    """A pickle as of Python 2 and its numpy: byte strings, and an older name of a module."""
    pickled = pickle.dumps(object_array(lists), 3).replace(b"numpy._core", b"numpy.core", 1)
    strings = ((b"C\x01b", b"U\x01b"), (b"X\x02\0\0\0O8", b"U\x02O8"), (b"X\x01\0\0\0|", b"U\x01|"))
    for new, old in ((b"\x80\x03", b"\x80\x02"), *strings):
        assert new in pickled
        pickled = pickled.replace(new, old, 1)
    return pickled


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


class Call:
    def __reduce__(self) -> Any:
        return os.mkdir, ("created",)


def test_malicious_pickles_are_refused_and_call_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    lists, labels = texts()
    lists[3] = [1, Call(), 2]
    pickles = [pickle.dumps(object_array(lists), protocol) for protocol in (0, 2, 4)]
    pickles += [b"\x80\x02cnumpy\nndarray\n(N}X\x08\0\0\0__code__K\x01stb."]  # sets an attribute of an allowed name
    for names in (("os", "mkdir"), ("numpy", "ndarray.__class__"), ("_codecs", "decode")):
        # Protocol 4 resolves dotted names; protocol 0 names a module and an attribute on a line each.
        strings = b"".join(b"\x8c" + bytes([len(name)]) + name.encode() for name in names)
        pickles += [b"\x80\x04" + strings + b"\x93\x8c\x07created\x85R."]
        pickles += ["c{}\n{}\n(S'created'\ntR.".format(*names).encode()]
    for pickled in pickles:
        write_npz(tmp_path / "reuters.npz", len(lists), pickled, labels)
        with pytest.raises((pickle.UnpicklingError, TypeError)):
            read("reuters", tmp_path)
        assert os.listdir() == ["reuters.npz"]
