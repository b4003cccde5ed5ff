"""The loader of volumes in device memory, with Triton's interpreter in place of a GPU, and the loading of its volume on
several ranks and nodes."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from processes import run_ranks
from reference_samples import VECTORS, Fields, VolumeFile, cubes, digest, rank_batches, read_fields, reference
from triton_interpreter import interpreted

from utils.data.files import hdf5
from utils.data.files.hdf5 import Volume, open_volume
from utils.data.loader import Batch
from utils.data.loaders import crop_kernels, gpu_resident
from utils.data.loaders.crops import CropOptions
from utils.data.loaders.gpu_resident import GpuResidentLoader, check_fits, load_resident
from utils.data.loaders.prefetcher import CudaPrefetcher, Fills
from utils.data.plan import SamplePlan
from utils.distributed.launch import Launch
from utils.distributed.world import World
from utils.errors import UserError

BOX, CROP = 8, 3
BOXES = ((7, 8, 4), (3, 5, 9))
ALONE = World(Launch("single process"), torch.device("cpu"))
GIB = 2**30


@pytest.fixture(scope="module")
def path(volume_file: VolumeFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return volume_file(tmp_path_factory.mktemp("volumes") / "box.h5", box=BOX)


@pytest.fixture(scope="module")
def fields(path: Path) -> Fields:
    return read_fields(path)


@pytest.fixture(scope="module")
def two_paths(volume_file: VolumeFile, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two volumes that are not cubes."""
    folder = tmp_path_factory.mktemp("two volumes")
    return [volume_file(folder / f"{seed}.h5", box=box, seed=seed) for seed, box in enumerate(BOXES)]


def sample_plan(samples: int = 12, **changed: Any) -> SamplePlan:
    return SamplePlan(**({"samples": samples, "boxes": cubes(BOX), "crop": CROP, "seed": 3} | changed))


# --- the loader ----------------------------------------------------------------------------------------------------


class ImmediatePrefetcher:
    """Replaces CudaPrefetcher, without streams: a fill runs as soon as it is enqueued."""

    def __init__(self, device: torch.device, shapes: list[tuple[int, ...]], channels_last: bool) -> None:
        assert device.type == "cuda"
        self._slots = CudaPrefetcher(torch.device("cpu"), shapes, channels_last)._slots

    def prefetch(self, fills: Fills) -> Generator[Batch, None, None]:
        with closing(fills):
            for number, (size, fill) in enumerate(fills):
                slot = Batch(*(part[:size] for part in self._slots[number % 3]))
                fill(slot)
                yield slot


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """Runs the device's code on CPU tensors: the kernel in Triton's interpreter, without streams."""
    with interpreted(monkeypatch):
        monkeypatch.setattr(gpu_resident, "CudaPrefetcher", ImmediatePrefetcher)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        crop_kernels._kernel.cache_clear()
        yield torch.device("cuda")
    crop_kernels._kernel.cache_clear()


@pytest.mark.parametrize(("mode", "split", "size"), [("full", "train", 1), ("grid", "train", 2), ("full", "valid", 4)])
def test_on_a_device_batches_match_the_definition(
    cuda: torch.device, two_paths: list[Path], mode: str, split: str, size: int
) -> None:
    """Bit for bit for each rank, over two epochs, one that ends early and one that resumes in the middle."""
    plan = sample_plan(11, split=split, boxes=BOXES)
    assert set(plan.epoch(0).volumes) == {0, 1}
    volumes = load_resident([open_volume(path, (4, 5)) for path in two_paths], ALONE, torch.float32)
    both = [read_fields(path) for path in two_paths]
    layout: dict[str, Any] = {"vectors": VECTORS, "symmetry_mode": mode, "channels_last": True}
    for rank in range(size):
        options = CropOptions(plan, batch_size=4 // size, rank=rank, world_size=size, device=cuda, **layout)
        loader = GpuResidentLoader(volumes, options)
        for epoch, first, taken in ((0, 0, 1), (1, 0, None), (0, 1, None)):
            expected = rank_batches(reference(both, plan, epoch, mode), 4, rank, size, split == "train")
            assert len(loader) == len(expected)
            with closing(loader.epoch(epoch, first)) as batches:
                found = [digest(batch) for batch in itertools.islice(batches, taken)]
            assert found == expected[first:][:taken], f"rank {rank}, epoch {epoch} from {first} on"
        for part in next(loader.epoch(0)):
            assert part.is_contiguous(memory_format=torch.channels_last_3d)
        loader.close()


def test_float16_storage_gives_the_batches_of_the_rounded_volume(
    cuda: torch.device, path: Path, fields: Fields
) -> None:
    plan = sample_plan(4)
    rounded = [field.astype(np.float16).astype(np.float32) for field in fields]
    volumes = load_resident([open_volume(path, (4, 5))], ALONE, torch.float16)
    loader = GpuResidentLoader(volumes, CropOptions(plan, batch_size=4, vectors=VECTORS, device=cuda))
    batch = next(loader.epoch(0))
    assert all(part.is_contiguous() for part in batch)
    assert batch.inputs.dtype == batch.targets.dtype == torch.float32
    assert digest(batch) == reference([rounded], plan, 0)


# --- memory ---------------------------------------------------------------------------------------------------------


def test_volumes_that_do_not_fit_are_reported_with_sizes_and_a_remedy() -> None:
    size = 38 * GIB
    check_fits(size, torch.float32, 80 * GIB, 42 * GIB)
    check_fits(size, torch.float16, 80 * GIB, 61 * GIB)
    with pytest.raises(UserError):
        check_fits(size, torch.float32, 80 * GIB - 1, 42 * GIB)
    with pytest.raises(UserError) as caught:
        check_fits(size, torch.float32, 40 * GIB, 17 * GIB // 2)
    assert str(caught.value) == (
        "the volumes need 38.00 GiB as float32; the device has 40.00 GiB free, and 8.50 GiB are reserved for training; "
        "use --set resident_dtype=float16 (19.00 GiB) or --data_loader_config=lowmem"
    )
    for dtype in (torch.float32, torch.float16):
        with pytest.raises(UserError, match=r"reserved for training; use --data_loader_config=lowmem$"):
            check_fits(size, dtype, 24 * GIB, 17 * GIB // 2)


def test_running_out_of_memory_while_loading_is_one_line(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate a lot.")

    size = open_volume(path, (4, 5)).bytes
    monkeypatch.setattr(torch, "empty", no_memory)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (size - 1, size))
    with pytest.raises(UserError, match=r"^the volumes need .* as float32; .*float16 .*=lowmem$"):
        load_resident([open_volume(path, (4, 5))], World(Launch("single process"), torch.device("cuda")), torch.float32)


# --- loading -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_volume_is_read_into_tensors(
    volume_file: VolumeFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: Path, dtype: torch.dtype
) -> None:
    """From a contiguous file, and from chunks whose slabs do not divide the box."""
    monkeypatch.setattr(hdf5, "SLAB_VALUES", 3 * BOX**2)
    chunked = volume_file(tmp_path / "chunked.h5", box=BOX, chunks=(1, 5, 4, 7), compression="gzip")
    for file in (path, chunked):
        (volume,) = load_resident([open_volume(file, (4, 5))], ALONE, dtype)
        assert (volume.path, volume.shape) == (str(file), (BOX,) * 3)
        for got, values in zip((volume.inputs, volume.targets), read_fields(file), strict=True):
            assert torch.equal(got, torch.from_numpy(values).to(dtype))


def write_box(path: Path, value: float) -> Volume:
    with h5py.File(path, "w") as file:
        for name, channels in (("Nbody", 4), ("Hydro", 5)):
            file[name] = np.zeros((channels, 4, 4, 4), dtype=np.float32)
        file["Hydro"][2, 1, 1, 1] = value
    return open_volume(path, (4, 5))


def test_float16_keeps_its_largest_value_and_nan_and_refuses_larger_values(tmp_path: Path) -> None:
    """--preflight reports NaN."""
    for value in (65504, -65504, float("nan")):
        stored = load_resident([write_box(tmp_path / f"{value}.h5", value)], ALONE, torch.float16)[0].targets[
            2, 1, 1, 1
        ]
        assert stored == value or (stored != stored and value != value)
    for value in (65505, -1e6, float("inf")):
        volume = write_box(tmp_path / f"{value}.h5", value)
        with pytest.raises(
            UserError, match=r"Hydro\[2\] has values beyond ±65504, .*use --set resident_dtype=float32$"
        ):
            load_resident([volume], ALONE, torch.float16)
        assert load_resident([volume], ALONE, torch.float32)[0].targets.abs().max() == abs(value)


# --- several ranks -------------------------------------------------------------------------------------------------


class CountedField:
    """A field that counts its reads, and raises `error`, if given, at the fourth."""

    def __init__(self, field: np.ndarray, error: Exception | None = None) -> None:
        self._field, self._error = field, error
        self.shape = field.shape
        self.readings = 0

    def __getitem__(self, selection: Any) -> np.ndarray:
        self.readings += 1
        if self.readings == 4 and self._error is not None:
            raise self._error
        return self._field[selection]


# The stored type, and the error on the one rank that fails to read.
LOADINGS: list[tuple[torch.dtype, Exception | None]] = [
    (torch.float16, OSError(5, "Input/output error")),
    (torch.float16, ZeroDivisionError("bug")),
    (torch.float32, None),
]
# The host and local rank of each of four ranks, and the ranks that read, one per node.
PLACEMENTS: list[tuple[str, list[int], list[int]]] = [("abab", [1, 1, 0, 0], [2, 3]), ("aaab", [0, 1, 2, 0], [0, 3])]


def load_on_nodes(world: World, path: str) -> list[list[tuple[list[bytes] | str, int]]]:
    """For each placement and loading: the fields or the error that this rank gets, and its number of reads."""
    hdf5.SLAB_VALUES = 5 * BOX**2
    plain = open_volume(path, (4, 5))
    answers: list[list[tuple[list[bytes] | str, int]]] = []
    for hosts, local_ranks, sources in PLACEMENTS:
        socket.gethostname = lambda hosts=hosts: hosts[world.rank]
        placed = World(replace(world.launch, local_rank=local_ranks[world.rank]), world.device)
        answers.append([])
        for dtype, error in LOADINGS:
            inputs = CountedField(plain.inputs)
            targets = CountedField(plain.targets, error if world.rank == sources[-1] else None)
            got: list[bytes] | str
            try:
                (loaded,) = load_resident([Volume(plain.path, inputs, targets)], placed, dtype)
                got = [field.numpy().tobytes() for field in (loaded.inputs, loaded.targets)]
            except (UserError, ZeroDivisionError) as caught:
                got = f"{type(caught).__name__}: {caught}"
            answers[-1].append((got, inputs.readings + targets.readings))
    return answers


def test_one_rank_per_node_reads_and_all_ranks_have_the_volume_or_the_same_error(path: Path, fields: Fields) -> None:
    """On two nodes of equal and of different size, one with a single rank; the file of the last reader fails."""
    slabs = 2  # a channel, of 5 and 3 planes
    whole = [field.tobytes() for field in fields]
    for rank, answers in enumerate(run_ranks(load_on_nodes, 4, str(path))):
        for (_, _, sources), answer in zip(PLACEMENTS, answers, strict=True):
            failing = sources[-1]
            bug = (
                "ZeroDivisionError: bug" if rank == failing else f"UserError: rank {failing}: ZeroDivisionError('bug')"
            )
            refused = f"UserError: rank {failing}: cannot read {path}: Input/output error; copy or recreate it"
            wanted = [refused, bug, whole]
            assert [got for got, _ in answer] == wanted
            # After a failure no more slabs are read.
            failed, read = 4 * slabs + 4 if rank == failing else 9 * slabs, 9 * slabs
            assert [count for _, count in answer] == ([failed, failed, read] if rank in sources else [0, 0, 0])
