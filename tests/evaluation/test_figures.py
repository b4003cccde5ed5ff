"""Figures show what the evaluation found: data and labels of their artists are compared with the results."""

from __future__ import annotations

import io
import itertools
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image
from sample_results import sample_results

from utils.evaluation import figures
from utils.evaluation.results import Results, telling_wavenumbers

BOX, CELL = 16, 0.5


@pytest.fixture(scope="module")
def history() -> list[Results]:
    """Eight epochs, each with less noise; with this seed not all velocities reach further below zero than above."""
    return [
        sample_results(BOX, noise=0.5 / epoch, epoch=epoch, step=100 * epoch, cell=CELL, seed=1)
        for epoch in range(1, 9)
    ]


@pytest.fixture(scope="module")
def found(history: list[Results]) -> Results:
    return history[-1]


@pytest.fixture(scope="module")
def unknown() -> Results:
    """Two channels of unknown units, one of them in the input."""
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
    """Inverts the channels as README gives them: ln(rho)/14, v / 1000 km/s, (log10 T - 5) / 2.5; logs are decimal."""
    values = values.astype(np.float64)
    return [14 * values[0] / math.log(10), *(1000 * values[1:4]), 2.5 * values[4] + 5]


def test_spectra_show_ratio_and_correlation_now_and_earlier(history: list[Results], found: Results) -> None:
    above, below = figures.spectra(found, history[:-1]).axes
    lines = {line.get_label(): line for line in above.lines}
    dashed = [line for line in above.lines if line.get_linestyle() == "--" and len(line.get_xdata())]
    solid = below.lines[len(dashed) : len(dashed) + len(found.spectra)]
    for (name, spectrum), line in zip(found.spectra.items(), solid, strict=True):
        np.testing.assert_allclose(lines[name].get_xdata(), spectrum.k)
        np.testing.assert_allclose(lines[name].get_ydata(), spectrum.predicted / spectrum.target)
        np.testing.assert_allclose(line.get_ydata(), spectrum.cross / np.sqrt(spectrum.predicted * spectrum.target))
        assert line.get_color() == lines[name].get_color()
        low, high = above.get_ylim()
        assert low < spectrum.ratio.min()
        assert spectrum.ratio.max() < high
    assert len({lines[name].get_color() for name in found.spectra}) == len(found.spectra)
    shown = list(itertools.product((history[0], history[3], history[6]), found.spectra))
    for line, (earlier, name) in zip(dashed, shown, strict=True):
        np.testing.assert_allclose(line.get_ydata(), earlier.spectra[name].ratio)
    assert "earlier: epoch 1, 4, 7" in lines
    for axes in (above, below):
        assert any(list(line.get_ydata()) == [1, 1] for line in axes.lines), "no guide line at 1"
    assert below.get_xlabel() == "wavenumber k (h/Mpc)"
    assert "(rad/cell)" in figures.spectra(replace(found, length_unit="cells")).axes[1].get_xlabel()


def test_spectra_without_power_leave_gaps(found: Results) -> None:
    """A constant prediction has no power, so its correlation is NaN."""
    spectrum = found.spectra["density"]
    zero = np.zeros_like(spectrum.k)
    none = replace(spectrum, predicted=zero, cross=zero)
    figure = figures.spectra(replace(found, spectra={"density": none, "odd": spectrum}))
    nowhere = figures.spectra(replace(found, spectra={"density": replace(spectrum, target=zero * np.nan)}))
    assert np.isnan(figure.axes[1].lines[0].get_ydata()).all()
    for each in (figure, nowhere):
        assert np.isfinite([each.axes[0].get_ylim(), each.axes[1].get_ylim()]).all()


def test_distributions_are_shares_of_all_cells(found: Results) -> None:
    figure = figures.distributions(found)
    labels = {
        "gas density": (r"$\log_{10}(\rho/\bar\rho)$", "share per dex"),
        "gas velocity y": ("km/s", "share per km/s"),
        "temperature": (r"$\log_{10}(T/\mathrm{K})$", "share per dex"),
        "velocity divergence": ("km/s per Mpc/h", "share per (km/s per Mpc/h)"),
    }
    for name, distribution in found.distributions.items():
        axes = panel(figure, name)
        filled, outline, line = axes.patches
        assert filled.get_fill()
        widths = np.diff(distribution.edges)
        for patch in (filled, outline):
            np.testing.assert_allclose(patch.get_data().values, distribution.target / BOX**3 / widths)
        np.testing.assert_allclose(line.get_data().values, distribution.predicted / BOX**3 / widths)
        np.testing.assert_allclose(line.get_data().edges, distribution.edges)
        assert axes.get_yscale() == "log"
        assert (axes.get_xlabel(), axes.get_ylabel()) == labels.get(name, labels["gas velocity y"])
    assert len([axes for axes in figure.axes if axes.patches]) == len(found.distributions) == 6


def test_distributions_show_every_bin_with_cells_and_no_empty_ends(found: Results) -> None:
    distribution = found.distributions["gas density"]
    predicted, target = np.zeros((2, len(distribution.target)))
    target[5], predicted[9] = 10, 1
    found = replace(found, distributions={"only": replace(distribution, predicted=predicted, target=target)})
    axes = panel(figures.distributions(found), "only")
    assert axes.get_xlim() == pytest.approx((distribution.edges[5], distribution.edges[10]))
    width = np.diff(distribution.edges)[9]
    assert axes.get_ylim()[0] < 1 / width < axes.get_ylim()[1]


def test_both_phase_diagrams_have_one_colour_scale(found: Results) -> None:
    figure = figures.plane(found)
    target, prediction, ratio = (panel(figure, name) for name in ("target", "prediction", "prediction / target"))
    counts = found.plane
    area = np.outer(np.diff(counts.temperature_edges), np.diff(counts.density_edges))
    for axes, values in ((target, counts.target), (prediction, counts.predicted)):
        mesh = axes.collections[0]
        np.testing.assert_allclose(mesh.get_array().filled(0), values.T / BOX**3 / area)
        corners = mesh.get_coordinates()
        np.testing.assert_allclose(corners[0, :, 0], counts.density_edges)
        np.testing.assert_allclose(corners[:, 0, 1], counts.temperature_edges)
    assert target.collections[0].get_clim() == prediction.collections[0].get_clim()
    shown = ratio.collections[0]
    expected = np.log10((counts.predicted.T + 1) / (counts.target.T + 1))
    there = (counts.predicted + counts.target).T > 0
    np.testing.assert_allclose(shown.get_array()[there], expected[there])
    assert shown.get_array().mask[~there].all()
    assert shown.get_clim()[0] == -shown.get_clim()[1]
    assert target.get_xlabel() == r"$\log_{10}(\rho/\bar\rho)$"
    assert target.get_ylabel() == r"$\log_{10}(T/\mathrm{K})$"
    assert "share of cells per dex²" in [axes.get_xlabel() for axes in figure.axes]


def test_slices_show_physical_values_and_residuals(found: Results) -> None:
    figure = figures.slices(found)
    grid = np.array(figure.axes[:20]).reshape(4, 5)
    units = [r"$\log_{10}(\rho/\bar\rho)$", "km/s", "km/s", "km/s", r"$\log_{10}(T/\mathrm{K})$"]
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
        assert bar_label(rows[2]) == units[channel]
        assert bar_label(rows[3]) == ("km/s" if 0 < channel < 4 else "dex")
        low, high = limits(rows[3])
        assert low == -high
        assert np.mean(np.abs(prediction - truth) <= high) == pytest.approx(0.995, abs=0.005)
        low, high = limits(rows[1])
        if "velocity" in found.channels[channel].name:
            assert low == -high == -np.abs(truth).max()
        else:
            assert (low, high) == pytest.approx((truth.min(), truth.max()))
    assert not grid[0, 4].images
    assert grid[0, 4].texts[0].get_text() == "not in the input"
    assert [axes.get_title() for axes in grid[0, :4]] == [channel.name for channel in found.input_channels]
    assert [axes.get_title() for axes in grid[1]] == [channel.name for channel in found.channels]


def test_slices_have_y_to_the_right_and_z_upwards(found: Results) -> None:
    marked = np.zeros_like(found.slices["target"])
    marked[:, 3, 11] = 1  # y = 3, z = 11
    grid = figures.slices(with_slices(found, predicted=marked)).axes
    axes = grid[10]
    assert np.unravel_index(pixels(axes).argmax(), pixels(axes).shape) == (11, 3)
    assert axes.images[0].origin == "lower"
    assert axes.images[0].get_extent() == [0, BOX * CELL, 0, BOX * CELL]
    assert axes.get_ylabel() == "prediction\nz (Mpc/h)"
    assert grid[15].get_xlabel() == "y (Mpc/h)"
    about = {name: value for name, value in found.about.items() if name != "cell"}
    # Inputs without units cannot be compared with targets that have some.
    plain = tuple(replace(channel, unit=None) for channel in found.input_channels)
    in_cells = figures.slices(replace(found, about=about, input_channels=plain))
    assert in_cells.axes[0].texts[0].get_text() == "not in the input"
    assert in_cells.axes[10].images[0].get_extent() == [0, BOX, 0, BOX]
    assert in_cells.axes[15].get_xlabel() == "y (cells)"
    assert in_cells.get_suptitle() == f"the plane at x = {BOX // 2} cells"


def test_channels_of_unknown_units_are_shown_as_plain_values(unknown: Results) -> None:
    grid = np.array(figures.slices(unknown).axes[:8]).reshape(4, 2)
    np.testing.assert_allclose(pixels(grid[0, 0]), unknown.slices["input"][0].T)
    np.testing.assert_allclose(pixels(grid[2, 1]), unknown.slices["predicted"][1].T)
    difference = unknown.slices["predicted"][1] - unknown.slices["target"][1]
    np.testing.assert_allclose(pixels(grid[3, 1]), difference.T)
    assert grid[0, 1].texts[0].get_text() == "not in the input"
    assert bar_label(grid[2, 0]) == bar_label(grid[3, 0]) == "channel value"
    assert panel(figures.distributions(unknown), "channel 1").get_xlabel() == "channel value"
    assert figures.curves_over_epochs([unknown]).axes[0].lines
    single = figures.over_epochs([sample_results(8, channels=(1, 1))])
    assert len([axes for axes in single.axes if axes.images]) == 2, "one channel: one evaluation and the target"


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
    FigureCanvasAgg(lost).draw()


def test_the_grid_over_epochs_ends_with_the_target(history: list[Results]) -> None:
    grid = np.array([axes for axes in figures.over_epochs(history).axes if axes.images]).reshape(2, 7)
    epochs = [int(axes.get_title().removeprefix("epoch ")) for axes in grid[0, :6]]
    assert (epochs[0], epochs[-1]) == (1, 8)
    assert epochs == sorted(set(epochs))
    assert grid[0, 6].get_title() == "target"
    for row, channel in ((0, 0), (1, 4)):
        planes = [*(history[epoch - 1].slices["predicted"] for epoch in epochs), history[-1].slices["target"]]
        for axes, plane in zip(grid[row], planes, strict=True):
            np.testing.assert_allclose(pixels(axes), physical(plane)[channel].T, atol=1e-9)
            assert limits(axes) == limits(grid[row, 6])
        assert grid[row, 0].get_ylabel() == f"{history[0].channels[channel].name}\nz (Mpc/h)"


def test_curves_over_epochs_show_errors_and_correlations(history: list[Results]) -> None:
    panels = {axes.get_label(): axes for axes in figures.curves_over_epochs(history).axes}
    for name, key in (("L1", "l1"), ("R2", "r2")):
        assert len(panels[name].lines) == 5
        for number, line in enumerate(panels[name].lines):
            assert line.get_label() == history[0].channels[number].name
            assert list(line.get_xdata()) == list(range(1, 9))
            np.testing.assert_allclose(line.get_ydata(), [getattr(each, key)[number] for each in history])
    for number in range(3):
        axes = panels[f"r {number}"]
        lines = {line.get_label(): line.get_ydata() for line in axes.lines}
        for name, spectrum in history[0].spectra.items():
            shell = np.abs(spectrum.k - telling_wavenumbers(spectrum)[number]).argmin()
            np.testing.assert_allclose(lines[name], [each.spectra[name].correlation[shell] for each in history])
        assert axes.get_title().endswith(f"k = {spectrum.k[shell]:.2g} h/Mpc")
        assert axes.get_xlabel() == "epoch"


def test_evaluations_that_share_an_epoch_are_placed_by_step(found: Results) -> None:
    for abouts, label, points in (
        ([{"epoch": 2, "step": 40}, {"epoch": 2, "step": 60}], "step", [40, 60]),
        ([{"epoch": "best"}, {"epoch": "last"}], "evaluation", [1, 2]),
    ):
        axes = figures.curves_over_epochs([replace(found, about=about) for about in abouts]).axes[0]
        assert axes.get_xlabel() == label
        assert list(axes.lines[0].get_xdata()) == points


def test_one_bad_evaluation_does_not_flatten_the_curves(history: list[Results]) -> None:
    """An R² of -300 in the first epoch is cut off; if all are that bad, they are shown."""
    far = replace(history[0], r2=np.full(5, -300.0))
    low, high = figures.curves_over_epochs([far, *history[1:]]).axes[1].get_ylim()
    assert low == -0.5
    assert high > 0.9
    low, high = figures.curves_over_epochs([far, replace(far, about={"epoch": 2})]).axes[1].get_ylim()
    assert low < -300 < high
    lost = replace(far, l1=np.full(5, np.nan), r2=np.full(5, np.nan), spectra={})
    FigureCanvasAgg(figures.curves_over_epochs([lost])).draw()


def test_the_movie_has_a_frame_per_evaluation_above_a_still_target(
    history: list[Results], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures.movie(history[::3], tmp_path / "new" / "movie.gif")
    picture, frames = Image.open(tmp_path / "new" / "movie.gif"), []
    for number in range(picture.n_frames):
        picture.seek(number)
        frames.append(np.asarray(picture.convert("RGB")).astype(int))
    assert (picture.format, len(frames)) == ("GIF", 3)
    half = len(frames[0]) // 2
    for one, other in itertools.pairwise(frames):
        assert np.abs(one[:half] - other[:half]).max() > 50
        assert np.array_equal(one[half:], other[half:])
    monkeypatch.setattr(figures, "MOVIE_BYTES", 1)
    monkeypatch.setattr(figures, "MOVIE_FRAMES", 8)
    assert Image.open(io.BytesIO(figures.encoded_movie(history[::3]))).n_frames == 2, "a large file loses frames"


def test_pictures_with_a_palette_are_close_to_true_colour(unknown: Results) -> None:
    figure = figures.over_epochs([unknown])
    FigureCanvasAgg(figure).draw()
    figure.set_layout_engine("none")  # nothing moves between the two
    true = io.BytesIO()
    figure.savefig(true, format="png", dpi=figures.PICTURE_DOTS_PER_INCH)
    few = Image.open(io.BytesIO(figures.encoded(figure)))
    assert few.mode == "P"
    difference = np.asarray(few.convert("RGB")).astype(int) - np.asarray(Image.open(true).convert("RGB"))
    assert np.abs(difference).mean() < 1.5


def texts(figure: Any) -> list[Any]:
    """All visible text: of tick labels, those within the axes' limits."""
    found = [*figure.texts, *(text for legend in figure.legends for text in legend.get_texts())]
    for axes in figure.axes:
        if not axes.axison:
            continue
        found += [axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts]
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
                if low <= tick.get_loc() <= high:
                    found += [label for label in (tick.label1, tick.label2) if label.get_visible()]
    return [text for text in found if text.get_visible() and text.get_text()]


@pytest.mark.parametrize(
    "name", ["spectra", "distributions", "plane", "slices", "over_epochs", "curves_over_epochs", "unknown"]
)
def test_no_text_overlaps_or_is_cut(name: str, history: list[Results], unknown: Results) -> None:
    """Draws each figure."""
    if name == "unknown":
        figure = figures.slices(unknown)
    elif name == "spectra":
        figure = figures.spectra(history[-1], history[:-1])
    else:
        figure = getattr(figures, name)(history if name.endswith("epochs") else history[-1])
    FigureCanvasAgg(figure).draw()
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts(figure)]
    assert len(boxes) > 10
    for text, box in boxes:
        assert box.x0 >= 0, text
        assert box.y0 >= 0, text
        assert box.x1 <= figure.bbox.x1, text
        assert box.y1 <= figure.bbox.y1, text
    for (one, first), (other, second) in itertools.combinations(boxes, 2):
        width = min(first.x1, second.x1) - max(first.x0, second.x0)
        height = min(first.y1, second.y1) - max(first.y0, second.y0)
        assert width <= 0.5 or height <= 0.5, f"{one!r} on {other!r}"


@pytest.mark.slow
def test_matplotlib_is_imported_only_when_drawing_and_pyplot_never() -> None:
    """In a fresh interpreter: this one has imported them."""
    root = Path(__file__).parents[2]
    code = f"""
import sys
sys.path[:0] = {[str(root), str(root / "tests"), str(root / "tests" / "evaluation")]}
from sample_results import sample_results
from utils.evaluation import figures, page
assert "matplotlib" not in sys.modules
figures.encoded(figures.over_epochs([sample_results(8)]))
figures.encoded_movie([sample_results(8)])
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True)
