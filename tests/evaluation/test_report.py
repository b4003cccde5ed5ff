"""The page of a report is valid, self-contained HTML with the results of the evaluation."""

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
from utils.evaluation import figures, report
from utils.evaluation.results import Results, load

VOID = {"meta", "img"}
PICTURES = dict.fromkeys(["slices", "spectra", "distributions"], b"PNG")


class Parsed(HTMLParser):
    """Checks that tags balance; collects attributes, tables, and text by enclosing tag."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.rows: list[list[str]] = []
        self.doctype = ""
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_decl(self, decl: str) -> None:
        self.doctype = decl

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data

    def all(self, tag: str) -> list[str]:
        return [text for enclosing, text in self.texts if enclosing == tag]

    def images(self) -> list[tuple[str, bytes]]:
        """(type, content) of each embedded picture."""
        images = []
        for attributes in (attributes for tag, attributes in self.tags if tag == "img"):
            kind, data = (attributes["src"] or "").removeprefix("data:image/").split(";base64,")
            assert attributes["alt"]
            images.append((kind, base64.b64decode(data, validate=True)))
        return images


@pytest.fixture(scope="module")
def history() -> list[Results]:
    return [sample_results(16, noise=0.5 / epoch, epoch=epoch, step=100 * epoch, cell=0.5) for epoch in (1, 2, 3)]


@pytest.fixture(scope="module")
def page(history: list[Results]) -> str:
    pictures = dict.fromkeys([*figures.PICTURES, "evaluation_curves"], b"PNG")
    return report.page(history[-1], pictures, {"commit": "abc1234", "epoch": "3 of the caller"})


@pytest.fixture(scope="module")
def parsed(page: str) -> Parsed:
    return Parsed(page)


def test_the_page_is_self_contained(page: str, parsed: Parsed) -> None:
    assert parsed.doctype.lower() == "doctype html"
    assert parsed.all("title") == parsed.all("h1") == ["Evaluation: epoch 3 of the caller"]
    assert not {"script", "link", "iframe"} & {tag for tag, _ in parsed.tags}
    for _, attributes in parsed.tags:
        assert "href" not in attributes
        assert (attributes.get("src") or "data:").startswith("data:")
    for outside in ("url(", "@import", "http:", "https:"):
        assert outside not in page
    assert parsed.images() == [("png", b"PNG")] * 5


def test_the_field_table_gives_the_scale_where_the_correlation_is_lost(history: list[Results]) -> None:
    spectrum = history[-1].spectra["density"]
    correlation = np.linspace(1, 0.95, len(spectrum.k))
    lost, gap = correlation.copy(), correlation.copy()
    lost[3:], gap[5] = 0.89, math.nan
    spectra = {
        name: replace(spectrum, cross=r * np.sqrt(spectrum.predicted * spectrum.target))
        for name, r in (("kept", correlation), ("lost", lost), ("gap", gap))
    }
    parsed = Parsed(report.page(replace(history[-1], spectra=spectra), PICTURES, {}))
    limits = {row[0]: row[-1] for row in parsed.rows if len(row) == 8}
    assert limits == {
        "field": "r below 0.9 from k",
        "kept": "none",
        "lost": f"{spectrum.k[3]:.2g}",
        "gap": f"{spectrum.k[5]:.2g}",
    }


def test_tables_have_physical_errors_spectra_and_provenance(history: list[Results], parsed: Parsed) -> None:
    last = history[-1]
    rows = {row[0]: row for row in parsed.rows if len(row) == 5}
    assert rows["all channels"][1] == f"{last.l1.mean():.5f}"
    for number, name in enumerate(("gas velocity x", "gas velocity y", "gas velocity z"), start=1):
        numbers = [f"{last.l1[number]:.5f}", f"{last.r2[number]:.4f}"]
        assert rows[name][1:] == [*numbers, "km/s", f"{900 * last.l1[number]:.3f} km/s"]
    dex = {"gas density": 14 * last.l1[0] / math.log(10), "temperature": 8 * last.l1[4] / math.log(10)}
    for name, unit in (("gas density", "mean density"), ("temperature", "K")):
        assert rows[name][3:] == [unit, f"{dex[name]:.3f} dex"]
    assert rows["velocity divergence"][2] == f"{last.divergence_r2:.4f}"
    rows = {row[0]: row[1:7] for row in parsed.rows if len(row) == 8}
    for name, spectrum in last.spectra.items():
        shells = spectrum.reference_shells
        values = [*spectrum.correlation[shells], *spectrum.ratio[shells]]
        assert rows[name] == [f"{value:.3f}" for value in values]
    assert ["commit", "abc1234"] in parsed.rows
    assert ["cell (Mpc/h)", "0.5"] in parsed.rows
    assert ["epoch", "3 of the caller"] in parsed.rows, "the caller's value has precedence"
    assert ["epoch", "3"] not in parsed.rows


def test_the_flux_has_a_table_and_a_picture() -> None:
    found = sample_results(16, cell=0.5, flux=True)
    flux = found.flux
    assert flux is not None
    page = report.page(found, {**PICTURES, "flux": b"PNG"}, {})
    assert f"{flux.mean_flux:.4g} at redshift {flux.redshift:g}" in page
    parsed = Parsed(page)
    assert len(parsed.images()) == 4
    rows = {row[0]: row[1:] for row in parsed.rows if len(row) == 8 and row[0] in flux.fields}
    target, fgpa = flux.fields["target"], flux.fields["FGPA"]
    assert rows["target"] == [f"{target.unscaled_mean:.3f}", f"{target.scale:.3f}", *[""] * 5]
    values = [*flux.ratios["FGPA"][flux.reference_modes], flux.power_errors["FGPA"], flux.pdf_distances["FGPA"]]
    assert rows["FGPA"] == [f"{value:.3f}" for value in (fgpa.unscaled_mean, fgpa.scale, *values)]
    text = "".join(parsed.all("figcaption"))
    assert "computed from the dark matter, not smoothed: the cells are too large." in text
    without = {name: field for name, field in flux.fields.items() if name != "FGPA"}
    for fields, smoothing, says in (
        (
            {**without, "FGPA in real space": fgpa},
            0.1,
            "smoothed by 0.1 Mpc/h, in real space: the input has no velocities.",
        ),
        (without, 0.1, "so there is no baseline."),
    ):
        changed = replace(found, flux=replace(flux, fields=fields, smoothing=smoothing))
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
        assert "nan" not in " ".join(found.lines())


def test_markup_is_escaped_and_unknown_or_non_finite_values_are_stated() -> None:
    hostile = """</td></table><script>alert("1")</script><img src='http://evil' onerror=alert(1)>&amp;"""
    found = replace(
        sample_results(8, channels=(1, 2)), r2=np.array([0.5, math.nan]), metadata={"epoch": hostile, hostile: 1}
    )
    parsed = Parsed(report.page(found, PICTURES, {"checkpoint": hostile}))
    assert "script" not in {tag for tag, _ in parsed.tags}
    assert len(parsed.images()) == 3, "no phase diagram, no figure of a run"
    for row in (["epoch", hostile], [hostile, "1"], ["checkpoint", hostile]):
        assert row in parsed.rows
    assert "".join(parsed.all("title")) == f"Evaluation: epoch {hostile}"
    rows = [row for row in parsed.rows if len(row) == 5 and row[0].startswith("channel ")]
    assert [row[2:] for row in rows] == [["0.5000", "unknown", "unknown"], ["non-finite", "unknown", "unknown"]]
