"""Muon against torch's; orthogonalized matrices."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from utils.config.sections import OptimizerConfig
from utils.optim import muon
from utils.optim.muon import Muon, newton_schulz
from utils.optim.optimizers import build_optimizer, update

LR, DECAY, STEPS = 0.01, 0.1, 10
SHAPES = {"down": (6, 3, 2, 2, 2), "bias": (6,), "up": (9, 4), "square": (5, 5), "last": (6, 5, 2, 2, 2)}


def start() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def give_gradients(parameters: dict[str, nn.Parameter], number: int) -> None:
    generator = torch.Generator().manual_seed(100 + number)
    for name, shape in SHAPES.items():
        parameters[name].grad = torch.randn(shape, generator=generator)


def trained(**settings: Any) -> dict[str, nn.Parameter]:
    parameters = start()
    optimizer = build_optimizer(OptimizerConfig(name="muon", **settings), parameters.items(), LR)
    for number in range(STEPS):
        give_gradients(parameters, number)
        update(optimizer, torch.tensor(True))
    return parameters


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch 2.9 introduced Muon")
def test_muon_follows_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's knows matrices only; Adam trains the rest, the last weight included."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)  # it rounds to bfloat16 on a CPU too
    own, theirs = trained(weight_decay=DECAY), start()
    matrices = {name: nn.Parameter(theirs[name].detach().flatten(1)) for name in ("down", "up", "square")}
    settings = {"lr": LR, "weight_decay": DECAY, "adjust_lr_fn": "match_rms_adamw"}
    both = torch.optim.Muon(matrices.values(), **settings), torch.optim.Adam([theirs["bias"], theirs["last"]], lr=LR)
    for number in range(STEPS):
        give_gradients(theirs, number)
        for name, matrix in matrices.items():
            matrix.grad = theirs[name].grad.flatten(1)
        for optimizer in both:
            optimizer.step()
    for name, expected in {**theirs, **matrices}.items():
        torch.testing.assert_close(own[name].flatten(), expected.flatten(), rtol=0, atol=1e-5)
        assert float((own[name] - start()[name]).detach().abs().max()) > LR


@pytest.mark.parametrize(
    ("dtype", "shape"), list(itertools.product((torch.float32, torch.bfloat16), [(20, 50), (50, 20)]))
)
def test_newton_schulz_keeps_directions_and_brings_singular_values_near_one(dtype, shape) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    result = newton_schulz(1e-3 * matrix, dtype)
    assert result.dtype == dtype
    assert result.is_contiguous()
    values = torch.linalg.svdvals(result.float())
    assert float(values.min()) > 0.6
    assert float(values.max()) < 1.3
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    assert float((left @ right - result).norm() / (left @ right).norm()) < 0.35
    assert not newton_schulz(torch.zeros(shape), dtype).any()


def test_a_step_is_as_long_as_adams_usually_is() -> None:
    assert muon.ITERATIONS == 5
    parameters = start()
    optimizer = build_optimizer(OptimizerConfig(name="muon"), parameters.items(), LR)
    assert isinstance(optimizer, Muon)
    give_gradients(parameters, 0)
    update(optimizer, torch.tensor(True))
    for name in ("down", "up", "square"):
        size = float((parameters[name] - start()[name]).detach().square().mean().sqrt())
        assert 0.1 * LR < size < 0.3 * LR
