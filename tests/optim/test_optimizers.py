"""Optimizers by name: complete or skipped updates, and state that is loaded under the settings of the present run."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from devices import DEVICES
from torch import nn

from utils.config.sections import OptimizerConfig
from utils.optim.optimizers import OPTIMIZERS, build_optimizer, load_state, saved_state, update

LR = 0.01
SHAPES = [(6, 4, 3, 3, 3), (6,), (), (5, 7)]
YES, NO = torch.tensor(True), torch.tensor(False)

Build = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def by_name(name: str, lr: float = LR, capturable: bool = False, **settings) -> Build:
    options = OptimizerConfig(name=name, **settings)
    return lambda parameters: build_optimizer(options, named(parameters), lr, capturable)


def named(parameters: list[nn.Parameter]) -> list[tuple[str, nn.Parameter]]:
    return [(str(number), parameter) for number, parameter in enumerate(parameters)]


class ApexAdam(torch.optim.Optimizer):
    """Like apex's FusedAdam, it counts its steps in the group and does not support `found_inf`."""

    def __init__(self, parameters: list[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.99)})

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                mean = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
                mean.lerp_(parameter.grad, 1 - group["betas"][0])
                parameter.data.sub_(mean / (1 - group["betas"][0] ** group["step"]), alpha=group["lr"])


KINDS: dict[str, Build] = {name: by_name(name) for name in OPTIMIZERS} | {
    "adamw, weight decay": by_name("adamw", weight_decay=0.1),
    "sgd, momentum": by_name("sgd", momentum=0.9),
    "capturable sgd": by_name("sgd", momentum=0.9, capturable=True),
    "lamb, weight decay": by_name("lamb", weight_decay=0.1),
    "capturable lamb": by_name("lamb", weight_decay=0.1, capturable=True),
    "soap, weight decay": by_name("soap", precondition_frequency=1, merge_dims="none", weight_decay=0.1),
    "capturable soap": by_name("soap", precondition_frequency=2, merge_dims="rest", capturable=True),
    "like apex": lambda parameters: ApexAdam(parameters, LR),
    "plain sgd": lambda parameters: torch.optim.SGD(parameters, lr=LR, momentum=0.9, foreach=False),
}


def start(device: str = "cpu") -> list[nn.Parameter]:
    """Among the values are zeros of both signs and a subnormal number, of which a skipped update keeps the bits."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in SHAPES]
    for value in (values[0], values[1]):
        value.flatten()[:3] = torch.tensor([0.0, -0.0, 1e-44])
    return [nn.Parameter(value.to(device)) for value in values]


def take(optimizer: torch.optim.Optimizer, number: int, finite: torch.Tensor = YES, spoil: float = 0.0) -> None:
    """Makes an update with gradients that depend on `number`."""
    generator = torch.Generator().manual_seed(number)
    for parameter in optimizer_parameters(optimizer):
        # In the parameter's memory format, as from autograd.
        parameter.grad = torch.empty_like(parameter).copy_(torch.randn(parameter.shape, generator=generator) + spoil)
    update(optimizer, finite.to(parameter.device))


def everything(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """Copies of parameters and state by name."""
    parameters = optimizer_parameters(optimizer)
    found: dict[str, object] = {f"parameter {n}": parameter.detach().clone() for n, parameter in enumerate(parameters)}
    for n, parameter in enumerate(parameters):
        found |= {f"{key} {n}": copy.deepcopy(value) for key, value in optimizer.state.get(parameter, {}).items()}
    return {**found, "steps in the group": optimizer.param_groups[0].get("step", 0)}


def differing(first: dict[str, object], second: dict[str, object]) -> list[str]:
    """Names of entries with different bits; NaN equals NaN."""
    assert first.keys() == second.keys()
    return [
        name
        for name, value in first.items()
        if (value.cpu().numpy().tobytes() if isinstance(value, torch.Tensor) else value)
        != (other.cpu().numpy().tobytes() if isinstance(other := second[name], torch.Tensor) else other)
    ]


# --- skipped updates -------------------------------------------------------------------------------------------------


@DEVICES
@pytest.mark.parametrize("kind", KINDS)
def test_a_skipped_update_leaves_no_trace(kind: str, device: str) -> None:
    """The first, a later one, or several in a row: all later updates equal those of a run without it, bit for bit."""
    parameters = start(device)
    undisturbed, disturbed = KINDS[kind](start(device)), KINDS[kind](parameters)
    for number, spoil in enumerate((float("nan"), float("inf"), 0.0)):
        take(disturbed, 100 + number, NO, spoil)
    for number in range(6):
        for optimizer in (undisturbed, disturbed):
            take(optimizer, number)
        before = everything(disturbed)
        assert differing(before, everything(undisturbed)) == []
        if number in (2, 4):
            take(disturbed, 102 + number, NO, -float("inf") if number == 2 else float("nan"))
            assert differing(everything(disturbed), before) == []
    assert not any(torch.equal(*pair) for pair in zip(parameters, start(device), strict=True)), "all have moved"


def optimizer_parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "like apex"])
def test_a_parameter_without_a_gradient_is_unchanged(kind: str) -> None:
    parameters = start()
    optimizer = KINDS[kind](parameters)
    for _ in range(2):  # SOAP's first update only starts its statistics
        parameters[0].grad = torch.ones_like(parameters[0])
        update(optimizer, YES)
    moved = [not torch.equal(*pair) for pair in zip(parameters, start(), strict=True)]
    assert moved[0]
    assert not any(moved[1:])


# --- by name ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adam", "adamw"])
@DEVICES
def test_fused_adams_follow_plain_adam_over_fifty_gradients(name: str, device: str) -> None:
    kind, settings = torch.optim.AdamW if name == "adamw" else torch.optim.Adam, {"weight_decay": 0.1}
    fused = by_name(name, **settings)(start(device))
    plain = kind(start(device), lr=LR, foreach=False, fused=False, **settings)
    assert fused.defaults["fused"]
    for number in range(50):
        for optimizer in (fused, plain):
            take(optimizer, number)
    for one, other, first in zip(*map(optimizer_parameters, (fused, plain)), start(device), strict=True):
        assert float((one - other).detach().abs().max()) <= 1e-6
        assert float((one - first).detach().abs().max()) > 5 * LR


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@DEVICES
def test_nadam_equals_torchs(device: str, weight_decay: float) -> None:
    """Bit for bit, with skipped updates in between."""
    own = by_name("nadam", weight_decay=weight_decay)(start(device))
    torchs = torch.optim.NAdam(start(device), lr=LR, weight_decay=weight_decay, capturable=device == "cuda")
    for number in range(20):
        if number % 5 == 0:
            take(own, 100 + number, NO, float("nan"))
        for optimizer in (own, torchs):
            take(optimizer, number)
        assert differing(everything(own), everything(torchs)) == []


# --- saved and loaded ------------------------------------------------------------------------------------------------


def through_a_file(saved: dict, tmp_path) -> dict:
    torch.save(saved, tmp_path / "saved.pt")
    return torch.load(tmp_path / "saved.pt", weights_only=True, map_location="cpu")


@pytest.mark.parametrize("kind", KINDS)
def test_a_loaded_optimizer_continues_bit_for_bit(kind: str, tmp_path) -> None:
    first = KINDS[kind](start())
    for number in range(3):
        take(first, number)
        take(first, 100 + number, NO, float("nan"))
    second = KINDS[kind]([nn.Parameter(parameter.detach().clone()) for parameter in optimizer_parameters(first)])
    load_state(second, through_a_file(saved_state(first), tmp_path))
    take(second, 99, NO, float("nan"))
    assert differing(everything(first), everything(second)) == []
    for number in range(3, 6):
        for optimizer in (first, second):
            take(optimizer, number)
    take(second, 100, NO, float("nan"))
    assert differing(everything(first), everything(second)) == []
    own = set(map(id, optimizer_parameters(second)))
    assert set(map(id, second.state)) <= own, "the state belongs to the trained parameters"


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("capturable", [False, True])
def test_loading_keeps_the_settings_of_the_present_run(name: str, capturable: bool, tmp_path) -> None:
    """And takes the state of the saved run, also if one learning rate is a tensor and the other a number."""
    old = by_name(name, 0.5, not capturable, weight_decay=0.1, betas=[0.8, 0.9], momentum=0.5)(start())
    new = by_name(name, 0.25, capturable, weight_decay=0.3, betas=[0.7, 0.6], momentum=0.9)(start())
    take(old, 0)
    settings = copy.deepcopy([{k: v for k, v in group.items() if k != "params"} for group in new.param_groups])
    load_state(new, through_a_file(saved_state(old), tmp_path))
    assert [{k: v for k, v in group.items() if k != "params"} for group in new.param_groups] == settings
    for group in new.param_groups:
        assert isinstance(group["lr"], torch.Tensor) is capturable
        assert float(group["lr"]) == 0.25
    states = [{k: v for k, v in everything(o).items() if not k.startswith("param")} for o in (old, new)]
    assert differing(*states) == []
    take(new, 1)


def test_a_state_of_another_kind_or_of_other_parameters_is_refused() -> None:
    optimizer = KINDS["adamw"](start())
    with pytest.raises(ValueError, match=r"^its optimizer is Adam, this run's is AdamW$"):
        load_state(optimizer, saved_state(KINDS["adam"](start())))
    with pytest.raises(ValueError, match="size of optimizer's group"):
        load_state(optimizer, saved_state(KINDS["adamw"](start()[:2])))


@pytest.mark.parametrize("kind", ["adam", "adamw", "sgd, momentum", "nadam", "lamb"])
def test_the_state_has_the_memory_format_of_its_parameter(kind: str, tmp_path) -> None:
    """Fused kernels walk both in memory order: with different orders, elements would get the state of others."""
    first, second = (
        KINDS[kind]([nn.Parameter(start()[0].detach().clone(memory_format=form)), start()[3]])
        for form in (torch.contiguous_format, torch.channels_last_3d)
    )
    for number in range(2):
        take(first, number)
    with torch.no_grad():
        for one, other in zip(*map(optimizer_parameters, (first, second)), strict=True):
            other.copy_(one)
    load_state(second, through_a_file(saved_state(first), tmp_path))
    parameter, _ = optimizer_parameters(second)
    averages = [value for value in second.state[parameter].values() if value.shape == parameter.shape]
    assert len(averages) == (1 if kind == "sgd, momentum" else 2)
    assert all(value.stride() == parameter.stride() for value in averages)
    for optimizer in (first, second):
        take(optimizer, 2)
    # LAMB's norms are sums in memory order.
    tolerance = {"rtol": 1e-6, "atol": 1e-7} if kind == "lamb" else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(*(optimizer_parameters(optimizer)[0] for optimizer in (first, second)), **tolerance)


def test_a_new_momentum_starts_from_zero_also_after_a_skipped_first_update(tmp_path) -> None:
    """The saved run had no momentum, hence no state: the present run keeps its own."""
    old, new, fresh = by_name("sgd")(start()), KINDS["sgd, momentum"](start()), KINDS["sgd, momentum"](start())
    take(old, 0)
    load_state(new, through_a_file(saved_state(old), tmp_path))
    assert all("momentum_buffer" in new.state[parameter] for parameter in optimizer_parameters(new))
    take(new, 1, NO, float("nan"))
    for optimizer in (new, fresh):
        take(optimizer, 2)
    assert differing(everything(new), everything(fresh)) == []
