"""The training step as a CUDA graph: recorded once, then replayed with a single launch.

A replayed graph reads and writes the memory it was recorded with. Loaders reuse a few batch buffers, so there is one
graph per buffer and no batch is copied; all graphs share their working memory.
"""

import contextlib
import logging
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import torch
import torch.distributed as dist

from networks.losses import NetworkWithLoss
from utils.config import Config
from utils.data.loaders.base import Batch
from utils.distributed.world import World
from utils.errors import LocalError, UserError
from utils.optim.soap import Soap
from utils.steps.annotate import annotate
from utils.steps.eager import EagerStep

log = logging.getLogger(__name__)

# DistributedDataParallel times its first ten steps with events, which cannot be recorded.
WARMUP_STEPS = 11
# Batches in further buffers are copied to the step's: a loader that allocates new ones must not fill the device.
MAX_BUFFERS = 4
REMEDY = "use train.py, which has the same flags"
RecordedStep = tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]  # writes to the loss and the gradient norm


class GraphStep(EagerStep):
    """An EagerStep that runs its first steps eagerly, and replays all later ones from CUDA graphs.

    The graph holds forward, loss, backward with the gradient exchange, clipping and update. The learning rate is a
    tensor that the update reads. Source: Ng et al., "Accelerating PyTorch with CUDA Graphs", PyTorch blog 2021.
    """

    capturable: ClassVar[bool] = True

    def __init__(self, model: NetworkWithLoss, optimizer: torch.optim.Optimizer, config: Config, world: World) -> None:
        self.check(config, world)
        if not getattr(optimizer, "_step_supports_amp_scaling", False):
            reason = f"{type(optimizer).__name__} cannot skip non-finite updates on the device"
            raise UserError(f"cannot record the step as a CUDA graph: {reason}; {REMEDY}")
        if world.size > 1 and config.accumulation_steps == 1:
            # The probe would need a Python hook in the recorded gradient exchange, which is untested on several GPUs.
            config = config.model_copy(update={"log_noise_scale": False})
        self._device = world.device
        # Autograd computes a parameter's gradient on the stream on which it first used the parameter. Everything,
        # including the construction of DistributedDataParallel, must run on the stream on which graphs are recorded.
        # While its kernels are ready, those of loaders and copies, whose streams have priority 0, wait.
        self._stream = torch.cuda.Stream(world.device, priority=-1)
        with self._on_stream():
            super().__init__(model, optimizer, config, world)
        self._pool = torch.cuda.graph_pool_handle()
        # By addresses and shape of the batch, and True if gradients are exchanged.
        self._graphs: dict[tuple[int, int, torch.Size, bool], RecordedStep] = {}
        self._copies: dict[str, torch.Tensor] = {}  # of parts of the current batch
        self._eager_steps = 0
        # PyTorch warns of the eager steps before the first graph.
        warnings.filterwarnings("ignore", message="This instance was constructed with capturable=True")

    @classmethod
    def check(cls, config: Config, world: World) -> None:
        reason = None
        exchanges = world.size > 1 and not config.noddp
        if world.device.type != "cuda":
            reason = f"the run's device is {world.device.type}, and only CUDA devices have graphs"
        elif exchanges and dist.is_initialized() and "nccl" not in dist.get_backend_config():
            reason = "the ranks exchange gradients through gloo, which computes on the host; NCCL is needed"
        if reason is not None:
            raise UserError(f"cannot record the step as a CUDA graph: {reason}; {REMEDY}")

    def __call__(self, batch: Batch, lr: float) -> torch.Tensor:
        with self._on_stream():
            if batch.conditions is not None:  # loaders deliver them in new memory
                batch = replace(batch, conditions=self._copy("conditions", batch.conditions))
            for group in self.optimizer.param_groups:
                group["lr"].fill_(lr)
            # A measured exchange has hooks in Python, which a graph does not call.
            if self._eager_steps < WARMUP_STEPS or not isinstance(self.exchange, contextlib.nullcontext):
                self._eager_steps += 1
                return self._train(batch)
            graph, loss, self.gradient_norm = self._recorded(batch)
            with annotate("replay"):
                graph.replay()
                if isinstance(self.optimizer, Soap):
                    self.optimizer.renew()
        return loss

    def warm_up(self, batch: Batch) -> None:
        with self._on_stream():
            super().warm_up(batch)

    def recompute(self, batch: Batch, model: NetworkWithLoss | None = None, seed: int = 0) -> torch.Tensor:
        with self._on_stream():
            return super().recompute(batch, model, seed)

    def close(self) -> None:
        self._graphs.clear()
        self._copies.clear()

    def _copy(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """A copy of a part of the batch in the step's own memory, the same for all batches."""
        if len(part) > len(self._copies.get(name, ())):
            if name in self._copies:
                self._graphs.clear()  # they read the memory that is released here
            self._copies[name] = torch.empty_like(part)
        return self._copies[name][: len(part)].copy_(part)

    def _recorded(self, batch: Batch) -> RecordedStep:
        """The graph for the batch's memory, or for the step's own once MAX_BUFFERS others have one; recorded if new."""
        known, place = {key[:2] for key in self._graphs}, (batch.inputs.data_ptr(), batch.targets.data_ptr())
        if place not in known and len(known) >= MAX_BUFFERS:
            batch = replace(batch, **{name: self._copy(name, getattr(batch, name)) for name in ("inputs", "targets")})
        key = (batch.inputs.data_ptr(), batch.targets.data_ptr(), batch.inputs.shape, self.sync)
        if key not in self._graphs:
            started = time.perf_counter()
            self._graphs[key] = self._record(batch)
            log.info("CUDA graph %d recorded in %.2f s", len(self._graphs), time.perf_counter() - started)
        return self._graphs[key]

    def _record(self, batch: Batch) -> RecordedStep:
        graph = torch.cuda.CUDAGraph()
        try:
            # thread_local: other threads, such as DALI's, may allocate memory meanwhile without ending the recording.
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                loss = self._train(batch)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if isinstance(error.__context__, torch.OutOfMemoryError):
                raise error.__context__ from None
            # PyTorch first raises the cause, then a second error because the recording has ended.
            cause = error.__context__ if isinstance(error.__context__, RuntimeError) else error
            reason = str(cause).strip().splitlines()[0]
            raise LocalError(f"cannot record the step as a CUDA graph: {reason}; {REMEDY}") from error
        return graph, loss, self.gradient_norm

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        """The step's stream: waits for the caller's stream first, which waits for it afterward."""
        caller = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(caller)
        with torch.cuda.stream(self._stream):
            yield
        caller.wait_stream(self._stream)
