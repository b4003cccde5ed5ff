"""A loss of what is observed: the Lyman-alpha flux along the lines of a crop. See the config `forest`."""

import math
from collections.abc import Sequence

import torch
from torch.nn import functional as F

from analysis.lyman_alpha.flux import SATURATION, STATED, Universe, absorbers
from networks.losses import L1Loss, at_least_float32
from utils.config.channels import GAS, Channel, density_place, temperature_place, velocity_places
from utils.volumes.attributes import CELL, Simulation

WIDEST = 30.0  # Doppler width in km/s, of 5e4 K; the profiles of hotter gas, which hardly absorbs, are as narrow


class FluxLoss(L1Loss):
    """L1, plus in training `flux` × that of the flux, and `power` × that of the amplitudes of its waves along lines.

    The flux is not rescaled. The lines are every `stride`-th along z in each direction, in outputs and targets taken as
    periodic; rotations of the crops by `symmetries` turn every axis of the volume to z. Nothing waits for a GPU.
    """

    def __init__(
        self,
        channels: Sequence[Channel],
        simulation: Simulation,
        flux: float = 0.03,
        power: float = 0.03,
        stride: int = 3,
    ) -> None:
        """`simulation`: redshift, cosmology and cell that the training files state; `channels`: of the targets."""
        super().__init__()
        if missing := [name for name in (*STATED, CELL) if name not in simulation]:
            raise ValueError(f"the training files state no common {', '.join(missing)}; add them as attributes")
        self.universe, self.cell = Universe.of(simulation), float(simulation[CELL])
        places = density_place(channels, GAS), *velocity_places(channels, GAS)[2:], temperature_place(channels)
        self.places = [(place, channels[place]) for place in places if place is not None]
        if len(self.places) < 3:
            raise ValueError("the targets lack gas density, velocity or temperature in physical units")
        self.flux, self.power, self.stride = flux, power, stride

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = super().forward(outputs, targets)
        if not self.training:
            return loss
        flux, true = (self._flux(at_least_float32(fields)) for fields in (outputs, targets))
        waves = [torch.fft.rfft(lines, norm="ortho").abs() for lines in (flux, true)]
        return loss + self.flux * F.l1_loss(flux, true) + self.power * F.l1_loss(*waves)

    def _flux(self, fields: torch.Tensor) -> torch.Tensor:
        """[lines, cells] of fields [N, C, D, D, D]."""
        some = fields[:, :, :: self.stride, :: self.stride]
        values = [channel.to_physical(some[:, place]).flatten(0, -2) for place, channel in self.places]
        depth, shift, doppler = absorbers(values, self.universe, self.cell)
        return torch.exp(-sum_of_profiles(depth, shift, doppler, WIDEST / self.universe.pixel_width(self.cell)))


def sum_of_profiles(depth: torch.Tensor, shift: torch.Tensor, doppler: torch.Tensor, widest: float) -> torch.Tensor:
    """Optical depth [lines, cells] of cells with Gaussian profiles, as of `absorbers`, with `widest` pixels at most."""
    whole, reach = shift.detach().round(), math.ceil(SATURATION * widest)
    places = torch.arange(-reach, reach + 2, device=depth.device)
    pixels = torch.arange(depth.shape[1], device=depth.device) + whole.long()
    integral = ((places - 0.5 - (shift - whole)[..., None]) / doppler.clamp(max=widest)[..., None]).erf()
    values = integral.diff(dim=-1) * (depth / 2)[..., None]
    pixels = (pixels[..., None] + places[:-1]) % depth.shape[1]
    return torch.zeros_like(depth).scatter_add(1, pixels.flatten(1), values.flatten(1))
