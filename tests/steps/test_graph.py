"""CUDA graph steps compute what eager steps compute, on a fake device and on a GPU; one error line without CUDA."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from devices import ON_GPU
from processes import run
from small_steps import LR, differing, make_step, refusing_to_wait, small_network, snapshot, weights, world_on
from torch import nn

from utils.config import Config
from utils.errors import LocalError, UserError, one_line_errors
from utils.optim import soap
from utils.optim.optimizers import OPTIMIZERS
from utils.steps import eager, graph
from utils.steps.eager import EagerStep
from utils.steps.graph import MAX_BUFFERS, WARMUP_STEPS, GraphStep

TOP = Path(__file__).parents[2]
STEPS = WARMUP_STEPS + 6

Slot = tuple[torch.Tensor, torch.Tensor]


def make(kind: type[EagerStep], optimizer: str | dict[str, Any] = "adam", device: str = "cuda", **options: Any) -> Any:
    return make_step(optimizer, kind=kind, world=world_on(device), **options)


def buffers(count: int, device: str = "cuda") -> list[Slot]:
    """The batch buffers that a loader reuses in turn."""
    return [
        (torch.empty(4, 4, 8, 8, 8, device=device), torch.empty(4, 5, 8, 8, 8, device=device)) for _ in range(count)
    ]


def curve(step: EagerStep, slots: list[Slot], steps: int = STEPS) -> torch.Tensor:
    """Losses and gradient norms, [steps, 2]. The learning rate and the batch change from step to step."""
    generator = torch.Generator().manual_seed(1)
    values = torch.zeros(steps, 2, device=slots[0][0].device)
    step.warm_up(*(part.fill_(0.5) for part in slots[0]))
    for number in range(steps):
        slot = slots[number % len(slots)]
        for part in slot:
            part.copy_(torch.rand(part.shape, generator=generator))
        # Rounded to float32, since the learning rate of a graph is a float32 tensor.
        lr = float(torch.tensor(LR * (1 - number / steps)))
        values[number, 0] = step(*slot, exact_lr(step, lr))
        values[number, 1] = step.gradient_norm
    return values.cpu()


def exact_lr(step: EagerStep, lr: float) -> float:
    """A tensor for torch's NAdam, which on a CPU rounds differently if its learning rate is one."""
    held: Any = torch.tensor(lr)
    return held if isinstance(step.optimizer, torch.optim.NAdam) and held.device == step._device else lr


def make_bad(slot: Slot) -> None:
    slot[1][1, 2, 3, 4, 5] = float("nan")


# --- no CUDA graphs --------------------------------------------------------------------------------------------------


def test_on_a_cpu_train_graph_exits_with_one_line_and_a_remedy(data_flags, tmp_path) -> None:
    result = run(["train_graph.py", "--config=test", *data_flags, f"--set=expdir={tmp_path / 'runs'}"], tmp_path)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert "the run's device is cpu" in result.stderr
    assert "use train.py" in result.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("ranks", "options", "backends", "words"),
    [
        (1, {}, "", None),
        (4, {}, "cpu:gloo,cuda:nccl", None),
        (4, {}, "gloo", "NCCL is needed"),
        (4, {"noddp": True}, "gloo", None),
        (1, {"gradient_compression": "bfloat16"}, "", None),
        (2, {"gradient_compression": "bfloat16"}, "cpu:gloo,cuda:nccl", "needs a Python hook.*compression=none"),
    ],
)
def test_exchanges_that_a_graph_cannot_hold_are_refused(monkeypatch, ranks, options, backends, words) -> None:
    monkeypatch.setattr(graph.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(graph.dist, "get_backend_config", lambda: backends)
    with pytest.raises(UserError, match=words) if words else contextlib.nullcontext():
        GraphStep.check(Config(**options), world_on("cuda", ranks))


# --- a fake device ----------------------------------------------------------------------------------------------------


class FakeGraph:
    """Recording leaves everything unchanged; a replay runs what was recorded."""

    now: FakeGraph | None = None  # the graph being recorded
    replaying = False

    def __init__(self) -> None:
        self.replays = 0

    @contextlib.contextmanager
    def recording(self, step: GraphStep) -> Iterator[None]:
        FakeGraph.now = self
        plain = step._train
        states = [value for parameter in step._parameters for value in step.optimizer.state[parameter].values()]
        written = [*weights(step).values(), *states]
        before = [value.clone() for value in written]

        def train(*batch: torch.Tensor) -> torch.Tensor:
            self.batch, self.loss = batch, plain(*batch)
            self.loss.zero_()
            return self.loss

        step._train = train  # type: ignore[method-assign]
        try:
            yield
        finally:
            del step._train
            FakeGraph.now = None
        self.norm, self.step = step.gradient_norm.zero_(), step
        with torch.no_grad():
            for value, old in zip(written, before, strict=True):
                value.copy_(old)

    def replay(self) -> None:
        self.replays += 1
        FakeGraph.replaying = True
        try:
            self.loss.copy_(EagerStep._train(self.step, *self.batch))
        finally:
            FakeGraph.replaying = False
        self.norm.copy_(self.step.gradient_norm)


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces CUDA streams and graphs by fakes on the CPU.

    Streams run everything at once; tests/data/loaders/test_prefetcher.py tests their order.
    """
    cuda, record = graph.torch.cuda, GraphStep._record
    recording: list[GraphStep] = []
    monkeypatch.setattr(
        GraphStep, "_record", lambda self, *arguments: recording.append(self) or record(self, *arguments)
    )
    monkeypatch.setattr(cuda, "graph", lambda graph, *arguments, **options: graph.recording(recording[-1]))
    monkeypatch.setattr(cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(cuda, "Stream", mock.MagicMock())
    monkeypatch.setattr(cuda, "current_stream", mock.MagicMock())
    monkeypatch.setattr(cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(soap, "is_recorded", lambda: FakeGraph.now is not None or FakeGraph.replaying)
    monkeypatch.setattr(GraphStep, "check", lambda *arguments: None)


# --- a fake device and a GPU ------------------------------------------------------------------------------------------


@pytest.fixture(params=["fake", pytest.param("cuda", marks=ON_GPU)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """On a GPU, sums are deterministic: Adam divides by gradients near zero, which magnifies rounding errors."""
    if request.param == "fake":
        request.getfixturevalue("fake_cuda")
        return "cpu"
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    return "cuda"


def pair(device: str, optimizer: str | dict[str, Any] = "adam", norm: str = "none", **options: Any) -> tuple[Any, Any]:
    """An eager step and a graph step with the same weights."""
    plain, recorded = (
        make(kind, optimizer, device, network=small_network(norm), **options) for kind in (EagerStep, GraphStep)
    )
    return plain, recorded


@pytest.mark.parametrize(
    ("optimizer", "count", "options"),
    [
        *((name, 3, {}) for name in OPTIMIZERS),
        ("sgd", MAX_BUFFERS + 5, {"accumulation_steps": 2, "clip_grad_norm": 0.1}),
        ("adam", 2, {"log_noise_scale": True, "accumulation_steps": 2}),
        ({"name": "soap", "precondition_frequency": 3}, 3, {}),
        ("lamb", 2, {"enable_amp": True}),
        ("adam", 2, {"enable_amp": True, "precision": "float16"}),
        *(("adam", 2, {"norm": norm}) for norm in ("batch", "sync_batch", "ghost(2)", "group")),
    ],
    ids=str,
)
def test_replayed_steps_equal_eager_steps(
    device: str, optimizer: str | dict[str, Any], count: int, options: dict[str, Any]
) -> None:
    """Same losses, norms and weights for any number of loader buffers, with a bounded number of graphs."""
    steps = WARMUP_STEPS + 2 * count + 1
    plain, recorded = pair(device, optimizer, **options)
    expected, got = (curve(step, buffers(count, device), steps) for step in (plain, recorded))
    assert got[-1, 0] < got[0, 0]
    if device == "cpu":
        assert torch.equal(got, expected)
        assert differing(snapshot(plain), snapshot(recorded)) == []
        assert sum(known.graph.replays for known in recorded._graphs.values()) == steps - WARMUP_STEPS
    else:
        half = "enable_amp" in options
        torch.testing.assert_close(got, expected, rtol=1e-2 if half else 1e-3, atol=1e-5)
        for name, value in weights(plain).items():
            torch.testing.assert_close(weights(recorded)[name], value, rtol=1e-2, atol=2e-2 if half else 1e-3)
    assert len(recorded._graphs) == (count if count <= MAX_BUFFERS else MAX_BUFFERS + 1)
    tracked = [value for name, value in weights(recorded).items() if name.endswith("num_batches_tracked")]
    assert bool(tracked) == (options.get("norm", "group") != "group")
    assert all(int(value) == steps for value in tracked)
    if "log_noise_scale" in options:
        assert float(plain.probe.square) > 0
        torch.testing.assert_close(plain.probe.square, recorded.probe.square)


@pytest.mark.parametrize("parts", [1, 2])
def test_conditions_in_new_memory_reach_each_replay(device: str, parts: int) -> None:
    """With one graph per batch buffer, also for a smaller batch; evaluation and prediction get them, too."""
    steps, slots = [], buffers(2, device)
    for kind in (EagerStep, GraphStep):
        torch.manual_seed(1)
        network: Any = small_network()
        network.condition_on([[0.0, 1.0]])
        steps.append(make(kind, "adam", device, network=network, accumulation_steps=parts))
    curves: list[list[float]] = [[], []]
    for number in range(WARMUP_STEPS + 8):
        generator = torch.Generator().manual_seed(number)
        inputs, targets = (part[: 2 if number == WARMUP_STEPS + 5 else 4] for part in slots[number % 2])
        conditions = torch.rand(len(inputs), 1, generator=generator).to(device)
        inputs.copy_(torch.rand(inputs.shape, generator=generator))
        targets.copy_(conditions.view(-1, 1, 1, 1, 1) * inputs[:, :1] - 0.5)
        for curve, step in zip(curves, steps, strict=True):
            curve.append(float(step(inputs, targets, float(torch.tensor(LR)), conditions)))
        conditions.fill_(torch.nan)  # the memory is reused
    evaluated = [step.evaluate(inputs, targets, torch.zeros_like(conditions)) for step in steps]
    predicted = [step.predict(inputs, torch.zeros_like(conditions)) for step in steps]
    assert curves[0][-1] < curves[0][0]
    if device == "cpu":
        assert curves[0] == curves[1]
        assert torch.equal(*evaluated)
        assert torch.equal(*predicted)
        assert differing(snapshot(steps[0]), snapshot(steps[1])) == []
    else:
        torch.testing.assert_close(curves[1], curves[0], rtol=1e-3, atol=1e-5)
    assert len(steps[1]._graphs) == 3
    film = {name: weight.cpu() for name, weight in weights(steps[1]).items()}
    assert film["film.layers.up2.weight"].abs().max() > 0
    initial: Any = small_network()
    torch.manual_seed(1)
    initial.condition_on([[0.0, 1.0]])
    assert not torch.equal(film["film.embedding.0.weight"], initial.film.embedding[0].weight), "gradients reach it"


@pytest.mark.parametrize("parts", [1, 2])
def test_no_python_hook_is_recorded_with_the_exchange(fake_cuda, monkeypatch, parts: int) -> None:
    """With micro-batches the noise scale needs no hook; without them, several ranks do not measure it."""
    monkeypatch.setattr(eager, "data_parallel", lambda module, config, world, probe: module)
    keys = {"log_noise_scale": True, "accumulation_steps": parts}
    step = make_step(kind=GraphStep, world=world_on("cpu", size=2), **keys)
    assert (step.probe is not None) == (parts > 1)


@pytest.mark.parametrize("when", [1, WARMUP_STEPS, WARMUP_STEPS + 4], ids=["first step", "first replay", "replay"])
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        *(({"name": name, "precondition_frequency": 4}, {}) for name in OPTIMIZERS),
        ("adam", {"ema_decay": 0.9}),
        ("sgd", {"enable_amp": True, "accumulation_steps": 2, "clip_grad_norm": 0.1}),
    ],
    ids=str,
)
def test_a_non_finite_replay_skips_its_update(
    device: str, optimizer: str | dict[str, Any], options: dict, when: int
) -> None:
    """Weights, average and step count are unchanged, and so are all later steps. The host does not wait."""
    undisturbed, step = pair(device, optimizer, **options)
    (slot,) = buffers(1, device)
    generator = torch.Generator().manual_seed(3)
    lr = float(torch.tensor(LR))
    for number in range(WARMUP_STEPS + 6):
        batch = [torch.rand(part.shape, generator=generator).to(device) for part in slot]
        for part, values in zip(slot, batch, strict=True):
            part.copy_(values)
        if number == when:
            before = snapshot(step)
            make_bad(slot)
            with refusing_to_wait(device if number > WARMUP_STEPS else "cpu"):
                loss = step(*slot, LR)
            assert not loss.isfinite()
            assert not step.gradient_norm.isfinite()
            assert differing(snapshot(step), before) == []
            slot[1].copy_(batch[1])
        losses = undisturbed(*batch, exact_lr(undisturbed, lr)), step(*slot, lr)
        assert torch.equal(*losses) if device == "cpu" else losses[1].isfinite()
        if number == when:
            changing = {name for name in before if not name.startswith("basis")}
            assert changing <= set(differing(snapshot(step), before)), "the graph that skips also updates"
    if device == "cpu":
        assert differing(snapshot(undisturbed), snapshot(step)) == []
    assert len(step._graphs) == 1
    if "ema_decay" in options:
        assert int(weights(step)["updates"]) == WARMUP_STEPS + 6


def test_a_closed_step_has_no_graphs(fake_cuda) -> None:
    """NCCL waits for their destruction, and a reference to the step may remain."""
    step = make(GraphStep, "sgd", "cpu")
    curve(step, buffers(2, "cpu"))
    graphs = [weakref.ref(known.graph) for known in step._graphs.values()]
    step.close()
    assert [graph() for graph in graphs] == [None, None]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("saved_after", [3, WARMUP_STEPS + 3])
def test_a_step_resumes_from_its_state_and_then_records(
    device: str, optimizer: str, saved_after: int, tmp_path
) -> None:
    """The learning rate stays the same tensor on the device, which graphs read."""
    first, second = (make(GraphStep, optimizer, device) for _ in range(2))
    (slot,) = buffers(1, device)
    curve(first, [slot], saved_after)
    torch.save(first.state(), tmp_path / "state.pt")
    second.load_state(torch.load(tmp_path / "state.pt", weights_only=True, map_location="cpu"))
    assert differing(snapshot(first), snapshot(second)) == []
    lr = second.optimizer.param_groups[0]["lr"]
    assert isinstance(lr, torch.Tensor)
    assert lr.device.type == device
    expected, got = (curve(step, [slot]) for step in (first, second))
    if device == "cpu":
        assert torch.equal(got, expected)
        assert differing(snapshot(first), snapshot(second)) == []
    else:
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert second.optimizer.param_groups[0]["lr"] is lr
    assert len(second._graphs) == 1


def test_no_sync_and_another_shape_have_their_own_graphs(device: str) -> None:
    """Evaluation sees the weights that replays have updated."""
    step = make(GraphStep, device=device)
    (slot,) = buffers(1, device)
    curve(step, [slot])
    before = float(step.evaluate(*slot)[0])
    step(*slot, LR)
    assert float(step.evaluate(*slot)[0]) < before
    with step.no_sync():
        step(*slot, LR)
    step(*slot, LR)
    smaller = slot[0][:3], slot[1][:3]
    expected = float(step._trained(*smaller))
    assert float(step(*smaller, LR)) == pytest.approx(expected, rel=1e-5)
    assert [(key[2][0], key[3]) for key in step._graphs] == [(4, True), (4, False), (3, True)]


@pytest.mark.parametrize("out_of_memory", [False, True])
def test_a_recording_that_fails_reports_the_first_reason(fake_cuda, monkeypatch, out_of_memory: bool) -> None:
    step, (slot,) = make(GraphStep, device="cpu"), buffers(1, "cpu")

    @contextlib.contextmanager
    def failing(*arguments: Any, **options: Any) -> Iterator[None]:
        try:
            yield
        finally:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture\nmore")

    def waiting(*arguments: Any) -> torch.Tensor:
        if out_of_memory:
            raise torch.OutOfMemoryError("CUDA out of memory")
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(graph.torch.cuda, "graph", failing)
    curve(step, [slot], WARMUP_STEPS)
    step._train = waiting
    message = r"^cannot record .* graph: CUDA error: operation not permitted .*capturing; use t"
    kind, text = (torch.OutOfMemoryError, "out of memory") if out_of_memory else (LocalError, message)
    with pytest.raises(kind, match=text):
        step(*slot, LR)


# --- on a GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_an_operation_that_waits_for_the_device_gives_one_error_line() -> None:
    """In a subprocess: a failed recording leaves PyTorch's allocator and generators in an invalid state."""
    command = [sys.executable, __file__, "record what waits"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TOP), str(TOP / "tests")])}
    result = subprocess.run(command, env=environment, cwd=TOP, capture_output=True, text=True)
    *_, line = result.stderr.splitlines()
    assert re.fullmatch(r"error: cannot record the step as a CUDA graph: .*; use train\.py, .* flags", line)
    assert result.returncode == 2


class Waiting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv3d(4, 5, 3, padding=1)

    def forward(self, fields: torch.Tensor) -> torch.Tensor:
        return self.layer(fields) * float(fields.mean())


if __name__ == "__main__" and sys.argv[1:] == ["record what waits"]:
    with one_line_errors():
        curve(make(GraphStep, network=Waiting()), buffers(1))
