"""Small networks, batches and comparisons with float64 for the tests of fused kernels."""

import contextlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from networks import build_loss, build_network, initialize
from networks.losses import NetworkWithLoss
from networks.ops import HOPPER, TORCH, plan, reference

CHANNELS_LAST = torch.channels_last_3d
# Allowed error in addition to that of torch's operations, which may be exact by chance: half a rounding step.
SLACK = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}
RANGES = [[2.0, 4.0], [0.1, 0.3], [70.0, 70.0]]  # of conditions; the last one is constant
CONDITIONS = torch.tensor([[2.0, 0.3, 70.0], [3.5, 0.15, 60.0]])


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, device: str = "cpu") -> Tensor:
    """Normal values of `dtype`, in channels_last_3d memory if they have five axes."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)
    return x.contiguous(memory_format=CHANNELS_LAST) if x.dim() == 5 else x


def results(
    function: Callable[..., Any], inputs: list[Tensor], upstream: Sequence[Tensor], dtype: Any = None
) -> list[Tensor]:
    """The function's outputs and the gradients of its inputs, all computed in `dtype` if given."""
    inputs = [x.detach().to(dtype).requires_grad_() for x in inputs]
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    given = [gradient.to(y.dtype) for y, gradient in zip(outputs, upstream, strict=True)]
    return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, inputs, given)]


def layer_results(layer: nn.Module, x: Tensor, *others: Tensor) -> list[Tensor]:
    """The layer's (first) output and the gradients of its first input and parameters."""
    x = x.detach().requires_grad_()
    y = layer(x, *others)
    y = y[0] if isinstance(y, tuple) else y
    upstream = values(*y.shape, seed=1, device=str(x.device)).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], upstream)]


def assert_like_torch(layer: Any, dtype: torch.dtype, x: Tensor, *others: Tensor) -> list[Tensor]:
    """`layer_results` of Hopper's kernels, repeated and compared with torch in float64; changes the layer to that."""
    layer.operation, layer.dtype = HOPPER, dtype
    with torch.autocast(x.device.type, dtype):
        got, again = (layer_results(layer, x, *others) for _ in range(2))
    assert all(torch.equal(*pair) for pair in zip(got, again, strict=True))
    layer.operation = TORCH
    exact = layer_results(layer.double(), x.double(), *(part.double() for part in others))
    for ours, theirs in zip(got, exact, strict=True):
        error = float((ours.double() - theirs).norm() / theirs.norm())
        is_precise = dtype == torch.float16 or (ours is got[0] and ours.dtype == torch.float32)
        assert error < (6e-4 if is_precise else 5e-3), error
    return got


def assert_close(got: Tensor, expected: Tensor, error: float = 1e-6) -> None:
    assert got.shape == expected.shape
    assert float((got.double() - expected).abs().max()) < error * float(expected.abs().max())


def modulated(network: nn.Module) -> nn.Module:
    """The network, conditioned, with random weights in place of the film's zeros."""
    torch.manual_seed(1)  # of the embedding
    network.condition_on(RANGES)  # type: ignore[operator]
    generator = torch.Generator().manual_seed(0)  # float16 rounds no activation across zero
    with torch.no_grad():
        for parameter in network.get_submodule("film.layers").parameters():
            parameter.normal_(0.0, 0.2, generator=generator)
    return network


def with_loss(device: str = "cpu", conditioned: bool = False, **options: Any) -> NetworkWithLoss:
    """A U-Net and L1, always with the same weights, in channels_last_3d."""
    network = build_network("unet", **{"width": 8, "scales": 3, **options})
    initialize(network, torch.Generator().manual_seed(0), scale=0.1, bias=0.05)
    network = modulated(network) if conditioned else network
    return NetworkWithLoss(network.to(device, memory_format=CHANNELS_LAST), build_loss("l1"))


def planned(module: NetworkWithLoss, kernels: str, side: int, dtype: torch.dtype | None) -> NetworkWithLoss:
    """The module with the operations of a GPU for `kernels`; the interpreter runs them on a CPU."""
    setting = plan.Setting(kernels, side, dtype or torch.float32, torch.device("cuda"))
    plan.apply(module.network, plan.make(module.network, setting, module.loss), setting.dtype, module.loss)
    return module


def batch(device: str = "cpu", size: int = 16) -> list[Tensor]:
    """Inputs, and targets outside the network's range, so that rounding changes no sign in the loss's gradient."""
    inputs, targets = (values(2, c, *(size,) * 3, seed=seed, device=device) for seed, c in enumerate((4, 5)))
    return [inputs, 2 * targets.sign()]


class Trained(NamedTuple):
    """The loss and the gradients of all parameters; the positive activations, in the order of the forward pass."""

    values: list[Tensor]
    positive: list[Tensor]


def trained(module: nn.Module, batch: Sequence[Tensor], dtype: torch.dtype | None) -> Trained:
    """One pass, its gradients scaled as by a gradient scaler; `dtype` is that of autocast."""
    network: Any = module.network
    positive = []

    def record(layer: Any, inputs: Any, results: Any) -> None:
        y = results[0] if isinstance(results, tuple) else results
        positive.append(y[:, : layer.out_channels].detach() > 0)

    with contextlib.ExitStack() as stack:
        for layer in network._layers().values():
            stack.callback(layer.register_forward_hook(record).remove)
        stack.enter_context(torch.autocast(batch[0].device.type, dtype=dtype, enabled=dtype is not None))
        loss = module(*batch)
    return Trained([loss.detach(), *torch.autograd.grad(1024 * loss, list(module.parameters()))], positive)


def exact(plain: nn.Module, batch: Sequence[Tensor], like: Trained) -> list[Tensor]:
    """The values of `trained` in float64, with the positive activations of `like`; changes the module to that."""
    masks = iter(like.positive)

    def leaky_relu(x: Tensor, slope: float = 0.0) -> Tensor:
        return torch.where(next(masks), x, slope * x)

    functions = {**vars(F), "relu": leaky_relu, "leaky_relu": leaky_relu}
    with mock.patch.object(reference, "F", SimpleNamespace(**functions)):
        return trained(plain.double(), [part.double() for part in batch], None).values


def assert_trains_like(got: Trained, plain: nn.Module, batch: list[Tensor], dtype: torch.dtype | None) -> None:
    """No result of `trained` has a larger error than the plain module's plus rounding; changes that to float64."""
    usual = trained(plain, batch, dtype)
    references = [exact(plain, batch, result) for result in (got, usual)]
    for ours, theirs, *expected in zip(got.values, usual.values, *references, strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        error, size = (float((x.double() - y).norm()) for x, y in zip((ours, theirs), expected, strict=True))
        assert error <= 1.2 * size + 2 * SLACK[dtype or torch.float32] * float(expected[0].norm())
