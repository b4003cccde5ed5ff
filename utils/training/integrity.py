"""Integrity checks: name the ranks whose weights have drifted, or that compute or receive wrong but finite numbers.

docs/reliability.md explains them. The loop queues sums and replays around a step, without waiting for the device, and
compares them where it reads the losses anyway.
"""

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NoReturn

import torch
from torch import nn

from utils.config import Config
from utils.data.loaders import Batch
from utils.distributed.world import World
from utils.errors import CorruptionError
from utils.log import once_per_job
from utils.run.checkpoint import DOUBTFUL
from utils.run.provenance import device_name
from utils.run.state import TrainState
from utils.steps.eager import EagerStep

log = once_per_job(__name__)

# Relative differences that other algorithms or devices explain, by whether the step uses half precision.
TOLERANCES = {True: 0.02, False: 0.001}
MULTIPLIER = 0x9E3779B97F4A7C15 - 2**64  # an odd int64: 2⁶⁴ divided by the golden ratio
CHUNK = 2**20  # values that are summed at a time: their copies need little memory
FACTOR = 2.0  # limit of the `differences`; benchmarks/integrity.py measures those of correct exchanges
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}  # by an element's bytes
REMEDY = "test the device (on NVIDIA: dcgmi diag -r 3) and run elsewhere (sbatch --exclude=HOST)"
NETWORK_REMEDY = "test the network, and NCCL with NCCL_PROTO=^LL128 or Simple, or run elsewhere"


class Integrity:
    """The integrity checks of a training run. Every rank calls each method after the same steps."""

    def __init__(self, config: Config, step: EagerStep, world: World) -> None:
        self._step, self._world, self._parts = step, world, config.accumulation_steps
        # Without gradient exchange the ranks train different networks.
        self._every = 0 if config.noddp and world.size > 1 else config.integrity.every
        self._tolerance = TOLERANCES[config.enable_amp]
        self._repeats_bits = config.deterministic or world.device.type == "cpu"
        self._can_replay = False
        self._sums = torch.zeros(0, 4)  # of the gradient exchange, none on one rank
        # Step, digest, sums of the exchange and results of `_replay`, on the device.
        self._pending: list[tuple[int, torch.Tensor, torch.Tensor | None, torch.Tensor | None]] = []

    def prepare(self, batch: Batch) -> None:
        """Determines what can be compared, and logs it. Called once, before the first step."""
        if not self._every:
            return
        # Other devices or numbers of threads add in another order, and draw other numbers.
        kinds = self._world.gather_json([device_name(self._world.device), torch.get_num_threads()])
        are_alike = all(kind == kinds[0] for kind in kinds)
        self._can_replay = all(self._world.gather_json(self._repeats(self._micro_batch(batch), int(not are_alike))))
        self._repeats_bits &= are_alike
        replays = f"replays {'bit for bit' if self._repeats_bits else f'to {100 * self._tolerance:g} %'}"
        if not self._can_replay:
            replays = "no replays, because two passes differ, or the network cannot be copied"
        others = "weights, optimizer state, gradient exchange" if self._world.size > 1 else "no other rank to compare"
        log.info(f"Integrity check every {self._every} steps: {others}; {replays}")

    def _repeats(self, batch: Batch, seed: int) -> bool:
        """True if two passes of one copy agree to a tenth of the tolerance: a user's network may count its calls."""
        try:
            model = self._step.model_copy()
        except Exception:  # of an attribute that cannot be copied, such as a lock
            return False
        # A synchronized norm adds the ranks' values in their order.
        is_local = not any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
        first, second = (self._step.recompute(batch, model, seed) for seed in (0, seed))
        return is_local and self._agree(first, second, share=0.1)

    def before_step(self, step: int) -> None:
        """Measures the gradient exchange of the step if a check is due."""
        if self._every and step % self._every == 0 and self._world.size > 1:
            self._sums = torch.zeros(len(self._step.trained), 4, dtype=torch.float64, device=self._world.device)
            self._step.exchange = measured(self._step.trained.values(), self._sums)

    def after_step(self, batch: Batch, step: int) -> None:
        """Queues a check if it is due. `batch`: that of the step."""
        if self._every and step % self._every == 0:
            self._step.exchange = contextlib.nullcontext()
            replays = self._replay(self._micro_batch(batch)) if self._can_replay else None
            self._pending.append((step, digest(self._step.replicated()), self._sums, replays))

    def before_save(self, step: int) -> None:
        if self._every:
            self._pending.append((step, digest(self._step.replicated()), None, None))

    def compare(self, state: TrainState) -> None:
        """Compares what is queued, and so waits for the device; CorruptionError, on all ranks, at a difference."""
        pending, self._pending = self._pending, []
        for step, digests, sums, replays in pending:
            found = [] if sums is None else differences(self._world.gather(sums.cpu()), self._parts).T.tolist()
            for name, of_rank in zip(self._step.trained, found, strict=False):
                if suspects := [rank for rank, difference in enumerate(of_rank) if difference > FACTOR]:
                    what = f"mean gradient of {name} after the exchange"
                    self._stop(step, what, suspects, state.checked, NETWORK_REMEDY)
            if suspects := minority(self._world.gather(digests).tolist()):
                self._stop(step, "weights or optimizer state", suspects)
            if replays is not None and (suspects := disagreeing(self._world.gather(replays).cpu(), self._agree)):
                self._stop(step, "results of a micro-batch", suspects, state.checked)
            state.checked = state.checked if sums is None else step

    def _stop(self, step: int, what: str, ranks: list[int], checked: int | None = None, hint: str = REMEDY) -> NoReturn:
        names = ", ".join(f"{rank} ({self._world.hosts[rank]})" for rank in ranks[:8])
        one_of = "" if hint is NETWORK_REMEDY else "one of "
        where = f"{one_of}the ranks {names}" if len(ranks) > 1 else f"rank {names}"
        line = f"integrity check of step {step}: wrong {what} on {where}; {hint}"
        doubt = f"checkpoints after step {checked} may be wrong and are renamed to {DOUBTFUL}step_…; "
        raise CorruptionError(f"{line}; {'' if checked is None else doubt}the same command resumes", checked)

    def _micro_batch(self, batch: Batch) -> Batch:
        return Batch(*(part.chunk(self._parts)[0] for part in batch))

    def _replay(self, batch: Batch) -> torch.Tensor:
        """Loss and gradient norm [2, 2] of this rank's micro-batch, and of that of the rank before it."""
        # Two copies, so that both are at the start of their memory on every rank: an address can decide on the bits.
        local = Batch(*(torch.empty_like(part).copy_(part) for part in batch))
        received = Batch(*(self._world.shift(part) for part in batch))
        return torch.stack([self._step.recompute(local), self._step.recompute(received)])

    def _agree(self, result: torch.Tensor, repeated: torch.Tensor, share: float = 1.0) -> bool:
        tolerance = 0.0 if self._repeats_bits else share * self._tolerance
        # Near float16's limit, rounding decides whether a gradient overflows.
        overflows = tolerance > 0 and not (result.isfinite().all() and repeated.isfinite().all())
        return overflows or torch.allclose(result, repeated, rtol=tolerance, atol=0.0, equal_nan=True)


def chunks(tensor: torch.Tensor, like: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The values of a tensor by chunks, in the order of `like` in memory, with fixed random odd factors, int64."""
    flat = tensor.detach().permute(sorted(range(like.dim()), key=like.stride, reverse=True)).flatten()
    mixed = torch.arange(min(CHUNK, len(flat)), device=flat.device) * MULTIPLIER
    factors = (mixed ^ mixed >> 32) * MULTIPLIER | 1
    return ((part, factors[: len(part)]) for part in flat.split(CHUNK))


def digest(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """A number [] int64 of the tensors' bits, on the device of the first one; nothing waits for it.

    The bits are added as integers, with factors by their place, so that neither swaps nor opposite flips cancel.
    """
    sums: list[torch.Tensor] = []
    for part, factors in (pair for tensor in tensors for pair in chunks(tensor, tensor)):
        # With odd factors no flip is lost; the highest bits of two words of 64 bits would cancel.
        words = part.view(INTEGERS[part.element_size()]).view(len(part), -1)
        sums.extend((words * factors[:, None]).sum(0))
    total = torch.zeros_like(sums[0])
    for value in sums:
        total = total * MULTIPLIER + value.to(total.device)
    return total


def measure(row: torch.Tensor, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Adds to a row [2], float64, a gradient's sum with signs and its norm times machine epsilon; nothing waits."""
    signed = (part.double() * factors.sign() for part, factors in chunks(gradient, parameter))
    total, square = torch.stack([torch.stack([part.sum(), part.square().sum()]) for part in signed]).sum(0)
    row += torch.stack([total, torch.finfo(gradient.dtype).eps * square.sqrt()])


@contextlib.contextmanager
def measured(parameters: Iterable[nn.Parameter], sums: torch.Tensor) -> Iterator[None]:
    """Measures the rank's gradients before the exchange, by hooks, and their mean after it, in sums [parameters, 4]."""
    rows = [*zip(parameters, sums[:, :2], sums[:, 2:], strict=True)]
    hooks = [parameter.register_hook(functools.partial(measure, own, parameter)) for parameter, own, _ in rows]
    yield
    for hook, (parameter, _, mean) in zip(hooks, rows, strict=True):
        hook.remove()
        if parameter.grad is not None:
            measure(mean, parameter, parameter.grad)


def differences(sums: torch.Tensor, parts: int = 1) -> torch.Tensor:
    """Differences [ranks, parameters] of sums [ranks, parameters, 4] in rounding errors; 0 if they are not finite."""
    own, rounding, mean = sums[..., :3].unbind(-1)
    # Errors of equal gradients of ranks and of micro-batches add up; those of tiny gradients have another unit.
    unit = (len(sums) + parts) * rounding.sum(0).clamp(min=1e-37)
    difference = (len(sums) * mean - own.sum(0)).abs() / unit
    return difference.where(difference.isfinite(), 0.0)


def minority(digests: Sequence[int]) -> list[int]:
    """The ranks whose digest is not that of most ranks; all of them if no digest has a majority, none if all agree."""
    (digest, count), *others = Counter(digests).most_common()
    if not others:
        return []
    majority = digest if 2 * count > len(digests) else None
    return [rank for rank, value in enumerate(digests) if value != majority]


def disagreeing(replays: torch.Tensor, agree: Callable[[torch.Tensor, torch.Tensor], bool]) -> list[int]:
    """The ranks that may compute wrong, from [ranks, (own, of the rank before), values]; empty if all agree.

    A rank that differs from both neighbors is wrong. If only two ranks differ from each other, it is one of them.
    """
    ranks = len(replays)
    counts: Counter[int] = Counter()
    for rank in range(ranks):
        if not agree(replays[rank, 0], replays[(rank + 1) % ranks, 1]):
            counts.update({rank, (rank + 1) % ranks})
    return sorted(rank for rank, count in counts.items() if count == max(counts.values()))
