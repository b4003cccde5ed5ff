"""SOAP against pytorch_optimizer's; eigenbases that are renewed after the same updates on any number of ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from utils.config import Config
from utils.config.sections import NetworkConfig, OptimizerConfig
from utils.optim import soap
from utils.optim.optimizers import build_optimizer, load_state, saved_state, state_bytes, update
from utils.optim.soap import Soap, rotate, weight_sides
from utils.profiling.memory import training_memory
from utils.steps.build import network as build_model

SMALL = {"network": NetworkConfig(width=4, scales=2)}
LR, YES, NO = 0.01, torch.tensor(True), torch.tensor(False)


BIASES = {
    "down.bias": [-0.16846438, -0.17049481, 0.11566942, -0.09114083, 0.00546226, -0.05315618],
    "up.bias": [0.01999406, -0.00821929, 0.00165040, 0.02091681, -0.01196360],
}


class SmallNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.down, self.up = nn.Conv3d(3, 6, 2, stride=2), nn.ConvTranspose3d(6, 5, 2, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(F.leaky_relu(self.down(x)))


def options(**changes: Any) -> OptimizerConfig:
    return OptimizerConfig(**{"name": "soap", "precondition_frequency": 3, **changes})


def build(network: nn.Module, **changes: Any) -> Any:
    return build_optimizer(options(**changes), network.named_parameters(), LR)


def train(network: nn.Module, optimizer: torch.optim.Optimizer, steps: range, finite: torch.Tensor = YES) -> None:
    for number in steps:
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(4, 3, 4, 4, 4, generator=generator, dtype=network.down.weight.dtype)
        network.zero_grad()
        (network(x) - torch.cat([x, x[:, :2] ** 2], 1)).square().mean().backward()
        update(optimizer, finite)


# The side of all others merged has no basis: rounding would decide on the vectors in the null space of its statistics.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("merge_dims", "limit"), [("none", 1000), ("none", 4), ("kernel", 1000), ("kernel", 5), ("rest", 10)]
)
def test_soap_follows_pytorch_optimizers(merge_dims: str, limit: int) -> None:
    """Over several renewals, although the library keeps the first moment unrotated. It gets the weights as merged."""
    library = pytest.importorskip("pytorch_optimizer")
    network = SmallNetwork().double()
    copies = {name: nn.Parameter(weight.detach().clone()) for name, weight in network.named_parameters()}
    views = {name: weight.detach().view(weight_sides(weight.shape, merge_dims)) for name, weight in copies.items()}
    merged = {name: nn.Parameter(view) for name, view in views.items()}
    own = build(network, merge_dims=merge_dims, max_precondition_dim=limit, eps=1e-15)  # two conventions for eps
    settings = {"betas": (0.95, 0.95), "weight_decay": 0.0, "precondition_frequency": 3, "eps": 1e-15}
    theirs = library.SOAP(merged.values(), lr=LR, max_precondition_dim=limit, **settings)
    for number in range(12):
        train(network, own, range(number, number + 1))
        for name, parameter in network.named_parameters():
            merged[name].grad = parameter.grad.view(merged[name].shape).clone()
        theirs.step()
    for name, start in SmallNetwork().double().named_parameters():
        parameter = network.get_parameter(name)
        assert float((parameter - start).detach().abs().max()) > 5 * LR
        # The library's decompositions are in float32.
        torch.testing.assert_close(parameter, merged[name].view(parameter.shape), rtol=0, atol=1e-6)


def test_soap_ends_where_pytorch_optimizers_does() -> None:
    """The biases after twelve steps, as pytorch_optimizer 4.1.0 computes them."""
    network = SmallNetwork().double()
    train(network, build(network, eps=1e-15), range(12))
    for name, values in BIASES.items():
        expected = torch.tensor(values, dtype=torch.float64)
        torch.testing.assert_close(network.get_parameter(name).detach(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("merge_dims", ["none", "kernel", "rest"])
def test_a_renewal_changes_the_basis_of_the_first_moment_not_its_value(merge_dims: str) -> None:
    """Rotated back it is the mean of the gradients; the bases are orthonormal."""
    network = SmallNetwork().double()
    optimizer = build(network, merge_dims=merge_dims)
    weight = network.down.weight
    sides = weight_sides(weight.shape, merge_dims)
    statistics = [torch.zeros(size, size, dtype=weight.dtype) for size in sides]
    mean, bases = torch.zeros_like(weight), []
    for number in range(8):
        train(network, optimizer, range(number, number + 1))
        for side, expected in enumerate(statistics):
            unfolded = weight.grad.view(sides).movedim(side, 0).flatten(1)
            expected.lerp_(unfolded @ unfolded.T, 0.05)
        if number:
            mean.lerp_(weight.grad, 0.05)
        state = optimizer.state[weight]
        own = {int(name[-1]): value for name, value in state.items() if name.startswith("basis")}
        bases.append(own[0].clone())
        back = rotate(state["exp_avg"], sides, {side: basis.T for side, basis in own.items()})
        torch.testing.assert_close(back.view_as(mean), mean)
        for side, basis in own.items():
            torch.testing.assert_close(state[f"statistics_{side}"], statistics[side])
            torch.testing.assert_close(basis.T @ basis, torch.eye(len(basis), dtype=basis.dtype))
    changes = [number for number in range(1, 8) if not torch.equal(bases[number], bases[number - 1])]
    assert changes == [3, 6], "after the updates 1, 4 and 7"


def test_soap_is_independent_of_the_memory_format() -> None:
    plain, last = SmallNetwork().double(), SmallNetwork().double().to(memory_format=torch.channels_last_3d)
    first, second = build(plain), build(last)
    train(plain, first, range(2))
    last.load_state_dict(plain.state_dict())
    load_state(second, copy.deepcopy(saved_state(first)))
    for network, optimizer in ((plain, first), (last, second)):
        train(network, optimizer, range(2, 8))
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(last.get_parameter(name), parameter)


def test_a_state_with_other_bases_is_refused() -> None:
    network = SmallNetwork()
    saved = build(network)
    train(network, saved, range(2))
    for changes in ({"merge_dims": "rest"}, {"max_precondition_dim": 5}):
        with pytest.raises(ValueError, match=r"^its optimizer.merge_dims or optimizer.max_precondition_dim is not"):
            load_state(build(SmallNetwork(), **changes), saved_state(saved))
    load_state(build(SmallNetwork(), precondition_frequency=7), saved_state(saved))


def test_the_host_reads_the_number_of_updates_once_per_renewal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A skipped update postpones the renewal: the host then reads again in the next step."""
    reads, plain = [], Soap._read_updates
    monkeypatch.setattr(Soap, "_read_updates", lambda self: (reads.append(number), plain(self)))
    network = SmallNetwork()
    optimizer = build(network, precondition_frequency=4)
    for number in range(14):
        train(network, optimizer, range(number, number + 1), NO if number == 6 else YES)
    assert reads == [0, 4, 8, 9, 13]


def test_the_state_has_the_size_that_the_preflight_states() -> None:
    network = SmallNetwork()
    optimizer = build(network)
    train(network, optimizer, range(1))
    with torch.device("meta"):
        meta, unet = SmallNetwork(), build_model(Config(data_size=8, **SMALL))
    size = sum(value.nbytes for state in optimizer.state.values() for value in state.values())
    assert state_bytes(options(), meta.named_parameters()) == size
    memory = training_memory(Config(data_size=8, optimizer=options(), **SMALL).for_world(1))
    assert memory.state == 8 * memory.parameters + state_bytes(options(), unet.named_parameters())


@pytest.mark.parametrize(("requested", "allowed"), [(False, True), (True, True), (True, False)])
def test_products_are_in_float32_unless_tf32_is_requested(monkeypatch: Any, requested: bool, allowed: bool) -> None:
    """In updates and renewals. The recipe was found in float32; the rest of the process keeps its setting."""
    matmul, seen = torch.backends.cuda.matmul, set()

    def recording(name: str, function: Any) -> Any:
        return lambda *arguments: (seen.add((name, matmul.allow_tf32)), function(*arguments))[1]

    names = ("rotate", "outer_product", "eigenbasis", "next_basis")
    for name in names:
        monkeypatch.setattr(soap, name, recording(name, getattr(soap, name)))
    network, before = SmallNetwork(), matmul.allow_tf32
    matmul.allow_tf32 = allowed
    try:
        train(network, build(network, tf32=requested), range(8))
        assert matmul.allow_tf32 is allowed
    finally:
        matmul.allow_tf32 = before
    assert seen == {(name, requested and allowed) for name in names}
