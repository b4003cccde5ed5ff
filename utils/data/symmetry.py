"""The 48 symmetries of the cube, acting on fields: the axes are permuted, and the components of vectors with them.

Symmetry s maps position x to x' with x'[a] = sign[a] · x[perm[a]]. An array [C, D, D, D] is transformed by
permuting and reversing its axes; a vector field's components obey the same rule as the position. Source: the
octahedral group O_h as signed permutation matrices (any text on point groups).
"""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

Vectors = Sequence[Sequence[int]]  # channel triples (x, y, z components) that are vectors

# Index 0 is the identity; the first REFLECTIONS only reverse axes, and are a group, too.
PERMUTATIONS = np.array([p for p in itertools.permutations(range(3)) for _ in range(8)])  # [48, 3]
SIGNS = np.array([s for _ in range(6) for s in itertools.product((1, -1), repeat=3)])  # [48, 3]
COUNT, REFLECTIONS = len(PERMUTATIONS), 8
IDENTITY = 0
# What the tutorial draws from: 16 rotations and 8 reflections, no group. Source: RandomRotator in its data_loader.py.
TUTORIAL = (0, 3, 5, 6, 9, 10, 13, 14, 18, 19, 20, 21, 27, 29, 30, 31, 35, 37, 38, 39, 41, 43, 44, 46)


def move_axes(field: Any, symmetry: int) -> Any:
    """The view of a [..., D, D, D] array under symmetry `symmetry` of its last three axes; no copy."""
    lead = field.ndim - 3
    axes = (*range(lead), *(lead + axis for axis in PERMUTATIONS[symmetry]))
    flips = (..., *(slice(None, None, int(sign)) for sign in SIGNS[symmetry]))
    return field.transpose(axes)[flips]


def channel_table(channels: int, vectors: Vectors, mode: str) -> tuple[np.ndarray, np.ndarray]:
    """Source channel and sign, [48, C], by symmetry and output channel; unless the mode is full, all are scalars."""
    sources = np.tile(np.arange(channels), (COUNT, 1))
    signs = np.ones((COUNT, channels), dtype=np.int64)
    if mode == "full":
        for triple in vectors:
            components = np.asarray(triple)
            sources[:, components] = components[PERMUTATIONS]
            signs[:, components] = SIGNS
    return sources, signs


def apply(field: np.ndarray, symmetry: int, vectors: Vectors, mode: str = "full") -> np.ndarray:
    """The definition, [C, D, D, D] -> a new array; loaders are tested against it."""
    sources, signs = channel_table(len(field), vectors, mode)
    moved = move_axes(field, symmetry)[sources[symmetry]]
    return np.ascontiguousarray(moved * signs[symmetry].astype(field.dtype)[:, None, None, None])


def inverse(symmetry: int) -> int:
    """The symmetry that undoes another one."""
    axes = np.argsort(PERMUTATIONS[symmetry])
    is_inverse = (axes == PERMUTATIONS).all(axis=1) & (SIGNS[symmetry, axes] == SIGNS).all(axis=1)
    return int(np.flatnonzero(is_inverse)[0])


def apply_on_device(fields: torch.Tensor, symmetry: int, sources: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """`apply` for fields [..., C, D, D, D], with the tables of `channel_table` on their device."""
    lead = fields.ndim - 3
    axes = (*range(lead), *(lead + int(axis) for axis in PERMUTATIONS[symmetry]))
    flipped = [lead + axis for axis in range(3) if SIGNS[symmetry, axis] < 0]
    moved = fields.permute(axes).flip(flipped)
    return moved.index_select(-4, sources[symmetry]) * signs[symmetry, :, None, None, None]
