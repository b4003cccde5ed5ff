"""The Lyman-alpha forest of predicted gas and of baselines, compared with that of gas in boxes of other seeds.

python -m benchmarks.forest --seeds 3

Trains the study `forest` of benchmarks/studies.yaml, if it is not trained. FGPA smooths the dark matter over the length
with the smallest error on the box that the network is trained on; two other baselines are fitted to that box. An error
of the flux power in a band is the rms of P1D / that of the target - 1 over the modes of the band. Its square is that of
the mean over the boxes, the bias, plus the variance between the boxes.
"""

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from analysis.evaluation.results import PhaseDiagram, Results
from analysis.evaluation.volume import VolumeFields, config_of_files
from analysis.lyman_alpha.results import BANDS, FGPA, FITTED, PREDICTION, TARGET, TRANSFER, Flux, band_name
from benchmarks import boxes, common, study
from utils.config.sections import EvaluationConfig

STUDY = "forest"
BAND = BANDS[2]  # of the fit of the smoothing and of the scatter between boxes
LENGTHS = (0.0, 0.1, 0.15, 0.2, 0.3)  # Mpc/h
FIT = (-0.5, 0.5)  # log10 of density / mean
HOT = 1e5  # K
METHODS = {  # with their colors
    PREDICTION: "tab:orange",
    FGPA: "tab:blue",
    f"{FGPA}, {FITTED}": "tab:cyan",
    TRANSFER: "tab:green",
}


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


def measures(result: Results) -> dict[str, float]:
    """The values that are compared, of one network on one box."""
    assert result.flux is not None
    assert result.phase_diagram is not None
    values: dict[str, float] = {}
    fields = result.flux.fields
    for name in METHODS:
        measured = result.flux.measures(name).items()
        values |= {f"{label}, {name}": value for label, value in measured if " error, " in label}
        values[f"correlation of the flux, {name}"] = fields[name].correlation
        values[f"PDF distance, {name}"] = result.flux.pdf_distance(name)
        mean = fields[name].unscaled_mean / fields[TARGET].unscaled_mean
        values[f"mean flux / target's, before rescaling, {name}"] = mean
    values["mean gas density / target's"] = result.mass_ratio
    spectrum = result.spectra["log density"]
    for k in (2.0, 5.0, 10.0):
        correlation = float(np.interp(k, spectrum.k, spectrum.correlation))
        values[f"r of log density, k = {k:g} h/Mpc, {PREDICTION}"] = correlation
    diagram = result.phase_diagram
    for name, histogram in ((TARGET, diagram.target), (PREDICTION, diagram.predicted)):
        values[f"T0 (K), {name}"], values[f"gamma, {name}"] = relation(diagram, histogram)
    return values


def errors_of_smoothing(file: str) -> dict[float, float]:
    """FGPA's error on a box with each smoothing length; no network is needed."""
    errors, config = {}, config_of_files(file, file)
    for length in LENGTHS:
        options = EvaluationConfig(sightlines=boxes.SIGHTLINES, pressure_smoothing=length)
        with closing(VolumeFields(file, file, config.model_copy(update={"evaluation": options}))) as fields:
            flux = fields.evaluate(None, "", {}, common.this_machine()).flux
        assert flux is not None
        errors[length] = flux.band_errors(FGPA)[band_name(BAND)]
    return errors


def decomposition(ratios: Sequence[np.ndarray], k: np.ndarray) -> dict[str, float]:
    """Rms error in BAND, and the share of its square that is scatter between boxes."""
    used = np.stack(ratios)[:, (BAND[0] <= k) & (k <= BAND[1])] - 1
    total, bias = np.mean(used**2), np.mean(used.mean(0) ** 2)
    return {"rms": float(np.sqrt(total)), "bias": float(np.sqrt(bias)), "share of scatter": float(1 - bias / total)}


def draw(fluxes: Sequence[Flux], ratios: Mapping[str, Sequence[np.ndarray]], path: Path) -> None:
    """Flux power relative to the target's, and PDFs: mean over boxes and networks, and standard deviation."""
    k, edges = fluxes[0].k, fluxes[0].edges
    with common.plot(path, (9, 3.6), 2) as (power, pdf):
        for name, color in METHODS.items():
            every = np.stack(ratios[name])
            common.band(power, k, every.mean(0), every.std(0), color=color, label=name)
        power.axhspan(0.97, 1.03, color="black", alpha=0.08, linewidth=0, label="±3 %")
        power.set(xscale="log", xlim=(k[0], BANDS[-1][1]), ylim=(0.8, 1.2), xlabel="k (s/km)", ylabel="P1D / target's")
        for name, color in {TARGET: "black", **METHODS}.items():
            mean = np.mean([flux.fields[name].pdf for flux in fluxes], axis=0)
            pdf.plot((edges[1:] + edges[:-1]) / 2, mean, color=color, label=name)
        pdf.set(xlabel="flux F", ylabel="probability density", yscale="log")


def main(argv: Sequence[str] | None = None) -> None:
    options = common.Parser(__doc__, seeds=3, runs=common.RUNS).parse_args(argv)
    options.output = options.output.absolute()
    os.chdir(common.REPOSITORY)
    training_runs = study.training_runs_of(STUDY, options.seeds, options.runs, {})
    if failure := study.run_missing(training_runs):
        raise failure
    made = study.STUDIES[STUDY].simulated(options.runs)
    (volume,) = made.volumes
    (training_box,) = made.training_keys([volume])["train_path"]
    errors = errors_of_smoothing(training_box)
    smoothing, files = min(errors, key=lambda length: errors[length]), made.held_out(volume)
    pairs = [(run.checkpoint, file) for run in training_runs for file in files]
    settings = {"pressure_smoothing": smoothing, "fitted_on": training_box}
    evaluations = [boxes.evaluation(*pair, options.runs, **settings) for pair in pairs]
    fluxes = [evaluation.flux for evaluation in evaluations if evaluation.flux is not None]
    ratios = {name: [flux.ratios[name] for flux in fluxes] for name in METHODS}
    values = boxes.spreads([measures(evaluation) for evaluation in evaluations])
    shares = {name: decomposition(ratio, fluxes[0].k) for name, ratio in ratios.items()}
    by_length = {f"{length:g}": error for length, error in errors.items()}
    result = {
        "smoothing (Mpc/h)": {"fitted": smoothing, "errors on the training box": by_length},
        "measures": values,
        "scatter between boxes": shares,
    }
    rows = [(name, f"{value['mean']:.4g} ± {value['stdev']:.2g}") for name, value in values.items()]
    rows += [
        (f"share of scatter between boxes, {name}", f"{share['share of scatter']:.0%}")
        for name, share in shares.items()
    ]
    text = f"n = {options.seeds} networks × {len(files)} boxes; FGPA smooths over {smoothing:g} Mpc/h.\n\n"
    text += common.table(("measure", "mean ± standard deviation"), rows)
    common.publish(STUDY, options, result, text, lambda path: draw(fluxes, ratios, path))


if __name__ == "__main__":
    common.run(main)
