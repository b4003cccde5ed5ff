"""Compares the gather kernel with the definition, bit for bit: a slice of the volume, then symmetry.apply.

The kernel runs in Triton's interpreter; the last test compiles it for GPUs.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from reference_samples import VECTORS, cut
from triton_compile import compile_kernel

from utils.data import symmetry
from utils.data.loaders import crop_kernels
from utils.data.loaders.base import memory_format
from utils.data.loaders.crop_kernels import TritonGather, device_plan, walks
from utils.data.plan import EpochPlan

BOX, CROP = 5, 3
ALL = np.arange(symmetry.COUNT)
BITS = {4: torch.int32, 2: torch.int16}


def random_field(channels: int, box: int = BOX, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal values that two bytes hold without rounding, zeros of both signs, and infinity."""
    generator = torch.Generator().manual_seed(channels)
    field = torch.randn((channels, box, box, box), generator=generator).to(torch.bfloat16).to(dtype)
    field.view(-1)[::7] = 0.0
    field.view(-1)[1::7] = -0.0
    field[:, box // 2, box // 2, box // 2] = float("inf")
    return field


def random_plan(symmetries: np.ndarray, box: int = BOX, crop: int = CROP) -> EpochPlan:
    """Random origins, including both ends of the box."""
    origins = np.random.default_rng(1).integers(0, box - crop + 1, (len(symmetries), 3))
    origins[0], origins[-1] = 0, box - crop
    return EpochPlan(np.zeros(len(symmetries), dtype=int), origins, symmetries)


def expected_samples(field: torch.Tensor, plan: EpochPlan, crop: int = CROP) -> torch.Tensor:
    """The samples [N, C, D, D, D] by definition."""
    pairs = zip(plan.origins, plan.symmetries, strict=True)
    return torch.from_numpy(np.stack([cut(field.numpy(), origin, crop, index) for origin, index in pairs]))


def gathered(
    field: torch.Tensor,
    plan: EpochPlan,
    crop: int = CROP,
    channels_last: bool = True,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The samples of a plan as the kernel gathers them, NaN where it writes nothing."""
    gather = TritonGather([field], crop, VECTORS, "full", channels_last)
    form = memory_format(channels_last)
    out = torch.empty((len(plan), len(field), *(crop,) * 3), dtype=dtype, memory_format=form).fill_(torch.nan)
    gather(torch.from_numpy(device_plan(plan, [field.shape[1:]])), 0, 1, out)
    return out


def assert_same_bits(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.dtype == expected.dtype
    bits = BITS[got.element_size()]
    assert torch.equal(got.contiguous().view(bits), expected.contiguous().view(bits))


# --- equality with the definition -------------------------------------------------------------------------------


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("channels_last", [pytest.param(False, marks=pytest.mark.slow), True])
def test_all_48_symmetries_and_crops_of_any_size_match_the_definition(
    monkeypatch: pytest.MonkeyPatch, channels_last: bool
) -> None:
    """In one tile; and in complete and partial ones, under symmetries that move the field's fastest axis and others."""
    field = random_field(5 if channels_last else 4, box=7)
    some = ALL[5::8] if channels_last else np.array([7, 29])
    for tile, crop, symmetries in ((None, 3, ALL), ((2, 4), 5, some), ((2, 4), 1, ALL[:2]), ((2, 4), 7, ALL[29:30])):
        if tile:
            monkeypatch.setattr(crop_kernels, "TILE_ALL_CHANNELS", tile)
            monkeypatch.setattr(crop_kernels, "TILE_ONE_CHANNEL", tile)
        plan = random_plan(symmetries, box=7, crop=crop)
        got = gathered(field, plan, crop, channels_last)
        assert got.is_contiguous(memory_format=memory_format(channels_last))
        assert_same_bits(got, expected_samples(field, plan, crop))


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stored", [torch.float32, torch.float16], ids=str)
def test_fields_and_batches_of_each_type(stored: torch.dtype, dtype: torch.dtype) -> None:
    """The values need no rounding: Triton's interpreter truncates to bfloat16. On a GPU, tests/test_gpu.py rounds."""
    field, plan = random_field(5, dtype=stored), random_plan(ALL[3::11])
    assert_same_bits(gathered(field, plan, dtype=dtype), expected_samples(field, plan).to(dtype))


@pytest.mark.usefixtures("interpreter")
def test_nan_and_subnormals_are_kept() -> None:
    field = torch.full((4, CROP, CROP, CROP), torch.nan)
    field[:, 0] = torch.tensor(1, dtype=torch.int32).view(torch.float32)  # the smallest positive number
    plan = EpochPlan(np.zeros(6, dtype=int), np.zeros((6, 3), dtype=int), ALL[7::8])
    got, expected = gathered(field, plan), expected_samples(field, plan)
    assert got.isnan().sum() == 6 * 4 * CROP**2 * (CROP - 1)
    assert_same_bits(got.nan_to_num(5.0), expected.nan_to_num(5.0))


# --- addresses -----------------------------------------------------------------------------------------------------


def test_addresses_of_the_full_volume_do_not_overflow() -> None:
    """Channels of 1024³ cells start beyond 2³¹ from the third on; the last crop ends at the end of the box."""
    box, zeros = (1024, 1024, 1024), np.zeros(1, dtype=int)
    rows = device_plan(EpochPlan(zeros, np.full((1, 3), 960, dtype=np.int32), np.array([47])), [box])
    table = walks(box, 64, (0, 0, 0))
    assert rows.dtype == table.dtype == np.int64
    assert rows.tolist() == [[960 * (1024**2 + 1024 + 1), 47]]
    start, strides = table[:, 1], table[:, 2:5]
    assert (start + 63 * strides.clip(max=0).sum(1) == 0).all(), "each path starts at the first cell"
    assert (start + 63 * strides.clip(min=0).sum(1) + rows[0, 0] == 1024**3 - 1).all()
    kernel = TritonGather([random_field(5, box=1)], 1, VECTORS, "full")
    assert kernel._inputs[2].dtype == torch.int64


# --- compilation for GPUs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("channels", "channels_last", "architecture"),
    [(4, False, 80), (4, True, 80), (4, True, 90), (5, True, 90)],
    ids=["channels first, A100", "4 channels, A100", "4 channels, H200", "5 channels, H200"],
)
def test_the_kernel_compiles_for_a_gpu(channels: int, channels_last: bool, architecture: int, tmp_path: Path) -> None:
    """Also after tests that used the interpreter. A thread writes the four channels of a cell at once."""
    gather = TritonGather([random_field(channels, box=8)], 8, VECTORS, "full", channels_last)
    constants = gather._constants | ({"channel_stride": 1} if channels_last else {})
    options = {name: constants.pop(name) for name in ("num_warps", "enable_fp_fusion")}
    types = {"out": "*bf16", "field": "*i32", "plan": "*i64", "walks": "*i64", "sources": "*i64"}
    types |= {"flips": "*i32"} | dict.fromkeys(("first", "step", "sample_stride", "channel_stride"), "i32")
    compiled = compile_kernel(
        gather._kernel, types, constants, tmp_path, architecture, ("first", "step", "channel_stride"), **options
    )
    assert compiled.registers <= 64
    assert compiled.stack == 0
    assert "cvt.rn.bf16" in compiled.ptx, "a cast to bfloat16 rounds to nearest"
    assert ("st.global.v2.b32" in compiled.ptx) == (channels_last and channels == 4)
