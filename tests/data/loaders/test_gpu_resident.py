"""The loader of volumes in device memory, with Triton's interpreter in place of a GPU."""

from __future__ import annotations

import itertools
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from reference_samples import VolumeFile, digest, loader_of, rank_batches, read_fields, reference

from utils.data.files import hdf5
from utils.data.files.hdf5 import Volume, open_volume
from utils.data.loaders import gpu_resident
from utils.data.loaders.base import memory_format
from utils.data.loaders.gpu_resident import GpuResidentLoader, check_fits, load_resident
from utils.data.loaders.prefetcher import HostPrefetcher
from utils.data.plan import SamplePlan
from utils.errors import UserError

BOX, CROP = 8, 3
BOXES = ((7, 8, 4), (3, 5, 9))
CPU = torch.device("cpu")
GIB = 2**30


@pytest.fixture
def cuda(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the device's code on CPU tensors: the kernel in Triton's interpreter, without streams."""
    monkeypatch.setattr(gpu_resident, "CudaPrefetcher", HostPrefetcher)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)


# --- the loader ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(
    ("mode", "split", "size", "stored"),
    [
        ("full", "train", 1, torch.float16),
        ("grid", "train", 2, torch.float32),
        ("full", "valid", 4, torch.float32),
    ],
)
def test_batches_of_two_volumes_that_are_not_cubes_match_the_definition(
    volume_file: VolumeFile, tmp_path: Path, mode: str, split: str, size: int, stored: torch.dtype
) -> None:
    """Bit for bit for each rank, over two epochs, one that ends early and one that resumes in the middle.

    Batches of volumes that are stored as float16 are those of the rounded volumes.
    """
    plan = SamplePlan(12, BOXES, CROP, seed=3, split=split)
    assert set(plan.epoch(0).volumes) == {0, 1}
    paths = [volume_file(tmp_path / f"{seed}.h5", box=box, seed=seed) for seed, box in enumerate(BOXES)]
    volumes = load_resident([open_volume(path, (4, 5)) for path in paths], CPU, stored)
    both = [[torch.from_numpy(field).to(stored).float().numpy() for field in read_fields(path)] for path in paths]
    channels_last = split == "train"
    keys = {"local_batch_size": 4 // size, "symmetries": mode, "channels_last": channels_last}
    for rank in range(size):
        loader = loader_of(GpuResidentLoader, volumes, plan, rank, size, **keys)
        for epoch, first, taken in ((0, 0, 1), (1, 0, None), (0, 1, None)):
            expected = rank_batches(reference(both, plan, epoch, mode), 4, rank, size, split == "train", plan.parts)
            assert len(loader) == len(expected)
            with closing(loader.epoch(epoch, first)) as batches:
                found = [digest(batch) for batch in itertools.islice(batches, taken)]
            assert found == expected[first:][:taken], f"rank {rank}, epoch {epoch} from {first} on"
        for part in next(loader.epoch(0)):
            assert part.dtype == torch.float32
            assert part.is_contiguous(memory_format=memory_format(channels_last))


# --- loading -------------------------------------------------------------------------------------------------------


def test_volumes_that_do_not_fit_are_reported_with_sizes_and_a_remedy() -> None:
    size = 38 * GIB
    check_fits(size, torch.float32, 80 * GIB, 42 * GIB)
    check_fits(size, torch.float16, 80 * GIB, 61 * GIB)
    with pytest.raises(UserError):
        check_fits(size, torch.float32, 80 * GIB - 1, 42 * GIB)
    with pytest.raises(UserError, match=r"38\.00 GiB as float32; .*8\.50 GiB .*resident_dtype=float16 \(19\.00 GiB\)"):
        check_fits(size, torch.float32, 40 * GIB, 17 * GIB // 2)
    for dtype in (torch.float32, torch.float16):
        with pytest.raises(UserError, match=r"reserved for training; use --data_loader_config=lowmem$"):
            check_fits(size, dtype, 24 * GIB, 17 * GIB // 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_volumes_are_read_into_tensors(
    volume_file: VolumeFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """From a contiguous file, and from chunks whose slabs do not divide the box; in one storage."""
    monkeypatch.setattr(hdf5, "SLAB_VALUES", 3 * BOX**2)
    path = volume_file(tmp_path / "box.h5", box=BOX)
    chunked = volume_file(tmp_path / "chunked.h5", box=BOX, chunks=(1, 5, 4, 7), compression="gzip")
    loaded = load_resident([open_volume(file, (4, 5)) for file in (path, chunked)], CPU, dtype)
    assert len({volume.targets.untyped_storage().data_ptr() for volume in loaded}) == 1
    for file, volume in zip((path, chunked), loaded, strict=True):
        assert (volume.path, volume.shape) == (str(file), (BOX,) * 3)
        for got, values in zip((volume.inputs, volume.targets), read_fields(file), strict=True):
            assert torch.equal(got, torch.from_numpy(values).to(dtype))


def volume_with(value: float) -> Volume:
    inputs, targets = (np.zeros((channels, 4, 4, 4), np.float32) for channels in (4, 5))
    targets[2, 1, 1, 1] = value
    return Volume("box.h5", inputs, targets)


def test_float16_keeps_its_largest_value_and_nan_and_refuses_larger_values() -> None:
    """--preflight reports NaN."""
    for value in (65504, -65504, float("nan")):
        (volume,) = load_resident([volume_with(value)], CPU, torch.float16)
        np.testing.assert_equal(float(volume.targets[2, 1, 1, 1]), value)
    for value in (65505, -1e6, float("inf")):
        volume = volume_with(value)
        with pytest.raises(UserError, match=r"Hydro\[2\] has values beyond ±65504, .*resident_dtype=float32$"):
            load_resident([volume], CPU, torch.float16)
        assert load_resident([volume], CPU, torch.float32)[0].targets.abs().max() == abs(value)
