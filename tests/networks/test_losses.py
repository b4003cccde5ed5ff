"""Losses and metrics compared with values calculated by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from networks import METRICS, build_loss, build_metrics
from networks.losses import SPECTRUM_WEIGHT


def fields(*channels: float) -> torch.Tensor:
    """[1, C, 1, 1, 2]: each channel's value, twice."""
    return torch.tensor(channels).view(1, -1, 1, 1, 1).expand(1, len(channels), 1, 1, 2)


OUTPUTS, TARGETS = fields(0.1, 0.2, -0.3), fields(0.0, 0.4, 0.3)  # channels differ by 0.1, 0.2 and 0.6
DENSITY = 0.5 * (math.exp(1.4) - 1.0)


# The loss of each channel, by hand. Huber's is quadratic up to 0.1 and linear beyond.
CELLWISE = {"l1": (0.1, 0.2, 0.6), "mse": (0.01, 0.04, 0.36), "huber": (0.005, 0.015, 0.055)}


@pytest.mark.parametrize("name", CELLWISE)
@pytest.mark.parametrize(
    ("options", "weights", "density"),
    [
        ({}, (1, 1, 1), 0),
        ({"lambda_rho": 0.5}, (1, 1, 1), DENSITY),
        ({"weights": [2.0, 1.0, 3.0]}, (1, 0.5, 1.5), 0),
        ({"weights": [2.0, 1.0, 3.0], "lambda_rho": 0.5}, (1, 0.5, 1.5), DENSITY),
        ({"weights": [0.3, 0.3, 0.3]}, (1, 1, 1), 0),
    ],
    ids=str,
)
def test_losses_of_fields_with_density_term_and_channel_weights(
    name: str, options: dict[str, Any], weights: tuple[float, ...], density: float
) -> None:
    """The density term uses channel 0 only, without the logarithm; weights are normalized to mean 1."""
    loss = build_loss(name, **options)
    expected = sum(weight * cell for weight, cell in zip(weights, CELLWISE[name], strict=True)) / 3 + density
    assert float(loss(OUTPUTS, TARGETS)) == pytest.approx(expected, rel=1e-6)
    assert not list(loss.state_dict()), "checkpoints would contain it"
    assert torch.equal(build_loss(name, fused=True, **options)(OUTPUTS, TARGETS), loss(OUTPUTS, TARGETS))


def test_channel_weights_apply_to_gradients_and_in_training_mode_only() -> None:
    loss, plain = build_loss("l1", weights=[2.0, 1.0, 3.0]), build_loss("l1")
    outputs = OUTPUTS.clone().requires_grad_()
    loss(outputs, TARGETS).backward()
    assert outputs.grad is not None
    # Each channel has two cells.
    assert outputs.grad[0, :, 0, 0, 0].tolist() == pytest.approx([2 / 6 / 2, -1 / 6 / 2, -3 / 6 / 2])
    assert torch.equal(loss.eval()(OUTPUTS, TARGETS), plain(OUTPUTS, TARGETS))
    assert not torch.equal(loss.train()(OUTPUTS, TARGETS), plain(OUTPUTS, TARGETS))


def test_the_spectral_term_compares_amplitudes_regardless_of_phase_in_training_mode_only() -> None:
    """All modes of a single cell of 1 have the amplitude 1 / √cells."""
    targets = torch.zeros(2, 3, 4, 6, 8)
    targets[:, :, 1, 2, 3] = 1.0
    loss, plain = build_loss("spectral_l1"), build_loss("l1")
    shifted, cells = targets.roll((1, 2, 3), dims=(2, 3, 4)), 4 * 6 * 8
    assert float(loss(shifted, targets)) == pytest.approx(2 / cells, rel=1e-5)
    scaled, term = 1.5 * targets, SPECTRUM_WEIGHT * 0.5 / math.sqrt(cells)
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            result = loss(scaled.bfloat16(), targets)
        assert result.dtype == torch.float32
        assert float(result) == pytest.approx(0.5 / cells + term, rel=1e-5)
    assert torch.equal(loss.eval()(scaled, targets), plain(scaled, targets))
    for value in (0.0, 1.0):  # amplitudes of 0, and without a difference
        outputs = (value * targets).requires_grad_()
        loss.train()(outputs, targets).backward()
        assert outputs.grad is not None
        assert outputs.grad.isfinite().all()


@pytest.mark.parametrize(("name", "expected"), [("l1", 1e-3), ("mse", 1e-6), ("huber", 5e-7)])
def test_half_precision_outputs_are_compared_in_float32_and_double_precision_in_float64(
    name: str, expected: float
) -> None:
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = build_loss(name)(fields(1.0).bfloat16(), fields(0.999))
        assert loss.dtype == torch.float32
        assert float(loss) == pytest.approx(expected, rel=1e-3)
    assert build_loss(name)(fields(1.0).double(), fields(0.5).double()).dtype == torch.float64


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("l1", {"is_classification": True}, "loss l1 cannot be used with labeled samples; use cross_entropy"),
        ("cross_entropy", {"is_classification": True, "fused": True}, "has no .*fused_pointwise or .*; remove them"),
        ("cross_entropy", {}, "loss cross_entropy cannot be used with volumes; use l1 or mse or huber or spectral_l1"),
        ("hubert", {}, r"loss: unknown loss hubert; known: l1, mse, huber, spectral_l1; did you mean huber\?"),
    ],
)
def test_a_loss_refuses_samples_and_options_of_others(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_loss(name, **options)


# --- classes ---------------------------------------------------------------------------------------------------------

LOGITS = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 3.0], [1.0, 0.5, 0.0], [0.0, 0.0, 5.0]])
CLASSES = torch.tensor([0, 1, 0, 2])


def cross_entropy_by_hand(rows: list[list[float]], classes: list[int]) -> float:
    terms = [math.log(sum(map(math.exp, row))) - row[right] for row, right in zip(rows, classes, strict=True)]
    return sum(terms) / len(terms)


def test_cross_entropy_is_the_mean_over_the_batch_in_float32_even_for_half_precision_logits() -> None:
    cross_entropy = build_loss("cross_entropy", is_classification=True)
    loss = cross_entropy(LOGITS, CLASSES)
    assert loss.shape == ()
    assert float(loss) == pytest.approx(cross_entropy_by_hand(LOGITS.tolist(), CLASSES.tolist()), rel=1e-6)
    logits = torch.tensor([[9.0, 0.0], [8.0, -1.0]])
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = cross_entropy(logits.bfloat16(), torch.tensor([0, 0]))
        assert loss.dtype == torch.float32
        assert float(loss) == pytest.approx(cross_entropy_by_hand(logits.tolist(), [0, 0]), rel=1e-3)
    assert cross_entropy(logits.double(), torch.tensor([0, 0])).dtype == torch.float64


def test_accuracies_count_the_largest_logits() -> None:
    """Top-5 accuracy is 1 if there are at most five classes."""
    accuracy, top5 = METRICS["accuracy"], METRICS["top5_accuracy"]
    assert float(accuracy(LOGITS, CLASSES)) == 0.75
    logits = torch.arange(7.0).expand(7, 7)  # classes 2 … 6 are among the five largest
    assert float(top5(logits, torch.arange(7))) == pytest.approx(5 / 7)
    assert float(top5(-logits, torch.tensor([0, 4, 5, 6, 6, 6, 6]))) == pytest.approx(2 / 7)
    for classes in (3, 5):
        logits = torch.randn(8, classes, generator=torch.Generator().manual_seed(0))
        assert float(top5(logits, torch.arange(8) % classes)) == 1.0


def test_metrics_are_float32_scalars_in_the_given_order() -> None:
    assert build_metrics(["top5_accuracy", "accuracy"]) == [METRICS["top5_accuracy"], METRICS["accuracy"]]
    for metric in METRICS.values():
        for dtype in (torch.bfloat16, torch.float64):
            result = metric(LOGITS.to(dtype), CLASSES)
            assert (result.dtype, result.shape) == (torch.float32, ())
    with pytest.raises(ValueError, match="metrics: unknown metric recall; known: accuracy, top5_accuracy"):
        build_metrics(["accuracy", "recall"])
    with pytest.raises(ValueError, match="metrics accuracy cannot be used with volumes"):
        build_metrics(["accuracy"], is_classification=False)
