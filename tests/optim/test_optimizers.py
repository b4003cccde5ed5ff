"""Optimizers by name: complete or skipped updates, and state that is loaded under the settings of the present run."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from devices import DEVICES
from torch import nn

from utils.config.sections import OptimizerConfig
from utils.optim.optimizers import OPTIMIZERS, build_optimizer, load_state, saved_state, update

LR = 0.01
SHAPES = [(6, 4, 3, 3, 3), (6,), (), (5, 7), (2, 3)]  # the last one never gets a gradient
YES, NO = torch.tensor(True), torch.tensor(False)

Build = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def by_name(name: str, lr: float = LR, capturable: bool = False, **settings: Any) -> Build:
    options = OptimizerConfig(name=name, **settings)
    return lambda values: build_optimizer(options, {str(n): x for n, x in enumerate(values)}, lr, capturable)


class CountingInGroup(torch.optim.SGD):
    """Like apex's FusedAdam, it counts its steps in the group and does not support `found_inf`."""

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
        super().step()


KINDS: dict[str, Build] = {name: by_name(name) for name in OPTIMIZERS} | {
    "adamw, weight decay": by_name("adamw", weight_decay=0.1),
    "sgd, momentum": by_name("sgd", momentum=0.9),
    "capturable sgd": by_name("sgd", momentum=0.9, capturable=True),
    "capturable lamb": by_name("lamb", weight_decay=0.1, capturable=True),
    "soap, weight decay": by_name("soap", precondition_frequency=1, weight_decay=0.1),
    "capturable soap": by_name("soap", capturable=True),
    "like apex": lambda parameters: CountingInGroup(parameters, lr=LR, momentum=0.9),
}


def start(device: str = "cpu") -> list[nn.Parameter]:
    """Among the values are zeros of both signs and a subnormal number, of which a skipped update keeps the bits."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in SHAPES]
    for value in values[:2]:
        value.flatten()[:3] = torch.tensor([0.0, -0.0, 1e-44])
    return [nn.Parameter(value.to(device)) for value in values]


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def take(optimizer: torch.optim.Optimizer, number: int, finite: torch.Tensor = YES, spoil: float = 0.0) -> None:
    """Makes an update with gradients that depend on `number`."""
    generator = torch.Generator().manual_seed(number)
    for parameter in parameters_of(optimizer):
        if tuple(parameter.shape) != SHAPES[-1]:
            # In the parameter's memory format, as from autograd.
            gradient = torch.randn(parameter.shape, generator=generator) + spoil
            parameter.grad = torch.empty_like(parameter).copy_(gradient)
    update(optimizer, finite.to(parameter.device))


def bits(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """The bits of parameters and state by name; also of NaN and of zeros of both signs."""
    parameters = parameters_of(optimizer)
    tensors: dict[str, Any] = {f"parameter {number}": parameter for number, parameter in enumerate(parameters)}
    for number, parameter in enumerate(parameters):
        tensors |= {f"{key} {number}": value for key, value in optimizer.state.get(parameter, {}).items()}
    copied = {name: value.detach().cpu().numpy().tobytes() for name, value in tensors.items()}
    return {**copied, "steps in the group": optimizer.param_groups[0].get("step", 0)}


def through_a_file(optimizer: torch.optim.Optimizer, tmp_path: Any) -> dict[str, Any]:
    torch.save(saved_state(optimizer), tmp_path / "saved.pt")
    return torch.load(tmp_path / "saved.pt", weights_only=True, map_location="cpu")


@DEVICES
@pytest.mark.parametrize("kind", KINDS)
def test_skipped_updates_and_a_restart_leave_no_trace(kind: str, device: str, tmp_path: Any) -> None:
    """All later updates equal those of a run without them, bit for bit; no gradient, no change."""
    undisturbed, disturbed = KINDS[kind](start(device)), KINDS[kind](start(device))
    for number, spoil in enumerate((float("nan"), float("inf"), 0.0)):
        take(disturbed, 100 + number, NO, spoil)
    for number in range(6):
        for optimizer in (undisturbed, disturbed):
            take(optimizer, number)
        before = bits(disturbed)
        assert before == bits(undisturbed)
        if number in (2, 4):
            take(disturbed, 102 + number, NO, -float("inf") if number == 2 else float("nan"))
            assert bits(disturbed) == before
        if number == 3:
            saved = through_a_file(disturbed, tmp_path)
            copies = [nn.Parameter(parameter.detach().clone()) for parameter in parameters_of(disturbed)]
            disturbed = KINDS[kind](copies)
            load_state(disturbed, saved)
            take(disturbed, 99, NO, float("nan"))
            trained = set(map(id, parameters_of(disturbed)))
            assert set(map(id, disturbed.state)) <= trained, "the state belongs to the trained parameters"
    originals = {tuple(parameter.shape): parameter for parameter in start(device)}
    for parameter in parameters_of(disturbed):
        shape = tuple(parameter.shape)
        assert torch.equal(parameter, originals[shape]) == (shape == SHAPES[-1])


@pytest.mark.parametrize(
    ("name", "kind"), [("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW), ("nadam", torch.optim.NAdam)]
)
@DEVICES
def test_adams_follow_torchs_plain_ones_over_fifty_gradients(name: str, kind: Any, device: str) -> None:
    """With skipped updates in between; NAdam bit for bit, others within a rounding of the parameter in each step."""
    built = by_name(name, weight_decay=0.1)(start(device))
    settings = {} if name == "nadam" else {"foreach": False, "fused": False}
    plain = kind(start(device), lr=LR, weight_decay=0.1, **settings)
    assert built.defaults.get("fused") or name == "nadam"
    for number in range(50):
        if number % 5 == 0:
            take(built, 100 + number, NO, float("nan"))
        for optimizer in (built, plain):
            take(optimizer, number)
    for parameter, expected, first in zip(*map(parameters_of, (built, plain)), start(device), strict=True):
        limit = 0.0 if name == "nadam" else 50 * torch.finfo(parameter.dtype).eps * float(expected.detach().abs().max())
        assert float((parameter - expected).detach().abs().max()) <= limit
        assert parameter.grad is None or float((parameter - first).detach().abs().max()) > 5 * LR


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("capturable", [False, True])
def test_loading_keeps_the_settings_of_the_present_run(name: str, capturable: bool, tmp_path: Any) -> None:
    """And takes the state of the saved run, also if one learning rate is a tensor and the other a number."""
    old = by_name(name, 0.5, not capturable, weight_decay=0.1, betas=[0.8, 0.9], momentum=0.5)(start())
    new = by_name(name, 0.25, capturable, weight_decay=0.3, betas=[0.7, 0.6], momentum=0.9)(start())
    take(old, 0)
    settings = copy.deepcopy(new.state_dict()["param_groups"])
    load_state(new, through_a_file(old, tmp_path))
    settings[0] |= {"steps": 1} if name == "soap" else {}
    assert new.state_dict()["param_groups"] == settings
    for group in new.param_groups:
        assert isinstance(group["lr"], torch.Tensor) is capturable
        assert float(group["lr"]) == 0.25
    states = [{k: v for k, v in bits(optimizer).items() if not k.startswith("param")} for optimizer in (old, new)]
    assert states[0] == states[1]
    take(new, 1)


@pytest.mark.parametrize("kind", ["adam", "sgd, momentum", "nadam", "lamb"])
def test_the_state_has_the_memory_format_of_its_parameter(kind: str, tmp_path: Any) -> None:
    """Fused kernels walk both in memory order: with different orders, elements would get the state of others."""
    first, second = (
        KINDS[kind]([nn.Parameter(start()[0].detach().clone(memory_format=form)), start()[3]])
        for form in (torch.contiguous_format, torch.channels_last_3d)
    )
    for number in range(2):
        take(first, number)
    with torch.no_grad():
        for source, target in zip(*map(parameters_of, (first, second)), strict=True):
            target.copy_(source)
    load_state(second, through_a_file(first, tmp_path))
    parameter, _ = parameters_of(second)
    averages = [value for value in second.state[parameter].values() if value.shape == parameter.shape]
    assert len(averages) == (1 if kind == "sgd, momentum" else 2)
    assert all(value.stride() == parameter.stride() for value in averages)


def test_a_new_momentum_starts_from_zero_also_after_a_skipped_first_update(tmp_path: Any) -> None:
    """The saved run had no momentum, hence no state: the present run keeps its own."""
    old, new, fresh = by_name("sgd")(start()), KINDS["sgd, momentum"](start()), KINDS["sgd, momentum"](start())
    take(old, 0)
    load_state(new, through_a_file(old, tmp_path))
    assert all("momentum_buffer" in new.state[parameter] for parameter in parameters_of(new))
    take(new, 1, NO, float("nan"))
    for optimizer in (new, fresh):
        take(optimizer, 2)
    assert bits(new) == bits(fresh)
