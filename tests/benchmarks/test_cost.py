"""Bytes outside the convolutions: the rules by which they are counted, and the limit for the fastest step."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from benchmarks import cost
from benchmarks.common import RESULTS
from benchmarks.cost import PHASES, Trace, count_step, is_channels_last, load
from networks.unet import SPACE_TO_DEPTH


@pytest.fixture(scope="module")
def fastest() -> Trace:
    """The full-size network at batch 64 with all options that make it fast."""
    pytest.importorskip("triton")
    return count_step(load("tail", {}))


def counted(action: Callable[[], object]) -> tuple[int, int]:
    """Bytes that an action reads and writes."""
    trace = Trace()
    with trace, trace.phase("forward"):
        action()
    rows = trace.operations.values()
    return sum(row.read for row in rows), sum(row.written for row in rows)


def test_a_step_moves_less_than_11_7_gigabytes(fastest: Trace) -> None:
    assert fastest.total() < 11.7e9, [row for row in fastest.operations.values() if row.read > 1e8]
    assert all(fastest.total(phase) for phase in PHASES)
    stored = json.loads((RESULTS / "cost.json").read_text())["sets"]["tail"]["gigabytes"]["total"]
    assert fastest.total() / 1e9 == pytest.approx(stored, rel=1e-3), "run python -m benchmarks.cost, and make docs"


def test_an_average_reads_the_weights_and_itself_and_writes_itself(fastest: Trace) -> None:
    (adam,) = (row for row in fastest.operations.values() if "adam" in row.name)
    # Adam reads weights, gradients and two moments, and writes all but the gradients. The average reads the weights.
    averaged = count_step(load("tail", {"ema_decay": 0.999}))
    assert averaged.total() - fastest.total() == pytest.approx((adam.read + adam.written) * 3 / 7, rel=1e-3)


def test_no_large_tensor_leaves_channels_last(fastest: Trace) -> None:
    """Also with the losses, inputs and layers of which the fastest step has others."""
    assert list(fastest.layouts) == []
    assert list(count_step(load("A", {"network.space_to_depth": list(SPACE_TO_DEPTH)})).layouts) == []


def test_the_table_of_kernels_names_their_parameters() -> None:
    """Those that they store; each kernel of the project is in it."""
    jit = pytest.importorskip("triton.runtime.jit")
    from networks import kernels

    found = {name: kernel for name, kernel in vars(kernels).items() if isinstance(kernel, jit.JITFunction)}
    assert found.keys() - {"tanh"} == cost.STORED.keys()
    for name, stored in cost.STORED.items():
        assert set(stored) <= set(found[name].arg_names)
        assert all(f"tl.load({argument}" not in found[name].src for argument in stored)


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
    monkeypatch.setattr(cost, "LARGE", 1)
    trace = Trace()
    x = torch.ones(2, 4, 6, 6, 6)
    with trace, trace.phase("backward"):
        x.contiguous(memory_format=torch.channels_last_3d).relu()
    assert len(trace.layouts) == 1
    assert "float32 [2, 4, 6, 6, 6]" in next(iter(trace.layouts))
