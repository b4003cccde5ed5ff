"""LAMB, and the parts of Adam that it shares with SOAP: groups of parameters, moments and directions."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim.adam import adam

from utils.config.sections import OptimizerConfig

Parameters = Mapping[str, Parameter]
LearningRate = float | torch.Tensor  # a tensor on the device if the optimizer must be capturable
State = dict[str, torch.Tensor]
Gradients = Mapping[torch.Tensor, torch.Tensor]  # by parameter
Group = Mapping[str, Any]  # of parameters, with its settings


def adam_options(options: OptimizerConfig) -> dict[str, Any]:
    """Keywords of Adam and of optimizers derived from it."""
    first, second = options.betas
    return {"betas": (first, second), "eps": options.eps, "weight_decay": options.weight_decay}


class AdamByWeight(torch.optim.Optimizer, ABC):
    """Base of optimizers that treat weights unlike other parameters, in two groups.

    Parameters of fewer than two dimensions, and those whose name ends in "bias", are the others: biases and the
    parameters of normalization layers are no matrices, and start at 0 or 1. They have no weight decay.

    Updates are decided on the device: the learning rate may be a tensor there, and if `found_inf`, set by a gradient
    scaler or by `utils.optim.optimizers.update`, is not 0, no bit changes.
    """

    # GradScaler then sets `found_inf`, as for torch's fused optimizers, without host synchronization.
    _step_supports_amp_scaling = True

    def __init__(self, options: OptimizerConfig, parameters: Parameters, lr: LearningRate) -> None:
        weights = {name: value for name, value in parameters.items() if value.ndim >= 2 and not name.endswith("bias")}
        others = [value for name, value in parameters.items() if name not in weights]
        groups: list[dict[str, Any]] = [
            {"params": list(weights.values()), "is_weights": True},
            {"params": others, "is_weights": False, "weight_decay": 0.0},
        ]
        # With "fused" torch keeps the step counts that it loads on the device.
        super().__init__(groups, {"lr": lr, **adam_options(options), "fused": True})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            gradients = {parameter: parameter.grad for parameter in group["params"] if parameter.grad is not None}
            if gradients:
                self._update(group, gradients, getattr(self, "found_inf", None))

    @abstractmethod
    def _update(self, group: Group, gradients: Gradients, found_inf: torch.Tensor | None) -> None:
        """Updates the parameters of a group that have a gradient."""

    def _states(self, parameters: Sequence[torch.Tensor]) -> list[State]:
        """The parameters' states, created where there are none."""
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter].update(self.new_state(parameter))
        return [self.state[parameter] for parameter in parameters]

    def new_state(self, parameter: torch.Tensor) -> State:
        """The state of a parameter before its first update."""
        count = torch.zeros((), device=parameter.device, dtype=torch.float32)
        return {"step": count, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}


def adam_directions(
    gradients: Sequence[torch.Tensor],
    states: Sequence[State],
    group: Group,
    found_inf: torch.Tensor | None,
    lr: LearningRate = 1.0,
) -> list[torch.Tensor]:
    """Updates Adam's moments; returns lr · m̂ / (√v̂ + ε), in one kernel. 0 if `found_inf` is 1, and no change."""
    # torch's fused kernel, from 0 with learning rate −lr, gives the direction; after found_inf, 0.
    directions = [torch.empty_like(gradient) for gradient in gradients]
    torch._foreach_zero_(directions)
    adam(
        directions,
        list(gradients),
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        [state["step"] for state in states],
        fused=True,
        found_inf=found_inf,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=-lr,
        weight_decay=0.0,
        eps=group["eps"],
        maximize=False,
    )
    return directions


class Lamb(AdamByWeight):
    """x ← x − lr · |x| / |r + λx| · (r + λx) for each weight tensor x, with Adam's direction r = m̂ / (√v̂ + ε).

    Source: You et al. 2020, "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes",
    arXiv:1904.00962, algorithm 2. This variant has both bias corrections of Adam. λ (`weight_decay`) is decoupled and
    inside the norm as in the paper; the ratio of norms (trust ratio) is not clamped (the paper's φ is the identity),
    and is 1 if either norm is 0. Other parameters use r itself, without decay: their norm is no measure of a step.
    """

    def _update(self, group: Group, gradients: Gradients, found_inf: torch.Tensor | None) -> None:
        parameters = list(gradients)
        directions = adam_directions([*gradients.values()], self._states(parameters), group, found_inf)
        if group["weight_decay"]:
            torch._foreach_add_(directions, parameters, alpha=group["weight_decay"])
        if group["is_weights"]:
            norms, step_norms = (torch.stack(torch._foreach_norm(tensors)) for tensors in (parameters, directions))
            lrs = group["lr"] * (norms / step_norms).masked_fill((norms == 0) | (step_norms == 0), 1.0)
        else:
            lrs = group["lr"] * directions[0].new_ones(())
        if found_inf is not None:
            lrs = lrs.masked_fill(found_inf > 0, 0.0)
        torch._foreach_mul_(directions, list(lrs.unbind()) if group["is_weights"] else lrs)
        torch._foreach_sub_(parameters, directions)
