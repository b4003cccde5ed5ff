"""The bytes that the fastest steps move: limits, and the rules by which they are counted."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import step_trace
import torch
from step_trace import CPU, WRITTEN, Trace, batch_of, fake_gpu, is_channels_last, phases
from torch.nn import functional as F

from networks import strided
from utils import config as configs
from utils.distributed.launch import Launch
from utils.distributed.world import World
from utils.steps import build
from utils.steps.eager import EagerStep

REPOSITORY = Path(__file__).parents[2]
WEIGHT = torch.ones(4, 4, 3, 3, 3)
WEIGHT_LAST = WEIGHT.contiguous(memory_format=torch.channels_last_3d)


def bytes_by_phase(changes: Mapping[str, Any], name: str = "bs64_opt", trace: Trace | None = None) -> Counter[str]:
    """Of the second step of a config after changes: the first one also creates the optimizer's state."""
    keys = {"local_batch_size": 64, "device": "cpu", "fused_tail": True, **changes}
    config, trace = configs.load(str(REPOSITORY / "config/UNet.yaml"), name, keys).for_world(1), trace or Trace()
    with fake_gpu(trace):
        step = build.step(config, World(Launch("test"), CPU), build.network_with_loss(config), EagerStep)
        batch = batch_of(config)
        with trace:
            step(batch, 1e-4)
        with phases(trace):
            step(batch, 1e-4)
    assert list(trace.layouts) == []
    sums: Counter[str] = Counter()
    for (phase, _), size in [*trace.read.items(), *trace.written.items()]:
        sums[phase] += size
    return sums


@pytest.mark.parametrize(("own_kernels", "most"), [(False, 12.3e9), (True, 16.1e9)], ids=["cuDNN", "own convolutions"])
def test_a_step_moves_few_bytes_and_no_large_tensor_leaves_channels_last(
    own_kernels: bool, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The full-size network at batch 64; convolutions count if they are own. Averaging the weights adds 1.4 GB."""
    pytest.importorskip("triton")
    if own_kernels:
        monkeypatch.setattr(strided, "unavailable", lambda device: "")
    usual, averaged = bytes_by_phase({}), bytes_by_phase({"ema_decay": 0.999})
    assert usual.keys() == {"forward", "backward", "optimizer"}
    assert usual.total() < most
    assert averaged.total() - usual.total() == pytest.approx(1.404e9, rel=1e-3)


class Products(Trace):
    """Counts the operations of matrix products, too, by the precision of their factors."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[torch.dtype] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._phase == "optimizer" and func.overloadpacket in (torch.ops.aten.bmm, torch.ops.aten.baddbmm_):
            first, second = [x for x in args if isinstance(x, torch.Tensor)][-2:]
            self.operations[first.dtype] += 2 * first.numel() * second.shape[-1]
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.fixture
def tf32() -> Iterator[None]:
    matmul = torch.backends.cuda.matmul
    before, matmul.allow_tf32 = matmul.allow_tf32, True
    yield
    matmul.allow_tf32 = before


@pytest.mark.usefixtures("tf32")
def test_soap_moves_few_bytes() -> None:
    """At full size, with the average of the weights. docs/optimizers.md quotes both; copies took 4 GB more."""
    trace = Products()
    assert bytes_by_phase({}, "bs64_fast", trace)["optimizer"] == pytest.approx(9.78e9, rel=0.01)
    assert trace.operations[torch.float32] == pytest.approx(0.084e12, rel=0.01)
    assert trace.operations[torch.bfloat16] == pytest.approx(0.023e12, rel=0.01)


def counted(action: Callable[[Trace], object]) -> tuple[int, int]:
    """Bytes that an action reads and writes."""
    trace = Trace()
    with trace, trace.phase("forward"):
        action(trace)
    return trace.read.total(), trace.written.total()


@pytest.mark.parametrize(
    ("action", "read", "written"),
    [
        pytest.param(lambda x: x.transpose(0, 1).reshape(4, 2, -1)[1:], 0, 0, id="views cost nothing"),
        pytest.param(lambda x: x[:1].expand_as(x).clone(), 0.5, 1, id="a broadcast operand counts its storage"),
        pytest.param(lambda x: x * x, 1, 1, id="an operand that is given twice counts once"),
        pytest.param(lambda x: x.add_(1), 1, 1, id="an operation in place reads and writes"),
        pytest.param(lambda x: x.zero_(), 0, 1, id="a fill only writes"),
        pytest.param(lambda x: x.to(torch.bfloat16), 1, 0.5, id="a cast"),
        pytest.param(lambda x: F.conv3d(x, WEIGHT), 0, 0, id="convolutions do not count"),
        pytest.param(lambda x: F.conv3d(x, WEIGHT_LAST), 1, 1, id="one in channels-last order copies an operand"),
        pytest.param(lambda x: torch._foreach_add_([x, x + 1], 1), 3, 3, id="lists of tensors"),
    ],
)
def test_operands_and_results_count_once(action: Callable[..., object], read: float, written: float) -> None:
    x = torch.ones(2, 4, 8, 8, 8)
    assert counted(lambda trace: action(x)) == (read * x.nbytes, written * x.nbytes)


def kernel(name: str) -> Any:
    """A stand-in with the arguments of `scatter`."""
    return SimpleNamespace(fn=SimpleNamespace(__name__=name), arg_names=["s", "w", "out", "bias", "skip", "slope"])


def test_a_kernel_counts_its_tensors_and_an_unknown_one_is_refused() -> None:
    """Descriptors of one tensor count all its memory once. A skip that is the result is not read."""
    s, w, out = torch.empty(8, 64), torch.empty(4), torch.empty(2)
    views = [SimpleNamespace(base=s.view(-1)[start : start + 1]) for start in (0, 16)]
    launch = (*views, out, w, out, 0.5)
    assert counted(lambda trace: trace.launch(kernel("scatter"), *launch, D=4)) == (s.nbytes + w.nbytes, out.nbytes)
    with pytest.raises(LookupError, match="kernel other is unknown; add"):
        Trace().launch(kernel("other"), *launch)


def test_all_kernels_and_the_arguments_that_they_write_are_known() -> None:
    """They do not read these, and pass some on to other functions."""
    pytest.importorskip("triton.runtime.jit")
    from networks import block_kernels, kernels, strided_kernels

    sources = [path.read_text() for path in (REPOSITORY / "networks").glob("*.py")]
    launched = {name for source in sources for name in re.findall(r"kernels\(\)\.(\w+),", source)}
    assert launched == WRITTEN.keys()
    defined = {**vars(kernels), **vars(strided_kernels), **vars(block_kernels)}
    for name, written in WRITTEN.items():
        assert set(written) <= set(defined[name].arg_names)
        assert not re.search(rf"tl.load\(({'|'.join(written)})\b|\b({'|'.join(written)})\.load\(", defined[name].src)


def test_a_large_tensor_in_another_order_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Channels-last may have a pitch."""
    x, trace = torch.empty(2, 4, 6, 6, 6), Trace()
    last = x.contiguous(memory_format=torch.channels_last_3d)
    assert is_channels_last(last)
    assert is_channels_last(last[:, :3, 1:-1, 1:-1, 1:-1])
    monkeypatch.setattr(step_trace, "LARGE", 1)
    with trace, trace.phase("backward"):
        last.relu()
        assert not trace.layouts
        x.relu()
    assert len(trace.layouts) == 1
