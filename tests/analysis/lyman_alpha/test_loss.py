"""The loss of the Lyman-alpha flux: its value, its gradient, and what it needs of the files."""

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from sample_results import SIMULATION
from torch.nn.functional import l1_loss
from trainings import YAML
from volume_files import write_volume

from analysis.lyman_alpha.flux import Universe, absorbers, optical_depth
from analysis.lyman_alpha.loss import FluxLoss, sum_of_profiles
from utils import config as configs
from utils.config import Config
from utils.config.channels import known_channels
from utils.errors import UserError
from utils.steps import build
from utils.volumes.attributes import CELL
from utils.volumes.opened import Volumes

CHANNELS, CELL_SIZE, STATED = known_channels("targets", 5), 0.2, {**SIMULATION, CELL: 0.2}


def fields(seed: int) -> torch.Tensor:
    """[2, 5, 8, 8, 8], channel values: densities from 0.2 to 5, velocities of 50 km/s, temperatures of about 1e4 K."""
    values = torch.randn(2, 5, 8, 8, 8, generator=torch.Generator().manual_seed(seed))
    scales = torch.tensor([0.05, 0.06, 0.06, 0.06, 0.03])
    return values * scales[:, None, None, None] - torch.tensor([0, 0, 0, 0, 0.35])[:, None, None, None]


def test_value_is_that_of_the_flux_along_every_other_line() -> None:
    outputs, targets = fields(0), fields(1)
    fluxes = []
    for volume in (outputs, targets):
        parts = [CHANNELS[place].to_physical(volume[:, place, ::2, ::2]).reshape(-1, 8) for place in (0, 3, 4)]
        fluxes.append(torch.exp(-optical_depth(*parts, Universe.of(SIMULATION), CELL_SIZE)))
    waves = [torch.fft.rfft(flux).abs() / math.sqrt(8) for flux in fluxes]
    expected = l1_loss(outputs, targets) + 0.5 * l1_loss(*fluxes) + 0.25 * l1_loss(*waves)
    loss = FluxLoss(CHANNELS, STATED, flux=0.5, power=0.25, stride=2)
    torch.testing.assert_close(loss(outputs, targets), expected)
    assert loss.eval()(outputs, targets) == l1_loss(outputs, targets)


@pytest.mark.parametrize("number", range(3))
def test_gradient_of_the_flux_is_that_of_finite_differences(number: int) -> None:
    """Of a weighted sum, along a random direction of the density, the velocity or the temperature."""
    volume, weights, direction = fields(0), fields(1)[:, 0].flatten(0, -2), fields(2)[:, number].flatten(0, -2)
    parts = [CHANNELS[place].to_physical(volume[:, place]).flatten(0, -2) for place in (0, 3, 4)]
    direction = direction * parts[number].abs().mean()

    def weighted(step: float) -> torch.Tensor:
        moved = [part + step * direction if place == number else part for place, part in enumerate(parts)]
        return (
            (weights * torch.exp(-sum_of_profiles(*absorbers(moved, Universe.of(SIMULATION), CELL_SIZE), 3.0)))
            .double()
            .sum()
        )

    step = torch.zeros((), requires_grad=True)
    (gradient,) = torch.autograd.grad(weighted(step), step)
    with torch.no_grad():
        assert float(gradient) == pytest.approx(float(weighted(0.02) - weighted(-0.02)) / 0.04, rel=0.01)


@pytest.mark.parametrize(
    ("channels", "simulation", "fault"),
    [
        (CHANNELS, SIMULATION, "the training files state no common cell size"),
        (CHANNELS[:4], STATED, "the targets lack gas density, velocity or temperature"),
    ],
)
def test_files_without_the_simulation_or_the_gas_are_refused(channels: Any, simulation: Any, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        FluxLoss(channels, simulation)


def test_the_config_forest_takes_the_simulation_from_its_files(tmp_path: Path) -> None:
    """Its loss is built from the completed config, as a checkpoint has it, or refused with what the files lack."""
    stated = {**SIMULATION, "box_size_mpc_h": 32 * CELL_SIZE}
    paths = [write_volume(tmp_path / f"{name}.h5", 32, **values) for name, values in (("a", stated), ("b", {}))]
    losses = []
    for path in paths:
        config = configs.load(
            YAML, "forest", {"train_path": str(path), "val_path": str(paths[0]), "box_size": [32, 32]}
        )
        completed = Volumes.open(config, "hdf5").config
        losses.append(functools.partial(build.loss, Config(**completed.model_dump())))
    assert losses[0]().universe == Universe.of(SIMULATION)
    assert losses[0]().cell == pytest.approx(CELL_SIZE)
    with pytest.raises(UserError, match="the training files state no common redshift, cosmology_H0"):
        losses[1]()
