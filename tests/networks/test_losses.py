"""Losses and metrics against values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from networks import METRICS, build_loss, build_metrics


def fields(*channels: float) -> torch.Tensor:
    """[1, C, 1, 1, 2]: each channel's value, twice."""
    return torch.tensor(channels).view(1, -1, 1, 1, 1).expand(1, len(channels), 1, 1, 2)


def test_l1_is_the_mean_absolute_difference() -> None:
    loss = build_loss("l1")(fields(0.1, 0.2, -0.3), fields(0.0, 0.4, 0.3))
    assert float(loss) == pytest.approx((0.1 + 0.2 + 0.6) / 3)


def test_density_term_takes_channel_0_alone_and_undoes_the_logarithm() -> None:
    loss = build_loss("l1", lambda_rho=0.5)(fields(0.1, 0.2), fields(0.0, 0.2))
    assert float(loss) == pytest.approx(0.1 / 2 + 0.5 * (math.exp(1.4) - 1.0), rel=1e-6)


def test_weights_of_channels_count_as_if_their_mean_were_1() -> None:
    outputs, targets = fields(0.1, 0.2, -0.3), fields(0.0, 0.4, 0.3)
    expected = (2 * 0.1 + 1 * 0.2 + 3 * 0.6) / 6
    for weights in ([2.0, 1.0, 3.0], [20.0, 10.0, 30.0]):
        loss = build_loss("l1", weights=weights)
        assert float(loss(outputs, targets)) == pytest.approx(expected)
        assert not list(loss.state_dict()), "nothing that ranks would send each other"
    dense = build_loss("l1", weights=[2.0, 1.0, 3.0], lambda_rho=0.5)
    assert float(dense(outputs, targets)) == pytest.approx(expected + 0.5 * (math.exp(1.4) - 1.0), rel=1e-6)


def test_weights_of_channels_weigh_their_gradients() -> None:
    outputs = fields(0.1, 0.2, -0.3).clone().requires_grad_()
    build_loss("l1", weights=[2.0, 1.0, 3.0])(outputs, fields(0.0, 0.4, 0.3)).backward()
    assert outputs.grad is not None
    # Two cells share each channel's part.
    assert outputs.grad[0, :, 0, 0, 0].tolist() == pytest.approx([2 / 6 / 2, -1 / 6 / 2, -3 / 6 / 2])


def test_equal_weights_are_the_loss_without_them() -> None:
    generator = torch.Generator().manual_seed(0)
    outputs, targets = (torch.rand(2, 3, 4, 4, 4, generator=generator) for _ in range(2))
    assert torch.equal(build_loss("l1", weights=[0.3, 0.3, 0.3])(outputs, targets), build_loss("l1")(outputs, targets))


def test_in_evaluation_weights_of_channels_do_not_count() -> None:
    outputs, targets = fields(0.1, 0.2, -0.3), fields(0.0, 0.4, 0.3)
    loss = build_loss("l1", weights=[2.0, 1.0, 3.0])
    in_training = loss(outputs, targets)
    assert torch.equal(loss.eval()(outputs, targets), build_loss("l1")(outputs, targets))
    assert torch.equal(loss.train()(outputs, targets), in_training)
    assert not torch.equal(loss.eval()(outputs, targets), in_training)


def test_the_fused_loss_has_no_weights() -> None:
    with pytest.raises(ValueError, match=r"^fused_pointwise has no kernel for a loss with loss_weights; leave one of"):
        build_loss("l1", fused=True, weights=[2.0, 1.0])


def test_half_precision_outputs_are_compared_in_full_precision() -> None:
    loss = build_loss("l1")(fields(1.0).bfloat16(), fields(0.999))
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(0.001, rel=1e-3)


def test_a_fused_loss_is_the_same_with_and_without_the_density_term() -> None:
    outputs, targets = fields(0.1, 0.2, -0.3), fields(0.0, 0.4, 0.3)
    for options in ({}, {"lambda_rho": 0.5}):
        plain, fused = (build_loss("l1", fused=fused, **options) for fused in (False, True))
        assert torch.equal(fused(outputs, targets), plain(outputs, targets))


def test_double_precision_stays() -> None:
    assert build_loss("l1")(fields(1.0).double(), fields(0.5).double()).dtype == torch.float64


# --- classes ---------------------------------------------------------------------------------------------------------

LOGITS = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 3.0], [1.0, 0.5, 0.0], [0.0, 0.0, 5.0]])
CLASSES = torch.tensor([0, 1, 0, 2])


def cross_entropy_by_hand(rows: list[list[float]], classes: list[int]) -> float:
    terms = [math.log(sum(map(math.exp, row))) - row[right] for row, right in zip(rows, classes, strict=True)]
    return sum(terms) / len(terms)


def test_cross_entropy_is_the_mean_over_the_batch() -> None:
    loss = build_loss("cross_entropy", labelled=True, lambda_rho=0.0, fused=False)(LOGITS, CLASSES)
    assert loss.shape == ()
    assert float(loss) == pytest.approx(cross_entropy_by_hand(LOGITS.tolist(), CLASSES.tolist()), rel=1e-6)


def test_cross_entropy_of_half_precision_logits_is_float32_also_under_autocast() -> None:
    logits = torch.tensor([[9.0, 0.0], [8.0, -1.0]])
    expected = cross_entropy_by_hand(logits.tolist(), [0, 0])
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = build_loss("cross_entropy", labelled=True)(logits.bfloat16(), torch.tensor([0, 0]))
        assert loss.dtype == torch.float32
        assert float(loss) == pytest.approx(expected, rel=1e-3)
    assert build_loss("cross_entropy", labelled=True)(logits.double(), torch.tensor([0, 0])).dtype == torch.float64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lambda_rho": 0.1}, "lambda_rho 0.1 weighs a density"),
        ({"fused": True}, "leave fused_pointwise off"),
        ({"weights": [1.0, 2.0]}, "loss_weights are of fields' channels"),
    ],
)
def test_cross_entropy_refuses_what_belongs_to_other_losses(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_loss("cross_entropy", labelled=True, **options)


def test_cross_entropy_refuses_fields() -> None:
    """torch would take them for probabilities."""
    with pytest.raises(ValueError, match="choose loss l1 for volumes"):
        build_loss("cross_entropy", labelled=True)(fields(0.1, 0.2), fields(0.3, 0.4))


def test_accuracy_counts_the_largest_logit() -> None:
    assert float(METRICS["accuracy"](LOGITS, CLASSES)) == 0.75


def test_top5_accuracy_counts_the_five_largest() -> None:
    logits = torch.arange(7.0).expand(7, 7)  # classes 2 … 6 are among them
    assert float(METRICS["top5_accuracy"](logits, torch.arange(7))) == pytest.approx(5 / 7)
    assert float(METRICS["top5_accuracy"](-logits, torch.tensor([0, 4, 5, 6, 6, 6, 6]))) == pytest.approx(2 / 7)


@pytest.mark.parametrize("classes", [3, 5])
def test_of_five_classes_or_fewer_all_are_among_the_five_largest(classes: int) -> None:
    logits = torch.randn(8, classes, generator=torch.Generator().manual_seed(0))
    assert float(METRICS["top5_accuracy"](logits, torch.arange(8) % classes)) == 1.0


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_metrics_are_float32_scalars(name: str, dtype: torch.dtype) -> None:
    (metric,) = build_metrics([name])
    result = metric(LOGITS.to(dtype), CLASSES)
    assert (result.dtype, result.shape, result.device) == (torch.float32, (), LOGITS.device)


def test_metrics_come_in_the_order_asked_for_and_unknown_ones_are_named() -> None:
    assert build_metrics(["top5_accuracy", "accuracy"]) == [METRICS["top5_accuracy"], METRICS["accuracy"]]
    with pytest.raises(ValueError, match="unknown metric recall; known: accuracy, top5_accuracy"):
        build_metrics(["accuracy", "recall"])
