"""Gas dynamics on a periodic mesh: MUSCL-Hancock reconstruction and HLLC fluxes, one axis after the other.

Super-comoving variables (Martel & Shapiro 1998, MNRAS 297, 467): with dtau = H0 dt / a^2 and u = a v / (H0 cell), a gas
with gamma = 5/3 obeys Euler's equations of a static box, without terms for the expansion. Lengths are in cells, density
is in units of the mean, and p / density = a^2 k T / (mu m_p) / (H0 cell)^2.

The state is density, momentum and S = p density^(-2/3), which is advected like a density where the flow is smooth. The
total energy, which also heats gas in shocks, is computed from them before each sweep, and S from it afterwards, if its
thermal part is more than the error of the kinetic one (dual energy, Ryu et al. 1993, ApJ 414, 1). Sources: Toro 2009,
chapters 10 and 14; van Leer 1974.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from simulation.fourier import Result, in_order
from utils.errors import UserError
from utils.powers import power

Tile = tuple[Tensor, ...]

GAMMA = 5 / 3
COURANT = 0.8
CELLS_AT_ONCE = {"cpu": 1 << 16, "cuda": 1 << 25}  # fewer would make threads wait for each other
# The thermal energy that follows from the total one is used where it exceeds these shares: of density times the square
# of the velocity difference over two cells, and of the total energy, which covers the rounding of float32.
COMPRESSION_SHARE, ROUNDING_SHARE = 0.02, 1e-3
SMALLEST_SQUARE = 1e-36  # instead of 0 as a divisor
SMALLEST_SHARE = 0.1  # of a cell's density, pressure and entropy that remains after half a step, and at its faces


@dataclass
class Gas:
    """Gas on a periodic mesh; the results do not depend on the number of threads."""

    state: Tensor  # [5, n, n, n] float32: density, momentum, S
    threads: int = 1
    steps: int = 0

    @property
    def density(self) -> Tensor:
        """Density in units of the mean, [n, n, n]."""
        return self.state[0]

    def pressure_per_density(self) -> Tensor:
        """p / density, [n, n, n]."""
        return power(self.density, -1 / 3).mul_(self.state[4])

    def kick(self, force: Tensor, gain: float) -> None:
        """Adds gain times the acceleration [3, n, n, n] to the velocity."""
        for momentum, component in zip(self.state[1:4], force, strict=True):
            momentum.addcmul_(self.density, component, value=gain)

    def advance(self, duration: float) -> None:
        """Integrates over this super-comoving time, in steps within the Courant condition."""
        while duration > 0:
            speed = float(torch.tensor(self._for_tiles(_signal_speed, 0)).max())  # NaN if any is
            if not math.isfinite(speed):
                raise UserError("the gas dynamics failed, with values that are not finite; give another --seed")
            steps = math.ceil(duration * speed / COURANT)
            step = duration / max(steps, 1)
            for axis in (0, 1, 2) if self.steps % 2 == 0 else (2, 1, 0):
                self._for_tiles(functools.partial(_sweep, step=step), axis)
            self.steps, duration = self.steps + 1, duration - step if steps > 1 else 0.0

    def _for_tiles(self, work: Callable[[Tile], Result], axis: int) -> list[Result]:
        """Results of `work` for tiles: the five fields, [n, rows, n], with `axis` and the momentum along it first."""
        order = [0, 1 + axis, *(1 + across for across in range(3) if across != axis), 4]
        lines = [self.state[field].movedim(axis, 0) for field in order]
        rows = max(1, CELLS_AT_ONCE[self.state.device.type] // lines[0][:, 0].numel())
        tiles = zip(*(field.split(rows, dim=1) for field in lines), strict=True)
        return list(in_order(work, tiles, self.threads))


def _signal_speed(tile: Tile) -> float:
    """Largest speed of a wave along an axis in this tile."""
    density, *momentum, entropy = tile
    fastest = torch.stack([component.abs() for component in momentum]).amax(0) / density
    return float((fastest + (GAMMA * entropy * power(density, -1 / 3)).sqrt()).max())


def _sweep(tile: Tile, step: float) -> None:
    """Advances the lines of a tile, along their first axis, in place."""
    n = len(tile[0])
    state = tile[0].new_empty(6, n + 4, *tile[0].shape[1:])
    for padded, field in zip(state, tile, strict=False):  # with two ghost cells on each side
        padded[2:-2], padded[:2], padded[-2:] = field, field[-2:], field[:2]
    density, momentum, entropy, energy = state[0], state[1:4], state[4], state[5]
    primitive = torch.empty_like(state)  # density, pressure, S / density, velocity
    primitive[0] = density
    torch.mul(entropy, power(density, 2 / 3), out=primitive[1])
    torch.div(entropy, density, out=primitive[2])
    torch.div(momentum, density, out=primitive[3:])
    torch.sum(momentum * primitive[3:], 0, out=energy).mul_(0.5).add_(primitive[1], alpha=1 / (GAMMA - 1))

    flux = _flux(*_faces(primitive, step))
    state = state[:, 2:-2]
    state.sub_(flux[:, 1:] - flux[:, :-1], alpha=step)
    # The specific entropy of a cell does not fall below the lowest one nearby, which its new content comes from.
    before, here, after = primitive[2, 1:-3], primitive[2, 2:-2], primitive[2, 3:-1]
    lowest = torch.minimum(torch.minimum(before, here), after).mul_(state[0])
    torch.maximum(state[4], lowest, out=state[4])
    difference = primitive[3:, 3:-1] - primitive[3:, 1:-3]
    _synchronize(state, (difference * difference).sum(0))
    for field, updated in zip(tile, state, strict=False):
        field.copy_(updated)


def half_slope(before: Tensor, after: Tensor) -> Tensor:
    """Half of van Leer's slope: product / sum of the differences to both neighbors where their signs agree, else 0."""
    total = before + after  # no branch: it is slow on a CPU
    return (before * after).clamp_(min=0).mul_(total).div_(total.mul_(total).add_(SMALLEST_SQUARE))


def _faces(primitive: Tensor, step: float) -> tuple[Tensor, Tensor]:
    """States left and right of each face, after half a step: [6, faces, ...]."""
    difference = primitive[:, 1:] - primitive[:, :-1]
    half = half_slope(difference[:, :-1], difference[:, 1:])
    center = primitive[:, 1:-1]
    density, pressure, _, velocity = center[:4]
    middle = torch.addcmul(center, half, velocity, value=-step)
    middle[0].addcmul_(density, half[3], value=-step)
    middle[1].addcmul_(pressure, half[3], value=-GAMMA * step)
    middle[3].addcdiv_(half[1], density, value=-step)
    # Density, pressure and entropy stay positive: the slopes, not the values in the middle, give way, because a larger
    # middle lets more flow out than a cell has.
    torch.maximum(middle[:3], SMALLEST_SHARE * center[:3], out=middle[:3])
    bound = (1 - SMALLEST_SHARE) * middle[:3]
    half[:3] = torch.minimum(torch.maximum(half[:3], -bound), bound)
    return (middle + half)[:, :-1], (middle - half)[:, 1:]


def _flux(left: Tensor, right: Tensor) -> Tensor:
    """Fluxes [6, faces, ...] of density, momentum, S and energy between two states (HLLC, Toro 2009, section 10.4)."""
    sound = [(state[1] / state[0]).mul_(GAMMA).sqrt_() for state in (left, right)]
    slowest = torch.minimum(left[3] - sound[0], right[3] - sound[1])
    fastest = torch.maximum(left[3] + sound[0], right[3] + sound[1])
    mass_left, mass_right = left[0] * (slowest - left[3]), right[0] * (fastest - right[3])
    contact = right[1] - left[1]
    contact.addcmul_(mass_left, left[3]).addcmul_(mass_right, right[3], value=-1).div_(mass_left - mass_right)

    is_left = contact.sign().clamp_(min=0)  # 0 or 1: a weight is faster than a condition
    density, pressure, entropy, velocity, *transverse = torch.lerp(right, left, is_left)
    wave, mass = torch.lerp(fastest, slowest, is_left), torch.lerp(mass_right, mass_left, is_left)
    # Zero where all waves move to the same side, so that the flux is that of the state on the other side.
    bounded = torch.lerp(fastest.clamp_(min=0), slowest.clamp_(max=0), is_left)
    starred = mass / (wave - contact)  # density between the wave and the contact
    flux = torch.empty_like(left)
    momentum = density * velocity
    torch.addcmul(momentum, bounded, starred - density, out=flux[0])
    torch.addcmul(pressure, momentum, velocity, out=flux[1]).addcmul_(bounded, (starred * contact).sub_(momentum))
    for number, component in enumerate(transverse, start=2):
        torch.mul(flux[0], component, out=flux[number])
    torch.mul(flux[0], entropy, out=flux[4])
    square = velocity * velocity
    for component in transverse:
        square.addcmul_(component, component)
    energy = (square * density).mul_(0.5).add_(pressure, alpha=1 / (GAMMA - 1))
    gain = (pressure / mass).add_(contact).mul_(contact - velocity).addcdiv_(energy, density).mul_(starred)
    torch.addcmul(velocity * (energy + pressure), bounded, gain.sub_(energy), out=flux[5])
    return flux


def _synchronize(state: Tensor, difference: Tensor) -> None:
    """Sets S from the energy where its thermal part can be trusted; `difference` is that of velocities, squared."""
    density, momentum, entropy, energy = state[0], state[1:4], state[4], state[5]
    thermal = torch.addcdiv(energy, (momentum * momentum).sum(0), density, value=-0.5)
    limit = (density * difference).mul_(COMPRESSION_SHARE).add_(energy, alpha=ROUNDING_SHARE)
    from_energy = (GAMMA - 1) * thermal * power(density, -2 / 3)
    torch.lerp(entropy, from_energy, (thermal - limit).sign_().clamp_(min=0), out=entropy)
