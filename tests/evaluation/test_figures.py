"""Data and labels of the figures agree with the results."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image
from sample_results import sample_results

from utils.evaluation import figures
from utils.evaluation.loss_curves import loss_curves
from utils.evaluation.results import Results
from utils.evaluation.training_figures import ERROR, EXAMINED, STRUCTURE, choose_planes

BOX, CELL = 16, 0.5


@pytest.fixture(scope="module")
def found() -> Results:
    """With this seed, some velocities have their largest magnitude above zero."""
    return sample_results(BOX, noise=0.06, cell=CELL, seed=1)


@pytest.fixture(scope="module")
def unknown() -> Results:
    """Two channels of unknown units, one of which is in the input."""
    return sample_results(BOX, channels=(1, 2))


def with_slices(results: Results, **slices: np.ndarray) -> Results:
    return replace(results, slices={**results.slices, **slices})


def panel(figure: Any, title: str) -> Any:
    return next(axes for axes in figure.axes if axes.get_title() == title)


def pixels(axes: Any) -> np.ndarray:
    return axes.images[0].get_array()


def limits(axes: Any) -> tuple[float, float]:
    return axes.images[0].get_clim()


def bar_label(axes: Any) -> str:
    bar = axes.images[0].colorbar
    return bar.ax.get_xlabel() or bar.ax.get_ylabel()


def physical(values: np.ndarray) -> list[np.ndarray]:
    """The published transforms rho = exp(14 x), v = 900 x km/s, T = exp(8 (x + 1.5)) K; logarithms are decimal."""
    values = values.astype(np.float64)
    return [14 * values[0] / math.log(10), *(900 * values[1:4]), 8 * (values[4] + 1.5) / math.log(10)]


def test_spectra_show_ratio_and_correlation_with_gaps_where_there_is_no_power(found: Results) -> None:
    """A constant prediction has no power, so its correlation is NaN."""
    near, whole, below = figures.spectra(found).axes
    ratios = {line.get_label(): line for line in near.lines}
    assert near.get_ylim() == (0.5, 1.5), "one field's excess must not hide the others"
    assert [whole.get_yscale(), *(list(line.get_ydata()) for line in whole.lines[1:])] == [
        "log",
        *(list(spectrum.ratio) for spectrum in found.spectra.values()),
    ]
    correlations = [line for line in below.lines if len(line.get_xdata()) > 2]
    for (name, spectrum), line in zip(found.spectra.items(), correlations, strict=True):
        np.testing.assert_allclose(ratios[name].get_xdata(), spectrum.k)
        np.testing.assert_allclose(ratios[name].get_ydata(), spectrum.predicted / spectrum.target)
        np.testing.assert_allclose(line.get_ydata(), spectrum.cross / np.sqrt(spectrum.predicted * spectrum.target))
        assert ratios[name].get_color() == line.get_color()
    assert below.get_xlabel() == "wavenumber k (h/Mpc)"
    spectrum = found.spectra["density"]
    zero = np.zeros_like(spectrum.k)
    none = replace(spectrum, predicted=zero, cross=zero)
    figure = figures.spectra(replace(found, spectra={"density": none, "odd": spectrum}))
    nowhere = figures.spectra(replace(found, spectra={"density": replace(spectrum, target=zero * np.nan)}))
    assert any(np.isnan(line.get_ydata()).all() for line in figure.axes[2].lines)
    for each in (figure, nowhere):
        FigureCanvasAgg(each).draw()  # as TensorBoard does
        assert np.isfinite([axes.get_ylim() for axes in each.axes]).all()


def test_distributions_are_normalized_and_exclude_empty_ends(found: Results) -> None:
    figure = figures.distributions(found)
    for name, distribution in found.distributions.items():
        filled, _, line = panel(figure, name).patches
        widths = np.diff(distribution.edges)
        np.testing.assert_allclose(filled.get_data().values, distribution.target / BOX**3 / widths)
        np.testing.assert_allclose(line.get_data().values, distribution.predicted / BOX**3 / widths)
        np.testing.assert_allclose(line.get_data().edges, distribution.edges)
    assert panel(figure, "temperature").get_xlabel() == r"$\log_{10}(T/\mathrm{K})$"
    distribution = found.distributions["gas density"]
    predicted, target = np.zeros((2, len(distribution.target)))
    target[5], predicted[9] = 10, 1
    few = replace(found, distributions={"only": replace(distribution, predicted=predicted, target=target)})
    axes = panel(figures.distributions(few), "only")
    assert axes.get_xlim() == pytest.approx((distribution.edges[5], distribution.edges[10]))
    assert axes.get_ylim()[0] < 1 / np.diff(distribution.edges)[9] < axes.get_ylim()[1]


def test_both_phase_diagrams_have_one_color_scale(found: Results) -> None:
    figure = figures.phase_diagram(found)
    target, prediction = (panel(figure, name) for name in ("target", "prediction"))
    counts = found.phase_diagram
    area = np.outer(np.diff(counts.temperature_edges), np.diff(counts.density_edges))
    for axes, values in ((target, counts.target), (prediction, counts.predicted)):
        mesh = axes.collections[0]
        np.testing.assert_allclose(mesh.get_array().filled(0), values.T / BOX**3 / area)
        corners = mesh.get_coordinates()
        np.testing.assert_allclose(corners[0, :, 0], counts.density_edges)
        np.testing.assert_allclose(corners[:, 0, 1], counts.temperature_edges)
    assert target.collections[0].get_clim() == prediction.collections[0].get_clim()


def test_slices_show_physical_values_and_residuals(found: Results) -> None:
    grid = np.array(figures.slices(found).axes[:20]).reshape(5, 4).T
    inputs, target, predicted = (found.slices[name] for name in ("input", "target", "predicted"))
    given = physical(np.concatenate([inputs, inputs[:1]]))[:4]
    for channel, (truth, prediction) in enumerate(zip(physical(target), physical(predicted), strict=True)):
        rows = grid[:, channel]
        for axes, plane in zip(rows[1:], (truth, prediction, prediction - truth), strict=True):
            np.testing.assert_allclose(pixels(axes), plane.T, atol=1e-9)
        if channel < 4:
            np.testing.assert_allclose(pixels(rows[0]), given[channel].T, atol=1e-9)
            assert limits(rows[0]) == limits(rows[1])
        assert limits(rows[1]) == limits(rows[2])
        low, high = limits(rows[3])
        assert low == -high
        assert np.mean(np.abs(prediction - truth) <= high) == pytest.approx(0.995, abs=0.005)
        low, high = limits(rows[1])
        if "velocity" in found.channels[channel].name:
            assert low == -high == -np.abs(truth).max()
        else:
            assert (low, high) == pytest.approx((truth.min(), truth.max()))
    assert grid[0, 4].texts[0].get_text() == "not in the input"
    assert [bar_label(axes) for axes in grid[3]] == ["dex", "km/s", "km/s", "km/s", "dex"]


def test_flux_shows_power_ratio_distribution_and_a_sight_line(monkeypatch: pytest.MonkeyPatch) -> None:
    results = sample_results(BOX, cell=CELL, flux=True)
    flux = results.flux
    assert flux is not None
    power, pdf, ratio, line = figures.flux(results).axes
    assert [each.get_label() for each in power.lines] == ["target", "prediction", "FGPA"]
    for number, (name, field) in enumerate(flux.fields.items()):
        np.testing.assert_allclose(power.lines[number].get_ydata(), flux.k * field.power / math.pi)
        np.testing.assert_allclose(pdf.patches[number].get_data().values, field.pdf)
        np.testing.assert_allclose(line.lines[number].get_ydata(), field.sightline)
        if name != "target":
            np.testing.assert_allclose(ratio.lines[number - 1].get_ydata(), flux.ratios[name])
    assert (ratio.get_xlabel(), line.get_xlabel()) == ("wavenumber k (s/km)", "velocity along z (km/s)")
    by_direction = figures.flux_3d(results).axes
    assert [axes.get_title() for axes in by_direction] == ["prediction", "FGPA"]
    for axes, ratio in zip(by_direction, flux.p3d_ratios.values(), strict=True):
        for line, k, values in zip(axes.lines[1:], flux.p3d_k, ratio, strict=True):
            np.testing.assert_array_equal(line.get_xdata(), k[np.isfinite(k)])
            np.testing.assert_array_equal(line.get_ydata(), values[np.isfinite(k)])
    monkeypatch.setattr(figures, "PICTURES", {"flux": figures.flux, "flux_3d": figures.flux_3d})
    assert list(figures.draw_all(results)) == ["flux", "flux_3d"]
    assert list(figures.draw_all(replace(results, flux=replace(flux, p3d_k=np.empty((4, 0)))))) == ["flux"]
    assert not figures.draw_all(replace(results, flux=None))
    nan = replace(
        flux.fields["prediction"], **{key: value * np.nan for key, value in vars(flux.fields["target"]).items()}
    )
    diverged = replace(results, flux=replace(flux, fields={**flux.fields, "prediction": nan}))
    assert len(figures.encode_png(figures.flux(diverged))) > 10000
    assert len(figures.encode_png(figures.flux_3d(diverged))) > 10000


def test_slices_have_y_to_the_right_and_z_upwards(found: Results) -> None:
    marked = np.zeros_like(found.slices["target"])
    marked[:, 3, 11] = 1  # y = 3, z = 11
    axes = figures.slices(with_slices(found, predicted=marked)).axes[2]
    assert np.unravel_index(pixels(axes).argmax(), pixels(axes).shape) == (11, 3)
    assert axes.images[0].origin == "lower"
    assert axes.images[0].get_extent() == [0, BOX * CELL, 0, BOX * CELL]
    assert axes.get_title() == "prediction"
    assert figures.slices(found).axes[0].get_ylabel() == "density\nz (Mpc/h)"


def test_channels_of_unknown_units_are_drawn_as_channel_values(unknown: Results) -> None:
    figure = figures.slices(unknown)
    grid = np.array(figure.axes[:8]).reshape(2, 4).T
    np.testing.assert_allclose(pixels(grid[0, 0]), unknown.slices["input"][0].T)
    np.testing.assert_allclose(pixels(grid[2, 1]), unknown.slices["predicted"][1].T)
    assert grid[0, 1].texts[0].get_text() == "not in the input"
    assert bar_label(grid[2, 0]) == bar_label(grid[3, 0]) == "channel value"
    assert grid[3, 1].get_xlabel() == "y (cells)"
    assert panel(figures.distributions(unknown), "channel 1").get_xlabel() == "channel value"


def test_a_diverged_or_perfect_prediction_has_finite_color_limits(found: Results, unknown: Results) -> None:
    spoilt = found.slices["predicted"].copy()
    spoilt[:, 0, 0], spoilt[:, 1, 1] = np.nan, 1e4  # exp(140000) overflows
    grid = np.array(figures.slices(with_slices(found, predicted=spoilt)).axes[:20]).reshape(5, 4).T
    lost = figures.slices(with_slices(unknown, predicted=unknown.slices["predicted"] * np.nan))
    perfect = figures.slices(with_slices(unknown, predicted=unknown.slices["target"]))
    for axes in (*grid[3], *lost.axes[3:8:4], *perfect.axes[3:8:4]):
        low, high = limits(axes)
        assert np.isfinite(high)
        assert low == -high < 0
    assert np.ma.getmaskarray(pixels(grid[3, 0]))[0, 0]


def test_loss_curves_show_losses_and_metrics() -> None:
    records = [
        {"step": 0, "Loss/train": 2.0, "Loss/valid": 2.1, "Loss/valid/valid": 2.2},
        {"step": 5, "Step/loss": 1.5, "Step/learning rate": 0.1},
        {"step": 10, "Loss/train": 1.0, "Loss/valid": 1.1, "Accuracy/valid": 0.5, "Learning Rate": 0.1},
    ]
    figure = loss_curves(records, "cross_entropy", "demo/2ranks/00")
    losses, metrics, rate = figure.axes
    assert figure.get_suptitle() == "demo/2ranks/00, epoch 1, step 10"
    assert rate.get_ylim() == pytest.approx((0, 0.115)), "a constant rate must not be magnified"
    lines = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in losses.lines}
    assert lines == {
        "training, per interval": ([5], [1.5]),
        "training, per epoch": ([0, 10], [2.0, 1.0]),
        "validation": ([0, 10], [2.1, 1.1]),
        "validation, valid": ([0], [2.2]),
    }
    assert losses.get_ylabel() == "loss (cross-entropy)"
    assert [(line.get_label(), *line.get_ydata()) for line in metrics.lines] == [("accuracy", 0.5)]
    without = loss_curves([records[0]], "l1", "")
    assert [axes.get_ylabel() for axes in without.axes] == ["loss (mean absolute error)", "learning\nrate"]


def test_figures_are_titled_with_run_epoch_and_step(found: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "PICTURES", {"spectra": figures.spectra})
    checkpoint = "/logs/demo/2ranks/00/checkpoints/step_00000800/weights.pt"
    for metadata, title in (
        ({"run": "/logs/demo/2ranks/00", "epoch": 4, "step": 800}, "demo/2ranks/00, epoch 4, step 800"),
        ({"checkpoint": checkpoint, "epoch": 4, "step": 800}, "demo/2ranks/00, epoch 4, step 800"),
        ({"checkpoint": "kept/weights.pt", "step": 800}, "weights.pt, step 800"),
        ({"prediction": "boxes/gas.h5"}, "gas.h5"),
        ({}, ""),
    ):
        (figure,) = figures.draw_all(replace(found, metadata=metadata)).values()
        assert figure.get_suptitle() == title


def test_slices_show_the_planes_with_the_most_structure_and_the_largest_error() -> None:
    """Of the first crops only: the last one, which exceeds both, is not examined.

    The loader reuses its buffers; input and target were once those of a later crop than the prediction.
    """
    targets = torch.zeros(EXAMINED + 1, 5, 4, 4, 4)
    targets[3, 0, 1, 2, 2], targets[6, 0, 2, 1, 1], targets[6, 1, 3, 1, 1], targets[-1] = 5, 4, 9, 99
    targets[-1, 0, 0, 0, 0] = 1000

    class Step:
        def predict(self, inputs: torch.Tensor) -> torch.Tensor:
            assert len(inputs) == 1
            return inputs.repeat(1, 5, 1, 1, 1) * targets[int(inputs.max()), :1]

    class Crops:
        def epoch(self, number: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            inputs = torch.arange(EXAMINED + 1.0)[:, None, None, None, None].expand(-1, 1, 4, 4, 4)
            buffers = torch.empty(5, 1, 4, 4, 4), torch.empty(5, 5, 4, 4, 4)
            for batch in zip(inputs.split(5), targets.split(5), strict=True):
                source, target = (buffer[: len(part)].copy_(part) for buffer, part in zip(buffers, batch, strict=True))
                yield source, target

    chosen = choose_planes(Step(), Crops())  # type: ignore[arg-type]
    structure, error = chosen[STRUCTURE].fields, chosen[ERROR].fields
    np.testing.assert_array_equal(structure["target"], targets[3, :, 1])
    np.testing.assert_array_equal(structure["predicted"][1], 3 * targets[3, 0, 1])
    assert (error["input"] == 6).all()
    np.testing.assert_array_equal(error["target"], targets[6, :, 2])
    targets[8, 2, 0] = math.nan
    assert (choose_planes(Step(), Crops())[ERROR].fields["input"] == 8).all()  # type: ignore[arg-type]


@pytest.mark.parametrize("name", figures.PICTURES)
def test_every_figure_becomes_a_png(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "DOTS_PER_INCH", 50)
    found = sample_results(8, cell=CELL, flux=name.startswith("flux"))
    picture = Image.open(io.BytesIO(figures.encode_png(figures.PICTURES[name](found))))
    assert picture.format == "PNG"
    assert len(np.unique(np.asarray(picture.convert("L")))) > 10, "an empty picture"
