"""The data and labels of the figures' artists are compared with the results."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image
from sample_results import sample_results

from utils.evaluation import figures, history_figures, plotting
from utils.evaluation.results import Results

BOX, CELL = 16, 0.5


@pytest.fixture(scope="module")
def history() -> list[Results]:
    """Eight epochs, each with less noise. With this seed, some velocities have their largest magnitude above zero."""
    return [
        sample_results(BOX, noise=0.5 / epoch, epoch=epoch, step=100 * epoch, cell=CELL, seed=1)
        for epoch in range(1, 9)
    ]


@pytest.fixture(scope="module")
def found(history: list[Results]) -> Results:
    return history[-1]


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
    """Inverts the channel transforms ln(rho)/14, v / 1000 km/s, (log10 T - 5) / 2.5; logarithms are decimal."""
    values = values.astype(np.float64)
    return [14 * values[0] / math.log(10), *(1000 * values[1:4]), 2.5 * values[4] + 5]


def test_spectra_show_ratio_and_correlation_of_the_last_and_earlier_evaluations(
    history: list[Results], found: Results
) -> None:
    above, below = figures.spectra(found, history[:-1]).axes
    lines = {line.get_label(): line for line in above.lines}
    dashed = [line for line in above.lines if line.get_linestyle() == "--" and len(line.get_xdata())]
    solid = below.lines[len(dashed) : len(dashed) + len(found.spectra)]
    for (name, spectrum), line in zip(found.spectra.items(), solid, strict=True):
        np.testing.assert_allclose(lines[name].get_xdata(), spectrum.k)
        np.testing.assert_allclose(lines[name].get_ydata(), spectrum.predicted / spectrum.target)
        np.testing.assert_allclose(line.get_ydata(), spectrum.cross / np.sqrt(spectrum.predicted * spectrum.target))
        low, high = above.get_ylim()
        assert low < spectrum.ratio.min()
        assert spectrum.ratio.max() < high
    shown = list(itertools.product((history[0], history[3], history[6]), found.spectra))
    for line, (earlier, name) in zip(dashed, shown, strict=True):
        np.testing.assert_allclose(line.get_ydata(), earlier.spectra[name].ratio)
    assert below.get_xlabel() == "wavenumber k (h/Mpc)"


def test_spectra_without_power_are_drawn_with_gaps(found: Results) -> None:
    """A constant prediction has no power, so its correlation is NaN."""
    spectrum = found.spectra["density"]
    zero = np.zeros_like(spectrum.k)
    none = replace(spectrum, predicted=zero, cross=zero)
    figure = figures.spectra(replace(found, spectra={"density": none, "odd": spectrum}))
    nowhere = figures.spectra(replace(found, spectra={"density": replace(spectrum, target=zero * np.nan)}))
    assert np.isnan(figure.axes[1].lines[0].get_ydata()).all()
    for each in (figure, nowhere):
        assert np.isfinite([each.axes[0].get_ylim(), each.axes[1].get_ylim()]).all()


def test_distributions_are_normalised_and_exclude_empty_ends(found: Results) -> None:
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


def test_both_phase_diagrams_have_one_colour_scale(found: Results) -> None:
    figure = figures.phase_diagram(found)
    target, prediction, ratio = (panel(figure, name) for name in ("target", "prediction", "prediction / target"))
    counts = found.phase_diagram
    area = np.outer(np.diff(counts.temperature_edges), np.diff(counts.density_edges))
    for axes, values in ((target, counts.target), (prediction, counts.predicted)):
        mesh = axes.collections[0]
        np.testing.assert_allclose(mesh.get_array().filled(0), values.T / BOX**3 / area)
        corners = mesh.get_coordinates()
        np.testing.assert_allclose(corners[0, :, 0], counts.density_edges)
        np.testing.assert_allclose(corners[:, 0, 1], counts.temperature_edges)
    assert target.collections[0].get_clim() == prediction.collections[0].get_clim()
    shown = ratio.collections[0].get_array()
    occupied = (counts.predicted + counts.target).T > 0
    np.testing.assert_allclose(shown[occupied], np.log10((counts.predicted.T + 1) / (counts.target.T + 1))[occupied])
    assert shown.mask[~occupied].all()


def test_slices_show_physical_values_and_residuals(found: Results) -> None:
    grid = np.array(figures.slices(found).axes[:20]).reshape(4, 5)
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


def test_slices_have_y_to_the_right_and_z_upwards(found: Results) -> None:
    marked = np.zeros_like(found.slices["target"])
    marked[:, 3, 11] = 1  # y = 3, z = 11
    axes = figures.slices(with_slices(found, predicted=marked)).axes[10]
    assert np.unravel_index(pixels(axes).argmax(), pixels(axes).shape) == (11, 3)
    assert axes.images[0].origin == "lower"
    assert axes.images[0].get_extent() == [0, BOX * CELL, 0, BOX * CELL]
    assert axes.get_ylabel() == "prediction\nz (Mpc/h)"


def test_channels_of_unknown_units_are_drawn_as_channel_values(unknown: Results) -> None:
    figure = figures.slices(unknown)
    grid = np.array(figure.axes[:8]).reshape(4, 2)
    np.testing.assert_allclose(pixels(grid[0, 0]), unknown.slices["input"][0].T)
    np.testing.assert_allclose(pixels(grid[2, 1]), unknown.slices["predicted"][1].T)
    assert grid[0, 1].texts[0].get_text() == "not in the input"
    assert bar_label(grid[2, 0]) == bar_label(grid[3, 0]) == "channel value"
    assert figure.get_suptitle() == f"the plane at x = {BOX // 2} cells"
    assert panel(figures.distributions(unknown), "channel 1").get_xlabel() == "channel value"


def test_a_diverged_or_perfect_prediction_has_finite_colour_limits(found: Results, unknown: Results) -> None:
    spoilt = found.slices["predicted"].copy()
    spoilt[:, 0, 0], spoilt[:, 1, 1] = np.nan, 1e4  # exp(140000) overflows
    grid = np.array(figures.slices(with_slices(found, predicted=spoilt)).axes[:20]).reshape(4, 5)
    lost = figures.slices(with_slices(unknown, predicted=unknown.slices["predicted"] * np.nan))
    perfect = figures.slices(with_slices(unknown, predicted=unknown.slices["target"]))
    for axes in (*grid[3], *lost.axes[6:8], *perfect.axes[6:8]):
        low, high = limits(axes)
        assert np.isfinite(high)
        assert low == -high < 0
    assert np.ma.getmaskarray(pixels(grid[3, 0]))[0, 0]


def test_slices_over_the_training_end_with_the_target(history: list[Results]) -> None:
    grid = np.array([axes for axes in history_figures.slices_over_training(history).axes if axes.images]).reshape(2, 7)
    epochs = [int(axes.get_title().removeprefix("epoch ")) for axes in grid[0, :6]]
    assert (epochs[0], epochs[-1]) == (1, 8)
    assert epochs == sorted(set(epochs))
    for row, channel in ((0, 0), (1, 4)):
        planes = [*(history[epoch - 1].slices["predicted"] for epoch in epochs), history[-1].slices["target"]]
        for axes, plane in zip(grid[row], planes, strict=True):
            np.testing.assert_allclose(pixels(axes), physical(plane)[channel].T, atol=1e-9)
            assert limits(axes) == limits(grid[row, 6])


def test_evaluation_curves_show_errors_and_correlations(history: list[Results], found: Results) -> None:
    panels = {axes.get_label(): axes for axes in history_figures.evaluation_curves(history).axes}
    for name, key in (("L1", "l1"), ("R2", "r2")):
        assert len(panels[name].lines) == 5
        for number, line in enumerate(panels[name].lines):
            assert list(line.get_xdata()) == list(range(1, 9))
            np.testing.assert_allclose(line.get_ydata(), [getattr(each, key)[number] for each in history])
    for number in range(3):
        lines = {line.get_label(): line.get_ydata() for line in panels[f"r {number}"].lines}
        for name, spectrum in history[0].spectra.items():
            shell = spectrum.reference_shells[number]
            np.testing.assert_allclose(lines[name], [each.spectra[name].correlation[shell] for each in history])
    # Evaluations that share an epoch are placed by step.
    for metadata, label, points in (
        ([{"epoch": 2, "step": 40}, {"epoch": 2, "step": 60}], "step", [40, 60]),
        ([{"epoch": "best"}, {"epoch": "last"}], "evaluation", [1, 2]),
    ):
        axes = history_figures.evaluation_curves([replace(found, metadata=each) for each in metadata]).axes[0]
        assert axes.get_xlabel() == label
        assert list(axes.lines[0].get_xdata()) == points


def test_one_bad_evaluation_does_not_flatten_the_curves(history: list[Results]) -> None:
    """An R² of -300 in the first epoch is cut off; if all are that bad, they are shown."""
    far = replace(history[0], r2=np.full(5, -300.0))
    low, high = history_figures.evaluation_curves([far, *history[1:]]).axes[1].get_ylim()
    assert low == -0.5
    assert high > 0.9
    low, high = history_figures.evaluation_curves([far, replace(far, metadata={"epoch": 2})]).axes[1].get_ylim()
    assert low < -300 < high
    lost = replace(far, l1=np.full(5, np.nan), r2=np.full(5, np.nan), spectra={})
    FigureCanvasAgg(history_figures.evaluation_curves([lost])).draw()


@pytest.mark.parametrize(
    "draw",
    [*figures.PICTURES.values(), history_figures.slices_over_training, history_figures.evaluation_curves],
    ids=lambda draw: draw.__name__,
)
def test_every_figure_becomes_a_png(draw: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plotting, "DOTS_PER_INCH", 50)
    found = sample_results(8, channels=(4, 5) if draw is figures.phase_diagram else (1, 2))
    figure = draw(found if draw in figures.PICTURES.values() else [found])
    picture = Image.open(io.BytesIO(plotting.encode_png(figure)))
    assert picture.format == "PNG"
    assert len(np.unique(np.asarray(picture.convert("L")))) > 10, "an empty picture"


def test_slices_over_the_training_of_one_channel() -> None:
    figure = history_figures.slices_over_training([sample_results(8, channels=(1, 1))])
    assert len([axes for axes in figure.axes if axes.images]) == 2, "one evaluation and the target"
