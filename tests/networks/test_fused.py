"""Fused kernels compared with torch's float64 operations: no more error than the same operations in the same dtype.

The kernels run in Triton's interpreter, and in the last tests on a GPU if there is one.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from devices import ON_GPU
from fused_cases import CHANNELS_LAST, SLACK, assert_trains_like, batch, small_network, trained, values
from torch.nn import functional as F
from triton_interpreter import import_kernels_again

from networks import build_loss
from networks import fused as pointwise
from networks.losses import NetworkWithLoss

SIZE = (3, 5, 4)  # of a sample's grid
PLAIN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "leaky_relu": lambda x: F.leaky_relu(x, 0.01),
    "relu": F.relu,
    "tanh": torch.tanh,
}
INTERPRETED = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns of infinities


class Kernels(NamedTuple):
    launched: list[str]
    device: str
    size: tuple[int, int, int]  # of a sample's grid
    half: torch.dtype

    def dtype(self, precision: str) -> torch.dtype:
        return self.half if precision == "half" else torch.float32


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


def results(
    function: Callable[..., Any], inputs: list[torch.Tensor], upstream: list[torch.Tensor | None], dtype: Any = None
) -> list[torch.Tensor]:
    """The function's outputs and the gradients of its inputs, all computed in `dtype` if given."""
    inputs = [x.detach().to(dtype).requires_grad_() for x in inputs]
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    used = [(y, g.to(y.dtype)) for y, g in zip(outputs, upstream, strict=True) if g is not None]
    gradients = torch.autograd.grad([y for y, _ in used], inputs, [g for _, g in used])
    return [*(y.detach() for y in outputs), *gradients]


def assert_as_accurate(
    fused: list[torch.Tensor],
    plain: Callable[..., Any],
    inputs: list[torch.Tensor],
    upstream: list[torch.Tensor | None],
    dtype: torch.dtype,
) -> None:
    """No fused result has a larger error than the plain one in `dtype` plus SLACK of the largest value."""
    usual, exact = (results(plain, inputs, upstream, kind) for kind in (dtype, torch.float64))
    for ours, theirs, reference in zip(fused, usual, exact, strict=True):
        error, size = (float((result.double() - reference).abs().max()) for result in (ours, theirs))
        assert error <= size + SLACK[dtype] * float(reference.abs().max())


def twice(activation: str) -> Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """The operations of a network without kernels, all in the dtype of x."""

    def function(x: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = PLAIN[activation](x + bias.view(-1, 1, 1, 1).to(x.dtype))
        return y, y.view_as(y)

    return function


def concatenated(x: torch.Tensor, bias: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
    return torch.cat([F.relu(x + bias.view(-1, 1, 1, 1).to(x.dtype)), skip], dim=1)


# --- bias and activation --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("activation", "channels", "precision"),
    [
        ("leaky_relu", 5, "float32"),
        ("leaky_relu", 64, "half"),
        ("relu", 70, "float32"),
        ("relu", 1, "half"),
        ("tanh", 70, "half"),
    ],
)
def test_bias_and_activation(kernels: Kernels, activation: Any, channels: int, precision: str) -> None:
    """With as many, fewer and more channels than lanes. The second gradient is a slice of a concatenation's."""
    dtype = kernels.dtype(precision)
    like: Any = {"dtype": dtype, "device": kernels.device}
    x, bias = values(2, channels, *kernels.size, **like), values(channels, seed=1, device=kernels.device)
    before = x.clone()
    upstream = [values(2, channels, *kernels.size, seed=2, **like)]
    upstream.append(values(2, channels + 3, *kernels.size, seed=3, **like)[:, 3:])
    function = functools.partial(pointwise.bias_activation_twice, activation=activation)
    fused, again = (results(function, [x, bias], [*upstream]) for _ in range(2))
    assert kernels.launched == ["bias_activation", "activation_backward"] * 2
    assert [part.dtype for part in fused] == [dtype, dtype, dtype, torch.float32]
    assert all(part.is_contiguous(memory_format=CHANNELS_LAST) for part in fused[:3])
    assert torch.equal(fused[0], fused[1])
    assert torch.equal(x, before), "the output of the convolution must not change"
    assert all(torch.equal(first, second) for first, second in zip(fused, again, strict=True))
    assert_as_accurate(fused, twice(activation), [x, bias], [*upstream], dtype)


@pytest.mark.parametrize(
    "upstream",
    [
        values(2, 6, *SIZE, seed=2).contiguous(),
        torch.tensor(0.5).expand(2, 6, *SIZE),
        values(2, 6, 5, 7, 6, seed=2)[:, :, 1:-1, 1:-1, 1:-1],
        values(1, 9, 1, 1, 7, seed=2)[:, 3:],
        values(1, 9, 1, 1, 1, seed=2)[:, 3:],
    ],
    ids=lambda upstream: f"{tuple(upstream.shape)} {upstream.stride()}",
)
def test_gradients_may_have_any_strides_and_grids_of_one_cell(interpreter: list[str], upstream: torch.Tensor) -> None:
    x, bias = values(*upstream.shape), values(6, seed=1)
    fused = results(lambda x, b: pointwise.bias_activation(x, b, "tanh"), [x, bias], [upstream])
    assert interpreter == ["bias_activation", "activation_backward"]
    exact = results(lambda x, b: twice("tanh")(x, b)[0], [x, bias], [upstream], torch.float64)
    for ours, reference in zip(fused, exact, strict=True):
        assert torch.allclose(ours.double(), reference, atol=1e-5)


@INTERPRETED
def test_tanh_is_accurate_everywhere(interpreter: list[str]) -> None:
    x = torch.cat([torch.linspace(-12, 12, 4001), torch.logspace(-12, 2, 400), torch.tensor([0.625, 1e30])])
    x = torch.cat([x, -x]).view(1, 1, 1, 1, -1)
    exact = torch.tanh(x.double())
    error = (pointwise.bias_activation(x, torch.zeros(1), "tanh") - exact).abs() / exact.abs().clamp(min=1e-30)
    assert interpreter == ["bias_activation"]
    assert float(error.max()) < 3e-7


@INTERPRETED
@pytest.mark.parametrize("activation", PLAIN)
def test_nan_and_infinities_give_the_same_as_in_torch(interpreter: list[str], activation: Any) -> None:
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-40]).view(1, 1, 1, 1, -1)
    functions = (
        lambda x, b: pointwise.bias_activation(x, b, activation),
        lambda x, b: twice(activation)(x, b)[0],
    )
    got, expected = (results(function, [x, torch.zeros(1)], [torch.ones_like(x)]) for function in functions)
    assert interpreter == ["bias_activation", "activation_backward"]
    for ours, theirs in zip(got, expected, strict=True):
        assert torch.allclose(ours, theirs, equal_nan=True)


# --- concatenation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("channels", "precision"),
    [((32, 32), "half"), ((1, 1), "float32"), ((5, 3), "half"), ((3, 70), "float32")],
    ids=str,
)
def test_concatenation(kernels: Kernels, channels: tuple[int, int], precision: str) -> None:
    """With a copy in float16. The skip connection's gradient is a view of the concatenation's, not a copy."""
    dtype = kernels.dtype(precision)
    like: Any = {"dtype": dtype, "device": kernels.device}
    x, skip = (values(2, count, *kernels.size, seed=count, **like) for count in channels)
    bias = values(channels[0], seed=1, device=kernels.device)
    upstream = values(2, sum(channels), *kernels.size, seed=2, **like)
    copies = []

    def function(x: torch.Tensor, bias: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        y, copy = pointwise.bias_relu_cat(x, bias, skip, torch.float16)
        copies.append(copy)
        return y

    fused = results(function, [x, bias, skip], [upstream])
    assert kernels.launched == ["bias_activation", "activation_backward"]
    assert fused[0].is_contiguous(memory_format=CHANNELS_LAST)
    assert [part.dtype for part in fused] == [dtype, dtype, torch.float32, dtype]
    assert torch.equal(fused[0][:, channels[0] :], skip)
    assert torch.equal(copies[0], fused[0].half())
    assert copies[0].is_contiguous(memory_format=CHANNELS_LAST)
    assert not copies[0].requires_grad
    assert fused[-1].data_ptr() == upstream[:, channels[0] :].data_ptr()
    assert_as_accurate(fused, concatenated, [x, bias, skip], [upstream], dtype)


# --- the loss --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("channels", "precision"), [(1, "float32"), (5, "float32"), (5, "half")])
def test_l1(kernels: Kernels, channels: int, precision: str) -> None:
    dtype = kernels.dtype(precision)
    outputs = values(2, channels, *kernels.size, dtype=dtype, device=kernels.device)
    targets = values(2, channels, *kernels.size, seed=1, device=kernels.device)
    targets[0] = outputs[0].float()  # no difference: the gradient is zero
    scale: list[torch.Tensor | None] = [torch.tensor(1024.0, device=kernels.device)]  # as by a gradient scaler
    losses = [functools.partial(build_loss("l1", fused=kind), targets=targets) for kind in (True, False)]
    fused, plain = (results(loss, [outputs], scale, dtype) for loss in losses)
    assert kernels.launched == ["l1", "l1_backward"]
    assert [part.dtype for part in fused] == [torch.float32, dtype]
    assert_as_accurate(fused, losses[1], [outputs], scale, dtype)
    assert torch.equal(fused[1].sign(), plain[1].sign())
    assert not fused[1][0].any()


@INTERPRETED
@pytest.mark.parametrize(("place", "bad"), [(0, float("nan")), (1, float("nan")), (1, -float("inf"))])
def test_a_non_finite_loss_makes_the_gradient_nan(interpreter: list[str], place: int, bad: float) -> None:
    """In an output or a target. A step multiplies the gradient by 0 · loss + 1, so that it skips the update."""
    outputs, targets = pair = values(1, 2, *SIZE), values(1, 2, *SIZE, seed=1)
    pair[place][0, 1, 2, 3, 0] = bad
    outputs.requires_grad_()
    loss = pointwise.l1(outputs, targets)
    assert not loss.isfinite()
    loss.backward(loss.detach() * 0 + 1)
    assert interpreter == ["l1", "l1_backward"]
    assert outputs.grad is not None
    assert outputs.grad.isnan().all()


# --- without kernels -------------------------------------------------------------------------------------------------


def call_all(x: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
    kinds = [pointwise.bias_activation(x, bias, activation) for activation in ("leaky_relu", "relu", "tanh")]
    return *kinds, pointwise.bias_relu_cat(x, bias, x)[0], pointwise.l1(x, 2 * x)


def test_without_kernels_torch_operations_give_the_same(
    interpreter: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For tensors that are not channels-last, on the CPU or float64, under torch.compile, and without Triton."""
    x, bias = values(2, 6, *SIZE), values(6, seed=1)
    expected = call_all(x, bias)
    assert len(interpreter) == 5
    interpreter.clear()
    got = {"channels first": call_all(x.contiguous(), bias), "float64": call_all(x.double(), bias.double())}
    got["compiled"] = torch.compile(call_all, backend="aot_eager", fullgraph=True)(x, bias)
    with monkeypatch.context() as patch:
        patch.setattr(pointwise, "_on_gpu", lambda x: x.is_cuda)
        got["on the CPU"] = call_all(x, bias)
    monkeypatch.setitem(sys.modules, "triton", None)
    import_kernels_again()
    got["no triton"] = call_all(x, bias)
    assert interpreter == []
    for case, parts in got.items():
        for ours, theirs in zip(parts, expected, strict=True):
            assert torch.allclose(ours, theirs.to(ours.dtype), atol=1e-6), case
    # Under autocast the bias is float32 and the convolution half precision. The result is rounded once.
    y = pointwise.bias_activation(x.half(), torch.full((6,), 1e-4), "leaky_relu")
    assert torch.equal(y, F.leaky_relu(x.half().float() + 1e-4, 0.01).half())


def test_tensors_that_differ_in_layout_dtype_or_shape_use_torch_operations(interpreter: list[str]) -> None:
    x, targets = values(2, 6, *SIZE), values(2, 6, *SIZE, seed=2)
    for skip in (x.half(), x.contiguous()):
        expected = torch.cat([F.relu(x), skip], dim=1)
        assert torch.equal(pointwise.bias_relu_cat(x, torch.zeros(6), skip, torch.float16)[0], expected)
    assert interpreter == ["bias_activation"] * 2
    interpreter.clear()
    pointwise.l1(x, targets.contiguous())
    pointwise.l1(x, targets[:, :, :1].contiguous(memory_format=CHANNELS_LAST))
    pointwise.l1(x[:0], targets[:0])
    assert interpreter == []
    targets.requires_grad_()
    pointwise.l1(x, targets).backward()
    assert targets.grad is not None


# --- the network -----------------------------------------------------------------------------------------------------


def with_loss(fused: bool, device: str = "cpu", **options: Any) -> NetworkWithLoss:
    return NetworkWithLoss(small_network(device, fused=fused, **options), build_loss("l1", fused=fused))


@pytest.mark.parametrize("dtype", [None, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("scales", "options"),
    [
        (1, {}),
        (3, {}),
        (2, {"space_to_depth": ["down1", "down2", "up2", "last"]}),
        (2, {"form": torch.contiguous_format}),
    ],
    ids=str,
)
def test_a_fused_network_trains_like_the_plain_one(
    interpreter: list[str], dtype: torch.dtype | None, scales: int, options: dict[str, Any]
) -> None:
    """No kernel runs on channels-first tensors, which float16 convolutions return if oneDNN lacks float16."""
    plain, fused = (with_loss(kind, scales=scales, **options) for kind in (False, True))
    x, targets = (part.contiguous(memory_format=options.get("form", CHANNELS_LAST)) for part in batch(size=8))
    got = trained(fused, x, targets, dtype)
    layers = 2 * scales
    launches = ["bias_activation"] * layers + ["l1", "l1_backward"] + ["activation_backward"] * layers
    assert interpreter == ([] if "form" in options else launches)
    assert len(got) == 1 + 2 * layers
    assert_trains_like(got, plain, x, targets, dtype)


def test_the_kernel_before_the_last_layer_also_writes_its_precise_input(interpreter: list[str]) -> None:
    """Under bfloat16 autocast, where the last layer's result is not rounded to bfloat16; see test_layers.py."""
    network: Any = small_network(scales=2, fused=True)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        x, precise = network.before_last(batch(size=4)[0])
        assert interpreter == ["bias_activation"] * 3
        assert precise.dtype == torch.float32
        assert torch.equal(precise, x.float())


# --- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"space_to_depth": ["down1", "last"]}, {"space_to_depth": ["down1", "down2", "up3", "up2", "last"]}],
    ids=["plain", "space_to_depth", "dense"],
)
def test_a_fused_network_on_a_gpu(
    on_device: list[str], device: str, dtype: torch.dtype | None, options: dict[str, Any]
) -> None:
    plain, fused = (with_loss(kind, device, **options) for kind in (False, True))
    x, targets = batch(device)
    torch.cuda.set_sync_debug_mode("error")  # the host must not wait for the device
    try:
        got = trained(fused, x, targets, dtype)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert on_device == ["bias_activation"] * 6 + ["l1", "l1_backward"] + ["activation_backward"] * 6
    assert_trains_like(got, plain, x, targets, dtype)


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
    gradient = torch.zeros_like(y)
    gradient[-1] = 1.0
    y.backward(gradient)
    loss = pointwise.l1(y.detach().requires_grad_(), torch.zeros_like(y))
    assert on_device == ["bias_activation", "activation_backward", "l1"]
    assert x.grad is not None
    assert bias.grad is not None
    expected = torch.tensor(-1.0).tanh()
    assert torch.equal(y[-1].flatten().cpu(), expected.bfloat16().expand(64))
    assert torch.allclose(x.grad[-1].flatten().float().cpu(), 1 - expected**2, rtol=1e-2)
    assert not y[:-1].any()
    assert not x.grad[:-1].any()
    assert torch.allclose(bias.grad.cpu(), 1 - expected**2, rtol=1e-2)
    assert float(loss) == pytest.approx(-float(y[-1, 0]) / (2**25 + 3), rel=1e-3)
