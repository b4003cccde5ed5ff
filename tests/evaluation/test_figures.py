"""Data of the figures agree with the results, also where they have gaps or are not finite."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
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
    return sample_results(BOX, noise=0.06, cell=CELL, seed=1, flux=True)


def panels_of_slices(results: Results) -> np.ndarray:
    """The panels [input, target, prediction, residual] of each channel."""
    rows = len(results.channels)
    return np.array(figures.slices(results).axes[: 4 * rows]).reshape(rows, 4).T


def pixels(axes: Any) -> np.ndarray:
    return axes.images[0].get_array()


def limits(axes: Any) -> tuple[float, float]:
    return axes.images[0].get_clim()


def physical(values: np.ndarray) -> list[np.ndarray]:
    """The published transforms rho = exp(14 x), v = 900 x km/s, T = exp(8 (x + 1.5)) K; logarithms are decimal."""
    values = values.astype(np.float64)
    return [14 * values[0] / math.log(10), *(900 * values[1:4]), 8 * (values[4] + 1.5) / math.log(10)]


def test_spectra_show_ratio_and_correlation(found: Results) -> None:
    near, whole, below = figures.spectra(found).axes
    assert near.get_ylim() == (0.5, 1.5), "one field's excess must not hide the others"
    ratios, correlations = near.lines[1:], [line for line in below.lines if len(line.get_xdata()) > 2]
    for spectrum, *lines in zip(found.spectra.values(), ratios, whole.lines[1:], correlations, strict=True):
        expected = spectrum.predicted / spectrum.target
        expected = expected, expected, spectrum.cross / np.sqrt(spectrum.predicted * spectrum.target)
        for line, values in zip(lines, expected, strict=True):
            np.testing.assert_allclose(line.get_xdata(), spectrum.k)
            np.testing.assert_allclose(line.get_ydata(), values)


def test_distributions_are_normalized_and_exclude_empty_ends(found: Results) -> None:
    figure = figures.distributions(found)
    for axes, (name, distribution) in zip(figure.axes, found.distributions.items(), strict=True):
        assert axes.get_title() == name
        filled, _, line = axes.patches
        volume = BOX**3 * np.diff(distribution.edges)
        np.testing.assert_allclose(filled.get_data().values, distribution.target / volume)
        np.testing.assert_allclose(line.get_data().values, distribution.predicted / volume)
        np.testing.assert_allclose(line.get_data().edges, distribution.edges)
    distribution = found.distributions["gas density"]
    predicted, target = np.zeros((2, len(distribution.target)))
    target[5], predicted[9] = 10, 1
    few = replace(found, distributions={"only": replace(distribution, predicted=predicted, target=target)})
    (axes,) = figures.distributions(few).axes
    assert axes.get_xlim() == pytest.approx((distribution.edges[5], distribution.edges[10]))


def test_both_phase_diagrams_have_one_color_scale(found: Results) -> None:
    target, prediction = (axes.collections[0] for axes in figures.phase_diagram(found).axes[:2])
    counts = found.phase_diagram
    area = np.outer(np.diff(counts.temperature_edges), np.diff(counts.density_edges))
    for mesh, values in ((target, counts.target), (prediction, counts.predicted)):
        np.testing.assert_allclose(mesh.get_array().filled(0), values.T / BOX**3 / area)
        np.testing.assert_allclose(mesh.get_coordinates()[0, :, 0], counts.density_edges)
    assert target.get_clim() == prediction.get_clim()


def test_slices_show_physical_values_and_residuals(found: Results) -> None:
    """With y to the right and z upwards."""
    grid = panels_of_slices(found)
    inputs, target, predicted = (found.slices[name] for name in ("input", "target", "predicted"))
    given = physical(np.concatenate([inputs, inputs[:1]]))[:4]
    for channel, (truth, prediction) in enumerate(zip(physical(target), physical(predicted), strict=True)):
        shown = [*given[channel : channel + 1], truth, prediction, prediction - truth]
        panels = grid[-len(shown) :, channel]
        for axes, plane in zip(panels, shown, strict=True):
            np.testing.assert_allclose(pixels(axes), plane.T, atol=1e-9)
            assert (axes.images[0].origin, axes.images[0].get_extent()) == ("lower", [0, BOX * CELL] * 2)
        assert len({limits(axes) for axes in panels[:-1]}) == 1
        low, high = limits(panels[-1])
        assert low == -high
        assert np.mean(np.abs(prediction - truth) <= high) == pytest.approx(0.995, abs=0.005)
        low, high = limits(panels[0])
        if "velocity" in found.channels[channel].name:
            assert low == -high == -np.abs(truth).max()
        else:
            assert (low, high) == pytest.approx((truth.min(), truth.max()))
    assert grid[0, 4].texts[0].get_text() == "not in the input"


def test_flux_shows_power_ratio_distribution_and_a_sight_line(found: Results) -> None:
    flux = found.flux
    power, pdf, ratio, line = figures.flux(found).axes
    for number, (name, field) in enumerate(flux.fields.items()):
        np.testing.assert_allclose(power.lines[number].get_ydata(), flux.k * field.power / math.pi)
        np.testing.assert_allclose(pdf.patches[number].get_data().values, field.pdf)
        np.testing.assert_allclose(line.lines[number].get_ydata(), field.sightline)
        if name != "target":
            np.testing.assert_allclose(ratio.lines[number - 1].get_ydata(), flux.ratios[name])
    by_direction = figures.flux_3d(found).axes
    assert [axes.get_title() for axes in by_direction] == ["prediction", "FGPA"]
    for axes, ratio in zip(by_direction, flux.p3d_ratios.values(), strict=True):
        for line, k, values in zip(axes.lines[1:], flux.p3d_k, ratio, strict=True):
            np.testing.assert_array_equal(line.get_xdata(), k[np.isfinite(k)])
            np.testing.assert_array_equal(line.get_ydata(), values[np.isfinite(k)])


def test_channels_of_unknown_units_are_drawn_as_channel_values() -> None:
    unknown = sample_results(BOX, channels=(1, 2))
    grid = panels_of_slices(unknown)
    np.testing.assert_allclose(pixels(grid[0, 0]), unknown.slices["input"][0].T)
    np.testing.assert_allclose(pixels(grid[2, 1]), unknown.slices["predicted"][1].T)
    assert grid[0, 1].texts[0].get_text() == "not in the input"
    assert grid[3, 1].get_xlabel() == "y (cells)"


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
    assert [(line.get_label(), *line.get_ydata()) for line in metrics.lines] == [("accuracy", 0.5)]
    assert len(loss_curves(records[:1], "l1", "").axes) == 2, "without metrics"


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


def test_every_figure_becomes_a_png_even_of_a_diverged_prediction(
    found: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "DOTS_PER_INCH", 50)
    flux, density = found.flux, found.spectra["density"]
    predicted = found.slices["predicted"] * np.nan
    predicted[0] = 1e4  # exp(140000) overflows
    nan = replace(
        flux.fields["prediction"], **{key: value * np.nan for key, value in vars(flux.fields["FGPA"]).items()}
    )
    diverged = replace(
        found,
        spectra={
            "constant": replace(density, predicted=0 * density.k, cross=0 * density.k),
            "density": replace(density, target=0 * density.k * np.nan),
        },
        flux=replace(flux, fields={**flux.fields, "prediction": nan}),
        slices={**found.slices, "predicted": predicted},
    )
    checkpoint = "/logs/demo/2ranks/00/checkpoints/step_00000800/weights.pt"
    for results, metadata, title in (
        (found, {"run": "/logs/demo/2ranks/00", "epoch": 4, "step": 800}, "demo/2ranks/00, epoch 4, step 800"),
        (diverged, {"checkpoint": checkpoint, "step": 800}, "demo/2ranks/00, step 800"),
    ):
        drawn = figures.draw_all(replace(results, metadata=metadata))
        assert list(drawn) == list(figures.PICTURES)
        for name, figure in drawn.items():
            assert figure.get_suptitle() == title
            picture = Image.open(io.BytesIO(figures.encode_png(figure)))
            assert len(np.unique(np.asarray(picture.convert("L")))) > 10, f"{name} is empty"
    monkeypatch.setattr(figures, "PICTURES", {"flux": figures.flux, "flux_3d": figures.flux_3d})
    assert list(figures.draw_all(replace(found, flux=replace(flux, p3d_k=np.empty((4, 0)))))) == ["flux"]
    assert not figures.draw_all(replace(found, flux=None))
