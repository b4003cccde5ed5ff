"""Labelled data sets: small files in the real formats are read exactly; damaged, foreign and malicious ones refused."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gzip
import hashlib
import io
import os
import pickle
import struct
import sys
import tarfile
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dataset_files import (
    COUNTS,
    WRITERS,
    Arrays,
    cifar_files,
    drawn,
    idx,
    keras,
    npy,
    object_array,
    texts,
    write,
    write_idx,
    write_npz,
    write_tar,
)

from utils.data import datasets
from utils.data.datasets import DATASETS, LARGEST_BYTES, Labelled, find_dataset, open_dataset
from utils.errors import UserError

# The first of scikit-learn's images in each split: fixed for good, or a resumed run would train on its validation.
GOLDEN_DIGITS = {"train": [1302, 591, 1180, 711], "valid": [798, 1292, 260, 1112]}
IN_FILES = sorted(WRITERS)
OF_IMAGES = [name for name in IN_FILES if name != "reuters"]


def read(name: str, directory: Path, verify: bool = False) -> dict[str, Labelled]:
    return open_dataset(name, str(directory), verify)


def refused(name: str, directory: Path, verify: bool = False) -> str:
    """The one line with which it is refused."""
    with pytest.raises(UserError) as caught:
        read(name, directory, verify)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def assert_read(splits: dict[str, Labelled], expected: Arrays) -> None:
    assert set(splits) == {"train", "valid"}
    for split, (inputs, labels) in expected.items():
        np.testing.assert_array_equal(splits[split].inputs, inputs)
        np.testing.assert_array_equal(splits[split].labels, labels)


# --- what holds for all --------------------------------------------------------------------------------------------


def test_every_data_set_is_tested_here() -> None:
    assert {*WRITERS, "digits"} == set(DATASETS)


@pytest.mark.parametrize("name", DATASETS)
def test_a_data_set_has_the_types_and_shapes_that_it_declares(name: str, tmp_path: Path) -> None:
    if name in WRITERS:
        write(name, tmp_path)
    dataset = find_dataset(name)
    for split, data in read(name, tmp_path).items():
        assert data.inputs.shape[1:] == dataset.shape
        assert data.inputs.dtype == (np.uint8 if dataset.vocabulary is None else np.int64)
        assert data.labels.shape == data.inputs.shape[:1]
        assert data.labels.dtype == np.int64
        assert 0 <= data.labels.min() <= data.labels.max() < dataset.classes
        assert data.inputs.flags.c_contiguous
        assert data.inputs.flags.writeable, "PyTorch warns of arrays that are not"
        assert split in dataset.samples


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize("name", IN_FILES)
def test_samples_are_read_exactly(name: str, packed: bool, tmp_path: Path) -> None:
    expected = write(name, tmp_path, packed)
    assert_read(read(name, tmp_path), expected)


def test_an_unknown_data_set_is_told_with_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"^unknown data set imagenet; known: digits, .*, reuters; .* dataset\.name$"):
        find_dataset("imagenet")


@pytest.mark.parametrize("name", IN_FILES)
def test_a_missing_file_or_directory_is_told_by_name(name: str, tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "nowhere"):
        line = refused(name, directory)
        assert line.startswith(f"no {DATASETS[name].files[0]}")
        assert line.endswith(f" in {directory}; dataset.directory says where it lies")
    write(name, tmp_path)
    last = tmp_path / DATASETS[name].files[-1]
    last.unlink()
    last.mkdir()
    assert refused(name, tmp_path).startswith(f"no {last.name}"), "a directory is no file"


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize("name", IN_FILES)
def test_damaged_files_are_one_line_or_harmless(name: str, packed: bool, tmp_path: Path) -> None:
    """Every file cut short, and with bytes changed at random: no traceback, and no half a data set."""
    generator = np.random.default_rng(1)
    expected = write(name, tmp_path, packed)
    for path in sorted(path for path in tmp_path.rglob("*") if path.suffix != ".html" and path.is_file()):
        whole = path.read_bytes()
        for length in {0, 1, 7, 13, len(whole) // 2, len(whole) - 1}:
            if length == 0 and path.suffix == ".bin":
                continue  # no records: no fault of the format
            path.write_bytes(whole[:length])
            assert str(path) in refused(name, tmp_path)
        for _ in range(30):
            damaged = bytearray(whole)
            for place in generator.integers(0, min(len(whole), generator.choice([40, 400, 10**6])), 2):
                damaged[place] = generator.integers(0, 256)
            path.write_bytes(damaged)
            with contextlib.suppress(UserError):
                splits = read(name, tmp_path)
                assert {split: data.inputs.shape for split, data in splits.items()} == {
                    split: inputs.shape for split, (inputs, _) in expected.items()
                }
        path.write_bytes(whole)
    assert_read(read(name, tmp_path), expected)


# --- verification --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", IN_FILES)
def test_other_files_than_the_published_ones_are_refused_unless_asked_for(name: str, tmp_path: Path) -> None:
    write(name, tmp_path)
    path = tmp_path / DATASETS[name].files[0]
    algorithm = "sha256" if name == "reuters" else "md5"
    found = hashlib.new(algorithm, path.read_bytes()).hexdigest()
    published = published_checksum(name)
    line = refused(name, tmp_path, verify=True)
    assert line.startswith(f"{path} has {algorithm} {found}, the published file {published}; ")
    assert line.endswith("dataset.verify=false accepts other files of the same format")
    read(name, tmp_path)


def published_checksum(name: str) -> str:
    checksums = DATASETS[name].read.args[0]  # type: ignore[attr-defined]
    checksum = checksums if isinstance(checksums, str) else checksums[DATASETS[name].files[0]]
    return checksum.partition(":")[2]


@pytest.mark.parametrize("name", IN_FILES)
def test_files_with_the_published_checksums_and_numbers_pass(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = write(name, tmp_path)
    dataset = DATASETS[name]
    digests = {file: f"md5:{hashlib.md5((tmp_path / file).read_bytes()).hexdigest()}" for file in dataset.files}
    checksums: Any = digests if len(digests) > 1 else next(iter(digests.values()))
    reader = functools.partial(dataset.read.func, checksums)  # type: ignore[attr-defined]
    samples = {split: len(labels) for split, (_, labels) in expected.items()}
    monkeypatch.setitem(DATASETS, name, dataclasses.replace(dataset, read=reader, samples=samples))
    assert_read(read(name, tmp_path, verify=True), expected)
    monkeypatch.setitem(DATASETS, name, dataclasses.replace(dataset, read=reader, samples=samples | {"valid": 4}))
    assert f"{len(expected['valid'][1])} valid samples, {name} has 4; " in refused(name, tmp_path, verify=True)


@pytest.mark.parametrize("name", OF_IMAGES)
def test_unpacked_files_are_verified_by_their_number_of_samples(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = write(name, tmp_path, packed=False)
    published = {"mnist": 60000, "fashion_mnist": 60000, "cifar10": 50000}[name]
    line = refused(name, tmp_path, verify=True)
    assert line.startswith(f"{tmp_path}: 15 train samples, {name} has {published}; dataset.verify=false accepts")
    monkeypatch.setitem(DATASETS, name, dataclasses.replace(DATASETS[name], samples=COUNTS))
    assert_read(read(name, tmp_path, verify=True), expected)


@pytest.mark.parametrize("name", OF_IMAGES)
def test_the_packed_file_is_read_where_both_are_there(name: str, tmp_path: Path) -> None:
    """It is the one that can be verified."""
    WRITERS[name](tmp_path, drawn(name, seed=1), packed=False)
    expected = write(name, tmp_path)
    assert_read(read(name, tmp_path), expected)


@pytest.mark.parametrize("name", IN_FILES)
def test_every_published_file_has_a_whole_checksum(name: str) -> None:
    checksums = DATASETS[name].read.args[0]  # type: ignore[attr-defined]
    if isinstance(checksums, str):
        checksums = dict.fromkeys(DATASETS[name].files, checksums)
    assert set(checksums) == set(DATASETS[name].files)
    for checksum in checksums.values():
        algorithm, _, digest = checksum.partition(":")
        assert len(bytes.fromhex(digest)) == hashlib.new(algorithm).digest_size


def test_mnist_and_fashion_mnist_are_told_apart() -> None:
    assert not set(datasets.MNIST_CHECKSUMS.values()) & set(datasets.FASHION_MNIST_CHECKSUMS.values())


# --- labels and numbers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize("name", OF_IMAGES)
def test_a_label_that_is_none_is_told_with_file_and_sample(name: str, packed: bool, tmp_path: Path) -> None:
    arrays = drawn(name)
    arrays["train"][1][10] = 10
    WRITERS[name](tmp_path, arrays, packed)
    if name == "cifar10":
        place = "cifar-10-binary.tar.gz: cifar-10-batches-bin/data_batch_4.bin: sample 1"
        place = place if packed else place.replace("cifar-10-binary.tar.gz: ", "")
    else:
        place = f"train-labels-idx1-ubyte{'.gz' if packed else ''}: sample 10"
    assert refused(name, tmp_path) == f"{tmp_path}/{place} has label 10; they are 0 to 9"


@pytest.mark.parametrize("label", [-1, 46])
def test_a_topic_that_is_none_is_told_with_file_and_sample(label: int, tmp_path: Path) -> None:
    lists, labels = texts()
    labels[3] = label
    np.savez(tmp_path / "reuters.npz", x=object_array(lists), y=labels)
    line = f"{tmp_path}/reuters.npz: y: sample 3 has label {label}; they are 0 to 45"
    assert refused("reuters", tmp_path) == line


def test_numbers_of_images_and_labels_must_agree(tmp_path: Path) -> None:
    arrays = drawn("mnist")
    arrays["valid"] = (arrays["valid"][0], arrays["valid"][1][:-1])
    write_idx(tmp_path, arrays, packed=False)
    line = refused("mnist", tmp_path)
    assert "t10k-labels-idx1-ubyte has 6 labels" in line
    assert "t10k-images-idx3-ubyte 7 samples" in line
    np.savez(tmp_path / "reuters.npz", x=object_array(texts()[0]), y=texts()[1][:-1])
    assert "y has 21 labels" in refused("reuters", tmp_path)


@pytest.mark.parametrize("name", OF_IMAGES)
def test_files_without_samples_are_refused(name: str, tmp_path: Path) -> None:
    arrays = {split: (images[:0], labels[:0]) for split, (images, labels) in drawn(name).items()}
    WRITERS[name](tmp_path, arrays)
    assert refused(name, tmp_path).startswith(f"{tmp_path}: no train samples; dataset.directory says where")


# --- digits --------------------------------------------------------------------------------------------------------


def test_digits_are_all_of_scikit_learns_split_once_and_for_all(tmp_path: Path) -> None:
    from sklearn.datasets import load_digits

    digits = load_digits()
    splits = read("digits", tmp_path / "nowhere", verify=True)
    assert {split: len(data.labels) for split, data in splits.items()} == {"train": 1437, "valid": 360}
    rows = {(*image.ravel().astype(int), label) for image, label in zip(digits.images, digits.target, strict=True)}
    found = [
        {(*image.ravel(), label) for image, label in zip(data.inputs, data.labels, strict=True)}
        for data in splits.values()
    ]
    assert found[0] | found[1] == rows
    assert len(rows) == 1797
    assert not found[0] & found[1]
    np.testing.assert_array_equal(splits["train"].inputs[:4, 0], digits.images[GOLDEN_DIGITS["train"]])
    np.testing.assert_array_equal(splits["valid"].inputs[:4, 0], digits.images[GOLDEN_DIGITS["valid"]])


def test_a_missing_scikit_learn_is_told_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert refused("digits", tmp_path).endswith("pip install scikit-learn")


# --- IDX -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (idx(np.zeros((15, 28, 28)), magic=0x0801), "not an IDX file of 3 axes"),
        (idx(np.zeros((15, 28, 28)), magic=0x0D03), "not an IDX file of 3 axes"),
        (idx(np.zeros((15, 28, 28)))[:15], "the file is truncated"),
        (idx(np.zeros((15, 28, 28)))[:-1], "is truncated: 11759 bytes of 11760"),
        (idx(np.zeros((15, 28, 28))) + b"\0", "goes on after its 11760 bytes"),
        (idx(np.zeros((15, 32, 28))), "images of 32 × 28 pixels, expected 28 × 28"),
        (struct.pack(">4I", 0x0803, 2**32 - 1, 28, 28), "unpacks to more than"),
    ],
    ids=["labels", "floats", "short header", "short", "long", "size", "huge"],
)
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
def test_what_is_wrong_with_an_idx_file_is_told(data: bytes, told: str, packed: bool, tmp_path: Path) -> None:
    write("mnist", tmp_path, packed)
    path = tmp_path / f"train-images-idx3-ubyte{'.gz' if packed else ''}"
    path.write_bytes(gzip.compress(data) if packed else data)
    line = refused("mnist", tmp_path)
    assert line.startswith(str(path))
    assert told in line


# --- CIFAR-10 ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
def test_a_broken_record_of_cifar10_is_told(packed: bool, tmp_path: Path) -> None:
    files = cifar_files(drawn("cifar10"))
    files["cifar-10-batches-bin/data_batch_2.bin"] += b"\1"
    if packed:
        write_tar(tmp_path / "cifar-10-binary.tar.gz", files)
    else:
        (tmp_path / "cifar-10-batches-bin").mkdir()
        for name, data in files.items():
            (tmp_path / name).write_bytes(data)
    assert "data_batch_2.bin has 9220 bytes, no multiple of 3073" in refused("cifar10", tmp_path)


def test_a_member_that_the_archive_lacks_or_links_is_told(tmp_path: Path) -> None:
    files = cifar_files(drawn("cifar10"))
    last = files.pop("cifar-10-batches-bin/test_batch.bin")
    path = tmp_path / "cifar-10-binary.tar.gz"
    write_tar(path, files | {"test_batch.bin": last})
    assert refused("cifar10", tmp_path).startswith(f"{path} holds no cifar-10-batches-bin/test_batch.bin")
    with tarfile.open(path, "w:gz") as archive:
        link = tarfile.TarInfo("cifar-10-batches-bin/data_batch_1.bin")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    assert refused("cifar10", tmp_path).startswith(f"{path} holds no cifar-10-batches-bin/data_batch_1.bin")


def test_a_member_with_holes_is_not_filled_with_zeros(tmp_path: Path) -> None:
    """A header of half a kilobyte can say that a file has gigabytes of them. Source: GNU tar's old sparse format."""
    files = cifar_files(drawn("cifar10"))
    first, size = next((name, len(data)) for name, data in files.items())
    member = tarfile.TarInfo(first)
    member.type = tarfile.GNUTYPE_SPARSE
    header = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    header[483:495] = b"%011o\0" % size
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header[:512])
    path = tmp_path / "cifar-10-binary.tar.gz"
    write_tar(path, {name: data for name, data in files.items() if name != first})
    path.write_bytes(gzip.compress(bytes(header) + gzip.decompress(path.read_bytes())))
    with tarfile.open(path) as archive:
        assert archive.getmember(first).size == size
    assert refused("cifar10", tmp_path).startswith(f"{path} holds no {first}")


# --- Reuters -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_pickles_of_all_protocols_are_read(protocol: int, tmp_path: Path) -> None:
    lists, labels = texts()
    write_npz(tmp_path / "reuters.npz", len(lists), pickle.dumps(object_array(lists), protocol), labels)
    assert_read(read("reuters", tmp_path), keras(lists, labels))


def python2_pickle(lists: list[list[int]]) -> bytes:
    """As Python 2 and the numpy of its time wrote it: byte strings, an older module's name, flags as integers."""
    head = (
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\nq\x00cnumpy\nndarray\nq\x01K\x00\x85q\x02U\x01bq\x03\x87q\x04"
    )
    head += b"Rq\x05(K\x01" + b"J" + struct.pack("<i", len(lists)) + b"\x85q\x06cnumpy\ndtype\nq\x07U\x02O8q\x08"
    head += b"K\x00K\x01\x87q\tRq\n(K\x03U\x01|q\x0bNNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK?tq\x0cb\x89]q\r("
    body = b"".join(
        b"](" + b"".join(b"J" + struct.pack("<i", word) for word in words) + b"e" if words else b"]" for words in lists
    )
    return head + body + b"etb."


def test_a_pickle_of_python_2_is_read(tmp_path: Path) -> None:
    """Which Keras's file may be."""
    lists, labels = texts()
    pickled = python2_pickle(lists)
    assert pickle.loads(pickled, encoding="latin1").tolist() == lists
    write_npz(tmp_path / "reuters.npz", len(lists), pickled, labels)
    assert_read(read("reuters", tmp_path), keras(lists, labels))


def test_a_long_array_of_long_integers_and_shared_lists_is_read() -> None:
    """More than a batch of a thousand elements, and memo places beyond a byte; the same list twice."""
    lists: list[Any] = [[number, 2**40 + number, -number] for number in range(2500)]
    lists[7] = lists[1200]
    for protocol in (2, 3, 4, 5):
        assert datasets._unpickled_objects(pickle.dumps(object_array(lists), protocol)) == lists


def test_the_largest_index_is_unknown_as_in_keras_and_the_next_is_kept(tmp_path: Path) -> None:
    """30,979 of the file becomes 2; 30,978 becomes 30,981, the largest of the vocabulary."""
    lists, labels = [[5, 30979, 30978]] * 9 + [[1] * 299], np.zeros(10, dtype=np.uint8)
    np.savez(tmp_path / "reuters.npz", x=object_array(lists), y=labels)
    inputs = np.concatenate([data.inputs for data in read("reuters", tmp_path).values()])
    ends = {tuple(row[-4:]) for row in inputs}
    assert ends == {(1, 8, 2, 30981), (4, 4, 4, 4)}
    assert sorted(inputs[:, 0]) == [0] * 9 + [1]


def test_an_index_beyond_the_vocabulary_is_told_with_file_and_sample(tmp_path: Path) -> None:
    lists, labels = texts()
    lists[6][-1] = 40000  # and sample 4 has 30,979, which is no longer the largest
    np.savez(tmp_path / "reuters.npz", x=object_array(lists), y=labels)
    line = refused("reuters", tmp_path)
    assert line.startswith(f"{tmp_path}/reuters.npz: sample 4 has word index 30982; they are 0 to 30981; ")


@pytest.mark.parametrize(
    ("element", "told"),
    [
        ([1, 2.5], "instruction BINFLOAT"),
        (["1", "2"], "sample 1 is no list of integers"),
        ([True], "sample 1 is no list of integers"),
        ([[1]], "sample 1 is no list of integers"),
        ((1, 2), "sample 1 is no list of integers"),
        (3, "sample 1 is no list of integers"),
        ([-1], "sample 1 has a word index that is none"),
        ([2**70], "sample 1 has a word index that is none"),
        ({1: 2}, "instruction EMPTY_DICT"),
        (np.arange(3), "pickle"),
    ],
    ids=str,
)
def test_what_is_no_list_of_word_indices_is_told(element: Any, told: str, tmp_path: Path) -> None:
    lists, labels = texts()
    array = object_array(lists)
    array[1] = element
    np.savez(tmp_path / "reuters.npz", x=array, y=labels)
    line = refused("reuters", tmp_path)
    assert line.startswith(f"{tmp_path}/reuters.npz: ")
    assert told in line


def test_arrays_of_another_kind_are_told(tmp_path: Path) -> None:
    lists, labels = texts()
    x, path = object_array(lists), tmp_path / "reuters.npz"
    for arrays, told in (
        ({"x": np.zeros((22, 300), dtype=int), "y": labels}, "x is int64 of shape (22, 300), expected lists (N,)"),
        ({"x": x.reshape(2, 11), "y": labels}, "x is object of shape (2, 11), expected lists (N,)"),
        ({"x": x, "y": labels / 2}, "y is float64 of shape (22,), expected integers (N,)"),
        ({"x": x, "y": labels[None]}, "y is int64 of shape (1, 22), expected integers (N,)"),
        ({"x": x}, "holds no y.npy; it holds x.npy"),
        ({"y": labels}, "holds no x.npy; it holds y.npy"),
    ):
        np.savez(path, **arrays)  # type: ignore[arg-type]
        assert told in refused("reuters", tmp_path)
    write_npz(path, 21, pickle.dumps(x), labels[:21])
    assert "x holds 22 texts where it says 21" in refused("reuters", tmp_path)
    write_npz(path, 22, pickle.dumps(x), labels)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    for change in (members["y.npy"] + b"\0" * 8, members["y.npy"][:-8]):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("x.npy", members["x.npy"])
            archive.writestr("y.npy", change)
        assert "y.npy is not as long as it says" in refused("reuters", tmp_path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    assert "y.npy is not packed as numpy does" in refused("reuters", tmp_path)
    path.write_bytes(b"PK\3\4 no zip")
    assert refused("reuters", tmp_path).startswith(f"cannot read {path}: ")


# --- malice --------------------------------------------------------------------------------------------------------


class Calls:
    """Unpickled, it calls a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> Any:
        return self._call


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("place", ["instead", "among the lists", "within a list"])
def test_a_pickle_that_would_run_something_is_refused_and_runs_nothing(
    place: str, protocol: int, tmp_path: Path
) -> None:
    left = tmp_path / "left"
    lists, labels = texts()
    call = Calls(os.mkdir, str(left))
    array: Any = object_array(lists)
    if place == "instead":
        array = call
    elif place == "among the lists":
        array[3] = call
    else:
        array[3] = [1, call, 2]
    pickled = pickle.dumps(array, protocol)
    pickle.loads(pickled)
    left.rmdir()  # it works
    write_npz(tmp_path / "reuters.npz", len(lists), pickled, labels)
    line = refused("reuters", tmp_path)
    assert "x is no array of lists of integers" in line
    if protocol > 1:
        assert "mkdir" in line
    assert not left.exists()


@pytest.mark.parametrize(
    "pickled",
    [
        b"(S'{left}'\nios\nmkdir\n.",
        b"(cos\nmkdir\nS'{left}'\no.",
        b"\x80\x02cos\nmkdir\nX{size}{left}\x85R.",
        b"\x80\x02cos\nmkdir\nX{size}{left}\x85\x81.",
        b"\x80\x04\x8c\x02os\x8c\x05mkdir\x93X{size}{left}\x85R.",
        b"\x80\x02cleaves_a_directory\nnothing\n.",
        b"\x80\x02cleaves_a_directory\nnothing\n0" + python2_pickle([[1]])[2:],
    ],
    ids=["INST", "OBJ", "REDUCE", "NEWOBJ", "STACK_GLOBAL", "import", "import and drop"],
)
def test_no_instruction_imports_or_calls(pickled: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = tmp_path / "left"
    (tmp_path / "leaves_a_directory.py").write_text(f"import os\nnothing = os.mkdir({str(left)!r})\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "leaves_a_directory", raising=False)
    path = str(left).encode()
    pickled = pickled.replace(b"{size}", struct.pack("<i", len(path))).replace(b"{left}", path)
    write_npz(tmp_path / "reuters.npz", 1, pickled, np.zeros(1, dtype=int))
    assert "x is no array of lists of integers" in refused("reuters", tmp_path)
    assert not left.exists()
    assert "leaves_a_directory" not in sys.modules


@pytest.mark.parametrize(
    "pickled",
    [
        b"",
        b".",
        b"\x80\x02.",
        b"\x80\x02K\x01.",
        b"\x80\x02Nb.",
        b"\x80\x02NNb.",
        b"\x80\x02h\x05.",
        b"\x80\x02e.",
        b"\x80\x02K\x01K\x02a.",
        b"\x80\x02NNR.",
        b"\x80\x02K\x01K\x02\x93.",
        b"\x80\x02](K\x01e",
        python2_pickle([[1]])[:-2] + b".",
        python2_pickle([[1]]).partition(b"q\x05")[0] + b".",
        python2_pickle([[1]]).replace(b"cnumpy\nndarray", b"cnumpy\nmatrix"),
        python2_pickle([[1]]).replace(b"U\x02O8", b"U\x02i8"),
        python2_pickle([[1]]).replace(b"J\x01\0\0\0\x85", b"J\x07\0\0\0\x85"),
    ],
)
def test_malformed_pickles_are_refused(pickled: bytes, tmp_path: Path) -> None:
    write_npz(tmp_path / "reuters.npz", 1, pickled, np.zeros(1, dtype=int))
    assert "x is no array of lists of integers" in refused("reuters", tmp_path)


def test_a_list_that_holds_itself_is_refused(tmp_path: Path) -> None:
    endless: list[Any] = [1]
    endless.append(endless)
    write_npz(tmp_path / "reuters.npz", 1, pickle.dumps(object_array([endless])), np.zeros(1, dtype=int))
    assert "sample 0 is no list of integers" in refused("reuters", tmp_path)


ZEROS = bytes(2**26)


def lying_npz(path: Path, declared: int) -> None:
    """Its x.npy unpacks to 64 MiB, and is said to unpack to `declared` bytes."""
    plain = io.BytesIO()
    np.save(plain, np.zeros(1, dtype=int))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", npy(1, python2_pickle([[1]])) + ZEROS)
        archive.writestr("y.npy", plain.getvalue())
        size = archive.getinfo("x.npy").file_size
    path.write_bytes(path.read_bytes().replace(struct.pack("<I", size), struct.pack("<I", declared)))
    with zipfile.ZipFile(path) as archive:
        assert archive.getinfo("x.npy").file_size == declared


@pytest.mark.parametrize("name", IN_FILES)
def test_a_small_file_that_unpacks_to_much_is_not_unpacked(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 MiB of zeros behind what a file says that it holds; memory is taken for a small part of them."""
    write(name, tmp_path)
    path = tmp_path / DATASETS[name].files[0]
    if name == "cifar10":
        monkeypatch.setattr(datasets, "LARGEST_BYTES", 2**20)
        write_tar(path, {"cifar-10-batches-bin/readme.html": ZEROS} | cifar_files(drawn(name)))
    elif name == "reuters":
        lying_npz(path, 5000)
    else:
        path.write_bytes(gzip.compress(idx(np.zeros((15, 28, 28))) + ZEROS, compresslevel=1))
    tracemalloc.start()
    try:
        line = refused(name, tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert str(path) in line
    assert peak < 2**23


@pytest.mark.parametrize("name", IN_FILES)
def test_what_says_that_it_is_larger_than_any_data_set_is_not_unpacked(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(name, tmp_path)
    monkeypatch.setattr(datasets, "LARGEST_BYTES", 20)
    line = refused(name, tmp_path)
    assert str(tmp_path / DATASETS[name].files[0]) in line
    assert "unpacks to more than 20 bytes" in line
    assert LARGEST_BYTES >= 5 * 50000 * 3073, "and no data set is that large"


def test_one_list_named_again_and_again_does_not_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two bytes of pickle, 2,400 of the array."""
    monkeypatch.setattr(datasets, "LARGEST_BYTES", 2**20)
    words = [1, 2, 3]
    labels = np.zeros(1000, dtype=np.uint8)
    write_npz(tmp_path / "reuters.npz", 1000, pickle.dumps(object_array([words] * 1000)), labels)
    assert "unpacks to more than" in refused("reuters", tmp_path)
