"""The distance of inputs from those of the training: which boxes it detects, and its correlation with the error.

python -m benchmarks.input_statistics

Trains the demo's networks on a box at z = 3 (study `forest`), and evaluates them on boxes of other seeds, redshifts,
cells and cosmologies, and on copies of boxes whose inputs were changed.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from benchmarks import boxes, common, study
from utils.volumes.hdf5 import open_volume
from utils.volumes.input_statistics import LIMIT, distance, training_statistics

KIND, UNCHANGED = "the training's kind", "z = 3"
VOLUMES: dict[str, dict[str, Any]] = {KIND: {"held_out": {"grid": 96, "seeds": [*range(51, 63)]}}}
VOLUMES |= {"boxes of 64³ cells": {"held_out": {"grid": 64, "seeds": [41, 42, 43, 44]}}, UNCHANGED: {}}
VOLUMES |= {f"z = {z:g}": {"redshift": z} for z in (2.0, 2.5, 4.0)}
VOLUMES |= {f"cells of {cell:g} Mpc/h": {"cell": cell} for cell in (0.1, 0.25)} | {"WMAP 3": {"cosmology": "WMAP3"}}
CLOSURE = "gas by a closure"
CHANGES: dict[str, Any] = {  # of density / mean and velocity in km/s, at z = 3
    "log10 for ln": lambda density, velocity: (density ** (1 / np.log(10)), velocity),
    "velocities × √3": lambda density, velocity: (density, velocity * 3**0.5),
    "velocities in √a units": lambda density, velocity: (density, velocity * 2),
    "velocities × 1.2": lambda density, velocity: (density, velocity * 1.2),
    "momentum": lambda density, velocity: (density, velocity * density),
    "velocities of the wrong sign": lambda density, velocity: (density, -velocity),
    "v_x and v_z swapped": lambda density, velocity: (density, velocity[::-1]),
    "density smoothed as by TSC": lambda density, velocity: (density + laplacian(density) / 24, velocity),
    "density smoothed over a cell": lambda density, velocity: (smoothed(density, 1), velocity),
    "density sharpened": lambda density, velocity: (density - laplacian(density) / 12, velocity),
    CLOSURE: lambda density, velocity: (density, velocity),  # the target is dark matter smoothed over 0.6 Mpc/h
}


def laplacian(density: np.ndarray) -> np.ndarray:
    return sum(np.roll(density, step, axis) - density for step in (-1, 1) for axis in range(3))


def smoothed(density: np.ndarray, cells: float) -> np.ndarray:
    from scipy.ndimage import gaussian_filter

    return gaussian_filter(density, cells, mode="wrap")


def changed(file: str, name: str, channels: Sequence[Any]) -> str:
    """A copy of a box with the inputs of one of CHANGES."""
    path = Path(file).with_suffix(f".{name.replace(' ', '_')}.h5")
    if not path.exists():
        shutil.copy(file, path)
        with h5py.File(path, "r+") as box:
            values = [channel.to_physical(field) for channel, field in zip(channels, box["Nbody"], strict=True)]
            density, velocity = CHANGES[name](values[0], np.stack(values[1:]))
            fields = np.maximum(density, 1e-3), *velocity
            if name == CLOSURE:
                box["Hydro"][0] = channels[0].from_physical(smoothed(density, 0.6 / 0.15625))
            box["Nbody"][...] = [channel.from_physical(field) for channel, field in zip(channels, fields, strict=True)]
    return str(path)


def main(argv: Sequence[str] | None = None) -> None:
    from scipy.stats import spearmanr

    options = common.Parser(__doc__, seeds=3, runs=common.RUNS).parse_in_repository(argv)
    training, held_out = study.trained("forest", options.seeds, options.runs, 1), {"grid": 96, "seeds": [21, 22]}
    config, simulation = training[0].config, {**study.STUDIES["forest"].simulation, "held_out": held_out}
    simulated, channels = boxes.Boxes(simulation, VOLUMES, options.runs), config.volume_channels[0]
    files = {name: simulated.files(name, "held_out") for name in VOLUMES}
    files |= {name: [changed(file, name, channels) for file in files[UNCHANGED]] for name in CHANGES}
    trained = training_statistics([open_volume(file) for file in config.paths("train_path")], config)
    rows, results, pairs = [], {}, list[tuple[float, float]]()
    for name, group in files.items():
        found = [distance(trained, file, open_volume(file).inputs, config) for file in group]
        distances, places, far = zip(*found, strict=True)
        errors = []
        for file in group:
            losses = [boxes.evaluation(run.checkpoint, file, options.runs, flux=False).l1 for run in training]
            errors.append(float(np.mean(losses)))  # over channels and networks
        pairs += zip(distances, errors, strict=True)
        spreads = {"distance": common.over_seeds(distances), "L1": common.over_seeds(errors)}
        results[name] = {**spreads, "detected": sum(far), "differs most": places}
        cells = common.plus_minus(spreads["distance"], ".2f"), f"{max(distances):.2f}", f"{sum(far)} of {len(group)}"
        rows.append([name, *cells, common.plus_minus(spreads["L1"], ".5f"), max(found)[1]])
    rank = float(spearmanr(*zip(*pairs, strict=True)).statistic)
    text = common.table(("inputs", "distance", "largest", "warnings", "L1", "differs most"), rows)
    result = {"limit": LIMIT, "inputs": results, "rank correlation": rank}
    common.publish("input_statistics", options, result, f"{text}\n\nRank correlation of distance and L1: {rank:.2f}")


if __name__ == "__main__":
    common.run(main)
