"""The eager step: what it computes, in every mode it has."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator

import pytest
import torch
from processes import run_ranks
from torch import nn
from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func

from networks import build_loss, build_network, initialise, pointwise
from utils.config import Optimizer
from utils.distributed import Launch, World
from utils.optim import OPTIMIZERS, build_optimizer
from utils.steps import compilers
from utils.steps.eager import EagerStep, StepOptions

ALONE = World(Launch("test"), torch.device("cpu"))
RATE = 0.01


def make(optimizer: str = "sgd", scale: float = 0.1, **options) -> EagerStep:
    network = build_network("unet", 8, width=4, scales=2)
    initialise(network, torch.Generator().manual_seed(0), scale=scale)
    built = build_optimizer(Optimizer(name=optimizer), network.named_parameters(), RATE)
    return EagerStep(network, build_loss("l1"), built, ALONE, StepOptions(**options))


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(4, 4, 8, 8, 8, generator=generator), torch.rand(4, 5, 8, 8, 8, generator=generator)


def parameters(step: EagerStep) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in step.network.parameters()])


def test_one_step_is_forward_backward_update() -> None:
    step, plain = make(), make()
    inputs, targets = batch()
    loss = step(inputs, targets, RATE)
    expected = plain._bare(inputs, targets)
    gradients = torch.autograd.grad(expected, list(plain.network.parameters()))
    assert torch.equal(loss, expected.detach())
    assert not loss.requires_grad
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    torch.testing.assert_close(parameters(step), parameters(plain) - RATE * flat, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(step.gradient_norm, flat.norm())


def test_the_rate_is_the_one_given_with_the_step() -> None:
    step = make()
    before = parameters(step)
    step(*batch(), 0.0)
    assert torch.equal(parameters(step), before)
    step(*batch(), RATE)
    assert not torch.equal(parameters(step), before)


def test_clipping_limits_the_update_and_reports_the_norm_before_it() -> None:
    free, clipped = make(), make(clip_grad_norm=1e-3)
    start = parameters(free)
    free(*batch(), RATE)
    clipped(*batch(), RATE)
    torch.testing.assert_close(clipped.gradient_norm, free.gradient_norm)
    assert float(free.gradient_norm) > 1e-3
    assert float((parameters(clipped) - start).norm()) == pytest.approx(RATE * 1e-3, rel=1e-2)


def test_bfloat16_trains_close_to_float32() -> None:
    full, half = make("adam"), make("adam", enable_amp=True)
    losses = [(float(full(*batch(), RATE)), float(half(*batch(), RATE))) for _ in range(10)]
    assert losses[-1][0] < 0.9 * losses[0][0]
    for exact, rounded in losses:
        assert rounded == pytest.approx(exact, rel=0.01)
    assert all(parameter.dtype == torch.float32 for parameter in half.network.parameters())
    assert not half._scaler.is_enabled()


def test_float16_scales_gradients_and_skips_an_overflowing_update() -> None:
    step = make("adam", enable_amp=True, precision="float16")
    before, scale = parameters(step), step._scaler.get_scale()
    inputs, targets = batch()
    step(inputs * float("inf"), targets, RATE)
    assert torch.equal(parameters(step), before), "an update with infinite gradients must not be made"
    assert step._scaler.get_scale() < scale
    for seed in range(3):
        step(*batch(seed), RATE)
    assert not torch.equal(parameters(step), before)
    assert torch.isfinite(parameters(step)).all()


def test_float16_reports_the_unscaled_gradient_norm() -> None:
    exact, scaled = make(), make(enable_amp=True, precision="float16")
    exact(*batch(), RATE)
    scaled(*batch(), RATE)
    assert float(scaled.gradient_norm) == pytest.approx(float(exact.gradient_norm), rel=0.02)


def test_evaluation_changes_nothing_and_predictions_make_its_loss() -> None:
    step = make()
    before = parameters(step)
    inputs, targets = batch()
    loss = step.evaluate(inputs, targets)
    assert float(loss) == pytest.approx(float((step.predict(inputs) - targets).abs().mean()), rel=1e-6)
    assert torch.equal(parameters(step), before)
    assert all(parameter.grad is None for parameter in step.network.parameters())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_learns(name: str) -> None:
    step = make(name, scale=0.3)
    first, *_, last = [float(step(*batch(), 0.1 if name == "sgd" else RATE)) for _ in range(20)]
    assert last < 0.95 * first


@pytest.mark.parametrize("name", ["adam", "apex_adam"])
@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")],
        ),
    ],
)
def test_fused_adams_follow_plain_adam_over_fifty_gradients(name: str, device: str) -> None:
    """apex's where it is installed; else --enable_apex takes torch's, which is the default, too."""
    shapes = [(64, 4, 4, 4, 4), (64,), (33, 7)]
    generator = torch.Generator().manual_seed(0)
    start = [0.1 * torch.randn(shape, generator=generator) for shape in shapes]
    fused, plain = ([nn.Parameter(value.clone().to(device)) for value in start] for _ in range(2))
    optimizers = [
        build_optimizer(Optimizer(name=name), [(str(n), parameter) for n, parameter in enumerate(fused)], RATE),
        torch.optim.Adam(plain, lr=RATE, foreach=False, fused=False),
    ]
    assert optimizers[0].defaults.get("fused", name == "apex_adam")
    for _ in range(50):
        for one, other, shape in zip(fused, plain, shapes, strict=True):
            gradient = torch.randn(shape, generator=generator).to(device)
            one.grad, other.grad = gradient, gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    for one, other, first in zip(fused, plain, start, strict=True):
        assert float((one - other).detach().abs().max()) <= 1e-6
        assert float((one.detach().cpu() - first).abs().max()) > 10 * RATE


def test_a_failing_compiler_falls_back_to_eager_with_one_warning(monkeypatch, caplog) -> None:
    class CompilerFailure(Exception):
        __module__ = "torch._inductor.exc"

    def broken(module: nn.Module):
        def call(*arguments):
            raise CompilerFailure("no C++ compiler\nmore lines")

        return call

    monkeypatch.setattr(compilers.torch, "compile", broken)
    step, plain = make(enable_jit=True), make()
    with caplog.at_level(logging.WARNING):
        losses = [step(*batch(seed), RATE) for seed in range(3)]
    assert losses == [plain(*batch(seed), RATE) for seed in range(3)]
    assert [record.getMessage() for record in caplog.records] == [
        "torch.compile failed, going on without it: no C++ compiler"
    ]


def test_an_error_of_the_network_itself_is_not_taken_for_the_compilers(monkeypatch) -> None:
    monkeypatch.setattr(compilers.torch, "compile", lambda module: module)
    step = make(enable_jit=True)
    inputs, targets = batch()
    with pytest.raises(RuntimeError):
        step(inputs[:, :3], targets, RATE)


# --- data parallel ---------------------------------------------------------------------------------------------------


def describe_on_ranks(world: World) -> list[tuple[list[str], float]]:
    answers = []
    cases: list[dict] = [{"bucket_cap_mb": 0.005}, {"gradient_compression": "bfloat16"}, {"noddp": True}]
    for options in cases:
        network = build_network("unet", 8, width=4, scales=2)
        initialise(network, torch.Generator().manual_seed(0), scale=0.1)
        built = build_optimizer(Optimizer(name="sgd"), network.named_parameters(), RATE)
        step = EagerStep(network, build_loss("l1"), built, world, StepOptions(**options))
        for number in range(3):
            step(*batch(10 * world.rank + number), RATE)
        answers.append((step.describe(), float(parameters(step).norm())))
    return answers


def test_the_log_tells_the_buckets_that_gradients_travel_in() -> None:
    first, second = run_ranks(describe_on_ranks, 2)
    (how, line), norm = first[0]
    assert how == "Step: no autocast"
    total = sum(parameter.numel() for parameter in make().network.parameters()) * 4 / 1e6
    found = re.fullmatch(
        r"DistributedDataParallel: (\d+) buckets of gradients, ([\d.]+) MB: ([\d., ]+) MB; sent as float32", line
    )
    assert found
    sizes = [float(size) for size in found[3].split(", ")]
    assert len(sizes) == int(found[1]) > 1
    assert sum(sizes) == pytest.approx(float(found[2]), rel=0.01) == pytest.approx(total, rel=0.01)
    assert first[1][0][1].startswith("DistributedDataParallel: 1 bucket of gradients")
    assert first[1][0][1].endswith("sent as bfloat16")
    assert len(first[2][0]) == 1, "nothing is exchanged"
    for index in (0, 1):
        assert first[index][1] == second[index][1], "the ranks agree, also on what was rounded"
    assert first[1][1] == pytest.approx(norm, rel=1e-3)
    assert first[1][1] != norm, "rounding to bfloat16 leaves a trace"


def without_exchange_on_ranks(world: World) -> list[float]:
    network = build_network("unet", 8, width=4, scales=2)
    initialise(network, torch.Generator().manual_seed(0), scale=0.1)
    built = build_optimizer(Optimizer(name="sgd"), network.named_parameters(), RATE)
    step = EagerStep(network, build_loss("l1"), built, world, StepOptions(accumulation_steps=2))
    step(*batch(world.rank), RATE)
    norms = [float(parameters(step).norm())]
    with step.without_exchange():
        step(*batch(world.rank), RATE)
    return [*norms, float(parameters(step).norm())]


def test_within_without_exchange_ranks_go_their_own_way() -> None:
    first, second = run_ranks(without_exchange_on_ranks, 2)
    assert first[0] == second[0]
    assert first[1] != second[1]


# --- warming up ----------------------------------------------------------------------------------------------------


class Changeable(nn.Module):
    """A network that training mode changes: statistics of its inputs, and random numbers drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv3d(4, 6, 3, padding=1), nn.Conv3d(6, 5, 3, padding=1)
        self.norm, self.dropout = nn.BatchNorm3d(6), nn.Dropout(0.3)

    def forward(self, fields: torch.Tensor) -> torch.Tensor:
        return self.last(self.dropout(torch.relu(self.norm(self.first(fields)))))


def make_changeable(optimizer: str = "adam", world: World = ALONE, **options) -> EagerStep:
    torch.manual_seed(0)
    network = Changeable().to(world.device)
    settings = Optimizer(name=optimizer, momentum=0.9 if optimizer == "sgd" else 0.0)
    built = build_optimizer(settings, network.named_parameters(), RATE)
    return EagerStep(network, build_loss("l1"), built, world, StepOptions(**options))


def train(step: EagerStep, warm: bool, seed: int = 0) -> dict[str, torch.Tensor]:
    """Everything that three steps lead to."""
    torch.manual_seed(1)
    if warm:
        step.warm_up(*batch(seed))
    results = {}
    for number in range(3):
        results[f"loss {number}"] = step(*batch(seed + number), RATE)
        results[f"norm {number}"] = step.gradient_norm
    results |= {name: value.clone() for name, value in step.network.state_dict().items()}
    for parameter, state in step._optimizer.state.items():
        results |= {f"{name} of {tuple(parameter.shape)}": value for name, value in state.items()}
    return {**results, "random state": torch.get_rng_state(), "scale": torch.tensor(step._scaler.get_scale())}


def differing(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> list[str]:
    assert first.keys() == second.keys()
    return [name for name in first if not torch.equal(first[name], second[name])]


MODES: list[dict] = [
    {},
    {"accumulation_steps": 2},
    {"enable_amp": True},
    {"enable_amp": True, "precision": "float16", "clip_grad_norm": 0.1},
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("options", MODES)
def test_training_is_bit_for_bit_the_one_without_a_warm_up(optimizer: str, options: dict) -> None:
    cold, warm = (train(make_changeable(optimizer, **options), warm) for warm in (False, True))
    assert not torch.equal(cold["loss 0"], cold["loss 2"])
    assert differing(cold, warm) == []


@pytest.mark.parametrize("options", MODES)
def test_a_warm_up_leaves_nothing_behind(options: dict) -> None:
    step = make_changeable(**options)
    before = {name: value.clone() for name, value in step.network.state_dict().items()}
    random, scale, norm = torch.get_rng_state(), step._scaler.state_dict(), step.gradient_norm
    step.warm_up(*batch())
    assert differing(before, step.network.state_dict()) == []
    assert torch.equal(torch.get_rng_state(), random)
    assert step._scaler.state_dict() == scale
    assert step.gradient_norm is norm
    assert not step._optimizer.state
    assert all(parameter.grad is None for parameter in step.network.parameters())


@pytest.mark.parametrize("options", MODES)
def test_a_warm_up_goes_forward_and_backward_as_a_step_does(options: dict) -> None:
    step = make_changeable(**options)
    passes: list = []
    step.network.last.register_forward_hook(
        lambda module, inputs, output: passes.append((output.dtype, output.shape, step.network.training))
    )
    step.network.first.weight.register_hook(lambda gradient: passes.append(("backward", gradient.shape)))
    step.evaluate(*batch())
    passes.clear()
    step.warm_up(*batch())
    warm = list(passes)
    passes.clear()
    step(*batch(), RATE)
    assert len(passes) == 2 * options.get("accumulation_steps", 1)
    assert warm == passes


@pytest.mark.parametrize("options", [{}, {"accumulation_steps": 2}, {"enable_amp": True}])
def test_after_a_warm_up_no_step_compiles(monkeypatch, options: dict) -> None:
    compiled: list[str] = []

    def backend(graph, inputs):
        def note(kind: str):
            return lambda graph, _: (compiled.append(kind), make_boxed_func(graph))[1]

        return aot_module_simplified(graph, inputs, fw_compiler=note("forward"), bw_compiler=note("backward"))

    plain = torch.compile
    torch._dynamo.reset()
    monkeypatch.setattr(compilers.torch, "compile", lambda module: plain(module, backend=backend))
    step = make_changeable(enable_jit=True, **options)
    step.evaluate(*batch())
    step.warm_up(*batch())
    assert {"forward", "backward"} == set(compiled)
    count = len(compiled)
    for number in range(2):
        step(*batch(number), RATE)
        step.evaluate(*batch())
    assert len(compiled) == count


RANK_CASES: list[dict] = [
    {},
    {"static_graph": True},
    {"accumulation_steps": 2},
    {"enable_amp": True, "disable_broadcast_buffers": True},
    {"noddp": True},
]


def train_on_ranks(world: World) -> list[tuple[list[str], list[float]]]:
    """Per case: what a warm-up changes, and some parameters at the end; each rank has samples of its own."""
    answers = []
    for options in RANK_CASES:
        steps = [make_changeable("sgd", world, bucket_cap_mb=0.001, **options) for _ in range(2)]
        cold, warm = (train(step, kind, seed=10 * world.rank) for step, kind in zip(steps, (False, True), strict=True))
        answers.append((differing(cold, warm), warm["first.weight"].flatten().tolist()))
    return answers


def test_ranks_train_bit_for_bit_as_without_a_warm_up() -> None:
    first, second = run_ranks(train_on_ranks, 2)
    for options, one, other in zip(RANK_CASES, first, second, strict=True):
        assert one[0] == other[0] == [], options
        assert (one[1] == other[1]) is not options.get("noddp", False), "gradients are exchanged as before"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("options", MODES)
def test_a_warm_up_on_the_device_leaves_nothing_behind(options: dict) -> None:
    step = make_changeable(world=World(Launch("test"), torch.device("cuda", 0)), **options)
    before = {name: value.clone() for name, value in step.network.state_dict().items()}
    random, scale = torch.cuda.get_rng_state(), step._scaler.state_dict()
    step.warm_up(*(part.cuda() for part in batch()))
    assert torch.cuda.current_stream().query(), "the device is done"
    assert differing(before, step.network.state_dict()) == []
    assert torch.equal(torch.cuda.get_rng_state(), random)
    assert step._scaler.state_dict() == scale
    assert not step._optimizer.state
    assert all(parameter.grad is None for parameter in step.network.parameters())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enable_amp": True},
        {"enable_amp": True, "precision": "float16"},
        {"noise_scale": True, "accumulation_steps": 2},
        {"ema_decay": 0.99},
    ],
)
def test_the_step_never_waits_for_the_device(options: dict) -> None:
    world = World(Launch("test"), torch.device("cuda", 0))
    network = build_network("unet", 8, width=4, scales=2).cuda()
    built = build_optimizer(Optimizer(), network.named_parameters(), RATE)
    step = EagerStep(network, build_loss("l1"), built, world, StepOptions(**options))
    inputs, targets = (part.cuda() for part in batch())
    step(inputs, targets, RATE)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(inputs, targets, RATE)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# --- updates left out ------------------------------------------------------------------------------------------------


# No number in the targets alone has gradient 0 under L1 by itself.
SPOILT = ["nan in targets", "all targets nan", "inf in targets", "nan in inputs", "-inf in inputs"]
SETTINGS: dict[str, dict] = {
    "adam": {"name": "adam"},
    "adam, weight decay": {"name": "adam", "weight_decay": 0.1},
    "apex_adam": {"name": "apex_adam"},
    "sgd": {"name": "sgd"},
    "sgd, momentum": {"name": "sgd", "momentum": 0.9, "weight_decay": 0.1},
    "nadam": {"name": "nadam"},
    "lamb": {"name": "lamb", "weight_decay": 0.1},
}
STEP_MODES: list[dict] = [
    {},
    {"accumulation_steps": 4},
    {"clip_grad_norm": 0.1, "accumulation_steps": 2},
    {"enable_amp": True},
    {"enable_amp": True, "precision": "float16"},
]


def spoilt(how: str, seed: int = 50) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch that is bad in a cell of one sample, or all over."""
    inputs, targets = batch(seed)
    value = float("nan") if "nan" in how else float("inf")
    if how.startswith("all"):
        targets.fill_(value)
    else:
        (targets if "targets" in how else inputs)[1, 2, 3, 4, 5] = -value if how.startswith("-") else value
    return inputs, targets


def build(
    settings: dict, world: World = ALONE, loss: nn.Module | None = None, plain: bool = False, **options
) -> EagerStep:
    network = build_network("unet", 8, width=4, scales=2)
    initialise(network, torch.Generator().manual_seed(0), scale=0.1)
    if plain:
        built: torch.optim.Optimizer = torch.optim.AdamW(network.parameters(), lr=RATE, foreach=False)
    else:
        built = build_optimizer(Optimizer(**settings), network.named_parameters(), RATE)
    return EagerStep(network, loss or build_loss("l1"), built, world, StepOptions(**options))


def kept(step: EagerStep) -> dict[str, torch.Tensor]:
    """Copies of the parameters, and of all that the optimizer has."""
    found = {name: value.clone() for name, value in step.network.state_dict().items()}
    for number, parameter in enumerate(step._parameters):
        state = step._optimizer.state.get(parameter, {})
        found |= {f"{key} of {number}": torch.as_tensor(value).clone() for key, value in state.items()}
    return found


@pytest.mark.parametrize("how", SPOILT)
@pytest.mark.parametrize("options", STEP_MODES, ids=str)
@pytest.mark.parametrize("optimizer", SETTINGS)
def test_a_step_without_numbers_might_as_well_not_have_been(optimizer: str, options: dict, how: str) -> None:
    """The first step of all, and one in between; bit for bit, the optimizer's step count included."""
    undisturbed, disturbed = (build(SETTINGS[optimizer], **options) for _ in range(2))
    # A scaler's growth and backing off is its own; a scale that needs none of it makes them comparable.
    for step in (undisturbed, disturbed):
        step._scaler.load_state_dict({**step._scaler.state_dict(), "scale": 1024.0, "backoff_factor": 1.0})
    for number in range(4):
        if number in (0, 2):
            before = kept(disturbed)
            loss = disturbed(*spoilt(how), RATE)
            assert not loss.isfinite()
            assert not disturbed.gradient_norm.isfinite(), "how the other ranks hear of it"
            after = kept(disturbed)
            assert differing({name: after[name] for name in before}, before) == []
            assert all(not value.any() for name, value in after.items() if name not in before), "new state is zero"
        losses = [step(*batch(number), RATE) for step in (undisturbed, disturbed)]
        assert torch.equal(*losses)
        assert torch.isfinite(losses[0])
        assert differing(kept(undisturbed), kept(disturbed)) == []
    assert not torch.equal(parameters(disturbed), parameters(build(SETTINGS[optimizer])))


def test_an_optimizer_that_is_not_fused_leaves_the_update_out_too() -> None:
    undisturbed, disturbed = (build({}, plain=True) for _ in range(2))
    assert not disturbed._optimizer.defaults["fused"]
    for number in range(3):
        disturbed(*spoilt("nan in targets"), RATE)
        for step in (undisturbed, disturbed):
            step(*batch(number), RATE)
        assert differing(kept(undisturbed), kept(disturbed)) == []


class InfiniteGradient(nn.Module):
    """A loss that is a number, with gradients that are none."""

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs - outputs.detach()).abs().sqrt().sum() + 1.0


def test_gradients_that_are_no_numbers_are_enough_to_leave_the_update_out() -> None:
    step = build(SETTINGS["adam"], loss=InfiniteGradient())
    before = parameters(step)
    loss = step(*batch(), RATE)
    assert float(loss) == 1.0
    assert not step.gradient_norm.isfinite()
    assert torch.equal(parameters(step), before)


@pytest.mark.parametrize("compiler", ["inductor", "torchscript"])
@pytest.mark.parametrize("how", ["nan in targets", "all targets nan", "nan in inputs"])
def test_a_compiled_step_leaves_its_update_out_too(compiler: str, how: str) -> None:
    """inductor by its traced graphs, without the C++ compiler's seconds."""
    torch._dynamo.reset()
    undisturbed, disturbed = (build(SETTINGS["adam"], enable_jit=True, compiler=compiler) for _ in range(2))
    if compiler == "inductor":
        for step in (undisturbed, disturbed):
            step._forward._compiled = torch.compile(step._objective, backend="aot_eager")
    for number in range(2):
        before = kept(disturbed)
        disturbed(*spoilt(how), RATE)
        after = kept(disturbed)
        assert differing({name: after[name] for name in before}, before) == []
        for step in (undisturbed, disturbed):
            step(*batch(number), RATE)
        # TorchScript rounds otherwise once it has seen a few calls.
        torch.testing.assert_close(
            kept(disturbed), kept(undisturbed), **({"rtol": 0, "atol": 0} if compiler == "inductor" else {})
        )
    assert disturbed.compiled


@pytest.fixture
def fused_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """networks/pointwise.py's kernels in Triton's interpreter, on the CPU; the names of those that are launched."""
    language = pytest.importorskip("triton.language")  # imported before, as without the interpreter
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(language, "sum", lambda x, axis: language.reduce(x, axis, language.standard._sum_combine))
    names: list[str] = []
    launch = pointwise._launch
    monkeypatch.setattr(pointwise, "_on_gpu", lambda x: True)
    monkeypatch.setattr(pointwise, "_launch", lambda k, *a, **b: (names.append(k.__name__), launch(k, *a, **b))[1])
    pointwise._kernels.cache_clear()
    yield names
    pointwise._kernels.cache_clear()


@pytest.mark.parametrize("how", SPOILT)
def test_a_step_with_the_fused_loss_leaves_its_update_out_too(fused_kernels: list[str], how: str) -> None:
    """Its gradient is the kernel's own, and must be no number wherever the loss is none."""
    step = build(SETTINGS["adam"], loss=build_loss("l1", fused=True))
    step.network.to(memory_format=torch.channels_last_3d)
    before = parameters(step)
    loss = step(*(part.contiguous(memory_format=torch.channels_last_3d) for part in spoilt(how)), RATE)
    assert "l1_backward" in fused_kernels
    assert not loss.isfinite()
    assert not step.gradient_norm.isfinite()
    assert torch.equal(parameters(step), before)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["all targets nan", "nan in inputs"])
def test_a_step_compiled_to_machine_code_leaves_its_update_out_too(how: str) -> None:
    torch._dynamo.reset()
    step = build(SETTINGS["adam"], enable_jit=True)
    step(*batch(), RATE)
    if not step.compiled:
        pytest.skip("no C++ compiler here")
    before = kept(step)
    step(*spoilt(how), RATE)
    assert differing(kept(step), before) == []
    step(*batch(1), RATE)
    assert len(differing(kept(step), before)) == len(before)


def test_float16_backs_off_by_one_half_and_takes_its_scale_along(tmp_path) -> None:
    """State through a file: the scale, and how many good steps it has seen since."""
    first, second = (build(SETTINGS["adam"], enable_amp=True, precision="float16") for _ in range(2))
    scale = first._scaler.get_scale()
    first(*spoilt("inf in targets"), RATE)
    assert first._scaler.get_scale() == scale / 2
    for number in range(3):
        first(*batch(number), RATE)
    torch.save(first.state(), tmp_path / "state.pt")
    second.load_state(torch.load(tmp_path / "state.pt", weights_only=True))
    assert second._scaler.state_dict() == first._scaler.state_dict()
    assert second._scaler.state_dict()["_growth_tracker"] == 3
    for step in (first, second):
        step(*batch(3), RATE)
        step(*spoilt("nan in inputs"), RATE)
        step(*batch(4), RATE)
    assert second._scaler.state_dict() == first._scaler.state_dict()
    assert torch.equal(parameters(first), parameters(second))


SKIP_CASES: list[dict] = [
    {},
    {"accumulation_steps": 4},  # the bad sample is not in the micro-batch after which gradients are exchanged
    {"static_graph": True},
    {"gradient_compression": "bfloat16"},
    {"enable_amp": True},
    {"enable_amp": True, "precision": "float16"},
]


def skip_on_ranks(world: World) -> list[tuple[list[str], bool, list[str], list[float]]]:
    """Per case, with bad numbers on rank 1 alone: what a bad step changes, whether it is known here, what is different
    in the end from a run without it, and the parameters."""
    answers = []
    for options in SKIP_CASES:
        for how in ("nan in targets", "all targets nan", "-inf in inputs"):
            settings = SETTINGS["sgd, momentum" if options else "adam"]
            undisturbed, disturbed = (build(settings, world, bucket_cap_mb=0.005, **options) for _ in range(2))
            for step in (undisturbed, disturbed):
                step._scaler.load_state_dict({**step._scaler.state_dict(), "scale": 64.0, "backoff_factor": 1.0})
            changed, known = [], True
            for number in range(3):
                before = kept(disturbed)
                disturbed(*(spoilt(how) if world.rank == 1 else batch(50)), RATE)
                known &= not bool(disturbed.gradient_norm.isfinite())
                after = kept(disturbed)
                changed += differing({name: after[name] for name in before}, before)
                for step in (undisturbed, disturbed):
                    step(*batch(10 * world.rank + number), RATE)
            left = differing(kept(undisturbed), kept(disturbed))
            answers.append((changed, known, left, parameters(disturbed).tolist()))
    return answers


def test_a_bad_loss_on_one_rank_leaves_the_update_out_on_all() -> None:
    first, second = run_ranks(skip_on_ranks, 2)
    for index, (one, other) in enumerate(zip(first, second, strict=True)):
        options = SKIP_CASES[index // 3]
        assert one[:3] == other[:3] == ([], True, []), (options, index % 3)
        assert one[3] == other[3], options
        assert all(torch.isfinite(torch.tensor(one[3])))


# --- state -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", STEP_MODES, ids=str)
@pytest.mark.parametrize("optimizer", SETTINGS)
def test_a_step_goes_on_from_its_state_bit_for_bit(optimizer: str, options: dict, tmp_path) -> None:
    first, second = (build(SETTINGS[optimizer], **options) for _ in range(2))
    for number in range(3):
        first(*batch(number), RATE)
    torch.save(first.state(), tmp_path / "state.pt")
    second.load_state(torch.load(tmp_path / "state.pt", weights_only=True))
    for number in range(3, 6):
        first(*batch(number), RATE)
        second.evaluate(*batch(0))
        second.warm_up(*batch(0))
        second(*batch(number), RATE)
    assert differing(kept(first), kept(second)) == []
    assert torch.equal(first.gradient_norm, second.gradient_norm)


def test_what_does_not_fit_is_refused() -> None:
    step, narrow, other = build(SETTINGS["adam"]), build(SETTINGS["adam"]), build(SETTINGS["sgd"])
    state = narrow.state()
    name = next(iter(state["network"]))
    with pytest.raises(ValueError, match=rf"^its {name} has shape \(1,\), this network's has \("):
        step.load_state({**state, "network": {**state["network"], name: torch.zeros(1)}})
    with pytest.raises(ValueError, match=rf"^it has no {name}$"):
        step.load_weights({key: value for key, value in state["network"].items() if key != name})
    with pytest.raises(ValueError, match=r"^this network has no extra$"):
        step.load_weights({**state["network"], "extra": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"^its optimizer is SGD, this training's is Adam"):
        step.load_state(other.state())


def test_weights_alone_leave_the_optimizer_as_it_is() -> None:
    trained, step = build(SETTINGS["adam"]), build(SETTINGS["adam"])
    for number in range(3):
        trained(*batch(number), RATE)
    step.load_weights(trained.network.state_dict())
    assert torch.equal(parameters(step), parameters(trained))
    assert not step._optimizer.state


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("how", SPOILT)
@pytest.mark.parametrize(
    "options", [{}, {"enable_amp": True}, {"accumulation_steps": 2, "clip_grad_norm": 0.1}], ids=str
)
@pytest.mark.parametrize("optimizer", SETTINGS)
def test_on_the_device_an_update_is_left_out_without_waiting(optimizer: str, options: dict, how: str) -> None:
    world = World(Launch("test"), torch.device("cuda", 0))
    network = build_network("unet", 8, width=4, scales=2).cuda()
    built = build_optimizer(Optimizer(**SETTINGS[optimizer]), network.named_parameters(), RATE)
    if not getattr(built, "_step_supports_amp_scaling", False):
        pytest.skip("apex's optimizer waits for the host")
    step = EagerStep(network, build_loss("l1"), built, world, StepOptions(**options))
    good, bad = ([part.cuda() for part in parts] for parts in (batch(), spoilt(how)))
    step(*good, RATE)
    before = kept(step)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(*bad, RATE)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not step.gradient_norm.isfinite()
    assert differing(kept(step), before) == []
    step(*good, RATE)
    assert len(differing(kept(step), before)) == len(before)
