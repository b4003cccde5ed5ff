"""Data of the figures agree with the results, also where they have gaps or are not finite."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.patches import StepPatch
from PIL import Image
from sample_results import sample_results

from utils.evaluation import figures
from utils.evaluation.loss_curves import loss_curves
from utils.evaluation.results import Results
from utils.evaluation.training_figures import ERROR, EXAMINED, STRUCTURE, choose_planes
from utils.lyman_alpha.results import FluxField

BOX, CELL = 16, 0.5


@pytest.fixture(scope="module")
def found() -> Results:
    """With this seed, some velocities have their largest magnitude above zero."""
    return sample_results(BOX, noise=0.06, cell=CELL, seed=1, flux=True)


def physical(values: np.ndarray) -> list[np.ndarray]:
    """The published transforms rho = exp(14 x), v = 900 x km/s, T = exp(8 (x + 1.5)) K; logarithms are decimal."""
    values = values.astype(np.float64)
    return [14 * values[0] / math.log(10), *(900 * values[1:4]), *(8 * (values[4:] + 1.5) / math.log(10))]


def shown(figure: Figure) -> list[np.ndarray]:
    """The data of all lines, steps, images and meshes."""
    data = []
    for axes in figure.axes:
        data += [line.get_ydata() for line in axes.lines]
        data += [patch.get_data().values for patch in axes.patches if isinstance(patch, StepPatch)]
        data += [artist.get_array() for artist in (*axes.images, *axes.collections) if artist.get_array() is not None]
    return [np.ma.filled(values, 0) for values in data]


def spectra(found: Results) -> list[np.ndarray]:
    curves = found.spectra.values()
    ratios = [curve.predicted / curve.target for curve in curves]
    return [*ratios, *(curve.cross / np.sqrt(curve.predicted * curve.target) for curve in curves)]


def distributions(found: Results) -> list[np.ndarray]:
    histograms = found.distributions.values()
    counts = [(counts, part.edges) for part in histograms for counts in (part.predicted, part.target)]
    return [values / BOX**3 / np.diff(edges) for values, edges in counts]


def phase_diagram(found: Results) -> list[np.ndarray]:
    counts = found.phase_diagram
    area = np.outer(np.diff(counts.temperature_edges), np.diff(counts.density_edges))
    return [values.T / BOX**3 / area for values in (counts.target, counts.predicted)]


def slices(found: Results) -> list[np.ndarray]:
    """With y to the right and z upwards."""
    given, target, predicted = (physical(found.slices[name]) for name in ("input", "target", "predicted"))
    residuals = [ours - theirs for ours, theirs in zip(predicted, target, strict=True)]
    return [plane.T for plane in (*given, *target, *predicted, *residuals)]


def flux(found: Results) -> list[np.ndarray]:
    fields, k = found.flux.fields.values(), found.flux.k
    powers = [k * field.power / math.pi for field in fields]
    return [*powers, *found.flux.ratios.values(), *(field.pdf for field in fields), *(f.sightline for f in fields)]


def flux_3d(found: Results) -> list[np.ndarray]:
    ratios, k = found.flux.p3d_ratios.values(), found.flux.p3d_k
    return [row[np.isfinite(modes)] for ratio in ratios for row, modes in zip(ratio, k, strict=True)]


EXPECTED = (slices, spectra, distributions, phase_diagram, flux, flux_3d)


@pytest.mark.parametrize("expected", EXPECTED)
def test_each_figure_shows_its_data(expected: Callable[[Results], list[np.ndarray]], found: Results) -> None:
    assert [function.__name__ for function in EXPECTED] == list(figures.PICTURES)
    drawn = shown(figures.PICTURES[expected.__name__](found))
    for values in expected(found):
        same = (other for other in drawn if np.shape(other) == values.shape)
        assert any(np.allclose(values, other, rtol=1e-6, atol=1e-9, equal_nan=True) for other in same)


def test_slices_of_one_channel_have_one_color_scale(found: Results) -> None:
    """Of residuals 99.5 % are within the scale."""
    grid = np.array(figures.slices(found).axes[:20]).reshape(5, 4)
    for channel, row, residual in zip(found.channels, grid, slices(found)[-5:], strict=True):
        images = [axes.images[0] for axes in row if axes.images]
        assert {image.origin for image in images} == {"lower"}
        assert len({image.get_clim() for image in images[:-1]}) == 1
        low, high = images[-1].get_clim()
        assert low == -high
        assert np.mean(np.abs(residual) <= high) == pytest.approx(0.995, abs=0.005)
        low, high = images[0].get_clim()
        assert (low == -high) == ("velocity" in channel.name)
    assert grid[4, 0].texts[0].get_text() == "not in the input"
    first, second = (axes.collections[0] for axes in figures.phase_diagram(found).axes[:2])
    assert first.get_clim() == second.get_clim()


def test_loss_curves_show_losses_and_metrics() -> None:
    records = [
        {"step": 0, "Loss/train": 2.0, "Loss/valid": 2.1, "Loss/valid/valid": 2.2},
        {"step": 5, "Step/loss": 1.5, "Step/learning rate": 0.1},
        {"step": 10, "Loss/train": 1.0, "Loss/valid": 1.1, "Accuracy/valid": 0.5, "Learning Rate": 0.1},
    ]
    figure = loss_curves(records, "cross_entropy", "demo/2ranks/00")
    assert figure.get_suptitle() == "demo/2ranks/00, epoch 1, step 10"
    assert figure.axes[2].get_ylim() == pytest.approx((0, 0.115)), "a constant rate must not be magnified"
    lines = {line.get_label(): list(line.get_ydata()) for axes in figure.axes[:2] for line in axes.lines}
    ends = {"validation": [2.1, 1.1], "validation, valid": [2.2], "accuracy": [0.5]}
    assert lines == {"training, per interval": [1.5], "training, per epoch": [2.0, 1.0], **ends}
    assert len(loss_curves(records[:1], "l1", "").axes) == 2, "without metrics"


def test_slices_show_the_planes_with_the_most_structure_and_the_largest_error() -> None:
    """Of the first crops only: the last one, which exceeds both, is not examined.

    The loader reuses its buffers; input and target were once those of a later crop than the prediction.
    """
    targets = torch.zeros(EXAMINED + 1, 5, 4, 4, 4)
    targets[3, 0, 1, 2, 2], targets[6, 0, 2, 1, 1], targets[6, 1, 3, 1, 1], targets[-1] = 5, 4, 9, 99
    targets[-1, 0, 0, 0, 0] = 1000

    inputs = torch.arange(EXAMINED + 1.0).view(-1, 1, 1, 1, 1).expand(-1, 1, 4, 4, 4)
    buffers = torch.empty(5, 1, 4, 4, 4), torch.empty(5, 5, 4, 4, 4)

    def predict(crop: torch.Tensor) -> torch.Tensor:
        return crop.repeat(1, 5, 1, 1, 1) * targets[int(crop.max()), :1]

    def epoch(number: int) -> Iterator[list[torch.Tensor]]:
        for batch in zip(inputs.split(5), targets.split(5), strict=True):
            yield [buffer[: len(part)].copy_(part) for buffer, part in zip(buffers, batch, strict=True)]

    step, loader = SimpleNamespace(predict=predict), SimpleNamespace(epoch=epoch)
    chosen = choose_planes(step, loader)
    structure, error = chosen[STRUCTURE].fields, chosen[ERROR].fields
    np.testing.assert_array_equal(structure["target"], targets[3, :, 1])
    np.testing.assert_array_equal(structure["predicted"][1], 3 * targets[3, 0, 1])
    assert (error["input"] == 6).all()
    np.testing.assert_array_equal(error["target"], targets[6, :, 2])
    targets[8, 2, 0] = math.nan
    assert (choose_planes(step, loader)[ERROR].fields["input"] == 8).all(), "not finite"


def test_every_figure_becomes_a_png_even_of_a_diverged_prediction(
    found: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "DOTS_PER_INCH", 50)
    measured, density = found.flux, found.spectra["density"]
    predicted = found.slices["predicted"] * np.nan
    predicted[0] = 1e4  # exp(140000) overflows
    nan = {key: value * np.nan for key, value in vars(measured.fields["FGPA"]).items()}
    diverged = replace(
        found,
        spectra={
            "constant": replace(density, predicted=0 * density.k, cross=0 * density.k),
            "density": replace(density, target=0 * density.k * np.nan),
        },
        flux=replace(measured, fields={**measured.fields, "prediction": FluxField(**nan)}),
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
    assert list(figures.draw_all(replace(found, flux=replace(measured, p3d_k=np.empty((4, 0)))))) == ["flux"]
    assert not figures.draw_all(replace(found, flux=None))


def test_channels_of_unknown_units_are_drawn_as_channel_values() -> None:
    unknown = sample_results(BOX, channels=(1, 2))
    drawn = figures.draw_all(unknown)
    assert list(drawn) == ["slices", "spectra", "distributions"]
    images = [axes.images[0].get_array() for axes in drawn["slices"].axes[:4]]
    np.testing.assert_allclose(images[0], unknown.slices["input"][0].T)
    np.testing.assert_allclose(images[2], unknown.slices["predicted"][0].T)
