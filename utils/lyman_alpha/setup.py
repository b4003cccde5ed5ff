"""The constants of the Lyman-alpha flux of one volume, and the reasons for which it cannot be computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from utils.config import Config
from utils.config.sections import EvaluationConfig
from utils.data.channels import DENSITY_UNIT, TEMPERATURE_UNIT, VELOCITY_UNIT, Channel, volume_channels
from utils.data.files.hdf5 import FieldReader, Volume
from utils.errors import UserError
from utils.evaluation.results import FGPA, REAL_FGPA
from utils.lyman_alpha.flux import STATED, Universe, published_mean_flux

SMALLEST_SIDE = 4  # cells; shorter sight-lines have no modes below half of Nyquist's wavenumber
RESOLVED = 0.5  # cells: a Gaussian of a smaller standard deviation changes nothing on the grid

Channels = Sequence[Channel]
Vectors = Sequence[Sequence[int]]


class Field(NamedTuple):
    """Numbers of the channels with physical units; `velocity` x, y, z is empty if it is unknown."""

    density: int
    velocity: tuple[int, ...]
    temperature: int | None


@dataclass(frozen=True)
class FluxSetup:
    """The constants of all evaluations of one volume's flux."""

    shape: tuple[int, int, int]
    cell: float
    universe: Universe
    mean_flux: float
    input_channels: Channels
    target_channels: Channels
    gas: Field
    dark: Field | None  # None if the unit of the input's density is unknown
    options: EvaluationConfig

    @classmethod
    def of(cls, volume: Volume | FieldReader, config: Config, note: Callable[[str], object]) -> FluxSetup | None:
        """None if the flux is switched off, or if something is missing, which one line passed to `note` reports."""
        options, (inputs, targets) = config.evaluation, volume_channels(config)
        if not options.flux:
            return None
        dark, gas = _find(inputs, config.vector_channels.inputs), _find(targets, config.vector_channels.targets)
        universe, cell = Universe.of(volume.simulation), volume.cell
        unstated = [name for name in STATED if name not in volume.simulation]
        unstated += ["box_size_mpc_h"] if cell is None else []
        reasons = [f"{volume.path} does not state {', '.join(unstated)}"] if unstated else []
        if universe is None and not unstated:
            reasons.append(f"{volume.path} states no possible cosmology")
        if gas is None or not gas.velocity or gas.temperature is None:
            reasons.append("the gas lacks density, velocity or temperature in physical units")
        if min(volume.shape) < SMALLEST_SIDE:
            reasons.append(f"the volume has a side of fewer than {SMALLEST_SIDE} cells")
        mean_flux = options.mean_flux
        if universe and mean_flux is None:
            try:
                mean_flux = published_mean_flux(universe.redshift)
            except UserError as error:
                reasons.append(str(error))
        if reasons or universe is None or cell is None or gas is None or mean_flux is None:
            note(f"Lyman-alpha flux skipped: {'; '.join(reasons)}")
            return None
        return cls(volume.shape, cell, universe, mean_flux, inputs, targets, gas, dark, options)

    @property
    def smoothing(self) -> float:
        """Standard deviation in Mpc/h of the smoothing of the baseline's density; 0 if the cells do not resolve it."""
        length = self.options.pressure_smoothing
        return length if length >= RESOLVED * self.cell else 0.0

    @property
    def baseline(self) -> str:
        """Name of the baseline."""
        return FGPA if self.dark and self.dark.velocity else REAL_FGPA

    def gas_channels(self, axis: int) -> list[int]:
        """Numbers of the target channels of density, velocity along an axis, and temperature."""
        density, velocity, temperature = self.gas
        assert temperature is not None
        return [density, velocity[axis], temperature]


def _find(channels: Channels, vectors: Vectors) -> Field | None:
    """The physical fields among the channels; None if there is no density."""
    numbers = {channel.unit: number for number, channel in reversed([*enumerate(channels)])}
    if DENSITY_UNIT not in numbers:
        return None
    components = {number for number, channel in enumerate(channels) if channel.unit == VELOCITY_UNIT}
    velocity: tuple[int, ...] = next((tuple(parts) for parts in vectors if components.issuperset(parts)), ())
    return Field(numbers[DENSITY_UNIT], velocity, numbers.get(TEMPERATURE_UNIT))
