"""The loader `dali-lowmem`: crops are read from `.npy` twins, and NVIDIA DALI brings them to the device and turns them.

On a machine without CUDA the same pipeline runs on DALI's CPU backend. DALI draws nothing: crops and symmetries of the
sample plan are fed in.

Threads of this process cut the crops out of the mapped twins, straight into (pinned) memory that DALI works on without
a copy: its own reader copies a region of interest number by number, and takes half as long again. Rows can be written
in any order, so two of the axes are mirrored on the way, at no cost. What moves single numbers is DALI's, in three
passes, every one of them exact:

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
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch

from utils.data import symmetry
from utils.data.files.file_guard import FileGuard
from utils.data.files.npy import FIELDS, NpyVolume
from utils.data.loaders.prefetcher import Batch
from utils.data.plan import EpochPlan, SamplePlan, rank_batches
from utils.errors import LocalError, UserError

INSTALL = 'pip install -e ".[dali]"'
QUEUE = 2  # batches that DALI has at a time
READ_AHEAD = 1  # batches that are being read meanwhile
# Beside these one that was given to the consumer: it may lie in this memory, or its copy to the device not be over.
BUFFERS = QUEUE + READ_AHEAD + 1

# DALI's transpose takes one permutation for a whole batch, but each sample may have its own shape. This permutation of
# five axes contains every order of three (it is a shortest superpattern of them): a crop reshaped to five axes, two of
# them of length one in the right places, has its own three axes permuted as its symmetry wants.
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


class DaliLoader:
    """Carries out this rank's part of a sample plan, as NativeLoader does; batches are on `device`."""

    def __init__(
        self,
        twins: NpyVolume,
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
        self.twins, self.plan = twins, plan
        self._device = device or torch.device("cpu")
        self._batch_size, self._channels_last = batch_size, channels_last
        self._batches = rank_batches(plan.samples, batch_size, rank, world_size, drop_last=plan.split == "train")
        self._tables = [
            _Table(array.shape[-1], field_vectors, symmetry_mode, plan.crop)
            for array, field_vectors in zip(twins.arrays, vectors, strict=True)
        ]
        self._pool = ThreadPoolExecutor(max(1, threads), thread_name_prefix="loader")
        pinned = self._device.type == "cuda"
        shapes = [(batch_size, *(plan.crop,) * 3, array.shape[-1]) for array in twins.arrays]
        self._buffers = [
            tuple(torch.zeros(shape, pin_memory=pinned).numpy() for shape in shapes) for _ in range(BUFFERS)
        ]
        self._guard = FileGuard(twins.paths)
        with _dali_errors():
            self._pipeline = self._build(max(1, threads))
            # DALI's first run fills its whole queue, however short the epoch is: it is given something to do.
            for buffers in self._buffers[:QUEUE]:
                self._feed(buffers, np.zeros(batch_size, dtype=np.int64))
            self._pipeline.schedule_run()
            for _ in range(QUEUE):
                self._pipeline.outputs()

    def __len__(self) -> int:
        """Batches an epoch on this rank."""
        return len(self._batches)

    def epoch(self, epoch: int, first_batch: int = 0) -> Generator[Batch, None, None]:
        """The batches of one epoch, from `first_batch` on."""
        plan = self.plan.epoch(epoch)
        order = iter(range(first_batch, len(self._batches)))
        reading: deque[_Reading] = deque()
        running: deque[int] = deque()  # sizes of the batches that DALI has
        copied: deque[torch.cuda.Event] = deque()  # to the device, one a batch of the buffers that are full
        try:
            while True:
                self._guard.check()
                while True:
                    while len(reading) < READ_AHEAD and (number := next(order, None)) is not None:
                        if len(copied) == BUFFERS - QUEUE:
                            copied.popleft().synchronize()
                        reading.append(self._read(plan.rows(self._batches[number]), number))
                    if not reading or len(running) == QUEUE:
                        break
                    running.append(self._run(reading[0]))
                    reading.popleft()
                if not running:
                    return
                batch = self._outputs()
                if self._device.type == "cuda":
                    copied.append(torch.cuda.current_stream(self._device).record_event())
                size = running.popleft()
                yield Batch(*(part[:size] for part in batch))
        finally:
            # Left early, or failed: the memory must be free, and the next epoch not be given this one's batches.
            for read in reading:
                for task in read.tasks:
                    task.cancel() or task.exception()
            with contextlib.suppress(RuntimeError):  # of a pipeline that has failed: its error is on its way already
                for _ in running:
                    self._pipeline.outputs()
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._guard.close()
        del self._pipeline  # its threads end with it

    def _read(self, samples: EpochPlan, number: int) -> _Reading:
        """Begins to read a batch's crops; one task a sample."""
        buffers = self._buffers[number % BUFFERS]
        tasks = [self._pool.submit(self._copy, samples, slot, buffers) for slot in range(len(samples))]
        return _Reading(samples, buffers, tasks)

    def _copy(self, samples: EpochPlan, slot: int, buffers: tuple[np.ndarray, ...]) -> None:
        x, y, z = (slice(int(start), int(start) + self.plan.crop) for start in samples.origins[slot])
        mirrored = self._tables[0].mirrored[samples.symmetries[slot]]
        rows = tuple(slice(None, None, -1 if flag else 1) for flag in mirrored[:2])
        for array, buffer in zip(self.twins.arrays, buffers, strict=True):
            np.copyto(buffer[slot], array[x, y, z][rows])

    def _run(self, read: _Reading) -> int:
        """Gives DALI a batch once it is read; returns its size. A batch that is not full keeps old crops at its end."""
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
            if self.plan.turns:
                for key, values in table.fed().items():
                    self._pipeline.feed_input(f"{name} {key}", values[symmetries])

    def _wrap(self, buffer: np.ndarray) -> Any:
        """DALI copies pinned memory to the device without a detour, if it is told that it is pinned."""
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

        def fed(name: str, kind: Any, ndim: int = 1) -> Any:
            return fn.external_source(name=name, dtype=kind, ndim=ndim)

        crop = self.plan.crop
        with pipeline:
            outputs = []
            for name, table in zip(FIELDS, self._tables, strict=True):
                # Without a layout DALI takes the wrong axes, silently.
                field = fn.external_source(name=f"{name} crop", dtype=types.FLOAT, ndim=4, layout="DHWC", no_copy=True)
                if on_gpu:
                    field = field.gpu()
                if self.plan.turns:
                    field = fn.crop_mirror_normalize(
                        field,
                        output_layout="CDHW",
                        dtype=types.FLOAT,
                        mirror=fed(f"{name} mirrored", types.INT32, ndim=0),
                        mean=fed(f"{name} zero", types.FLOAT),
                        std=fed(f"{name} sign", types.FLOAT),
                    )
                    # Channels take the place of a sequence's frames.
                    field = fn.reshape(field, layout="FDHW")
                    field = fn.sequence_rearrange(field, new_order=fed(f"{name} source", types.INT32))
                    field = fn.reshape(field, shape=fed(f"{name} shape", types.INT32))
                    field = fn.transpose(field, perm=[0, *(1 + axis for axis in SUPERPATTERN)])
                    field = fn.reshape(field, shape=[table.channels, crop, crop, crop])
                    if self._channels_last:
                        field = fn.transpose(field, perm=[1, 2, 3, 0])
                elif not self._channels_last:
                    field = fn.transpose(field, perm=[3, 0, 1, 2])
                outputs.append(field)
            pipeline.set_outputs(*outputs)
        pipeline.build()
        return pipeline


class _Reading(NamedTuple):
    """A batch that is being read."""

    samples: EpochPlan
    buffers: tuple[np.ndarray, ...]
    tasks: list[Future[None]]


class _Table:
    """What the pipeline is told of each symmetry, for one field; first index: the symmetry."""

    def __init__(self, channels: int, vectors: Sequence[Sequence[int]], mode: str, crop: int) -> None:
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

    def fed(self) -> dict[str, np.ndarray]:
        """What is fed for each sample: its symmetry's row of these."""
        return {
            "mirrored": self.mirrored[:, 2],
            "sign": self.sign,
            "zero": self.zero,
            "source": self.source,
            "shape": self.shape,
        }


def check_installed() -> None:
    """Raises UserError, with the command that installs it, where DALI cannot be imported."""
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
    """DALI's errors carry a C++ stack; the user gets the sentence that says what happened."""
    try:
        yield
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        # What precedes "encountered:" tells where, what follows it what.
        start = next((number + 1 for number, line in enumerate(lines) if line == "encountered:"), 0)
        reason = lines[start] if lines[start:] else repr(error)
        raise LocalError(f"NVIDIA DALI failed: {reason}") from error
