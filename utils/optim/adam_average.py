"""Adam's update and the moving average of the weights in one pass over the memory: 36 bytes per weight instead of 40.

The kernel computes what torch's fused Adam and `EMA.update` compute, to rounding, with the same state. It serves `adam`
and `adamw` on CUDA devices; everywhere else the two run one after the other.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from utils.optim.ema import EMA, WeightAverage
from utils.optim.optimizers import update

BLOCK, WARPS = 1024, 4


def update_and_average(optimizer: torch.optim.Optimizer, average: WeightAverage, finite: torch.Tensor) -> None:
    """`update`, then `average.update`."""
    if isinstance(average, EMA) and type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and _fusible(average):
        _in_one_pass(optimizer, average, finite)
    else:
        update(optimizer, finite)
        average.update(finite)


def _fusible(average: EMA) -> bool:
    suit = (_on_gpu(each) and each.dtype == torch.float32 and each.grad is not None for each in average.means)
    return all(suit) and _kernel() is not None


def _on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


@functools.cache
def _kernel() -> Any:
    """None without Triton, which comes with CUDA builds of torch only."""
    try:
        from utils.optim.adam_kernel import adam_average
    except ImportError:
        return None
    return adam_average


@torch.no_grad()
def _in_one_pass(optimizer: torch.optim.Optimizer, average: EMA, finite: torch.Tensor) -> None:
    updated, weight = finite.float(), average.weight(finite)
    for group in optimizer.param_groups:
        parameters = group["params"]
        states = [_state(optimizer, parameter) for parameter in parameters]
        torch._foreach_add_([state["step"] for state in states], updated, alpha=1)  # without alpha the host waits
        lr = group["lr"]
        if not isinstance(lr, torch.Tensor):
            lr = torch.full((), lr, device=finite.device)
        (beta1, beta2), decay = group["betas"], group["weight_decay"]
        for parameter, state in zip(parameters, states, strict=True):
            gradient = parameter.grad
            if gradient.stride() != parameter.stride():
                gradient = torch.empty_like(parameter).copy_(gradient)
            _launch(
                _kernel(),
                -(-parameter.numel() // BLOCK),
                parameter,
                gradient,
                state["exp_avg"],
                state["exp_avg_sq"],
                average.means[parameter],
                state["step"],
                lr,
                weight,
                updated,
                parameter.numel(),
                BETA1=beta1,
                BETA2=beta2,
                LOG_BETA1=math.log(beta1) if beta1 else -math.inf,
                LOG_BETA2=math.log(beta2) if beta2 else -math.inf,
                EPS=group["eps"],
                WEIGHT_DECAY=decay,
                DECOUPLED=type(optimizer) is torch.optim.AdamW,
                BLOCK=BLOCK,
            )
    average.count(finite)


def _state(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """The parameter's state, created as torch's fused Adam does."""
    state = optimizer.state[parameter]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
    return state


def _launch(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    # Without multiply-add fusion the results equal the interpreter's. Triton 3.9 warns if the option is missing.
    kernel[(programs,)](*arguments, **constants, num_warps=WARPS, enable_fp_fusion=False)
