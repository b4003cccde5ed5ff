"""NVIDIA DALI's loader, on its CPU backend, against the plain definition; and its twins, good and bad."""

from __future__ import annotations

import builtins
import itertools
import multiprocessing
import os
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from utils.convert_to_npy import convert
from utils.data import dali, symmetry
from utils.data.dali import SUPERPATTERN, DaliLoader, superpattern_shapes
from utils.data.plan import SamplePlan
from utils.data.twins import Twins, open_twins
from utils.data.volumes import open_volume
from utils.errors import UserError, one_line_errors

VolumeFile = Callable[..., Path]

BOX, CROP = 12, 4
VECTORS = ([(1, 2, 3)], [(1, 2, 3)])
KEYS = ("train_path_npy_data", "train_path_npy_label")


def has_dali() -> bool:
    try:
        dali.check_installed()
    except UserError:
        return False
    return True


needs_dali = pytest.mark.skipif(not has_dali(), reason="NVIDIA DALI is not installed (pip install -e '.[dali]')")


@pytest.fixture(scope="module")
def source(volume_file: VolumeFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An HDF5 file with zeros of both signs in it: negation must keep them apart."""
    path = volume_file(tmp_path_factory.mktemp("twins") / "box.h5", box=BOX)
    with h5py.File(path, "r+") as file:
        for name in ("Nbody", "Hydro"):
            values = file[name][...]
            values[:, ::3, ::2] = 0.0
            values[:, 1::3, ::2, ::2] = -0.0
            file[name][...] = values
    convert(path)
    return path


def paths_of(source: Path) -> tuple[str, str]:
    return (str(source.with_name(f"{source.stem}_data.npy")), str(source.with_name(f"{source.stem}_label.npy")))


@pytest.fixture
def twins(source: Path) -> Twins:
    return open_twins(paths_of(source), KEYS, str(source), (4, 5), BOX, open_volume(source, (4, 5)))


@pytest.fixture(scope="module")
def fields(source: Path) -> tuple[np.ndarray, np.ndarray]:
    with h5py.File(source) as file:
        return file["Nbody"][...], file["Hydro"][...]


def training_plan(samples: int = 24, **changed: Any) -> SamplePlan:
    return SamplePlan(**({"samples": samples, "box": BOX, "crop": CROP, "seed": 3} | changed))


def plain(fields: tuple[np.ndarray, np.ndarray], plan: SamplePlan, epoch: int, mode: str = "full") -> list[list[bytes]]:
    """The bytes of the samples of an epoch by definition, in the plan's order."""
    drawn = plan.epoch(epoch)
    samples = []
    for origin, index in zip(drawn.origins, drawn.symmetries, strict=True):
        x, y, z = (slice(start, start + plan.crop) for start in origin)
        samples.append(
            [
                symmetry.apply(field[:, x, y, z], int(index), vectors, mode).tobytes()
                for field, vectors in zip(fields, VECTORS, strict=True)
            ]
        )
    return samples


def delivered(loader: DaliLoader, epoch: int, first_batch: int = 0) -> list[list[list[bytes]]]:
    """Batch by batch, the bytes of each sample."""
    return [
        [[part[slot].contiguous().numpy().tobytes() for part in batch] for slot in range(len(batch.inputs))]
        for batch in loader.epoch(epoch, first_batch)
    ]


def flat(batches: list[list[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(batches))


# --- the axes ------------------------------------------------------------------------------------------------------


def test_one_transposition_permutes_axes_as_all_48_symmetries_do() -> None:
    crop = np.arange(27).reshape(3, 3, 3)
    for index, shape in enumerate(superpattern_shapes(3)):
        turned = crop.reshape(shape).transpose(SUPERPATTERN).reshape(3, 3, 3)
        np.testing.assert_array_equal(turned, crop.transpose(symmetry.PERMUTATIONS[index]))


# --- the same bits as the plain definition -------------------------------------------------------------------------


@needs_dali
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("mode", ["full", "grid"])
def test_batches_are_the_plain_definition_under_all_48_symmetries(
    twins: Twins, fields: Any, mode: str, channels_last: bool
) -> None:
    plan = training_plan(samples=320)
    assert set(plan.epoch(0).symmetries) == set(range(48))
    layout = {"channels_last": channels_last, "symmetry_mode": mode, "vectors": VECTORS}
    with closing(DaliLoader(twins, plan, batch_size=16, **layout)) as loader:
        assert len(loader) == 20
        assert flat(delivered(loader, 0)) == plain(fields, plan, 0, mode)
        format_ = torch.channels_last_3d if channels_last else torch.contiguous_format
        for part in next(loader.epoch(1)):
            assert part.is_contiguous(memory_format=format_)


@needs_dali
@pytest.mark.parametrize("split", ["train", "valid"])
@pytest.mark.parametrize("world", [2, 4])
def test_the_ranks_together_get_the_one_rank_batches(twins: Twins, fields: Any, world: int, split: str) -> None:
    plan = training_plan(samples=27, split=split)
    for rank in range(world):
        loader = DaliLoader(twins, plan, batch_size=8 // world, rank=rank, world_size=world, vectors=VECTORS)
        with closing(loader):
            for epoch in (0, 1):
                wanted = plain(fields, plan, epoch)
                steps = [wanted[start : start + 8] for start in range(0, 27, 8)][: 3 if split == "train" else 4]
                expected = [step[rank::world] for step in steps]
                assert delivered(loader, epoch) == [part for part in expected if part]


@needs_dali
def test_an_epoch_of_fewer_samples_than_a_batch_and_one_of_none(twins: Twins, fields: Any) -> None:
    plan = training_plan(samples=3, split="valid")
    with closing(DaliLoader(twins, plan, batch_size=8, vectors=VECTORS)) as loader:
        assert delivered(loader, 0) == [plain(fields, plan, 0)]
        assert delivered(loader, 1) == [plain(fields, plan, 0)]
    with closing(DaliLoader(twins, plan, batch_size=1, rank=3, world_size=4)) as loader:
        assert len(loader) == 0
        assert list(loader.epoch(0)) == []


@needs_dali
@pytest.mark.parametrize("first", [0, 1, 4, 5])
def test_an_epoch_can_start_in_the_middle(twins: Twins, fields: Any, first: int) -> None:
    plan = training_plan(samples=20)
    with closing(DaliLoader(twins, plan, batch_size=4, vectors=VECTORS)) as loader:
        assert flat(delivered(loader, 2, first)) == plain(fields, plan, 2)[4 * first :]


@needs_dali
@pytest.mark.parametrize("leave_after", [1, 2, 4, 5])
def test_an_epoch_left_early_does_not_disturb_the_next(twins: Twins, fields: Any, leave_after: int) -> None:
    plan = training_plan(samples=20)
    with closing(DaliLoader(twins, plan, batch_size=4, vectors=VECTORS)) as loader:
        batches = loader.epoch(0)
        for _ in range(leave_after):
            next(batches)
        batches.close()
        assert flat(delivered(loader, 1)) == plain(fields, plan, 1)


@needs_dali
def test_a_batch_is_valid_until_the_next_is_asked_for(twins: Twins, fields: Any) -> None:
    """Two batches are read ahead meanwhile, into memory of their own."""
    plan = training_plan(samples=40)
    wanted = plain(fields, plan, 0)
    with closing(DaliLoader(twins, plan, batch_size=4, vectors=VECTORS)) as loader:
        for number, batch in enumerate(loader.epoch(0)):
            torch.empty(10**6).uniform_()  # time for DALI's threads
            for slot, sample in enumerate(wanted[4 * number : 4 * number + 4]):
                assert [part[slot].numpy().tobytes() for part in batch] == sample


# --- what can be wrong ---------------------------------------------------------------------------------------------


def test_without_dali_the_line_names_the_install_command(twins: Twins, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name.startswith("nvidia"):
            raise ModuleNotFoundError("No module named 'nvidia'")
        return real(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", refuse)
    for name in [name for name in sys.modules if name.startswith("nvidia")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UserError, match=r'DALI is not installed; install it with pip install -e "\.\[dali\]"'):
        DaliLoader(twins, training_plan(), batch_size=4)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def saved(array: np.ndarray) -> Callable[[Path], None]:
    return lambda path: np.save(path, array)


ZEROS = np.zeros((BOX, BOX, BOX, 4), np.float32)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda path: path.unlink(), r"no such file: .*bad_data\.npy; make it with python -m utils\.convert_to_npy"),
        (
            cut,
            r"bad_data\.npy: the file is truncated; make it with .* -i .*bad\.h5 --overwrite",
        ),
        (lambda path: path.write_bytes(b""), "it is not a .npy file"),
        (lambda path: path.write_text("text"), "it is not a .npy file"),
        (lambda path: (path.unlink(), path.mkdir()), "Is a directory"),
        (saved(np.array([{}], dtype=object)), "it is not a .npy file"),
        (saved(ZEROS.astype("f8")), "is of type float64, expected little-endian float32"),
        (saved(ZEROS.astype(">f4")), "is of type >f4, expected little-endian float32"),
        (saved(np.asfortranarray(ZEROS)), "is in Fortran order, expected C order"),
        (saved(ZEROS[:8]), r"is \(8, 12, 12, 4\), expected \(12, 12, 12, 4\)"),
        (saved(np.zeros((4, BOX, BOX, BOX), "f4")), r"is \(4, 12, 12, 12\), expected \(12, 12, 12, 4\)"),
        (saved(np.zeros((BOX, BOX, BOX, 3), "f4")), r"is \(12, 12, 12, 3\), expected \(12, 12, 12, 4\)"),
        (saved(ZEROS), r"holds other values than its HDF5 file .*bad\.h5: they are no twins; .* --overwrite"),
    ],
)
def test_a_bad_twin_is_one_line_that_names_it(
    volume_file: VolumeFile, tmp_path: Path, spoil: Callable[[Path], Any], says: str
) -> None:
    source = volume_file(tmp_path / "bad.h5", box=BOX)
    convert(source)
    spoil(tmp_path / "bad_data.npy")
    with pytest.raises(UserError, match=says) as caught:
        open_twins(paths_of(source), KEYS, str(source), (4, 5), BOX, open_volume(source, (4, 5)))
    assert "\n" not in str(caught.value)
    assert str(tmp_path / "bad_data.npy") in str(caught.value)


def test_twins_of_another_shape_than_their_hdf5_file(volume_file: VolumeFile, tmp_path: Path) -> None:
    small, large = volume_file(tmp_path / "small.h5", box=8), volume_file(tmp_path / "large.h5", box=BOX)
    convert(small)
    with pytest.raises(UserError, match=r"small_data\.npy is \(8, 8, 8, 4\), its HDF5 file .*large\.h5 \(4, 12,"):
        open_twins(paths_of(small), KEYS, str(large), (4, 5), 8, open_volume(large, (4, 5)))


def test_a_twin_that_is_not_named_is_asked_for() -> None:
    with pytest.raises(UserError, match=r"train_path_npy_label is not set, .* utils\.convert_to_npy -i box\.h5"):
        open_twins((None, None), (KEYS[1], KEYS[0]), "box.h5", (4, 5), BOX)


@needs_dali
def test_what_dali_says_becomes_one_line() -> None:
    fn, types, pipeline_class = dali.import_dali()
    pipeline = pipeline_class(batch_size=1, num_threads=1, device_id=None)
    with pipeline:
        pipeline.set_outputs(fn.reshape(types.Constant(np.zeros(3, np.float32)), shape=[4]))
    with pytest.raises(UserError, match=r"^NVIDIA DALI failed: .*the same size") as caught, dali._dali_errors():
        pipeline.run()
    assert "\n" not in str(caught.value)


@needs_dali
def test_a_failing_pipeline_is_one_line(twins: Twins, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its other batches cannot be fetched any more; that must not hide what happened."""

    def fail(*_: object) -> None:
        raise RuntimeError("Critical error in pipeline:\nencountered:\n\nCUDA error: unspecified launch failure")

    with closing(DaliLoader(twins, training_plan(), batch_size=4)) as loader:
        batches = loader.epoch(0)
        next(batches)
        monkeypatch.setattr(loader._pipeline, "outputs", fail)
        with pytest.raises(UserError, match=r"^NVIDIA DALI failed: CUDA error: unspecified launch failure$"):
            next(batches)


def read_while_it_shrinks(folder: Path) -> None:
    """A process of its own: whether a check or the reading itself meets it, the process ends."""
    os.dup2(os.open(folder / "stderr", os.O_WRONLY | os.O_CREAT), 2)
    source = folder / "box.h5"
    twins = open_twins(paths_of(source), KEYS, str(source), (4, 5), BOX)
    with one_line_errors(), closing(DaliLoader(twins, training_plan(), batch_size=4)) as loader:
        batches = loader.epoch(0)
        next(batches)
        cut(folder / "box_label.npy")
        list(batches)


@needs_dali
def test_a_twin_that_shrinks_is_one_line(volume_file: VolumeFile, tmp_path: Path) -> None:
    convert(volume_file(tmp_path / "box.h5", box=BOX))
    process = multiprocessing.get_context("spawn").Process(target=read_while_it_shrinks, args=(tmp_path,))
    process.start()
    process.join(60)
    assert process.exitcode == 2
    (line,) = (line for line in (tmp_path / "stderr").read_text().splitlines() if line.startswith("error: "))
    assert "box_label.npy became shorter while it was being read" in line
