"""Both gathers against the plain definition: a slice of the volume, then symmetry.apply, bit for bit.

The kernel runs in Triton's interpreter here; that it also compiles for GPUs is shown at the end.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from utils.data import gather, symmetry
from utils.data.feeder import memory_format
from utils.data.gather import TritonGather, device_plan, gather_torch, walks
from utils.data.plan import EpochPlan, batch_rows

BOX, CROP = 5, 3
VECTORS = [(1, 2, 3)]
ALL = np.arange(symmetry.COUNT)
BITS = {4: torch.int32, 2: torch.int16}
FORMATS = pytest.mark.parametrize("channels_last", [False, True], ids=["channels first", "channels last"])

Gather = Callable[..., torch.Tensor]


def random_field(channels: int, box: int = BOX, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal values that fit into two bytes without rounding, and some that are easily got wrong."""
    generator = torch.Generator().manual_seed(channels)
    field = torch.randn((channels, box, box, box), generator=generator).to(torch.bfloat16).to(dtype)
    field.view(-1)[::7] = 0.0
    field.view(-1)[1::7] = -0.0
    field[:, box // 2, box // 2, box // 2] = float("inf")
    return field


def random_plan(symmetries: np.ndarray, box: int = BOX, crop: int = CROP) -> EpochPlan:
    """Random origins, both ends of the box among them."""
    origins = np.random.default_rng(1).integers(0, box - crop + 1, (len(symmetries), 3))
    origins[0], origins[-1] = 0, box - crop
    return EpochPlan(origins, symmetries)


def plain(field: torch.Tensor, plan: EpochPlan, crop: int = CROP, mode: str = "full") -> torch.Tensor:
    """[N, C, D, D, D] by definition."""
    samples = []
    for origin, index in zip(plan.origins, plan.symmetries, strict=True):
        x, y, z = (slice(start, start + crop) for start in origin)
        samples.append(symmetry.apply(field.numpy()[:, x, y, z], int(index), VECTORS, mode))
    return torch.from_numpy(np.stack(samples))


def blank(field: torch.Tensor, samples: int, crop: int, channels_last: bool, dtype: torch.dtype) -> torch.Tensor:
    shape = (samples, len(field), *(crop,) * 3)
    return torch.empty(shape, dtype=dtype, memory_format=memory_format(channels_last)).fill_(torch.nan)


def by_torch(
    field: torch.Tensor,
    plan: EpochPlan,
    crop: int = CROP,
    channels_last: bool = False,
    mode: str = "full",
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    out = blank(field, len(plan), crop, channels_last, dtype)
    gather_torch(field, plan.origins, plan.symmetries, symmetry.channel_table(len(field), VECTORS, mode), out)
    return out


def by_triton(
    field: torch.Tensor,
    plan: EpochPlan,
    crop: int = CROP,
    channels_last: bool = False,
    mode: str = "full",
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    out = blank(field, len(plan), crop, channels_last, dtype)
    rows = torch.from_numpy(device_plan(plan, field.shape[-1]))
    TritonGather(field, crop, VECTORS, mode, channels_last)(rows, torch.tensor(0), 1, out)
    return out


@pytest.fixture(params=["torch", "triton"])
def gathered(request: pytest.FixtureRequest) -> Gather:
    if request.param == "torch":
        return by_torch
    request.getfixturevalue("interpreter")
    return by_triton


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Triton's interpreter for kernels that are made now; triton itself is imported before, as without it."""
    pytest.importorskip("triton.language")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    gather._kernel.cache_clear()
    yield
    gather._kernel.cache_clear()


def assert_same_bits(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.dtype == expected.dtype
    bits = BITS[got.element_size()]
    assert torch.equal(got.contiguous().view(bits), expected.contiguous().view(bits))


# --- the same bits as the plain definition --------------------------------------------------------------------------


@pytest.mark.parametrize(("channels", "channels_last"), [(4, False), (4, True), (5, True)])
def test_all_48_symmetries_are_the_plain_definition(gathered: Gather, channels: int, channels_last: bool) -> None:
    field, plan = random_field(channels), random_plan(ALL)
    got = gathered(field, plan, channels_last=channels_last)
    assert got.is_contiguous(memory_format=memory_format(channels_last))
    assert_same_bits(got, plain(field, plan))


def test_in_mode_grid_components_stay(gathered: Gather) -> None:
    field, plan = random_field(4), random_plan(ALL[::5])
    got = gathered(field, plan, channels_last=True, mode="grid")
    assert_same_bits(got, plain(field, plan, mode="grid"))
    assert not torch.equal(got, plain(field, plan))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stored", [torch.float32, torch.float16], ids=str)
def test_fields_and_batches_may_be_of_either_size(gathered: Gather, stored: torch.dtype, dtype: torch.dtype) -> None:
    """Values that fit into either: Triton's interpreter cuts bfloat16 off instead of rounding it."""
    field, plan = random_field(5, dtype=stored), random_plan(ALL[3::11])
    assert_same_bits(gathered(field, plan, channels_last=True, dtype=dtype), plain(field, plan).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_casts_round_to_nearest(dtype: torch.dtype) -> None:
    field, plan = torch.randn((4, BOX, BOX, BOX)), random_plan(ALL)
    assert_same_bits(by_torch(field, plan, dtype=dtype), plain(field, plan).to(dtype))


def test_nan_and_subnormals_pass(gathered: Gather) -> None:
    field = torch.full((4, CROP, CROP, CROP), torch.nan)
    field[:, 0] = torch.tensor(1, dtype=torch.int32).view(torch.float32)  # the smallest number there is
    plan = EpochPlan(np.zeros((6, 3), dtype=int), ALL[7::8])
    got, expected = gathered(field, plan, channels_last=True), plain(field, plan)
    assert got.isnan().sum() == 6 * 4 * CROP**2 * (CROP - 1)
    assert_same_bits(got.nan_to_num(5.0), expected.nan_to_num(5.0))


@pytest.mark.parametrize("crop", [1, 4, BOX])
def test_any_size_of_crop_up_to_the_whole_box(gathered: Gather, crop: int) -> None:
    field, plan = random_field(4), random_plan(ALL[1::17], crop=crop)
    assert_same_bits(gathered(field, plan, crop, channels_last=True), plain(field, plan, crop))


@FORMATS
def test_a_crop_may_have_several_tiles(interpreter: None, monkeypatch: pytest.MonkeyPatch, channels_last: bool) -> None:
    """Whole ones and parts, under symmetries that move the field's fastest axis and others."""
    monkeypatch.setattr(gather, "TILE_ALL_CHANNELS", (2, 4))
    monkeypatch.setattr(gather, "TILE_ONE_CHANNEL", (2, 4))
    field = random_field(5 if channels_last else 4, box=7)
    plan = random_plan(ALL[5::8] if channels_last else np.array([7, 29]), box=7, crop=5)
    assert_same_bits(by_triton(field, plan, 5, channels_last), plain(field, plan, 5))


def test_a_crop_larger_than_a_tile_with_the_tiles_that_are_used(interpreter: None) -> None:
    field, plan = random_field(4, box=35), random_plan(np.array([45]), box=35, crop=34)
    assert_same_bits(by_triton(field, plan, 34, True), plain(field, plan, 34))


# --- rows and addresses --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", range(2))
def test_a_rank_gathers_its_rows_of_the_epochs_plan(interpreter: None, rank: int) -> None:
    """Batch after batch into the same memory, the last one smaller; nothing is written past its end."""
    field, plan = random_field(4), random_plan(np.resize(ALL[::5], 11))
    rows = torch.from_numpy(device_plan(plan, BOX))
    kernel = TritonGather(field, CROP, VECTORS, "full", channels_last=True)
    expected = plain(field, plan)
    out = blank(field, 4, CROP, True, torch.float32)
    sizes = []
    for batch in batch_rows(11, 4, rank, 2, drop_last=False):
        size = len(range(11)[batch])
        out.fill_(torch.nan)
        kernel(rows, torch.tensor(batch.start), batch.step, out[:size])
        assert_same_bits(out[:size], expected[batch])
        assert out[size:].isnan().all()
        sizes.append(size)
    assert sizes == ([4, 2] if rank == 0 else [4, 1])


def test_addresses_of_the_full_volume_do_not_overflow() -> None:
    """A channel of 1024³ cells starts beyond 2³¹ from the third on; the last crop ends where the box does."""
    rows = device_plan(EpochPlan(np.full((1, 3), 960, dtype=np.int32), np.array([47])), 1024)
    table = walks(1024, 64, (64 * 64 * 5, 64 * 5, 5))
    assert rows.dtype == table.dtype == np.int64
    assert rows.tolist() == [[960 * (1024**2 + 1024 + 1), 47]]
    for begin, ways in ((table[:, 1], table[:, 2:5]), (table[:, 5], table[:, 6:9])):
        assert (begin + 63 * ways.clip(max=0).sum(1) == 0).all(), "each walk begins at the first cell"
    assert (table[:, 1] + 63 * table[:, 2:5].clip(min=0).sum(1) + rows[0, 0] == 1024**3 - 1).all()
    kernel = TritonGather(random_field(5, box=1), 1, VECTORS, "full")
    assert kernel._inputs[2].dtype == torch.int64


# --- on GPUs, without one ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("channels_last", "capability"), [(False, 80), (True, 90)], ids=["A100", "H200"])
def test_the_kernel_compiles_for_a_gpu(
    channels_last: bool, capability: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """After the interpreter's tests, too; reads and writes are each contiguous along the axis that they should be."""
    compiler = pytest.importorskip("triton.compiler")
    targets = pytest.importorskip("triton.backends.compiler")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    lanes, tile = (8, gather.TILE_ALL_CHANNELS) if channels_last else (1, gather.TILE_ONE_CHANNEL)
    constants: dict[str, Any] = {"HALF": False, "CROP": 64, "CHANNELS": 5, "LANES": lanes}
    constants |= {"ROWS": tile[0], "COLUMNS": tile[1]} | ({"channel_stride": 1} if channels_last else {})
    types = {"out": "*bf16", "field": "*i32", "plan": "*i64", "walks": "*i64", "sources": "*i64", "flips": "*i32"}
    types |= {"first": "*i64"} | dict.fromkeys(("step", "sample_stride", "channel_stride"), "i32")
    types |= dict.fromkeys(constants, "constexpr")
    kernel = gather._kernel()
    indices = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = compiler.ASTSource(kernel, {name: types[name] for name in kernel.arg_names}, indices)
    options = {"num_warps": 8, "enable_fp_fusion": False}
    compiled = compiler.compile(source, target=targets.GPUTarget("cuda", capability, 32), options=options)
    assert "cvt.rn.bf16" in compiled.asm["ptx"], "a cast to bfloat16 rounds to nearest"
    layouts = dict(re.findall(r"(#blocked\d*) = #ttg.blocked<{.*threadsPerWarp = \[(.*?)\]", compiled.asm["ttgir"]))
    shape = "x".join(map(str, (*tile, lanes)))
    access = re.findall(rf"tt\.(load|store) .*tensor<{shape}x!.*?(#blocked\d*)>", compiled.asm["ttgir"])
    assert [kind for kind, _ in access] == ["load", "load", "store"]
    # Threads of a warp along the tile's rows, columns and channels; versions of Triton differ in the rest.
    by_row, by_column, written = ([int(count) for count in layouts[layout].split(", ")] for _, layout in access)
    assert by_row[0] >= 16
    assert by_column[1] >= 16
    assert written == ([1, 4, 8] if channels_last else [1, 32, 1])
    assert re.findall(r"sizePerThread = \[(.*?)\]", compiled.asm["ttgir"]) == ["1, 1, 1"] * len(layouts)
