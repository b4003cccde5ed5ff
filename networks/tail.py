"""The last layer of a U-Net, its activation and the L1 loss, in one kernel or in one after cuDNN's (`fused_tail`).

The kernel computes, or reads, the convolution's result, which consists of blocks of 2³ cells, and reads the targets; it
writes the gradient of the blocks. The fields themselves are never in memory.

The gradient is computed in the forward pass, before that of the loss is known. It is a factor of all gradients, so the
backward pass applies it to small tensors: to the weight for the gradient of the convolution's input, and to the
gradients of weight and bias. The gradient of the blocks stays without that factor and without the 1 / count of the
mean, between -1 and 1, where half precision has its full accuracy.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from networks import blocks, fused, layers, padded
from networks.losses import L1Loss, NetworkWithLoss
from networks.space_to_depth import DepthToSpaceConvTranspose3d, dense_weight
from networks.unet import UNet

# Elements of a program's tile. Four elements per thread leave registers for 32 warps per multiprocessor.
TILE = 512


class NetworkWithFusedTail(NetworkWithLoss):
    """A U-Net whose last layer is computed by own kernels or by space-to-depth, with the mean absolute error as loss.

    Without a GPU, in another memory format than channels_last_3d, under torch.compile, and without bfloat16 autocast
    this is the loss of the network's output.
    """

    def forward(
        self, inputs: torch.Tensor, targets: torch.Tensor, conditions: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert isinstance(self.network, UNet)
        assert isinstance(self.network.last, layers.OutputConvTranspose3d)
        assert isinstance(self.loss, L1Loss)
        x, last = self.network.before_last(inputs, conditions), self.network.last
        dtype = layers.precise_dtype(x)
        if dtype is not None and fused.fusible(targets):
            with layers.without_autocast(x):
                half, by_kernels = x.to(torch.bfloat16), last.own(x, torch.bfloat16)
                if by_kernels:
                    return _Tail.apply(half, None, last.weight, last.bias, targets)
                if isinstance(last, DepthToSpaceConvTranspose3d) and fused.fusible(x):
                    return _Tail.apply(half, x.detach().to(dtype), dense_weight(last.weight), last.bias, targets)
        return self.loss(self.network.output(x), targets)


class _Tail(torch.autograd.Function):
    """The loss for the last layer's input x, by own kernels, or after cuDNN's dense convolution that returns blocks.

    precise: x in the dtype in which cuDNN computes the blocks; None: by own kernels. weight: of the layer, or of the
    dense convolution, [8C, I, 2, 2, 2] float32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        precise: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor,
        targets: torch.Tensor,
    ) -> torch.Tensor:
        ctx.own, ctx.count = precise is None, targets.numel()
        if precise is None:
            x = padded.padded(x)
            total, gradient, bias_gradient = blocks.tail(x, weight, bias, targets)
        else:
            result = torch.ops.aten.convolution(precise, weight.to(precise.dtype), None, *layers.DENSE)
            total, gradient, bias_gradient = _l1(result, bias, targets, x.dtype)
        ctx.save_for_backward(x, weight, gradient, bias_gradient)
        return total / ctx.count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, gradient, bias_gradient = ctx.saved_tensors
        factor = upstream / ctx.count  # stays on the device, and may be NaN
        if ctx.own:
            weight_gradient = blocks.weight_gradient(x, gradient)
            x_gradient = blocks.blocks_to_rows(gradient, weight * factor)
        else:
            scaled = (weight * factor).to(x.dtype)
            x_gradient, weight_gradient = layers.convolution_gradients(gradient, x, scaled, layers.DENSE)
        return x_gradient, None, weight_gradient.to(weight.dtype) * factor, bias_gradient * factor, None


def _l1(
    blocks: torch.Tensor, bias: torch.Tensor, targets: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """sum |tanh(cells + bias) - targets|, and its gradients: that of the blocks in `dtype`, and that of the bias."""
    blocks = blocks.contiguous(memory_format=torch.channels_last_3d)
    channels, depth, rows, columns = len(bias), *blocks.shape[2:]
    assert targets.shape == (len(blocks), channels, *(2 * side - 2 for side in blocks.shape[2:]))
    plane, planes = 8 * channels * rows * columns, len(blocks) * depth
    tiles = -(-plane // TILE)
    groups = min(planes, max(1, fused.PROGRAMS // tiles))
    gradient = torch.empty_like(blocks, dtype=dtype)
    partial = torch.empty(groups * tiles, dtype=torch.float32, device=blocks.device)
    bias_partial = torch.empty((groups, tiles * TILE), dtype=torch.float32, device=blocks.device)
    arguments = (gradient, partial, bias_partial, blocks, bias, targets, planes)
    sizes = {"DEPTH": depth, "ROWS": rows, "COLUMNS": columns, "CHANNELS": channels, "TILE": TILE}
    fused.launch(fused.kernels().tail_l1, groups * tiles, *arguments, **sizes)
    bias_gradient = bias_partial[:, :plane].sum(0).view(-1, channels).sum(0)
    return partial.sum(), gradient, bias_gradient.to(bias.dtype)
