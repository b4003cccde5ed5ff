"""Grids [N, C, D, D, D] with zero cells between rows, planes and volumes, so that kernels need no bounds.

In memory they are [N, D + 1, D + 1, D + 1, C], where the last cell of each row, the last row of each plane and the last
plane of each volume are zero, after one more zero cell. Across each face of the grid lies a zero cell, and a
neighbor is the same number of cells away everywhere: all volumes together are one matrix [cells, C], whose rows a
convolution reads shifted. Tensors here are views of the grid without these pads.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device, pads: bool = True) -> Tensor:
    """A new view [N, C, D, D, D], whose writer also sets all pads but the first cell; pads False: it has none."""
    if not pads:
        return torch.empty(tuple(shape), dtype=dtype, device=device, memory_format=torch.channels_last_3d)
    count, channels, side = shape[:3]
    memory = torch.empty(channels * (1 + count * (side + 1) ** 3), dtype=dtype, device=device)
    memory[:channels].zero_()
    return memory.as_strided(tuple(shape), _strides(channels, side), channels)


def zero_pads(x: Tensor) -> Tensor:
    """Sets the pads of x, a result of `empty`, to zero; returns x."""
    whole, side = with_pads(x), x.shape[2]
    for axis in range(1, 4):
        whole.narrow(axis, side, 1).zero_()
    return x


def with_pads(x: Tensor) -> Tensor:
    """The memory of a padded grid, [N, D + 1, D + 1, D + 1, C]."""
    count, channels, side = x.shape[:3]
    return x.as_strided((count, *[side + 1] * 3, channels), (x.stride(0), *x.stride()[2:], 1))


def is_padded(x: Tensor) -> bool:
    """True for what `empty` returned: no other memory has one cell before the first one and this size."""
    if x.dim() != 5 or not x.shape[2] == x.shape[3] == x.shape[4]:
        return False
    count, channels, side = x.shape[:3]
    size = channels * (1 + count * (side + 1) ** 3) * x.element_size()
    place = x.stride(), x.storage_offset(), x.untyped_storage().nbytes()
    return place == (_strides(channels, side), channels, size)


def padded(x: Tensor) -> Tensor:
    """x itself if it is padded, else a padded copy."""
    return x if is_padded(x) else zero_pads(empty(x.shape, x.dtype, x.device).copy_(x))


def _strides(channels: int, side: int) -> tuple[int, ...]:
    pitch = side + 1
    return pitch**3 * channels, 1, pitch**2 * channels, pitch * channels, channels
