"""Bytes outside the convolutions: the rules by which they are counted, and the limit for the fastest step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from benchmarks import traffic, traffic_trace
from benchmarks.rungs import GPU_RUNGS
from benchmarks.traffic import Measured, count_step, load, measure
from benchmarks.traffic_trace import PHASES, Addresses, Trace, is_channels_last
from networks.unet import SPACE_TO_DEPTH


@pytest.fixture(scope="module")
def fastest() -> Measured:
    """The full-size network at batch 64 with all options that make it fast."""
    pytest.importorskip("triton")
    return measure({"local_batch_size": 64})


def counted(action: Callable[[], object]) -> tuple[int, int]:
    """Bytes that an action reads and writes."""
    trace = Trace()
    with trace, trace.phase("forward"):
        action()
    rows = trace.count.operations.values()
    return sum(row.read for row in rows), sum(row.written for row in rows)


def test_a_step_moves_less_than_11_7_gigabytes(fastest: Measured) -> None:
    assert fastest.count.total() < 11.7e9, traffic.markdown(fastest)
    assert all(fastest.count.total(phase) for phase in PHASES)
    assert fastest.count.total() / 1e9 == pytest.approx(GPU_RUNGS["tail"].gigabytes, abs=0.01)


def test_an_average_reads_the_weights_and_itself_and_writes_itself(fastest: Measured) -> None:
    (adam,) = (row for row in fastest.count.operations.values() if "adam" in row.name)
    # Adam reads weights, gradients and two moments, and writes all but the gradients. The average reads the weights.
    assert fastest.average == pytest.approx(adam.bytes * 3 / 7, rel=1e-3)


def test_no_large_tensor_leaves_channels_last(fastest: Measured) -> None:
    """Also with the losses, inputs and layers of which the fastest step has others."""
    every = {"fused_tail": False, "network.space_to_depth": list(SPACE_TO_DEPTH)}
    assert list(fastest.count.layouts) == []
    assert list(count_step(load({"local_batch_size": 64, **every})).layouts) == []


def test_a_kernel_s_source_shows_what_it_reads_and_writes() -> None:
    pytest.importorskip("triton")
    from networks import kernels

    found = Addresses(kernels.activation_backward)
    read, written = {"first", "second", "y"}, {"x_gradient", "partial"}
    assert read <= found.loaded - found.stored
    assert written <= found.stored - found.loaded


@pytest.mark.parametrize(
    ("action", "read", "written"),
    [
        pytest.param(lambda x: x.transpose(0, 1).reshape(4, 2, -1)[1:], 0, 0, id="views cost nothing"),
        pytest.param(lambda x: x[:1].expand_as(x).clone(), 0.5, 1, id="a broadcast operand counts its storage"),
        pytest.param(lambda x: x * x, 1, 1, id="an operand that is given twice counts once"),
        pytest.param(lambda x: x.add_(1), 1, 1, id="an operation in place reads and writes"),
        pytest.param(lambda x: x.zero_(), 0, 1, id="a fill only writes"),
        pytest.param(lambda x: F.pad(x, (4, 4)), 1, 3, id="padding fills the result before it copies"),
        pytest.param(lambda x: x.to(torch.bfloat16), 1, 0.5, id="a cast"),
        pytest.param(lambda x: torch._foreach_add_([x, x + 1], 1), 3, 3, id="lists of tensors"),
    ],
)
def test_operands_and_results_count_once(action: Callable[..., object], read: float, written: float) -> None:
    x = torch.ones(2, 4, 8, 8, 8)
    assert counted(lambda: action(x)) == (read * x.nbytes, written * x.nbytes)


def test_a_convolution_counts_only_the_copy_that_it_needs() -> None:
    """One in channels-last order copies an operand that is not; its own operands and results are counted apart."""
    x, weight = torch.ones(2, 4, 8, 8, 8), torch.ones(4, 4, 3, 3, 3)
    last = weight.contiguous(memory_format=torch.channels_last_3d)
    assert counted(lambda: F.conv3d(x, weight)) == (0, 0)
    assert counted(lambda: F.conv3d(x, last)) == (x.nbytes, x.nbytes)


def test_channels_last_may_have_a_pitch_or_other_axes() -> None:
    x = torch.empty(2, 4, 6, 6, 6)
    last = x.contiguous(memory_format=torch.channels_last_3d)
    assert not is_channels_last(x)
    assert not is_channels_last(x.permute(0, 2, 3, 4, 1))
    assert all(is_channels_last(each) for each in (last, last[:, :3, 1:-1, 1:-1, 1:-1], last.permute(0, 2, 3, 4, 1)))


def test_a_large_tensor_in_another_order_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic_trace, "LARGE", 1)
    trace = Trace()
    x = torch.ones(2, 4, 6, 6, 6)
    with trace, trace.phase("backward"):
        x.contiguous(memory_format=torch.channels_last_3d).relu()
    assert len(trace.count.layouts) == 1
    assert "float32 [2, 4, 6, 6, 6]" in next(iter(trace.count.layouts))
