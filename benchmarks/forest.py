"""The Lyman-alpha forest of predicted gas and of baselines, compared with that of gas in boxes of other seeds.

python -m benchmarks.forest                the demo's network at z = 3, 2 and 4
python -m benchmarks.forest --size full    the tutorial's network at z = 3, on one GPU, in less than eight minutes
python -m benchmarks.forest --size fine    the same with boxes of 256³ cells of half the size

Simulates the boxes of a study of benchmarks/studies.yaml, trains its networks, and evaluates them on held-out boxes of
the volumes that they are trained on. Results are written after the training and after each evaluation; after an
interruption the same command continues. The log has the seconds of each part.

FGPA smooths the dark matter over the length with the smallest error on the training box. The fitted FGPA has the power
law of the temperatures of that box, and a length of its own; the transfer function is fitted to that box, too. An error
of the flux power in a band is the rms of P1D / that of the target - 1 over its modes. The truth's own error is that of
the simulation, compared with the same box in smaller cells (benchmarks/convergence.py).
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from analysis.evaluation.results import Results
from analysis.evaluation.statistics import PhaseDiagram
from analysis.evaluation.volume import VolumeFields, config_of_files, fit_gas
from analysis.lyman_alpha.forest import FluxStatistics
from analysis.lyman_alpha.results import BANDS, FGPA, FITTED, PREDICTION, TARGET, TRANSFER, Flux
from analysis.lyman_alpha.setup import FluxOptions, FluxSetup, GasFit
from analysis.slabs import SlabFields, Slabs
from benchmarks import boxes, common, study
from utils.errors import UserError
from utils.files import read_json

SIZES = {"demo": "forest", "full": "forest_full", "fine": "forest_fine"}  # studies
BAND = "0.003 to 0.03 s/km"  # of the fit of the smoothing
LENGTHS = (0.0, 0.05, 0.08, 0.09, 0.1, 0.11, 0.12, 0.14, 0.16)  # Mpc/h
FIT_LINES = 1024  # sight-lines along each axis, for the fit of the smoothing
FIT = (-0.5, 0.5)  # log10 of density / mean
HOT = 1e5  # K
FITTED_FGPA = f"{FGPA}, {FITTED}"
METHODS = {PREDICTION: "tab:orange", FGPA: "tab:blue", FITTED_FGPA: "tab:cyan", TRANSFER: "tab:green"}  # their colors
TRUTH = "the truth's own error"
RATIO = " / target's"


def relation(diagram: PhaseDiagram, histogram: np.ndarray) -> tuple[float, float]:
    """T0 in K and gamma of a power law through the median temperatures of gas of about the mean density."""
    density, kelvin = ((edges[1:] + edges[:-1]) / 2 for edges in (diagram.density_edges, diagram.temperature_edges))
    points = []
    for place, column in zip(density, histogram, strict=True):
        shares = np.cumsum(np.where(kelvin < math.log10(HOT), column, 0))
        if FIT[0] < place < FIT[1] and shares[-1] > 0:
            points.append((place, np.interp(shares[-1] / 2, shares, diagram.temperature_edges[1:])))
    places, medians = np.transpose(points)
    slope, level = np.polyfit(places, medians, 1)
    return float(10**level), float(1 + slope)


def comparison(flux: Flux, name: str) -> dict[str, float]:
    """Errors of the statistics of a field's flux, and the ratio of its mean."""
    values = {label: value for label, value in flux.measures(name).items() if " error, " in label}
    ratio = flux.fields[name].unscaled_mean / flux.fields[TARGET].unscaled_mean
    return values | {"PDF distance": flux.pdf_distance(name), f"mean flux{RATIO}, before rescaling": ratio}


def measures(result: Results) -> dict[str, float]:
    """The values that are compared, of one network on one box; those of a method end with its name."""
    assert result.flux is not None
    values: dict[str, float] = {}
    for name in METHODS:
        compared = comparison(result.flux, name) | {"correlation of the flux": result.flux.fields[name].correlation}
        values |= {f"{label}, {name}": value for label, value in compared.items()}
    values[f"mean gas density{RATIO}"] = result.mass_ratio
    spectrum, diagram = result.spectra["log density"], result.statistics["phase_diagram"]
    assert isinstance(diagram, PhaseDiagram)
    for k in (2.0, 5.0, 10.0):
        correlation = float(np.interp(k, spectrum.k, spectrum.correlation))
        values[f"r of log density, k = {k:g} h/Mpc, {PREDICTION}"] = correlation
    truth, predicted = relation(diagram, diagram.target), relation(diagram, diagram.predicted)
    for name, true, value in zip(("T0", "gamma"), truth, predicted, strict=True):
        values[f"{name}{RATIO}, {PREDICTION}"] = value / true
    return values


def flux_of(file: str, fit: GasFit | None = None, **options: Any) -> Flux:
    """The flux of the gas of a box as the target, and that of baselines, with these options of the evaluation."""
    world = common.this_machine()
    with closing(VolumeFields(file, file, config_of_files(file, file))) as fields:
        slabs = Slabs(fields.inputs.shape, world)
        inputs, gas = (slabs.reader(part.planes) for part in (fields.inputs, fields.target))
        setup = FluxSetup.of(fields.inputs, fields.config, FluxOptions(**options))
        assert setup is not None
        return FluxStatistics(replace(setup, fit=fit), slabs).results(SlabFields(inputs, gas, gas))


def fitted_smoothing(file: str) -> dict[str, dict[str, Any]]:
    """For FGPA with the published and with the fitted temperatures: the length in Mpc/h with the smallest error."""
    with common.logged(f"fitting FGPA to {file}"):
        fit = fit_gas(file, config_of_files(file, file), common.this_machine())
        fluxes = {length: flux_of(file, fit, sightlines=FIT_LINES, pressure_smoothing=length) for length in LENGTHS}
    fits = {}
    for name in (FGPA, FITTED_FGPA):
        errors = {length: flux.band_errors(name)[BAND] for length, flux in fluxes.items()}
        fits[name] = {"fitted": min(errors, key=lambda length: errors[length]), "errors on the training box": errors}
    return fits


@dataclass
class Block:
    """The evaluations on the boxes of one volume so far."""

    smoothing: Mapping[str, Mapping[str, Any]]  # see fitted_smoothing
    evaluations: list[Results] = field(default_factory=list)
    fluxes: list[Flux] = field(default_factory=list)  # of the evaluations

    def add(self, result: Results, fitted: Results) -> None:
        """Adds an evaluation, with the fitted FGPA of another one, whose smoothing is that of its own fit."""
        assert result.flux is not None
        assert fitted.flux is not None
        fields = {**result.flux.fields, FITTED_FGPA: fitted.flux.fields[FITTED_FGPA]}
        self.fluxes.append(replace(result.flux, fields=fields))
        self.evaluations.append(replace(result, flux=self.fluxes[-1]))

    @property
    def truth(self) -> Mapping[str, Any]:
        """The row of the convergence study about this redshift and cell; empty without one."""
        stored, cell = read_json(common.RESULTS / "convergence.json"), self.evaluations[0].cell or 0
        rows = stored["results"] if stored["settings"]["redshift"] == self.fluxes[0].redshift else []
        return next((row for row in rows if math.isclose(row["cell (Mpc/h)"], cell, rel_tol=1e-6)), {})

    def result(self) -> dict[str, Any]:
        """Mean and spread of each measure over the evaluations."""
        values = boxes.spreads([measures(evaluation) for evaluation in self.evaluations])
        return {"smoothing (Mpc/h)": self.smoothing, "measures": values, TRUTH: self.truth.get("measures", {})}


def by_method(result: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Each measure's values by method; those of no method's name are the prediction's."""
    rows: dict[str, dict[str, Any]] = {}
    for key, values in result["measures"].items():
        method = next((name for name in METHODS if key.endswith(f", {name}")), PREDICTION)
        label = key.removesuffix(f", {method}")
        rows.setdefault(label, {**dict.fromkeys(METHODS), TRUTH: result[TRUTH].get(label)})[method] = values
    return rows


def is_error(label: str) -> bool:
    """True if the ideal is 0, False if it is 1."""
    return " error" in label or "distance" in label


def block_table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Of `by_method`: a row per measure and a column per method, in %; the best method is bold."""
    lines = []
    for label, values in rows.items():
        distances = {name: abs(values[name]["mean"] - (not is_error(label))) for name in METHODS if values[name]}
        best = min(distances, key=lambda name: distances[name]) if len(distances) > 1 else None
        texts = {name: common.plus_minus(value, ".2f", 100) for name, value in values.items()}
        lines.append([label, *(f"**{text}**" if name == best else text for name, text in texts.items())])
    return common.table(("%", *METHODS, TRUTH), lines)


def gains(values: Mapping[str, Any]) -> list[str]:
    """The errors of FGPA and of the best baseline relative to the network's."""
    network, *baselines = (values[name]["mean"] for name in METHODS)
    return [f"{error / network:.2f}" for error in (baselines[0], min(baselines))]


def page(results: Mapping[str, Any], training: Sequence[Mapping[str, Any]]) -> str:
    """All tables so far."""
    parts, blocks = [], {volume: by_method(result) for volume, result in results.items()}
    for volume, result in results.items():
        lengths = "; ".join(f"{name}: {fit['fitted']:g}" for name, fit in result["smoothing (Mpc/h)"].items())
        count = next(iter(result["measures"].values()))["n"]
        parts.append(f"{volume}: n = {count} pairs of a network and a box. Smoothing in Mpc/h: {lengths}.")
        parts.append(block_table(blocks[volume]))
    heads = [f"{name}, {volume}" for volume in blocks for name in (FGPA, "best baseline")]
    labels = [label for label in next(iter(blocks.values()), {}) if is_error(label)]
    rows = [[label, *(cell for block in blocks.values() for cell in gains(block[label]))] for label in labels]
    losses = [f"{run['condition']}, seed {run['seed']}: {run['curve'][-1][study.LOSS]:.5f}" for run in training]
    parts += [common.table(["error / the network's", *heads], rows), f"Validation losses: {'; '.join(losses)}."]
    return "\n\n".join(parts)


def draw(blocks: Mapping[str, Block], path: Path) -> None:
    """Flux power relative to the target's, by volume: means, and standard deviations."""
    with common.plot(path, (1 + 4 * len(blocks), 3.8), len(blocks)) as panels:
        for power, (volume, block) in zip(panels, blocks.items(), strict=True):
            k, truth = block.fluxes[0].k, block.truth.get("P1D ratio", [])
            for name, color in METHODS.items():
                every = np.stack([flux.ratios[name] for flux in block.fluxes])
                common.band(power, k, every.mean(0), every.std(0), color=color, label=name)
            power.plot(k[: len(truth)], truth, "k--", linewidth=1, label=f"{TARGET} / that in smaller cells")
            power.axhspan(0.97, 1.03, color="black", alpha=0.08, linewidth=0, label="±3 %")
            power.set(xscale="log", xlim=(k[0], BANDS[-1][1]), ylim=(0.8, 1.2), xlabel="k (s/km)", title=volume)
        panels[0].set_ylabel("P1D / target's")


def main(argv: Sequence[str] | None = None) -> None:
    parser = common.Parser(__doc__, seeds=None, runs=common.RUNS)
    parser.add_argument("--size", choices=SIZES, default="demo", help="of network and boxes (%(default)s)")
    options = parser.parse_in_repository(argv)
    name = SIZES[options.size]
    chosen, made = study.STUDIES[name], study.STUDIES[name].simulated(options.runs)
    options.seeds = options.seeds or chosen.seeds
    if chosen.simulation.get("device") == "cuda" and not torch.cuda.is_available():
        raise UserError(f"torch sees no GPU, which --size {options.size} needs; give --size demo")
    made.simulate()
    training_runs = study.trained(name, options.seeds, options.runs)
    training = [{"condition": run.condition.name, **run.result()} for run in training_runs]
    blocks: dict[str, Block] = {}

    def write(publish: Callable[..., object], *drawing: common.Drawing) -> None:
        results = {volume: block.result() for volume, block in blocks.items()}
        publish(name, options, {"volumes": results, "training": training}, page(results, training), *drawing)

    write(common.save)
    for volume in made.volumes:
        (training_box, *_), files = made.files(volume, "train"), made.files(volume, "held_out")
        block = Block(fitted_smoothing(training_box))
        checkpoints = [run.checkpoint for run in training_runs if volume in run.condition.boxes]
        for checkpoint, file in itertools.product(checkpoints, files):
            own, fitted = (
                boxes.evaluation(network, file, options.runs, pressure_smoothing=fit["fitted"], fitted_on=training_box)
                for network, fit in zip((checkpoint, checkpoints[0]), block.smoothing.values(), strict=True)
            )
            block.add(own, fitted)
            blocks[volume] = block
            write(common.save)
    write(common.publish, lambda path: draw(blocks, path))


if __name__ == "__main__":
    common.run(main)
