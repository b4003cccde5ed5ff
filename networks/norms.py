"""Normalization layers by name, for activations [N, C, …]: to mean 0 and variance 1, then times a weight plus a bias.

They differ in the values over which mean and variance are computed. A batch is what one rank passes through the network
at once: a micro-batch if a step has several. In training mode, batch norms keep a running mean of these statistics for
evaluation mode. Statistics are float32 even under autocast.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.library import custom_op
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

aten = torch.ops.aten

KNOWN = "none, batch, sync_batch, ghost(n) with n ≥ 1 samples, and group"
MAX_GROUPS = 32


def build_norm(spec: str, channels: int) -> nn.Module:
    """The norm `spec` for activations of `channels` channels; ValueError for an unknown one.

    none        no normalization
    batch       each channel over a rank's batch (Ioffe & Szegedy 2015, arXiv:1502.03167)
    sync_batch  each channel over the batches of all ranks
    ghost(n)    each channel over groups of n samples (Hoffer et al. 2017, arXiv:1705.08741)
    group       each sample over groups of channels (Wu & He 2018, arXiv:1803.08494): the largest number of groups up to
                32 that divides the channels
    """
    samples = ghost_batch(spec)
    if samples is not None:
        return GhostBatchNorm(channels, samples)
    if spec == "batch":
        return BatchNorm(channels)
    if spec == "sync_batch":
        return SyncBatchNorm(channels)
    if spec == "group":
        return GroupNorm(next(groups for groups in range(MAX_GROUPS, 0, -1) if channels % groups == 0), channels)
    return nn.Identity()


def ghost_batch(spec: str) -> int | None:
    """n of norm ghost(n), of which a training batch must be a multiple; None for other norms.

    ValueError for an unknown norm.
    """
    if spec in ("none", "batch", "sync_batch", "group"):
        return None
    samples = spec[len("ghost(") : -1]
    if spec != f"ghost({samples})" or not samples.isdecimal() or int(samples) < 1:
        raise ValueError(f"unknown norm {spec}; known: {KNOWN}")
    return int(samples)


class GroupNorm(nn.GroupNorm):
    """`nn.GroupNorm` whose results keep the dtype of the activations, which autocast on CUDA would make float32."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).to(input.dtype)


class BatchNorm(_BatchNorm):
    """Batch norm for activations with any number of axes; subclasses compute other statistics."""

    # torch's batch norms may lack them, these do not.
    running_mean: torch.Tensor
    running_var: torch.Tensor
    num_batches_tracked: torch.Tensor
    momentum: float

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected activations [N, C, …], not {input.dim()} axes")

    @torch.no_grad()
    def _update_statistics(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(variance, self.momentum)
        self.num_batches_tracked.add_(1)


class GhostBatchNorm(BatchNorm):
    """Batch norm over groups of `samples` samples; in training, ValueError for a batch that is not a multiple of it.

    Sample i belongs to group i modulo the number of groups. In contiguous memory a view then turns the groups into
    channels without a copy; channels_last memory is copied there and back. The running statistics use the mean over the
    groups.
    """

    def __init__(self, channels: int, samples: int) -> None:
        super().__init__(channels)
        self.samples = samples

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().forward(input)
        groups, rest = divmod(len(input), self.samples)
        if rest or not groups:
            raise ValueError(
                f"norm ghost({self.samples}): a batch of {len(input)} samples is not a multiple of {self.samples}; "
                "change one of them"
            )
        if groups == 1:
            return super().forward(input)
        self._check_input_dim(input)
        weight, bias = self.weight.repeat(groups), self.bias.repeat(groups)
        grouped = input.reshape(self.samples, groups * self.num_features, *input.shape[2:])
        means, variances = torch.zeros_like(weight), torch.zeros_like(weight)
        # Momentum 1 makes them the statistics of this batch.
        result = F.batch_norm(grouped, means, variances, weight, bias, training=True, momentum=1.0, eps=self.eps)
        self._update_statistics(means.view(groups, -1).mean(0), variances.view(groups, -1).mean(0))
        result = result.reshape(input.shape)
        form = {4: torch.channels_last, 5: torch.channels_last_3d}.get(input.dim(), torch.contiguous_format)
        return result.contiguous(memory_format=form) if input.is_contiguous(memory_format=form) else result

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, samples={self.samples}"


class SyncBatchNorm(BatchNorm):
    """Batch norm over the batches of all ranks, whose sizes may differ. With one rank it is batch norm.

    In training every rank must call it, forward and backward. Unlike `nn.SyncBatchNorm` it also runs on CPUs, and the
    host never waits for the device.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not (self.training and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return super().forward(input)
        self._check_input_dim(input)
        result, mean, variance, count = _synchronised(input, self.weight, self.bias, self.eps)
        self._update_statistics(mean, variance * (count / (count - 1)))
        return result


# --- batch norm across ranks as a custom operator, which torch.compile does not look into -----------------------------


@custom_op("networks::synchronised_batch_norm", mutates_args=())
def _synchronised(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The result; mean and biased variance [C] over all ranks; the number of values per channel [1]."""
    # On a CPU the statistics would have x's dtype.
    own_mean, own_variance = aten.batch_norm_update_stats(x if x.is_cuda else _at_least_float32(x), None, None, 0.0)
    own_count = own_mean.new_full((1,), x.numel() // x.shape[1])
    sums = torch.cat([own_mean * own_count, own_count])
    dist.all_reduce(sums)
    count = sums[-1:].clone()
    mean = sums[:-1] / count
    # Relative to the common mean: a difference of two large sums loses precision if the variance is small.
    squares = (own_variance + (own_mean - mean) ** 2) * own_count
    dist.all_reduce(squares)
    variance = squares / count
    return F.batch_norm(x, mean, variance, weight, bias, False, 0.0, eps), mean, variance, count


@custom_op("networks::synchronised_batch_norm_backward", mutates_args=())
def _synchronised_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor,
    variance: torch.Tensor,
    count: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradient of x, and this rank's part of the gradients of weight and bias."""
    scale = torch.rsqrt(variance + eps)
    if x.is_cuda:
        # The kernels of nn.SyncBatchNorm.
        total, product, weight_gradient, bias_gradient = aten.batch_norm_backward_reduce(
            gradient, x, mean, scale, weight, True, True, True
        )
        means = torch.cat([total, product]) / count
        dist.all_reduce(means)
        # The kernel divides by this count; `means` are already divided.
        one = torch.ones(1, dtype=torch.int32, device=x.device)
        x_gradient = aten.batch_norm_backward_elemt(gradient, x, mean, scale, weight, *means.chunk(2), one)
        return x_gradient, weight_gradient, bias_gradient
    shape = (1, -1, *(1,) * (x.dim() - 2))
    axes = [axis for axis in range(x.dim()) if axis != 1]
    normal = (_at_least_float32(x) - mean.view(shape)) * scale.view(shape)
    upstream = _at_least_float32(gradient)
    bias_gradient, weight_gradient = upstream.sum(axes), (upstream * normal).sum(axes)
    means = torch.cat([bias_gradient, weight_gradient]) / count
    dist.all_reduce(means)
    mean_gradient, mean_product = (part.view(shape) for part in means.chunk(2))
    x_gradient = (upstream - mean_gradient - normal * mean_product) * (weight * scale).view(shape)
    return x_gradient.to(x.dtype), weight_gradient, bias_gradient


def _at_least_float32(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


@_synchronised.register_fake
def _(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    mean, variance, count = (torch.empty_like(weight), torch.empty_like(weight), weight.new_empty(1))
    return F.batch_norm(x, mean, variance, weight, bias, False, 0.0, eps), mean, variance, count


@_synchronised_backward.register_fake
def _(gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    return torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, weight, _, ctx.eps = inputs
    ctx.save_for_backward(x, weight, *output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, gradient: torch.Tensor | None, *_: Any) -> tuple[Any, ...]:
    assert gradient is not None  # the loss depends on the result only
    return (*_synchronised_backward(gradient, *ctx.saved_tensors, ctx.eps), None)


_synchronised.register_autograd(_differentiate, setup_context=_save_inputs)
