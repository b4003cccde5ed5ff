"""The last layer, alone and with tanh and L1 loss, and shuffles of its blocks, interpreted and against float64."""

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from devices import DEVICES, ON_GPU
from fused_cases import CHANNELS_LAST, assert_trains_like, batch, planned, results, trained, values, with_loss
from small_steps import refusing_to_wait
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from networks.layers import Last
from networks.ops import CUDNN, HOPPER, TORCH, cudnn, reference, smoothing
from networks.ops.blocks import depth_to_space, space_to_depth
from networks.ops.hopper import layers
from networks.ops.l1 import l1_of_blocks


def plain(x: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    return (torch.tanh(F.conv_transpose3d(x, weight, bias, 2, 1)) - targets).abs().mean()


def fused_tail(x: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    return cudnn.last_l1(x, SimpleNamespace(weight=weight, bias=bias, dtype=torch.float32), targets)


def own_tail(x: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    return layers.last_l1(x, SimpleNamespace(weight=weight, bias=bias, dtype=torch.float32), targets)


# With the names of their kernels.
TAILS = ((fused_tail, ["blocks_l1"]), (own_tail, ["rows_to_blocks", "block_weight_gradient", "blocks_to_padded_rows"]))


def operands(grid: tuple[int, int, int], channels: int, batch: int, inputs: int = 3) -> tuple[Tensor, ...]:
    """Input, weight, bias and targets of the last layer. Some outputs are close to -1 and 1."""
    x, weight = values(batch, inputs, *grid, seed=0), 0.5 * values(inputs, channels, 4, 4, 4, seed=1) / inputs**0.5
    targets = values(batch, channels, *(2 * side for side in grid), seed=3)
    return x, weight, values(channels, seed=2), targets


@pytest.mark.parametrize(
    ("inputs", "grid", "channels", "batch", "upstream"),
    [
        *((3, (3, 2, 2), 5, 2, 1.0), (3, (1, 1, 1), 5, 1, 1 / 3), (3, (2, 1, 7), 1, 2, 1024.0)),
        *((3, (1, 4, 2), 3, 1, -0.7), (64, (5, 5, 5), 5, 3, 1024.0), (64, (1, 1, 1), 5, 1, 1 / 3)),
        (128, (2, 2, 2), 8, 1, -0.7),
    ],
    ids=str,
)
def test_loss_and_gradients_are_those_of_plain_operations(interpreter, inputs, grid, channels, batch, upstream) -> None:
    """Triton kernels compute the cases with a multiple of 64 input channels."""
    *given, targets = operands(grid, channels, batch, inputs)
    function, names = TAILS[inputs % 64 == 0]
    fused, exact = (functools.partial(tail_loss, targets=targets) for tail_loss in (function, plain))
    got, again = (results(fused, given, [torch.tensor(upstream)], torch.float32) for _ in range(2))
    assert interpreter == names * 2
    assert all(torch.equal(*pair) for pair in zip(got, again, strict=True))
    for ours, theirs in zip(got, results(exact, given, [torch.tensor(upstream)], torch.float64), strict=True):
        assert ours.shape == theirs.shape
        assert float((ours - theirs).abs().max()) < 2e-6 * float(theirs.abs().max())


def test_no_difference_has_no_gradient_and_padding_has_none(interpreter: list[str]) -> None:
    """The blocks that reach beyond the grid are not compared with anything, even if they hold NaN."""
    bias, result = values(5, seed=2), torch.zeros(2, 40, 3, 4, 3)
    result[:, :20, 0] = torch.nan  # the first half of the first block along x
    cells = torch.zeros(2, 5, 4, 6, 4)
    targets = cells + torch.tanh(bias).view(-1, 1, 1, 1)
    cells[:, :, :, 1::2] = 1.0
    targets = (targets + cells).contiguous(memory_format=CHANNELS_LAST)
    total, gradient, _ = l1_of_blocks(result, bias, targets, torch.float32)
    assert interpreter == ["blocks_l1"]
    assert float(total) == pytest.approx(float(cells.sum()))
    assert torch.equal(gradient != 0, space_to_depth(cells) != 0)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns of infinities
@pytest.mark.parametrize(("place", "bad"), [(0, float("nan")), (3, float("nan")), (3, -float("inf"))], ids=str)
@pytest.mark.parametrize(("function", "inputs"), [(fused_tail, 3), (own_tail, 64)])
def test_a_non_finite_loss_makes_all_gradients_nan(interpreter, function: Any, inputs: int, place: int, bad) -> None:
    """In an input or a target. A step multiplies the gradient by 0 · loss + 1 so that it skips the update."""
    given = operands((2, 2, 2), 5, 1, inputs)
    given[place][0, 1, 1, 0, 1] = bad
    *inputs, targets = given
    loss = function(*(x.requires_grad_() for x in inputs), targets)
    assert not loss.isfinite()
    (bias_gradient,) = torch.autograd.grad(loss, inputs[2:], retain_graph=True)
    assert bool(bias_gradient.isnan().any()) == (bad != bad), "NaN in the data without the step's factor"
    gradients = torch.autograd.grad(loss, inputs, loss.detach() * 0 + 1)
    assert all(gradient.isnan().all() for gradient in gradients)


@pytest.mark.parametrize("added", [None, {0: 0, 4: 1}], ids=str)
def test_a_network_trains_as_with_the_plain_loss(interpreter: list[str], added: Any) -> None:
    """Also on targets that are not channels-last."""
    module, given = with_loss(scales=2, added=added), [part.contiguous() for part in batch(size=4)]
    got = trained(planned(module, "cudnn", 4, torch.bfloat16), given, torch.bfloat16)
    layers = ["bias_activation_forward"] * 3 + ["blocks_l1"] + ["bias_activation_backward"] * 3
    assert interpreter == ["subtract_smoothed"] * bool(added) + layers
    assert_trains_like(got, with_loss(scales=2, added=added), batch(size=4), torch.bfloat16)


@DEVICES
@pytest.mark.parametrize(
    ("side", "inputs", "added"), [(6, 4, [None, 1, 2, 3, None]), (4, 1, [0, None, 0]), (8, 15, [14, *[None] * 13, 0])]
)
def test_smoothed_inputs_are_subtracted_from_targets(request: Any, device: str, side: int, inputs: int, added) -> None:
    """As plain operations do; targets without an input keep their bits, and tensors in other orders are copied."""
    names = request.getfixturevalue("interpreter" if device == "cpu" else "on_device")
    targets, fields = (values(2, count, *[side] * 3, seed=count, device=device) for count in (len(added), inputs))
    fields = fields.contiguous()
    got, expected = (module.minus_smoothed(targets, fields, added) for module in (smoothing, reference))
    assert names == ["subtract_smoothed"]
    assert got.is_contiguous(memory_format=CHANNELS_LAST)
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=0)
    assert torch.equal(got[:, (none := added.index(None))], targets[:, none])
    for other in (fields[..., :3], fields.repeat(1, 16, 1, 1, 1), fields.clone().requires_grad_()):
        given = targets[..., : other.shape[-1]]
        assert torch.equal(smoothing.minus_smoothed(given, other, added), reference.minus_smoothed(given, other, added))
    assert len(names) == 1, "these take the plain path: no cube, too many channels, and fields that need a gradient"


@pytest.mark.parametrize("width", [8, 64])
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
def test_a_network_on_a_gpu(on_device: list[str], device: str, width: int) -> None:
    """Triton kernels compute the last layer if it has 128 input channels and the GPU is one for them."""
    module = planned(with_loss(device, scales=2, width=width), "auto", 4, torch.bfloat16)
    parts, last = batch(device, 4), module.network.last
    with refusing_to_wait(device):
        got = trained(module, parts, torch.bfloat16)
    assert on_device.count("rows_to_blocks" if last.operation == HOPPER else "blocks_l1") == 1
    assert_trains_like(got, with_loss(device, scales=2, width=width), parts, torch.bfloat16)


@DEVICES
@pytest.mark.parametrize("operation", [TORCH, CUDNN])
def test_a_last_layer_is_more_precise_than_bfloat16_without_underflow(request, operation: str, device: str) -> None:
    """Of inputs that are exact in bfloat16. Gradients of means over millions of cells would underflow in float16."""
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
