"""The step as a CUDA graph: one line where there can be none; on a GPU the losses of the plain step."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import train
from networks import build_loss, build_network, initialise
from utils.config import Optimizer
from utils.data.feeder import Batch, Fills, StreamFeeder
from utils.distributed import Launch, World
from utils.errors import LocalError, UserError, one_line_errors
from utils.optim import OPTIMIZERS, build_optimizer
from utils.steps import eager, graph
from utils.steps.eager import EagerStep, StepOptions
from utils.steps.graph import MAX_BUFFERS, WARMUP_STEPS, GraphStep, obstacle

TOP = Path(__file__).parents[2]
RATE = 0.01
STEPS = WARMUP_STEPS + 6
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def world(device: str = "cuda", size: int = 1) -> World:
    return World(Launch("test", world_size=size), torch.device(device, 0) if device == "cuda" else torch.device("cpu"))


def make(
    kind: type[EagerStep], optimizer: str = "adam", device: str = "cuda", network: nn.Module | None = None, **options
) -> EagerStep:
    if network is None:
        network = build_network("unet", 8, width=4, scales=2)
        initialise(network, torch.Generator().manual_seed(0), scale=0.1)
    network.to(device)
    built = build_optimizer(Optimizer(name=optimizer), network.named_parameters(), RATE, kind.capturable)
    return kind(network, build_loss("l1"), built, world(device), StepOptions(**options))


def buffers(count: int, device: str = "cuda") -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What a loader rotates through."""
    return [
        (torch.empty(4, 4, 8, 8, 8, device=device), torch.empty(4, 5, 8, 8, 8, device=device)) for _ in range(count)
    ]


def curve(step: EagerStep, slots: list[tuple[torch.Tensor, torch.Tensor]], steps: int = STEPS) -> torch.Tensor:
    """Losses and gradient norms, [steps, 2], at rates that change from step to step, on batches that do."""
    generator = torch.Generator().manual_seed(1)
    values = torch.zeros(steps, 2, device=slots[0][0].device)
    step.warm_up(*(part.fill_(0.5) for part in slots[0]))
    for number in range(steps):
        slot = slots[number % len(slots)]
        for part in slot:
            part.copy_(torch.rand(part.shape, generator=generator))
        # A rate that float32 holds: that of a graph is a tensor.
        rate = float(torch.tensor(RATE * (1 - number / steps)))
        values[number, 0] = step(*slot, as_held(step, rate))
        values[number, 1] = step.gradient_norm
    return values.cpu()


def as_held(step: EagerStep, rate: float) -> float:
    """In a tensor for torch's NAdam, which on a CPU rounds otherwise with such a rate."""
    held: Any = torch.tensor(rate)
    return held if isinstance(step._optimizer, torch.optim.NAdam) and held.device == step._device else rate


# --- where there can be none ---------------------------------------------------------------------------------------


def test_on_a_cpu_one_line_says_why_and_what_to_use(data_flags, tmp_path) -> None:
    command = [sys.executable, "train_graph.py", "--config=test", *data_flags, f"--set=expdir={tmp_path}"]
    result = subprocess.run(command, cwd=TOP, capture_output=True, text=True, timeout=120)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line == (
        "error: the step cannot become a CUDA graph: the run's device is cpu, and only CUDA has them; "
        "use train.py, which takes the same flags"
    )
    assert list(tmp_path.iterdir()) == []


def test_train_graph_takes_every_flag_of_train() -> None:
    texts = [
        subprocess.run([sys.executable, name, "--help"], cwd=TOP, capture_output=True, text=True, timeout=120).stdout
        for name in ("train.py", "train_graph.py")
    ]
    first, second = (text.partition("options:")[2] for text in texts)
    assert "--bucket_cap_mb" in first
    assert second == first


def test_the_preflight_says_so_too(data_flags, capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        train.main(["--config=test", *data_flags, "--preflight"], make_step=GraphStep)
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("error: the step cannot become a CUDA graph: the run's device is cpu")


@pytest.mark.parametrize(
    ("size", "noddp", "backends", "words"),
    [
        (1, False, "", None),
        (4, False, "cpu:gloo,cuda:nccl", None),
        (4, False, "gloo", "NCCL is needed"),
        (4, True, "gloo", None),
    ],
)
def test_ranks_that_talk_through_gloo_have_no_graphs(monkeypatch, size, noddp, backends, words) -> None:
    monkeypatch.setattr(graph.dist, "get_backend_config", lambda: backends)
    reason = obstacle(world(size=size), noddp)
    assert reason is None if words is None else words in (reason or "")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_capturable_optimizer_reads_its_rate_from_a_tensor(name: str) -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = build_optimizer(Optimizer(name=name), [("weight", parameter)], 0.5, capturable=True)
    rates = [group["lr"] for group in optimizer.param_groups]
    assert all(isinstance(rate, torch.Tensor) and float(rate) == 0.5 for rate in rates)
    for rate in rates:
        rate.fill_(0.0)
    parameter.grad = torch.ones(3)
    optimizer.step()
    assert torch.equal(parameter.detach(), torch.ones(3)), "a rate of zero, written into the tensor"
    for rate in rates:
        rate.fill_(0.25)
    optimizer.step()
    # The gradient is always 1, and Adam's step then the rate; NAdam's is shorter at the beginning.
    assert float(parameter.detach()[0]) == pytest.approx(0.804 if name == "nadam" else 0.75, rel=1e-3)


# --- on a device that is only imitated --------------------------------------------------------------------------------


def weights(step: EagerStep) -> dict[str, torch.Tensor]:
    """What a step has of the network, by the tensors themselves; of an average, the trained ones and its count, too."""
    state = step.state()
    average = state.get("average", {"trained": {}})
    trained = {f"trained {name}": value for name, value in average["trained"].items()}
    return {**state["network"], **trained, **({"updates": average["updates"]} if trained else {})}


class ImitatedGraph:
    """Recording changes nothing and computes nothing that stays; a replay carries out what was recorded."""

    now: ImitatedGraph | None = None  # the one that is being recorded

    def __init__(self) -> None:
        self.replays = 0
        self.kernels: list[Callable[[], object]] = []

    @classmethod
    def launch(cls, kernel: Callable[[], object]) -> None:
        """Runs a loader's kernel, or writes it down."""
        if cls.now is None:
            kernel()
        else:
            cls.now.kernels.append(kernel)

    @contextlib.contextmanager
    def recording(self, step: GraphStep) -> Iterator[None]:
        ImitatedGraph.now = self
        plain = step._train
        before = {name: value.clone() for name, value in weights(step).items()}
        states = [{name: value.clone() for name, value in step._optimizer.state[p].items()} for p in step._parameters]

        def train(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            self.batch, self.loss = (inputs, targets), plain(inputs, targets)
            self.loss.zero_()
            return self.loss

        step._train = train  # type: ignore[method-assign]
        try:
            yield
        finally:
            del step._train
            ImitatedGraph.now = None
        self.norm, self.step = step.gradient_norm.zero_(), step
        with torch.no_grad():
            for name, value in weights(step).items():
                value.copy_(before[name])
            for parameter, state in zip(step._parameters, states, strict=True):
                for name, value in state.items():
                    step._optimizer.state[parameter][name].copy_(value)

    def replay(self) -> None:
        self.replays += 1
        for kernel in self.kernels:
            kernel()
        self.loss.copy_(EagerStep._train(self.step, *self.batch))
        self.norm.copy_(self.step.gradient_norm)


class ImitatedStream:
    """Everything is done at once; what order streams keep is shown in tests/data/test_feeder.py."""

    def wait_stream(self, other: object) -> None:
        pass

    wait_event = record = wait_stream

    def synchronize(self) -> None:
        pass


@pytest.fixture
def imitated(monkeypatch: pytest.MonkeyPatch) -> list[GraphStep]:
    """CUDA's streams and graphs on the CPU; the steps that are put into the list can record."""
    steps: list[GraphStep] = []
    cuda = graph.torch.cuda
    monkeypatch.setattr(graph, "obstacle", lambda *arguments: None)
    monkeypatch.setattr(cuda, "Stream", lambda device: ImitatedStream())
    monkeypatch.setattr(cuda, "current_stream", lambda device: ImitatedStream())
    monkeypatch.setattr(cuda, "Event", ImitatedStream)
    monkeypatch.setattr(cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(cuda, "CUDAGraph", ImitatedGraph)
    monkeypatch.setattr(cuda, "graph", lambda graph, *arguments, **options: graph.recording(steps[0]))
    return steps


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("options", [{}, {"accumulation_steps": 2, "clip_grad_norm": 0.1}], ids=str)
@pytest.mark.parametrize("count", [1, 3, MAX_BUFFERS + 5])
def test_the_replayed_steps_are_the_plain_ones(imitated, count: int, options: dict, optimizer: str) -> None:
    """Whatever the number of the loader's buffers: same losses, norms and parameters, and never too many graphs."""
    steps = WARMUP_STEPS + 2 * count + 1
    plain, recorded = make(EagerStep, optimizer, "cpu", **options), make(GraphStep, optimizer, "cpu", **options)
    imitated.append(recorded)
    expected, got = (curve(step, buffers(count, "cpu"), steps) for step in (plain, recorded))
    assert torch.equal(got, expected)
    assert got[-1, 0] < got[0, 0]
    for one, other in zip(plain.network.parameters(), recorded.network.parameters(), strict=True):
        assert torch.equal(one, other)
    assert len(recorded._graphs) == (count if count <= MAX_BUFFERS else MAX_BUFFERS + 1)
    replays = [known.graph.replays for known in recorded._graphs.values()]
    assert sum(replays) == steps - WARMUP_STEPS


@pytest.mark.parametrize("when", [1, WARMUP_STEPS, WARMUP_STEPS + 4], ids=["first step", "first replay", "replay"])
def test_replayed_steps_average_the_weights(imitated, when: int) -> None:
    """As plain steps do, of which one without numbers leaves the average and its count where they were."""
    plain, recorded = (make(kind, "adam", "cpu", ema_decay=0.9) for kind in (EagerStep, GraphStep))
    imitated.append(recorded)
    (slot,) = buffers(1, "cpu")
    generator = torch.Generator().manual_seed(3)
    for number in range(WARMUP_STEPS + 6):
        for part in slot:
            part.copy_(torch.rand(part.shape, generator=generator))
        if number == when:
            spoil(slot)
        for step in (plain, recorded):
            before = {name: value.clone() for name, value in weights(step).items()}
            step(*slot, float(torch.tensor(RATE)))
            assert (differing(weights(step), before) == []) == (number == when)
    assert differing(kept(plain), kept(recorded)) == []
    assert int(weights(recorded)["updates"]) == WARMUP_STEPS + 5
    assert len(recorded._graphs) == 1


NORMS = ["batch", "sync_batch", "ghost(2)", "group"]


def normed(kind: type[EagerStep], device: str, norm: str, **options) -> EagerStep:
    network = build_network("unet", 8, width=4, scales=2, norm=norm)
    initialise(network, torch.Generator().manual_seed(0), scale=0.1)
    return make(kind, "adam", device, network, **options)


@pytest.mark.parametrize("norm", NORMS)
def test_replayed_steps_keep_the_running_statistics(imitated, norm: str) -> None:
    plain, recorded = (normed(kind, "cpu", norm) for kind in (EagerStep, GraphStep))
    imitated.append(recorded)
    expected, got = (curve(step, buffers(2, "cpu")) for step in (plain, recorded))
    assert torch.equal(got, expected)
    states = [step.network.state_dict() for step in (plain, recorded)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    tracked = [value for name, value in states[1].items() if name.endswith("num_batches_tracked")]
    assert bool(tracked) == (norm != "group")
    assert all(int(value) == STEPS for value in tracked)


def test_replayed_steps_measure_the_noise_scale(imitated) -> None:
    options = {"noise_scale": True, "accumulation_steps": 2}
    plain, recorded = (make(kind, "adam", "cpu", **options) for kind in (EagerStep, GraphStep))
    imitated.append(recorded)
    for step in (plain, recorded):
        curve(step, buffers(2, "cpu"))
    assert plain.probe is not None
    assert recorded.probe is not None
    assert float(plain.probe.square) > 0
    assert torch.equal(plain.probe.square, recorded.probe.square)


@pytest.mark.parametrize("parts", [1, 2])
def test_no_hook_of_pythons_is_recorded_with_the_exchange(imitated, monkeypatch, parts: int) -> None:
    """With micro-batches the noise scale needs none; else it is left out on several ranks."""
    monkeypatch.setattr(eager, "_data_parallel", lambda module, world, options, probe: module)
    network = build_network("unet", 8, width=4, scales=2)
    built = build_optimizer(Optimizer(), network.named_parameters(), RATE, True)
    options = StepOptions(noise_scale=True, accumulation_steps=parts)
    step = GraphStep(network, build_loss("l1"), built, world("cpu", size=2), options)
    assert (step.probe is not None) == (parts > 1)


class ImitatedLoader:
    """In the resident loader's way: one kernel with fixed arguments, which reads on the device where it has come to."""

    def __init__(self, count: int) -> None:
        shapes = [(4, channels, 8, 8, 8) for channels in (4, 5)]
        generator = torch.Generator().manual_seed(2)
        self.data = [torch.rand(count, *shape, generator=generator) for shape in shapes]
        self.feeder, self.next = StreamFeeder(torch.device("cpu"), shapes), torch.zeros((), dtype=torch.int64)

    def epoch(self) -> Generator[Batch, None, None]:
        return self.feeder.feed(self._fills())

    def _fills(self) -> Fills:
        for number in range(len(self.data[0])):
            yield 4, self._fill if number else self._begin

    def _begin(self, slot: Batch) -> None:
        ImitatedGraph.launch(self.next.zero_)
        self._fill(slot)

    def _fill(self, slot: Batch) -> None:
        for part, data in zip(slot, self.data, strict=True):
            ImitatedGraph.launch(functools.partial(self._kernel, part, data))
        ImitatedGraph.launch(functools.partial(self.next.add_, 1))

    def _kernel(self, part: torch.Tensor, data: torch.Tensor) -> None:
        part.copy_(data[self.next])


def trained_on(loader: ImitatedLoader, step: EagerStep, epochs: int) -> list[float]:
    """Losses over epochs, in each of which a batch is looked at before it is trained on, too."""
    losses = []
    for _ in range(epochs):
        for number, (inputs, targets) in enumerate(loader.epoch()):
            if number == 3:
                losses.append(float(step.evaluate(inputs, targets)))
            losses.append(float(step(inputs, targets, 0.25)))
    return losses


@pytest.mark.parametrize("count", [4, 7, 9])
def test_the_crops_of_the_next_batch_are_made_in_the_graph(imitated, count: int) -> None:
    """Losses are those of the plain step on the same samples; the feeder fills what no graph has filled."""
    loader, plain, recorded = ImitatedLoader(count), make(EagerStep, "sgd", "cpu"), make(GraphStep, "sgd", "cpu")
    epochs = 2 + WARMUP_STEPS // count
    expected = trained_on(loader, plain, epochs)
    imitated.append(recorded)
    loader.feeder.beside = recorded.beside
    assert trained_on(loader, recorded, epochs) == expected
    keys = list(recorded._graphs)
    assert {key[3] for key in keys} >= {(0, 4), (1, 4), (2, 4)}
    gathered = [bool(known.graph.kernels) for known in recorded._graphs.values()]
    assert gathered == [key[3] is not None for key in keys]
    assert len(keys) <= 6, "a graph for each slot, and one where no batch comes after it"
    assert len(recorded._buffers) == 3


def spoil(slot: tuple[torch.Tensor, torch.Tensor]) -> None:
    slot[1][1, 2, 3, 4, 5] = float("nan")


def kept(step: EagerStep) -> dict[str, torch.Tensor]:
    """Copies of the parameters, and of all that the optimizer has."""
    found = {name: value.clone() for name, value in weights(step).items()}
    for number, parameter in enumerate(step._parameters):
        state = step._optimizer.state.get(parameter, {})
        found |= {f"{key} of {number}": value.clone() for key, value in state.items()}
    return found


def differing(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> list[str]:
    assert first.keys() == second.keys()
    return [name for name in first if not torch.equal(first[name], second[name])]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("when", [1, WARMUP_STEPS, WARMUP_STEPS + 4], ids=["first step", "first replay", "replay"])
def test_a_replay_without_numbers_leaves_its_update_out(imitated, optimizer: str, when: int) -> None:
    """Not even the step count moves; what follows is as if it had not been."""
    undisturbed, step = make(EagerStep, optimizer, "cpu"), make(GraphStep, optimizer, "cpu")
    imitated.append(step)
    (slot,) = buffers(1, "cpu")
    generator = torch.Generator().manual_seed(3)
    for number in range(WARMUP_STEPS + 8):
        batch = [torch.rand(part.shape, generator=generator) for part in slot]
        for part, values in zip(slot, batch, strict=True):
            part.copy_(values)
        if number == when:
            before = kept(step)
            spoil(slot)
            assert not step(*slot, RATE).isfinite()
            assert not step.gradient_norm.isfinite()
            assert differing(kept(step), before) == []
            slot[1].copy_(batch[1])
        rate = float(torch.tensor(RATE))
        assert torch.equal(undisturbed(*batch, as_held(undisturbed, rate)), step(*slot, rate))
    assert differing(kept(undisturbed), kept(step)) == []
    assert len(step._graphs) == 1


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("saved_after", [3, WARMUP_STEPS + 3])
def test_a_step_goes_on_from_its_state_and_then_records(imitated, optimizer: str, saved_after: int, tmp_path) -> None:
    """Its rate stays the tensor that graphs read, in the place where it was."""
    first, second = make(GraphStep, optimizer, "cpu"), make(GraphStep, optimizer, "cpu")
    imitated.append(first)
    (slot,) = buffers(1, "cpu")
    curve(first, [slot], saved_after)
    torch.save(first.state(), tmp_path / "state.pt")
    second.load_state(torch.load(tmp_path / "state.pt", weights_only=True))
    rate = second._optimizer.param_groups[0]["lr"]
    assert isinstance(rate, torch.Tensor)
    expected = curve(first, [slot])
    imitated[0] = second
    assert torch.equal(curve(second, [slot]), expected)
    assert differing(kept(first), kept(second)) == []
    assert second._optimizer.param_groups[0]["lr"] is rate
    assert len(second._graphs) == 1


def test_a_state_that_comes_after_the_graphs_is_refused(imitated) -> None:
    step = make(GraphStep, device="cpu")
    imitated.append(step)
    curve(step, buffers(1, "cpu"))
    with pytest.raises(AssertionError, match="graphs hold the memory"):
        step.load_state(step.state())


def test_without_exchange_a_step_has_graphs_of_its_own(imitated) -> None:
    step = make(GraphStep, device="cpu")
    imitated.append(step)
    (slot,) = buffers(1, "cpu")
    curve(step, [slot])
    with step.without_exchange():
        step(*slot, RATE)
    step(*slot, RATE)
    assert [key[2] for key in step._graphs] == [True, False]


def test_a_shape_that_changes_is_named_in_the_error(imitated) -> None:
    step = make(GraphStep, device="cpu")
    imitated.append(step)
    (slot,) = buffers(1, "cpu")
    curve(step, [slot])
    with pytest.raises(UserError, match=r"inputs of a batch have shape \[3, 4, 8, 8, 8\], .* \[4, 4, 8, 8, 8\]"):
        step(slot[0][:3], slot[1][:3], RATE)


def test_a_recording_that_fails_says_why(imitated, monkeypatch) -> None:
    step = make(GraphStep, device="cpu")

    @contextlib.contextmanager
    def failing(*arguments, **options) -> Iterator[None]:
        try:
            yield
        finally:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture\nmore")

    def waiting(*arguments) -> torch.Tensor:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(graph.torch.cuda, "graph", failing)
    (slot,) = buffers(1, "cpu")
    curve(step, [slot], WARMUP_STEPS)
    step._train = waiting  # type: ignore[method-assign]
    with pytest.raises(LocalError, match=r"^the step .* graph: CUDA error: operation not permitted .*capturing; use t"):
        step(*slot, RATE)


# --- on a GPU ------------------------------------------------------------------------------------------------------


@pytest.fixture
def repeatable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums in the same order always: Adam divides by gradients that may vanish, which makes rounding grow."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)


@pytest.mark.usefixtures("repeatable")
class TestOnAGpu:
    pytestmark = on_gpu

    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"enable_amp": True},
            {"enable_amp": True, "precision": "float16"},
            {"accumulation_steps": 2, "clip_grad_norm": 0.1},
        ],
        ids=str,
    )
    def test_replayed_steps_give_the_losses_of_plain_ones(self, options: dict, optimizer: str) -> None:
        if optimizer == "apex_adam" and importlib.util.find_spec("apex") and options.get("precision") == "float16":
            pytest.skip("apex's FusedAdam and PyTorch's scaler meet on the host")
        plain, recorded = make(EagerStep, optimizer, **options), make(GraphStep, optimizer, **options)
        expected, got = (curve(step, buffers(3)) for step in (plain, recorded))
        assert len(recorded._graphs) == 3
        assert float(expected[-1, 0]) < float(expected[0, 0])
        torch.testing.assert_close(got, expected, rtol=1e-2 if options.get("enable_amp") else 1e-4, atol=1e-5)
        for one, other in zip(plain.network.parameters(), recorded.network.parameters(), strict=True):
            torch.testing.assert_close(other, one, rtol=1e-2, atol=2e-2 if options.get("enable_amp") else 1e-4)

    @pytest.mark.parametrize("norm", NORMS)
    def test_replayed_steps_keep_the_running_statistics(self, norm: str) -> None:
        """And measure the noise scale, with which nothing waits for the device either."""
        plain, recorded = (normed(kind, "cuda", norm, noise_scale=True) for kind in (EagerStep, GraphStep))
        expected, got = (curve(step, buffers(2)) for step in (plain, recorded))
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-5)
        for name, value in plain.network.state_dict().items():
            torch.testing.assert_close(recorded.network.state_dict()[name], value, rtol=1e-2, atol=1e-3)

    def test_the_first_steps_are_real_ones(self) -> None:
        step = make(GraphStep)
        before = [parameter.detach().clone() for parameter in step.network.parameters()]
        curve(step, buffers(1), steps=1)
        assert not step._graphs
        assert all(not torch.equal(a, b) for a, b in zip(before, step.network.parameters(), strict=True))

    def test_a_loader_with_many_buffers_does_not_fill_the_device_with_graphs(self) -> None:
        plain, recorded = make(EagerStep), make(GraphStep)
        slots = buffers(MAX_BUFFERS + 5)
        expected, got = (curve(step, slots, WARMUP_STEPS + 2 * len(slots)) for step in (plain, recorded))
        assert len(recorded._graphs) == MAX_BUFFERS + 1
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)

    def test_evaluation_sees_what_replays_have_learnt(self) -> None:
        step, (slot,) = make(GraphStep), buffers(1)
        curve(step, [slot])
        first = float(step.evaluate(*slot))
        for _ in range(5):
            step(*slot, RATE)
        assert float(step.evaluate(*slot)) < first

    @pytest.mark.parametrize("optimizer", ["adam", "sgd", "nadam", "lamb"])
    @pytest.mark.parametrize(
        "options", [{}, {"enable_amp": True}, {"accumulation_steps": 2, "clip_grad_norm": 0.1}], ids=str
    )
    def test_a_replay_without_numbers_changes_no_bit(self, options: dict, optimizer: str) -> None:
        """And the next one trains on; the graph that skips is the one that updates."""
        step, (slot,) = make(GraphStep, optimizer, **options), buffers(1)
        curve(step, [slot])
        before, good = kept(step), slot[1].clone()
        for _ in range(3):
            spoil(slot)
            torch.cuda.set_sync_debug_mode("error")
            try:
                loss = step(*slot, RATE)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert not loss.isfinite()
            assert not step.gradient_norm.isfinite()
            assert differing(kept(step), before) == []
        slot[1].copy_(good)
        assert step(*slot, RATE).isfinite()
        assert len(differing(kept(step), before)) == len(before)
        assert len(step._graphs) == 1

    @pytest.mark.parametrize("optimizer", ["adam", "sgd", "nadam", "lamb"])
    @pytest.mark.parametrize("saved_after", [3, STEPS])
    def test_a_step_goes_on_from_its_state_and_then_records(self, optimizer: str, saved_after: int, tmp_path) -> None:
        """Saved before or after graphs were recorded; the state, and the rate, are on the device."""
        first, second = make(GraphStep, optimizer), make(GraphStep, optimizer)
        (slot,) = buffers(1)
        curve(first, [slot], saved_after)
        torch.save(first.state(), tmp_path / "state.pt")
        second.load_state(torch.load(tmp_path / "state.pt", weights_only=True, map_location="cpu"))
        assert differing(kept(first), kept(second)) == []
        rate = second._optimizer.param_groups[0]["lr"]
        assert isinstance(rate, torch.Tensor)
        assert rate.is_cuda
        expected = curve(first, [slot])
        torch.testing.assert_close(curve(second, [slot]), expected, rtol=1e-4, atol=1e-5)
        assert len(second._graphs) == 1

    def test_a_shape_that_changes_is_named(self) -> None:
        step, (slot,) = make(GraphStep), buffers(1)
        curve(step, [slot])
        with pytest.raises(UserError, match=r"inputs of a batch have shape \[3, 4, 8, 8, 8\], .* \[4, 4, 8, 8, 8\]"):
            step(slot[0][:3], slot[1][:3], RATE)

    def test_an_operation_that_waits_for_the_device_is_one_line(self) -> None:
        """In a process of its own: a recording that fails leaves PyTorch's allocator and generators in disorder."""
        command = [sys.executable, __file__, "records what waits"]
        environment = {**os.environ, "PYTHONPATH": str(TOP)}
        result = subprocess.run(command, env=environment, cwd=TOP, capture_output=True, text=True, timeout=120)
        *_, line = result.stderr.splitlines()
        assert re.fullmatch(r"error: the step cannot become a CUDA graph: .*; use train\.py, .* flags", line)
        assert result.returncode == 2

    def test_a_replay_never_waits_for_the_device(self) -> None:
        step, (slot,) = make(GraphStep), buffers(1)
        curve(step, [slot])
        torch.cuda.set_sync_debug_mode("error")
        try:
            step(*slot, RATE)
        finally:
            torch.cuda.set_sync_debug_mode("default")


class Waiting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv3d(4, 5, 3, padding=1)

    def forward(self, fields: torch.Tensor) -> torch.Tensor:
        return self.layer(fields) * float(fields.mean())


if __name__ == "__main__" and sys.argv[1:] == ["records what waits"]:
    with one_line_errors():
        curve(make(GraphStep, network=Waiting()), buffers(1))
