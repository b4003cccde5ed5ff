"""Normalization layers by name, for activations [N, C, …]: to mean 0 and variance 1, then times a weight plus a bias.

They differ in the values over which mean and variance are computed. A batch is what one rank passes through the network
at once: a micro-batch if a step has several. In training mode, batch norms keep a running mean of these statistics for
evaluation mode. Statistics are float32 even under autocast.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

KNOWN = "none, batch, sync_batch, ghost(n) with n ≥ 1 samples, and group"
MAX_GROUPS = 32


def build_norm(spec: str, channels: int) -> nn.Module:
    """The norm `spec` for activations of `channels` channels; ValueError for an unknown one.

    none        no normalization
    batch       each channel over a rank's batch (Ioffe & Szegedy 2015, arXiv:1502.03167)
    sync_batch  each channel over the batches of all ranks, which have a GPU each
    ghost(n)    each channel over groups of n samples (Hoffer et al. 2017, arXiv:1705.08741)
    group       each sample over groups of channels (Wu & He 2018, arXiv:1803.08494): the largest number of groups up to
                32 that divides the channels
    """
    samples = ghost_batch(spec)
    if samples is not None:
        return GhostBatchNorm(channels, samples)
    if spec == "group":
        return GroupNorm(next(groups for groups in range(MAX_GROUPS, 0, -1) if channels % groups == 0), channels)
    return {"none": nn.Identity, "batch": BatchNorm, "sync_batch": SyncBatchNorm}[spec](channels)


def ghost_batch(spec: str) -> int | None:
    """n of ghost(n), of which a training batch is a multiple; None for other norms; ValueError for unknown ones."""
    if spec in ("none", "batch", "sync_batch", "group"):
        return None
    samples = spec[len("ghost(") : -1]
    if spec != f"ghost({samples})" or not samples.isdecimal() or int(samples) < 1:
        raise ValueError(f"unknown norm {spec}; known: {KNOWN}")
    return int(samples)


class GroupNorm(nn.GroupNorm):
    """`nn.GroupNorm` whose results keep the dtype of the activations, which autocast on CUDA would make float32."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).to(input.dtype)


class BatchNorm(_BatchNorm):
    """Batch norm for activations with any number of axes."""

    def _check_input_dim(self, input: Tensor) -> None:
        pass


class GhostBatchNorm(BatchNorm):
    """Batch norm over groups of `samples` samples, of which a training batch is a multiple.

    Sample i belongs to group i modulo the number of groups. In contiguous memory a view then turns the groups into
    channels without a copy; channels_last memory is copied there and back. The running statistics use the mean over the
    groups.
    """

    # torch's batch norms may lack them, these do not.
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor
    momentum: float

    def __init__(self, channels: int, samples: int) -> None:
        super().__init__(channels)
        self.samples = samples

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or len(input) == self.samples:
            return super().forward(input)
        groups = len(input) // self.samples
        weight, bias = self.weight.repeat(groups), self.bias.repeat(groups)
        grouped = input.reshape(self.samples, groups * self.num_features, *input.shape[2:])
        means, variances = torch.zeros_like(weight), torch.zeros_like(weight)
        # Momentum 1 makes them the statistics of this batch.
        result = F.batch_norm(grouped, means, variances, weight, bias, training=True, momentum=1.0, eps=self.eps)
        with torch.no_grad():
            self.running_mean.lerp_(means.view(groups, -1).mean(0), self.momentum)
            self.running_var.lerp_(variances.view(groups, -1).mean(0), self.momentum)
            self.num_batches_tracked.add_(1)
        result = result.reshape(input.shape)
        form = {4: torch.channels_last, 5: torch.channels_last_3d}.get(input.dim(), torch.contiguous_format)
        return result.contiguous(memory_format=form) if input.is_contiguous(memory_format=form) else result


class SyncBatchNorm(nn.SyncBatchNorm):
    """`nn.SyncBatchNorm` on a GPU; with one rank it is batch norm, on a CPU with several ranks ValueError.

    In training every rank must call it, forward and backward. In eager steps on several ranks the host waits for the
    device in each call; in a CUDA graph it does not.
    """

    def forward(self, input: Tensor) -> Tensor:
        alone = not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)
        # torch's refuses tensors without data, and as soon as there is a process group those of a single rank's CPU.
        return _BatchNorm.forward(self, input) if alone or input.is_meta else super().forward(input)
