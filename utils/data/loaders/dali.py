"""The loader `dali-lowmem`: crops are read from `.npy` files; NVIDIA DALI moves them to the device and augments them.

On a machine without CUDA the same pipeline runs on DALI's CPU backend. DALI draws no random numbers: crops and
symmetries of the sample plan are fed to it.

Threads of this process cut the crops out of the mapped files, straight into (pinned) memory that DALI reads without a
copy. DALI's own reader copies a region of interest value by value, which takes 1.5 times as long. Rows can be written
in any order, so two of the axes are mirrored on the way at no cost. DALI moves the single values, in three passes, all
of them exact:

- mirror the last axis, put channels first, negate the components that the symmetry negates;
- permute the components of vectors;
- permute the axes (see SUPERPATTERN).

Reference: the operators' documentation, https://docs.nvidia.com/deeplearning/dali/user-guide/docs/operations/index.html
"""

from __future__ import annotations

import contextlib
import itertools
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
from utils.data.loader import Batch, Loader, Loaders, TrainingBytes, memory_format
from utils.data.loaders.crop_reader import CropReader
from utils.data.loaders.crops import CropOptions, Vectors
from utils.data.loaders.prefetcher import CudaPrefetcher, Fills
from utils.data.splits import build_crop_loaders, of_both_splits, open_npy_volumes
from utils.distributed.world import World
from utils.errors import LocalError, UserError

INSTALL = 'pip install -e ".[dali]"'
QUEUE = 2  # batches that DALI has at a time
SPARE = 2  # buffers for the batch that is being read, and for one whose copy to the device may still run

# [48, 3]: 1 for each source axis that a symmetry mirrors. Axes are mirrored before they are permuted.
MIRRORED = np.empty((symmetry.COUNT, 3), dtype=np.int32)
MIRRORED[np.arange(symmetry.COUNT)[:, None], symmetry.PERMUTATIONS] = symmetry.SIGNS < 0

# DALI's transpose takes one permutation for a whole batch, but each sample may have its own shape. This permutation of
# five axes contains every order of three (it is a shortest superpattern of them): a crop reshaped to five axes, two of
# them of length one in the right places, has its own three axes permuted as its symmetry requires.
SUPERPATTERN = (1, 4, 2, 0, 3)


def superpattern_shapes(crop: int) -> np.ndarray:
    """[48, 5]: the shape under which SUPERPATTERN permutes a crop's axes as each symmetry does."""
    shapes = np.ones((symmetry.COUNT, 5), dtype=np.int32)
    for index, wanted in enumerate(symmetry.PERMUTATIONS):
        for places in itertools.combinations(range(5), 3):
            if [places.index(place) for place in SUPERPATTERN if place in places] == list(wanted):
                shapes[index, places] = crop
                break
    return shapes


def build(config: Config, world: World, training_bytes: TrainingBytes) -> Loaders:
    with world.raise_together():
        import_dali()
    volumes = open_npy_volumes(config, world)
    both = of_both_splits(volumes)
    arrays = [array for volume in both for array in volume.arrays]
    note = warm_page_cache([path for volume in both for path in volume.paths], arrays, world)
    return build_crop_loaders(config, world, volumes, DaliLoader, note)


class DaliLoader(Loader):
    """Loads one rank's part of a sample plan from the volumes of a split."""

    def __init__(self, volumes: Sequence[NpyVolume], options: CropOptions) -> None:
        self._arrays, self._options = [volume.arrays for volume in volumes], options
        self._channels = [array.shape[-1] for array in self._arrays[0]]
        self._on_gpu = options.device.type == "cuda"
        self._tables = [
            symmetry_tables(channels, vectors, options.symmetry_mode, options.plan.crop)
            for channels, vectors in zip(self._channels, options.vectors, strict=True)
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
                self._feed(buffer, [])
            self._pipeline.schedule_run()
            for _ in range(QUEUE):
                self._pipeline.outputs()

    def __len__(self) -> int:
        return len(self._reader.batches)

    def epoch(self, epoch: int, first_batch: int = 0) -> Generator[Batch, None, None]:
        sizes = self._run(epoch, first_batch)
        return self._on_host(sizes) if self._prefetcher is None else self._prefetcher.prefetch(self._fills(sizes))

    def _on_host(self, sizes: Generator[int, None, None]) -> Generator[Batch, None, None]:
        form = memory_format(self._options.channels_last)
        with closing(sizes):
            for size in sizes:
                yield Batch(*(part[:size].contiguous(memory_format=form) for part in self._outputs()))

    def _fills(self, sizes: Generator[int, None, None]) -> Fills:
        with closing(sizes):
            for size in sizes:
                yield size, self._fill

    def _fill(self, slot: Batch) -> None:
        """Copies the next batch out of DALI's memory, which changes from batch to batch."""
        for target, part in zip(slot, self._outputs(), strict=True):
            target.copy_(part[: len(target)], non_blocking=True)

    def _run(self, epoch: int, first_batch: int) -> Generator[int, None, None]:
        """Keeps DALI's queue filled. Yields the size of each batch, which the caller then takes with `_outputs`."""
        running: deque[int] = deque()  # sizes of the batches that DALI has
        read = self._reader.read(epoch, first_batch)
        try:
            while True:
                while len(running) < QUEUE and (ready := next(read, None)) is not None:
                    rows, buffer = ready
                    with _dali_errors():
                        self._feed(buffer, rows.symmetries)
                        self._pipeline.schedule_run()
                    running.append(len(rows))
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
        """Copies a crop to its place in the buffers, with the first two axes mirrored as the symmetry requires."""
        x, y, z = (slice(int(start), int(start) + self._options.plan.crop) for start in origin)
        rows = tuple(slice(None, None, -1 if flag else 1) for flag in MIRRORED[index, :2])
        for array, out in zip(self._arrays[volume], sample, strict=True):
            np.copyto(out, array[x, y, z][rows])

    def _feed(self, buffer: Batch, symmetries: Sequence[int] | np.ndarray) -> None:
        """Passes a batch to DALI. One with fewer symmetries than samples keeps old crops at its end."""
        from nvidia.dali.tensors import TensorListCPU

        indices = np.full(self._options.batch_size, symmetry.IDENTITY)
        indices[: len(symmetries)] = symmetries
        for name, crops, table in zip(FIELDS, buffer, self._tables, strict=True):
            # Passed without a copy, and marked as pinned if it is: DALI then copies it to the device directly.
            self._pipeline.feed_input(f"{name} crop", TensorListCPU(crops.numpy(), "DHWC", self._on_gpu))
            if self._options.plan.is_augmented:
                for key, values in table.items():
                    self._pipeline.feed_input(f"{name} {key}", values[indices])

    def _outputs(self) -> list[torch.Tensor]:
        """Inputs and targets [N, C, D, D, D] of the next batch, without a copy; on CUDA for the current stream."""
        stream = torch.cuda.current_stream(self._options.device) if self._on_gpu else None
        with _dali_errors():
            parts = [torch.from_dlpack(output.as_tensor()) for output in self._pipeline.outputs(stream)]
        return parts if self._options.plan.is_augmented else [part.movedim(-1, 1) for part in parts]

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
            outputs = []
            for name, channels in zip(FIELDS, self._channels, strict=True):
                # Without a layout DALI silently uses the wrong axes.
                crop = fn.external_source(name=f"{name} crop", dtype=types.FLOAT, ndim=4, layout="DHWC", no_copy=True)
                if self._on_gpu:
                    crop = crop.gpu()
                if options.plan.is_augmented:
                    crop = self._augment(crop, name, channels)
                outputs.append(crop)
            pipeline.set_outputs(*outputs)
        pipeline.build()
        return pipeline

    def _augment(self, crop: Any, name: str, channels: int) -> Any:
        """The operators that apply each sample's symmetry to a crop DHWC; returns it as CDHW."""
        fn, types, _ = import_dali()

        def fed(key: str, dtype: Any, ndim: int = 1) -> Any:
            return fn.external_source(name=f"{name} {key}", dtype=dtype, ndim=ndim)

        crop = fn.crop_mirror_normalize(
            crop,
            output_layout="CDHW",
            dtype=types.FLOAT,
            mirror=fed("mirrored", types.INT32, ndim=0),
            mean=fed("zero", types.FLOAT),
            std=fed("sign", types.FLOAT),
        )
        # `sequence_rearrange` permutes the channels as if they were the frames of a video.
        crop = fn.reshape(crop, layout="FDHW")
        crop = fn.sequence_rearrange(crop, new_order=fed("source", types.INT32))
        crop = fn.reshape(crop, shape=fed("shape", types.INT32))
        crop = fn.transpose(crop, perm=[0, *(1 + axis for axis in SUPERPATTERN)])
        return fn.reshape(crop, shape=[channels, *(self._options.plan.crop,) * 3])


def symmetry_tables(channels: int, vectors: Vectors, mode: str, crop: int) -> dict[str, np.ndarray]:
    """The pipeline's inputs for one field, by name; each sample is fed the row of its symmetry."""
    sources, signs = symmetry.channel_table(channels, vectors, mode)
    # Components are negated before they are permuted, so a sign belongs to the source channel.
    sign = np.empty((symmetry.COUNT, channels), dtype=np.float32)
    sign[np.arange(symmetry.COUNT)[:, None], sources] = signs
    return {
        "mirrored": MIRRORED[:, 2],
        "sign": sign,
        # (x - 0)·s in one fused step is x·s + (-0·s): this zero's own sign keeps that of x where x is zero.
        "zero": np.copysign(np.float32(0), sign),
        "source": sources.astype(np.int32),
        "shape": np.insert(superpattern_shapes(crop), 0, channels, axis=1),
    }


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
