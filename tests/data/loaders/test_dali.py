"""The DALI loader on DALI's CPU backend: errors, `.npy` files. test_loaders.py compares its batches."""

from __future__ import annotations

import builtins
import contextlib
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference_samples import VolumeFile, cubes

from utils.data.convert_to_npy import convert
from utils.data.files.hdf5 import open_volume
from utils.data.files.npy import NpyVolume, open_npy_volume
from utils.data.loaders import dali
from utils.data.loaders.crops import CropOptions
from utils.data.loaders.dali import DaliLoader
from utils.data.loaders.prefetcher import CudaPrefetcher
from utils.data.plan import SamplePlan
from utils.errors import UserError

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
    plan = SamplePlan(samples=26, boxes=cubes(BOX), crop=CROP, seed=3, augment=augment)
    return CropOptions(plan, batch_size=4, channels_last=channels_last)


def loader_of(volume: NpyVolume, options: CropOptions | None = None) -> DaliLoader:
    return DaliLoader([volume], options or crop_options())


# --- on a device ---------------------------------------------------------------------------------------------------


class FakeStream:
    """Runs everything at once."""

    def __init__(self, device: object = None) -> None:
        pass

    def wait_stream(self, stream: object) -> None:
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
    assert number == len(expected) == 12
    assert len(places) == 3


# --- errors --------------------------------------------------------------------------------------------------------


def test_without_dali_the_error_names_the_install_command(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name.startswith("nvidia"):
            raise ModuleNotFoundError("No module named 'nvidia'")
        return real(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", refuse)
    for name in [name for name in sys.modules if name.startswith("nvidia")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UserError, match=r"NVIDIA DALI is not installed; install it with pip install"):
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


def saved(array: np.ndarray) -> Callable[[Path], None]:
    return lambda path: np.save(path, array)


ZEROS = np.zeros((BOX, BOX, BOX, 4), np.float32)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda path: path.unlink(), "no such file"),
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), "cannot read"),
        (lambda path: path.write_text("text"), "cannot read"),
        (saved(ZEROS.astype(">f4")), r"is >f4 .*, expected float32 \(12, 12, 12, 4\) in C order"),
        (saved(np.asfortranarray(ZEROS)), "in Fortran order, expected .* in C order"),
        (saved(ZEROS[:8]), r"is float32 \(8, 12, 12, 4\) in C order, expected float32 \(12, 12, 12, 4\)"),
        (saved(ZEROS), r"does not match .*bad\.h5: other values"),
    ],
)
def test_a_bad_npy_file_is_one_line_that_names_it_and_how_to_create_it(
    volume_file: VolumeFile, tmp_path: Path, damage: Callable[[Path], Any], says: str
) -> None:
    source = volume_file(tmp_path / "bad.h5", box=BOX)
    convert(source)
    damage(tmp_path / "bad_data.npy")
    with pytest.raises(UserError, match=says) as caught:
        opened(source)
    assert "\n" not in str(caught.value)
    assert str(tmp_path / "bad_data.npy") in str(caught.value)
    assert f"python -m utils.data.convert_to_npy -i {source}" in str(caught.value)


def test_a_path_that_is_not_set_names_the_key() -> None:
    with pytest.raises(UserError, match=r"train_path_npy_data is not set; .*convert_to_npy -i box\.h5"):
        open_npy_volume((None, None), KEYS, "box.h5", (4, 5))
