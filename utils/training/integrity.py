"""Integrity checks: name the rank whose weights have drifted, or whose device computes wrong but finite numbers.

docs/reliability.md explains them. The loop queues digests and replays after a step, without waiting for the device, and
compares them where it reads the losses anyway.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

import torch

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
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by their bytes
REMEDY = "test the device (on NVIDIA: dcgmi diag -r 3) and run elsewhere (sbatch --exclude=HOST)"


class Integrity:
    """The integrity checks of a training run. Every rank calls each method after the same steps."""

    def __init__(self, config: Config, step: EagerStep, world: World) -> None:
        self._step, self._world, self._parts = step, world, config.accumulation_steps
        # Without gradient exchange the ranks train different networks.
        self._every = 0 if config.noddp and world.size > 1 else config.integrity.every
        self._tolerance = TOLERANCES[config.enable_amp]
        self._repeats_bits = config.deterministic or world.device.type == "cpu"
        self._can_replay = False
        # Step, digest and results of `_replay`, on the device.
        self._pending: list[tuple[int, torch.Tensor, torch.Tensor | None]] = []

    def prepare(self, batch: Batch) -> None:
        """Determines what can be compared, and logs it. Called once, before the first step."""
        if not self._every:
            return
        # A tenth of the tolerance in passes in a row, so that later ones do not differ by more than all of it.
        agree = functools.partial(self._agree, share=0.1)
        repeatable = self._step.is_repeatable(self._micro_batch(batch), agree)
        # Other devices or numbers of threads add in another order.
        ranks = self._world.gather_json([device_name(self._world.device), torch.get_num_threads(), repeatable])
        self._repeats_bits &= all(rank[:2] == ranks[0][:2] for rank in ranks)
        self._can_replay = all(rank[2] for rank in ranks)
        replays = f"replays {'bit for bit' if self._repeats_bits else f'to {100 * self._tolerance:g} %'}"
        if not self._can_replay:
            replays = "no replays, because a pass draws random numbers, changes buffers or cannot be repeated"
        weights = "weights, optimizer state" if self._world.size > 1 else "no other rank whose weights could differ"
        log.info(f"Integrity check every {self._every} steps: {weights}; {replays}")

    def after_step(self, batch: Batch, step: int) -> None:
        """Queues a check if it is due. `batch`: that of the step."""
        if self._every and step % self._every == 0:
            replays = self._replay(self._micro_batch(batch)) if self._can_replay else None
            self._pending.append((step, digest(self._step.replicated()), replays))

    def before_save(self, step: int) -> None:
        """Queues a comparison of the digests."""
        if self._every:
            self._pending.append((step, digest(self._step.replicated()), None))

    def compare(self, state: TrainState) -> None:
        """Compares what is queued, which waits for the device; sets `state.checked`, the last step with good replays.

        Raises CorruptionError, on every rank, at the first difference.
        """
        pending, self._pending = self._pending, []
        for step, digests, replays in pending:
            suspects = minority(self._world.gather(digests).tolist())
            if suspects:
                self._stop(step, "weights or optimizer state", suspects)
            elif replays is not None:
                suspects = disagreeing(self._world.gather(replays).cpu(), self._agree)
                if suspects:
                    self._stop(step, "results of a micro-batch", suspects, state.checked)
                state.checked = step

    def _stop(self, step: int, what: str, suspects: Sequence[int], checked: int | None = None) -> NoReturn:
        ranks = ", ".join(f"{rank} ({self._world.hosts[rank]})" for rank in suspects[:8])
        where = f"one of the ranks {ranks}" if len(suspects) > 1 else f"rank {ranks}"
        line = f"integrity check of step {step}: wrong {what} on {where}; {REMEDY}"
        doubt = f"checkpoints after step {checked} may be wrong and are renamed to {DOUBTFUL}step_…; "
        raise CorruptionError(f"{line}; {'' if checked is None else doubt}the same command resumes", checked)

    def _micro_batch(self, batch: Batch) -> Batch:
        return Batch(*(part.chunk(self._parts)[0] for part in batch))

    def _replay(self, batch: Batch) -> torch.Tensor:
        """Loss and gradient norm [2, 2] of this rank's micro-batch, and of that of the rank before it."""
        # Two copies, so that both are at the start of their memory on every rank: an address can decide on the bits.
        local = Batch(*(torch.empty_like(part).copy_(part) for part in batch))
        received = Batch(*(self._from_previous_rank(part) for part in batch))
        return torch.stack([self._step.recompute(local), self._step.recompute(received)])

    def _from_previous_rank(self, part: torch.Tensor) -> torch.Tensor:
        """This part of the batch of the rank before this one, to which rank 0 is the last one."""
        rank, ranks = self._world.rank, self._world.size
        sent, received = [0] * ranks, [0] * ranks
        sent[(rank + 1) % ranks] = received[(rank - 1) % ranks] = part.numel()
        values = self._world.exchange(part.flatten().contiguous(), sent, received)
        return torch.empty_like(part).copy_(values.view(part.shape))

    def _agree(self, result: torch.Tensor, repeated: torch.Tensor, share: float = 1.0) -> bool:
        if self._repeats_bits:
            return torch.allclose(result, repeated, rtol=0.0, atol=0.0, equal_nan=True)
        # Near float16's limit, rounding decides whether a gradient overflows.
        finite = bool(result.isfinite().all() and repeated.isfinite().all())
        return not finite or torch.allclose(result, repeated, rtol=share * self._tolerance, atol=0.0)


@torch.no_grad()
def digest(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """A number [] int64 of the tensors' bits, on the device of the first one; nothing waits for it.

    The bits of each tensor are added as integers, in any order with the same sum, along the first axis and along the
    others; these sums are added with factors by their place, so that neither swaps nor opposite flips cancel.
    """
    sums = []
    for tensor in tensors:
        bits = tensor.detach().view(INTEGERS[tensor.element_size()])
        others = [*range(1, bits.dim())]
        first, second = bits.sum(0, dtype=torch.int64), bits.sum(others, dtype=torch.int64) if others else bits.long()
        for part in (first, second):
            mixed = (part ^ part >> 32).flatten()  # the factors move bits to higher places only, and the highest out
            sums.append((mixed * torch.arange(1, 2 * len(mixed), 2, device=part.device)).sum())
    total = torch.zeros_like(sums[0])
    for value in sums:
        total = total * MULTIPLIER + value.to(total.device)
    return total


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
