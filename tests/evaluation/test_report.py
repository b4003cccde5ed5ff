"""The page of a report is self-contained HTML with the results of the evaluation; its tables are also logged."""

from __future__ import annotations

import base64
import json
import math
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from sample_results import sample_results

from utils.distributed.launch import Launch
from utils.distributed.world import World
from utils.evaluation import figures, report, tables
from utils.evaluation.results import Results, load

PICTURES = dict.fromkeys(["slices", "spectra", "distributions"], b"PNG")


class Parsed(HTMLParser):
    """Tags with their attributes, the rows of all tables, and the whole text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.tags and self.tags[-1][0] in ("td", "th"):
            self.rows[-1][-1] += data.strip("\n")

    def images(self) -> list[bytes]:
        """The embedded pictures."""
        sources = [attributes["src"] or "" for tag, attributes in self.tags if tag == "img"]
        return [base64.b64decode(source.removeprefix("data:image/png;base64,"), validate=True) for source in sources]


@pytest.fixture(scope="module")
def found() -> Results:
    return sample_results(16, noise=0.2, epoch=3, cell=0.5)


def test_the_page_is_self_contained_and_has_all_results(found: Results) -> None:
    provenance = {"commit": "abc1234", "epoch": "3 of the caller"}
    page = report.page(found, dict.fromkeys(figures.PICTURES, b"PNG"), provenance)
    parsed = Parsed(page)
    assert "Evaluation: epoch 3\n" in parsed.text
    assert not {"script", "link", "iframe"} & {tag for tag, _ in parsed.tags}
    for outside in ("href", "url(", "@import", "http:", "https:"):
        assert outside not in page
    assert parsed.images() == [b"PNG"] * 4, "there is no flux"
    summary = tables.summary_table(found)
    assert parsed.rows[: len(summary)] == summary, "it comes first"
    for row in (*tables.channel_table(found), *tables.field_table(found)):
        assert row in parsed.rows
    assert ["commit", "abc1234"] in parsed.rows
    assert ["cell (Mpc/h)", "0.5"] in parsed.rows
    assert ["epoch", "3 of the caller"] in parsed.rows, "the caller's value has precedence"
    assert ["epoch", "3"] not in parsed.rows


def test_the_field_table_gives_the_scale_where_the_correlation_is_lost(found: Results) -> None:
    spectrum = found.spectra["density"]
    correlation = np.linspace(1, 0.95, len(spectrum.k))
    lost, gap = correlation.copy(), correlation.copy()
    lost[3:], gap[5] = 0.89, math.nan
    spectra = {
        name: replace(spectrum, cross=r * np.sqrt(spectrum.predicted * spectrum.target))
        for name, r in (("kept", correlation), ("lost", lost), ("gap", gap))
    }
    rows = {row[0]: row[1:] for row in tables.field_table(replace(found, spectra=spectra))}
    below = [f"{k:.2g}" for k in (spectra["lost"].resolutions["r = 0.9"], spectrum.k[5])]
    assert rows["k at r = 0.9"] == ["not reached", *below]
    assert spectrum.k[2] < float(below[0]) < spectrum.k[3]
    assert rows["k at r = 0.5"] == ["not reached", "not reached", below[1]]


def test_the_summary_says_which_scales_are_right(found: Results) -> None:
    """The field is in a box of 8 Mpc/h: shell m has waves of about 8 / m Mpc/h."""
    spectrum = found.spectra["log density"]
    k = np.arange(1, len(spectrum.k) + 1) * (2 * math.pi / 8)

    def row(correlation: list[float], power: float | np.ndarray, cell: float | None = 0.5) -> list[str]:
        power = power * np.ones(len(k))
        cross = np.array(correlation + [0.5] * (len(k) - len(correlation))) * np.sqrt(power)
        changed = replace(spectrum, k=k, predicted=power, target=np.ones(len(k)), cross=cross)
        return tables.summary_table(replace(found, cell=cell, spectra={**found.spectra, "log density": changed}))[1]

    numbers = ["gas density", f"{found.l1[0]:.5f}", f"{found.copied_l1[0]:.5f}", f"{found.r2[0]:.4f}"]
    place = "Structure larger than 3.6 Mpc/h is in the right place."
    right = "Its power is right to 10% on all scales."
    assert row([1, 1], 1.04) == [*numbers, "k = 1.7 h/Mpc (3.6 Mpc/h)", f"{place} {right}"]
    assert row([1, 1, 1, 0.95], 0.92)[4:] == [
        "k = 3.2 h/Mpc (1.9 Mpc/h)",
        f"Structure larger than 1.9 Mpc/h is in the right place. {right}",
    ]
    assert row([1, 1], 1.0, None)[4] == "k = 1.7 rad/cell (3.6 cells)"
    assert row([0.3], 1.0)[5] == f"Not even structure of the largest scales is in the right place. {right}"
    assert row([1] * len(k), 1.0)[4] == "no scale"
    assert row([1], math.nan)[4] == "unknown"
    checkerboard = np.where(k == k[-1], 1e5, 1.0)  # fixed: only the power of large scales was reported
    end = f"above {2 * math.pi / k[-1]:.2g} Mpc/h, at worst 1e+05 times the target's at k = {k[-1]:.2g}."
    assert row([1, 1], checkerboard)[5] == f"{place} Its power is right to 10% {end}"
    assert row([1, 1], 1.5)[5].endswith("wrong on the largest scales, at worst 1.5 times the target's at k = 0.79.")


def test_the_conclusion_names_fields_that_are_no_better_than_copying_or_a_constant(found: Results) -> None:
    assert tables.lines(found)[-1] == tables.conclusion(found)
    assert "each channel is better than copying" in tables.conclusion(found)
    below = np.where(np.arange(len(found.l1)) == 1, 0.9 * found.l1, found.copied_l1)
    assert "of gas velocity x is no better" in tables.conclusion(replace(found, copied_l1=below))
    without_structure = np.append(found.r2[:-1], -0.1)
    assert "of temperature is no better" in tables.conclusion(replace(found, r2=without_structure))
    assert "of each channel is no better" in tables.conclusion(replace(found, r2=np.full(len(found.r2), math.nan)))
    assert np.isnan(found.copied_l1).tolist() == [False] * 4 + [True], "the input has no temperature"


def test_the_conclusion_says_if_a_baseline_has_a_smaller_error() -> None:
    """Newcomers missed it in the table."""
    found = sample_results(16, cell=0.5, flux=True)
    flux = found.flux
    assert flux is not None
    for error, sentence in (
        (0.05, " FGPA, which needs no network, has a smaller mean |P1D ratio − 1| to"),
        (0.5, ""),
    ):
        target = flux.fields["target"]
        fields = {
            name: replace(target, power=(1 + excess) * target.power)
            for name, excess in (("target", 0), ("prediction", 0.08), ("FGPA", error))
        }
        text = tables.conclusion(replace(found, flux=replace(flux, fields=fields)))
        assert text.startswith("The prediction of each channel is better")
        assert (sentence in text) if sentence else ("FGPA" not in text)


def test_the_page_shows_the_losses_of_the_training_run(found: Results, tmp_path: Path) -> None:
    """Of a checkpoint's run; the page stays one file of bounded size."""
    run = tmp_path / "demo/2ranks/00"
    run.mkdir(parents=True)
    records = [{"step": step, "Step/loss": 1 / (step + 1), "Loss/valid": 0.5} for step in range(20000)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    weights = str(run / "checkpoints/step_00000800/weights.pt")
    known = {"checkpoint": weights, "epoch": 4, "step": 800, "loss": "huber", "final_loss": 0.0068734}
    evaluation = replace(found, metadata=known)
    pictures = report._training_curves(evaluation)
    assert len(pictures[report.TRAINING]) < 200_000
    parsed = Parsed(report.page(evaluation, PICTURES | pictures, {}))
    assert "Evaluation: demo/2ranks/00, epoch 4, step 800" in parsed.text
    assert "validation loss (huber, 0.00687) is the mean over random crops" in " ".join(parsed.text.split())
    assert parsed.images()[0] == pictures[report.TRAINING]
    (run / "metrics.jsonl").unlink()
    assert report._training_curves(evaluation) == report._training_curves(found) == {}


def test_tables_have_physical_errors_and_spectra(found: Results) -> None:
    rows = {row[0]: row[1:] for row in tables.channel_table(found)}
    assert rows["all channels"][0] == f"{found.l1.mean():.5f}"
    for number, name in enumerate(("gas velocity x", "gas velocity y", "gas velocity z"), start=1):
        numbers = [f"{found.l1[number]:.5f}", f"{found.r2[number]:.4f}"]
        assert rows[name] == [*numbers, "km/s", f"{900 * found.l1[number]:.3f} km/s"]
    dex = {"gas density": 14 * found.l1[0] / math.log(10), "temperature": 8 * found.l1[4] / math.log(10)}
    for name, unit in (("gas density", "mean density"), ("temperature", "K")):
        assert rows[name][2:] == [unit, f"{dex[name]:.3f} dex"]
    assert rows["velocity divergence"][1] == f"{found.divergence_r2:.4f}"
    assert rows["mean gas density / target's"][3] == f"{found.mass_ratio:.4f}"
    rows = {row[0]: [*row[1:7]] for row in zip(*tables.field_table(found), strict=True)}
    for name, spectrum in found.spectra.items():
        shells = spectrum.reference_shells
        assert rows[name] == [f"{value:.3f}" for value in (*spectrum.correlation[shells], *spectrum.ratio[shells])]


def test_the_flux_has_a_table_and_a_picture() -> None:
    found = sample_results(16, cell=0.5, flux=True)
    lines = tables.lines(found)[:-1]
    assert max(map(len, lines)) <= 120, "fixed: those of spectra and flux were wider than a terminal"
    assert all(any(line.startswith(row[0]) for line in lines) for row in tables.channel_table(found))
    assert all(any(line.startswith(row[0]) for line in lines) for row in tables.field_table(found))
    flux = found.flux
    assert flux is not None
    rows = {row[0]: [*row[1:]] for row in zip(*tables.flux_table(flux), strict=True)}
    target, fgpa = flux.fields["target"], flux.fields["FGPA"]
    values = [*flux.ratios["FGPA"][flux.reference_modes], flux.power_error("FGPA")]
    values += [*flux.band_errors("FGPA").values(), *flux.p3d_errors("FGPA").values()]
    values += [fgpa.correlation, flux.pdf_distance("FGPA")]
    assert rows["target"] == [f"{target.unscaled_mean:.3f}", f"{target.scale:.3f}", *[""] * len(values)]
    assert rows["FGPA"] == [f"{value:.3f}" for value in (fgpa.unscaled_mean, fgpa.scale, *values)]
    parsed = Parsed(report.page(found, {**PICTURES, "flux": b"PNG", "flux_3d": b"PNG"}, {}))
    assert len(parsed.images()) == 5
    assert all(row in parsed.rows for row in tables.flux_table(flux))
    assert f"{flux.mean_flux:.4g} at redshift {flux.redshift:g}" in parsed.text
    assert "computed from the dark matter, not smoothed: the cells are too large." in parsed.text
    without = {name: field for name, field in flux.fields.items() if name != "FGPA"}
    for fields, says in (
        ({**without, "FGPA in real space": fgpa}, "smoothed by 0.1 Mpc/h, in real space: the input has no velocities."),
        (without, "so there is no baseline."),
    ):
        changed = replace(found, flux=replace(flux, fields=fields, smoothing=0.1))
        assert says in report.page(changed, {**PICTURES, "flux": b"PNG"}, {})


def test_the_flux_of_a_box_with_different_sides_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short axis has no mode in some bins: it is NaN there. Even if no bin has modes of all axes."""
    empty = dict.fromkeys(figures.PICTURES, lambda results: Figure(figsize=(1, 1)))
    monkeypatch.setattr(figures, "PICTURES", {**empty, "flux": figures.flux})
    world, found = World(Launch("test"), torch.device("cpu")), sample_results(16, cell=0.5, flux=True)
    flux = found.flux
    assert flux is not None
    for gaps in ([1, 3], [1, 3, 0, 2, 4, 5, 6, 7]):
        for each in (flux.axis_k, *(field.axis_power for field in flux.fields.values())):
            each[0, gaps] = np.nan
        report.write_report(tmp_path / f"{len(gaps)}", found, {}, world)
        text = (tmp_path / f"{len(gaps)}" / report.SUMMARY).read_text()
        summary = json.loads(text, parse_constant=lambda constant: pytest.fail(f"JSON has no {constant}"))
        for values in (summary["flux"], summary["flux"]["fields"]["FGPA"]):
            along = next(part for name, part in values.items() if "along x (" in name)
            assert [place for place, value in enumerate(along) if value is None] == sorted(gaps)
        again = load(tmp_path / f"{len(gaps)}" / report.ARRAYS)
        assert again.flux is not None
        np.testing.assert_array_equal(again.flux.axis_k, flux.axis_k)
        assert np.isfinite([*found.scalars().values()]).all()
        assert "non-finite" not in " ".join(tables.lines(found))


def test_markup_is_escaped_and_unknown_or_non_finite_values_are_stated() -> None:
    hostile = """</td></table><script>alert("1")</script><img src='http://evil' onerror=alert(1)>&amp;"""
    found = replace(
        sample_results(8, channels=(1, 2)), r2=np.array([0.5, math.nan]), metadata={"epoch": hostile, hostile: 1}
    )
    parsed = Parsed(report.page(found, PICTURES, {"checkpoint": hostile}))
    assert "script" not in {tag for tag, _ in parsed.tags}
    assert len(parsed.images()) == 3, "no phase diagram"
    for row in (["epoch", hostile], [hostile, "1"], ["checkpoint", hostile]):
        assert row in parsed.rows
    rows = [row for row in tables.channel_table(found) if row[0].startswith("channel ")]
    assert [row[2:] for row in rows] == [["0.5000", "unknown", "unknown"], ["non-finite", "unknown", "unknown"]]
