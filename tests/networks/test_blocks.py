"""Triton kernels of layers with few channels against torch's float64: interpreted with small tiles, and compiled."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from fused_cases import CHANNELS_LAST, assert_close, values
from torch.nn import functional as F
from triton_compile import compile_launches

from networks.ops import padded
from networks.ops.blocks import space_to_depth
from networks.ops.hopper import edges

# Samples, channels of the small grid and of the large one, and the side of the small grid.
SHAPES = [(3, 64, 4, 1), (3, 64, 5, 2), (1, 128, 1, 3), (1, 64, 3, 5), (2, 192, 8, 3), (1, 64, 5, 8), (2, 64, 7, 2)]


def operands(samples: int, small: int, few: int, side: int) -> tuple[torch.Tensor, ...]:
    """Rows, cells and weights."""
    rows, cells = values(samples, small, *[side] * 3, seed=0), values(samples, few, *[2 * side] * 3, seed=1)
    return rows, cells, values(small, few, 4, 4, 4, seed=2) / 8


@pytest.mark.parametrize("channels", [1, 4, 5])
def test_blocks_of_cells_are_those_of_the_copy_bit_for_bit(interpreter: list[str], channels: int) -> None:
    cells = values(3, channels, 8, 6, 10, seed=0)
    for dtype in (torch.float32, torch.float16):
        blocks = edges.cells_to_blocks(cells, dtype)
        assert torch.equal(blocks, space_to_depth(cells, dtype))
        assert blocks.is_contiguous(memory_format=CHANNELS_LAST)
    assert interpreter == ["shuffle_cells"] * 2


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_pass_equals_torch_and_itself(interpreter: list[str], shape: tuple[int, int, int, int]) -> None:
    """For one cell and more, all numbers of channels per cell, partial tiles and split sums. Pads are zero."""
    rows, cells, weight = operands(*shape)
    bias = values(shape[1], seed=3)
    exact = weight.double().requires_grad_()
    convolved = F.conv3d(cells.double(), exact, None, 2, 1)
    (weight_gradient,) = torch.autograd.grad(convolved, exact, rows.double(), retain_graph=True)
    activated = F.leaky_relu(convolved.detach() + bias.double().view(-1, 1, 1, 1), 0.01)
    expected = [F.conv_transpose3d(rows.double(), exact.detach(), None, 2, 1), activated, weight_gradient]
    got, again = (
        (
            edges.rows_to_cells(rows, weight, torch.float32),
            edges.blocks_to_rows(space_to_depth(cells), weight, bias, 0.01),
            edges.weight_gradient(rows, space_to_depth(cells)),
        )
        for _ in range(2)
    )
    assert interpreter == ["rows_to_blocks", "blocks_to_padded_rows", "block_weight_gradient"] * 2
    for ours, repeated, theirs in zip(got, again, expected, strict=True):
        assert_close(ours, theirs)
        assert torch.equal(ours, repeated)
    assert all(part.is_contiguous(memory_format=CHANNELS_LAST) for part in got[::2])
    assert padded.is_padded(got[1])
    assert torch.equal(padded.with_pads(got[1]), padded.with_pads(padded.padded(got[1].clone())))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns of NaN
def test_a_nan_reaches_the_same_values_as_in_torch(interpreter: list[str]) -> None:
    """So no value is read across a face of the grid, not even multiplied by zero."""
    rows, cells, weight = operands(3, 64, 5, 2)
    for part, place in ((rows, (1, 3, 1, 1, 1)), (cells, (1, 0, 3, 3, 3)), (cells, (1, 0, 0, 0, 0))):
        part[place] = torch.nan
    for got, expected in (
        (edges.rows_to_cells(rows, weight, torch.float32), F.conv_transpose3d(rows, weight, None, 2, 1)),
        (edges.blocks_to_rows(space_to_depth(cells), weight), F.conv3d(cells, weight, None, 2, 1)),
    ):
        assert got.isnan().any()
        assert torch.equal(got.isnan(), expected.isnan())


SLOW = (pytest.param(*case, marks=pytest.mark.slow) for case in ((64, 4), (128, 8), (64, 1)))


@pytest.mark.parametrize(("small", "few"), [(128, 5), *SLOW])
def test_compiled_kernels_fit_into_a_multiprocessor(monkeypatch: Any, small: int, few: int, tmp_path: Path) -> None:
    compiled = compile_launches(monkeypatch, tmp_path)
    rows, cells, weight = operands(1, small, few, 32)
    rows, cells_of_blocks = padded.padded(rows.bfloat16()), space_to_depth(cells, torch.bfloat16)
    edges.l1_of_cells(rows, weight, torch.zeros(few), cells)
    for dtype in (torch.float32, torch.bfloat16):
        edges.rows_to_cells(rows, weight, dtype)
    edges.blocks_to_rows(cells_of_blocks, weight, torch.zeros(small), 0.01)
    edges.weight_gradient(rows, cells_of_blocks)
    assert len(compiled) == 5
    for name, _, warps, result in compiled:
        programs = 2 if few <= 5 and name == "rows_to_blocks" else 1
        assert programs * math.ceil(result.registers / 8) * 8 * 32 * warps <= 2**16, (name, result.registers)
        assert programs * (result.shared + 1024) <= 228 * 1024, (name, result.shared)
