"""The calibration of a density: the filter finds what was done to a field, and three means are the target's."""

import math
from typing import Any

import pytest
import torch
from processes import run_ranks
from torch import Tensor
from torch.nn import functional as F

from networks.calibration import Calibration, CalibrationFit, corrected, shells
from utils.distributed.world import World

CPU, SCALE, CHANNEL, INNER = torch.device("cpu"), 14.0, 2, (..., *(slice(1, -1),) * 3)
FILTER = [0.4, 0.02, -0.06, 0.03, 0.01]  # weights of the shells, and a constant


def outputs(samples: int = 4) -> Tensor:
    fields = torch.randn(samples, 5, 9, 9, 9, generator=torch.Generator().manual_seed(1))
    return 0.1 + 0.6 * F.avg_pool3d(fields, 3, 1, 1) + 0.03 * fields  # waves of all lengths; a twelfth is dense gas


def pair(samples: int = 4, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """Outputs, and targets that are their corrected and multiplied densities; at the faces both are unusable."""
    given = outputs(samples)
    targets = torch.full_like(given, torch.inf)
    inner = corrected(given[:, CHANNEL], [*FILTER, 0.0, 0.0], SCALE) + torch.log(torch.tensor(factor)) / SCALE
    targets[:, CHANNEL, 1:-1, 1:-1, 1:-1] = inner
    return given, targets


def fitted(*batches: tuple[Tensor, Tensor], center: float = 0.0) -> Calibration:
    fit = CalibrationFit(CHANNEL, SCALE, center)
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


def test_the_fit_finds_the_filter_that_made_the_targets() -> None:
    """Fixed: predictions lacked a third of the power of the shortest waves."""
    calibration = fitted(*(pair(),) * 2)
    assert calibration.density_filter == pytest.approx([*FILTER, 0, 0], abs=1e-4)
    assert calibration.density_factor == pytest.approx(1, abs=1e-4)
    given, targets = pair()
    applied = calibration.apply(given[:, CHANNEL : CHANNEL + 1], SCALE)
    torch.testing.assert_close(applied[:, 0][INNER], targets[:, CHANNEL][INNER], atol=1e-4, rtol=0)
    assert applied.isfinite().all()
    assert applied.shape == (4, 1, 9, 9, 9)


def test_noisy_targets_have_their_mean_also_in_voids_and_clusters() -> None:
    """Fixed: voids or clusters got the mass that was missing elsewhere; clusters had almost twice the power."""
    given, targets = pair(factor=1.2)
    noise = torch.randn(targets.shape, generator=torch.Generator().manual_seed(2))
    targets = targets + 0.02 * noise * (1 + 3 * given)  # most in dense gas
    numbers, factor = fitted((given, targets))
    assert numbers is not None
    assert factor is not None
    *weights, constant, shift, power = numbers
    x, true = (fields[:, CHANNEL].double() for fields in (given, targets))
    change = constant + sum(weight * part for weight, part in zip(weights, shells(x), strict=True))
    dense = 1 / (1 + 100 / torch.exp(SCALE * x[INNER]))
    y = x[INNER] + (1 - dense) * change
    assert abs(power) > 0.01
    predicted = factor * torch.exp(SCALE * (y + dense * (shift + power * (y - math.log(100) / SCALE))))
    applied = Calibration(numbers, factor).apply(x[:, None], SCALE)[:, 0]
    torch.testing.assert_close(torch.exp(SCALE * applied[INNER]), predicted)
    moved = fitted((given - 2 / SCALE, targets - 2 / SCALE), center=2.0).apply(x[:, None] - 2 / SCALE, SCALE, 2.0)
    torch.testing.assert_close(moved[:, 0] + 2 / SCALE, applied, atol=1e-4, rtol=0)
    for exponent in (0, -1, 0.5):
        weight = torch.exp(exponent * SCALE * y)
        sums = [float((weight * density).sum()) for density in (predicted, torch.exp(SCALE * true[INNER]))]
        assert sums[0] == pytest.approx(sums[1], rel=1e-5)


def test_a_network_that_has_learned_little_has_no_power_but_the_mean() -> None:
    """Fixed: the power of a density that the targets hardly follow diverged, and a young checkpoint had no factor."""
    given, _ = pair()
    targets = 0.1 * torch.randn(given.shape, generator=torch.Generator().manual_seed(3))
    calibration = fitted((given, targets))
    assert calibration.density_filter is not None
    assert calibration.density_filter[5:] == [0, 0]
    predicted = torch.exp(SCALE * calibration.apply(given[:, CHANNEL : CHANNEL + 1].double(), SCALE)[:, 0][INNER])
    true = torch.exp(SCALE * targets[:, CHANNEL][INNER].double())
    assert float(predicted.mean()) == pytest.approx(float(true.mean()), rel=1e-5)


def test_targets_that_are_not_plausible_have_no_calibration() -> None:
    """Fixed: of targets in other units the factor was infinite, and predictions were multiplied by it."""
    given, targets = pair()
    for unusable in (torch.inf, -torch.inf, torch.nan):
        broken = targets.clone()
        broken[0, CHANNEL, 4, 4, 4] = unusable
        assert fitted((given, broken)) == Calibration()
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
