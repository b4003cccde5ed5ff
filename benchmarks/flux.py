"""Speed of the Lyman-alpha optical depth: all sight-lines of a box along x, y and z, and of a larger box along x.

python -m benchmarks.flux

The boxes are lognormal gas on the temperature-density relation with patches of hot gas, at redshift 3, in cells of Nyx
snapshots (0.02 and 0.04 Mpc/h) and of this project's simulator (0.5 Mpc/h). The larger box is made in groups of lines,
which the time does not include.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import resource
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.common import Parser, interleaved, publish, ranged, seconds_of, settings, summary, table, this_machine
from utils.errors import one_line_errors, value_errors_for_users
from utils.lyman_alpha.flux import Universe, fgpa_temperature, optical_depth

UNIVERSE = Universe(redshift=3.0, h=0.675, omega_m=0.31, omega_l=0.69, omega_b=0.0487)
CELLS = (0.02, 0.04, 0.5)  # Mpc/h
DENSITY_LENGTH, FLOW_LENGTH = 0.1, 2.0  # Mpc/h, over which density and velocity are smoothed along a line
DENSITY_SPREAD, VELOCITY_SPREAD = 1.2, 120.0  # of ln density; km/s
HOT_FROM, HEAT, MOST_HEAT = 1.6, 6.0, 500.0  # where the flow exceeds 1.6 standard deviations, up to 500 times hotter
GROUP = 2**14  # lines


class Lines(NamedTuple):
    """Density in units of the mean, velocity in km/s and temperature in K."""

    density: Tensor
    velocity: Tensor
    temperature: Tensor


def smooth_noise(lines: int, side: int, length: float, generator: torch.Generator) -> Tensor:
    """Gaussian random lines of unit variance, [lines, side], smoothed over `length` cells."""
    window = torch.exp(-((2 * math.pi * torch.fft.rfftfreq(side) * length) ** 2) / 2)
    noise = torch.fft.irfft(torch.fft.rfft(torch.randn(lines, side, generator=generator)) * window, n=side)
    return noise / noise.std()


def make_lines(lines: int, side: int, cell: float, generator: torch.Generator) -> Lines:
    normal = smooth_noise(lines, side, DENSITY_LENGTH / cell, generator)
    density = torch.exp(DENSITY_SPREAD * normal - DENSITY_SPREAD**2 / 2)
    flow = smooth_noise(lines, side, FLOW_LENGTH / cell, generator)
    heat = torch.exp((HEAT * (flow.abs() - HOT_FROM)).clamp(0, math.log(MOST_HEAT)))
    return Lines(density, VELOCITY_SPREAD * flow, fgpa_temperature(density, UNIVERSE.redshift) * heat)


def seconds_of_box(side: int, cell: float, device: torch.device) -> float:
    """Seconds for all lines of a box along x, y and z, including the copies that gather them."""
    lines = make_lines(side**2, side, cell, torch.Generator().manual_seed(0))
    box = [field.to(device).view(side, side, side) for field in lines]

    def three_axes() -> None:
        for axis in range(3):
            optical_depth(*Lines(*(field.movedim(axis, -1).reshape(-1, side) for field in box)), UNIVERSE, cell)

    return seconds_of(three_axes, device)


def seconds_of_axis(side: int, cell: float, device: torch.device) -> float:
    """Seconds for all lines of a box along one axis, without making them."""
    generator, seconds = torch.Generator().manual_seed(0), 0.0
    for start in range(0, side**2, GROUP):
        group = make_lines(min(GROUP, side**2 - start), side, cell, generator)
        fields = Lines(*(field.to(device) for field in group))
        seconds += seconds_of(functools.partial(optical_depth, *fields, UNIVERSE, cell), device)
    return seconds


def describe(side: int, cell: float) -> dict[str, float]:
    """Width of the cells in velocity, and the part of hot cells."""
    lines = make_lines(1024, side, cell, torch.Generator().manual_seed(0))
    hot = (lines.temperature > 1e5).double().mean()
    return {"cell (Mpc/h)": cell, "cell (km/s)": UNIVERSE.pixel_width(cell), "cells above 1e5 K": float(hot)}


def measure(options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    load = os.getloadavg()[0]  # of other processes, at the start
    device = this_machine().device
    cases: dict[str, tuple[dict[str, Any], Callable[[], float]]] = {}
    for cell in CELLS:
        for side, axes, seconds in ((options.side, 3, seconds_of_box), (options.large, 1, seconds_of_axis)):
            about = {"side": side, "axes": axes, **describe(side, cell)}
            cases[f"{side}³ x {axes}, {cell} Mpc/h"] = about, functools.partial(seconds, side, cell, device)
    seconds_of_axis(32, CELLS[0], device)  # warm-up
    values = interleaved({name: seconds for name, (_, seconds) in cases.items()}, options.trials, warmup=0)
    results = {name: {**about, "seconds": summary(values[name])} for name, (about, _) in cases.items()}
    gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    rows = [
        (
            f"{case['side']}³ along {case['axes']} ax{'i' if case['axes'] == 1 else 'e'}s",
            case["cell (Mpc/h)"],
            f"{case['cell (km/s)']:.3g}",
            ranged(case["seconds"], ".3g"),
            f"{case['side'] ** 3 * case['axes'] / case['seconds']['median'] / 1e6:.3g}",
        )
        for case in results.values()
    ]
    text = (
        f"Lyman-alpha optical depth of all sight-lines, {options.threads} threads, median (range) of n = "
        f"{options.trials}; peak memory {gib:.2f} GiB; load average {load:.1f} at the start.\n\n"
        + table(["sight-lines", "cell, Mpc/h", "cell, km/s", "seconds", "million cells/s"], rows)
    )
    machine = {"peak memory GiB": gib, "load average at the start": load}
    publish("flux", {"settings": settings(options), "cases": results, **machine}, options.output, text)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_integers(side=256, large=512, trials=3, threads=2)
    with one_line_errors(), value_errors_for_users():
        measure(parser.parse_args())


if __name__ == "__main__":
    main()
