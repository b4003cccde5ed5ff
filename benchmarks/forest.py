"""The Lyman-alpha forest of predicted gas and of FGPA, compared with that of simulated gas on boxes of other seeds.

python -m benchmarks.forest --seeds 3

Trains the study `forest` of benchmarks/studies.yaml, if it is not trained. FGPA smooths the dark matter over the length
with the smallest error on the box that the network is trained on. An error of the flux power in a band is the rms of
P1D / that of the target - 1 over the modes of the band. Its square is that of the mean over the boxes, the bias, plus
the variance between the boxes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import boxes, common, study
from utils.config.sections import EvaluationConfig
from utils.errors import one_line_errors
from utils.evaluation.results import PhaseDiagram, Results
from utils.evaluation.volume import VolumeFields, config_of_files
from utils.lyman_alpha.results import BANDS, FGPA, PREDICTION, TARGET, band_name

STUDY = "forest"
BAND = BANDS[2]  # of the fit of the smoothing and of the scatter between boxes
LENGTHS = (0.0, 0.1, 0.15, 0.2, 0.3)  # Mpc/h
FIT = (-0.5, 0.5)  # log10 of density / mean
HOT = 1e5  # K


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


def measures(found: Results) -> dict[str, float]:
    """What is compared, of one network on one box."""
    assert found.flux is not None
    assert found.phase_diagram is not None
    values: dict[str, float] = {}
    fields = found.flux.fields
    for name in (PREDICTION, FGPA):
        for quantity, errors in (("P1D", found.flux.band_errors(name)), ("P3D", found.flux.p3d_errors(name))):
            values |= {f"{quantity} error, {band}, {name}": error for band, error in errors.items()}
        values[f"correlation of the flux, {name}"] = fields[name].correlation
        values[f"PDF distance, {name}"] = found.flux.pdf_distance(name)
        mean = fields[name].unscaled_mean / fields[TARGET].unscaled_mean
        values[f"mean flux / target's, before rescaling, {name}"] = mean
    values["mean gas density / target's"] = found.mass_ratio
    spectrum = found.spectra["log density"]
    for k in (2.0, 5.0, 10.0):
        values[f"r of log density, k = {k:g} h/Mpc, {PREDICTION}"] = float(
            np.interp(k, spectrum.k, spectrum.correlation)
        )
    diagram = found.phase_diagram
    for name, histogram in ((TARGET, diagram.target), (PREDICTION, diagram.predicted)):
        values[f"T0 (K), {name}"], values[f"gamma, {name}"] = relation(diagram, histogram)
    return values


def fitted_smoothing(file: str) -> tuple[float, dict[str, float]]:
    """The length with FGPA's smallest error on a box, and the errors of all lengths; no network is needed."""
    errors, config = {}, config_of_files(file, file)
    for length in LENGTHS:
        options = EvaluationConfig(sightlines=boxes.SIGHTLINES, pressure_smoothing=length)
        with closing(VolumeFields(file, file, config.model_copy(update={"evaluation": options}))) as fields:
            flux = fields.evaluate(None, "", {}, common.this_machine()).flux
        assert flux is not None
        errors[f"{length:g}"] = flux.band_errors(FGPA)[band_name(BAND)]
    return float(min(errors, key=lambda length: errors[length])), errors


def decomposition(ratios: Sequence[np.ndarray], k: np.ndarray) -> dict[str, float]:
    """Rms error in BAND, and the share of its square that is scatter between boxes."""
    used = np.stack(ratios)[:, (BAND[0] <= k) & (k <= BAND[1])] - 1
    total, bias = np.mean(used**2), np.mean(used.mean(0) ** 2)
    return {"rms": float(np.sqrt(total)), "bias": float(np.sqrt(bias)), "share of scatter": float(1 - bias / total)}


def draw(k: np.ndarray, ratios: Mapping[str, Sequence[np.ndarray]], pdfs: Mapping[str, Any], path: Path) -> None:
    """Flux power relative to the target's, and PDFs: mean over boxes and networks, and standard deviation."""
    edges = pdfs["edges"]
    with common.plot(path, (9, 3.6), 2) as (power, pdf):
        for name, color in ((PREDICTION, "tab:orange"), (FGPA, "tab:blue")):
            every = np.stack(ratios[name])
            mean, deviation = every.mean(0), every.std(0)
            power.plot(k, mean, color=color, label=name)
            power.fill_between(k, mean - deviation, mean + deviation, color=color, alpha=0.2, linewidth=0)
        power.axhspan(0.97, 1.03, color="black", alpha=0.08, linewidth=0, label="±3 %")
        power.set(xscale="log", xlim=(k[0], BANDS[-1][1]), ylim=(0.8, 1.2), xlabel="k (s/km)", ylabel="P1D / target's")
        for name, color in ((TARGET, "black"), (PREDICTION, "tab:orange"), (FGPA, "tab:blue")):
            pdf.plot((edges[1:] + edges[:-1]) / 2, np.mean(pdfs[name], axis=0), color=color, label=name)
        pdf.set(xlabel="flux F", ylabel="probability density", yscale="log")


def main(argv: Sequence[str] | None = None) -> None:
    parser = common.Parser(__doc__)
    parser.add_integers(seeds=3, limit=3600)
    parser.add_argument("--runs", type=Path, default=Path("runs/studies"), help="of the training runs (%(default)s)")
    options = parser.parse_args(argv)
    options.output = options.output.absolute()
    os.chdir(common.REPOSITORY)
    training_runs = study.training_runs_of(STUDY, options.seeds, options.runs, {})
    if failure := study.run_missing(training_runs, options.limit, math.inf):
        raise failure
    simulation = study.STUDIES[STUDY].simulation
    held_out = [
        boxes.box(options.runs / "boxes", simulation, simulation["held_out"]["grid"], seed)
        for seed in simulation["held_out"]["seeds"]
    ]
    trained_on = boxes.box(
        options.runs / "boxes", simulation, *(simulation["train"][key][0] for key in ("grids", "seeds"))
    )
    smoothing, errors = fitted_smoothing(trained_on)
    found = [
        boxes.evaluation(run.checkpoint, file, options.runs, smoothing) for run in training_runs for file in held_out
    ]
    flux = [one.flux for one in found if one.flux is not None]
    ratios = {name: [one.ratios[name] for one in flux] for name in (PREDICTION, FGPA)}
    rows = [measures(one) for one in found]
    values = {name: common.over_seeds([row[name] for row in rows]) for name in rows[0]}
    shares = {name: decomposition(ratio, flux[0].k) for name, ratio in ratios.items()}
    result = {
        "settings": common.settings(options),
        "smoothing (Mpc/h)": {"fitted": smoothing, "errors on the training box": errors},
        "measures": values,
        "scatter between boxes": shares,
    }
    lines = [(name, f"{value['mean']:.4g} ± {value['stdev']:.2g}") for name, value in values.items()]
    lines += [
        (f"share of scatter between boxes, {name}", f"{one['share of scatter']:.0%}") for name, one in shares.items()
    ]
    text = f"n = {options.seeds} networks × {len(held_out)} boxes; FGPA smooths over {smoothing:g} Mpc/h.\n\n"
    pdfs = {"edges": flux[0].edges, **{name: [one.fields[name].pdf for one in flux] for name in (TARGET, *ratios)}}
    common.publish(
        STUDY,
        result,
        options.output,
        text + common.table(("measure", "mean ± standard deviation"), lines),
        lambda path: draw(flux[0].k, ratios, pdfs, path),
    )


if __name__ == "__main__":
    with one_line_errors():
        main()
