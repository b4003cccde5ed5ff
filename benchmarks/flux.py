"""Speed of the Lyman-alpha optical depth: all sight-lines of a box along x, y and z, and of a larger box along x.

python -m benchmarks.flux

The boxes are lognormal gas on the temperature-density relation with patches of hot gas, at redshift 3, in cells of Nyx
snapshots (0.02 and 0.04 Mpc/h) and of this project's simulator (0.5 Mpc/h). They are made in groups of lines, which the
time does not include.
"""

import functools
import math
import resource
from collections.abc import Sequence

import torch
from torch import Tensor

from analysis.lyman_alpha.flux import Universe, fgpa_relation, optical_depth, power_law
from benchmarks import common

UNIVERSE = Universe(redshift=3.0, h=0.675, omega_m=0.31, omega_l=0.69, omega_b=0.0487)
CELLS = (0.02, 0.04, 0.5)  # Mpc/h
DENSITY_LENGTH, FLOW_LENGTH = 0.1, 2.0  # Mpc/h, over which density and velocity are smoothed along a line
DENSITY_SPREAD, VELOCITY_SPREAD = 1.2, 120.0  # of ln density; km/s
HOT_FROM, HEAT, MOST_HEAT = 1.6, 6.0, 500.0  # where the flow exceeds 1.6 standard deviations, up to 500 times hotter
GROUP = 2**14  # lines


def smooth_noise(lines: int, side: int, length: float, generator: torch.Generator) -> Tensor:
    """Gaussian random lines of unit variance, [lines, side], smoothed over `length` cells."""
    window = torch.exp(-((2 * math.pi * torch.fft.rfftfreq(side) * length) ** 2) / 2)
    noise = torch.fft.irfft(torch.fft.rfft(torch.randn(lines, side, generator=generator)) * window, n=side)
    return noise / noise.std()


def make_lines(lines: int, side: int, cell: float, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Density in units of the mean, velocity in km/s and temperature in K."""
    normal = smooth_noise(lines, side, DENSITY_LENGTH / cell, generator)
    density = torch.exp(DENSITY_SPREAD * normal - DENSITY_SPREAD**2 / 2)
    flow = smooth_noise(lines, side, FLOW_LENGTH / cell, generator)
    heat = torch.exp((HEAT * (flow.abs() - HOT_FROM)).clamp(0, math.log(MOST_HEAT)))
    return density, VELOCITY_SPREAD * flow, power_law(density, *fgpa_relation(UNIVERSE.redshift)) * heat


def seconds_of_box(side: int, axes: int, cell: float, device: torch.device) -> float:
    generator, seconds = torch.Generator().manual_seed(0), 0.0
    for start in range(0, axes * side**2, GROUP):
        fields = make_lines(min(GROUP, axes * side**2 - start), side, cell, generator)
        density, velocity, temperature = (field.to(device) for field in fields)
        depth = functools.partial(optical_depth, density, velocity, temperature, UNIVERSE, cell)
        seconds += common.seconds_of(depth, device)
    return seconds


def main(argv: Sequence[str] | None = None) -> None:
    options = common.Parser(__doc__, side=256, large=512, trials=3, threads=2).parse_args(argv)
    torch.set_num_threads(options.threads)
    device, boxes = common.this_machine().device, ((options.side, 3), (options.large, 1))
    cases = {f"{side}³ x {axes}, {cell} Mpc/h": (side, axes, cell) for cell in CELLS for side, axes in boxes}
    seconds_of_box(32, 1, CELLS[0], device)  # warm-up
    measures = {name: functools.partial(seconds_of_box, *case, device) for name, case in cases.items()}
    values = common.interleaved(measures, options.trials, warmup=0)
    results, rows = {}, []
    for name, (side, axes, cell) in cases.items():
        seconds = common.summary(values[name])
        results[name] = {"side": side, "axes": axes, "cell (Mpc/h)": cell, "seconds": seconds}
        rate = side**3 * axes / seconds["median"] / 1e6
        rows.append((name, f"{UNIVERSE.pixel_width(cell):.3g}", common.ranged(seconds, ".3g"), f"{rate:.3g}"))
    gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    text = f"Lyman-alpha optical depth, {options.threads} threads, n = {options.trials}; peak memory {gib:.2f} GiB.\n\n"
    text += common.table(["sight-lines x axes", "cell, km/s", "seconds", "million cells/s"], rows)
    common.publish("flux", options, {"cases": results, "peak memory GiB": gib}, text)


if __name__ == "__main__":
    common.run(main)
