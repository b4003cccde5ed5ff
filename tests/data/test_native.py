"""The native loader against the plain definition, for every kind of volume, number of threads and number of ranks."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from utils.data import symmetry
from utils.data.feeder import Batch
from utils.data.native import BATCHES_AHEAD, NativeLoader
from utils.data.plan import SamplePlan
from utils.data.shared import share_volume
from utils.data.volumes import Volume, open_volume
from utils.distributed import Launch, World
from utils.errors import UserError

VolumeFile = Callable[..., Path]
Crops = tuple[np.ndarray, np.ndarray]

BOX, CROP = 12, 4
VECTORS = ([(1, 2, 3)], [(1, 2, 3)])
STORAGES: dict[str, dict[str, Any]] = {
    "mapped": {},
    "chunked": {"chunks": (1, 5, 4, 7)},
    "compressed": {"chunks": True, "compression": "gzip"},
    "inmem": {},
}


@pytest.fixture(scope="module")
def files(volume_file: VolumeFile, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same fields, stored in every way."""
    directory = tmp_path_factory.mktemp("volumes")
    return {name: volume_file(directory / f"{name}.h5", box=BOX, **how) for name, how in STORAGES.items()}


@pytest.fixture(scope="module")
def fields(files: dict[str, Path]) -> Crops:
    with h5py.File(files["mapped"]) as file:
        return file["Nbody"][...], file["Hydro"][...]


@pytest.fixture
def volume(files: dict[str, Path]) -> Volume:
    return open_volume(files["mapped"], (4, 5))


def open_stored(files: dict[str, Path], storage: str, directory: Path) -> Volume:
    volume = open_volume(files[storage], (4, 5))
    assert volume.mapped == (storage in ("mapped", "inmem"))
    if storage != "inmem":
        return volume
    return share_volume(volume, World(Launch("single process"), torch.device("cpu")), str(directory))


def training_plan(samples: int = 24, **changed: Any) -> SamplePlan:
    return SamplePlan(**({"samples": samples, "box": BOX, "crop": CROP, "seed": 3} | changed))


def plain_samples(fields: Crops, plan: SamplePlan, epoch: int, mode: str = "full") -> list[Crops]:
    """The samples of an epoch by definition, in the plan's order."""
    drawn = plan.epoch(epoch)
    samples = []
    for origin, index in zip(drawn.origins, drawn.symmetries, strict=True):
        x, y, z = (slice(start, start + plan.crop) for start in origin)
        inputs, targets = (
            symmetry.apply(field[:, x, y, z], int(index), vectors, mode)
            for field, vectors in zip(fields, VECTORS, strict=True)
        )
        samples.append((inputs, targets))
    return samples


def assert_batch(batch: Batch, samples: Sequence[Crops]) -> None:
    """Bit for bit."""
    assert len(batch.inputs) == len(batch.targets) == len(samples)
    for got_inputs, got_targets, (inputs, targets) in zip(*batch, samples, strict=True):
        assert got_inputs.numpy().tobytes() == inputs.tobytes()
        assert got_targets.numpy().tobytes() == targets.tobytes()


def assert_epoch(batches: Iterator[Batch], samples: Sequence[Crops], batch_size: int) -> None:
    number = 0
    for batch in batches:
        assert_batch(batch, samples[number * batch_size : (number + 1) * batch_size])
        number += 1
    assert number == -(-len(samples) // batch_size)


class SlowField:
    """A field whose reading takes a moment and is counted; `fail` raises at the n-th read."""

    def __init__(
        self, field: np.ndarray, seconds: float = 0.01, fail: int = -1, error: Exception | None = None
    ) -> None:
        self._field, self._seconds, self._fail, self._error = field, seconds, fail, error
        self._lock = threading.Lock()
        self.shape = field.shape
        self.started = self.ended = 0

    @property
    def active(self) -> int:
        return self.started - self.ended

    def __getitem__(self, selection: Any) -> np.ndarray:
        with self._lock:
            number = self.started
            self.started += 1
        if number == self._fail:
            assert self._error is not None
            with self._lock:
                self.ended += 1
            raise self._error
        time.sleep(self._seconds)
        with self._lock:
            self.ended += 1
        return self._field[selection]


def slow_volume(fields: Crops, **how: Any) -> tuple[Volume, SlowField]:
    targets = SlowField(fields[1], **how)
    return Volume("slow.h5", fields[0], targets), targets


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("loader")]


# --- the same bits as the plain definition --------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [0, 1, 3])
@pytest.mark.parametrize("storage", STORAGES)
def test_batches_are_the_plain_definition_under_all_48_symmetries(
    files: dict[str, Path], fields: Crops, storage: str, threads: int, tmp_path: Path
) -> None:
    plan = training_plan(samples=320)
    assert set(plan.epoch(0).symmetries) == set(range(48))
    volume = open_stored(files, storage, tmp_path)
    with closing(NativeLoader(volume, plan, batch_size=16, threads=threads, vectors=VECTORS)) as loader:
        assert len(loader) == 20
        assert_epoch(loader.epoch(0), plain_samples(fields, plan, 0), 16)


@pytest.mark.parametrize("mode", ["full", "grid"])
def test_the_mode_decides_whether_components_move(volume: Volume, fields: Crops, mode: str) -> None:
    plan = training_plan()
    with closing(NativeLoader(volume, plan, batch_size=6, vectors=VECTORS, symmetry_mode=mode)) as loader:
        assert_epoch(loader.epoch(0), plain_samples(fields, plan, 0, mode), 6)
    inputs = [np.stack([sample[0] for sample in plain_samples(fields, plan, 0, each)]) for each in ("full", "grid")]
    np.testing.assert_array_equal(inputs[0][:, 0], inputs[1][:, 0])
    assert not np.array_equal(inputs[0][:, 1:], inputs[1][:, 1:])


@pytest.mark.parametrize("split", ["train", "valid"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_ranks_together_get_the_one_rank_batches(volume: Volume, fields: Crops, world: int, split: str) -> None:
    """Step for step the same global batch, over two epochs; rank r has samples r, r + world, … of it."""
    plan, global_batch = training_plan(samples=27, split=split), 8
    loaders = [
        NativeLoader(volume, plan, batch_size=8 // world, rank=rank, world_size=world, vectors=VECTORS)
        for rank in range(world)
    ]
    for epoch in (0, 1):
        samples = plain_samples(fields, plan, epoch)
        steps = 0
        for batches in itertools.zip_longest(*(loader.epoch(epoch) for loader in loaders)):
            together = samples[steps * global_batch : (steps + 1) * global_batch]
            for rank, batch in enumerate(batches):
                if batch is None:  # the last validation step has 3 samples: none for rank 3 of 4
                    assert together[rank::world] == []
                else:
                    assert_batch(batch, together[rank::world])
            steps += 1
        assert steps == (3 if split == "train" else 4)
    for loader in loaders:
        loader.close()


def test_one_epoch_after_the_other(volume: Volume, fields: Crops) -> None:
    """Five batches an epoch over three buffers: the buffers' turn differs from epoch to epoch."""
    plan = training_plan(samples=20)
    with closing(NativeLoader(volume, plan, batch_size=4, threads=3, vectors=VECTORS)) as loader:
        for epoch in (0, 1, 2, 1):
            assert_epoch(loader.epoch(epoch), plain_samples(fields, plan, epoch), 4)


@pytest.mark.parametrize("first", [0, 1, 4, 5])
def test_an_epoch_can_start_in_the_middle(volume: Volume, fields: Crops, first: int) -> None:
    plan = training_plan(samples=20)
    with closing(NativeLoader(volume, plan, batch_size=4, vectors=VECTORS)) as loader:
        assert_epoch(loader.epoch(2, first_batch=first), plain_samples(fields, plan, 2)[4 * first :], 4)


def test_training_drops_the_rest_and_validation_gives_it_as_a_smaller_batch(volume: Volume, fields: Crops) -> None:
    training, validation = training_plan(samples=14), training_plan(samples=14, split="valid")
    with closing(NativeLoader(volume, training, batch_size=4, vectors=VECTORS)) as loader:
        assert len(loader) == 3
        assert_epoch(loader.epoch(0), plain_samples(fields, training, 0)[:12], 4)
    with closing(NativeLoader(volume, validation, batch_size=4, vectors=VECTORS)) as loader:
        assert len(loader) == 4
        for epoch in (0, 5):
            assert_epoch(loader.epoch(epoch), plain_samples(fields, validation, 0), 4)


def test_a_rank_without_samples_has_an_empty_epoch(volume: Volume) -> None:
    plan = training_plan(samples=2, split="valid")
    with closing(NativeLoader(volume, plan, batch_size=1, rank=3, world_size=4)) as loader:
        assert len(loader) == 0
        assert list(loader.epoch(0)) == []


def test_two_loaders_work_at_once(volume: Volume, fields: Crops) -> None:
    plans = training_plan(samples=20), training_plan(samples=20, split="valid")
    loaders = [NativeLoader(volume, plan, batch_size=4, threads=2, vectors=VECTORS) for plan in plans]
    expected = [plain_samples(fields, plan, 0) for plan in plans]
    for number, batches in enumerate(zip(*(loader.epoch(0) for loader in loaders), strict=True)):
        for batch, samples in zip(batches, expected, strict=True):
            assert_batch(batch, samples[4 * number : 4 * number + 4])
    for loader in loaders:
        loader.close()


@pytest.mark.parametrize("channels", [(4, 5), (1, 2)], ids="{} channels".format)
def test_channels_last_changes_the_memory_format_and_no_value(
    volume_file: VolumeFile, tmp_path: Path, channels: tuple[int, int]
) -> None:
    """Also in the smaller last batch, and where a single channel would fit both formats."""
    volume = open_volume(volume_file(tmp_path / "box.h5", box=BOX, channels=channels), channels)
    plan = training_plan(samples=14, split="valid")
    loaders = [NativeLoader(volume, plan, batch_size=4, channels_last=last) for last in (False, True)]
    sizes = []
    for batch, last in zip(*(loader.epoch(0) for loader in loaders), strict=True):
        sizes.append(len(last.inputs))
        for part, part_last, count in zip(batch, last, channels, strict=True):
            assert part.is_contiguous()
            assert part_last.is_contiguous(memory_format=torch.channels_last_3d)
            assert part_last.stride() == (count * CROP**3, 1, count * CROP**2, count * CROP, count)
            assert part_last.numpy().tobytes() == part.numpy().tobytes()
    assert sizes == [4, 4, 4, 2]
    for loader in loaders:
        loader.close()


# --- buffers and threads -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [0, 2])
def test_a_batch_is_valid_until_the_next_is_asked_for(fields: Crops, threads: int) -> None:
    plan = training_plan(samples=20)
    volume, _ = slow_volume(fields, seconds=0.0)
    samples = plain_samples(fields, plan, 0)
    with closing(NativeLoader(volume, plan, batch_size=4, threads=threads, vectors=VECTORS)) as loader:
        for number, batch in enumerate(loader.epoch(0)):
            time.sleep(0.02)  # the threads have long done all they may do by now
            assert_batch(batch, samples[4 * number : 4 * number + 4])


def test_a_batchs_memory_is_rewritten_two_requests_later_at_the_earliest(fields: Crops) -> None:
    """The copy to the device may still read a batch while the next is being asked for (see feeder.py)."""
    plan = training_plan(samples=20)
    volume, _ = slow_volume(fields, seconds=0.0)
    samples = plain_samples(fields, plan, 0)
    with closing(NativeLoader(volume, plan, batch_size=4, threads=2, vectors=VECTORS)) as loader:
        batches = loader.epoch(0)
        previous = next(batches)
        for number, batch in enumerate(batches):
            time.sleep(0.02)
            assert_batch(previous, samples[4 * number : 4 * number + 4])
            previous = batch


def test_batches_are_assembled_while_the_consumer_works(fields: Crops) -> None:
    plan = training_plan(samples=20)
    volume, field = slow_volume(fields, seconds=0.0)
    with closing(NativeLoader(volume, plan, batch_size=4, threads=2, vectors=VECTORS)) as loader:
        batches = loader.epoch(0)
        next(batches)
        deadline = time.monotonic() + 10
        while field.ended < 8 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert field.ended >= 8, "the second batch is not begun before it is asked for"
        time.sleep(0.02)
        assert field.ended <= 4 * (BATCHES_AHEAD + 1), "more batches are assembled than there are buffers"
        batches.close()


@pytest.mark.parametrize("leave_after", [1, 2, 3])
def test_an_epoch_left_early_does_not_disturb_the_next(fields: Crops, leave_after: int) -> None:
    plan = training_plan(samples=20)
    volume, field = slow_volume(fields)
    with closing(NativeLoader(volume, plan, batch_size=4, threads=3, vectors=VECTORS)) as loader:
        batches = loader.epoch(0)
        for _ in range(leave_after):
            next(batches)
        batches.close()
        assert field.active == 0, "a thread still reads, and would write to a buffer of the next epoch"
        started = field.started
        assert_epoch(loader.epoch(1), plain_samples(fields, plan, 1), 4)
        assert field.started == started + 20, "a task of the epoch that was left was carried out later"


def test_leaving_a_loop_by_break_is_leaving_the_epoch(fields: Crops) -> None:
    plan = training_plan(samples=20)
    volume, field = slow_volume(fields)
    with closing(NativeLoader(volume, plan, batch_size=4, threads=3, vectors=VECTORS)) as loader:
        for _ in loader.epoch(0):
            break
        assert field.active == 0
        assert_epoch(loader.epoch(1), plain_samples(fields, plan, 1), 4)


@pytest.mark.parametrize("threads", [0, 2])
def test_a_read_error_in_a_thread_reaches_the_consumer_in_one_line(fields: Crops, threads: int) -> None:
    plan = training_plan(samples=20)
    volume, _ = slow_volume(fields, seconds=0.0, fail=9, error=OSError("filter returned failure"))
    with closing(NativeLoader(volume, plan, batch_size=4, threads=threads, vectors=VECTORS)) as loader:
        with pytest.raises(UserError, match=r"cannot read slow\.h5: filter returned failure") as caught:
            list(loader.epoch(0))
        assert "\n" not in str(caught.value)


def test_another_error_in_a_thread_reaches_the_consumer_as_it_is(fields: Crops) -> None:
    volume, _ = slow_volume(fields, seconds=0.0, fail=5, error=ZeroDivisionError("bug"))
    loader = NativeLoader(volume, training_plan(samples=20), batch_size=4, threads=2, vectors=VECTORS)
    with closing(loader), pytest.raises(ZeroDivisionError, match="bug"):
        list(loader.epoch(0))


def test_after_an_error_no_thread_writes_any_more_and_the_loader_can_go_on(fields: Crops) -> None:
    """The tasks of the failed batch itself, too, are waited for: they were forgotten once."""
    plan = training_plan(samples=32)
    volume, field = slow_volume(fields, fail=0, error=OSError("once"))
    with closing(NativeLoader(volume, plan, batch_size=16, threads=3, vectors=VECTORS)) as loader:
        with pytest.raises(UserError):
            next(loader.epoch(0))
        assert field.active == 0
        started = field.started
        assert_epoch(loader.epoch(1), plain_samples(fields, plan, 1), 16)
        assert field.started == started + 32


def test_close_leaves_no_threads(fields: Crops) -> None:
    before = set(loader_threads())
    volume, field = slow_volume(fields)
    loader = NativeLoader(volume, training_plan(samples=20), batch_size=4, threads=3, vectors=VECTORS)
    batches = loader.epoch(0)
    next(batches)
    assert len(set(loader_threads()) - before) > 0
    loader.close()
    assert set(loader_threads()) == before
    assert field.active == 0
    loader.close()  # twice does no harm


def test_without_threads_none_is_started(volume: Volume) -> None:
    before = threading.active_count()
    with closing(NativeLoader(volume, training_plan(), batch_size=4, threads=0)) as loader:
        next(loader.epoch(0))
        assert threading.active_count() == before
