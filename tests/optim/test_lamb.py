"""LAMB against the paper's algorithm 2 in numpy."""

import numpy as np
import pytest
import torch
from devices import DEVICES
from torch import nn

from utils.config.sections import OptimizerConfig
from utils.optim.adam_by_weight import Lamb

BETAS, EPS, DECAY = (0.9, 0.99), 1e-6, 0.05
SHAPES: dict[str, tuple[int, ...]] = {
    "conv.weight": (6, 4, 3, 3, 3),
    "conv.bias": (6,),
    "norm.bias": (6, 1, 1),  # only its name says that it is a bias
    "dense.weight": (7, 5),
    "zero.weight": (3, 2),  # starts at 0
    "idle.weight": (2, 3),  # its gradient is always 0
    "temperature": (),
}
WEIGHTS = {"conv.weight", "dense.weight", "zero.weight", "idle.weight"}


def drawn(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}


def start(device: str = "cpu") -> dict[str, nn.Parameter]:
    return {name: nn.Parameter((value * (name != "zero.weight")).to(device)) for name, value in drawn(0).items()}


def gradients(number: int) -> dict[str, torch.Tensor]:
    sizes = {"conv.weight": 1e3, "dense.weight": 1e-3, "idle.weight": 0.0}
    return {name: value * sizes.get(name, 1.0) for name, value in drawn(100 + number).items()}


def lr(number: int) -> float:
    return 0.02 / (1 + 0.1 * number)


def algorithm_2(name: str, decay: float) -> np.ndarray:
    """You et al. 2020, line by line; φ is the identity, and if a norm is 0 the weight moves as in Adam."""
    x = start()[name].detach().numpy().copy()
    m, v = np.zeros_like(x), np.zeros_like(x)
    for t in range(1, 51):
        g = gradients(t - 1)[name].numpy()
        m = BETAS[0] * m + (1 - BETAS[0]) * g
        v = BETAS[1] * v + (1 - BETAS[1]) * g * g
        r = m / (1 - BETAS[0] ** t) / (np.sqrt(v / (1 - BETAS[1] ** t)) + EPS)
        step, ratio = r, 1.0
        if name in WEIGHTS:
            step = r + decay * x
            lengths = np.sqrt(np.sum(x * x)), np.sqrt(np.sum(step * step))
            ratio = lengths[0] / lengths[1] if min(lengths) > 0 else 1.0
        x = x - lr(t - 1) * ratio * step
    return x


@pytest.mark.parametrize("decay", [0.0, DECAY])
@DEVICES
def test_lamb_is_algorithm_2_of_the_paper(decay: float, device: str) -> None:
    parameters = start(device)
    options = OptimizerConfig(name="lamb", betas=list(BETAS), eps=EPS, weight_decay=decay)
    optimizer = Lamb(options, parameters, lr=0.02)
    for number in range(50):
        for group in optimizer.param_groups:
            group["lr"] = lr(number)
        for name, gradient in gradients(number).items():
            parameters[name].grad = gradient.to(device)
        optimizer.step()
    for name, parameter in parameters.items():
        updated = parameter.detach().cpu()
        np.testing.assert_allclose(updated.numpy(), algorithm_2(name, decay), rtol=0, atol=1e-10)
        assert torch.equal(updated, start()[name]) is (name == "idle.weight" and decay == 0), name
