"""Shuffles of blocks of 2³ cells are one copy each; in bfloat16, last layers have float32 results."""

from typing import Any

import pytest
import torch
from devices import DEVICES
from fused_cases import CHANNELS_LAST, values
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from networks.layers import Last
from networks.ops import CUDNN, TORCH
from networks.ops.blocks import depth_to_space, space_to_depth


@DEVICES
@pytest.mark.parametrize("operation", [TORCH, CUDNN])
def test_a_last_layer_is_more_precise_than_bfloat16_without_underflow(request, operation: str, device: str) -> None:
    """Compared with float64 for inputs that bfloat16 represents exactly; weights are rounded to float16 at most.

    Gradients of a mean over millions of cells are below 6e-8, the smallest positive float16.
    """
    if operation == CUDNN and device == "cpu":
        request.getfixturevalue("interpreter")
    torch.manual_seed(1)
    layer: Any = Last(4, 6).to(device, memory_format=CHANNELS_LAST)
    x = values(2, 4, 4, 4, 4).bfloat16().to(device)

    def scaled(upstream: float, x: Tensor) -> list[Tensor]:
        x = x.detach().requires_grad_()
        y = layer(x)
        return [y.detach(), *torch.autograd.grad(y.sum() * upstream, [x, *layer.parameters()])]

    layer.operation, layer.dtype = operation, torch.bfloat16
    with torch.autocast(device, torch.bfloat16):
        got = scaled(1e-8, x)
        coarse = torch.tanh(F.conv_transpose3d(x, layer.weight, layer.bias, 2, 1)).detach()
    assert (got[0].dtype, coarse.dtype) == (torch.float32, torch.bfloat16)
    assert got[0].is_contiguous(memory_format=CHANNELS_LAST)
    layer.operation = TORCH
    layer.double()
    exact = scaled(1e-8, x.double())
    pairs = [*zip(got, exact, strict=True), (coarse, exact[0])]
    error, *of_gradients, usual = (float((part.double() - right).norm() / right.norm()) for part, right in pairs)
    assert error < 4e-4 < 1e-3 < usual
    assert max(of_gradients) < 1e-2
    assert got[2].dtype == got[3].dtype == torch.float32


class Copies(TorchDispatchMode):
    """Records operations that write a tensor of more than `least` bytes, and those that leave channels_last_3d."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least, self.copies, self.left = least, list[str](), list[str]()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        name = function.name().removeprefix("aten::")
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if not isinstance(tensor, Tensor) or tensor.nbytes <= self.least or function.is_view:
                continue
            if "conv" not in name and not name.startswith("empty"):
                self.copies.append(name.split(".")[0])
            if tensor.dim() == 5 and not tensor.is_contiguous(memory_format=CHANNELS_LAST):
                self.left.append(name)
        return result


@pytest.mark.parametrize("to_blocks", [True, False])
def test_large_tensors_stay_channels_last_and_each_shuffle_is_one_copy(to_blocks: bool) -> None:
    """Forward and backward; blocks are filled with zeros first, because they extend beyond the grid."""
    x = values(4, 4, 16, 16, 16) if to_blocks else values(4, 32, 9, 9, 9)
    with Copies(least=1000) as forward:
        y = (space_to_depth if to_blocks else depth_to_space)(x.requires_grad_())
    with Copies(least=1000) as backward:
        y.backward(y.detach())
    assert forward.left + backward.left == []
    blocks, cells = ["zero_", "copy_"], ["copy_"]
    assert (forward.copies, backward.copies) == ((blocks, cells) if to_blocks else (cells, blocks))
