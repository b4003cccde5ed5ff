"""The loader `dali-lowmem`: crops are read from `.npy` files, and NVIDIA DALI moves them to the device.

Threads of this process cut the crops out of the mapped files, straight into (pinned) memory that DALI reads without a
copy. DALI's own reader copies a region of interest value by value, which takes 1.5 times as long. torch then applies
the symmetries of the sample plan on the device. On a machine without CUDA the same pipeline runs on DALI's CPU backend.

Reference: the operators' documentation, https://docs.nvidia.com/deeplearning/dali/user-guide/docs/operations/index.html
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import torch

from utils.config import Config
from utils.data import symmetry
from utils.data.files.npy import FIELDS, NpyVolume
from utils.data.files.page_cache import warm_page_cache
from utils.data.loader import Batch, Loader, Loaders, memory_format
from utils.data.loaders.build import build_crop_loaders
from utils.data.loaders.crop_reader import CropReader
from utils.data.loaders.crops import CropOptions
from utils.data.loaders.prefetcher import CudaPrefetcher, Fills
from utils.data.volumes import of_both_splits, open_npy_volumes
from utils.distributed.world import World
from utils.errors import LocalError, UserError

INSTALL = 'pip install -e ".[dali]"'
QUEUE = 2  # batches that DALI has at a time
SPARE = 2  # buffers for the batch that is being read, and for one whose copy to the device may still run


def build(config: Config, world: World) -> Loaders:
    with world.raise_together():
        import_dali()
    volumes = open_npy_volumes(config, world)
    both = of_both_splits(volumes)
    arrays = [array for volume in both for array in volume.arrays]
    warm_page_cache([path for volume in both for path in volume.paths], arrays, world)
    return build_crop_loaders(config, world, volumes, DaliLoader)


class DaliLoader(Loader):
    """Loads one rank's part of a sample plan from the volumes of a split."""

    def __init__(self, volumes: Sequence[NpyVolume], options: CropOptions) -> None:
        self._arrays, self._options = [volume.arrays for volume in volumes], options
        self._channels = [array.shape[-1] for array in self._arrays[0]]
        self._on_gpu = options.device.type == "cuda"
        # For each field the source channels [48, C] and their signs [48, C], on the device.
        self._tables = [
            [
                torch.from_numpy(table).to(options.device)
                for table in symmetry.channel_table(count, vectors, options.symmetry_mode)
            ]
            for count, vectors in zip(self._channels, options.vectors, strict=True)
        ]
        shapes = [(options.batch_size, *(options.plan.crop,) * 3, channels) for channels in self._channels]
        buffers = [
            Batch(*(torch.zeros(shape, pin_memory=self._on_gpu) for shape in shapes)) for _ in range(QUEUE + SPARE)
        ]
        self._prefetcher: CudaPrefetcher | None = None
        if self._on_gpu:
            self._prefetcher = CudaPrefetcher(options.device, options.shapes(self._channels), options.channels_last)
        self._reader = CropReader([volume.volume() for volume in volumes], options, buffers, self._copy)
        with _dali_errors():
            self._pipeline = self._build()
            # DALI's first run fills its whole queue and needs input for that, however short the epoch is.
            for buffer in buffers[:QUEUE]:
                self._feed(buffer)
            self._pipeline.schedule_run()
            for _ in range(QUEUE):
                self._pipeline.outputs()

    def __len__(self) -> int:
        return len(self._reader.batches)

    def epoch(self, epoch: int, first_batch: int = 0) -> Generator[Batch, None, None]:
        symmetries = self._run(epoch, first_batch)
        if self._prefetcher is None:
            return self._on_host(symmetries)
        return self._prefetcher.prefetch(self._fills(symmetries))

    def _on_host(self, epoch: Generator[np.ndarray, None, None]) -> Generator[Batch, None, None]:
        form = memory_format(self._options.channels_last)
        with closing(epoch):
            for symmetries in epoch:
                shapes = self._options.shapes(self._channels)
                batch = Batch(*(torch.empty((len(symmetries), *shape[1:]), memory_format=form) for shape in shapes))
                self._fill(symmetries, batch)
                yield batch

    def _fills(self, epoch: Generator[np.ndarray, None, None]) -> Fills:
        with closing(epoch):
            for symmetries in epoch:
                yield len(symmetries), functools.partial(self._fill, symmetries)

    def _fill(self, symmetries: np.ndarray, batch: Batch) -> None:
        """Copies the next batch out of DALI's memory, which changes from batch to batch, under its symmetries."""
        for crops, samples, (sources, signs) in zip(self._outputs(), batch, self._tables, strict=True):
            if not self._options.plan.is_augmented:
                samples.copy_(crops[: len(samples)].movedim(-1, 1), non_blocking=True)
                continue
            for crop, sample, index in zip(crops, samples, symmetries.tolist(), strict=False):
                flipped = [1 + axis for axis in range(3) if symmetry.SIGNS[index, axis] < 0]
                moved = crop.permute(3, *symmetry.PERMUTATIONS[index].tolist()).flip(flipped)
                sample.copy_(moved.index_select(0, sources[index]) * signs[index, :, None, None, None])

    def _run(self, epoch: int, first_batch: int) -> Generator[np.ndarray, None, None]:
        """Keeps DALI's queue filled. Yields each batch's symmetries; the caller then takes it with `_outputs`."""
        running: deque[np.ndarray] = deque()  # symmetries of the batches that DALI has
        read = self._reader.read(epoch, first_batch)
        try:
            while True:
                while len(running) < QUEUE and (ready := next(read, None)) is not None:
                    rows, buffer = ready
                    with _dali_errors():
                        self._feed(buffer)
                        self._pipeline.schedule_run()
                    running.append(rows.symmetries)
                if not running:
                    return
                yield running.popleft()
        finally:
            # Also after an early end or a failure: releases the buffers and takes this epoch's batches out of DALI.
            read.close()
            with contextlib.suppress(RuntimeError):  # if the pipeline has failed; that error has already been raised
                for _ in running:
                    self._pipeline.outputs()

    def close(self) -> None:
        self._reader.close()
        del self._pipeline  # ends its threads

    def _copy(self, volume: int, origin: np.ndarray, index: int, sample: Sequence[np.ndarray]) -> None:
        """Copies a crop to its place in the buffers."""
        x, y, z = (slice(int(start), int(start) + self._options.plan.crop) for start in origin)
        for array, out in zip(self._arrays[volume], sample, strict=True):
            np.copyto(out, array[x, y, z])

    def _feed(self, buffer: Batch) -> None:
        """Passes a batch to DALI. A shorter one keeps old crops at its end."""
        from nvidia.dali.tensors import TensorListCPU

        for name, crops in zip(FIELDS, buffer, strict=True):
            # Passed without a copy, and marked as pinned if it is: DALI then copies it to the device directly.
            self._pipeline.feed_input(name, TensorListCPU(crops.numpy(), is_pinned=self._on_gpu))

    def _outputs(self) -> list[torch.Tensor]:
        """Inputs and targets [N, D, D, D, C] of the next batch, without a copy; on CUDA for the current stream."""
        stream = torch.cuda.current_stream(self._options.device) if self._on_gpu else None
        with _dali_errors():
            return [torch.from_dlpack(output.as_tensor()) for output in self._pipeline.outputs(stream)]

    def _build(self) -> Any:
        fn, types, pipeline_class = import_dali()
        options = self._options
        pipeline = pipeline_class(
            batch_size=options.batch_size,
            num_threads=max(1, options.threads),
            device_id=(options.device.index or 0) if self._on_gpu else None,
            prefetch_queue_depth=QUEUE,
        )
        with pipeline:
            crops = [fn.external_source(name=name, dtype=types.FLOAT, ndim=4, no_copy=True) for name in FIELDS]
            pipeline.set_outputs(*(crop.gpu() if self._on_gpu else crop for crop in crops))
        pipeline.build()
        return pipeline


def import_dali() -> tuple[Any, Any, Any]:
    """DALI's operators, types and Pipeline."""
    try:
        from nvidia.dali import fn, types
        from nvidia.dali.pipeline import Pipeline
    except ImportError as error:
        reason = "is not installed" if isinstance(error, ModuleNotFoundError) else f"cannot be imported ({error})"
        raise UserError(
            f"data_loader_config dali-lowmem: NVIDIA DALI {reason}; install it with {INSTALL}, or use "
            f"--data_loader_config=lowmem"
        ) from None
    return fn, types, Pipeline


@contextlib.contextmanager
def _dali_errors() -> Iterator[None]:
    """Reduces DALI's errors, which contain a C++ stack trace, to their description."""
    try:
        yield
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        # The source location of the error precedes "encountered:", and its description follows.
        start = next((number + 1 for number, line in enumerate(lines) if line == "encountered:"), 0)
        reason = lines[start] if lines[start:] else repr(error)
        raise LocalError(f"NVIDIA DALI failed: {reason}") from error
