"""The page is one valid file that says what was found, and shows it."""

from __future__ import annotations

import base64
import io
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sample_results import sample_results

from utils.evaluation import figures, page
from utils.evaluation.results import Results, telling_wavenumbers

VOID = {"meta", "img"}
RECORDS = [
    {"step": 0, "Loss/train": 0.2, "Loss/valid": 0.19},
    {"step": 5, "Step/loss": 0.1},
    {"step": 10, "Loss/train": 0.12, "Loss/valid": 0.1, "Evaluation/L1": 0.1},
]


class Parsed(HTMLParser):
    """Tags must balance; keeps the attributes, the tables, and the text by the tag it is in."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.rows: list[list[str]] = []
        self.doctype = ""
        self.feed(text)
        self.close()
        assert not self.open, f"left open: {self.open}"

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
        return [text for within, text in self.texts if within == tag]

    def pictures(self) -> list[Any]:
        found = []
        for tag, attributes in self.tags:
            if tag == "img":
                source = attributes["src"] or ""
                kind, data = source.removeprefix("data:image/").split(";base64,")
                picture = Image.open(io.BytesIO(base64.b64decode(data, validate=True)))
                picture.load()
                assert (picture.format or "").lower() == kind
                assert attributes["alt"]
                found.append(picture)
        return found


@pytest.fixture(scope="module")
def history() -> list[Results]:
    return [sample_results(16, noise=0.5 / epoch, epoch=epoch, step=100 * epoch, cell=0.5) for epoch in (1, 2, 3)]


@pytest.fixture(scope="module")
def written(history: list[Results], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "new" / "evaluation.html"
    tables = [("Against simple predictors", ("predictor", "L1"), [("copy <input>", "0.03"), ("constant", "0.09")])]
    page.write(path, history, {"commit": "abc1234", "epoch": "of the caller"}, tables, RECORDS)
    return path


@pytest.fixture(scope="module")
def parsed(written: Path) -> Parsed:
    return Parsed(written.read_text(encoding="utf-8"))


def test_page_is_one_file_of_its_own(written: Path, parsed: Parsed) -> None:
    assert parsed.doctype.lower() == "doctype html"
    assert ("html", {"lang": "en"}) in parsed.tags
    assert ("meta", {"charset": "utf-8"}) in parsed.tags
    assert parsed.all("title") == parsed.all("h1") == ["Evaluation: epoch 3"]
    assert not {"script", "link", "iframe"} & {tag for tag, _ in parsed.tags}
    for _, attributes in parsed.tags:
        assert "href" not in attributes
        assert (attributes.get("src") or "data:").startswith("data:")
    style = "".join(parsed.all("style"))
    assert "url(" not in style
    assert "@import" not in style
    assert "prefers-color-scheme: dark" in style
    assert "http:" not in written.read_text()
    assert "https:" not in written.read_text()
    assert [each.name for each in written.parent.iterdir()] == [written.name]


def test_page_says_what_was_found(history: list[Results], parsed: Parsed) -> None:
    last = history[-1]
    said = " ".join(parsed.all("p"))
    assert f"L1 is {last.l1.mean():.4f}" in said
    for channel, r2 in zip(last.channels, last.r2, strict=True):
        assert f"{r2:.3f} ({channel.name})" in said
    for name, spectrum in last.spectra.items():
        shells = [np.abs(spectrum.k - k).argmin() for k in telling_wavenumbers(spectrum)]
        assert ", ".join(f"{spectrum.correlation[shell]:.3f}" for shell in shells) + f" ({name})" in said
    assert ", ".join(f"{spectrum.k[shell]:.2g}" for shell in shells) + " h/Mpc" in said


def test_page_says_where_the_correlation_is_lost(history: list[Results]) -> None:
    spectrum = history[-1].spectra["density"]
    correlation = np.linspace(1, 0.95, len(spectrum.k))
    lost, gap = correlation.copy(), correlation.copy()
    lost[3:], gap[5] = 0.89, math.nan
    spectra = {
        name: replace(spectrum, cross=r * np.sqrt(spectrum.predicted * spectrum.target))
        for name, r in (("kept", correlation), ("lost", lost), ("gap", gap))
    }
    said = page.summary(replace(history[-1], spectra=spectra))[-1]
    assert said == (
        f"r falls below 0.9 at k = {spectrum.k[3]:.2g} (lost), {spectrum.k[5]:.2g} (gap) h/Mpc; "
        "r stays above 0.9 on all scales for kept."
    )
    assert len(page.summary(replace(history[-1], spectra={}))) == 1


def test_channels_have_their_errors_in_physical_units(history: list[Results], parsed: Parsed) -> None:
    last = history[-1]
    rows = {row[0]: row for row in parsed.rows if len(row) == 5}
    for number, name in enumerate(("gas velocity x", "gas velocity y", "gas velocity z"), start=1):
        assert rows[name][1:] == [
            f"{last.l1[number]:.5f}",
            f"{last.r2[number]:.4f}",
            "km/s",
            f"{1000 * last.l1[number]:.3f} km/s",
        ]
    dex = {"gas density": 14 * last.l1[0] / math.log(10), "temperature": 2.5 * last.l1[4]}
    for name, unit in (("gas density", "mean density"), ("temperature", "K")):
        assert rows[name][3:] == [unit, f"{dex[name]:.3f} dex (a factor of {10 ** dex[name]:.3f})"]
    assert rows["velocity divergence"][2] == "0.5000"


def test_fields_have_their_spectra_at_the_telling_wavenumbers(history: list[Results], parsed: Parsed) -> None:
    rows = {row[0]: row[1:] for row in parsed.rows if len(row) == 7}
    for name, spectrum in history[-1].spectra.items():
        shells = [np.abs(spectrum.k - k).argmin() for k in telling_wavenumbers(spectrum)]
        values = [*spectrum.correlation[shells], *spectrum.ratio[shells]]
        assert rows[name] == [f"{value:.3f}" for value in values]


def test_extra_tables_and_provenance_are_there(parsed: Parsed) -> None:
    assert "Against simple predictors" in parsed.all("h2")
    for row in (["predictor", "L1"], ["copy <input>", "0.03"], ["constant", "0.09"]):
        assert row in parsed.rows
    assert ["commit", "abc1234"] in parsed.rows
    assert ["step", "300"] in parsed.rows
    assert ["epoch", "of the caller"] in parsed.rows
    assert ["epoch", "3"] not in parsed.rows


def test_only_values_of_facts_may_be_broken(written: Path) -> None:
    """Where any cell's words may, a browser makes narrow columns of numbers and names, and breaks those."""
    text = written.read_text()
    assert re.findall(r"^([^{}]*)\{[^{}]*overflow-wrap", text, re.MULTILINE) == [".facts td + td "]
    tables = re.findall(r"<table(.*?)>(<\w+>)", text)
    assert (' class="facts"', "<tbody>") in tables
    assert ("", "<thead>") in tables
    assert len(set(tables)) == 2


def test_pictures_are_embedded(history: list[Results], parsed: Parsed) -> None:
    pictures = parsed.pictures()
    assert [picture.format for picture in pictures] == ["PNG"] * 6 + ["GIF", "PNG"]
    assert pictures[6].n_frames == len(history)
    for picture in pictures:
        assert len(np.unique(np.asarray(picture.convert("L")))) > 10, "an empty picture"
    assert parsed.all("h2")[-4:] == ["Over the training", "Loss", "Against simple predictors", "Provenance"]


def test_one_evaluation_has_no_history(tmp_path: Path) -> None:
    page.write(tmp_path / "one.html", [sample_results(8)], {})
    parsed = Parsed((tmp_path / "one.html").read_text())
    assert [picture.format for picture in parsed.pictures()] == ["PNG"] * 4
    assert not {"Over the training", "Loss"} & set(parsed.all("h2"))


def test_unknown_channels_and_no_numbers_are_told(tmp_path: Path) -> None:
    found = replace(sample_results(8, channels=(1, 2)), r2=np.array([0.5, math.nan]))
    page.write(tmp_path / "plain.html", [found], {})
    parsed = Parsed((tmp_path / "plain.html").read_text())
    assert "Temperature and density" not in parsed.all("h2")
    assert parsed.all("title") == ["Evaluation"]
    rows = [row for row in parsed.rows if len(row) == 5][1:]
    assert [row[2:] for row in rows] == [["0.5000", "unknown", "unknown"], ["no number", "unknown", "unknown"]]
    assert "no number (channel 1)" in " ".join(parsed.all("p"))
    assert len(parsed.pictures()) == 3


def test_hostile_text_stays_text(history: list[Results], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "_picture", lambda *_: "")
    hostile = """</td></table><script>alert("1")</script><img src='http://evil' onerror=alert(1)>&amp;"""
    found = replace(history[-1], about={"epoch": hostile, hostile: 1})
    page.write(tmp_path / "page.html", [found], {"checkpoint": hostile}, [(hostile, [hostile], [[hostile]])])
    parsed = Parsed((tmp_path / "page.html").read_text())
    assert not {"script", "img"} & {tag for tag, _ in parsed.tags}
    for row in (["epoch", hostile], [hostile, "1"], ["checkpoint", hostile], [hostile]):
        assert row in parsed.rows
    assert "".join(parsed.all("title")) == f"Evaluation: epoch {hostile}"
    assert hostile in "".join(parsed.all("h2"))


def test_failed_page_leaves_what_was_there(
    history: list[Results], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no spectra today")

    path = tmp_path / "page.html"
    path.write_text("old")
    monkeypatch.setattr(figures, "spectra", broken)
    with pytest.raises(RuntimeError, match="today"):
        page.write(path, history[-1:], {})
    assert path.read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.slow
def test_page_of_noise_stays_below_three_megabytes(history: list[Results], tmp_path: Path) -> None:
    """White noise cannot be compressed: nothing else makes larger pictures."""
    rng = np.random.default_rng(0)
    noisy = [
        replace(
            history[-1],
            cells=128,
            about={"epoch": epoch},
            slices={
                name: 0.2 * rng.standard_normal((count, 128, 128))
                for name, count in (("input", 4), ("target", 5), ("predicted", 5))
            },
        )
        for epoch in range(20)
    ]
    page.write(tmp_path / "page.html", noisy, {}, (), RECORDS)
    assert (tmp_path / "page.html").stat().st_size < 3e6
