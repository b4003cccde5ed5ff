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

WEIGHT = torch.ones(4, 4, 3, 3, 3)
WEIGHT_LAST = WEIGHT.contiguous(memory_format=torch.channels_last_3d)


def counted(action: Callable[[], object]) -> tuple[int, int]:
    """Bytes that an action reads and writes."""
    trace = Trace()
    with trace, trace.phase("forward"):
        action()
    rows = trace.operations.values()
    return sum(row.read for row in rows), sum(row.written for row in rows)


def test_the_bytes_of_a_step_are_those_stored_and_no_large_tensor_leaves_channels_last() -> None:
    """The full-size network at batch 64: the fastest step, and the cost of averaging the weights."""
    pytest.importorskip("triton")
    stored = json.loads((RESULTS / "cost.json").read_text())["sets"]
    for name in ("tail", "EMA"):
        found = count_step(load(name, {}))
        assert all(found.total(phase) for phase in PHASES)
        total = stored[name]["gigabytes"]["total"]
        assert found.total() / 1e9 == pytest.approx(total, rel=1e-3), "run python -m benchmarks.cost, and make docs"
        assert list(found.layouts) == []
    assert stored["tail"]["gigabytes"]["total"] < 11.7


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
        pytest.param(lambda x: F.conv3d(x, WEIGHT), 0, 0, id="convolutions are counted apart"),
        pytest.param(lambda x: F.conv3d(x, WEIGHT_LAST), 1, 1, id="one in channels-last order copies an operand"),
        pytest.param(lambda x: torch._foreach_add_([x, x + 1], 1), 3, 3, id="lists of tensors"),
    ],
)
def test_operands_and_results_count_once(action: Callable[..., object], read: float, written: float) -> None:
    x = torch.ones(2, 4, 8, 8, 8)
    assert counted(lambda: action(x)) == (read * x.nbytes, written * x.nbytes)


def test_a_large_tensor_in_another_order_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Channels-last may have a pitch or other axes."""
    x, trace = torch.empty(2, 4, 6, 6, 6), Trace()
    last = x.contiguous(memory_format=torch.channels_last_3d)
    assert all(map(is_channels_last, (last, last[:, :3, 1:-1, 1:-1, 1:-1], last.permute(0, 2, 3, 4, 1))))
    monkeypatch.setattr(cost, "LARGE", 1)
    with trace, trace.phase("backward"):
        last.relu()
        assert not trace.layouts
        x.relu()
    assert len(trace.layouts) == 1
