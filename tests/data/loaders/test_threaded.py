"""The threaded crop loader: storage formats, buffers, threads, errors. test_loaders.py tests the common contract."""

from __future__ import annotations

import itertools
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from processes import wait_until
from reference_samples import Fields, VolumeFile, cubes, digest, loader_of, rank_batches, read_fields, reference

from utils.data.files.hdf5 import Volume, open_volume
from utils.data.loaders.threaded import ThreadedCropLoader
from utils.data.plan import SamplePlan
from utils.errors import UserError

BOX, CROP = 12, 9  # numpy copies crops of this size without the interpreter lock, so that threads overlap
STORAGES: dict[str, dict[str, Any]] = {
    "mapped": {},
    "chunked": {"chunks": (1, 5, 4, 7)},
    "compressed": {"chunks": True, "compression": "gzip"},
}


@pytest.fixture(scope="module")
def files(volume_file: VolumeFile, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same fields in every storage format."""
    directory = tmp_path_factory.mktemp("volumes")
    return {name: volume_file(directory / f"{name}.h5", box=BOX, **how) for name, how in STORAGES.items()}


@pytest.fixture(scope="module")
def fields(files: dict[str, Path]) -> Fields:
    return read_fields(files["mapped"])


def threaded(volume: Volume, plan: SamplePlan, **keys: Any) -> ThreadedCropLoader:
    return loader_of(ThreadedCropLoader, [volume], plan, **keys)


def training_plan(samples: int = 20, **changed: Any) -> SamplePlan:
    return SamplePlan(**({"samples": samples, "boxes": cubes(BOX), "crop": CROP, "seed": 3} | changed))


def batches_of(fields: Fields, plan: SamplePlan, epoch: int, batch_size: int = 4) -> list[list[str]]:
    """The digests of an epoch's batches by definition."""
    return rank_batches(reference([fields], plan, epoch), batch_size, 0, 1, drop_last=plan.split == "train")


@pytest.mark.parametrize("storage", STORAGES)
def test_every_storage_format_and_number_of_threads_gives_the_same_bits(
    files: dict[str, Path], fields: Fields, storage: str
) -> None:
    volume, plan = open_volume(files[storage], (4, 5)), training_plan(samples=320)
    assert volume.mapped == (storage == "mapped")
    assert set(plan.epoch(0).symmetries) == set(range(48))
    expected = batches_of(fields, plan, 0, 16)
    for threads in (1, 3):
        with closing(threaded(volume, plan, local_batch_size=16, num_data_workers=threads)) as loader:
            assert [digest(batch) for batch in loader.epoch(0)] == expected, f"{threads} threads"


# --- buffers and threads -------------------------------------------------------------------------------------------


class CountedField:
    """A field that counts its reads, which take `seconds`; read number `fail` fails."""

    def __init__(self, field: Any, seconds: float = 0.0, fail: int = -1) -> None:
        self._field, self._seconds, self._fail = field, seconds, fail
        self._lock = threading.Lock()
        self.shape = field.shape
        self.started = self.ended = 0

    @property
    def active(self) -> int:
        return self.started - self.ended

    def __getitem__(self, selection: Any) -> Any:
        with self._lock:
            number = self.started
            self.started += 1
        try:
            if number == self._fail:
                raise OSError("filter returned failure")
            time.sleep(self._seconds)
            return self._field[selection]
        finally:
            with self._lock:
                self.ended += 1


def counted_volume(fields: Fields, **how: Any) -> tuple[Volume, CountedField]:
    targets = CountedField(fields[1], **how)
    return Volume("slow.h5", fields[0], targets), targets


def loader_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("loader")}


def test_one_batch_is_assembled_ahead_and_the_last_two_are_not_overwritten(fields: Fields) -> None:
    """The copy to the device may still read a batch while the next is requested (prefetcher.py)."""
    plan = training_plan()
    volume, field = counted_volume(fields)
    expected = batches_of(fields, plan, 0)
    given = []
    with closing(threaded(volume, plan)) as loader:
        for number, batch in enumerate(loader.epoch(0)):
            given.append(batch)
            ahead = min(20, 4 * (number + 2))
            wait_until(lambda ahead=ahead: field.ended >= ahead, what=lambda: "the next batch, before it is requested")
            assert field.started == ahead, "more batches are assembled than buffers exist"
            assert [digest(batch) for batch in given[-2:]] == expected[max(0, number - 1) : number + 1]
    assert len(given) == 5


@pytest.mark.parametrize(("end", "threads"), [(1, 3), (2, 3), (3, 3), ("an error", 1), ("an error", 3)])
def test_an_epoch_that_ends_early_does_not_disturb_the_next(fields: Fields, end: int | str, threads: int) -> None:
    """After some batches, or at an error in one line: the loader once did not wait for the failed batch's tasks."""
    plan = training_plan()
    volume, field = counted_volume(fields, seconds=0.01, fail=1 if end == "an error" else -1)
    with closing(threaded(volume, plan, num_data_workers=threads)) as loader:
        batches = loader.epoch(0)
        if end == "an error":
            with pytest.raises(UserError, match=r"cannot read slow\.h5: filter returned failure"):
                next(batches)
        else:
            assert len(list(itertools.islice(batches, end))) == end
            batches.close()
        assert field.active == 0, "a thread still reads and would write to a buffer of the next epoch"
        started = field.started
        assert [digest(batch) for batch in loader.epoch(1)] == batches_of(fields, plan, 1)
        assert field.started == started + 20, "a task of the ended epoch ran later"


def test_close_leaves_no_threads(fields: Fields) -> None:
    """Also in the middle of an epoch and when called twice."""
    before = loader_threads()
    volume, field = counted_volume(fields, seconds=0.01)
    loader = threaded(volume, training_plan(), num_data_workers=3)
    batches = loader.epoch(0)
    next(batches)
    assert loader_threads() - before
    loader.close()
    assert loader_threads() == before
    assert field.active == 0
    loader.close()
