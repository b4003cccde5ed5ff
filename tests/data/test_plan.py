"""The sample plan: reproducible, complete, uniform, independent of the number of ranks."""

import numpy as np
import pytest
from reference_samples import cubes

from utils.data import symmetry
from utils.data.plan import SamplePlan, rank_batches

# The random stream never changes: a run that resumes under another numpy must continue with the same crops.
# Samples, box, crop, seed and split; epoch; the first rows of an origin and a symmetry each.
LARGE_SEED = 2**40 + 1  # beyond 32 bits
GOLDEN = [
    ((4, 64, 16, 3, "train"), 0, [(23, 2, 34, 33), (38, 34, 14, 13), (7, 31, 14, 43), (18, 32, 42, 14)]),
    ((4, 64, 16, 3, "train"), 7, [(42, 29, 0, 6), (24, 41, 5, 26), (6, 0, 16, 40), (29, 1, 9, 6)]),
    ((4, 64, 16, 3, "valid"), 7, [(9, 22, 45, 0), (47, 26, 45, 0), (32, 24, 37, 0), (13, 23, 5, 0)]),
    ((4, 1024, 64, LARGE_SEED, "train"), 7, [(802, 649, 895, 39), (386, 687, 714, 20), (63, 68, 68, 39)]),
    # Half of the positions, and more than half: drawn with two algorithms.
    ((4, 5, 4, 3, "train"), 0, [(0, 1, 1, 0), (0, 0, 1, 1), (1, 0, 1, 1), (1, 1, 0, 5)]),
    ((6, 5, 4, 3, "train"), 0, [(0, 0, 0, 0), (0, 0, 1, 1), (0, 1, 0, 1), (1, 0, 1, 5), (1, 1, 0, 11)]),
]


@pytest.mark.parametrize(("key", "epoch", "rows"), GOLDEN)
def test_golden_plans(key: tuple, epoch: int, rows: list[tuple[int, ...]]) -> None:
    samples, box, *rest = key
    drawn = SamplePlan(samples, cubes(box), *rest).epoch(epoch)
    assert not drawn.volumes.any()
    assert np.column_stack([drawn.origins, drawn.symmetries])[: len(rows)].tolist() == [*map(list, rows)]


def test_validation_is_fixed_and_only_training_with_augmentation_has_symmetries() -> None:
    first = SamplePlan(60, cubes(32), crop=8, seed=0, split="valid").epoch(0)
    again = SamplePlan(60, cubes(32), crop=8, seed=7, split="valid").epoch(9)
    np.testing.assert_array_equal(again.origins, first.origins)
    tutorial = SamplePlan(2000, cubes(32), crop=8, mode="tutorial").epoch(2)
    assert set(tutorial.symmetries) == set(symmetry.TUTORIAL)
    plain = SamplePlan(50, cubes(32), crop=8, mode="none").epoch(2)
    np.testing.assert_array_equal(plain.origins, SamplePlan(50, cubes(32), crop=8).epoch(2).origins)
    assert set(first.symmetries) == set(again.symmetries) == set(plain.symmetries) == {symmetry.IDENTITY}


def test_validation_has_equally_many_samples_of_each_volume_and_batches_of_one() -> None:
    """The samples are those of the volume alone. All ranks together take each once, none from two volumes at a time."""
    boxes, samples = ((32, 9, 12), (8, 8, 40), (20, 20, 20)), 42
    plan = SamplePlan(samples, boxes, 8, seed=4, split="valid")
    drawn = plan.epoch(3)
    for number, box in enumerate(boxes):
        rows = drawn.rows(drawn.volumes == number)
        assert np.array_equal(rows.origins, SamplePlan(14, (box,), 8, split="valid").epoch(0).origins)
    for world in (1, 2, 3, 5):
        taken = [rows for rank in range(world) for rows in rank_batches(samples, 4, rank, world, False, plan.parts)]
        assert sorted(row for rows in taken for row in range(samples)[rows]) == list(range(samples))
        assert all(len(set(drawn.volumes[rows])) == 1 for rows in taken)


@pytest.mark.parametrize("samples", [1, 13, 14, 26, 27, 28, 54, 100])
def test_positions_repeat_only_after_all_were_used(samples: int) -> None:
    """More than half of 27 positions are drawn with another algorithm, which must have the same property."""
    for epoch in range(20):
        plan = SamplePlan(samples, cubes(6), crop=4).epoch(epoch)
        repeats = np.zeros((3, 3, 3), dtype=int)
        np.add.at(repeats, tuple(plan.origins.T), 1)  # fails for a position beyond the last
        assert (repeats.sum(), repeats.min(), repeats.max()) == (samples, samples // 27, -(-samples // 27))
        assert samples < 54 or not np.array_equal(plan.origins[:27], plan.origins[27:54]), "rounds in the same order"
    only = SamplePlan(samples, cubes(8), crop=8).epoch(0)
    assert not only.origins.any(), "one position, the box itself"


def test_volumes_have_the_share_of_the_samples_that_they_have_of_the_positions() -> None:
    """Uniform over all positions of both boxes, without repetition; the bound is five standard deviations."""
    boxes, crop, samples = ((20, 12, 9), (8, 30, 16)), 4, 2000
    sizes = np.array([17 * 9 * 6, 5 * 27 * 13])
    for count in (samples, sizes.sum()):
        plan = SamplePlan(int(count), boxes, crop).epoch(0)
        assert len(np.unique(np.column_stack([plan.volumes, plan.origins]), axis=0)) == count
        assert (plan.origins >= 0).all()
        assert (plan.origins + crop <= np.array(boxes)[plan.volumes]).all()
        expected = count * sizes / sizes.sum()
        assert abs(np.bincount(plan.volumes) - expected).max() < 5 * np.sqrt(expected.prod() / count)


def test_positions_beyond_two_to_the_31_are_drawn() -> None:
    plan = SamplePlan(64, ((2048, 4096, 1024), (8, 8, 8), (4096, 2048, 2048)), 8).epoch(0)
    assert set(plan.volumes) == {0, 2}
    assert (plan.origins.max(axis=0) > 1024 // 2).all()
    assert (plan.origins >= 0).all()
