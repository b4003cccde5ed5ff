"""The main results of an evaluation as tables, for the log and for the report."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from analysis.evaluation.base import Table, number_text, reference_shells
from analysis.evaluation.results import Results, Spectrum, spectrum_names
from analysis.lyman_alpha.results import PREDICTION, Flux
from utils.config.channels import Channel

GOOD_CORRELATION = 0.9
POWER_TOLERANCE = 0.1
LINEAR_DENSITY = "density, linear"
BEST = " *"  # after the value of the best method of a row


def lines(evaluation: Results) -> list[str]:
    """All tables as lines of a log, and the conclusion."""
    tables = [channel_table(evaluation), field_table(evaluation)]
    tables += [statistic.table(evaluation) for statistic in evaluation.statistics.values()]
    tables += [flux_table(evaluation.flux)] if evaluation.flux else []
    return [*(line for table in filter(None, tables) for line in aligned(table)), conclusion(evaluation)]


def notes(metadata: Mapping[str, Any]) -> list[str]:
    """Sentences about the box that a reader of the results must know."""
    sentences, use = [metadata["note"]] if "note" in metadata else [], metadata.get("input_use") or ""
    if use:
        fitted = ", and the calibration was fitted to its gas density"
        fitted *= bool(metadata.get("density_factor"))
        chosen = f"the checkpoint was chosen on it{fitted}"
        reason = "errors on other boxes may be larger" if use.startswith("training") else chosen
        sentences.append(f"the box is {use}: {reason}; evaluate on a box of another seed")
    if differences := metadata.get("input_differences"):
        sentences.append(f"the box differs from the training data: {differences}; see docs/generalization.md")
    return [*sentences, *metadata.get("warnings", ())]


def conclusion(evaluation: Results) -> str:
    """Sentences that compare the prediction with copying the input, with a constant and with the flux's baseline."""
    beaten = (evaluation.l1 < evaluation.copied_l1) | np.isnan(evaluation.copied_l1)
    beaten &= evaluation.r2 > 0  # 0: the mean, everywhere
    beaten |= evaluation.l1 == 0  # a perfect prediction, which copying or a constant may equal
    worse = [channel.name for channel, is_beaten in zip(evaluation.channels, beaten, strict=True) if not is_beaten]
    baseline = _better_baseline(evaluation.flux) if evaluation.flux else ""
    if not worse:
        return f"The prediction of each channel is better than copying the input and than a constant.{baseline}"
    names = "each channel" if len(worse) == len(beaten) else ", ".join(worse)
    warns, remedy = evaluation.metadata.get("warnings"), "train longer, or check the data and the learning rate"
    remedy = "check the data, as the notes say, or train longer" if warns else remedy
    return f"The prediction of {names} is no better than copying the input or than a constant: {remedy}.{baseline}"


def _better_baseline(flux: Flux) -> str:
    """A sentence if a baseline without a network has a smaller error of P1D than the prediction."""
    errors = {name: flux.power_error(name) for name in flux.ratios}
    own, measure = errors[PREDICTION], f"mean |P1D ratio − 1| to {flux.largest_k:.2g} s/km"
    better = ((name, error) for name, error in errors.items() if error < own)
    sentence = " {}, which needs no network, has a smaller {}: {:.3f}, the prediction {:.3f}."
    return "".join(sentence.format(name, measure, error, own) for name, error in better)


def summary_table(evaluation: Results) -> Table:
    """`channel_table` with the scale where each field's correlation is lost, and a phrase about its power."""
    names = (channel.name for channel in evaluation.channels)
    fields = dict(zip(names, spectrum_names(evaluation.channels), strict=True))
    header, *rows = channel_table(evaluation)
    if "density" in evaluation.spectra:  # its power is that of clumps: what holds for its logarithm says little of it
        rows.append([LINEAR_DENSITY, "", "", "", ""])
        fields[LINEAR_DENSITY] = "density"
    structures = {name: _structure(evaluation.spectra[field], evaluation) for name, field in fields.items()}
    head = [*header, f"r passes {GOOD_CORRELATION} at", "power"]
    return [head, *([*row, *structures.get(row[0], ("", ""))] for row in rows)]


def _structure(spectrum: Spectrum, evaluation: Results) -> tuple[str, str]:
    """The scale at which r passes GOOD_CORRELATION, and a phrase about the power."""
    if not math.isfinite(spectrum.ratio[0]):
        return "unknown", "no structure, or not finite"
    limit = spectrum.resolution(spectrum.correlation, GOOD_CORRELATION)
    place = "no scale"
    if limit is not None:
        largest = ", the largest scale" if limit == spectrum.k[0] else ""
        place = f"k = {limit:.2g} {evaluation.wavenumber_unit} ({_scale(limit, evaluation)}{largest})"
    return place, _power(spectrum, evaluation)


def _power(spectrum: Spectrum, evaluation: Results) -> str:
    """A phrase about the power on all scales."""
    with np.errstate(divide="ignore"):
        error = np.nan_to_num(np.abs(np.log(spectrum.ratio)), nan=np.inf)
    wrong = np.flatnonzero(error > math.log(1 + POWER_TOLERANCE))
    if not wrong.size:
        return f"right to {POWER_TOLERANCE:.0%} on all scales"
    worst = int(error.argmax())
    factor = f"{spectrum.ratio[worst]:.2g} times the target's at k = {spectrum.k[worst]:.2g}"
    if wrong[0] == 0:
        return f"wrong on the largest scales, at worst {factor}"
    return f"right to {POWER_TOLERANCE:.0%} above {_scale(spectrum.k[wrong[0]], evaluation)}, at worst {factor}"


def _scale(k: float, evaluation: Results) -> str:
    """The wavelength of a wavenumber."""
    return f"{2 * math.pi / k:.2g} {'cells' if evaluation.cell is None else 'Mpc/h'}"


def channel_table(evaluation: Results) -> Table:
    """Errors of each channel and of copying the input's, and the mean error in physical units."""
    rows = [["channel", "L1", "L1 of the input", "R²", "mean error"]]
    errors = evaluation.l1, evaluation.copied_l1, evaluation.r2
    for channel, l1, copied, r2 in zip(evaluation.channels, *errors, strict=True):
        error = l1 * channel.scale / (math.log(10) if channel.is_log else 1)
        number = number_text(error) if error >= 0.001 else f"{error:.3g}"
        mean = f"{number} {residual_unit(channel)}" if channel.unit else "unknown"
        rows.append([channel.name, f"{l1:.5f}", "" if np.isnan(copied) else f"{copied:.5f}", number_text(r2, 4), mean])
    rows.append(["all channels", f"{evaluation.l1.mean():.5f}", "", "", ""])
    if math.isfinite(evaluation.divergence_r2):
        rows.append(["velocity divergence", "", "", number_text(evaluation.divergence_r2, 4), ""])
    if math.isfinite(evaluation.mass_ratio):
        factor = evaluation.metadata.get("density_factor", 0)  # 0: unknown; a list: of several networks
        text = ", ".join(f"{value:.4f}" for value in np.atleast_1d(factor or 0))
        state = ", not calibrated" if factor is None else f", calibrated by {text}" if factor else ""
        rows.append([f"mean gas density / target's{state}", "", "", "", number_text(evaluation.mass_ratio, 4)])
    return rows


def field_table(evaluation: Results) -> Table:
    """A column per field: r and power ratio at the reference wavenumbers, and the effective resolutions."""
    first = next(iter(evaluation.spectra.values()))
    ks = [f"{k:.2g}" for k in first.k[reference_shells(first.k)]]
    header = [f"field (k in {evaluation.wavenumber_unit})", *(f"r at k = {k}" for k in ks)]
    rows = [[*header, *(f"power ratio at {k}" for k in ks), *(f"k at {level}" for level in first.resolutions)]]
    for name, spectrum in evaluation.spectra.items():
        shells = reference_shells(spectrum.k)
        row = [name, *map(number_text, (*spectrum.correlation[shells], *spectrum.ratio[shells]))]
        rows.append(row + ["not reached" if k is None else f"{k:.2g}" for k in spectrum.resolutions.values()])
    return [list(column) for column in zip(*rows, strict=True)]


def flux_table(flux: Flux) -> Table:
    """A column per field: mean flux before rescaling, and comparisons with the target; BEST marks the best method."""
    fields, measures = flux.fields.values(), {name: flux.measures(name) for name in flux.ratios}
    rows = [["flux (k in s/km)", *flux.fields]]
    rows.append(["mean before rescaling", *(number_text(field.unscaled_mean) for field in fields)])
    rows.append(["factor of τ", *(number_text(field.scale) for field in fields)])
    for label in measures[PREDICTION]:
        ideal = 1 if "ratio" in label or label == "correlation" else 0
        errors = {name: abs(values[label] - ideal) for name, values in measures.items()}
        best = min(errors, key=lambda name: (math.isnan(errors[name]), errors[name]))
        texts = [number_text(values[label]) + BEST * (name == best) for name, values in measures.items()]
        shown = f"mean |P1D ratio − 1| to {flux.largest_k:.2g}" if label == "P1D error" else label
        rows.append([shown, "", *texts])
    return rows


def spreads(evaluations: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """`spread` of each scalar that all evaluations have, by its tag."""
    first, *others = (evaluation["scalars"] for evaluation in evaluations)
    boxes = len({evaluation["input"] for evaluation in evaluations})
    shared = [name for name in first if all(name in scalars for scalars in others)]
    return {name: spread([scalars[name] for scalars in (first, *others)], boxes) for name in shared}


def spread(values: Sequence[float], boxes: int) -> dict[str, Any]:
    """Mean, standard deviations and values [networks, boxes] of a measure, given box by box of each network."""
    table = np.reshape(values, (-1, boxes))
    # The deviation over boxes is that of the means over the networks, and vice versa.
    means = {"boxes": table.mean(0), "networks": table.mean(1)}
    deviations = {f"stdev over {over}": float(mean.std(ddof=1)) for over, mean in means.items() if mean.size > 1}
    return {"mean": float(table.mean()), **deviations, "values": table.tolist()}


def residual_unit(channel: Channel) -> str:
    """Unit of a difference of physical values, or of their decimal logarithms."""
    return "dex" if channel.is_log else channel.unit or "channel value"


def aligned(table: Table) -> list[str]:
    """The lines of a table for a log."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
