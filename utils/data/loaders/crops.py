"""Options of the crop loaders, and the copy of one crop under a symmetry directly to its place in a batch.

Permuting axes while reading a huge array is slow, because consecutive reads are kilobytes apart. So each channel of the
crop is first read row by row into a scratch block that stays in the core's cache, and its axes are permuted from there.
The sign of a vector component is applied in the first pass at no cost. numpy releases the interpreter lock in both.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from utils.data import symmetry
from utils.data.plan import SamplePlan, rank_batches

Vectors = Sequence[Sequence[int]]  # channel triples (x, y, z components) that are vectors

CPU = torch.device("cpu")

# Symmetries that keep rows in order and read them forwards; they need no scratch block.
ROW_PRESERVING = frozenset(
    np.flatnonzero((symmetry.PERMUTATIONS == (0, 1, 2)).all(1) & (symmetry.SIGNS[:, 2] > 0)).tolist()
)


@dataclass(frozen=True)
class CropOptions:
    """Options of a loader that reads one rank's part of a sample plan.

    batch_size: samples per rank and batch.
    threads: threads that cut crops; 0: the calling thread cuts them.
    device: where batches are delivered.
    vectors: the vector fields of the inputs and of the targets.
    symmetry_mode: 'full', 'grid' or 'none', as the config's `symmetries`.
    """

    plan: SamplePlan
    batch_size: int
    rank: int = 0
    world_size: int = 1
    threads: int = 2
    device: torch.device = CPU
    vectors: tuple[Vectors, Vectors] = ((), ())
    symmetry_mode: str = "full"
    channels_last: bool = False

    def batches(self) -> list[slice]:
        """The rows of an epoch's plan that this rank takes, one slice per batch."""
        drop_last = self.plan.split == "train"
        return rank_batches(self.plan.samples, self.batch_size, self.rank, self.world_size, drop_last)

    def shapes(self, channels: Iterable[int]) -> list[tuple[int, ...]]:
        """The shape [N, C, D, D, D] of a full batch for each number of channels."""
        return [(self.batch_size, count, *(self.plan.crop,) * 3) for count in channels]


class CropCopier:
    """Copies crops of one field of several volumes; safe to call from several threads at once."""

    def __init__(self, fields: Sequence[Any], crop: int, vectors: Vectors, mode: str) -> None:
        """Each volume's field is [C, X, Y, Z]: an array, mapped or not, or an HDF5 dataset."""
        self._fields, self._crop = fields, crop
        self._sources, self._signs = symmetry.channel_table(fields[0].shape[0], vectors, mode)
        self._scratch = threading.local()

    def copy(self, volume: int, origin: np.ndarray, index: int, out: np.ndarray) -> None:
        """Writes the crop at `origin` [3] of a volume under symmetry `index` to `out` [C, crop, crop, crop]."""
        block = self._block()
        x, y, z = (slice(int(start), int(start) + self._crop) for start in origin)
        crop = self._fields[volume][:, x, y, z]  # a view of a mapped array; read here from a chunked dataset
        moved = symmetry.move_axes(block, index)
        for channel, (source, sign) in enumerate(zip(self._sources[index], self._signs[index], strict=True)):
            if index in ROW_PRESERVING and sign > 0:
                np.copyto(out[channel], symmetry.move_axes(crop[source], index))
                continue
            if sign > 0:
                np.copyto(block, crop[source])
            else:
                np.negative(crop[source], out=block)
            np.copyto(out[channel], moved)

    def _block(self) -> np.ndarray:
        """This thread's scratch block."""
        if not hasattr(self._scratch, "block"):
            side = self._crop
            # Padded, because rows and planes a power of two apart would compete for a few cache lines.
            self._scratch.block = np.empty((side, side + 1, side + 4), dtype=np.float32)[:, :side, :side]
        return self._scratch.block
