"""The sample plan: reproducible, complete, evenly spread, and the same whatever the number of ranks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from utils.data import symmetry
from utils.data.plan import EpochPlan, SamplePlan, batch_rows

# The stream is fixed for good: a run resumed under another numpy must go on with the same crops.
GOLDEN_TRAIN = {
    0: ([[23, 2, 34], [38, 34, 14], [7, 31, 14], [18, 32, 42]], [33, 13, 43, 14]),
    7: ([[42, 29, 0], [24, 41, 5], [6, 0, 16], [29, 1, 9]], [6, 26, 40, 6]),
}
GOLDEN_VALID = [[9, 22, 45], [47, 26, 45], [32, 24, 37], [13, 23, 5]]
GOLDEN_FEW_POSITIONS = ([[0, 0, 0], [0, 0, 1], [0, 1, 0], [1, 0, 1], [1, 1, 0], [1, 0, 0]], [0, 1, 1, 5, 11, 40])
GOLDEN_LARGE_SEED = ([[802, 649, 895], [386, 687, 714], [63, 68, 68], [85, 509, 548]], [39, 20, 39, 4])


def same(one: EpochPlan, other: EpochPlan) -> bool:
    return np.array_equal(one.origins, other.origins) and np.array_equal(one.symmetries, other.symmetries)


def counts(plan: EpochPlan, positions: int) -> np.ndarray:
    """How often each position comes: [positions, positions, positions]."""
    result = np.zeros((positions,) * 3, dtype=int)
    np.add.at(result, tuple(plan.origins.T), 1)
    return result


# --- a pure function of (seed, split, epoch) -----------------------------------------------------------------------


def test_the_same_key_gives_the_same_plan() -> None:
    plan = SamplePlan(samples=100, box=32, crop=8, seed=5)
    again = SamplePlan(samples=100, box=32, crop=8, seed=5)
    assert same(plan.epoch(3), again.epoch(3))
    again.epoch(0)  # nothing is carried over from one epoch to the next
    assert same(plan.epoch(3), again.epoch(3))


@pytest.mark.parametrize("changed", [{"seed": 6}, {"epoch": 4}, {"split": "valid"}])
def test_another_seed_epoch_or_split_gives_another_plan(changed: dict) -> None:
    key = {"seed": 5, "split": "train", "epoch": 3} | changed
    plan = SamplePlan(samples=100, box=32, crop=8, seed=key["seed"], split=key["split"]).epoch(key["epoch"])
    original = SamplePlan(samples=100, box=32, crop=8, seed=5).epoch(3)
    assert not np.array_equal(plan.origins, original.origins)
    assert not np.array_equal(plan.symmetries, original.symmetries)


def test_plans_leave_numpys_global_generator_alone() -> None:
    np.random.seed(0)  # noqa: NPY002
    expected = np.random.random()  # noqa: NPY002
    np.random.seed(0)  # noqa: NPY002
    first = SamplePlan(samples=10, box=32, crop=8).epoch(0)
    assert np.random.random() == expected  # noqa: NPY002
    assert same(first, SamplePlan(samples=10, box=32, crop=8).epoch(0))


@pytest.mark.parametrize("epoch", GOLDEN_TRAIN)
def test_golden_training_plan(epoch: int) -> None:
    plan = SamplePlan(samples=4, box=64, crop=16, seed=3).epoch(epoch)
    origins, symmetries = GOLDEN_TRAIN[epoch]
    assert plan.origins.tolist() == origins
    assert plan.symmetries.tolist() == symmetries


def test_golden_validation_plan() -> None:
    assert SamplePlan(samples=4, box=64, crop=16, seed=3, split="valid").epoch(7).origins.tolist() == GOLDEN_VALID


def test_golden_plan_of_a_box_with_few_positions() -> None:
    plan = SamplePlan(samples=6, box=5, crop=4, seed=3).epoch(0)
    assert (plan.origins.tolist(), plan.symmetries.tolist()) == GOLDEN_FEW_POSITIONS


def test_golden_plan_of_a_seed_beyond_32_bits() -> None:
    plan = SamplePlan(samples=4, box=1024, crop=64, seed=2**40 + 1).epoch(7)
    assert (plan.origins.tolist(), plan.symmetries.tolist()) == GOLDEN_LARGE_SEED


# --- positions -----------------------------------------------------------------------------------------------------


def test_every_position_comes_the_last_included_and_none_beyond() -> None:
    positions = 7 - 4 + 1
    plan = SamplePlan(samples=positions**3, box=7, crop=4).epoch(0)
    assert plan.origins.min() == 0
    assert plan.origins.max() == 7 - 4
    assert (counts(plan, positions) == 1).all()


def test_the_last_position_comes_in_a_large_box_as_often_as_any_other() -> None:
    plan = SamplePlan(samples=20000, box=40, crop=10).epoch(0)  # 31³ positions, two in three of them
    for axis in range(3):
        slabs = np.bincount(plan.origins[:, axis], minlength=31)
        assert len(slabs) == 31
        assert abs(slabs - 20000 / 31).max() < 5 * np.sqrt(20000 / 31)


@pytest.mark.parametrize("samples", [1, 13, 14, 15, 26, 27])
def test_no_position_comes_twice_in_an_epoch_while_there_are_enough(samples: int) -> None:
    """27 positions; above half of them the plan is drawn in another way, which must keep the promise too."""
    for epoch in range(20):
        plan = SamplePlan(samples=samples, box=6, crop=4).epoch(epoch)
        assert len(plan) == samples
        assert counts(plan, 3).max() == 1


def test_no_position_comes_twice_in_a_large_epoch() -> None:
    plan = SamplePlan(samples=30000, box=64, crop=16).epoch(0)  # 49³ = 117,649 positions: some first draws collide
    assert len(np.unique(plan.origins, axis=0)) == 30000


@pytest.mark.parametrize("samples", [28, 54, 100])
def test_more_samples_than_positions_repeat_them_evenly(samples: int) -> None:
    repeats = counts(SamplePlan(samples=samples, box=6, crop=4).epoch(0), 3)
    assert repeats.sum() == samples
    assert repeats.min() == samples // 27
    assert repeats.max() == -(-samples // 27)


def test_a_crop_as_large_as_the_box_has_one_position() -> None:
    assert not SamplePlan(samples=5, box=8, crop=8).epoch(0).origins.any()


# --- symmetries ----------------------------------------------------------------------------------------------------


def test_symmetries_are_uniform_over_all_48() -> None:
    samples = 48 * 1000
    drawn = SamplePlan(samples=samples, box=128, crop=64, seed=1).epoch(0).symmetries
    observed = np.bincount(drawn, minlength=48)
    assert len(observed) == symmetry.COUNT
    chi_square = ((observed - 1000) ** 2 / 1000).sum()
    assert 20 < chi_square < 83  # 47 degrees of freedom: 99.9 % lie in between; below 20 it would be too even


def test_symmetries_do_not_depend_on_the_position() -> None:
    plan = SamplePlan(samples=20000, box=128, crop=64, seed=1).epoch(0)
    for axis in range(3):
        assert abs(np.corrcoef(plan.origins[:, axis], plan.symmetries)[0, 1]) < 0.03


def test_without_augmentation_every_symmetry_is_the_identity_and_crops_are_the_same() -> None:
    plain = SamplePlan(samples=50, box=32, crop=8, augment=False).epoch(2)
    assert (plain.symmetries == symmetry.IDENTITY).all()
    np.testing.assert_array_equal(plain.origins, SamplePlan(samples=50, box=32, crop=8).epoch(2).origins)


@pytest.mark.parametrize(("seed", "epoch"), [(0, 1), (0, 9), (7, 0), (7, 9)])
def test_validation_is_the_same_for_all_epochs_and_seeds_and_has_no_symmetry(seed: int, epoch: int) -> None:
    plan = SamplePlan(samples=60, box=32, crop=8, seed=seed, split="valid").epoch(epoch)
    assert same(plan, SamplePlan(samples=60, box=32, crop=8, seed=0, split="valid").epoch(0))
    assert (plan.symmetries == symmetry.IDENTITY).all()


# --- ranks ---------------------------------------------------------------------------------------------------------


def rows(samples: int, batch: int, rank: int, world: int, drop_last: bool) -> list[list[int]]:
    return [list(range(samples)[selection]) for selection in batch_rows(samples, batch, rank, world, drop_last)]


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("samples", [64, 67, 69])
def test_the_ranks_of_a_step_take_together_what_one_rank_takes(samples: int, world: int, drop_last: bool) -> None:
    """Each of the global batch's rows exactly once, and rank r the rows r, r + world, … of it."""
    one = rows(samples, 8, 0, 1, drop_last)
    ranks = [rows(samples, 8 // world, rank, world, drop_last) for rank in range(world)]
    for step, together in enumerate(one):
        parts = [rank[step] if step < len(rank) else [] for rank in ranks]
        assert sorted(itertools.chain(*parts)) == together
        for rank, part in enumerate(parts):
            assert part == together[rank::world]
    assert max(len(rank) for rank in ranks) == len(one)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_training_drops_what_fills_no_whole_batch_on_every_rank(world: int) -> None:
    for rank in range(world):
        taken = rows(8 * 5 + 7, 8 // world, rank, world, drop_last=True)
        assert [len(batch) for batch in taken] == [8 // world] * 5


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("samples", [1, 2, 5, 16, 21, 30])
def test_validation_takes_every_row_exactly_once(samples: int, world: int) -> None:
    taken = [row for rank in range(world) for batch in rows(samples, 3, rank, world, False) for row in batch]
    assert sorted(taken) == list(range(samples))


def test_the_last_validation_batch_is_smaller() -> None:
    assert [len(batch) for batch in rows(10, 4, 0, 1, drop_last=False)] == [4, 4, 2]
    assert rows(10, 4, 0, 2, drop_last=False) == [[0, 2, 4, 6], [8]]
    assert rows(10, 4, 1, 2, drop_last=False) == [[1, 3, 5, 7], [9]]


def test_fewer_samples_than_ranks_leave_some_ranks_without_a_batch() -> None:
    assert [rows(2, 1, rank, 4, drop_last=False) for rank in range(4)] == [[[0]], [[1]], [], []]
    assert [rows(2, 1, rank, 4, drop_last=True) for rank in range(4)] == [[], [], [], []]


def test_rows_of_a_plan_are_its_crops_and_symmetries() -> None:
    plan = SamplePlan(samples=20, box=32, crop=8).epoch(0)
    part = plan.rows(slice(1, 9, 2))
    np.testing.assert_array_equal(part.origins, plan.origins[[1, 3, 5, 7]])
    np.testing.assert_array_equal(part.symmetries, plan.symmetries[[1, 3, 5, 7]])
