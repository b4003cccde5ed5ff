"""The resident loader and the loading of its volume: on the CPU, on a device's path with Triton's interpreter, and on
several ranks and nodes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from processes import run_ranks

from utils import distributed
from utils.data import gather, resident, symmetry
from utils.data.feeder import Batch, Fills, memory_format
from utils.data.plan import SamplePlan
from utils.data.resident import ResidentLoader, check_fits, load_resident
from utils.data.volumes import Volume, open_volume
from utils.distributed import Launch, World
from utils.errors import UserError
from utils.side_work import SideWork

VolumeFile = Callable[..., Path]
Fields = tuple[np.ndarray, np.ndarray]

BOX, CROP = 8, 3
VECTORS = ([(1, 2, 3)], [(1, 2, 3)])
ALONE = World(Launch("single process"), torch.device("cpu"))
GIB = 2**30


@pytest.fixture(scope="module")
def path(volume_file: VolumeFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return volume_file(tmp_path_factory.mktemp("volumes") / "box.h5", box=BOX)


@pytest.fixture(scope="module")
def fields(path: Path) -> Fields:
    with h5py.File(path) as file:
        return file["Nbody"][...], file["Hydro"][...]


def in_memory(fields: Fields, dtype: torch.dtype = torch.float32) -> Volume:
    return Volume("box.h5", *(torch.from_numpy(field).to(dtype) for field in fields))


def a_plan(samples: int = 24, **changed: Any) -> SamplePlan:
    return SamplePlan(**({"samples": samples, "box": BOX, "crop": CROP, "seed": 3} | changed))


def plain_epoch(fields: Fields, plan: SamplePlan, epoch: int, mode: str = "full") -> list[torch.Tensor]:
    """Inputs and targets [N, C, D, D, D] of an epoch by definition, in the plan's order."""
    drawn = plan.epoch(epoch)
    parts = []
    for field, vectors in zip(fields, VECTORS, strict=True):
        samples = []
        for origin, index in zip(drawn.origins, drawn.symmetries, strict=True):
            x, y, z = (slice(start, start + plan.crop) for start in origin)
            samples.append(symmetry.apply(field[:, x, y, z], int(index), vectors, mode))
        parts.append(torch.from_numpy(np.stack(samples).astype(np.float32)))
    return parts


def assert_same(batch: Batch, expected: list[torch.Tensor], channels_last: bool = False) -> None:
    for part, values in zip(batch, expected, strict=True):
        assert part.dtype == torch.float32
        assert part.is_contiguous(memory_format=memory_format(channels_last))
        assert torch.equal(part.contiguous().view(torch.int32), values.view(torch.int32))


def assert_epoch(batches: Iterator[Batch], parts: list[torch.Tensor], size: int, channels_last: bool = False) -> None:
    count = 0
    for number, batch in enumerate(batches):
        assert_same(batch, [part[number * size : (number + 1) * size] for part in parts], channels_last)
        count += len(batch.inputs)
    assert count == len(parts[0])


# --- the loader ----------------------------------------------------------------------------------------------------


class ImmediateFeeder:
    """In the stream feeder's place, without streams: what is enqueued is done at once."""

    def __init__(self, device: torch.device, shapes: list[tuple[int, ...]], channels_last: bool) -> None:
        assert device.type == "cuda"
        form = memory_format(channels_last)
        self._slots = [Batch(*(torch.empty(shape, memory_format=form) for shape in shapes)) for _ in range(3)]

    def feed(self, fills: Fills) -> Generator[Batch, None, None]:
        with closing(fills):
            for number, (size, fill) in enumerate(fills):
                slot = Batch(*(part[:size] for part in self._slots[number % 3]))
                fill(slot)
                yield slot


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """'cuda' is the device's path on the CPU's tensors: the kernel in Triton's interpreter, and no streams."""
    if request.param == "cuda":
        pytest.importorskip("triton.language")
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        monkeypatch.setattr(resident, "StreamFeeder", ImmediateFeeder)
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        gather._kernel.cache_clear()
    yield torch.device(request.param)
    gather._kernel.cache_clear()


@pytest.mark.parametrize("mode", ["full", "grid"])
def test_batches_are_the_plain_definition(device: torch.device, fields: Fields, mode: str) -> None:
    plan = a_plan(12)
    options: dict[str, Any] = {"vectors": VECTORS, "symmetry_mode": mode, "channels_last": True}
    with closing(ResidentLoader(in_memory(fields), plan, batch_size=3, device=device, **options)) as loader:
        assert len(loader) == 4
        for epoch in (0, 1):
            assert_epoch(loader.epoch(epoch), plain_epoch(fields, plan, epoch, mode), 3, channels_last=True)


def test_what_fills_a_batch_is_the_same_work_always(monkeypatch: pytest.MonkeyPatch, fields: Fields) -> None:
    """As a CUDA graph needs it: the same call, again and again, gathers batch after batch of a rank's plan."""
    pytest.importorskip("triton.language")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(resident, "StreamFeeder", ImmediateFeeder)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    gather._kernel.cache_clear()
    plan, options = a_plan(14), {"vectors": VECTORS, "rank": 1, "world_size": 2, "batch_size": 2}
    loader = ResidentLoader(in_memory(fields), plan, device=torch.device("cuda"), **options)
    expected = [Batch(*(part.clone() for part in batch)) for batch in loader.epoch(3, first_batch=1)]
    fills = loader._fills(plan.epoch(3), 1)
    slot = Batch(*(torch.empty_like(part) for part in expected[0]))
    _, first = next(fills)
    first(slot)
    for number, batch in enumerate(expected):
        if number:
            loader._fill(slot)
        assert all(torch.equal(one, other) for one, other in zip(slot, batch, strict=True))
    place = SideWork()
    loader.offer_to(place)
    assert loader._feeder.beside is place
    gather._kernel.cache_clear()


def test_channels_first_changes_no_bit(device: torch.device, fields: Fields) -> None:
    plan = a_plan(4)
    with closing(ResidentLoader(in_memory(fields), plan, batch_size=2, vectors=VECTORS, device=device)) as loader:
        assert_epoch(loader.epoch(0), plain_epoch(fields, plan, 0), 2)


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_on_the_cpu_threads_change_no_bit(fields: Fields, threads: int) -> None:
    plan = a_plan(320)
    assert set(plan.epoch(0).symmetries) == set(range(48))
    with closing(ResidentLoader(in_memory(fields), plan, batch_size=16, vectors=VECTORS, threads=threads)) as loader:
        assert_epoch(loader.epoch(0), plain_epoch(fields, plan, 0), 16)


def test_float16_storage_gives_the_rounded_volumes_batches(device: torch.device, fields: Fields) -> None:
    plan = a_plan(8)
    options: dict[str, Any] = {"vectors": VECTORS, "channels_last": True, "device": device}
    rounded = tuple(field.astype(np.float16) for field in fields)
    with closing(ResidentLoader(in_memory(fields, torch.float16), plan, batch_size=8, **options)) as loader:
        assert_epoch(loader.epoch(0), plain_epoch(rounded, plan, 0), 8, channels_last=True)


@pytest.mark.parametrize("split", ["train", "valid"])
def test_four_ranks_together_get_the_one_rank_batches(device: torch.device, fields: Fields, split: str) -> None:
    """Step for step; validation gives its last samples, too, none to the last rank."""
    plan = a_plan(11, split=split)
    options: dict[str, Any] = {"vectors": VECTORS, "channels_last": True, "device": device}
    loaders = [
        ResidentLoader(in_memory(fields), plan, batch_size=2, rank=rank, world_size=4, **options) for rank in range(4)
    ]
    assert [len(loader) for loader in loaders] == ([1] * 4 if split == "train" else [2, 2, 2, 1])
    expected = plain_epoch(fields, plan, 2)
    for step, batches in enumerate(itertools.zip_longest(*(loader.epoch(2) for loader in loaders))):
        for rank, batch in enumerate(batches):
            values = [part[8 * step : 8 * step + 8][rank::4] for part in expected]
            if batch is None:
                assert len(values[0]) == 0
            else:
                assert_same(batch, values, channels_last=True)
    for loader in loaders:
        loader.close()


def test_an_epoch_can_start_in_the_middle_and_end_early(device: torch.device, fields: Fields) -> None:
    plan = a_plan(8)
    options: dict[str, Any] = {"vectors": VECTORS, "channels_last": True, "device": device}
    with closing(ResidentLoader(in_memory(fields), plan, batch_size=2, **options)) as loader:
        left = loader.epoch(0)
        next(left)
        left.close()
        for first in (1, 4):
            expected = [part[2 * first :] for part in plain_epoch(fields, plan, 1)]
            assert_epoch(loader.epoch(1, first_batch=first), expected, 2, channels_last=True)


def test_arrays_in_memory_are_used_without_a_copy(fields: Fields) -> None:
    """As share_volume gives them: one copy a node stays one."""
    field = fields[0].copy()
    with closing(ResidentLoader(Volume("box.h5", field, fields[1]), a_plan(8), batch_size=8)) as loader:
        before = next(loader.epoch(0)).inputs.clone()
        field += 1
        assert torch.equal(next(loader.epoch(0)).inputs, before + 1)


# --- does it fit? --------------------------------------------------------------------------------------------------


def test_what_fits_passes_to_the_byte() -> None:
    check_fits([36 * GIB, 2 * GIB], torch.float32, 80 * GIB, 42 * GIB)
    check_fits([36 * GIB, 2 * GIB], torch.float16, 80 * GIB, 61 * GIB)
    with pytest.raises(UserError):
        check_fits([36 * GIB, 2 * GIB], torch.float32, 80 * GIB - 1, 42 * GIB)


@pytest.mark.parametrize(
    ("dtype", "free", "line"),
    [
        (
            torch.float32,
            40,
            "the volumes take 38.00 GiB as float32; the device has 40.00 GiB free, and 8.50 GiB are reserved for "
            "training; use --set resident_dtype=float16 (19.00 GiB) or --data_loader_config=lowmem",
        ),
        (
            torch.float32,
            24,
            "the volumes take 38.00 GiB as float32; the device has 24.00 GiB free, and 8.50 GiB are reserved for "
            "training; use --data_loader_config=lowmem",
        ),
        (
            torch.float16,
            24,
            "the volumes take 19.00 GiB as float16; the device has 24.00 GiB free, and 8.50 GiB are reserved for "
            "training; use --data_loader_config=lowmem",
        ),
    ],
    ids=["two bytes would fit", "nothing fits", "two bytes do not fit"],
)
def test_what_does_not_fit_is_told_with_sizes_and_a_remedy(dtype: torch.dtype, free: int, line: str) -> None:
    with pytest.raises(UserError) as caught:
        check_fits([36 * GIB, 2 * GIB], dtype, free * GIB, 17 * GIB // 2)
    assert str(caught.value) == line


def test_running_out_of_memory_while_loading_is_one_line(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate a lot.")

    size = open_volume(path, (4, 5)).bytes
    monkeypatch.setattr(torch, "empty", no_memory)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (size - 1, size))
    with pytest.raises(UserError, match=r"^the volumes take .* as float32; .*float16 .*=lowmem$"):
        load_resident(open_volume(path, (4, 5)), World(Launch("single process"), torch.device("cuda")), torch.float32)


# --- loading -------------------------------------------------------------------------------------------------------


def test_alone_the_volume_is_read_into_tensors(path: Path, fields: Fields) -> None:
    for dtype in (torch.float32, torch.float16):
        volume = load_resident(open_volume(path, (4, 5)), ALONE, dtype)
        assert (volume.path, volume.box) == (str(path), BOX)
        for got, values in zip((volume.inputs, volume.targets), fields, strict=True):
            assert torch.equal(got, torch.from_numpy(values).to(dtype))


def test_a_chunked_file_whose_slabs_do_not_divide_the_box(
    volume_file: VolumeFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resident, "SLAB_VALUES", 3 * BOX**2)
    path = volume_file(tmp_path / "chunked.h5", box=BOX, chunks=(1, 5, 4, 7), compression="gzip")
    volume = load_resident(open_volume(path, (4, 5)), ALONE, torch.float16)
    with h5py.File(path) as file:
        assert torch.equal(volume.targets, torch.from_numpy(file["Hydro"][...]).half())


def test_float16_loses_less_than_one_part_in_ten_thousand() -> None:
    """Of values between -1 and 1, as the channels are scaled: 8.2e-5 mean absolute at most, half of float16's step."""
    values = 2 * torch.rand(10**6, generator=torch.Generator().manual_seed(0)) - 1
    stored = torch.empty(10**6, dtype=torch.float16)
    resident._store(values, stored, "values")
    assert 7e-5 < (stored.float() - values).abs().mean() <= 8.2e-5


def write_box(path: Path, value: float) -> Volume:
    with h5py.File(path, "w") as file:
        for name, channels in (("Nbody", 4), ("Hydro", 5)):
            file[name] = np.zeros((channels, 4, 4, 4), dtype=np.float32)
        file["Hydro"][2, 1, 1, 1] = value
    return open_volume(path, (4, 5))


@pytest.mark.parametrize("value", [65505, -1e6, float("inf")])
def test_values_beyond_float16_are_refused(tmp_path: Path, value: float) -> None:
    volume = write_box(tmp_path / "large.h5", value)
    with pytest.raises(UserError, match=r"Hydro\[2\] has values beyond ±65504, .*use --set resident_dtype=float32$"):
        load_resident(volume, ALONE, torch.float16)
    assert load_resident(volume, ALONE, torch.float32).targets.abs().max() == abs(value)


def test_the_largest_float16_and_nan_are_kept(tmp_path: Path) -> None:
    """NaN are preflight's to tell."""
    for value in (65504, -65504, float("nan")):
        stored = load_resident(write_box(tmp_path / f"{value}.h5", value), ALONE, torch.float16).targets[2, 1, 1, 1]
        assert stored == value or (stored != stored and value != value)


# --- several ranks -------------------------------------------------------------------------------------------------


class CountedField:
    """A field that counts its readings, and fails at the fourth if it is given an error."""

    def __init__(self, field: np.ndarray, error: Exception | None = None) -> None:
        self._field, self._error = field, error
        self.shape = field.shape
        self.readings = 0

    def __getitem__(self, selection: Any) -> np.ndarray:
        self.readings += 1
        if self.readings == 4 and self._error is not None:
            raise self._error
        return self._field[selection]


# What is loaded, and what the reading of the rank that is named fails with.
LOADINGS: list[tuple[torch.dtype, Exception | None]] = [
    (torch.float32, OSError(5, "Input/output error")),
    (torch.float16, OSError("filter returned failure")),
    (torch.float16, ZeroDivisionError("bug")),
    (torch.float32, None),
    (torch.float16, None),
]


# The host and local rank of each of four ranks, and the one of each node that reads.
PLACEMENTS: list[tuple[str, list[int], list[int]]] = [
    ("aaaa", [0, 1, 2, 3], [0]),
    ("abab", [1, 1, 0, 0], [2, 3]),
    ("aaab", [0, 1, 2, 0], [0, 3]),
]

Answer = tuple[list[bytes] | str, int]


def load_on_nodes(world: World, path: str) -> list[list[Answer]]:
    """For each placement and loading what this rank gets, the fields or an error, and how often it has read."""
    resident.SLAB_VALUES = 5 * BOX**2
    plain = open_volume(path, (4, 5))
    answers: list[list[Answer]] = []
    for hosts, local_ranks, sources in PLACEMENTS:
        distributed.socket.gethostname = lambda hosts=hosts: hosts[world.rank]
        placed = World(replace(world.launch, local_rank=local_ranks[world.rank]), world.device)
        answers.append([])
        for dtype, error in LOADINGS:
            inputs = CountedField(plain.inputs)
            targets = CountedField(plain.targets, error if world.rank == sources[-1] else None)
            got: list[bytes] | str
            try:
                # Not load_resident, which takes shared memory for float32 on the CPU: what devices do.
                loaded = resident._load(Volume(plain.path, inputs, targets), placed, dtype)
                got = [field.numpy().tobytes() for field in loaded]
            except (UserError, ZeroDivisionError) as caught:
                got = f"{type(caught).__name__}: {caught}"
            answers[-1].append((got, inputs.readings + targets.readings))
    return answers


def test_one_rank_a_node_reads_and_all_ranks_have_the_volume_or_the_same_error(path: Path, fields: Fields) -> None:
    """On one node and on two, of equal and of different size, one with a single rank; the last reader's file fails."""
    slabs = 2  # a channel, of 5 and 3 planes
    for rank, answers in enumerate(run_ranks(load_on_nodes, 4, str(path))):
        for (_, _, sources), answer in zip(PLACEMENTS, answers, strict=True):
            failing = sources[-1]
            errors = [
                f"UserError: rank {failing}: cannot read {path}: Input/output error",
                f"UserError: rank {failing}: cannot read {path}: filter returned failure",
                "ZeroDivisionError: bug" if rank == failing else f"UserError: rank {failing}: ZeroDivisionError('bug')",
            ]
            for (dtype, error), (got, readings) in zip(LOADINGS, answer, strict=True):
                if error is None:
                    assert got == [torch.from_numpy(field).to(dtype).numpy().tobytes() for field in fields]
                else:
                    assert got == errors.pop(0)
                if rank not in sources:
                    assert readings == 0
                elif error is None or rank != failing:
                    assert readings == 9 * slabs
                else:
                    assert readings == 4 * slabs + 4, "after a failure nothing more is read"


def test_loading_shows_progress_on_the_first_rank_alone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []

    class Seen(resident.Progress):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            seen.append((*arguments, options["silent"]))
            super().__init__(*arguments, **options)

    monkeypatch.setattr(resident, "Progress", Seen)
    load_resident(open_volume(path, (4, 5)), ALONE, torch.float16)
    assert seen == [("reading box.h5 into memory", 9, "slabs", False)]
