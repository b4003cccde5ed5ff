"""The step as a CUDA graph: recorded once, then replayed with a single launch.

A graph replays kernels on the memory that they were recorded with. Loaders hand out the same few buffers again and
again, so there is one graph for each of them, and no batch is copied; the graphs share their working memory. A loader
whose batches are made by kernels alone has the next one made within the graph, in a branch of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
import warnings
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from utils.distributed.world import World
from utils.errors import LocalError, UserError
from utils.pending_work import PendingWork, Work
from utils.profiling.profiler import annotate
from utils.steps.eager import EagerStep, Metric, StepOptions

log = logging.getLogger(__name__)

# DistributedDataParallel times its first ten steps with events that no graph may hold.
WARMUP_STEPS = 11
# Batches in other buffers than so many are copied into one of the step's own: a loader that keeps making new ones must
# not fill the device with graphs.
MAX_BUFFERS = 4
REMEDY = "use train.py, which takes the same flags"


class Recorded(NamedTuple):
    """A graph, and where it leaves what it computes."""

    graph: torch.cuda.CUDAGraph
    loss: torch.Tensor
    gradient_norm: torch.Tensor


class GraphStep(EagerStep):
    """EagerStep's step, its first ones carried out as they are, the later ones replayed.

    Forward, loss, backward with the exchange of gradients, clipping and update are all in the graph, and beside them
    what `pending_work` has to be done (the crops of the next batch); the learning rate is a tensor that the update reads.
    Source: Ng et al., "Accelerating PyTorch with CUDA Graphs", PyTorch blog 2021.
    """

    capturable: ClassVar[bool] = True

    def __init__(
        self,
        network: nn.Module,
        loss: nn.Module,
        optimizer: torch.optim.Optimizer,
        world: World,
        options: StepOptions | None = None,
        metrics: Sequence[Metric] = (),
    ) -> None:
        options = options or StepOptions()
        self.check(world, options.noddp)
        if world.size > 1 and options.accumulation_steps == 1:
            # It would take a hook of Python's in the exchange that is recorded, which nobody has tried on several GPUs.
            options = dataclasses.replace(options, log_noise_scale=False)
        self._device = world.device
        # Autograd runs a parameter's gradient on the stream on which it first met the parameter: all of training,
        # DistributedDataParallel's construction included, must see the one stream on which graphs are recorded.
        self._stream = torch.cuda.Stream(world.device)
        with self._on_stream():
            super().__init__(network, loss, optimizer, world, options, metrics)
        self.pending_work = PendingWork()
        self._branch = torch.cuda.Stream(world.device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[Hashable, Recorded] = {}
        self._buffers: set[tuple[int, int]] = set()
        self._own: tuple[torch.Tensor, torch.Tensor] | None = None
        self._shapes: tuple[torch.Size, torch.Size] | None = None
        self._made = 0
        # Said of the plain steps before the first graph.
        warnings.filterwarnings("ignore", message="This instance was constructed with capturable=True")

    @classmethod
    def check(cls, world: World, noddp: bool) -> None:
        reason = obstacle(world, noddp)
        if reason is not None:
            raise UserError(f"the step cannot become a CUDA graph: {reason}; {REMEDY}")

    def __call__(self, inputs: torch.Tensor, targets: torch.Tensor, rate: float) -> torch.Tensor:
        with self._on_stream():
            for group in self._optimizer.param_groups:
                group["lr"].fill_(rate)
            if self._made < WARMUP_STEPS:
                self._made += 1
                return self._train(inputs, targets)
            self._check_shapes(inputs, targets)
            recorded = self._find(inputs, targets)
            with annotate("replay"):
                recorded.graph.replay()
        self.gradient_norm = recorded.gradient_norm
        return recorded.loss

    def warm_up(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        with self._on_stream():
            super().warm_up(inputs, targets)

    def load_state(self, state: Mapping[str, Any]) -> None:
        assert not self._graphs, "graphs hold the memory of the state before"
        with self._on_stream():
            super().load_state(state)

    def _find(self, inputs: torch.Tensor, targets: torch.Tensor) -> Recorded:
        """The graph for this batch's memory and the work to be taken along, recorded at the first meeting."""
        inputs, targets = self._where_graphs_are(inputs, targets)
        assert self.pending_work is not None
        work = self.pending_work.take()
        key = (inputs.data_ptr(), targets.data_ptr(), self._exchanging, None if work is None else work.key)
        if key not in self._graphs:
            started = time.perf_counter()
            self._graphs[key] = self._record(inputs, targets, work)
            log.info("CUDA graph %d recorded in %.2f s", len(self._graphs), time.perf_counter() - started)
        return self._graphs[key]

    def _where_graphs_are(self, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The batch where it is, or a copy of it in the step's own memory if there are too many such places."""
        place = (inputs.data_ptr(), targets.data_ptr())
        if place in self._buffers or len(self._buffers) < MAX_BUFFERS:
            self._buffers.add(place)
            return inputs, targets
        if self._own is None:
            self._own = (torch.empty_like(inputs), torch.empty_like(targets))
        for own, part in zip(self._own, (inputs, targets), strict=True):
            own.copy_(part)
        return self._own

    def _record(self, inputs: torch.Tensor, targets: torch.Tensor, work: Work | None) -> Recorded:
        """Nothing is computed meanwhile: the kernels are written down."""
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads (DALI's) may allocate meanwhile: what they do is not recorded and does no harm.
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                if work is not None:
                    self._branch.wait_stream(self._stream)
                    with torch.cuda.stream(self._branch):
                        work.enqueue()
                loss = self._train(inputs, targets)
                if work is not None:
                    self._stream.wait_stream(self._branch)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if isinstance(error.__context__, torch.OutOfMemoryError):
                raise error.__context__ from None
            # PyTorch tells what was forbidden first, and that the recording failed in consequence last.
            cause = error.__context__ if isinstance(error.__context__, RuntimeError) else error
            reason = str(cause).strip().splitlines()[0]
            raise LocalError(f"the step cannot become a CUDA graph: {reason}; {REMEDY}") from error
        return Recorded(graph, loss, self.gradient_norm)

    def _check_shapes(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        shapes = (inputs.shape, targets.shape)
        if self._shapes is None:
            self._shapes = shapes
        for name, shape, recorded in zip(("inputs", "targets"), shapes, self._shapes, strict=True):
            if shape != recorded:
                raise UserError(
                    f"the {name} of a batch have shape {list(shape)}, the CUDA graph was recorded with "
                    f"{list(recorded)}; every training batch must have the same, or {REMEDY}"
                )

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        """On the step's stream, after what the caller has queued; the caller's next work waits for it."""
        caller = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(caller)
        with torch.cuda.stream(self._stream):
            yield
        caller.wait_stream(self._stream)


def obstacle(world: World, noddp: bool) -> str | None:
    """Why this world has no use for CUDA graphs; None where it can try."""
    if world.device.type != "cuda":
        return f"the run's device is {world.device.type}, and only CUDA has them"
    if world.size > 1 and not noddp and "nccl" not in dist.get_backend_config():
        return "the ranks exchange CUDA tensors through gloo, which computes on the host; NCCL is needed"
    return None
