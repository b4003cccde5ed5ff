"""Parts shared by the optimizers that are not PyTorch's: Adam's direction, and matrix work that ranks share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.adam import adam

State = dict[str, torch.Tensor]


def is_recorded() -> bool:
    """True while the operations of this thread are recorded to a CUDA graph, and not computed."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def is_weight(name: str, parameter: torch.Tensor) -> bool:
    """False for biases and the parameters of normalization layers: these are no matrices, and start at 0 or 1."""
    return parameter.ndim >= 2 and not name.endswith("bias")


def adam_directions(
    gradients: Sequence[torch.Tensor],
    states: Sequence[Mapping[str, torch.Tensor]],
    betas: tuple[float, float],
    eps: float,
    found_inf: torch.Tensor | None,
    grad_scale: torch.Tensor | None = None,
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
        grad_scale=grad_scale,
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


@dataclass(frozen=True)
class Ranks:
    """The ranks that train together, and divide pieces of work among them."""

    rank: int = 0
    size: int = 1

    def owners(self, costs: Sequence[float]) -> list[int]:
        """The rank that does each piece: from the most expensive on, the rank with the least work so far."""
        work, owners = [0.0] * self.size, [0] * len(costs)
        for piece in sorted(range(len(costs)), key=lambda piece: -costs[piece]):
            owners[piece] = min(range(self.size), key=work.__getitem__)
            work[owners[piece]] += costs[piece]
        return owners

    def broadcast(self, tensors: Sequence[torch.Tensor], owners: Sequence[int]) -> None:
        """Overwrites each tensor with its owner's. Every rank calls it."""
        if self.size > 1:
            for tensor, owner in zip(tensors, owners, strict=True):
                dist.broadcast(tensor, src=owner)


class MatrixOptimizer(torch.optim.Optimizer):
    """Base class of optimizers that treat weights as matrices, and other parameters as Adam does.

    Everything is decided on the device: if `found_inf`, set by a gradient scaler or by `utils.optim.optimizers.update`,
    is 1, no bit changes. The learning rate may be a tensor on the device. Weight decay is decoupled and applies to
    weights only. The first parameter group holds the weights, the second one the others.
    """

    # GradScaler then sets `found_inf`, as for torch's fused optimizers, without host synchronization.
    _step_supports_amp_scaling = True
    ranks = Ranks()  # replaced if several ranks train together

    def __init__(
        self,
        weights: Iterable[torch.nn.Parameter],
        others: Iterable[torch.nn.Parameter],
        weight_decay: float,
        **settings: Any,
    ) -> None:
        groups: list[dict[str, Any]] = [
            {"params": list(weights), "matrices": True},
            {"params": list(others), "matrices": False, "weight_decay": 0.0},
        ]
        # With "fused" torch keeps the step counts that it loads on the device.
        super().__init__(groups, {"weight_decay": weight_decay, "fused": True, **settings})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        assert getattr(self, "grad_scale", None) is None, "gradients are unscaled before they are clipped"
        found_inf = getattr(self, "found_inf", None)
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            states = [self.state_of(parameter, group["matrices"]) for parameter in parameters]
            skip = torch.zeros_like(states[0]["step"]) if found_inf is None else found_inf
            self.update(group, parameters, states, skip)
        # What cannot be recorded in a CUDA graph is done after each of its replays.
        if not is_recorded():
            self.renew()

    @abstractmethod
    def update(
        self, group: Mapping[str, Any], parameters: list[torch.nn.Parameter], states: list[State], skip: torch.Tensor
    ) -> None:
        """Updates the parameters of a group and their states; changes no bit if `skip` is 1."""

    def renew(self) -> None:
        """Completes a step with what a CUDA graph cannot hold."""

    def collect_state(self) -> None:
        """Completes the state of each rank with what the others keep for it. Every rank calls it, before a save."""

    def state_of(self, parameter: torch.nn.Parameter, matrix: bool) -> State:
        """The parameter's state, created if there is none."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device, dtype=torch.float32)
            state.update(self.new_state(parameter, matrix))
        return state

    def new_state(self, parameter: torch.nn.Parameter, matrix: bool) -> State:
        """The state in addition to the number of updates."""
        return {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}

    def state_bytes(self) -> int:
        """The size of the state. Creates it; meant for parameters on torch's meta device."""
        return sum(
            value.nbytes
            for group in self.param_groups
            for parameter in group["params"]
            for value in self.state_of(parameter, group["matrices"]).values()
        )


def descend(
    group: Mapping[str, Any], parameters: Sequence[torch.Tensor], directions: list[torch.Tensor], skip: torch.Tensor
) -> None:
    """x ← x − lr · (direction + λ x); overwrites the directions. Changes no bit if `skip` is 1."""
    weights = list(parameters)
    steps = [_laid_out(direction, weight) for direction, weight in zip(directions, weights, strict=True)]
    if group["weight_decay"]:
        torch._foreach_add_(steps, weights, alpha=group["weight_decay"])
    torch._foreach_mul_(steps, (skip == 0) * group["lr"])
    torch._foreach_sub_(weights, steps)


def _laid_out(direction: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The direction in the weight's shape and strides: only with equal strides one kernel updates many tensors."""
    step = direction.view(weight.shape)
    return step if step.stride() == weight.stride() else torch.empty_like(weight).copy_(step)
