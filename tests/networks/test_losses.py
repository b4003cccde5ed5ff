"""Losses and metrics compared with values calculated by hand."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from networks import LOSSES, METRICS, build_loss


def fields(*channels: float) -> Tensor:
    """[1, C, 1, 1, 2]: each channel's value, twice."""
    return torch.tensor(channels).view(1, -1, 1, 1, 1).expand(1, len(channels), 1, 1, 2)


OUTPUTS, TARGETS = fields(0.1, 0.2, -0.3), fields(0.0, 0.4, 0.3)  # channels differ by 0.1, 0.2 and 0.6
DENSITY = 0.5 * (math.exp(1.4) - 1.0)
SECOND_DENSITY = 0.5 * (math.exp(4.0 * 0.4) - math.exp(4.0 * 0.2))
# The loss of each channel, by hand. Huber's is quadratic up to 0.1 and linear beyond.
CELLWISE = {"l1": (0.1, 0.2, 0.6), "mse": (0.01, 0.04, 0.36), "huber": (0.005, 0.015, 0.055)}
OF_FIELDS = [name for name, kind in LOSSES.items() if kind.targets == "volumes"]


@pytest.mark.parametrize("name", CELLWISE)
@pytest.mark.parametrize(
    ("options", "weights", "density"),
    [
        ({}, (1, 1, 1), 0),
        ({"lambda_rho": 0.5, "density_log_scale": 14.0}, (1, 1, 1), DENSITY),
        ({"weights": [2.0, 1.0, 3.0], "lambda_rho": 0.5, "density_log_scale": 14.0}, (1, 0.5, 1.5), DENSITY),
        ({"weights": [0.3, 0.3, 0.3]}, (1, 1, 1), 0),
        ({"lambda_rho": 0.5, "density_log_scale": 4.0, "density_channel": 1}, (1, 1, 1), SECOND_DENSITY),
    ],
    ids=str,
)
def test_losses_of_fields_with_density_term_and_channel_weights(name, options, weights, density: float) -> None:
    """The density term uses one channel, without the logarithm; weights are normalized to mean 1."""
    loss = build_loss(name, **options)
    expected = sum(weight * cell for weight, cell in zip(weights, CELLWISE[name], strict=True)) / 3 + density
    assert float(loss(OUTPUTS, TARGETS)) == pytest.approx(expected, rel=1e-6)
    assert not list(loss.state_dict()), "checkpoints would contain it"
    # In evaluation mode there are no weights.
    assert float(loss.eval()(OUTPUTS, TARGETS)) == pytest.approx(sum(CELLWISE[name]) / 3 + density, rel=1e-6)


@pytest.mark.parametrize("name", ["l1", "mse"])
@pytest.mark.parametrize("form", [torch.channels_last_3d, torch.contiguous_format])
def test_the_gradient_has_the_memory_format_of_the_outputs(name: str, form: torch.memory_format) -> None:
    """Fixed: the gradient of a mean has no strides, so that of the outputs got another format, and layers copied it."""
    outputs, targets = (torch.randn(2, 3, 4, 4, 4).contiguous(memory_format=form) for _ in range(2))
    strides, result = list[tuple[int, ...]](), outputs.requires_grad_() * 1.0
    result.register_hook(lambda gradient: strides.append(gradient.stride()))
    build_loss(name)(result, targets).backward()
    assert strides == [result.stride()]


def test_every_loss_of_fields_is_compared_with_values_by_hand() -> None:
    assert set(CELLWISE) == set(OF_FIELDS)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("l1", {"samples": "classes"}, "loss l1 cannot be used with labeled samples; use cross_entropy"),
        ("cross_entropy", {"samples": "classes", "lambda_rho": 0.5}, "has no lambda_rho; remove lambda_rho, channel_"),
        ("cross_entropy", {}, f"loss cross_entropy cannot be used with volumes; use {' or '.join(OF_FIELDS)}$"),
        ("l1", {"lambda_rho": 0.5}, "^lambda_rho needs the logarithm of a gas density as a target; set lambda_rho"),
    ],
)
def test_a_loss_refuses_samples_and_options_of_others(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_loss(name, **options)


LOGITS = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 3.0], [1.0, 0.5, 0.0], [0.0, 0.0, 5.0]])
CLASSES = torch.tensor([0, 1, 0, 2])


def cross_entropy_by_hand(rows: list[list[float]], classes: list[int]) -> float:
    terms = [math.log(sum(map(math.exp, row))) - row[right] for row, right in zip(rows, classes, strict=True)]
    return sum(terms) / len(terms)


LARGE, FIRST = torch.tensor([[9.0, 0.0], [8.0, -1.0]]), torch.tensor([0, 0])


@pytest.mark.parametrize(
    ("name", "outputs", "targets", "expected"),
    [
        ("l1", fields(1.0), fields(0.999), 1e-3),
        ("mse", fields(1.0), fields(0.999), 1e-6),
        ("huber", fields(1.0), fields(0.999), 5e-7),
        ("cross_entropy", LARGE, FIRST, cross_entropy_by_hand(LARGE.tolist(), FIRST.tolist())),
    ],
)
def test_half_precision_is_compared_in_float32_and_double_in_float64(name, outputs, targets, expected: float) -> None:
    loss = build_loss(name, samples="classes" if name == "cross_entropy" else "volumes")
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            value = loss(outputs.bfloat16(), targets)
        assert (value.dtype, value.shape) == (torch.float32, ())
        assert float(value) == pytest.approx(expected, rel=1e-3)
    assert loss(outputs.double(), targets.double() if targets.is_floating_point() else targets).dtype == torch.float64


def test_accuracies_count_the_largest_logits() -> None:
    """Top-5 accuracy is 1 if there are at most five classes. Results are float32 scalars."""
    accuracy, top5 = METRICS["accuracy"], METRICS["top5_accuracy"]
    assert float(accuracy(LOGITS, CLASSES)) == 0.75
    logits = torch.arange(7.0).expand(7, 7)  # classes 2 … 6 are among the five largest
    assert float(top5(logits, torch.arange(7))) == pytest.approx(5 / 7)
    assert float(top5(-logits, torch.tensor([0, 4, 5, 6, 6, 6, 6]))) == pytest.approx(2 / 7)
    for dtype in (torch.bfloat16, torch.float64):
        assert all(metric(LOGITS.to(dtype), CLASSES).dtype == torch.float32 for metric in (accuracy, top5))
        assert float(top5(LOGITS.to(dtype), CLASSES)) == 1.0
