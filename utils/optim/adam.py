"""Parts of Adam that LAMB and SOAP share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch.optim.adam import adam


def is_weight(name: str, parameter: torch.Tensor) -> bool:
    """False for biases and the parameters of normalization layers: these are no matrices, and start at 0 or 1."""
    return parameter.ndim >= 2 and not name.endswith("bias")


def weights_and_others(
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """The parameters, divided by `is_weight`."""
    weights: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in named_parameters:
        (weights if is_weight(name, parameter) else others).append(parameter)
    return weights, others


def adam_directions(
    gradients: Sequence[torch.Tensor],
    states: Sequence[Mapping[str, torch.Tensor]],
    betas: tuple[float, float],
    eps: float,
    found_inf: torch.Tensor | None,
) -> list[torch.Tensor]:
    """Updates Adam's moments; returns m̂ / (√v̂ + ε), in one kernel. If `found_inf` is 1, changes none and returns 0."""
    # torch's fused kernel, from 0 with learning rate −1, gives the direction; after found_inf, 0.
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
        beta1=betas[0],
        beta2=betas[1],
        lr=-1.0,
        weight_decay=0.0,
        eps=eps,
        maximize=False,
    )
    return directions
