"""The loader `dali-lowmem`: crops are read from `.npy` files; NVIDIA DALI moves them to the device and augments them.

On a machine without CUDA the same pipeline runs on DALI's CPU backend. DALI draws no random numbers: crops and
symmetries of the sample plan are fed to it.

Threads of this process cut the crops out of the mapped files, straight into (pinned) memory that DALI reads without a
copy. DALI's own reader copies a region of interest value by value, and needs half as long again. Rows can be written in
any order, so two of the axes are mirrored on the way at no cost. DALI does what moves single values, in three passes,
all of them exact:

- mirror the last axis, put channels first, negate the components that the symmetry negates;
- permute the components of vectors;
- permute the axes (see SUPERPATTERN).

Reference: the operators' documentation, https://docs.nvidia.com/deeplearning/dali/user-guide/docs/operations/index.html
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from utils.config import Config
from utils.data import symmetry
from utils.data.files.npy import FIELDS, NpyVolume
from utils.data.files.page_cache import map_cached_pages, warm_page_cache
from utils.data.files.size_check import SizeCheck
from utils.data.loader import Batch, Loader, Loaders, TrainingBytes
from utils.data.loaders.crops import CropOptions, Vectors
from utils.data.plan import EpochPlan
from utils.data.sources import build_splits, crop_options, open_npy_volumes
from utils.distributed.world import World
from utils.errors import LocalError, UserError

INSTALL = 'pip install -e ".[dali]"'
QUEUE = 2  # batches that DALI has at a time
READ_AHEAD = 1  # batches that are being read meanwhile
# And one for the consumer's batch: it may use this memory, or its copy to the device may still run.
BUFFERS = QUEUE + READ_AHEAD + 1

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
        check_installed()
    volumes = open_npy_volumes(config, world)
    note = warm_page_cache([path for volume in volumes.values() for path in volume.paths], world)
    for volume in volumes.values():
        map_cached_pages(volume.paths, volume.arrays)
    return build_splits(lambda split: DaliLoader(volumes[split], crop_options(config, world, split)), world, note)


class DaliLoader(Loader):
    """Carries out one rank's part of a sample plan. At least one thread reads, whatever `options.threads` is."""

    def __init__(self, volume: NpyVolume, options: CropOptions) -> None:
        self._volume, self._plan = volume, options.plan
        self._device, self._batch_size = options.device, options.batch_size
        self._channels_last = options.channels_last
        self._batches = options.batches()
        self._tables = [
            _SymmetryTable(array.shape[-1], vectors, options.symmetry_mode, options.plan.crop)
            for array, vectors in zip(volume.arrays, options.vectors, strict=True)
        ]
        threads = max(1, options.threads)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="loader")
        pinned = self._device.type == "cuda"
        shapes = [(options.batch_size, *(options.plan.crop,) * 3, array.shape[-1]) for array in volume.arrays]
        self._buffers = [
            tuple(torch.zeros(shape, pin_memory=pinned).numpy() for shape in shapes) for _ in range(BUFFERS)
        ]
        self._size_check = SizeCheck(volume.paths)
        with _dali_errors():
            self._pipeline = self._build(threads)
            # DALI's first run fills its whole queue, however short the epoch is: it needs input for that.
            for buffers in self._buffers[:QUEUE]:
                self._feed(buffers, np.zeros(options.batch_size, dtype=np.int64))
            self._pipeline.schedule_run()
            for _ in range(QUEUE):
                self._pipeline.outputs()

    def __len__(self) -> int:
        return len(self._batches)

    def epoch(self, epoch: int, first_batch: int = 0) -> Generator[Batch, None, None]:
        plan = self._plan.epoch(epoch)
        queues = _Queues(iter(range(first_batch, len(self._batches))))
        try:
            while True:
                self._size_check.check()
                self._schedule(plan, queues)
                if not queues.running:
                    return
                batch = self._outputs()
                if self._device.type == "cuda":
                    queues.copied.append(torch.cuda.current_stream(self._device).record_event())
                size = queues.running.popleft()
                yield Batch(*(part[:size] for part in batch))
        finally:
            self._drain(queues)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._size_check.close()
        del self._pipeline  # ends its threads

    def _schedule(self, plan: EpochPlan, queues: _Queues) -> None:
        """Reads ahead and passes batches to DALI until its queue is full, or until there are no more."""
        while True:
            while len(queues.reading) < READ_AHEAD and (number := next(queues.order, None)) is not None:
                if len(queues.copied) == BUFFERS - QUEUE:
                    queues.copied.popleft().synchronize()
                queues.reading.append(self._read(plan.rows(self._batches[number]), number))
            if not queues.reading or len(queues.running) == QUEUE:
                return
            queues.running.append(self._run(queues.reading[0]))
            queues.reading.popleft()

    def _drain(self, queues: _Queues) -> None:
        """Releases the memory, also after an early end or a failure, and takes this epoch's batches out of DALI."""
        for read in queues.reading:
            for task in read.tasks:
                task.cancel() or task.exception()
        with contextlib.suppress(RuntimeError):  # of a pipeline that has failed: its error is already raised
            for _ in queues.running:
                self._pipeline.outputs()
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _read(self, samples: EpochPlan, number: int) -> _Reading:
        """Starts to read a batch's crops, with one task per sample."""
        buffers = self._buffers[number % BUFFERS]
        tasks = [self._pool.submit(self._copy, samples, slot, buffers) for slot in range(len(samples))]
        return _Reading(samples, buffers, tasks)

    def _copy(self, samples: EpochPlan, slot: int, buffers: tuple[np.ndarray, ...]) -> None:
        x, y, z = (slice(int(start), int(start) + self._plan.crop) for start in samples.origins[slot])
        mirrored = self._tables[0].mirrored[samples.symmetries[slot]]
        rows = tuple(slice(None, None, -1 if flag else 1) for flag in mirrored[:2])
        for array, buffer in zip(self._volume.arrays, buffers, strict=True):
            np.copyto(buffer[slot], array[x, y, z][rows])

    def _run(self, read: _Reading) -> int:
        """Passes a batch to DALI once it is read and returns its size. A partial batch keeps old crops at its end."""
        for task in read.tasks:
            task.result()
        symmetries = np.full(self._batch_size, symmetry.IDENTITY)
        symmetries[: len(read.samples)] = read.samples.symmetries
        with _dali_errors():
            self._feed(read.buffers, symmetries)
            self._pipeline.schedule_run()
        return len(read.samples)

    def _feed(self, buffers: tuple[np.ndarray, ...], symmetries: np.ndarray) -> None:
        for name, buffer, table in zip(FIELDS, buffers, self._tables, strict=True):
            self._pipeline.feed_input(f"{name} crop", self._wrap(buffer))
            if self._plan.augmentations:
                for key, values in table.inputs().items():
                    self._pipeline.feed_input(f"{name} {key}", values[symmetries])

    def _wrap(self, buffer: np.ndarray) -> Any:
        """The buffer as DALI's tensors, marked as pinned if it is: DALI then copies it to the device directly."""
        from nvidia.dali.tensors import TensorListCPU

        return TensorListCPU(buffer, "DHWC", self._device.type == "cuda")

    def _outputs(self) -> Batch:
        """The next finished batch, without a copy; on CUDA in the order of the consumer's stream."""
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        with _dali_errors():
            parts = [torch.from_dlpack(output.as_tensor()) for output in self._pipeline.outputs(stream)]
        return Batch(*(part.movedim(-1, 1) if self._channels_last else part for part in parts))

    def _build(self, threads: int) -> Any:
        fn, types, pipeline_class = import_dali()
        on_gpu = self._device.type == "cuda"
        pipeline = pipeline_class(
            batch_size=self._batch_size,
            num_threads=threads,
            device_id=(self._device.index or 0) if on_gpu else None,
            prefetch_queue_depth=QUEUE,
        )
        with pipeline:
            outputs = []
            for name, table in zip(FIELDS, self._tables, strict=True):
                # Without a layout DALI takes the wrong axes, silently.
                crop = fn.external_source(name=f"{name} crop", dtype=types.FLOAT, ndim=4, layout="DHWC", no_copy=True)
                if on_gpu:
                    crop = crop.gpu()
                if self._plan.augmentations:
                    crop = self._augment(crop, name, table.channels)
                    if self._channels_last:
                        crop = fn.transpose(crop, perm=[1, 2, 3, 0])
                elif not self._channels_last:
                    crop = fn.transpose(crop, perm=[3, 0, 1, 2])
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
        # Channels are treated as a sequence's frames.
        crop = fn.reshape(crop, layout="FDHW")
        crop = fn.sequence_rearrange(crop, new_order=fed("source", types.INT32))
        crop = fn.reshape(crop, shape=fed("shape", types.INT32))
        crop = fn.transpose(crop, perm=[0, *(1 + axis for axis in SUPERPATTERN)])
        return fn.reshape(crop, shape=[channels, *(self._plan.crop,) * 3])


class _Reading(NamedTuple):
    """A batch that is being read."""

    samples: EpochPlan
    buffers: tuple[np.ndarray, ...]
    tasks: list[Future[None]]


@dataclass
class _Queues:
    """The batches of one epoch that are under way.

    order: numbers of the batches to read.
    reading: batches that threads read.
    running: sizes of the batches that DALI has.
    copied: passed once a batch in a full buffer has been copied to the device.
    """

    order: Iterator[int]
    reading: deque[_Reading] = field(default_factory=deque)
    running: deque[int] = field(default_factory=deque)
    copied: deque[torch.cuda.Event] = field(default_factory=deque)


class _SymmetryTable:
    """The pipeline's inputs for each symmetry, for one field; first index: the symmetry."""

    def __init__(self, channels: int, vectors: Vectors, mode: str, crop: int) -> None:
        self.channels = channels
        every = np.arange(symmetry.COUNT)[:, None]
        sources, signs = symmetry.channel_table(channels, vectors, mode)
        self.source = sources.astype(np.int32)
        # Negated before they are permuted: the sign belongs to the channel it is read from.
        self.sign = np.empty((symmetry.COUNT, channels), dtype=np.float32)
        self.sign[every, sources] = signs
        # (x - 0)·s in one fused step is x·s + (-0·s): this zero's own sign keeps that of x where x is zero.
        self.zero = np.copysign(np.float32(0), self.sign)
        # Likewise mirrored before they are permuted: output axis a is source axis perm[a].
        self.mirrored = np.empty((symmetry.COUNT, 3), dtype=np.int32)
        self.mirrored[every, symmetry.PERMUTATIONS] = symmetry.SIGNS < 0
        self.shape = np.concatenate(
            [np.full((symmetry.COUNT, 1), channels, dtype=np.int32), superpattern_shapes(crop)], axis=1
        )

    def inputs(self) -> dict[str, np.ndarray]:
        """The tables by the name of the input; each sample is fed the row of its symmetry."""
        return {
            "mirrored": self.mirrored[:, 2],
            "sign": self.sign,
            "zero": self.zero,
            "source": self.source,
            "shape": self.shape,
        }


def check_installed() -> None:
    """Raises UserError with the install command if DALI cannot be imported."""
    import_dali()


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
    """Reduces DALI's errors, which carry a C++ stack, to the sentence that says what happened."""
    try:
        yield
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        # The place of the error precedes "encountered:", its description follows.
        start = next((number + 1 for number, line in enumerate(lines) if line == "encountered:"), 0)
        reason = lines[start] if lines[start:] else repr(error)
        raise LocalError(f"NVIDIA DALI failed: {reason}") from error
