"""SOAP against pytorch_optimizer's; eigenbases that are renewed after the same updates on any number of ranks."""

import copy
from typing import Any

import pytest
import scipy.fft
import torch
from fake_gpu import HostWaits, Trace
from torch import nn
from torch.nn import functional as F

from utils.config.sections import OptimizerConfig
from utils.optim import soap
from utils.optim.optimizers import build_optimizer, load_state, saved_state, tensors_of, update
from utils.optim.soap import Soap

LR, YES, NO = 0.01, torch.tensor(True), torch.tensor(False)

# down.bias after twelve steps, of pytorch_optimizer 4.1.0, by max_precondition_size: with kernels' cells merged, and
# without bases for a network whose parameters are the coefficients of its kernels in their discrete cosine transform.
BIASES = {
    1000: [-0.16846439, -0.17049482, 0.11566942, -0.09114083, 0.00546226, -0.05315618],
    100: [-0.15050113, -0.15177079, 0.16894217, -0.04026517, 0.00530769, -0.05368753],
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
    return build_optimizer(options(**changes), dict(network.named_parameters()), LR)


def train(network: nn.Module, optimizer: torch.optim.Optimizer, steps: range, finite: torch.Tensor = YES) -> None:
    for number in steps:
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(4, 3, 4, 4, 4, generator=generator, dtype=network.down.weight.dtype)
        network.zero_grad()
        (network(x) - torch.cat([x, x[:, :2] ** 2], 1)).square().mean().backward()
        update(optimizer, finite)


@pytest.mark.parametrize("limit", BIASES)
def test_soap_ends_where_pytorch_optimizers_does(limit: int) -> None:
    """After the renewals 1, 4, 7 and 10, although the library keeps the first moment unrotated."""
    network = SmallNetwork().double()
    optimizer = build(network, eps=1e-15, max_precondition_size=limit)
    train(network, optimizer, range(12))
    expected = torch.tensor(BIASES[limit], dtype=torch.float64)
    # The library's decompositions are in float32.
    torch.testing.assert_close(network.down.bias.detach(), expected, rtol=0, atol=1e-6)


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
    with pytest.raises(
        ValueError, match=r"^its SOAP learned other bases, .*max_precondition_size; --init_from reads it$"
    ):
        load_state(build(SmallNetwork(), max_precondition_size=150), saved_state(saved))
    load_state(build(SmallNetwork(), precondition_frequency=7), saved_state(saved))


def test_bases_are_renewed_by_steps_that_the_host_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first update on; a skipped update counts as a step. A resumed run continues the count."""
    renewed: list[tuple[int, bool]] = []
    monkeypatch.setattr(Soap, "_renew_bases", lambda self, first: renewed.append((number, first)))
    network = SmallNetwork()
    optimizer = build(network, precondition_frequency=4)
    for number in range(12):
        train(network, optimizer, range(number, number + 1), NO if number in (0, 1, 4) else YES)
        if number == 7:
            saved = copy.deepcopy(saved_state(optimizer))
            optimizer = build(network, precondition_frequency=4)
            load_state(optimizer, saved)
    assert renewed == [(2, True), (6, False), (10, False)]


def test_a_renewal_does_not_wait_for_the_device() -> None:
    network = SmallNetwork()
    optimizer = build(network)
    train(network, optimizer, range(1))
    with Trace():
        optimizer.renew()
        optimizer._renew_bases(first=False)
        with pytest.raises(HostWaits):
            optimizer._renew_bases(first=True)


def test_products_along_each_side_are_those_of_the_definition() -> None:
    x = torch.randn(6, 5, 8, dtype=torch.float64)
    bases = {number: torch.randn(size, size, dtype=torch.float64) for number, size in enumerate(x.shape)}
    torch.testing.assert_close(soap.rotate(x, bases), torch.einsum("abc,ai,bj,ck->ijk", x, *bases.values()))
    torch.testing.assert_close(soap.rotate(x[0], {0: bases[1]}), bases[1].mT @ x[0])
    for number, equation in enumerate(("abc,ibc->ai", "abc,aic->bi", "abc,abi->ci")):
        torch.testing.assert_close(soap.outer_product(x, number), torch.einsum(equation, x, x))


def test_large_weights_have_no_learned_bases() -> None:
    assert soap.learned_sides((6, 5, 8), options(max_precondition_size=240)) == [0, 1, 2]
    assert soap.learned_sides((6, 5, 8), options(max_precondition_size=239)) == []
    assert soap.learned_sides((1024, 1, 64), options()) == [2]  # one side is too long, another one value
    assert soap.learned_sides((513, 512), options()) == [1]


@pytest.mark.parametrize("kernel", [(4, 4, 4), (3, 1, 2)], ids=str)
def test_the_basis_of_a_kernel_is_scipys_cosine_transform(kernel: tuple[int, ...]) -> None:
    x = torch.randn(kernel, dtype=torch.float64)
    expected = torch.from_numpy(scipy.fft.dctn(x.numpy(), norm="ortho"))
    torch.testing.assert_close(x.flatten() @ soap.cosine_basis(kernel, x), expected.flatten())


def test_renewals_are_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """In TF32 they turned the vectors of small eigenvalues by any angle."""
    matmul, seen = torch.backends.cuda.matmul, list[bool]()
    monkeypatch.setattr(Soap, "_renew_bases", lambda self, first: seen.append(matmul.allow_tf32))
    network = SmallNetwork()
    optimizer, before = build(network), matmul.allow_tf32
    matmul.allow_tf32 = True
    try:
        train(network, optimizer, range(4))
        seen.append(matmul.allow_tf32)
    finally:
        matmul.allow_tf32 = before
    assert seen == [False, False, True]


def test_all_ranks_have_the_bases_of_rank_0_from_one_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the decompositions of the others had other bits."""
    networks, sent, exact = [SmallNetwork(), SmallNetwork()], list[torch.Tensor](), soap.next_basis
    optimizers = list(map(build, networks))
    monkeypatch.setattr(torch.distributed, "broadcast", lambda tensor, src: sent.append(tensor.clone()))
    optimizers[0].is_replicated = optimizers[1].is_replicated = True
    train(networks[0], optimizers[0], range(8))
    assert len(sent) == 3
    monkeypatch.setattr(torch.distributed, "broadcast", lambda tensor, src: tensor.copy_(sent.pop(0)))
    monkeypatch.setattr(soap, "next_basis", lambda *matrices: tuple(-part for part in exact(*matrices)))
    train(networks[1], optimizers[1], range(8))
    for tensors in zip(*(network.parameters() for network in networks), strict=True):
        assert torch.equal(*tensors)
    for tensors in zip(*map(tensors_of, optimizers), strict=True):
        assert torch.equal(*tensors)
