"""The loader of volumes in device memory, with Triton's interpreter in place of a GPU."""

from __future__ import annotations

import itertools
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from reference_samples import digest, loader_of, rank_batches, read_fields, reference
from volume_files import write_volume

from utils.data.files import hdf5
from utils.data.files.hdf5 import Volume, open_volume
from utils.data.loaders import gpu_resident
from utils.data.loaders.base import memory_format
from utils.data.loaders.gpu_resident import GpuResidentLoader, check_fits, load_resident
from utils.data.loaders.prefetcher import HostPrefetcher
from utils.data.plan import SamplePlan
from utils.errors import UserError

CROP, BOXES = 3, ((7, 8, 4), (3, 5, 9))
STORAGES = ({}, {"chunks": (1, 2, 4, 7), "compression": "gzip"})
CPU = torch.device("cpu")
GIB = 2**30


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(
    ("mode", "split", "size", "stored"),
    [
        ("full", "train", 1, torch.float16),
        ("grid", "train", 2, torch.float32),
        ("full", "valid", 4, torch.float32),
    ],
)
def test_batches_of_two_volumes_that_are_not_cubes_match_the_definition(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    split: str,
    size: int,
    stored: torch.dtype,
) -> None:
    """Bit for bit for each rank, over two epochs, one that ends early and one that resumes in the middle.

    Batches of volumes that are stored as float16 are those of the rounded volumes. Slabs do not divide the boxes.
    """
    monkeypatch.setattr(gpu_resident, "CudaPrefetcher", HostPrefetcher)  # no streams
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(hdf5, "SLAB_VALUES", 2 * 8 * 4)
    plan = SamplePlan(12, BOXES, CROP, seed=3, split=split)
    assert set(plan.epoch(0).volumes) == {0, 1}
    places = zip(BOXES, STORAGES, strict=True)
    paths = [write_volume(tmp_path / f"{n}.h5", box=box, seed=n, **how) for n, (box, how) in enumerate(places)]
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


def test_volumes_that_do_not_fit_are_reported_with_sizes_and_a_remedy() -> None:
    size = 38 * GIB
    check_fits(size, torch.float32, 80 * GIB, 42 * GIB)
    check_fits(size, torch.float16, 80 * GIB, 61 * GIB)
    for dtype, free, says in (
        (torch.float32, 80 * GIB - 1, r"38\.00 GiB as float32"),
        (torch.float32, 62 * GIB, r"resident_dtype=float16 \(19\.00 GiB\)"),
        (torch.float32, 61 * GIB - 1, "reserved for training; use --data_loader_config=lowmem$"),
        (torch.float16, 61 * GIB - 1, "reserved for training; use --data_loader_config=lowmem$"),
    ):
        with pytest.raises(UserError, match=says):
            check_fits(size, dtype, free, 42 * GIB)


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
