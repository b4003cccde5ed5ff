"""The threaded crop loader: buffers, threads, errors. test_loaders.py compares its batches."""

import itertools
import threading
import time
from contextlib import closing
from typing import Any

import pytest
from processes import wait_until
from reference_samples import Fields, cubes, digest, loader_of, rank_batches, read_fields, reference
from volume_files import write_volume

from utils.data.loaders.threaded import ThreadedCropLoader
from utils.data.plan import SamplePlan
from utils.errors import UserError
from utils.volumes.hdf5 import Volume

BOX, CROP = 12, 9  # numpy copies crops of this size without the interpreter lock, so that threads overlap
PLAN = SamplePlan(20, cubes(BOX), CROP, seed=3)


@pytest.fixture(scope="module")
def fields(tmp_path_factory: Any) -> Fields:
    return read_fields(write_volume(tmp_path_factory.mktemp("volumes") / "box.h5", box=BOX))


def threaded(fields: Fields, targets: Any, **keys: Any) -> ThreadedCropLoader:
    return loader_of(ThreadedCropLoader, [Volume("slow.h5", fields[0], targets)], PLAN, **keys)


def batches_of(fields: Fields, epoch: int) -> list[list[str]]:
    """The digests of an epoch's batches by definition."""
    return rank_batches(reference([fields], PLAN, epoch), 4, 0, 1, drop_last=True)


class CountedField:
    """A field that counts its reads, which take `seconds`; read number `fail` fails."""

    def __init__(self, field: Any, seconds: float = 0.0, fail: int = -1) -> None:
        self.field, self.seconds, self.fail = field, seconds, fail
        self.lock, self.shape = threading.Lock(), field.shape
        self.started = self.ended = 0

    def __getitem__(self, selection: Any) -> Any:
        with self.lock:
            number = self.started
            self.started += 1
        try:
            if number == self.fail:
                raise OSError("filter returned failure")
            time.sleep(self.seconds)
            return self.field[selection]
        finally:
            with self.lock:
                self.ended += 1


def test_one_batch_is_assembled_ahead_and_the_last_two_are_not_overwritten(fields: Fields) -> None:
    """The copy to the device may still read a batch while the next is requested (prefetcher.py)."""
    field = CountedField(fields[1])
    expected, given = batches_of(fields, 0), []
    with closing(threaded(fields, field)) as loader:
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
    field = CountedField(fields[1], seconds=0.01, fail=1 if end == "an error" else -1)
    with closing(threaded(fields, field, num_data_workers=threads)) as loader:
        batches = loader.epoch(0)
        if end == "an error":
            with pytest.raises(UserError, match=r"cannot read slow\.h5: filter returned failure"):
                next(batches)
        else:
            assert len(list(itertools.islice(batches, end))) == end
            batches.close()
        started = field.started
        assert field.ended == started, "a thread still reads and would write to a buffer of the next epoch"
        assert [digest(batch) for batch in loader.epoch(1)] == batches_of(fields, 1)
        assert field.started == started + 20, "a task of the ended epoch ran later"


def test_close_in_the_middle_of_an_epoch_leaves_no_threads(fields: Fields) -> None:
    before = threading.active_count()
    loader = threaded(fields, CountedField(fields[1], seconds=0.01), num_data_workers=3)
    next(loader.epoch(0))
    assert threading.active_count() > before
    for _ in range(2):
        loader.close()
        assert threading.active_count() == before
