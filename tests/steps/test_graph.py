"""CUDA graph steps compute what eager steps compute, on a fake device and on a GPU; one error line without CUDA."""

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from devices import ON_GPU
from processes import run_ranks
from small_steps import (
    LR,
    ON_DEVICE,
    differing,
    make_step,
    refusing_to_wait,
    small_network,
    snapshot,
    weights,
    world_on,
)

from utils.config import Config
from utils.data.loaders import Batch
from utils.distributed.world import World
from utils.errors import LocalError, UserError
from utils.optim import soap
from utils.steps import eager, graph
from utils.steps.eager import EagerStep
from utils.steps.graph import MAX_BUFFERS, WARMUP_STEPS, GraphStep
from utils.training.integrity import measured

STEPS = WARMUP_STEPS + 6


def make(
    kind: type[EagerStep], optimizer: Any, device: str, norm: str = "none", conditioned: bool = False, **options: Any
) -> Any:
    network: Any = small_network(norm)
    if conditioned:
        torch.manual_seed(1)  # of the embedding
        network.condition_on([[0.0, 1.0]])
    return make_step(optimizer, kind=kind, world=world_on(device), network=network, **options)


def buffers(count: int, device: str) -> list[Batch]:
    """The batch buffers that a loader reuses in turn."""
    shapes = (4, 4, 8, 8, 8), (4, 5, 8, 8, 8)
    return [Batch(*(torch.empty(shape, device=device) for shape in shapes)) for _ in range(count)]


def curve(step: EagerStep, slots: list[Batch], steps: int = STEPS, before: Any = lambda number: None) -> torch.Tensor:
    """Losses and gradient norms, [steps, 2]. Rate and batch change in each step, before which `before` is called."""
    generator = torch.Generator().manual_seed(1)
    values = torch.zeros(steps, 2, device=slots[0].inputs.device)
    for number in range(steps):
        slot = slots[number % len(slots)]
        for part in slot:
            part.copy_(torch.rand(part.shape, generator=generator))
        conditions = torch.rand(len(slot.inputs), 1, generator=generator).to(values.device)
        slot = slot if getattr(step.network, "film", None) is None else replace(slot, conditions=conditions)
        if number == 0:
            step.warm_up(slot)
        before(number)
        # Rounded to float32, since the learning rate of a graph is a float32 tensor.
        values[number, 0] = step(slot, float(torch.tensor(LR * (1 - number / steps))))
        values[number, 1] = step.gradient_norm
        conditions.fill_(torch.nan)  # the memory is reused
    return values.cpu()


@pytest.mark.parametrize(
    ("noddp", "backends", "words"),
    [(False, "cpu:gloo,cuda:nccl", None), (False, "gloo", "NCCL is needed"), (True, "gloo", None)],
)
def test_exchanges_that_a_graph_cannot_hold_are_refused(monkeypatch, noddp, backends, words) -> None:
    monkeypatch.setattr(graph.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(graph.dist, "get_backend_config", lambda: backends)
    with pytest.raises(UserError, match=words) if words else contextlib.nullcontext():
        GraphStep.check(Config(noddp=noddp), world_on("cuda", 4))
    with pytest.raises(UserError, match=r"the run's device is cpu.*; use train\.py"):
        GraphStep.check(Config(), world_on("cpu"))


def test_an_optimizer_that_waits_for_the_device_is_refused(fake_cuda) -> None:
    with pytest.raises(UserError, match=r"NAdam cannot skip non-finite updates on the device; use train\.py"):
        make(GraphStep, "nadam", "cpu")


class FakeGraph:
    """Recording leaves everything unchanged; a replay runs what was recorded."""

    active = False  # while a graph is recorded or replayed

    def __init__(self) -> None:
        self.replays = 0

    @contextlib.contextmanager
    def recording(self, step: GraphStep) -> Iterator[None]:
        states = [value for parameter in step._parameters for value in step.optimizer.state[parameter].values()]
        written = [*weights(step).values(), *states]
        before = [value.clone() for value in written]

        def train(batch: Batch) -> torch.Tensor:
            self.batch, self.loss = batch, EagerStep._train(step, batch)
            return self.loss.zero_()

        with mock.patch.object(step, "_train", train), mock.patch.object(FakeGraph, "active", True):
            yield
        self.norm, self.step = step.gradient_norm.zero_(), step
        with torch.no_grad():
            for value, old in zip(written, before, strict=True):
                value.copy_(old)

    def replay(self) -> None:
        self.replays += 1
        with mock.patch.object(FakeGraph, "active", True):
            self.loss.copy_(EagerStep._train(self.step, self.batch))
        self.norm.copy_(self.step.gradient_norm)


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake streams and graphs on the CPU, without the order of streams, which test_prefetcher.py tests."""
    cuda, record = graph.torch.cuda, GraphStep._record
    recording: list[GraphStep] = []
    monkeypatch.setattr(GraphStep, "_record", lambda self, batch: recording.append(self) or record(self, batch))
    monkeypatch.setattr(cuda, "graph", lambda graph, *arguments, **options: graph.recording(recording[-1]))
    monkeypatch.setattr(cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(cuda, "Stream", mock.MagicMock())
    monkeypatch.setattr(cuda, "current_stream", mock.MagicMock())
    monkeypatch.setattr(cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(soap, "is_recorded", lambda: FakeGraph.active)
    monkeypatch.setattr(GraphStep, "check", lambda *arguments: None)


@pytest.fixture(params=["fake", pytest.param("cuda", marks=ON_GPU)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """On a GPU, sums are deterministic: Adam divides by gradients near zero, which magnifies rounding errors."""
    if request.param == "fake":
        request.getfixturevalue("fake_cuda")
        return "cpu"
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    return "cuda"


def assert_same(device: str, first: Any, second: Any, curves: list[torch.Tensor]) -> None:
    """Asserts that both steps have the same curves, on a fake device with the same bits at their ends."""
    if device == "cpu":
        assert torch.equal(*curves)
        assert differing(snapshot(first), snapshot(second)) == []
    else:
        torch.testing.assert_close(*curves, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("optimizer", "count", "options"),
    [
        *((name, 3, {}) for name in ON_DEVICE),
        ("sgd", MAX_BUFFERS + 5, {"accumulation_steps": 2, "clip_grad_norm": 0.1}),
        ("adam", 2, {"log_noise_scale": True, "accumulation_steps": 2}),
        ({"name": "soap", "precondition_frequency": 3}, 3, {}),
        ("lamb", 2, {"enable_amp": True}),
        ("adam", 2, {"enable_amp": True, "precision": "float16"}),
        *(("adam", 2, {"norm": norm}) for norm in ("batch", "sync_batch", "ghost(2)", "group")),
        *(("adam", 2, {"conditioned": True, "accumulation_steps": parts}) for parts in (1, 2)),
    ],
    ids=str,
)
def test_replayed_steps_equal_eager_steps(device: str, optimizer: Any, count: int, options: dict[str, Any]) -> None:
    steps = WARMUP_STEPS + 2 * count + 3
    plain, recorded = (make(kind, optimizer, device, **options) for kind in (EagerStep, GraphStep))
    start, slots = snapshot(recorded), buffers(count, device)
    if "conditioned" in options:
        slots.append(Batch(*(part[:2] for part in slots[0])))
    expected, got = (curve(step, slots, steps) for step in (plain, recorded))
    assert got[-1, 0] < got[0, 0]
    if device == "cpu":
        assert torch.equal(got, expected)
        assert differing(snapshot(plain), snapshot(recorded)) == []
        assert sum(graph.replays for graph, *_ in recorded._graphs.values()) == steps - WARMUP_STEPS
    else:
        half = "enable_amp" in options
        torch.testing.assert_close(got, expected, rtol=1e-2 if half else 1e-3, atol=1e-5)
        for name, value in weights(plain).items():
            torch.testing.assert_close(weights(recorded)[name], value, rtol=1e-2, atol=2e-2 if half else 1e-3)
    assert len(recorded._graphs) == (len(slots) if count <= MAX_BUFFERS else MAX_BUFFERS + 1)
    tracked = [value for name, value in weights(recorded).items() if name.endswith("num_batches_tracked")]
    assert bool(tracked) == (options.get("norm", "group") != "group")
    assert all(int(value) == steps for value in tracked)
    film = [name for name in start if name.startswith("film.")]
    assert bool(film) == ("conditioned" in options)
    assert all(not torch.equal(weights(recorded)[name], start[name]) for name in film), "gradients reach the film"
    if "log_noise_scale" in options:
        assert float(plain.probe.square) > 0
        torch.testing.assert_close(plain.probe.square, recorded.probe.square)


def test_no_python_hook_is_recorded_with_the_exchange(fake_cuda, monkeypatch) -> None:
    """With micro-batches the noise scale needs no hook; without them, several ranks do not measure it."""
    monkeypatch.setattr(eager, "data_parallel", lambda module, config, world, probe: module)
    for parts in (1, 2):
        step = make_step(kind=GraphStep, world=world_on("cpu", 2), log_noise_scale=True, accumulation_steps=parts)
        assert (step.probe is not None) == (parts > 1)


def test_a_step_whose_exchange_is_measured_runs_eagerly(device: str) -> None:
    """Among replays, with the same results: a graph does not call the hooks of parameters."""
    plain, recorded = make(EagerStep, "adam", device), make(GraphStep, "adam", device)
    (slot,) = buffers(1, device)
    sums = torch.zeros(len(recorded.trained), 4, dtype=torch.float64, device=device)

    def measure_once(number: int) -> None:
        is_measured = number == WARMUP_STEPS + 2
        recorded.exchange = measured(recorded._parameters, sums) if is_measured else contextlib.nullcontext()

    assert_same(device, plain, recorded, [curve(plain, [slot]), curve(recorded, [slot], before=measure_once)])
    assert (sums[:, 1] > 0).all()
    assert torch.equal(sums[:, :2], sums[:, 2:])


@pytest.mark.parametrize("when", [1, WARMUP_STEPS, WARMUP_STEPS + 4], ids=["first step", "first replay", "replay"])
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        *(({"name": name, "precondition_frequency": 1}, {}) for name in ON_DEVICE),
        ("adam", {"ema_decay": 0.9}),
        ("sgd", {"enable_amp": True, "accumulation_steps": 2, "clip_grad_norm": 0.1}),
    ],
    ids=str,
)
def test_a_non_finite_replay_skips_its_update(device: str, optimizer: Any, options: dict[str, Any], when: int) -> None:
    """Weights, average and step count are unchanged, and so are all later steps. The host does not wait."""
    undisturbed, step = (make(kind, optimizer, device, **options) for kind in (EagerStep, GraphStep))
    (slot,) = buffers(1, device)
    before: dict[str, torch.Tensor] = {}

    def disturb(number: int) -> None:
        if number != when:
            return
        before.update(snapshot(step))
        good = slot.targets.clone()
        slot.targets[1, 2, 3, 4, 5] = float("nan")
        with refusing_to_wait(device if number > WARMUP_STEPS else "cpu"):
            loss = step(slot, LR)
        assert not loss.isfinite()
        assert not step.gradient_norm.isfinite()
        assert differing(snapshot(step), before) == []
        slot.targets.copy_(good)

    expected, got = curve(undisturbed, [slot]), curve(step, [slot], before=disturb)
    assert got.isfinite().all()
    changing = {name for name in before if not name.startswith("basis")}
    assert changing <= set(differing(snapshot(step), before)), "the graph that skips also updates"
    if device == "cpu":
        assert torch.equal(got, expected)
        assert differing(snapshot(undisturbed), snapshot(step)) == []
    assert len(step._graphs) == 1
    assert int(weights(step).get("updates", STEPS)) == STEPS


@pytest.mark.parametrize("optimizer", ON_DEVICE)
@pytest.mark.parametrize("saved_after", [3, WARMUP_STEPS + 3])
def test_a_step_resumes_from_its_state_and_records(device: str, optimizer: str, saved_after: int, tmp_path) -> None:
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
    assert_same(device, first, second, [curve(step, [slot]) for step in (first, second)])
    assert second.optimizer.param_groups[0]["lr"] is lr
    assert len(second._graphs) == 1


def test_steps_without_exchange_and_another_shape_have_their_own_graphs_until_the_step_closes(device: str) -> None:
    """Evaluation sees the weights that replays have updated. NCCL waits for the destruction of the graphs."""
    step = make(GraphStep, "adam", device)
    (slot,) = buffers(1, device)
    curve(step, [slot])
    before = float(step.evaluate(slot)[0])
    step(slot, LR)
    assert float(step.evaluate(slot)[0]) < before
    for step.sync in (False, True):
        step(slot, LR)
    smaller = Batch(*(part[:3] for part in slot))
    expected = float(step._trained(*smaller).detach())
    assert float(step(smaller, LR)) == pytest.approx(expected, rel=1e-5)
    assert [(key[2][0], key[3]) for key in step._graphs] == [(4, True), (4, False), (3, True)]
    graphs = [weakref.ref(graph) for graph, *_ in step._graphs.values()]
    step.close()
    assert [graph() for graph in graphs] == [None] * 3


@pytest.mark.parametrize("out_of_memory", [False, True])
def test_a_recording_that_fails_reports_the_first_reason(fake_cuda, monkeypatch, out_of_memory: bool) -> None:
    step, (slot,) = make(GraphStep, "adam", "cpu"), buffers(1, "cpu")
    curve(step, [slot], WARMUP_STEPS)
    kind = torch.OutOfMemoryError if out_of_memory else RuntimeError
    monkeypatch.setattr(step, "_train", mock.Mock(side_effect=kind("CUDA error: the cause\nmore")))
    monkeypatch.setattr(graph.torch.cuda, "graph", mock.MagicMock())
    graph.torch.cuda.graph.return_value.__exit__.side_effect = RuntimeError("CUDA error: due to a previous error")
    line = r"^cannot record .* graph: CUDA error: the cause; use t"
    with pytest.raises(kind if out_of_memory else LocalError, match="the cause\nmore" if out_of_memory else line):
        step(slot, LR)


class Waiting(torch.nn.Conv3d):
    def forward(self, fields: torch.Tensor) -> torch.Tensor:
        return super().forward(fields) * float(fields.mean())


def record_a_wait(world: World) -> None:
    step = make_step(kind=GraphStep, world=world_on("cuda"), network=Waiting(4, 5, 3, padding=1))
    with pytest.raises(LocalError, match=r"^cannot record the step as a CUDA graph: "):
        curve(step, buffers(1, "cuda"))


@pytest.mark.gpu
def test_an_operation_that_waits_for_the_device_is_refused() -> None:
    """In another process: a failed recording leaves PyTorch's allocator and generators in an invalid state."""
    run_ranks(record_a_wait, 1, device="cuda")
