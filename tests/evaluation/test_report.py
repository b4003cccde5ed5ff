"""The page of a report is self-contained HTML with the results of the evaluation; its tables are also logged."""

from __future__ import annotations

import base64
import html
import json
import math
import re
from dataclasses import replace
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

PICTURES = dict.fromkeys(figures.PICTURES, b"PNG")


def rows_of(page: str) -> list[list[str]]:
    """The texts of the cells of all tables."""
    rows = re.findall(r"<tr.*?</tr>", page, re.DOTALL)
    return [[html.unescape(cell).strip("\n") for cell in re.findall(r"<t[dh].*?>(.*?)</t[dh]>", row)] for row in rows]


def images_of(page: str) -> list[bytes]:
    """The embedded pictures."""
    return [base64.b64decode(image) for image in re.findall(r'src="data:image/png;base64,(.*?)"', page)]


@pytest.fixture(scope="module")
def found() -> Results:
    return sample_results(16, noise=0.2, epoch=3, cell=0.5)


@pytest.fixture
def with_flux() -> Results:
    return sample_results(16, cell=0.5, flux=True)


def test_the_page_is_self_contained_escaped_and_has_all_results(found: Results) -> None:
    hostile = """</td></table><script>alert("1")</script><img src='file:evil' onerror=alert(1)>&amp;"""
    provenance = {"commit": "abc1234", "epoch": "3 of the caller", hostile: 1, "checkpoint": hostile}
    page = report.page(found, PICTURES, provenance)
    for outside in ("href", "url(", "@import", "http:", "https:", "<script", "<link", "<iframe", "<img src='"):
        assert outside not in page
    assert "<title>Evaluation: epoch 3</title>" in page
    assert images_of(page) == [b"PNG"] * 4, "there is no flux"
    rows, summary = rows_of(page), tables.summary_table(found)
    assert rows[: len(summary)] == summary, "it comes first"
    assert all(row in rows for row in (*tables.channel_table(found), *tables.field_table(found)))
    for row in (["commit", "abc1234"], ["cell (Mpc/h)", "0.5"], [hostile, "1"], ["checkpoint", hostile]):
        assert row in rows
    assert ["epoch", "3 of the caller"] in rows, "the caller's value has precedence"
    assert ["epoch", "3"] not in rows
    unknown = replace(sample_results(8, channels=(1, 2)), r2=np.array([0.5, math.nan]))
    assert len(images_of(report.page(unknown, PICTURES, {}))) == 3, "no phase diagram"
    ends = [row[2:] for row in tables.channel_table(unknown) if row[0].startswith("channel ")]
    assert ends == [["0.5000", "unknown", "unknown"], ["non-finite", "unknown", "unknown"]]


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
    assert row([1, 1], 1.0, None)[4] == "k = 1.7 rad/cell (3.6 cells)"
    assert row([0.3], 1.0)[5] == f"Not even structure of the largest scales is in the right place. {right}"
    assert row([1] * len(k), 1.0)[4] == "no scale"
    assert row([1], math.nan)[4] == "unknown"
    checkerboard = np.where(k == k[-1], 1e5, 1.0)  # fixed: only the power of large scales was reported
    end = f"above {2 * math.pi / k[-1]:.2g} Mpc/h, at worst 1e+05 times the target's at k = {k[-1]:.2g}."
    assert row([1, 1], checkerboard)[5] == f"{place} Its power is right to 10% {end}"
    assert row([1, 1], 1.5)[5].endswith("wrong on the largest scales, at worst 1.5 times the target's at k = 0.79.")


def test_the_conclusion_names_what_is_no_better_than_a_baseline(found: Results, with_flux: Results) -> None:
    """Newcomers missed in the table that FGPA had a smaller error."""
    assert tables.lines(found)[-1] == tables.conclusion(found)
    flux, target = with_flux.flux, with_flux.flux.fields["target"]
    errors = {"target": 0, "prediction": 0.08, "FGPA": 0.05}
    better = {name: replace(target, power=(1 + error) * target.power) for name, error in errors.items()}
    below = np.where(np.arange(5) == 1, 0.9 * found.l1, found.copied_l1)
    for results, part in (
        (found, "each channel is better than copying"),
        (replace(found, copied_l1=below), "of gas velocity x is no better"),
        (replace(found, r2=np.append(found.r2[:-1], -0.1)), "of temperature is no better"),
        (replace(found, r2=np.full(5, math.nan)), "of each channel is no better"),
        (replace(with_flux, flux=replace(flux, fields=better)), " FGPA, which needs no network, has a smaller mean"),
    ):
        text = tables.conclusion(results)
        assert part in text
        assert ("FGPA" in text) == ("FGPA" in part)
    assert np.isnan(found.copied_l1).tolist() == [False] * 4 + [True], "the input has no temperature"


def test_the_page_shows_the_losses_of_the_training_run(found: Results, tmp_path: Path) -> None:
    """Of a checkpoint's run; the page stays one file of bounded size."""
    run = tmp_path / "demo/2ranks/00"
    run.mkdir(parents=True)
    records = [{"step": step, "Step/loss": 1 / (step + 1), "Loss/valid": 0.5} for step in range(20000)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    weights = str(run / "checkpoints/step_00000800/weights.pt")
    evaluation = replace(found, metadata={"checkpoint": weights, "step": 800, "loss": "huber", "final_loss": 0.0068734})
    pictures = report._training_curves(evaluation)
    assert len(pictures[report.TRAINING]) < 200_000
    page = report.page(evaluation, PICTURES | pictures, {})
    assert "Evaluation: demo/2ranks/00, step 800" in page
    assert "validation loss (huber, 0.00687) is the mean over random crops" in " ".join(page.split())
    assert images_of(page)[0] == pictures[report.TRAINING]
    (run / "metrics.jsonl").unlink()
    assert report._training_curves(evaluation) == report._training_curves(found) == {}


def test_tables_have_physical_errors_and_spectra(found: Results) -> None:
    rows = {row[0]: row[1:] for row in tables.channel_table(found)}
    assert rows["all channels"][0] == f"{found.l1.mean():.5f}"
    numbers = [f"{found.l1[2]:.5f}", f"{found.r2[2]:.4f}"]
    assert rows["gas velocity y"] == [*numbers, "km/s", f"{900 * found.l1[2]:.3f} km/s"]
    assert rows["gas density"][2:] == ["mean density", f"{14 * found.l1[0] / math.log(10):.3f} dex"]
    assert rows["velocity divergence"][1] == f"{found.divergence_r2:.4f}"
    assert rows["mean gas density / target's"][3] == f"{found.mass_ratio:.4f}"
    rows = {row[0]: row[1:] for row in zip(*tables.field_table(found), strict=True)}
    for name, spectrum in found.spectra.items():
        shells = spectrum.reference_shells
        values = [f"{value:.3f}" for value in (*spectrum.correlation[shells], *spectrum.ratio[shells])]
        values += ["not reached" if k is None else f"{k:.2g}" for k in spectrum.resolutions.values()]
        assert [*rows[name][: len(values)]] == values


def test_the_flux_has_a_table_and_a_picture(with_flux: Results) -> None:
    lines, flux = tables.lines(with_flux)[:-1], with_flux.flux
    assert max(map(len, lines)) <= 120, "fixed: those of spectra and flux were wider than a terminal"
    table = tables.flux_table(flux)
    assert all(
        any(line.startswith(row[0]) for line in lines)
        for row in (*tables.channel_table(with_flux), *tables.field_table(with_flux), *table)
    )
    rows = {row[0]: [*row[1:]] for row in zip(*table, strict=True)}
    target, fgpa = flux.fields["target"], flux.fields["FGPA"]
    values = [*flux.ratios["FGPA"][flux.reference_modes], flux.power_error("FGPA")]
    values += [*flux.band_errors("FGPA").values(), *flux.p3d_errors("FGPA").values()]
    values += [fgpa.correlation, flux.pdf_distance("FGPA")]
    assert rows["target"] == [f"{target.unscaled_mean:.3f}", f"{target.scale:.3f}", *[""] * len(values)]
    assert rows["FGPA"] == [f"{value:.3f}" for value in (fgpa.unscaled_mean, fgpa.scale, *values)]
    page = report.page(with_flux, PICTURES, {})
    assert len(images_of(page)) == 6
    assert all(row in rows_of(page) for row in table)
    assert f"{flux.mean_flux:.4g} at redshift {flux.redshift:g}" in page
    assert "computed from the dark matter, not smoothed: the cells are too large." in page
    without = {name: field for name, field in flux.fields.items() if name != "FGPA"}
    for fields, says in (
        ({**without, "FGPA in real space": fgpa}, "smoothed by 0.1 Mpc/h, in real space: the input has no velocities."),
        (without, "so there is no baseline."),
    ):
        assert says in report.page(replace(with_flux, flux=replace(flux, fields=fields, smoothing=0.1)), PICTURES, {})


def test_the_flux_of_a_box_with_different_sides_is_reported(
    with_flux: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short axis has no mode in some bins: it is NaN there. Even if no bin has modes of all axes."""
    empty = dict.fromkeys(figures.PICTURES, lambda results: Figure(figsize=(1, 1)))
    monkeypatch.setattr(figures, "PICTURES", {**empty, "flux": figures.flux})
    world, flux = World(Launch("test"), torch.device("cpu")), with_flux.flux
    for gaps in ([1, 3], [1, 3, 0, 2, 4, 5, 6, 7]):
        for values in (flux.axis_k, *(field.axis_power for field in flux.fields.values())):
            values[0, gaps] = np.nan
        report.write_report(tmp_path / "report", with_flux, {}, world)
        text = (tmp_path / "report" / report.SUMMARY).read_text()
        summary = json.loads(text, parse_constant=lambda constant: pytest.fail(f"JSON has no {constant}"))
        for values in (summary["flux"]["k along x (s/km)"], summary["flux"]["fields"]["FGPA"]["P1D along x (km/s)"]):
            assert [place for place, value in enumerate(values) if value is None] == sorted(gaps)
        np.testing.assert_array_equal(load(tmp_path / "report" / report.ARRAYS).flux.axis_k, flux.axis_k)
        assert np.isfinite([*with_flux.scalars().values()]).all()
        assert "non-finite" not in " ".join(tables.lines(with_flux))
