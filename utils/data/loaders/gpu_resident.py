"""The loader `resident`: the volume lies in the device's own memory, and one kernel a field gathers each batch.

The host reads no data, and nothing crosses the bus but the epoch's plan. Without CUDA threads gather from one copy in
the node's memory.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing

import torch

from utils.data.files.file_guard import FileGuard
from utils.data.files.hdf5 import DATASETS, Volume, prefetch
from utils.data.files.shared_memory import share_volume
from utils.data.loaders.crop_kernels import TorchCopier, TritonGather, device_plan
from utils.data.loaders.prefetcher import Batch, CudaPrefetcher, Fills
from utils.data.loaders.threaded import ThreadedCropLoader
from utils.data.plan import EpochPlan, SamplePlan, rank_batches
from utils.distributed.world import World
from utils.errors import UserError
from utils.pending_work import PendingWork
from utils.profiling.memory import GIB
from utils.progress import Progress

SLAB_VALUES = 2**22  # 16 MB as float32: what is read and broadcast at once
FLOAT16_MAX = torch.finfo(torch.float16).max


class GpuResidentLoader:
    """Carries out this rank's part of a sample plan; `epoch(e)` iterates over its batches, in float32.

    A batch is valid until the next one is asked for: its memory is used again.
    """

    def __init__(
        self,
        volume: Volume,
        plan: SamplePlan,
        *,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        threads: int = 2,
        device: torch.device | None = None,
        vectors: tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]] = ((), ()),
        symmetry_mode: str = "full",
        channels_last: bool = False,
    ) -> None:
        """`volume` is what `load_resident` returns, or, on the CPU, arrays in memory; `threads` matter there alone."""
        device = device or torch.device("cpu")
        fields = [torch.as_tensor(field) for field in (volume.inputs, volume.targets)]
        self.plan = plan
        self._batches = rank_batches(plan.samples, batch_size, rank, world_size, drop_last=plan.split == "train")
        self._host: ThreadedCropLoader | None = None
        if device.type != "cuda":
            self._host = ThreadedCropLoader(
                dataclasses.replace(volume, inputs=fields[0], targets=fields[1]),
                plan,
                batch_size=batch_size,
                rank=rank,
                world_size=world_size,
                threads=threads,
                vectors=vectors,
                symmetry_mode=symmetry_mode,
                channels_last=channels_last,
                copier=TorchCopier,
            )
            return
        self._gathers = [
            TritonGather(field, plan.crop, triples, symmetry_mode, channels_last)
            for field, triples in zip(fields, vectors, strict=True)
        ]
        self._rows = torch.empty((plan.samples, 2), dtype=torch.int64, device=fields[0].device)
        # Where the next batch begins in the plan is known to the device alone: filling a slot is the same work always.
        self._next = torch.zeros((), dtype=torch.int64, device=fields[0].device)
        self._step, self._advance = world_size, batch_size * world_size
        shapes: list[tuple[int, ...]] = [(batch_size, field.shape[0], *(plan.crop,) * 3) for field in fields]
        self._feeder = CudaPrefetcher(device, shapes, channels_last)

    def __len__(self) -> int:
        """Batches an epoch on this rank."""
        return len(self._batches)

    def epoch(self, epoch: int, first_batch: int = 0) -> Generator[Batch, None, None]:
        """The batches of one epoch, from `first_batch` on."""
        if self._host is not None:
            return self._host.epoch(epoch, first_batch)
        return self._feeder.feed(self._fills(self.plan.epoch(epoch), first_batch))

    def close(self) -> None:
        if self._host is not None:
            self._host.close()

    def attach(self, beside: PendingWork | None) -> None:
        """Offers there, from the next epoch on, what fills the next batch; without CUDA there is nothing to offer."""
        if self._host is None:
            self._feeder.beside = beside

    def _fills(self, plan: EpochPlan, first_batch: int) -> Fills:
        # The feeder's stream carries the epoch's plan first, then the batches that read it.
        rows = torch.from_numpy(device_plan(plan, self.plan.box)).pin_memory()
        for number, batch in enumerate(self._batches[first_batch:]):
            begin = functools.partial(self._begin, rows, batch.start)
            yield len(range(len(plan))[batch]), self._fill if number else begin

    def _begin(self, plan: torch.Tensor, start: int, slot: Batch) -> None:
        """Enqueues the upload of an epoch's plan, and the first batch, from row `start` on."""
        self._rows.copy_(plan, non_blocking=True)
        self._next.fill_(start)
        self._fill(slot)

    def _fill(self, slot: Batch) -> None:
        """Enqueues the gathering of the next batch: no argument changes from one batch to another."""
        for gather, part in zip(self._gathers, slot, strict=True):
            gather(self._rows, self._next, self._step, part)
        self._next.add_(self._advance)


def check_fits(volume_bytes: Iterable[int], dtype: torch.dtype, free_bytes: int, reserve_bytes: int) -> None:
    """UserError if volumes of so many bytes in float32 leave the device less than `reserve_bytes` when kept as `dtype`.

    `free_bytes` is what the device has free now (`torch.cuda.mem_get_info`), the reserve what the training will take.
    """
    size = sum(volume_bytes)
    if _stored(size, dtype) + reserve_bytes > free_bytes:
        raise _too_large(size, dtype, free_bytes, reserve_bytes)


def load_resident(volume: Volume, world: World, dtype: torch.dtype) -> Volume:
    """The volume as tensors [C, L, L, L] of type float32 or float16 on the rank's device; every rank calls it.

    One rank a node reads the file and broadcasts it to the others. On the CPU float32 is one copy a node, shared.
    What fails on one rank fails on all of them, in one line.
    """
    if world.device.type == "cpu" and dtype == torch.float32:
        shared = share_volume(volume, world)
        inputs, targets = torch.from_numpy(shared.inputs), torch.from_numpy(shared.targets)
    else:
        inputs, targets = _load(volume, world, dtype)
    return Volume(volume.path, inputs, targets)


def _load(volume: Volume, world: World, dtype: torch.dtype) -> list[torch.Tensor]:
    sources = (volume.inputs, volume.targets)
    on_gpu = world.device.type == "cuda"
    thickness = min(max(1, SLAB_VALUES // volume.box**2), volume.box)
    with world.raise_together():
        free = torch.cuda.mem_get_info(world.device)[0] if on_gpu else 0
        try:
            fields = [torch.empty(source.shape, dtype=dtype, device=world.device) for source in sources]
        except torch.OutOfMemoryError:
            raise _too_large(volume.bytes, dtype, free, 0) from None
    reads = world.node.source == world.rank
    with world.raise_together():
        # Reading through pinned memory is twice as fast as from pages that may move.
        staging = torch.empty((thickness, volume.box, volume.box), pin_memory=on_gpu) if reads else None
        guard = FileGuard(volume.files if reads else ())
    with world.raise_together(), closing(guard):
        failure: Exception | None = None
        name = f"reading {os.path.basename(volume.path)} into {'device ' if on_gpu else ''}memory"
        slabs = list(_slabs(volume, thickness))
        with Progress(name, len(slabs), "slabs", silent=not world.is_root) as progress:
            for number, channel, planes in slabs:
                part = fields[number][channel, planes]
                if staging is not None and failure is None:
                    try:
                        guard.check()
                        prefetch(sources[number], channel, planes.stop, thickness)
                        values = staging[: len(part)]
                        values.numpy()[...] = sources[number][channel, planes]
                        _store(values, part, f"{volume.path}: {DATASETS[number]}[{channel}]")
                    except OSError as error:
                        failure = UserError(f"cannot read {volume.path}: {error.strerror or error}")
                    except Exception as error:
                        failure = error
                # After a failure, too, or the others would wait for it for ever: all learn of it at the end.
                world.broadcast_on_node(part)
                if on_gpu:
                    # Ranks that only receive would run far ahead, and the last broadcasts wait past their time limit.
                    torch.cuda.synchronize(world.device)
                progress.advance()
        if failure is not None:
            raise failure
    return fields


def _slabs(volume: Volume, thickness: int) -> Iterator[tuple[int, int, slice]]:
    """The pieces in the order of `Volume.slabs`, without reading them: (field, channel, planes)."""
    for number, field in enumerate((volume.inputs, volume.targets)):
        for channel in range(field.shape[0]):
            for start in range(0, volume.box, thickness):
                yield number, channel, slice(start, min(start + thickness, volume.box))


def _store(values: torch.Tensor, part: torch.Tensor, name: str) -> None:
    """Copies float32 values of the host to their place on the device, in its type."""
    values = values.to(part.device)
    if part.dtype == torch.float16 and bool((values.abs() > FLOAT16_MAX).any()):
        raise UserError(
            f"{name} has values beyond ±{FLOAT16_MAX:.0f}, the range of float16; use --set resident_dtype=float32"
        )
    part.copy_(values)


def _stored(float32_bytes: int, dtype: torch.dtype) -> int:
    return float32_bytes * dtype.itemsize // 4


def _too_large(size: int, dtype: torch.dtype, free: int, reserve: int) -> UserError:
    """`size` is in bytes of float32."""
    needed, half = _stored(size, dtype), _stored(size, torch.float16)
    remedy = "use --data_loader_config=lowmem"
    if needed > half and half + reserve <= free:
        remedy = f"use --set resident_dtype=float16 ({half / GIB:.2f} GiB) or --data_loader_config=lowmem"
    kept = f", and {reserve / GIB:.2f} GiB are reserved for training" if reserve else ""
    return UserError(
        f"the volumes take {needed / GIB:.2f} GiB as {str(dtype).removeprefix('torch.')}; "
        f"the device has {free / GIB:.2f} GiB free{kept}; {remedy}"
    )
