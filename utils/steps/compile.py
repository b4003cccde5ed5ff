"""torch.compile for network and loss (`enable_jit`); if it fails, the step logs a warning and runs without it."""

import logging
import traceback

import torch
from torch import nn

log = logging.getLogger(__name__)


class Compiled(nn.Module):
    """A module under torch.compile, or the module itself if the compiler fails on this machine.

    Wrap DistributedDataParallel in it, not the other way round: torch.compile then splits the graph at DDP's gradient
    buckets. In one graph, the backward pass would return all gradients at its end, when nothing overlaps the exchange.
    """

    def __init__(self, module: nn.Module, rank: int = 0) -> None:
        super().__init__()
        if rank > 0:  # the compiler's warnings are those of rank 0
            logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
        self._plain, self._compiled = module, torch.compile(module)
        self.works: bool | None = None  # None until the first call

    def forward(self, *batch: torch.Tensor) -> torch.Tensor:
        if self.works is None:
            log.info("torch.compile compiles the network and the loss, which may take minutes")
            try:
                loss = self._compiled(*batch)
                self.works = True
                return loss
            except Exception as error:
                if not _is_compiler_error(error):
                    raise
                self.works = False
                reason = str(error).strip().splitlines()[:1] or [type(error).__name__]
                log.warning("torch.compile failed, the step runs without it: %s", reason[0])
        return self._compiled(*batch) if self.works else self._plain(*batch)


def _is_compiler_error(error: Exception) -> bool:
    """True for an error of the compiler, by its class or the file that raised it; False for the module's own."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    raised_in = [frame.filename.replace("\\", "/") for frame in traceback.extract_tb(error.__traceback__)[-1:]]
    # The last one is the directory of the code that the compiler generates.
    parts = ("/torch/_dynamo/", "/torch/_inductor/", "/torch/_functorch/", "/torchinductor_")
    return type(error).__module__.startswith("torch._") or any(part in name for name in raised_in for part in parts)
