"""The main results of an evaluation as tables, for the log and for the report."""

from __future__ import annotations

import math

import numpy as np

from utils.data.channels import Channel
from utils.evaluation.results import Results
from utils.lyman_alpha.results import Flux

GOOD_CORRELATION = 0.9

Table = list[list[str]]  # rows; the first one is the header


def lines(evaluation: Results) -> list[str]:
    """All tables as lines of a log."""
    tables = [channel_table(evaluation), field_table(evaluation)]
    tables += [flux_table(evaluation.flux)] if evaluation.flux else []
    return [line for table in tables for line in _aligned(table)]


def channel_table(evaluation: Results) -> Table:
    """Errors of each channel, and their mean in physical units."""
    rows = [["channel", "L1 of channel values", "R² of channel values", "unit", "mean error"]]
    for channel, l1, r2 in zip(evaluation.channels, evaluation.l1, evaluation.r2, strict=True):
        error = l1 * channel.scale / (math.log(10) if channel.is_log else 1)
        mean = f"{_number(error)} {residual_unit(channel)}" if channel.unit else "unknown"
        rows.append([channel.name, f"{l1:.5f}", _number(r2, 4), channel.unit or "unknown", mean])
    rows.append(["all channels", f"{evaluation.l1.mean():.5f}", "", "", ""])
    if math.isfinite(evaluation.divergence_r2):
        rows.append(["velocity divergence", "", _number(evaluation.divergence_r2, 4), "", ""])
    return rows


def field_table(evaluation: Results) -> Table:
    """Correlation and power ratio of each field at the reference wavenumbers, and the first k of poor correlation."""
    first = next(iter(evaluation.spectra.values()))
    ks = [f"{k:.2g}" for k in first.k[first.reference_shells]]
    header = [f"field (k in {evaluation.wavenumber_unit})", *(f"r at k = {k}" for k in ks)]
    rows = [[*header, *(f"power ratio at {k}" for k in ks), f"r below {GOOD_CORRELATION} from k"]]
    for name, spectrum in evaluation.spectra.items():
        shells = spectrum.reference_shells
        values = [*spectrum.correlation[shells], *spectrum.ratio[shells]]
        bad = spectrum.k[~(spectrum.correlation >= GOOD_CORRELATION)]  # NaN counts as bad
        rows.append([name, *map(_number, values), f"{bad[0]:.2g}" if bad.size else "none"])
    return rows


def flux_table(flux: Flux) -> Table:
    """Mean flux before rescaling, and deviations of P1D and PDF from those of the target."""
    ks = [f"{flux.k[mode]:.2g}" for mode in flux.reference_modes]
    header = ["flux (k in s/km)", "mean before rescaling", "factor of τ", *(f"P1D ratio at k = {k}" for k in ks)]
    rows = [[*header, f"mean |P1D ratio − 1| to {flux.largest_k:.2g}", "PDF distance"]]
    for name, field in flux.fields.items():
        row = [name, _number(field.unscaled_mean), _number(field.scale)]
        if name in flux.ratios:
            comparisons = flux.ratios[name][flux.reference_modes], flux.power_error(name), flux.pdf_distance(name)
            row += map(_number, np.hstack(comparisons))
        rows.append(row + [""] * (len(rows[0]) - len(row)))
    return rows


def residual_unit(channel: Channel) -> str:
    """Unit of a difference of physical values, or of their decimal logarithms."""
    return "dex" if channel.is_log else channel.unit or "channel value"


def _aligned(table: Table) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]


def _number(value: float, digits: int = 3) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else "non-finite"
