"""Convergence of the simulated gas: boxes in cells of several sizes.

python -m benchmarks.convergence

The meshes of a box start from the same long waves; a finer one has shorter waves, too. Shows the relation of
temperature and density, hot gas, and the flux of the Lyman-alpha forest relative to the finest mesh: its power, and the
measures of benchmarks/forest.py. Each mesh has the flux of its own cells, along all sight-lines, and the statistics are
compared in the bins that both have: gas that is averaged over larger cells would absorb less than the gas in them. With
several seeds, values are means over the boxes; with --paired, each box is a pair with opposite initial fields. Boxes
are kept in --runs.
"""

import argparse
import statistics
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from analysis.evaluation.statistics import PhaseDiagram
from analysis.evaluation.volume import VolumeFields, config_of_files
from analysis.lyman_alpha.results import PREDICTION, TARGET, Flux
from benchmarks import boxes, common
from benchmarks.common import plus_minus
from benchmarks.forest import FIT, HOT, RATIO, comparison, flux_of, relation

WAVENUMBERS = (0.005, 0.01, 0.02, 0.04)  # s/km
LABELS = {"mean density": "mean gas density", "T0 (K)": "T0", "gamma": "gamma"}  # of the gas' values, in forest.py
CELL = "cell (Mpc/h)"
PAIRED = "residual", "correlation", "optical depth"  # measures of pairs of pixels, which two meshes do not have
BINS = np.linspace(*FIT, 11), np.linspace(2, 8, 601)  # of log10 of density / mean and of K


def of_waves(modes: np.ndarray, grid: int) -> np.ndarray:
    """The modes of a mesh with fewer cells per side: those that both have, without the smaller one's Nyquist waves."""
    half, finer = grid // 2, len(modes)
    if grid == finer:
        return modes
    keep = np.r_[0:half, finer - half : finer]
    coarse = modes[keep][:, keep][:, :, : half + 1] * np.float32((grid / finer) ** 3)
    coarse[half] = coarse[:, half] = coarse[:, :, half] = 0
    return coarse


def simulated(options: argparse.Namespace, grid: int, seed: int, sign: int) -> str:
    """The file of one mesh of a box, in --runs."""
    from simulation import simulate
    from simulation.linear_theory import make_cosmology

    shared = {"box_size": options.box_size, "redshift": options.redshift, "seed": seed, "paired": sign}
    mesh = simulate.SimulationOptions(grid=grid, threads=options.threads, **shared)
    finest = replace(mesh, grid=options.grids[-1])
    name = "_".join(f"{key}={value}" for key, value in {**shared, "finest": finest.grid, "grid": grid}.items())
    path: Path = options.runs / "convergence" / f"{name}.h5"
    if not path.exists():
        with common.logged(f"simulating {path}"):
            modes = simulate.initial_modes(finest, make_cosmology(finest.cosmology))
            fields = simulate.simulate_fields(mesh, torch.from_numpy(of_waves(modes.numpy(), grid)))
            path.parent.mkdir(parents=True, exist_ok=True)
            simulate.write(path, [*map(simulate.to_channels, fields, simulate.CHANNELS)], mesh)
    return str(path)


def gas_values(file: str) -> dict[str, float]:
    """Relation of temperature and density, and shares of hot gas."""
    every = slice(None)
    with closing(VolumeFields(file, None, config_of_files(file, file))) as fields:
        channels = zip(fields.config.volume_channels[1], np.asarray(fields.target.planes(every, every)), strict=True)
        density, *_, kelvin = (channel.to_physical(values).ravel() for channel, values in channels)
    counts, places, temperatures = np.histogram2d(np.log10(density), np.log10(kelvin), bins=BINS)
    diagram = PhaseDiagram(places, temperatures, counts, counts)
    values = dict(zip(("T0 (K)", "gamma"), relation(diagram, counts), strict=True))
    values |= {"hot mass (%)": 100 * float(density[kelvin > HOT].sum() / density.sum())}
    values |= {"hot volume (%)": 100 * float((kelvin > HOT).mean())}
    return values | {"mean density": float(density.mean(dtype=np.float64))}


def against(coarse: Flux, fine: Flux) -> Flux:
    """The flux of a coarse mesh as the prediction of a finer one's, for the comparison of their statistics."""
    ours, true = coarse.fields[TARGET], fine.fields[TARGET]
    names = ("power", "axis_power", "p3d", "quadrupole", "target_p3d", "matter_p3d", "flux_bispectrum")
    shared = {name: getattr(true, name)[..., : getattr(ours, name).shape[-1]] for name in names}
    return replace(coarse, fields={TARGET: replace(true, **shared), PREDICTION: ours})


def meshes(options: argparse.Namespace, seed: int, sign: int) -> list[dict[str, Any]]:
    """Of each mesh of a box: values of its gas, measures of the comparison with the finest mesh, and ratios of P1D."""
    files = [simulated(options, grid, seed, sign) for grid in options.grids]
    fluxes, gas = [flux_of(file, sightlines=0) for file in files], [gas_values(file) for file in files]
    compared = []
    for flux, values in zip(fluxes, gas, strict=True):
        both = against(flux, fluxes[-1])
        ratio, measures = both.ratios[PREDICTION], comparison(both, PREDICTION)
        measures = {name: value for name, value in measures.items() if not name.startswith(PAIRED)}
        measures |= {f"{label}{RATIO}": values[name] / gas[-1][name] for name, label in LABELS.items()}
        at = np.exp(np.interp(np.log(WAVENUMBERS), np.log(flux.k), np.log(ratio)))
        shown = {f"P1D ratio at {k:g} s/km": float(value) for k, value in zip(WAVENUMBERS, at, strict=True)}
        compared.append({"gas": {**values, **shown}, "measures": measures, "P1D ratio": ratio})
    return compared


def means(values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.fmean(member[name] for member in values) for name in values[0]}


def main(argv: Sequence[str] | None = None) -> None:
    defaults = {"grids": (64, 128, 256), "box_size": 20.0, "redshift": 3.0, "seeds": (1,), "threads": 2}
    parser = common.Parser(__doc__, runs=common.RUNS, **defaults)
    parser.add_argument("--paired", action="store_true", help="simulate pairs of boxes, see python -m simulation")
    options = parser.parse_args(argv)
    signs = (1, -1) if options.paired else (0,)
    pairs = [[meshes(options, seed, sign) for sign in signs] for seed in options.seeds]
    rows: list[dict[str, Any]] = []
    for number, grid in enumerate(options.grids):
        gas, measures = (
            boxes.spreads([means([box[number][kind] for box in pair]) for pair in pairs])
            for kind in ("gas", "measures")
        )
        ratio = np.mean([box[number]["P1D ratio"] for pair in pairs for box in pair], axis=0).tolist()
        rows.append({"grid": grid, CELL: options.box_size / grid, **gas, "measures": measures, "P1D ratio": ratio})
    shown = [name for name in rows[0] if name not in ("grid", CELL, "mean density", "measures", "P1D ratio")]
    cells = [[row["grid"], f"{row[CELL]:.3g}", *(plus_minus(row[name], ".3g") for name in shown)] for row in rows]
    coarse = {f"{row['grid']}³": row["measures"] for row in rows[:-1]}
    labels = dict.fromkeys(label for measures in coarse.values() for label in measures)  # those of P3D differ
    compared = [[label, *(plus_minus(row.get(label), ".2f", 100) for row in coarse.values())] for label in labels]
    text = f"{common.table(['grid', CELL, *shown], cells)}\n\n{common.table(['%', *coarse], compared)}"
    common.publish("convergence", options, {"results": rows}, text)


if __name__ == "__main__":
    common.run(main)
