"""The report of an evaluation as one self-contained HTML file, without scripts or links."""

from __future__ import annotations

import base64
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np

from utils.evaluation import figures, history_figures, plotting
from utils.evaluation.results import Results, Spectrum
from utils.files import atomic_write

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GOOD_CORRELATION = 0.9
TEMPLATE = Path(__file__).with_name("report.html.j2")


@dataclass(frozen=True)
class Section:
    """A heading, a table (an empty header for names and values) and embedded figures."""

    heading: str
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    figures: Sequence[Mapping[str, str]] = ()


def write(
    path: Path,
    history: Sequence[Results],
    metadata: Mapping[str, Any],
    loss_records: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Writes the page atomically: the last evaluation of the history, and how the results developed.

    `loss_records` are the records of metrics.jsonl.
    """
    last = history[-1]
    time = plotting.training_time(last)
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    content = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        title=f"Evaluation: {time}" if time else "Evaluation",
        sentences=summary(last),
        sections=[*_result_sections(history), *_training_sections(history, loss_records), _provenance(last, metadata)],
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write([path]) as (partial,):
        partial.write_text(content, encoding="utf-8")


# --- sections --------------------------------------------------------------------------------------------------------


def _result_sections(history: Sequence[Results]) -> Iterator[Section]:
    """The results of the last evaluation."""
    last = history[-1]
    yield Section("Channels", *_channel_table(last))
    if last.spectra:
        earlier = " Dashed and faint: earlier evaluations of the training." if len(history) > 1 else ""
        caption = (
            "Power of the prediction relative to the target's, and correlation with the target, by wavenumber. Power 1 "
            f"is the right amount of structure; correlation 1 is structure in the right place.{earlier}"
        )
        figure = figures.spectra(last, history[:-1])
        yield Section("Structure by scale", *_spectrum_table(last), [_embedded(figure, caption)])
    if last.distributions:
        caption = (
            "Distribution of the values over the cells; the target is filled. Values outside the range are in the "
            "first or last bin."
        )
        yield Section("Distributions", figures=[_embedded(figures.distributions(last), caption)])
    if last.phase_diagram is not None:
        caption = (
            "Cells by density and temperature. Right: the prediction has too many cells (orange) or too few (violet)."
        )
        yield Section("Phase diagram", figures=[_embedded(figures.phase_diagram(last), caption)])
    caption = (
        "The middle plane of the volume. The colours of the first three rows span the target's values; those of the "
        "residuals span 99.5 % of them."
    )
    yield Section("Slices", figures=[_embedded(figures.slices(last), caption)])


def _training_sections(history: Sequence[Results], loss_records: Sequence[Mapping[str, Any]]) -> Iterator[Section]:
    if len(history) > 1:
        curves = history_figures.evaluation_curves(history)
        slices = history_figures.slices_over_training(history)
        embedded = [
            _embedded(curves, "Results of each evaluation during the training."),
            _embedded(slices, "The middle plane at several times of the training, and the target."),
        ]
        yield Section("Evaluations during training", figures=embedded)
    if loss_records:
        figure = history_figures.loss_curves(loss_records, "mean absolute error")
        yield Section("Loss", figures=[_embedded(figure, "Training and validation loss over the steps.")])


def _provenance(last: Results, metadata: Mapping[str, Any]) -> Section:
    rows = [(key, _readable(key, value)) for key, value in {**last.metadata, **metadata}.items()]
    return Section("Provenance", (), rows)


def _embedded(figure: Figure, caption: str) -> dict[str, str]:
    return {"png": base64.b64encode(plotting.encode_png(figure)).decode("ascii"), "caption": caption}


# --- text and tables -------------------------------------------------------------------------------------------------


def summary(results: Results) -> list[str]:
    """The main results in a few sentences."""
    scores = ", ".join(
        f"{_number(r2)} ({channel.name})" for channel, r2 in zip(results.channels, results.r2, strict=True)
    )
    sentences = [f"L1 is {_number(float(results.l1.mean()), 4)}, averaged over all channels; R² is {scores}."]
    if not results.spectra:
        return sentences
    unit = results.wavenumber_unit
    correlations = "; ".join(
        f"{', '.join(map(_number, _at_references(spectrum, spectrum.correlation)))} ({name})"
        for name, spectrum in results.spectra.items()
    )
    ks = ", ".join(_reference_wavenumbers(results))
    sentences.append(f"The correlation r with the target at k = {ks} {unit} is {correlations}.")
    limits = {name: _correlation_limit(spectrum) for name, spectrum in results.spectra.items()}
    lost = ", ".join(f"{limit:.2g} ({name})" for name, limit in limits.items() if limit is not None)
    kept = ", ".join(name for name, limit in limits.items() if limit is None)
    parts = [f"r falls below {GOOD_CORRELATION} at k = {lost} {unit}"] if lost else []
    parts += [f"r stays above {GOOD_CORRELATION} on all scales for {kept}"] if kept else []
    return [*sentences, f"{'; '.join(parts)}."]


def _correlation_limit(spectrum: Spectrum) -> float | None:
    """The first k whose correlation is not good; None if all are."""
    bad = np.flatnonzero(~(spectrum.correlation >= GOOD_CORRELATION))  # NaN counts as bad
    return float(spectrum.k[bad[0]]) if bad.size else None


def _reference_wavenumbers(results: Results) -> list[str]:
    spectrum = next(iter(results.spectra.values()))
    return [f"{k:.2g}" for k in _at_references(spectrum, spectrum.k)]


def _at_references(spectrum: Spectrum, values: np.ndarray) -> list[float]:
    return [float(values[shell]) for shell in spectrum.reference_shells]


def _channel_table(results: Results) -> tuple[list[str], list[list[str]]]:
    """Header and rows."""
    rows = []
    for channel, l1, r2 in zip(results.channels, results.l1, results.r2, strict=True):
        error = "unknown"
        if channel.unit is not None:
            size = float(plotting.residual(channel, np.asarray(l1), np.zeros(())))
            error = f"{_number(size, 3)} {plotting.residual_unit(channel)}"
            if channel.is_log:
                error += f" (a factor of {_number(10**size)})"
        rows.append([channel.name, _number(float(l1), 5), _number(float(r2), 4), channel.unit or "unknown", error])
    if math.isfinite(results.divergence_r2):
        rows.append(["velocity divergence", "", _number(results.divergence_r2, 4), "", ""])
    return ["channel", "L1 of channel values", "R² of channel values", "unit", "mean error"], rows


def _spectrum_table(results: Results) -> tuple[list[str], list[list[str]]]:
    """Header and rows: correlation and power ratio of each field at the reference wavenumbers."""
    ks = _reference_wavenumbers(results)
    header = ["field", *(f"r at k = {k} {results.wavenumber_unit}" for k in ks), *(f"power ratio at {k}" for k in ks)]
    rows = []
    for name, spectrum in results.spectra.items():
        values = _at_references(spectrum, spectrum.correlation) + _at_references(spectrum, spectrum.ratio)
        rows.append([name, *map(_number, values)])
    return header, rows


def _readable(key: str, value: Any) -> str:
    """A value of the metadata as text."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {part}" for name, part in value.items())
    if isinstance(value, (list, tuple)):
        return shlex.join(map(str, value)) if key == "command" else ", ".join(map(str, value))
    return f"{value} Mpc/h" if key == "cell" and value is not None else str(value)


def _number(value: float, digits: int = 3) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else "non-finite"
