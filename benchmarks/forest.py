"""The Lyman-alpha forest of predicted gas and of baselines, compared with that of gas in boxes of other seeds.

python -m benchmarks.forest                networks of the config `forest` at z = 3, 2 and 4
python -m benchmarks.forest --size full    the tutorial's network at z = 3, on one GPU, in less than eight minutes
python -m benchmarks.forest --size fine    the same with boxes of 256³ cells of half the size

Simulates the boxes of a study of benchmarks/studies.yaml, trains its networks, and evaluates them on held-out boxes of
the volumes that they are trained on. Results are written after the training and after each evaluation; after an
interruption the same command continues. The log has the seconds of each part.

Densities are calibrated, as those of predict.py are by default, except for "z = 3, own output".

A row is won if the network is better than each baseline by two standard errors, ahead if it is better in the mean over
networks and boxes, and lost if a baseline is better by two standard errors. Δχ² is that of P1D for the total errors of
DESI's early data (benchmarks/desi_p1d.csv), without correlations; z = 3, other gas has other physics.

FGPA smooths the dark matter over the length with the smallest error on the training box. The fitted FGPA has the power
law of the temperatures of that box, and a length of its own; the transfer function is fitted to that box, too. An error
of the flux power in a band is the rms of P1D / that of the target - 1 over its modes. The truth's own error is that of
the simulation, compared with the same box in smaller cells (benchmarks/convergence.py).
"""

import functools
import itertools
import math
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from analysis.evaluation.results import Results
from analysis.evaluation.statistics import PhaseDiagram
from analysis.evaluation.tables import spread
from analysis.evaluation.volume import VolumeFields, config_of_files, fit_gas
from analysis.lyman_alpha.forest import FluxStatistics
from analysis.lyman_alpha.results import BANDS, FGPA, FITTED, PREDICTION, TARGET, TRANSFER, Flux
from analysis.lyman_alpha.setup import FluxOptions, FluxSetup, GasFit
from analysis.slabs import SlabFields, Slabs
from benchmarks import boxes, common, study
from utils.errors import UserError
from utils.files import read_json

SIZES = {"small": "forest", "full": "forest_full", "fine": "forest_fine"}  # studies
BAND = "0.003 to 0.03 s/km"  # of the fit of the smoothing
LENGTHS = (0.0, 0.05, 0.08, 0.09, 0.1, 0.11, 0.12, 0.14, 0.16)  # Mpc/h
FIT_LINES = 1024  # sight-lines along each axis, for the fit of the smoothing
FIT = (-0.5, 0.5)  # log10 of density / mean
HOT = 1e5  # K
FITTED_FGPA = f"{FGPA}, {FITTED}"
METHODS = {PREDICTION: "tab:orange", FGPA: "tab:blue", FITTED_FGPA: "tab:cyan", TRANSFER: "tab:green"}  # their colors
TRUTH = "the truth's own error"
RATIO = " / target's"
DESI = np.loadtxt(Path(__file__).with_name("desi_p1d.csv"), delimiter=",", usecols=(0, 1, 3)).tolist()
CHI_SQUARED = "Δχ² of P1D for DESI's errors"
OUTCOMES = {"won": -2.0, "ahead": 0.0, "even": 2.0, "lost": math.inf}  # limits of the worst difference, see above


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


def chi_squared(flux: Flux, name: str) -> dict[str, float]:
    """Δχ² of a field's P1D, by its name; none if desi_p1d.csv has no bins of this redshift."""
    bins = [row for z, *row in DESI if z == flux.redshift and flux.k[0] <= row[0] <= flux.k[-1] / 2]
    if not bins:
        return {}
    k, errors = np.transpose(bins)
    power = np.exp(np.interp(np.log(k), np.log(flux.k), np.log(flux.fields[TARGET].power)))
    excess = power * (np.interp(np.log(k), np.log(flux.k), flux.ratios[name]) - 1) / errors
    return {CHI_SQUARED: float(excess @ excess)}


def comparison(flux: Flux, name: str) -> dict[str, float]:
    """Comparisons of a field's flux with the target's: errors, whose ideal is 0, and ratios, whose ideal is 1."""
    kept = {label: value for label, value in flux.measures(name).items() if not label.startswith("P1D ratio")}
    kept |= chi_squared(flux, name)
    ratio = flux.fields[name].unscaled_mean / flux.fields[TARGET].unscaled_mean
    return kept | {f"mean flux{RATIO}, before rescaling": ratio}


def measures(result: Results) -> dict[str, float]:
    """The values that are compared, of one network on one box; those of a method end with its name."""
    assert result.flux is not None
    values: dict[str, float] = {}
    for name in METHODS:
        values |= {f"{label}, {name}": value for label, value in comparison(result.flux, name).items()}
    values[f"mean gas density{RATIO}"] = result.mass_ratio
    spectrum, diagram = result.spectra["log density"], result.statistics["phase_diagram"]
    assert isinstance(diagram, PhaseDiagram)
    for k in (2.0, 5.0, 10.0):
        correlation = float(np.interp(k, spectrum.k, spectrum.correlation))
        values[f"r of log density, k = {k:g} h/Mpc, {PREDICTION}"] = correlation
        ratio = np.interp(k, result.spectra["density"].k, result.spectra["density"].ratio)
        values[f"power of the density{RATIO}, k = {k:g} h/Mpc, {PREDICTION}"] = float(ratio)
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


@functools.cache
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
    boxes: int  # per network
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
        """Mean and spreads of each measure; of several networks, one whose boxes are incomplete does not count."""
        count = min(self.boxes, len(self.evaluations))
        every = [measures(evaluation) for evaluation in self.evaluations]
        every = every[: len(every) // count * count]
        once = {name: every[:count] if is_baseline(name) else every for name in every[0]}
        spreads = {name: spread([by_name[name] for by_name in part], count) for name, part in once.items()}
        return {"smoothing (Mpc/h)": self.smoothing, "measures": spreads, TRUTH: self.truth.get("measures", {})}


def is_baseline(name: str) -> bool:
    """True for measures that do not depend on the network."""
    return any(name.endswith(f", {method}") for method in METHODS if method != PREDICTION)


def shown(values: Mapping[str, Any] | None, factor: float) -> str:
    """Mean and both deviations times a factor."""
    names = "mean", "stdev over boxes", "stdev over networks"
    return " ± ".join(f"{factor * values[name]:.2f}" for name in names if name in values) if values else ""


def outcome(values: Mapping[str, Any], label: str) -> str:
    """The row of a measure is one of OUTCOMES; empty without baselines. See above."""
    found = {name: np.array(given["values"]) for name, given in values.items() if name in METHODS and given}
    errors = {name: np.abs(part - (not is_error(label))) for name, part in found.items()}  # [networks, boxes]
    differences = [errors[PREDICTION] - part for name, part in errors.items() if name != PREDICTION]
    scores = [part.mean() / max(1e-30, math.hypot(*map(standard_error, (part, part.T)))) for part in differences]
    return next(name for name, limit in OUTCOMES.items() if max(scores) < limit) if scores else ""


def standard_error(values: np.ndarray) -> float:
    """That of the mean over the means of columns; 0 for a single one."""
    means = values.mean(0)
    return float(means.std(ddof=1) / math.sqrt(len(means))) if len(means) > 1 else 0.0


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
    return " error" in label or "distance" in label or CHI_SQUARED in label


def block_table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Of `by_method`: a row per measure and a column per method, in %; the best method is bold."""
    lines = []
    for label, values in rows.items():
        distances = {name: abs(values[name]["mean"] - (not is_error(label))) for name in METHODS if values[name]}
        best = min(distances, key=lambda name: distances[name]) if len(distances) > 1 else None
        texts = {name: shown(value, 1 if CHI_SQUARED in label else 100) for name, value in values.items()}
        texts = {name: f"**{text}**" if name == best else text for name, text in texts.items()}
        lines.append([label, *texts.values(), outcome(values, label)])
    return common.table(("%", *METHODS, TRUTH, "row"), lines)


def gains(values: Mapping[str, Any] | None) -> list[str]:
    """The errors of FGPA and of the best baseline relative to the network's; empty cells without values."""
    if values is None:
        return ["", ""]
    network, *baselines = (values[name]["mean"] for name in METHODS)
    return [f"{error / network:.2f}" for error in (baselines[0], min(baselines))]


def page(results: Mapping[str, Any], training: Sequence[Mapping[str, Any]]) -> str:
    """All tables so far."""
    parts, blocks = [], {volume: by_method(result) for volume, result in results.items()}
    for volume, result in results.items():
        lengths = "; ".join(f"{name}: {fit['fitted']:g}" for name, fit in result["smoothing (Mpc/h)"].items())
        count = np.size(next(iter(result["measures"].values()))["values"])
        outcomes = [outcome(values, label) for label, values in blocks[volume].items()]
        counts = ", ".join(f"{outcomes.count(name)} {name}" for name in OUTCOMES)
        parts.append(f"{volume}: n = {count} pairs of a network and a box; {counts}. Smoothing in Mpc/h: {lengths}.")
        parts.append(block_table(blocks[volume]))
    heads = [f"{name}, {volume}" for volume in blocks for name in (FGPA, "best baseline")]
    labels = [label for label in next(iter(blocks.values()), {}) if is_error(label)]
    rows = [[label, *(cell for block in blocks.values() for cell in gains(block.get(label)))] for label in labels]
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


def costs(made: boxes.Boxes, checkpoint: Path) -> dict[str, float]:
    """Seconds of simulating a held-out box, and of predicting it, each with the command that users have."""
    volume, seconds = next(iter(made.volumes)), dict[str, float]()
    with tempfile.TemporaryDirectory() as folder:
        box, gas, log = (Path(folder) / name for name in ("box.h5", "gas.h5", "log"))
        predict = [sys.executable, "predict.py", f"--checkpoint={checkpoint}", f"--input={box}", f"--output={gas}"]
        simulate = boxes.simulation_command(made.boxes(volume, "held_out")[0], box)
        for name, command in {"simulation": simulate, "prediction": predict}.items():
            start = time.perf_counter()
            common.call(f"the {name}", command, log)
            seconds[name] = time.perf_counter() - start
    return seconds


def main(argv: Sequence[str] | None = None) -> None:
    parser = common.Parser(__doc__, seeds=None, runs=common.RUNS)
    parser.add_argument("--size", choices=SIZES, default="small", help="of network and boxes (%(default)s)")
    options = parser.parse_in_repository(argv)
    name = SIZES[options.size]
    chosen, made = study.STUDIES[name], study.STUDIES[name].simulated(options.runs)
    options.seeds = options.seeds or chosen.seeds
    if chosen.simulation.get("device") == "cuda" and not torch.cuda.is_available():
        raise UserError(f"torch sees no GPU, which --size {options.size} needs; give --size small")
    made.simulate()
    training_runs = study.trained(name, options.seeds, options.runs)
    training = [{"condition": run.condition.name, **run.result()} for run in training_runs]
    blocks: dict[str, Block] = {}

    def write(publish: Callable[..., object], *drawing: common.Drawing, **costs: float) -> None:
        results = {volume: block.result() for volume, block in blocks.items()}
        text = page(results, training) + "".join(f"\n\n{name}: {seconds:.0f} s" for name, seconds in costs.items())
        result = {"volumes": results, "training": training, "seconds of a box": costs}
        publish(name, options, result, text, *drawing)

    write(common.save)
    for volume in made.volumes:
        (training_box, *_), files = made.files(volume, "train"), made.files(volume, "held_out")
        options_of, block = made.volumes[volume], Block(fitted_smoothing(training_box), len(files))
        trained_on, calibrated = options_of.get("like", volume), options_of.get("calibrated", True)
        checkpoints = [run.checkpoint for run in training_runs if trained_on in run.condition.boxes]
        settings = {"runs": options.runs, "calibrated": calibrated, "fitted_on": training_box}
        for checkpoint, file in itertools.product(checkpoints, files):
            pairs = zip((checkpoint, checkpoints[0]), (fit["fitted"] for fit in block.smoothing.values()), strict=True)
            block.add(*(boxes.evaluation(net, file, pressure_smoothing=length, **settings) for net, length in pairs))
            blocks[volume] = block
            write(common.save)
    write(common.publish, lambda path: draw(blocks, path), **costs(made, checkpoints[0]))


if __name__ == "__main__":
    common.run(main)
