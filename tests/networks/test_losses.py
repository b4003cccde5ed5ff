"""The loss against values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from networks import build_loss


def fields(*channels: float) -> torch.Tensor:
    """[1, C, 1, 1, 2]: each channel's value, twice."""
    return torch.tensor(channels).view(1, -1, 1, 1, 1).expand(1, len(channels), 1, 1, 2)


def test_l1_is_the_mean_absolute_difference() -> None:
    loss = build_loss("l1")(fields(0.1, 0.2, -0.3), fields(0.0, 0.4, 0.3))
    assert float(loss) == pytest.approx((0.1 + 0.2 + 0.6) / 3)


def test_density_term_takes_channel_0_alone_and_undoes_the_logarithm() -> None:
    loss = build_loss("l1", lambda_rho=0.5)(fields(0.1, 0.2), fields(0.0, 0.2))
    assert float(loss) == pytest.approx(0.1 / 2 + 0.5 * (math.exp(1.4) - 1.0), rel=1e-6)


def test_half_precision_outputs_are_compared_in_full_precision() -> None:
    loss = build_loss("l1")(fields(1.0).bfloat16(), fields(0.999))
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(0.001, rel=1e-3)


def test_a_fused_loss_is_the_same_with_and_without_the_density_term() -> None:
    outputs, targets = fields(0.1, 0.2, -0.3), fields(0.0, 0.4, 0.3)
    for options in ({}, {"lambda_rho": 0.5}):
        plain, fused = (build_loss("l1", fused=fused, **options) for fused in (False, True))
        assert torch.equal(fused(outputs, targets), plain(outputs, targets))


def test_double_precision_stays() -> None:
    assert build_loss("l1")(fields(1.0).double(), fields(0.5).double()).dtype == torch.float64
