"""Optimizers by name. A new one is a line in OPTIMIZERS."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

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


def update(optimizer: torch.optim.Optimizer, finite: torch.Tensor) -> None:
    """The optimizer's step, or nothing at all where `finite`, a truth value on the device, says no.

    torch's fused optimizers decide on the device, as they do for a gradient scaler; for others the host waits for it.
    """
    if optimizer.defaults.get("fused"):
        fused: Any = optimizer
        fused.grad_scale, fused.found_inf = None, (~finite).float()
        optimizer.step()
        del fused.grad_scale, fused.found_inf
    elif bool(finite):
        optimizer.step()


def saved_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What `load_state` takes; it shares the optimizer's tensors."""
    return {"kind": type(optimizer).__name__, **optimizer.state_dict()}


def load_state(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Takes over what another such optimizer had gathered; settings, the rate among them, stay this one's.

    ValueError where it was of another kind, or of other parameters.
    """
    kind = type(optimizer).__name__
    if saved["kind"] != kind:
        raise ValueError(f"its optimizer is {saved['kind']}, this training's is {kind}")
    groups = []
    for own, other in zip(optimizer.state_dict()["param_groups"], saved["param_groups"], strict=True):
        # apex counts its steps in the group.
        gathered = {key: value for key, value in other.items() if key not in own and key not in optimizer.defaults}
        groups.append({**own, **gathered, "params": other["params"]})
    # What this one has from its start, and the other may not have had: a momentum's zeros.
    before = optimizer.state_dict()["state"]
    state = {key: {**before.get(key, {}), **saved["state"].get(key, {})} for key in {**before, **saved["state"]}}
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                # In the parameter's memory format, whatever it was saved in: fused kernels walk both alike.
                state[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


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
    """apex's FusedAdam with plain Adam's weight decay; torch's fused Adam where it cannot be had."""
    if capturable:
        log.info("apex's fused Adam cannot leave an update out inside a CUDA graph: it is replaced by torch's")
        return _adam(options, parameters, rate, capturable)
    try:
        from apex.optimizers import FusedAdam
    except ImportError:
        log.info("apex is not installed: its fused Adam is replaced by torch's")
        return _adam(options, parameters, rate, capturable)
    log.info("apex's fused Adam: the host waits for the device in each step, to leave out updates that are no numbers")
    return FusedAdam(
        parameters,
        lr=rate,
        betas=(options.betas[0], options.betas[1]),
        eps=options.eps,
        weight_decay=options.weight_decay,
        adam_w_mode=False,
    )


def _sgd(options: Optimizer, parameters: Parameters, rate: float, capturable: bool) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(
        parameters,
        lr=_rate(parameters, rate, capturable),
        momentum=options.momentum,
        weight_decay=options.weight_decay,
        fused=_has_fused(parameters),
    )
    if options.momentum:
        # From zero as from nothing; but torch's fused kernel, if the first update of all is left out, would go on from
        # memory that nobody has written.
        for parameter in parameters:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


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
