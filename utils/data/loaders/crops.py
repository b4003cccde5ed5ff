"""Cuts a crop out of a volume under a symmetry, straight into its place in a batch.

Moving axes while reading a huge array is slow: consecutive reads lie kilobytes apart. So each channel of the crop is
first read row by row into a scratch block that stays in the core's cache, and turned from there; the sign of a
vector component is applied on the way, at no cost. numpy releases the interpreter lock in both passes.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from utils.data import symmetry

# Symmetries that read rows forwards and in order: these need no scratch block.
ROWS_STAY = frozenset(np.flatnonzero((symmetry.PERMUTATIONS == (0, 1, 2)).all(1) & (symmetry.SIGNS[:, 2] > 0)).tolist())


class CropCopier:
    """Copies crops of one field; safe to call from several threads at once."""

    def __init__(self, field: Any, crop: int, vectors: Sequence[Sequence[int]], mode: str) -> None:
        """`field` is [C, L, L, L]: an array, mapped or not, or an HDF5 dataset."""
        self._field, self._crop = field, crop
        self._sources, self._signs = symmetry.channel_table(field.shape[0], vectors, mode)
        self._scratch = threading.local()

    def copy(self, origin: np.ndarray, index: int, out: np.ndarray) -> None:
        """Writes the crop at `origin` [3] under symmetry `index` to `out` [C, crop, crop, crop]."""
        block = self._block()
        x, y, z = (slice(int(start), int(start) + self._crop) for start in origin)
        crop = self._field[:, x, y, z]  # a view of a mapped array; read here from a chunked dataset
        turned = symmetry.move_axes(block, index)
        for channel, (source, sign) in enumerate(zip(self._sources[index], self._signs[index], strict=True)):
            if index in ROWS_STAY and sign > 0:
                np.copyto(out[channel], symmetry.move_axes(crop[source], index))
                continue
            if sign > 0:
                np.copyto(block, crop[source])
            else:
                np.negative(crop[source], out=block)
            np.copyto(out[channel], turned)

    def _block(self) -> np.ndarray:
        if not hasattr(self._scratch, "block"):
            side = self._crop
            # Rows and planes a power of two apart would fall on the same few lines of the cache: they are padded.
            self._scratch.block = np.empty((side, side + 1, side + 4), dtype=np.float32)[:, :side, :side]
        return self._scratch.block
