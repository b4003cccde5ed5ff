"""One HTML file that shows what an evaluation found: no script, nothing from elsewhere, to be mailed or archived."""

from __future__ import annotations

import base64
import html
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from utils.evaluation import figures
from utils.evaluation.results import Results, Spectrum, telling_wavenumbers
from utils.files import atomic_write

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GOOD_CORRELATION = 0.9
STYLE = """
:root { color-scheme: light dark; --text: #1b1f24; --back: #fdfdfc; --line: #d0d4d9; --faint: #59636e; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e8ea; --back: #15181c; --line: #3a4048; --faint: #9aa4af; }
}
body { margin: 2rem auto; max-width: 70rem; padding: 0 1rem; color: var(--text); background: var(--back);
       font: 1rem/1.5 system-ui, sans-serif; }
h1, h2 { line-height: 1.2; }
h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--line); }
figure { margin: 1rem 0; }
img { max-width: 100%; height: auto; background: white; border-radius: 4px; }
figcaption { max-width: 50rem; color: var(--faint); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 0.25rem 0.9rem 0.25rem 0; border-bottom: 1px solid var(--line); text-align: left;
         vertical-align: top; }
.facts td + td { overflow-wrap: anywhere; }
"""


def write(
    path: Path,
    history: Sequence[Results],
    about: Mapping[str, Any],
    extra_tables: Sequence[tuple[str, Sequence[str], Sequence[Sequence[str]]]] = (),
    loss_records: Sequence[dict[str, Any]] = (),
) -> None:
    """Writes the page, whole or not at all; it judges the last of the history, and shows how it came about.

    An extra table is (title, header, rows); `loss_records` are those of metrics.jsonl.
    """
    last = history[-1]
    title = "Evaluation" + (f": {figures.when(last)}" if figures.when(last) else "")
    parts = [f"<h1>{html.escape(title)}</h1>"]
    parts += [f"<p>{html.escape(sentence)}</p>" for sentence in summary(last)]
    parts += [_heading("Channels"), _channels(last)]
    if last.spectra:
        earlier = "; dashed and faint: earlier in the training" if len(history) > 1 else ""
        parts += [
            _heading("Structure by scale"),
            _fields(last),
            _picture(
                figures.spectra(last, history[:-1]),
                "Power of the prediction relative to the target's, and its correlation with it, by wavenumber: "
                f"1 where amount and place of the structure are right{earlier}.",
            ),
        ]
    if last.distributions:
        text = "Share of the cells by value, of the target filled. What lies outside is in the first or last step."
        parts += [_heading("Distributions"), _picture(figures.distributions(last), text)]
    if last.plane is not None:
        text = (
            "Cells by density and temperature. Right: where the prediction has too many (orange) or too few (violet)."
        )
        parts += [_heading("Temperature and density"), _picture(figures.plane(last), text)]
    text = (
        "The middle plane of the volume. The colours of the first three rows span the target's values; those of the "
        "differences 99.5 % of them."
    )
    parts += [_heading("Slices"), _picture(figures.slices(last), text)]
    if len(history) > 1:
        text = "The middle plane at times of the training, beside the target."
        parts += [
            _heading("Over the training"),
            _picture(figures.curves_over_epochs(history), "What was measured at each evaluation."),
            _picture(figures.over_epochs(history), text),
            _image(figures.encoded_movie(history), "gif", "The same, moving: the prediction above, the target below."),
        ]
    if loss_records:
        parts += [
            _heading("Loss"),
            _picture(
                figures.loss_curves(loss_records, "mean absolute error"), "Training and validation loss over the steps."
            ),
        ]
    for name, header, rows in extra_tables:
        parts += [_heading(name), _table(header, rows)]
    parts += [
        _heading("Provenance"),
        _table(("", ""), [(key, _told(key, value)) for key, value in ({**last.about, **about}).items()]),
    ]
    content = _page(title, parts)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write([path]) as (partial,):
        partial.write_text(content, encoding="utf-8")


def summary(results: Results) -> list[str]:
    """What was found, in a few sentences."""
    scores = ", ".join(
        f"{_number(r2)} ({channel.name})" for channel, r2 in zip(results.channels, results.r2, strict=True)
    )
    sentences = [f"L1 is {_number(float(results.l1.mean()), 4)}, the mean over all channels; R² is {scores}."]
    if results.spectra:
        unit = results.wavenumber_unit
        scales = ", ".join(f"{k:.2g}" for k in _wavenumbers(next(iter(results.spectra.values()))))
        correlations = "; ".join(
            f"{', '.join(_number(r) for r in _at_telling(spectrum, spectrum.correlation))} ({name})"
            for name, spectrum in results.spectra.items()
        )
        sentences.append(f"The correlation r with the target at k = {scales} {unit} is {correlations}.")
        limits = {name: _falls_below(spectrum) for name, spectrum in results.spectra.items()}
        lost = ", ".join(f"{limit:.2g} ({name})" for name, limit in limits.items() if limit is not None)
        kept = ", ".join(name for name, limit in limits.items() if limit is None)
        parts = [f"r falls below {GOOD_CORRELATION} at k = {lost} {unit}"] if lost else []
        parts += [f"r stays above {GOOD_CORRELATION} on all scales for {kept}"] if kept else []
        sentences.append(f"{'; '.join(parts)}.")
    return sentences


def _wavenumbers(spectrum: Spectrum) -> list[float]:
    """Of the shells nearest to the telling ones."""
    return _at_telling(spectrum, spectrum.k)


def _at_telling(spectrum: Spectrum, values: np.ndarray) -> list[float]:
    return [float(values[spectrum.at(k)]) for k in telling_wavenumbers(spectrum)]


def _falls_below(spectrum: Spectrum) -> float | None:
    """The first k whose r is not good; None if all are."""
    bad = np.flatnonzero(~(spectrum.correlation >= GOOD_CORRELATION))  # what is no number is not good
    return float(spectrum.k[bad[0]]) if bad.size else None


def _channels(results: Results) -> str:
    rows = []
    for channel, l1, r2 in zip(results.channels, results.l1, results.r2, strict=True):
        error = "unknown"
        if channel.unit is not None:
            size = float(figures.residual(channel, np.asarray(l1), np.zeros(())))
            error = f"{_number(size, 3)} {figures.residual_unit(channel)}"
            if channel.is_log:
                error += f" (a factor of {_number(10**size)})"
        rows.append((channel.name, _number(float(l1), 5), _number(float(r2), 4), channel.unit or "unknown", error))
    if math.isfinite(results.divergence_r2):
        rows.append(("velocity divergence", "", _number(results.divergence_r2, 4), "", ""))
    return _table(("channel", "L1 of its values", "R² of its values", "unit", "mean error"), rows)


def _fields(results: Results) -> str:
    """r and power at the telling wavenumbers."""
    unit = results.wavenumber_unit
    ks = [f"{k:.2g}" for k in _wavenumbers(next(iter(results.spectra.values())))]
    header = ["field", *(f"r at k = {k} {unit}" for k in ks), *(f"power ratio at {k}" for k in ks)]
    rows = []
    for name, spectrum in results.spectra.items():
        values = _at_telling(spectrum, spectrum.correlation) + _at_telling(spectrum, spectrum.ratio)
        rows.append([name, *(_number(value) for value in values)])
    return _table(header, rows)


def _told(key: str, value: Any) -> str:
    """A value of the provenance, for people."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {part}" for name, part in value.items())
    if isinstance(value, (list, tuple)):
        return shlex.join(map(str, value)) if key == "command" else ", ".join(map(str, value))
    return f"{value} Mpc/h" if key == "cell" and value is not None else str(value)


def _number(value: float, digits: int = 3) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else "no number"


def _heading(text: str) -> str:
    return f"<h2>{html.escape(text)}</h2>"


def _table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    def line(cells: Sequence[Any], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{html.escape(str(cell))}</{tag}>' for cell in cells)}</tr>"

    body = "".join(line(row, "td") for row in rows)
    if not any(header):  # names and values, the latter of any length
        return f'<div class="wide"><table class="facts"><tbody>{body}</tbody></table></div>'
    return f'<div class="wide"><table><thead>{line(header, "th")}</thead><tbody>{body}</tbody></table></div>'


def _picture(figure: Figure, text: str) -> str:
    return _image(figures.encoded(figure), "png", text)


def _image(content: bytes, kind: str, text: str) -> str:
    data = base64.b64encode(content).decode("ascii")
    text = html.escape(text)
    image = f'<img src="data:image/{kind};base64,{data}" alt="{text}">'
    return f"<figure>{image}<figcaption>{text}</figcaption></figure>"


def _page(title: str, parts: Sequence[str]) -> str:
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style>"
    )
    body = "\n".join(parts)
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'
