"""Optimizers by name; docs/architecture.md says how to add one, which must be capturable for CUDA graphs."""

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from utils.config.sections import OptimizerConfig
from utils.lookup import build_user_class, lookup
from utils.optim.adam_by_weight import Lamb, LearningRate, Parameters, adam_options
from utils.optim.soap import Soap

Builder = Callable[[OptimizerConfig, Parameters, LearningRate], torch.optim.Optimizer]


def build_optimizer(
    options: OptimizerConfig, parameters: Parameters, lr: float, capturable: bool = False
) -> torch.optim.Optimizer:
    """The optimizer `options.name`, else UserError; if `capturable`, for CUDA graphs, its learning rate is a tensor."""
    device = next(iter(parameters.values())).device
    learning_rate = torch.tensor(lr, dtype=torch.float32, device=device) if capturable else lr
    if "." in options.name:
        offered = {"params": list(parameters.values()), "lr": learning_rate}
        return build_user_class("optimizer.name", options.name, torch.optim.Optimizer, offered, options.options)
    check_name(options)
    return OPTIMIZERS[options.name](options, parameters, learning_rate)


def check_name(options: OptimizerConfig) -> None:
    """Raises UserError if there is no optimizer `options.name`, unless it is a user's class."""
    if "." not in options.name:
        lookup(OPTIMIZERS, "optimizer.name", options.name, "; a class of your own is named my_module.MyOptimizer")


def describe_optimizer(name: str, optimizer: torch.optim.Optimizer) -> str:
    """A line for the log about the optimizer that `build_optimizer` has built under this name."""
    kind, notes = type(optimizer).__name__, ""
    if kind == "FusedAdam":
        notes = " of apex; the host waits for the device in each step, to skip non-finite updates"
    elif name == "apex_adam":
        notes = "; apex's is not installed, or cannot be used in a CUDA graph"
    return f"Optimizer: {kind}{notes}"


def update(optimizer: torch.optim.Optimizer, finite: torch.Tensor) -> None:
    """Calls the optimizer's step, which changes nothing if `finite`, a boolean on the device, is False."""
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        fused: Any = optimizer
        fused.grad_scale, fused.found_inf = None, (~finite).float()
        optimizer.step()
        del fused.grad_scale, fused.found_inf
    elif bool(finite):
        optimizer.step()


def state_bytes(options: OptimizerConfig, parameters: Parameters) -> int:
    """The size of an optimizer's state; the parameters are on torch's meta device."""
    if options.name == "soap":
        new_state = Soap(options, parameters, 0.0).new_state
        return sum(value.nbytes for parameter in parameters.values() for value in new_state(parameter).values())
    return 2 * 4 * sum(parameter.numel() for parameter in parameters.values())  # Adam's, the most of the others


def tensors_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]


def saved_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state for `load_state`, sharing the tensors, without the learning rate, which the step determines."""
    state = optimizer.state_dict()
    groups = [{key: value for key, value in group.items() if key != "lr"} for group in state["param_groups"]]
    return {"kind": type(optimizer).__name__, **state, "param_groups": groups}


def load_state(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Loads a saved state, but no settings such as the learning rate; ValueError if its kind or parameters differ."""
    kind = type(optimizer).__name__
    if saved["kind"] != kind:
        raise ValueError(f"its optimizer is {saved['kind']}, this run's is {kind}")
    groups = []
    for group, saved_group in zip(optimizer.state_dict()["param_groups"], saved["param_groups"], strict=True):
        # apex counts its steps in the group.
        counts = {key: value for key, value in saved_group.items() if key not in {**optimizer.defaults, **group}}
        groups.append({**group, **counts, "params": saved_group["params"]})
    # The saved state may lack what this optimizer creates at the start: a momentum of zero.
    before = optimizer.state_dict()["state"]
    state = {key: {**before.get(key, {}), **saved["state"].get(key, {})} for key in {**before, **saved["state"]}}
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                # Fused kernels walk parameter and state alike: the state needs the parameter's memory format.
                state[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


class Adam(torch.optim.Adam):
    """torch's fused Adam; the kernel of cells.py updates weights that a layer reads in half precision, and the copy."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        # Neither gradients times a scale, nor decay as a part of the gradient; torch's first step makes the state.
        is_plain = not group["weight_decay"] and getattr(self, "grad_scale", None) is None
        weights = [weight for weight in group["params"] if is_plain and hasattr(weight, "half_copy")]
        if weights:
            from utils.optim import cells
        known = (weight for weight in weights if weight in self.state and cells.fits(weight))
        gradients = {weight: weight.grad for weight in known if weight.grad is not None}
        for weight in gradients:
            weight.grad = None
        super().step()
        if gradients:
            counts = [self.state[weight]["step"] for weight in gradients]
            skip = getattr(self, "found_inf", torch.zeros_like(counts[0]))
            torch._foreach_add_(counts, 1 - skip, alpha=1)  # without alpha the host waits for the device
            for weight, gradient in gradients.items():
                cells.descend(weight, gradient, self.state[weight], None, group, skip)
                weight.grad = gradient


def _adam(kind: type[torch.optim.Adam], options: OptimizerConfig, parameters: Parameters, lr: LearningRate) -> Any:
    """torch's fused Adam (Kingma & Ba 2015), or AdamW with decoupled weight decay (Loshchilov & Hutter 2019)."""
    return kind(parameters.values(), lr, capturable=isinstance(lr, torch.Tensor), fused=True, **adam_options(options))


def _apex_adam(options: OptimizerConfig, parameters: Parameters, lr: LearningRate) -> torch.optim.Optimizer:
    """apex's FusedAdam with plain Adam's weight decay; torch's Adam if apex cannot be used."""
    if not isinstance(lr, torch.Tensor):
        with contextlib.suppress(ImportError):
            from apex.optimizers import FusedAdam

            return FusedAdam(list(parameters.values()), lr=lr, adam_w_mode=False, **adam_options(options))
    return _adam(Adam, options, parameters, lr)


def _sgd(options: OptimizerConfig, parameters: Parameters, lr: LearningRate) -> torch.optim.Optimizer:
    momentum, decay = options.momentum, options.weight_decay
    optimizer = torch.optim.SGD(parameters.values(), lr=lr, momentum=momentum, weight_decay=decay, fused=True)
    if momentum:
        # Zero equals none. But if the first update is skipped, torch's kernel would continue from uninitialized memory.
        for parameter in parameters.values():
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


OPTIMIZERS: dict[str, Builder] = {
    "adam": functools.partial(_adam, Adam),
    "adamw": functools.partial(_adam, torch.optim.AdamW),
    "apex_adam": _apex_adam,
    "sgd": _sgd,
    # Adam with Nesterov momentum (Dozat 2016), its momentum warmed up as in torch and Keras (decay 0.004).
    "nadam": lambda options, parameters, lr: torch.optim.NAdam(parameters.values(), lr=lr, **adam_options(options)),
    "lamb": Lamb,
    "soap": Soap,
}
