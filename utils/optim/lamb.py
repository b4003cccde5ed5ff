"""LAMB for very large batches: Adam whose step, per weight tensor, is scaled to the norm of the tensor.

Source: You et al. 2020, "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", arXiv:1904.00962,
algorithm 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from utils.optim.adam import adam_directions, weights_and_others


class Lamb(torch.optim.Optimizer):
    """x ← x − lr · |x| / |r + λx| · (r + λx) for each weight tensor x, with Adam's direction r = m̂ / (√v̂ + ε).

    This variant has both bias corrections of Adam. λ (`weight_decay`) is decoupled and inside the norm as in the paper;
    the ratio of norms (trust ratio) is not clamped (the paper's φ is the identity), and is 1 if either norm is 0.
    Parameters of fewer than two dimensions, and those whose name ends in "bias", use r itself, without decay and trust
    ratio: biases and the parameters of normalization layers start at 0 or 1, so their norm is no measure of a step.

    Everything happens on the device: the learning rate may be a tensor there, and if `found_inf`, set by a gradient
    scaler or by `utils.optim.optimizers.update`, is not 0, no bit changes.
    """

    # GradScaler then sets `found_inf`, as for torch's fused optimizers, without host synchronization.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        lr: float | torch.Tensor,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        weights, others = weights_and_others(named_parameters)
        groups: list[dict[str, Any]] = [
            {"params": weights, "adapts": True},
            {"params": others, "adapts": False, "weight_decay": 0.0},
        ]
        # With "fused" torch keeps the step counts that it loads on the device.
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "fused": True})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        found_inf = getattr(self, "found_inf", None)
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            states = [self._state(parameter) for parameter in parameters]
            gradients = [parameter.grad for parameter in parameters]
            directions = adam_directions(gradients, states, group["betas"], group["eps"], found_inf)
            if group["weight_decay"]:
                torch._foreach_add_(directions, parameters, alpha=group["weight_decay"])
            trust = _trust_ratios(parameters, directions) if group["adapts"] else directions[0].new_ones(())
            lrs = group["lr"] * trust
            if found_inf is not None:
                lrs = lrs.masked_fill(found_inf > 0, 0.0)
            torch._foreach_mul_(directions, list(lrs.unbind()) if group["adapts"] else lrs)
            torch._foreach_sub_(parameters, directions)

    def _state(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device, dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state


def _trust_ratios(parameters: Sequence[torch.Tensor], directions: Sequence[torch.Tensor]) -> torch.Tensor:
    """|x| / |direction| per tensor, shape [tensors]."""
    norms, step_norms = (torch.stack(torch._foreach_norm(list(tensors))) for tensors in (parameters, directions))
    return (norms / step_norms).masked_fill((norms == 0) | (step_norms == 0), 1.0)
