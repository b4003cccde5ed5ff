"""The sample plan: which crop under which symmetry is sample k of epoch e, a pure function of (seed, split, epoch)."""

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np

from utils.data import symmetry
from utils.volumes.opened import SPLITS

Shape = tuple[int, int, int]  # cells along x, y and z


@dataclass(frozen=True)
class EpochPlan:
    """One epoch's samples: indices of volumes [N], crop origins [N, 3] in cells, indices of symmetries [N]."""

    volumes: np.ndarray
    origins: np.ndarray
    symmetries: np.ndarray

    def __len__(self) -> int:
        return len(self.origins)

    def rows(self, selection: slice | np.ndarray) -> "EpochPlan":
        return EpochPlan(self.volumes[selection], self.origins[selection], self.symmetries[selection])


@dataclass(frozen=True)
class SamplePlan:
    """`samples` (Nsamples or Nsamples_val) crops of `crop`³ cells in volumes of the shapes `boxes`.

    In training all positions that fit are equally likely. Validation has an equal number of samples of each volume, one
    volume after the other.
    """

    samples: int
    boxes: tuple[Shape, ...]
    crop: int
    seed: int = 0
    split: str = "train"
    mode: str = "full"  # the config's symmetries

    @property
    def parts(self) -> int:
        """Number of equal parts of an epoch that no batch crosses: the volumes of validation, as each has a loss."""
        return len(self.boxes) if self.split == "valid" else 1

    def epoch(self, epoch: int) -> EpochPlan:
        """The plan of one epoch: no position twice, if possible; in validation always the same, not augmented."""
        if self.parts > 1:  # the samples of each volume are those of a plan of this volume alone
            plans = [replace(self, samples=self.samples // self.parts, boxes=(box,)).epoch(0) for box in self.boxes]
            volumes = np.repeat(np.arange(self.parts), self.samples // self.parts)
            origins = np.concatenate([plan.origins for plan in plans])
            return EpochPlan(volumes, origins, np.full(len(volumes), symmetry.IDENTITY, dtype=np.int64))
        fixed = self.split == "valid"
        words = _random_words(0 if fixed else self.seed, SPLITS[self.split], 0 if fixed else epoch)
        grids = [tuple(side - self.crop + 1 for side in box) for box in self.boxes]  # positions along each axis
        ends = list(itertools.accumulate(map(math.prod, grids)))
        assert ends[-1] < 2**62, "more positions than the random stream has words for"
        flat = _sample_without_replacement(words, self.samples, ends[-1])
        volumes = np.searchsorted(ends, flat, side="right")
        origins = np.empty((self.samples, 3), dtype=np.int64)
        for number, (grid, end) in enumerate(zip(grids, ends, strict=True)):
            chosen = volumes == number
            places = flat[chosen] - (end - math.prod(grid))
            origins[chosen] = np.stack(np.unravel_index(places, grid), axis=1)
        choices = np.array(symmetry.TUTORIAL if self.mode == "tutorial" else range(symmetry.COUNT))
        if fixed or self.mode == "none":
            choices = choices[[symmetry.IDENTITY]]
        return EpochPlan(volumes, origins, choices[_below(words, len(choices), self.samples)])


@dataclass(frozen=True)
class ShufflePlan:
    """The order of `samples` (Nsamples or Nsamples_val) out of the `available` ones, each at most once per epoch."""

    samples: int
    available: int
    seed: int = 0
    split: str = "train"

    def epoch(self, epoch: int) -> np.ndarray:
        """The rows [samples] of one epoch, int64. Validation always uses the first rows, in order."""
        if self.split == "valid":
            return np.arange(self.samples, dtype=np.int64)
        words = _random_words(self.seed, SPLITS[self.split], epoch)
        return _sample_without_replacement(words, self.samples, self.available)


def _random_words(*key: int) -> np.random.Philox:
    """Raw words of Philox (Salmon et al. 2011), which never change in numpy, while the streams of distributions may."""
    return np.random.Philox(np.random.SeedSequence(key))


def _below(words: np.random.Philox, bound: int, count: int) -> np.ndarray:
    """`count` integers in [0, bound); the bias of the remainder is below bound / 2**63."""
    return ((words.random_raw(count) >> np.uint64(1)) % np.uint64(bound)).astype(np.int64)


def _sample_without_replacement(words: np.random.Philox, count: int, bound: int) -> np.ndarray:
    """`count` integers in [0, bound), distinct if possible; otherwise the values' counts differ by at most one."""
    if 2 * count > bound:
        # Few values: all of them, shuffled, as many times as needed; the last shuffle is cut.
        rounds = -(-count // bound)
        order = [np.argsort(_below(words, 2**62, bound), kind="stable") for _ in range(rounds)]
        return np.concatenate(order)[:count]
    drawn = _below(words, bound, count)
    while True:
        _, first = np.unique(drawn, return_index=True)
        if len(first) == count:
            return drawn
        repeated = np.setdiff1d(np.arange(count), first)
        drawn[repeated] = _below(words, bound, len(repeated))


def rank_batches(samples: int, batch: int, rank: int, world: int, drop_last: bool, parts: int = 1) -> list[slice]:
    """The rows of an epoch's plan that rank `rank` takes, one slice per batch of `batch` samples.

    In step s all ranks together take rows s·batch·world … (s+1)·batch·world, for any number of ranks. Training drops
    the samples of an incomplete global batch. Validation keeps them: its last batch may be smaller, or missing on some
    ranks. With several equal `parts` of the rows, this holds for each of them.
    """
    span, size = batch * world, samples // parts
    slices = []
    for end in range(size, samples + 1, size):
        starts = range(end - size, end - size % span if drop_last else end, span)
        slices += [slice(start + rank, min(start + span, end), world) for start in starts]
    return [rows for rows in slices if rows.start < rows.stop]
