"""Optimizers by name. A new one is a line in OPTIMIZERS."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from utils.config import OptimizerConfig
from utils.optim.lamb import Lamb

log = logging.getLogger(__name__)

Parameters = dict[str, torch.nn.Parameter]


def build_optimizer(
    options: OptimizerConfig,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
    rate: float,
    capturable: bool = False,
) -> torch.optim.Optimizer:
    """The optimizer that `options.name` says; ValueError for an unknown one.

    A `capturable` one keeps all that changes from step to step on the device, as a CUDA graph needs it: the rate is a
    tensor, to be written with `fill_`.
    """
    if options.name not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer {options.name}; known: {', '.join(OPTIMIZERS)}")
    optimizer = OPTIMIZERS[options.name](options, dict(named_parameters), rate, capturable)
    log.info("Optimizer: %s", _describe(optimizer))
    return optimizer


def update(optimizer: torch.optim.Optimizer, finite: torch.Tensor) -> None:
    """The optimizer's step, or nothing at all where `finite`, a truth value on the device, says no.

    Those that can do so for a gradient scaler, as torch's fused ones, decide on the device; for others the host waits.
    """
    if getattr(optimizer, "_step_supports_amp_scaling", False):
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


def _adam(options: OptimizerConfig, parameters: Parameters, rate: float, capturable: bool) -> torch.optim.Optimizer:
    """torch's Adam, as one fused kernel where this build and device have it (Kingma & Ba 2015)."""
    return torch.optim.Adam(
        parameters.values(),
        lr=_rate(parameters, rate, capturable),
        betas=(options.betas[0], options.betas[1]),
        eps=options.eps,
        weight_decay=options.weight_decay,
        capturable=capturable,
        fused=_has_fused(parameters),
    )


def _fused_adam(
    options: OptimizerConfig, parameters: Parameters, rate: float, capturable: bool
) -> torch.optim.Optimizer:
    """The same, but for the kernel: rather an error than another one."""
    if not _has_fused(parameters):
        kinds = sorted({f"{parameter.dtype} on {parameter.device.type}" for parameter in parameters.values()})
        raise ValueError(f"torch has no fused Adam for {', '.join(kinds)}; set optimizer.name to adam")
    return _adam(options, parameters, rate, capturable)


def _apex_adam(
    options: OptimizerConfig, parameters: Parameters, rate: float, capturable: bool
) -> torch.optim.Optimizer:
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
        list(parameters.values()),
        lr=rate,
        betas=(options.betas[0], options.betas[1]),
        eps=options.eps,
        weight_decay=options.weight_decay,
        adam_w_mode=False,
    )


def _sgd(options: OptimizerConfig, parameters: Parameters, rate: float, capturable: bool) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(
        parameters.values(),
        lr=_rate(parameters, rate, capturable),
        momentum=options.momentum,
        weight_decay=options.weight_decay,
        fused=_has_fused(parameters),
    )
    if options.momentum:
        # From zero as from nothing; but torch's fused kernel, if the first update of all is left out, would go on from
        # memory that nobody has written.
        for parameter in parameters.values():
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


class NAdam(torch.optim.NAdam):
    """torch's, which here leaves an update out on the device, as its fused optimizers do.

    It has no kernel that would: the update is made, and copies of all that it writes to are put back where it was not
    to be. They take as much memory as parameters and averages, until the step is over.
    """

    _step_supports_amp_scaling = True

    def __init__(self, parameters: Iterable[torch.nn.Parameter], **settings: Any) -> None:
        super().__init__(parameters, **settings)
        # As torch does at the first update; but that may be one to be left out.
        for group in self.param_groups:
            for parameter in group["params"]:
                count = torch.zeros((), dtype=torch.float32, device=parameter.device if group["capturable"] else "cpu")
                averages = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                self.state[parameter] = {"step": count, "mu_product": torch.ones_like(count), **averages}

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        found_inf = getattr(self, "found_inf", None)
        assert getattr(self, "grad_scale", None) is None, "gradients are unscaled before they are clipped"
        if found_inf is None:
            super().step()
            return
        updated = [
            parameter for group in self.param_groups for parameter in group["params"] if parameter.grad is not None
        ]
        written = [*updated, *(value for parameter in updated for value in self.state[parameter].values())]
        before = [tensor.clone() for tensor in written]
        super().step()
        for tensor, old in zip(written, before, strict=True):
            torch.where(found_inf > 0, old, tensor, out=tensor)


def _nadam(options: OptimizerConfig, parameters: Parameters, rate: float, capturable: bool) -> torch.optim.Optimizer:
    """Adam with Nesterov's momentum (Dozat 2016), its momentum warmed up as torch and Keras do (decay 0.004)."""
    # Its counts must be on the device for it to decide there; torch has it so on CUDA alone, and otherwise warns of it.
    on_device = all(parameter.is_cuda for parameter in parameters.values())
    if on_device:
        warnings.filterwarnings("ignore", message="This instance was constructed with capturable=True")
    return NAdam(
        parameters.values(),
        lr=_rate(parameters, rate, capturable),
        betas=(options.betas[0], options.betas[1]),
        eps=options.eps,
        weight_decay=options.weight_decay,
        capturable=on_device,
    )


def _lamb(options: OptimizerConfig, parameters: Parameters, rate: float, capturable: bool) -> torch.optim.Optimizer:
    return Lamb(
        parameters.items(),
        lr=_rate(parameters, rate, capturable),
        betas=(options.betas[0], options.betas[1]),
        eps=options.eps,
        weight_decay=options.weight_decay,
    )


def _rate(parameters: Parameters, rate: float, capturable: bool) -> float | torch.Tensor:
    device = next(iter(parameters.values())).device
    return torch.tensor(rate, dtype=torch.float32, device=device) if capturable else rate


def _has_fused(parameters: Parameters) -> bool:
    return all(
        parameter.is_floating_point() and parameter.device.type in ("cpu", "cuda") for parameter in parameters.values()
    )


def _describe(optimizer: torch.optim.Optimizer) -> str:
    owner = type(optimizer).__module__.split(".")[0]
    fused = " (fused)" if optimizer.defaults.get("fused") else ""
    return f"{'' if owner == 'utils' else owner + ' '}{type(optimizer).__name__}{fused}"


OPTIMIZERS: dict[str, Callable[[OptimizerConfig, Parameters, float, bool], torch.optim.Optimizer]] = {
    "adam": _adam,
    "fused_adam": _fused_adam,
    "apex_adam": _apex_adam,
    "sgd": _sgd,
    "nadam": _nadam,
    "lamb": _lamb,
}
