"""The DALI loader on DALI's CPU backend: axes, errors, `.npy` files. test_loaders.py compares its batches."""

from __future__ import annotations

import builtins
import contextlib
import os
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import GENEROUS, context
from reference_samples import VolumeFile, cubes

from utils.data.convert_to_npy import convert
from utils.data import symmetry
from utils.data.files.hdf5 import open_volume
from utils.data.files.npy import NpyVolume, open_npy_volume
from utils.data.loaders import dali
from utils.data.loaders.crops import CropOptions
from utils.data.loaders.dali import SUPERPATTERN, DaliLoader, superpattern_shapes
from utils.data.loaders.prefetcher import CudaPrefetcher
from utils.data.plan import SamplePlan
from utils.errors import UserError, one_line_errors

BOX, CROP = 12, 4
KEYS = ("train_path_npy_data", "train_path_npy_label")


def has_dali() -> bool:
    try:
        dali.import_dali()
    except UserError:
        return False
    return True


needs_dali = pytest.mark.skipif(not has_dali(), reason="NVIDIA DALI is not installed (pip install -e '.[dali]')")


@pytest.fixture(scope="module")
def source(volume_file: VolumeFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = volume_file(tmp_path_factory.mktemp("npy") / "box.h5", box=BOX)
    convert(path)
    return path


def paths_of(source: Path) -> tuple[str, str]:
    return (str(source.with_name(f"{source.stem}_data.npy")), str(source.with_name(f"{source.stem}_label.npy")))


def opened(source: Path) -> NpyVolume:
    return open_npy_volume(paths_of(source), KEYS, str(source), (4, 5), open_volume(source, (4, 5)))


def crop_options(augment: bool = True, channels_last: bool = False) -> CropOptions:
    plan = SamplePlan(samples=26, boxes=cubes(BOX), crop=CROP, seed=3, split="valid", augment=augment)
    return CropOptions(plan, batch_size=4, channels_last=channels_last)


def loader_of(volume: NpyVolume, options: CropOptions | None = None) -> DaliLoader:
    return DaliLoader([volume], options or crop_options())


def test_one_transposition_permutes_axes_like_all_48_symmetries() -> None:
    crop = np.arange(27).reshape(3, 3, 3)
    for index, shape in enumerate(superpattern_shapes(3)):
        permuted = crop.reshape(shape).transpose(SUPERPATTERN).reshape(3, 3, 3)
        np.testing.assert_array_equal(permuted, crop.transpose(symmetry.PERMUTATIONS[index]))


# --- on a device ---------------------------------------------------------------------------------------------------


class FakeStream:
    """Runs everything at once."""

    def __init__(self, device: object = None) -> None:
        pass

    def wait_stream(self, other: object) -> None:
        pass

    wait_event = record = wait_stream

    def synchronize(self) -> None:
        pass


@needs_dali
@pytest.mark.parametrize("augment", [True, False])
@pytest.mark.parametrize("channels_last", [True, False])
def test_on_a_device_all_batches_are_in_three_places(
    source: Path, monkeypatch: pytest.MonkeyPatch, augment: bool, channels_last: bool
) -> None:
    """A CUDA graph knows four at most, and copies other batches; DALI's own memory changes from batch to batch."""
    options = crop_options(augment, channels_last)
    with closing(loader_of(opened(source), options)) as loader:
        expected = [[part.clone() for part in batch] for epoch in range(2) for batch in loader.epoch(epoch)]
    for name in ("Stream", "Event", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    places, number = set(), 0
    with closing(loader_of(opened(source), options)) as loader:
        loader._prefetcher = CudaPrefetcher(torch.device("cpu"), options.shapes((4, 5)), channels_last)
        begun = loader.epoch(5)
        next(begun)
        begun.close()
        for epoch in range(2):
            for batch in loader.epoch(epoch):
                for part, right in zip(batch, expected[number], strict=True):
                    assert part.stride() == right.stride()
                    assert torch.equal(part, right)
                places.add(tuple(part.data_ptr() for part in batch))
                number += 1
    assert number == len(expected) == 14
    assert len(places) == 3


# --- errors --------------------------------------------------------------------------------------------------------


def test_without_dali_the_error_names_the_install_command(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__
    for error, says in (
        (ModuleNotFoundError("No module named 'nvidia'"), r'is not installed; install it with pip install -e "\.\[da'),
        (ImportError("libcudart.so is missing"), r"cannot be imported \(libcudart\.so is missing\); install it with"),
    ):

        def refuse(name: str, *arguments: Any, error: ImportError = error, **keywords: Any) -> Any:
            if name.startswith("nvidia"):
                raise error
            return real(name, *arguments, **keywords)

        with monkeypatch.context() as patch:
            patch.setattr(builtins, "__import__", refuse)
            for name in [name for name in sys.modules if name.startswith("nvidia")]:
                patch.delitem(sys.modules, name)
            with pytest.raises(UserError, match=f"NVIDIA DALI {says}"):
                loader_of(opened(source))


@needs_dali
def test_a_failing_pipeline_is_one_line(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the failure no other batch can be fetched; that error must not hide the first one."""

    def fail(*_: object) -> None:
        raise RuntimeError("Critical error in pipeline:\nencountered:\n\nCUDA error: unspecified launch failure")

    with closing(loader_of(opened(source))) as loader:
        batches = loader.epoch(0)
        next(batches)
        monkeypatch.setattr(loader._pipeline, "outputs", fail)
        with pytest.raises(UserError, match=r"^NVIDIA DALI failed: CUDA error: unspecified launch failure$"):
            next(batches)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def saved(array: np.ndarray) -> Callable[[Path], None]:
    return lambda path: np.save(path, array)


ZEROS = np.zeros((BOX, BOX, BOX, 4), np.float32)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (
            lambda path: path.unlink(),
            r"no such file: .*bad_data\.npy; create it with python -m utils\.convert_to_npy -i .*, or set train_path",
        ),
        (cut, r"bad_data\.npy: the file is truncated; recreate it with .* -i .*bad\.h5 --overwrite"),
        (lambda path: path.write_text("text"), "it is not a .npy file"),
        (lambda path: (path.unlink(), path.mkdir()), "it is a directory"),
        (saved(ZEROS.astype(">f4")), r"is >f4 .*, expected float32 \(12, 12, 12, 4\) in C order"),
        (saved(np.asfortranarray(ZEROS)), "in Fortran order, expected .* in C order"),
        (saved(ZEROS[:8]), r"is float32 \(8, 12, 12, 4\) in C order, expected float32 \(12, 12, 12, 4\)"),
        (saved(ZEROS), r"does not match .*bad\.h5: other values; recreate it with .* --overwrite"),
    ],
)
def test_a_bad_npy_file_is_one_line_that_names_it(
    volume_file: VolumeFile, tmp_path: Path, damage: Callable[[Path], Any], says: str
) -> None:
    source = volume_file(tmp_path / "bad.h5", box=BOX)
    convert(source)
    damage(tmp_path / "bad_data.npy")
    with pytest.raises(UserError, match=says) as caught:
        opened(source)
    assert "\n" not in str(caught.value)
    assert str(tmp_path / "bad_data.npy") in str(caught.value)


def test_a_missing_npy_file_of_another_name_is_answered_with_the_key_to_set(
    volume_file: VolumeFile, tmp_path: Path
) -> None:
    """A fixed bug: the message named the command only, which writes other files than the config's."""
    source = volume_file(tmp_path / "t.h5", box=BOX)
    says = (
        f"no such file: x.npy; create {tmp_path}/t_data.npy with python -m utils.data.convert_to_npy -i {source}, then set "
        f"train_path_npy_data to it"
    )
    with pytest.raises(UserError) as caught:
        open_npy_volume(("x.npy", "y.npy"), KEYS, str(source), (4, 5))
    assert str(caught.value) == says


def test_npy_files_of_another_box_and_missing_paths(volume_file: VolumeFile, tmp_path: Path) -> None:
    small, large = volume_file(tmp_path / "small.h5", box=8), volume_file(tmp_path / "large.h5", box=BOX)
    convert(small)
    with pytest.raises(UserError, match=r"small_data\.npy is float32 \(8, 8, 8, 4\) .* \(12, 12, 12, 4\) in C order;"):
        open_npy_volume(paths_of(small), KEYS, str(large), (4, 5), open_volume(large, (4, 5)))
    os.replace(tmp_path / "small_label.npy", tmp_path / "other_label.npy")
    convert(large)
    os.replace(tmp_path / "large_label.npy", tmp_path / "small_label.npy")
    with pytest.raises(UserError, match=r"small_label\.npy is .*, expected float32 \(8, 8, 8, 5\) in C order;"):
        open_npy_volume(paths_of(small), KEYS, str(small), (4, 5))
    with pytest.raises(UserError, match=r"train_path_npy_label is not set, .* utils\.convert_to_npy -i box\.h5"):
        open_npy_volume((None, None), (KEYS[1], KEYS[0]), "box.h5", (4, 5))


def read_while_it_shrinks(folder: Path) -> None:
    """Runs in a separate process. The file shrinks while no crop is read: a read of a lost page kills the process."""
    os.dup2(os.open(folder / "stderr", os.O_WRONLY | os.O_CREAT), 2)
    source = folder / "box.h5"
    volume = open_npy_volume(paths_of(source), KEYS, str(source), (4, 5))
    with one_line_errors(), closing(loader_of(volume)) as loader:
        list(loader.epoch(0))
        cut(folder / "box_label.npy")
        list(loader.epoch(1))


@needs_dali
def test_an_npy_file_that_shrinks_is_one_line(volume_file: VolumeFile, tmp_path: Path) -> None:
    convert(volume_file(tmp_path / "box.h5", box=BOX))
    process = context().Process(target=read_while_it_shrinks, args=(tmp_path,))
    process.start()
    process.join(GENEROUS)
    assert process.exitcode == 2
    (line,) = (line for line in (tmp_path / "stderr").read_text().splitlines() if line.startswith("error: "))
    assert "box_label.npy became shorter while it was being read" in line
