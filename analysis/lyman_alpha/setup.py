"""The options and constants of the Lyman-alpha flux of one volume, and the reasons why it cannot be computed."""

import argparse
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from analysis.lyman_alpha.flux import STATED, Universe, published_mean_flux
from analysis.lyman_alpha.results import FGPA, REAL_FGPA
from utils.config import Config, parse_value, validate_section
from utils.config.channels import DARK_MATTER, GAS, Channel, Channels, density_place, temperature_place, velocity_places
from utils.config.sections import Count, Fraction, Rate, Section
from utils.errors import UserError
from utils.volumes.attributes import implausible
from utils.volumes.hdf5 import FieldReader, Volume

SMALLEST_SIDE = 4  # cells; shorter sight-lines have no modes below half of Nyquist's wavenumber
RESOLVED = 0.5  # cells: a Gaussian of a smaller standard deviation changes nothing on the grid

FLAGS = {  # of evaluate.py
    "mean_flux": "to which all fields are rescaled (the observed one at the file's redshift)",
    "sightlines": "number along each axis, at most; 0: all (%(default)s)",
    "pressure_smoothing": "of the dark matter for the baseline: standard deviation in Mpc/h (%(default)s)",
    "fitted_on": "volume with gas, such as the training box, to which further baselines are fitted",
}

Placed = tuple[int, Channel]  # the place of a channel among those of a volume, and the channel

log = logging.getLogger(__name__)


class FluxOptions(Section):
    """Flags of evaluate.py; in a training run the config's section `evaluation` has the first two."""

    flux: bool = True
    sightlines: Count = 65536
    mean_flux: Fraction | None = None
    pressure_smoothing: Rate = 0.1
    fitted_on: str | None = None


def add_flux_options(parser: argparse.ArgumentParser) -> None:
    """Adds FLAGS and `--no_flux` to the parser of evaluate.py."""
    group, defaults = parser.add_argument_group("Lyman-alpha flux"), FluxOptions()
    group.add_argument("--no_flux", dest="flux", action="store_false", help="skip it")
    for name, text in FLAGS.items():
        group.add_argument(f"--{name}", type=parse_value, default=getattr(defaults, name), help=text)


def take_flux_options(arguments: dict[str, Any]) -> FluxOptions:
    """Removes the values of these flags and returns them as a section; UserError if one is outside its limits."""
    values = {name: arguments.pop(name) for name in ("flux", *FLAGS)}
    return validate_section(FluxOptions, values, "Lyman-alpha flux")


class GasFit(NamedTuple):
    """Relations of gas to dark matter in one volume."""

    kelvin: float  # temperature at the mean density
    gamma: float  # T = kelvin · density ** (gamma − 1)
    k: np.ndarray  # [shells] in h/Mpc
    transfer: np.ndarray  # [shells] cross power of both log densities / power of the dark matter's


@dataclass(frozen=True)
class FluxSetup:
    """The constants of all evaluations of one volume's flux."""

    cell: float
    universe: Universe
    mean_flux: float
    dark: Sequence[Placed]  # density and velocity; density alone, or none, if the inputs lack the others
    gas: Sequence[Placed]  # density, velocity and temperature
    options: FluxOptions
    fit: GasFit | None = None

    @classmethod
    def of(cls, volume: Volume | FieldReader, config: Config, options: FluxOptions) -> "FluxSetup | None":
        """None if the flux is switched off, or if something is missing, which one line of the log reports."""
        try:
            return cls._of(volume, config, options) if options.flux else None
        except UserError as error:
            log.info("Lyman-alpha flux skipped: %s", error)
            return None

    @classmethod
    def _of(cls, volume: Volume | FieldReader, config: Config, options: FluxOptions) -> "FluxSetup":
        """Raises UserError if something is missing."""
        (inputs, targets), cell = config.volume_channels, volume.cell
        unstated = [name for name in STATED if name not in volume.simulation]
        if unstated or cell is None:
            missing = [*unstated, *(["box_size_mpc_h"] if cell is None else [])]
            raise UserError(f"{volume.path} does not state {', '.join(missing)}")
        temperature, gas, dark = temperature_place(targets), _matter(targets, GAS), _matter(inputs, DARK_MATTER)
        gas["temperature"] = [] if temperature is None else [(temperature, targets[temperature])]
        if missing := [name for name, parts in gas.items() if not parts]:
            raise UserError(f"the gas lacks {', '.join(missing)} in physical units")
        if min(volume.shape) < SMALLEST_SIDE:
            raise UserError(f"the volume has a side of fewer than {SMALLEST_SIDE} cells")
        universe, faults = Universe.of(volume.simulation), implausible(volume.simulation)
        if universe.omega_b <= 0:
            faults.append("cosmology_Ob0 is 0, so there are no baryons")
        if faults:
            raise UserError(f"{volume.path}: {faults[0]}; correct its attributes")
        mean_flux = options.mean_flux or published_mean_flux(universe.redshift)
        if missing := [name for name, parts in dark.items() if not parts]:
            log.info("Lyman-alpha flux: the dark matter lacks %s in physical units", ", ".join(missing))
        known = [*dark["density"], *dark["velocity"]] if dark["density"] else []
        return cls(cell, universe, mean_flux, known, [part for parts in gas.values() for part in parts], options)

    @property
    def smoothing(self) -> float:
        """Standard deviation in Mpc/h of the smoothing of the baseline's density; 0 if the cells do not resolve it."""
        length = self.options.pressure_smoothing
        return length if length >= RESOLVED * self.cell else 0.0

    @property
    def baseline(self) -> str:
        return FGPA if self.dark[1:] else REAL_FGPA


def _matter(channels: Channels, prefix: str) -> dict[str, list[Placed]]:
    """Density and velocity of GAS or DARK_MATTER; empty if they are missing or in other units."""
    density, velocity = density_place(channels, prefix), velocity_places(channels, prefix)
    places = {"density": [] if density is None else [density], "velocity": velocity}
    return {name: [(place, channels[place]) for place in numbers] for name, numbers in places.items()}
