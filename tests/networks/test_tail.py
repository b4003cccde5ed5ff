"""The fused tail compared with the last layer, tanh and L1 loss in float64; the kernel runs in Triton's interpreter."""

import functools
from typing import Any

import pytest
import torch
from devices import ON_GPU
from fused_cases import assert_trains_like, batch, results, trained, values, with_loss
from networks.space_to_depth import dense_weight, space_to_depth
from networks.tail import NetworkWithFusedTail
from small_steps import ALONE, differing, refusing_to_wait
from torch.nn import functional as F

from networks import blocks, padded, tail
from utils.config import Config
from utils.config.sections import NetworkConfig
from utils.data.loaders import Batch
from utils.steps import build

NETWORK: dict[str, Any] = {"scales": 2, "space_to_depth": ["down1", "last"]}


def plain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (torch.tanh(F.conv_transpose3d(x, weight, bias, 2, 1)) - targets).abs().mean()


def fused_tail(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return tail._Tail.apply(x, x.detach(), dense_weight(weight), bias, targets)


def own_tail(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return tail._Tail.apply(x, None, weight, bias, targets)


# With the names of their kernels.
TAILS = ((fused_tail, ["tail_l1"]), (own_tail, ["rows_to_blocks", "block_weight_gradient", "blocks_to_rows"]))


def operands(grid: tuple[int, int, int], channels: int, batch: int, inputs: int = 3) -> tuple[torch.Tensor, ...]:
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
def test_loss_and_gradients_are_those_of_the_plain_operations(
    interpreter: list[str], inputs: int, grid: tuple[int, int, int], channels: int, batch: int, upstream: float
) -> None:
    """Own kernels compute the cases with a multiple of 64 input channels."""
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
    targets = (targets + cells).contiguous(memory_format=torch.channels_last_3d)
    total, gradient, _ = tail._l1(result, bias, targets, torch.float32)
    assert interpreter == ["tail_l1"]
    assert float(total) == pytest.approx(float(cells.sum()))
    assert torch.equal(gradient != 0, space_to_depth(cells) != 0)


def test_no_difference_has_no_gradient_in_own_kernels(interpreter: list[str]) -> None:
    bias, rows, weight = values(5, seed=2), padded.padded(values(2, 64, 2, 2, 2)), torch.zeros(64, 5, 4, 4, 4)
    cells = torch.zeros(2, 5, 4, 4, 4)
    cells[:, :, :, 1::2] = 1.0
    targets = (cells + torch.tanh(bias).view(-1, 1, 1, 1)).contiguous(memory_format=torch.channels_last_3d)
    total, gradient, _ = blocks.tail(rows, weight, bias, targets)
    assert float(total) == pytest.approx(float(cells.sum()))
    assert torch.equal(gradient != 0, space_to_depth(cells) != 0)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns of infinities
@pytest.mark.parametrize(("place", "bad"), [(0, float("nan")), (3, float("nan")), (3, -float("inf"))], ids=str)
@pytest.mark.parametrize(("function", "inputs"), [(fused_tail, 3), (own_tail, 64)])
def test_a_non_finite_loss_makes_all_gradients_nan(
    interpreter: list[str], function: Any, inputs: int, place: int, bad: float
) -> None:
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


def test_a_network_trains_as_with_the_plain_loss_which_float32_and_float16_use(interpreter: list[str]) -> None:
    """In float16 the gradient of a mean over millions of cells underflows."""
    module = with_loss(True, kind=NetworkWithFusedTail, **NETWORK)
    for dtype in (None, torch.float16):
        trained(module, batch(size=4), dtype)
        assert "tail_l1" not in interpreter
    interpreter.clear()
    got = trained(module, batch(size=4), torch.bfloat16)
    assert interpreter == ["bias_activation"] * 3 + ["tail_l1"] + ["activation_backward"] * 3
    assert_trains_like(got, with_loss(False, **NETWORK), batch(size=4), torch.bfloat16)


def test_a_run_with_micro_batches_and_averaged_weights_uses_it() -> None:
    """The state has the same names as without it, and on a CPU the same bits."""
    states = []
    for fused_tail in (True, False):
        network = NetworkConfig(width=4, scales=2, space_to_depth=["last"])
        options: dict[str, Any] = {"accumulation_steps": 2, "ema_decay": 0.9, "enable_amp": True}
        config = Config(data_size=4, network=network, fused_tail=fused_tail, **options)
        step, given = build.step(config, ALONE, build.network_with_loss(config)), Batch(*batch(size=4))
        assert isinstance(step._trained, NetworkWithFusedTail) == fused_tail
        losses = [*(step(given, 1e-3) for _ in range(2)), step.evaluate(given)[0]]
        states.append({**step.network.state_dict(), "loss": torch.stack(losses)})
    assert differing(*states) == []


@pytest.mark.parametrize("width", [8, 64])
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
def test_a_network_on_a_gpu(on_device: list[str], device: str, width: int) -> None:
    """Own kernels compute the last layer if it has 128 input channels and the GPU is one for them."""
    options = {**NETWORK, "width": width}
    module, parts = with_loss(True, device, NetworkWithFusedTail, **options), batch(device, 4)
    last: Any = module.network.last
    by_kernels = last.plans_own((2, 2 * width, 2, 2, 2), torch.bfloat16, torch.device(device))
    with refusing_to_wait(device):
        got = trained(module, parts, torch.bfloat16)
    assert on_device.count("rows_to_blocks" if by_kernels else "tail_l1") == 1
    assert_trains_like(got, with_loss(False, device, **options), parts, torch.bfloat16)
