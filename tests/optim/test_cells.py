"""The kernel of large weights against what it computes in other ways, in Triton's interpreter: SOAP and Adam."""

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import ON_GPU
from torch import nn
from triton_compile import ARCHITECTURES, compile_kernel
from triton_interpreter import interpreted

from networks.layers import Down
from networks.ops import HOPPER
from networks.ops.plan import halves
from utils.config.sections import OptimizerConfig
from utils.optim import soap
from utils.optim.optimizers import build_optimizer, update

OPTIONS = OptimizerConfig(name="soap", weight_decay=0.1, betas=[0.9, 0.95], max_precondition_size=100)
SKIPPED = 3  # the number of a step


def train(network: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for parameter in network.parameters():
        values = torch.randn(parameter.shape, generator=generator).to(parameter.device)
        parameter.grad = values.contiguous(memory_format=torch.channels_last_3d)
    update(optimizer, torch.tensor(number != SKIPPED, device=parameter.device))


def small_network() -> nn.Module:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv3d(66, 3, 4, bias=False), nn.Conv3d(5, 2, 4, bias=False))
    return network.to(memory_format=torch.channels_last_3d)


@contextlib.contextmanager
def by_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with interpreted(monkeypatch):
        cells = importlib.import_module("utils.optim.cells")
        function = importlib.import_module("triton.runtime.interpreter").InterpretedFunction
        monkeypatch.setattr(cells, "adam_of_cells", function(cells.adam_of_cells.fn))
        monkeypatch.setattr(soap, "has_kernel", cells.fits)
        yield


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
@pytest.mark.parametrize("name", ["soap", "adam"])
def test_the_kernel_computes_what_the_products_do(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or torch's fused Adam. No bit changes in a step that is skipped."""
    expected, network = small_network().to(device), small_network().to(device)
    options = OPTIONS if name == "soap" else OptimizerConfig(name=name)
    with monkeypatch.context() as patch:
        patch.setattr(soap, "has_kernel", lambda weight: False)
        products = build_optimizer(options, dict(expected.named_parameters()), 0.01)
    with by_kernel(monkeypatch) if device == "cpu" else contextlib.nullcontext():
        optimizer: Any = build_optimizer(options, dict(network.named_parameters()), 0.01)
        for weight in network.parameters() if name == "adam" else []:
            weight.half_copy = weight.half()
        assert name == "adam" or len(optimizer._by_kernel) == 2
        for number in range(6):
            before = [parameter.clone() for parameter in network.parameters()]
            train(expected, products, number)
            train(network, optimizer, number)
            unchanged = [torch.equal(*pair) for pair in zip(before, network.parameters(), strict=True)]
            assert unchanged == [number == SKIPPED or (number == 0 and name == "soap")] * 2
            weights: Any = [] if name == "soap" or number in (0, SKIPPED) else network.parameters()
            assert all(torch.equal(w.half_copy, w.half()) and w.half_version == w._version for w in weights)
    for other, parameter in zip(expected.parameters(), network.parameters(), strict=True):
        torch.testing.assert_close(parameter, other, rtol=1e-5, atol=1e-6)
        for name in ("exp_avg", "exp_avg_sq", "step"):
            torch.testing.assert_close(optimizer.state[parameter][name], products.state[other][name])


@pytest.mark.parametrize("kernel", [False, True])
def test_a_first_gradient_may_come_later_than_others(kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed: the weight became NaN, and all later updates were skipped."""
    network = small_network()
    with by_kernel(monkeypatch) if kernel else contextlib.nullcontext():
        optimizer = build_optimizer(OPTIONS, dict(network.named_parameters()), 0.01)
        for number in range(4):
            early, late = network.parameters()
            early.grad, late.grad = torch.ones_like(early), torch.ones_like(late) if number > 1 else None
            update(optimizer, torch.tensor(True))
    assert all(parameter.isfinite().all() for parameter in network.parameters())


def test_a_layer_uses_the_half_precision_weight_of_the_kernel_until_the_weight_changes(monkeypatch: Any) -> None:
    layer: Any = Down(5, 2).to(memory_format=torch.channels_last_3d)
    layer.operation, layer.dtype = HOPPER, torch.float16  # the interpreter truncates bfloat16
    first = halves([layer])[layer]
    assert halves([layer])[layer] is not first
    first = halves([layer])[layer]
    with by_kernel(monkeypatch):
        optimizer = build_optimizer(OPTIONS, {"weight": layer.weight}, 0.01)
        for _ in range(2):
            layer.weight.grad = torch.ones_like(layer.weight)
            update(optimizer, torch.tensor(True))
            assert halves([layer])[layer] is first
            assert torch.equal(first, layer.weight.half())
    with torch.no_grad():
        layer.weight += 1
    assert torch.equal(halves([layer])[layer], layer.weight.half())


@pytest.mark.parametrize("rotates", [True, False])
@ARCHITECTURES
def test_registers(rotates: bool, architecture: int, tmp_path: Path) -> None:
    """On a Hopper GPU two programs per multiprocessor. No spills anywhere."""
    cells = pytest.importorskip("utils.optim.cells")
    types = dict.fromkeys(("weight", "gradient", "first", "second", "basis", "lr", "step", "idle"), "*fp32")
    types |= {"half": "*bf16", "channels": "i32", **dict.fromkeys(("beta1", "beta2", "eps", "decay"), "fp32")}
    sizes = {"CELLS": cells.CELLS, "BLOCK": cells.BLOCK}
    constants = {**sizes, "HAS_HALF": True, "ROTATES": rotates, "PRECISION": "tf32"}
    options = {"num_warps": cells.WARPS, "enable_fp_fusion": False}
    result = compile_kernel(cells.adam_of_cells, types, constants, tmp_path, architecture, **options)
    assert (result.registers <= (128 if architecture == 90 else 255), result.stack) == (True, 0), result[:3]
