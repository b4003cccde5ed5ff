"""The calibration of a density: the filter finds what was done to a field, and the mean density is the target's."""

import operator
from typing import Any

import numpy as np
import pytest
import torch
from processes import run_ranks
from torch import Tensor
from torch.nn import functional as F

from networks.calibration import Calibration, CalibrationFit, filtered, shells
from utils.distributed.world import World

CPU, SCALE, CHANNEL = torch.device("cpu"), 14.0, 2
WEIGHTS = [1.4, 0.02, -0.06, 0.03, 0.01]  # of the shells, and a constant


def outputs(samples: int = 4) -> Tensor:
    fields = torch.randn(samples, 5, 9, 9, 9, generator=torch.Generator().manual_seed(1))
    return 0.1 * F.avg_pool3d(fields, 3, 1, 1) + 0.02 * fields  # waves of all lengths


def pair(samples: int = 4, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """Outputs, and targets that are their filtered and multiplied densities; at the faces both are unusable."""
    given = outputs(samples)
    targets = torch.full_like(given, torch.inf)
    inner = filtered(given[:, CHANNEL], WEIGHTS) + torch.log(torch.tensor(factor)) / SCALE
    targets[:, CHANNEL, 1:-1, 1:-1, 1:-1] = inner
    return given, targets


def fitted(*batches: tuple[Tensor, Tensor]) -> Calibration:
    fit = CalibrationFit(CHANNEL, SCALE)
    for batch in batches:
        copies = [fields.clone() for fields in batch]
        fit.add(*copies)
        for memory in copies:  # loaders and graphs use it again
            memory.fill_(torch.nan)
    return fit.result(lambda value: value, CPU)


def test_the_shells_are_a_cell_and_its_6_12_and_8_neighbors() -> None:
    field = torch.randn(2, 5, 4, 6, dtype=torch.float64)
    steps = torch.tensor([(x, y, z) for x in range(3) for y in range(3) for z in range(3)])
    expected = torch.zeros(4, 2, 3, 2, 4, dtype=torch.float64)
    for x, y, z in steps.tolist():
        expected[sum(step != 1 for step in (x, y, z))] += field[:, x : x + 3, y : y + 2, z : z + 4]
    torch.testing.assert_close(torch.stack(shells(field)), expected)


def test_the_fit_finds_the_filter_and_the_mean_that_made_the_targets() -> None:
    """Fixed: predictions lacked a third of the power of the shortest waves, and mass."""
    calibration = fitted(*(pair(factor=1.2),) * 2)
    assert calibration.density_filter is not None
    # A factor of all cells is part of the constant.
    constant = WEIGHTS[-1] + float(torch.log(torch.tensor(1.2))) / SCALE
    assert calibration.density_filter == pytest.approx([*WEIGHTS[:-1], constant], abs=1e-4)
    assert calibration.density_factor == pytest.approx(1.0, abs=1e-4)
    given, targets = pair(factor=1.2)
    applied = calibration.apply(given[:, CHANNEL : CHANNEL + 1], SCALE)
    inner = (..., *(slice(1, -1),) * 3)
    torch.testing.assert_close(applied[:, 0][inner], targets[:, CHANNEL][inner], atol=1e-4, rtol=0)
    assert applied.isfinite().all()
    assert applied.shape == (4, 1, 9, 9, 9)


def test_noisy_targets_have_the_mean_and_the_mean_relative_to_the_filtered_density() -> None:
    """Fixed: all densities were multiplied by the mass that was missing in dense gas, and voids were too dense."""
    given, targets = pair()
    noise = torch.randn(targets.shape, generator=torch.Generator().manual_seed(2))
    targets = targets + 0.05 * noise * (1 + 3 * given)  # most in dense gas
    weights, factor = fitted((given, targets))
    assert weights is not None
    assert factor is not None
    parts = [*shells(given[:, CHANNEL].double()), torch.ones(4, 7, 7, 7).double()]
    true = targets[:, CHANNEL, 1:-1, 1:-1, 1:-1].double()
    squares, *_ = np.linalg.lstsq(torch.stack(parts, dim=-1).reshape(-1, 5), true.flatten(), rcond=None)
    power = weights[0] / squares[0]
    assert power > 1.02
    assert weights == pytest.approx(power * squares, rel=1e-4)
    filtered_density = torch.exp(SCALE * sum(map(operator.mul, squares, parts)))
    difference = factor * filtered_density**power - torch.exp(SCALE * true)
    assert float(difference.mean()) == pytest.approx(0, abs=1e-5)
    assert float((difference / filtered_density).mean()) == pytest.approx(0, abs=1e-5)


def test_a_network_that_has_learned_little_has_no_power_but_the_mean() -> None:
    """Fixed: the power of a density that the targets hardly follow diverged, and a young checkpoint had no factor."""
    given, _ = pair()
    targets = 0.1 * torch.randn(given.shape, generator=torch.Generator().manual_seed(3))
    weights, factor = fitted((given, targets))
    assert weights is not None
    assert factor is not None
    predicted = factor * torch.exp(SCALE * filtered(given[:, CHANNEL].double(), weights)).mean()
    true = targets[:, CHANNEL, 1:-1, 1:-1, 1:-1].double()
    assert float(predicted) == pytest.approx(float(torch.exp(SCALE * true).mean()), rel=1e-5)
    assert max(map(abs, weights[:-1])) < 0.5


def test_targets_that_are_not_plausible_have_no_calibration() -> None:
    """Fixed: of targets in other units the factor was infinite, and predictions were multiplied by it."""
    given, targets = pair()
    for unusable in (torch.inf, -torch.inf, torch.nan):
        broken = targets.clone()
        broken[0, CHANNEL, 4, 4, 4] = unusable
        assert fitted((given, broken)) == Calibration()
    assert fitted((given, targets + 5.0)).density_factor == pytest.approx(1, abs=1e-3), "a constant is no reason"
    spike = targets.clone()
    spike[0, CHANNEL, 4, 4, 4] = 60.0  # exp(840) overflows
    assert fitted((given, spike)) == Calibration()
    assert fitted() == Calibration()
    x = torch.rand(1, 1, 4, 4, 4)
    torch.testing.assert_close(Calibration().apply(x, SCALE), x)
    constant = fitted((torch.full_like(given, 0.5), targets))
    assert constant.density_factor is not None, "an untrained network may predict the same everywhere"


def on_rank(world: World) -> Any:
    """The second of two ranks has one batch more than the first; both have the calibration of all four."""
    fit = CalibrationFit(CHANNEL, SCALE)
    fit.add(*pair(1))
    fit.reset()
    for part in (slice(0, 1),) if world.rank == 0 else (slice(1, 2), slice(2, 4)):
        fit.add(*(fields[part] for fields in pair()))
    return fit.result(world.sum, world.device)


def test_ranks_fit_the_same_calibration_to_all_batches() -> None:
    first, second = run_ranks(on_rank, 2)
    assert first == second
    expected = fitted(pair())
    assert first.density_filter == pytest.approx(expected.density_filter, abs=1e-5)
    assert first.density_factor == pytest.approx(expected.density_factor, abs=1e-6)
