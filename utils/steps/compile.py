"""Compilers for network and loss (`enable_jit`): where one fails, a warning, and on without it."""

from __future__ import annotations

import logging
import traceback
import warnings
from collections.abc import Callable

import torch
from torch import nn

log = logging.getLogger(__name__)


class Compiled(nn.Module):
    """torch.compile, or the module as it is where this machine's compiler fails.

    It goes around DistributedDataParallel, which it then splits at the gradient buckets: compiled in one piece, the
    backward pass would hand over all gradients at its end, with nothing left to compute while they are exchanged.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._plain, self._compiled = module, torch.compile(module)
        self.works: bool | None = None  # None: not tried yet

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self.works is None:
            try:
                loss = self._compiled(inputs, targets)
                self.works = True
                return loss
            except Exception as error:
                if not _of_the_compiler(error):
                    raise
                self.works = False
                _warn("torch.compile", error)
        return self._compiled(inputs, targets) if self.works else self._plain(inputs, targets)


class Traced(nn.Module):
    """TorchScript's trace of the module, made at the first call, or the module as it is where tracing fails.

    It goes inside DistributedDataParallel, whose hooks hang on the parameters. A trace holds for one shape and one
    kind of autocast; it is meant for a training step, which has one of each.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        # In a list: a submodule would show up in the state dict, beside the module that it was made of.
        self._trace: list[Callable[..., torch.Tensor]] = []
        self.works: bool | None = None

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self.works is None:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", DeprecationWarning)  # newer versions of PyTorch advise against it
                    self._trace.append(torch.jit.trace(self.module, (inputs, targets), check_trace=False))
                self.works = True
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, torch.jit.TracingCheckError) as error:
                self.module(inputs, targets)  # what is wrong with the module itself is told by itself
                _warn("TorchScript", error)
                self.works = False
        return self._trace[0](inputs, targets) if self.works else self.module(inputs, targets)


def _of_the_compiler(error: Exception) -> bool:
    """Whether the compiler failed, and not what it compiles: by the error's class, or by where it was raised."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    raised_in = [frame.filename.replace("\\", "/") for frame in traceback.extract_tb(error.__traceback__)[-1:]]
    parts = ("/torch/_dynamo/", "/torch/_inductor/", "/torch/_functorch/", "/torchinductor_")  # the last: what it wrote
    return type(error).__module__.startswith("torch._") or any(part in name for name in raised_in for part in parts)


def _warn(compiler: str, error: Exception) -> None:
    reason = str(error).strip().splitlines()[:1] or [type(error).__name__]
    log.warning("%s failed, going on without it: %s", compiler, reason[0])
