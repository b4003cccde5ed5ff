"""Optimizers by name. A new one is a line in OPTIMIZERS."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import torch

from utils.config import Optimizer

log = logging.getLogger(__name__)

Parameters = list[torch.nn.Parameter]


def build_optimizer(
    options: Optimizer, parameters: Iterable[torch.nn.Parameter], rate: float, capturable: bool = False
) -> torch.optim.Optimizer:
    """The optimizer that `options.name` says; ValueError for an unknown one.

    A `capturable` one keeps all that changes from step to step on the device, as a CUDA graph needs it: the rate is a
    tensor, to be written with `fill_`.
    """
    if options.name not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer {options.name}; known: {', '.join(OPTIMIZERS)}")
    optimizer = OPTIMIZERS[options.name](options, list(parameters), rate, capturable)
    log.info("Optimizer: %s", _describe(optimizer))
    return optimizer


def _adam(options: Optimizer, parameters: Parameters, rate: float, capturable: bool) -> torch.optim.Optimizer:
    """torch's Adam, as one fused kernel where this build and device have it (Kingma & Ba 2015)."""
    return torch.optim.Adam(
        parameters,
        lr=_rate(parameters, rate, capturable),
        betas=(options.betas[0], options.betas[1]),
        eps=options.eps,
        weight_decay=options.weight_decay,
        capturable=capturable,
        fused=_has_fused(parameters),
    )


def _apex_adam(options: Optimizer, parameters: Parameters, rate: float, capturable: bool) -> torch.optim.Optimizer:
    """apex's FusedAdam with plain Adam's weight decay; torch's fused Adam where apex is not installed."""
    try:
        from apex.optimizers import FusedAdam
    except ImportError:
        log.info("apex is not installed: its fused Adam is replaced by torch's")
        return _adam(options, parameters, rate, capturable)
    return FusedAdam(
        parameters,
        lr=rate,
        betas=(options.betas[0], options.betas[1]),
        eps=options.eps,
        weight_decay=options.weight_decay,
        adam_w_mode=False,
        capturable=capturable,  # makes a tensor of the rate itself
    )


def _sgd(options: Optimizer, parameters: Parameters, rate: float, capturable: bool) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        parameters,
        lr=_rate(parameters, rate, capturable),
        momentum=options.momentum,
        weight_decay=options.weight_decay,
        fused=_has_fused(parameters),
    )


def _rate(parameters: Parameters, rate: float, capturable: bool) -> float | torch.Tensor:
    return torch.tensor(rate, dtype=torch.float32, device=parameters[0].device) if capturable else rate


def _has_fused(parameters: Parameters) -> bool:
    return all(parameter.is_floating_point() and parameter.device.type in ("cpu", "cuda") for parameter in parameters)


def _describe(optimizer: torch.optim.Optimizer) -> str:
    fused = " (fused)" if optimizer.defaults.get("fused") else ""
    return f"{type(optimizer).__module__.split('.')[0]} {type(optimizer).__name__}{fused}"


OPTIMIZERS: dict[str, Callable[[Optimizer, Parameters, float, bool], torch.optim.Optimizer]] = {
    "adam": _adam,
    "apex_adam": _apex_adam,
    "sgd": _sgd,
}
