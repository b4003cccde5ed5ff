"""Losses and metrics: (outputs, targets) -> scalar.

For fields [N, C, D, D, D], or for logits [N, classes] and classes [N].
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from networks.calibration import CalibrationFit
from networks.ops import TORCH
from networks.ops.plan import LAST
from networks.ops.precision import at_least_float32

HUBER_DELTA = 0.1  # about the mean error of the best constant

Metric = Callable[[Tensor, Tensor], Tensor]


class NetworkWithLoss(nn.Module):
    """Network and loss as one module, so that DDP and the compiler see the complete forward pass."""

    def __init__(
        self,
        network: nn.Module,
        loss: nn.Module,
        metrics: Mapping[str, Metric] | None = None,
        calibration: CalibrationFit | None = None,
    ) -> None:
        """`metrics` and `calibration` are those of the validation."""
        super().__init__()
        self.network, self.loss, self.metrics, self.calibration = network, loss, dict(metrics or {}), calibration

    def forward(self, inputs: Tensor, targets: Tensor, conditions: Tensor | None = None) -> Tensor:
        if getattr(self.loss, "operation", TORCH) == LAST:
            return self.network.l1(inputs, targets, conditions)  # type: ignore[operator]
        outputs = self.network(inputs) if conditions is None else self.network(inputs, conditions)
        return self.loss(outputs, targets)


class Loss(nn.Module):
    targets: ClassVar[str]  # "volumes" or "classes"
    operation = TORCH  # what computes it, which a plan sets; see ops/plan.py

    @property
    def no_kernel(self) -> str:
        """Why no kernel computes the loss; empty if one can."""
        return f"the loss is {type(self).__name__}"


class FieldLoss(Loss, ABC):
    """Mean of `cellwise`, plus lambda_rho × mean |difference of the densities| if lambda_rho > 0.

    The density exp(density_log_scale · x) of the channel density_channel spans many decades, so the densest cells
    dominate its term; squares of it would leave nothing else.

    `weights`, one per channel, weight the channels in the first term, normalized to mean 1. They apply in training mode
    only: in evaluation mode losses stay comparable.
    """

    targets = "volumes"

    def __init__(
        self,
        lambda_rho: float = 0.0,
        weights: Sequence[float] | None = None,
        density_log_scale: float | None = None,
        density_channel: int = 0,
    ) -> None:
        super().__init__()
        if lambda_rho > 0 and density_log_scale is None:
            raise ValueError("lambda_rho needs the logarithm of a gas density as a target; set lambda_rho to 0")
        self.lambda_rho, self.density_log_scale, self.density = lambda_rho, density_log_scale or 0.0, density_channel
        # Python numbers, because a tensor would have to be on the device. Equal weights have no effect.
        self.weights = [weight / sum(weights) for weight in weights] if weights and len({*weights}) > 1 else None

    @abstractmethod
    def cellwise(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of each cell, in the shape of the fields."""

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if outputs.shape != targets.shape:  # torch might broadcast one of them
            shapes = [" × ".join(map(str, fields.shape)) for fields in (outputs, targets)]
            raise ValueError(f"the network's output has the shape {shapes[0]}, and the targets have {shapes[1]}")
        cells = self.cellwise(at_least_float32(outputs), targets)
        if self.weights is not None and self.training:
            means = cells.mean(dim=(0, 2, 3, 4)).unbind()
            loss = torch.stack([weight * mean for weight, mean in zip(self.weights, means, strict=True)]).sum()
        else:
            # In memory order: the gradient of a mean has no strides, and that of the outputs would get another format.
            in_order = cells.is_contiguous(memory_format=torch.channels_last_3d)
            loss = (cells.movedim(1, -1).flatten() if in_order else cells).mean()
        if self.lambda_rho > 0:
            fields = at_least_float32(outputs), targets
            density, target = (torch.exp(self.density_log_scale * field[:, self.density]) for field in fields)
            loss = loss + self.lambda_rho * (density - target).abs().mean()
        return loss


class L1Loss(FieldLoss):
    """|outputs - targets|."""

    def cellwise(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).abs()

    @property
    def no_kernel(self) -> str:
        if type(self) is not L1Loss:
            return super().no_kernel
        if self.lambda_rho > 0:
            return f"lambda_rho is {self.lambda_rho:g}, not 0"
        return "" if self.weights is None else "channel_weights are set"


class MSELoss(FieldLoss):
    """(outputs - targets)²."""

    def cellwise(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square()


class HuberLoss(FieldLoss):
    """d²/2 for d = |outputs - targets| up to HUBER_DELTA, beyond it the line with the same slope (Huber 1964)."""

    def cellwise(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.huber_loss(outputs, targets, reduction="none", delta=HUBER_DELTA)


class CrossEntropyLoss(Loss):
    """Mean cross-entropy of logits [N, classes] against classes [N], int64."""

    targets = "classes"

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(at_least_float32(outputs), targets)


# --- metrics: mean over the batch, a float32 scalar ------------------------------------------------------------------


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The fraction of samples whose class has the largest output."""
    return (outputs.argmax(1) == targets).float().mean()


def top5_accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The fraction of samples whose class is among the five largest outputs; 1 if there are at most five classes."""
    best = outputs.topk(min(5, outputs.shape[1]), dim=1).indices  # [N, 5]
    return (best == targets[:, None]).any(1).float().mean()
