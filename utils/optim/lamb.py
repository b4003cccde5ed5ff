"""LAMB: Adam whose step is, in each weight, as long as the weight itself times the rate; for very large batches.

Source: You et al. 2020, "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", arXiv:1904.00962,
algorithm 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim.adam import adam


class Lamb(torch.optim.Optimizer):
    """x ← x − rate · |x| / |r + λx| · (r + λx), weight by weight, with Adam's direction r = m̂ / (√v̂ + ε).

    The variant: both of Adam's bias corrections; λ (`weight_decay`) decoupled, inside the norm, as in the paper; the
    ratio of norms, the trust ratio, is not clamped (the paper's φ is the identity), and is 1 where either norm is 0.
    Parameters of less than two dimensions, and those whose name ends in "bias", take r itself: no decay, no trust
    ratio. Biases and what normalisation layers learn are such; they start at 0 or 1, to which no step is in proportion.

    All of it happens on the device: the rate may be a tensor there, and where `found_inf`, which a gradient scaler or
    `utils.optim.optimizers.update` sets, is not 0, nothing changes by a bit.
    """

    # GradScaler then sets `grad_scale` and `found_inf`, as for torch's fused optimizers, and asks the host nothing.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        lr: float | torch.Tensor,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        weights: list[torch.nn.Parameter] = []
        others: list[torch.nn.Parameter] = []
        for name, parameter in named_parameters:
            (others if parameter.ndim < 2 or name.endswith("bias") else weights).append(parameter)
        groups: list[dict[str, Any]] = [
            {"params": weights, "adapts": True},
            {"params": others, "adapts": False, "weight_decay": 0.0},
        ]
        # By "fused" torch knows to keep the step counts that it loads on the device.
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "fused": True})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            states = [self._state(parameter) for parameter in parameters]
            # torch's fused kernel, with a rate of −1 from 0, leaves r; or 0, and its averages as they are.
            directions = [torch.empty_like(parameter) for parameter in parameters]
            torch._foreach_zero_(directions)
            adam(
                directions,
                [parameter.grad for parameter in parameters],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [state["step"] for state in states],
                fused=True,
                grad_scale=grad_scale,
                found_inf=found_inf,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=-1.0,
                weight_decay=0.0,
                eps=group["eps"],
                maximize=False,
            )
            if group["weight_decay"]:
                torch._foreach_add_(directions, parameters, alpha=group["weight_decay"])
            trust = _trust_ratios(parameters, directions) if group["adapts"] else directions[0].new_ones(())
            rates = group["lr"] * trust
            if found_inf is not None:
                rates = rates.masked_fill(found_inf > 0, 0.0)
            torch._foreach_mul_(directions, list(rates.unbind()) if group["adapts"] else rates)
            torch._foreach_sub_(parameters, directions)

    def _state(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device, dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state


def _trust_ratios(parameters: Sequence[torch.Tensor], directions: Sequence[torch.Tensor]) -> torch.Tensor:
    own, asked = (torch.stack(torch._foreach_norm(list(tensors))) for tensors in (parameters, directions))
    return (own / asked).masked_fill((own == 0) | (asked == 0), 1.0)
