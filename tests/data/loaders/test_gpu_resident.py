"""The loader of volumes in device memory and its gather kernel, interpreted, against their definition, bit for bit."""

import itertools
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference_samples import VECTORS, cut, digest, loader_of, rank_batches, read_fields, reference
from triton_compile import compile_kernel
from triton_interpreter import interpreted
from volume_files import write_volume

from utils.data import symmetry
from utils.data.loaders import gpu_resident
from utils.data.loaders.base import memory_format
from utils.data.loaders.gpu_resident import (
    GpuResidentLoader,
    TritonGather,
    check_fits,
    device_plan,
    load_resident,
    walks,
)
from utils.data.loaders.prefetcher import HostPrefetcher
from utils.data.plan import EpochPlan, SamplePlan
from utils.errors import UserError
from utils.volumes import hdf5
from utils.volumes.hdf5 import Volume, open_volume

BOX, CROP = 7, 3
ALL = np.arange(symmetry.COUNT)
BITS = {4: torch.int32, 2: torch.int16}
BOXES = ((7, 8, 4), (3, 5, 9))
STORAGES = ({}, {"chunks": (1, 2, 4, 7), "compression": "gzip"})
CPU = torch.device("cpu")
GIB = 2**30


@pytest.fixture
def interpreter(monkeypatch: Any) -> Iterator[None]:
    """Kernels compiled in the test run in Triton's interpreter."""
    with interpreted(monkeypatch):
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        gpu_resident._kernel.cache_clear()
        yield
    gpu_resident._kernel.cache_clear()


def random_field(channels: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal values that two bytes hold without rounding, zeros of both signs, and infinity."""
    generator = torch.Generator().manual_seed(channels)
    field = torch.randn((channels, BOX, BOX, BOX), generator=generator).to(torch.bfloat16).to(dtype)
    field.view(-1)[::7] = 0.0
    field.view(-1)[1::7] = -0.0
    field[:, BOX // 2, BOX // 2, BOX // 2] = float("inf")
    return field


def assert_gathered(
    field: torch.Tensor, symmetries: Any, crop: int = CROP, channels_last: bool = True, dtype: Any = torch.float32
) -> None:
    """Compares crops at random origins, including both ends of the box."""
    origins = np.random.default_rng(1).integers(0, BOX - crop + 1, (len(symmetries), 3))
    origins[0], origins[-1] = 0, BOX - crop
    plan, form = EpochPlan(np.zeros(len(origins), int), origins, symmetries), memory_format(channels_last)
    out = torch.empty((len(plan), len(field), *(crop,) * 3), dtype=dtype, memory_format=form).fill_(torch.nan)
    gather = TritonGather([field], crop, VECTORS, "full", channels_last)
    gather(torch.from_numpy(device_plan(plan, [field.shape[1:]])), 0, 1, out)
    samples = [cut(field.numpy(), *pair) for pair in zip(origins, [crop] * len(plan), symmetries, strict=True)]
    expected = torch.from_numpy(np.stack(samples)).to(dtype)
    bits = BITS[dtype.itemsize]
    assert torch.equal(out.isnan(), expected.isnan())
    out, expected = (part.contiguous().masked_fill(part.isnan(), 5) for part in (out, expected))
    assert torch.equal(out.view(bits), expected.view(bits))


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("channels_last", [pytest.param(False, marks=pytest.mark.slow), True])
def test_all_48_symmetries_and_crops_of_any_size_match_the_definition(monkeypatch: Any, channels_last: bool) -> None:
    """In one tile; and in complete and partial ones, under symmetries that move the field's fastest axis and others."""
    field = random_field(5 if channels_last else 4)
    some = ALL[5::8] if channels_last else np.array([7, 29])
    for tile, crop, symmetries in ((None, 3, ALL), ((2, 4), 5, some), ((2, 4), 1, ALL[:2]), ((2, 4), 7, ALL[29:30])):
        if tile:
            monkeypatch.setattr(gpu_resident, "TILE_ALL_CHANNELS", tile)
            monkeypatch.setattr(gpu_resident, "TILE_ONE_CHANNEL", tile)
        assert_gathered(field, symmetries, crop, channels_last)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stored", [torch.float32, torch.float16], ids=str)
def test_fields_and_batches_of_each_type(stored: torch.dtype, dtype: torch.dtype) -> None:
    """NaN and subnormals are kept. Values need no rounding, which the interpreter does not do; test_gpu.py rounds."""
    field = random_field(5, dtype=stored)
    field[:, 3] = torch.nan
    if stored == dtype:
        field[:, 4] = torch.tensor(1, dtype=BITS[stored.itemsize]).view(stored)  # the smallest positive number
    assert_gathered(field, ALL[3::11], dtype=dtype)


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
    assert TritonGather([random_field(5)], 1, VECTORS, "full", False)._inputs[2].dtype == torch.int64


@pytest.mark.parametrize(
    ("channels", "channels_last", "architecture"),
    [(4, False, 80), (4, True, 80), (5, True, 90)],
    ids=["channels first, A100", "4 channels, A100", "5 channels, H200"],
)
def test_the_kernel_compiles_for_a_gpu(channels: int, channels_last: bool, architecture: int, tmp_path: Path) -> None:
    """Also after tests that used the interpreter. A thread writes the four channels of a cell at once."""
    field = torch.zeros(channels, 8, 8, 8)
    gather = TritonGather([field], 8, VECTORS, "full", channels_last)
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


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(
    ("mode", "split", "size", "stored"),
    [("full", "train", 1, torch.float16), ("grid", "train", 2, torch.float32), ("full", "valid", 4, torch.float32)],
)
def test_batches_of_two_volumes_that_are_not_cubes_match_the_definition(
    tmp_path: Path, monkeypatch: Any, mode: str, split: str, size: int, stored: torch.dtype
) -> None:
    """For each rank, over epochs that end early or resume in the middle; those of float16 are rounded first."""
    monkeypatch.setattr(gpu_resident, "CudaPrefetcher", HostPrefetcher)  # no streams
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(hdf5, "SLAB_VALUES", 2 * 8 * 4)
    plan = SamplePlan(12, BOXES, CROP, seed=3, split=split)
    assert set(plan.epoch(0).volumes) == {0, 1}
    places = zip(BOXES, STORAGES, strict=True)
    paths = [write_volume(tmp_path / f"{n}.h5", box=box, seed=n, **how) for n, (box, how) in enumerate(places)]
    volumes = load_resident([open_volume(path) for path in paths], CPU, stored)
    both = [[torch.from_numpy(field).to(stored).float().numpy() for field in read_fields(path)] for path in paths]
    channels_last = split == "train"
    keys = {"local_batch_size": 4 // size, "symmetries": mode, "channels_last": channels_last}
    for rank in range(size):
        loader = loader_of(GpuResidentLoader, volumes, plan, rank, size, **keys)
        for epoch, first, taken in ((0, 0, 1), (1, 0, None), (0, 1, None)):
            expected = rank_batches(reference(both, plan, epoch, mode), 4, rank, size, split == "train", plan.parts)
            assert len(loader) == len(expected)
            with closing(loader.epoch(epoch, first)) as batches:
                digests = [digest(batch) for batch in itertools.islice(batches, taken)]
            assert digests == expected[first:][:taken], f"rank {rank}, epoch {epoch} from {first} on"
        for part in next(loader.epoch(0)):
            assert part.dtype == torch.float32
            assert part.is_contiguous(memory_format=memory_format(channels_last))


def test_volumes_that_do_not_fit_are_reported_with_sizes_and_a_remedy() -> None:
    check_fits(38 * GIB, torch.float32, 80 * GIB, 42 * GIB)
    check_fits(38 * GIB, torch.float16, 61 * GIB, 42 * GIB)
    for dtype, free, says in (
        (torch.float32, 80 * GIB - 1, r"38\.00 GiB as float32; .* resident_dtype=float16 \(19\.00 GiB\)"),
        (torch.float16, 61 * GIB - 1, "reserved for training; use --data_loader_config=lowmem$"),
    ):
        with pytest.raises(UserError, match=says):
            check_fits(38 * GIB, dtype, free, 42 * GIB)


@pytest.mark.parametrize("value", [65504, float("nan"), 65505, float("-inf")])
def test_float16_keeps_its_largest_value_and_nan_and_refuses_larger_values(value: float) -> None:
    """--preflight reports NaN."""
    volume = Volume("box.h5", *(np.full((channels, 4, 4, 4), value, np.float32) for channels in (4, 5)))
    if abs(value) > 65504:
        with pytest.raises(UserError, match=r"Nbody\[0\] has values beyond ±65504, .*resident_dtype=float32$"):
            load_resident([volume], CPU, torch.float16)
    else:
        np.testing.assert_array_equal(load_resident([volume], CPU, torch.float16)[0].targets, volume.targets)
    np.testing.assert_array_equal(load_resident([volume], CPU, torch.float32)[0].targets, volume.targets)
