"""Fused kernels have no more error than torch's operations in the same dtype: interpreted, on a GPU, and compiled."""

import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from devices import ON_GPU
from fused_cases import CONDITIONS, SLACK, assert_trains_like, batch, planned, results, trained, values, with_loss
from small_steps import refusing_to_wait
from torch import Tensor
from torch.nn import functional as F
from triton_compile import ARCHITECTURES, compile_launches

from networks.ops import pointwise
from networks.ops.l1 import l1_of_blocks
from networks.ops.smoothing import minus_smoothed

SIZE = (3, 5, 4)  # of a sample's grid
PLAIN: dict[Any, Callable[[Tensor], Tensor]] = {
    "leaky_relu": lambda x: F.leaky_relu(x, 0.01),
    "relu": F.relu,
    "tanh": torch.tanh,
}
INTERPRETED = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns of infinities
BOTH = ["bias_activation_forward", "bias_activation_backward"]


class Kernels(NamedTuple):
    launched: list[str]
    device: str
    size: tuple[int, int, int]  # of a sample's grid
    half: torch.dtype

    def values(self, channels: int, precision: str = "float32", seed: int = 0) -> Tensor:
        dtype = self.half if precision == "half" else torch.float32
        return values(2, channels, *self.size, dtype=dtype, seed=seed, device=self.device)


@pytest.fixture(
    params=[
        ("interpreter", torch.float16),  # its casts to bfloat16 truncate
        pytest.param(("on_device", torch.float16), marks=ON_GPU),
        pytest.param(("on_device", torch.bfloat16), marks=ON_GPU),
    ],
    ids=str,
)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """Triton's interpreter, and a GPU with a grid of several tiles per program, the last one partial."""
    place, half = request.param
    device, size = ("cuda", (17, 19, 23)) if place == "on_device" else ("cpu", SIZE)
    return Kernels(request.getfixturevalue(place), device, size, half)


def assert_as_accurate(
    fused: list[Tensor], plain: Callable[..., Any], inputs: list[Tensor], upstream: Sequence[Tensor]
) -> None:
    """No fused result has a larger error than the plain one in the inputs' dtype plus SLACK of the largest value."""
    dtype = inputs[0].dtype
    usual, exact = (results(plain, inputs, upstream, kind) for kind in (dtype, torch.float64))
    for ours, theirs, reference in zip(fused, usual, exact, strict=True):
        error, size = (float((result.double() - reference).abs().max()) for result in (ours, theirs))
        assert error <= size + SLACK[dtype] * float(reference.abs().max())


def activated(x: Tensor, bias: Tensor, activation: str) -> Tensor:
    """The operations of a network without kernels, all in the dtype of x."""
    return PLAIN[activation](x + bias.view(-1, 1, 1, 1).to(x.dtype))


ACTIVATED = [("leaky_relu", 5, "float32"), ("leaky_relu", 64, "half"), ("relu", 70, "float32"), ("relu", 2, "half")]


@pytest.mark.parametrize(("activation", "channels", "precision"), [*ACTIVATED, ("tanh", 70, "half")])
def test_bias_and_activation(kernels: Kernels, activation: Any, channels: int, precision: str) -> None:
    """With as many, fewer and more channels than lanes. The second gradient is a slice of a concatenation's."""
    x, bias = kernels.values(channels, precision), values(channels, seed=1, device=kernels.device)
    before = x.clone()
    upstream = kernels.values(channels, precision, 2), kernels.values(channels + 3, precision, 3)[:, 3:]
    function = functools.partial(pointwise.bias_activation_twice, activation=activation)
    fused, again = (results(function, [x, bias], upstream) for _ in range(2))
    assert kernels.launched == BOTH * 2
    assert [part.dtype for part in fused] == [*[x.dtype] * 3, torch.float32]
    assert all(part.is_contiguous(memory_format=pointwise.CHANNELS_LAST) for part in fused[:3])
    assert torch.equal(fused[0], fused[1])
    assert torch.equal(x, before), "the output of the convolution must not change"
    assert all(torch.equal(first, second) for first, second in zip(fused, again, strict=True))
    assert_as_accurate(fused, lambda x, bias: (activated(x, bias, activation),) * 2, [x, bias], upstream)


def test_one_channel_needs_no_kernel_and_repeats_bit_for_bit(kernels: Kernels) -> None:
    x, bias = kernels.values(1, "half"), values(1, seed=1, device=kernels.device)
    upstream = [kernels.values(1, "half", seed) for seed in (2, 3)]
    function = functools.partial(pointwise.bias_activation_twice, activation="relu")
    first, again = (results(function, [x, bias], upstream) for _ in range(2))
    assert kernels.launched == []
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))


STRIDED = [values(2, 6, *SIZE, seed=2).contiguous(), values(2, 6, 5, 7, 6, seed=2)[:, :, 1:-1, 1:-1, 1:-1]]
STRIDED += [torch.tensor(0.5).expand(2, 6, *SIZE), values(1, 9, 1, 1, 1, seed=2)[:, 3:]]


@pytest.mark.parametrize("upstream", STRIDED, ids=lambda upstream: f"{tuple(upstream.shape)} {upstream.stride()}")
def test_gradients_may_have_any_strides_and_grids_of_one_cell(interpreter: list[str], upstream: Tensor) -> None:
    x, bias = values(*upstream.shape), values(6, seed=1)
    fused = results(lambda x, b: pointwise.bias_activation(x, b, "tanh"), [x, bias], [upstream])
    assert interpreter == BOTH
    exact = results(lambda x, b: activated(x, b, "tanh"), [x, bias], [upstream], torch.float64)
    for ours, reference in zip(fused, exact, strict=True):
        assert torch.allclose(ours.double(), reference, atol=1e-5)


@INTERPRETED
@pytest.mark.parametrize("activation", PLAIN)
def test_extreme_values_give_the_same_as_in_torch(interpreter: list[str], activation: Any) -> None:
    """Also NaN and infinities. tanh is accurate everywhere."""
    x = torch.cat([torch.linspace(-12, 12, 4001), torch.logspace(-12, 2, 400), torch.tensor([0.625, 1e30])])
    x = torch.cat([x, -x, torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-40])]).view(1, -1, 1, 1, 2)
    x = x.transpose(1, 4).contiguous(memory_format=pointwise.CHANNELS_LAST)
    inputs, upstream = [x, torch.zeros(2)], [torch.ones_like(x)]
    got = results(functools.partial(pointwise.bias_activation, activation=activation), inputs, upstream)
    expected = results(functools.partial(activated, activation=activation), inputs, upstream, torch.float64)
    assert interpreter == BOTH
    assert torch.allclose(got[0].double(), expected[0], rtol=3e-7, atol=1e-37, equal_nan=True)
    for ours, theirs in zip(got[1:], expected[1:], strict=True):
        assert torch.allclose(ours.double(), theirs, atol=1e-6, equal_nan=True)


JOINED = [((32, 32), "half"), ((2, 1), "float32"), ((5, 3), "half"), ((3, 70), "float32")]


@pytest.mark.parametrize(("channels", "precision"), JOINED, ids=str)
def test_concatenation(kernels: Kernels, channels: tuple[int, int], precision: str) -> None:
    """The skip connection's gradient is a view of the concatenation's, not a copy."""
    x, skip = (kernels.values(count, precision, seed=count) for count in channels)
    bias, upstream = values(channels[0], seed=1, device=kernels.device), kernels.values(sum(channels), precision, 2)

    def plain(x: Tensor, bias: Tensor, skip: Tensor) -> Tensor:
        return torch.cat([activated(x, bias, "relu"), skip], dim=1)

    fused = results(pointwise.bias_relu_cat, [x, bias, skip], [upstream])
    assert kernels.launched == BOTH
    assert [part.dtype for part in fused] == [x.dtype, x.dtype, torch.float32, x.dtype]
    assert torch.equal(fused[0][:, channels[0] :], skip)
    assert fused[0].is_contiguous(memory_format=pointwise.CHANNELS_LAST)
    assert fused[-1].data_ptr() == upstream[:, channels[0] :].data_ptr()
    assert_as_accurate(fused, plain, [x, bias, skip], [upstream])


def test_results_are_rounded_once_and_need_no_memory_format(interpreter: list[str]) -> None:
    """Under autocast the bias is float32 and the convolution half precision."""
    y = pointwise.bias_activation(values(2, 6, *SIZE).half(), torch.full((6,), 1e-4), "leaky_relu")
    assert torch.equal(y, F.leaky_relu(values(2, 6, *SIZE).half().float() + 1e-4, 0.01).half())
    x = values(2, 6, *SIZE)
    expected = torch.cat([F.relu(x), x], dim=1)
    assert torch.equal(pointwise.bias_relu_cat(x.contiguous(), torch.zeros(6), x.contiguous()), expected)
    assert interpreter == ["bias_activation_forward"] * 2


@pytest.mark.parametrize("precision", ["float32", "half"])
@pytest.mark.parametrize(("scales", "options"), [(1, {}), (3, {}), (2, {"conditioned": True})], ids=str)
def test_a_fused_network_trains_like_the_plain_one(kernels: Kernels, precision: str, scales: int, options: Any) -> None:
    on_cpu, dtype = kernels.device == "cpu", kernels.half if precision == "half" else None
    side = 8 if on_cpu else 16
    plain, fused = (with_loss(kernels.device, scales=scales, **options) for _ in range(2))
    parts = batch(kernels.device, side)
    parts += [CONDITIONS.to(kernels.device)] if "conditioned" in options else []
    with refusing_to_wait(kernels.device):
        got = trained(planned(fused, "cudnn", side, dtype), parts, dtype)
    layers = 2 * scales
    launches = [BOTH[0]] * layers + [BOTH[1]] * layers
    if dtype == torch.bfloat16:
        launches = [BOTH[0]] * (layers - 1) + ["blocks_l1"] + [BOTH[1]] * (layers - 1)
    assert kernels.launched == launches
    assert len(got.values) == 1 + len(list(plain.parameters()))
    assert_trains_like(got, plain, parts, dtype)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
def test_more_elements_than_fit_into_32_bits(on_device: list[str], device: str) -> None:
    """Computes the last of 2^25 + 3 cells with 64 channels, forward and backward."""
    if torch.cuda.mem_get_info()[0] < 40e9:
        pytest.skip("needs 40 GB of device memory")
    x = torch.zeros((2**25 + 3, 1, 1, 1, 64), dtype=torch.bfloat16, device=device).permute(0, 4, 1, 2, 3)
    x[-1] = -1.0
    x.requires_grad_()
    bias = torch.zeros(64, device=device, requires_grad=True)
    y = pointwise.bias_activation(x, bias, "tanh")
    upstream = torch.zeros_like(y)
    upstream[-1] = 1.0
    gradient, bias_gradient = torch.autograd.grad(y, [x, bias], upstream)
    assert on_device == BOTH
    expected = torch.tensor(-1.0).tanh()
    assert torch.equal(y[-1].flatten().cpu(), expected.bfloat16().expand(64))
    assert torch.allclose(gradient[-1].flatten().float().cpu(), 1 - expected**2, rtol=1e-2)
    assert not y[:-1].any()
    assert not gradient[:-1].any()
    assert torch.allclose(bias_gradient.cpu(), 1 - expected**2, rtol=1e-2)


def empty(channels: int, dtype: torch.dtype = torch.bfloat16, side: int = 64) -> Tensor:
    x = torch.empty((2, channels, *[side] * 3), dtype=dtype, device="meta")
    return x.contiguous(memory_format=pointwise.CHANNELS_LAST).requires_grad_()


@ARCHITECTURES
def test_registers(architecture: int, monkeypatch: Any, tmp_path: Path) -> None:
    """At most 64 per thread, for 32 warps per multiprocessor. Triton 3.6 needed 230 for tanh with usual tiles."""
    compiled = compile_launches(monkeypatch, tmp_path, architecture, products=False)
    few, some, many = (torch.empty(channels, device="meta") for channels in (5, 64, 512))
    pointwise.bias_relu_cat(empty(64), some, empty(64))
    pointwise.activation_gradient(empty(64), [empty(64)], "relu", 64, pads=True)
    twice = pointwise.bias_activation_twice(empty(512, side=8), many, "leaky_relu")
    torch.autograd.backward(twice, [*map(torch.empty_like, twice)])
    pointwise.bias_activation(empty(5, torch.float32), few, "tanh").mean().backward()
    minus_smoothed(*(empty(channels, torch.float32).detach() for channels in (5, 4)), [None, 1, 2, 3, None])
    l1_of_blocks(empty(40, torch.float16, 33).detach(), few, empty(5, torch.float32).detach(), torch.bfloat16)
    rounding = [name for name, *_, result in compiled if re.search(r"cvt\.rn\.bf16", result.ptx)]
    wide = [name for name, *_, result in compiled if re.search(r"ld\.global\S*\.v[24]\.", result.ptx)]
    assert [name for name, *_ in compiled] == [*BOTH * 3, "subtract_smoothed", "blocks_l1"]
    most = {"subtract_smoothed": 96}  # it keeps sums of three planes
    assert [name for name, *_, result in compiled if result.registers > most.get(name, 64)] == []
    assert rounding == [*BOTH * 2, "blocks_l1"], "a cast to bfloat16 must round to nearest"
    assert wide == [*BOTH * 2, "subtract_smoothed", "blocks_l1"], "loads must be wide"
