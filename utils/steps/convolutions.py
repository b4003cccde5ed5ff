"""Which layers own kernels compute, and which ones cuDNN (`convolutions`), before a network runs."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from utils.config import Config
from utils.data.loaders.base import meta_batch
from utils.errors import UserError
from utils.steps import own_network


class Layer(NamedTuple):
    """What computes each pass of a layer, "own" or "cuDNN", and why own kernels cannot; empty if they can."""

    backends: Mapping[str, str]
    obstacle: str


def select(network: nn.Module, convolutions: str) -> None:
    """Sets what computes the strided convolutions of a network."""
    for layer in _strided(network).values():
        layer.convolutions = convolutions


def plan(config: Config, network: nn.Module, device: torch.device) -> dict[str, Layer]:
    """The strided layers in their order on `device`. `network`: the config's, without values (build.py).

    Without entries for a network of a user that fails without values: it is reported when it is called.
    """
    layers, found = _strided(network), dict[str, Layer]()
    shapes = _shapes(config, network, layers) if layers else {}
    select(network, config.convolutions)
    mixed = config.enable_amp and config.channels_last
    dtype, switch = getattr(torch, config.precision) if mixed else None, _switch(config)
    for name, shape in shapes.items():
        layer = layers[name]
        found[name] = Layer(layer.backends(shape, dtype, device), switch or layer.obstacle(shape, dtype, device))
    return found


def _shapes(config: Config, network: nn.Module, layers: Mapping[str, Any]) -> dict[str, torch.Size]:
    """The shapes of the layers' inputs for one sample, in the order of the forward pass."""
    shapes = dict[str, torch.Size]()

    def note(name: str, _: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        shapes.setdefault(name, inputs[0].shape)

    select(network, "auto")
    inputs, _, *conditions = meta_batch(config, 1)
    with contextlib.ExitStack() as hooks:
        for name, layer in layers.items():
            hooks.callback(layer.register_forward_pre_hook(functools.partial(note, name)).remove)
        try:
            with torch.no_grad():
                network.eval()(inputs, *conditions)
        except Exception:
            if not own_network.is_checked(config):
                raise
    return shapes


def check(config: Config, network: nn.Module, device: torch.device) -> None:
    """Raises UserError if own kernels are required, but cannot compute a layer; arguments as in `plan`."""
    window = config.evaluation.window if config.evaluation.every_epochs else None
    for side in dict.fromkeys((config.data_size, window or config.data_size)):
        for name, layer in plan(config.model_copy(update={"data_size": side}), network, device).items():
            if layer.obstacle:
                where = f" in windows of {side}³ cells" if side != config.data_size else ""
                raise UserError(
                    f"convolutions is own, but own kernels cannot compute {name}{where}: {layer.obstacle}; set "
                    f"convolutions=auto"
                )


def any_own(layers: Mapping[str, Layer]) -> bool:
    """True if own kernels compute a pass of a layer."""
    return any("own" in layer.backends.values() for layer in layers.values())


def compact(layers: Mapping[str, Layer], device: torch.device) -> dict[str, str]:
    """The plan for a record: "own" or "cuDNN" for each layer, with the passes if they differ. On a CPU "PyTorch"."""
    if device.type != "cuda":
        return dict.fromkeys(layers, "PyTorch")
    return {name: _summary(layer) for name, layer in layers.items()}


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """A line if two records of layers differ."""
    differ = [name for name in now if before.get(name, now[name]) != now[name]]
    groups = [
        f"{_names(names)} {earlier} before, {current} now"
        for (earlier, current), names in _grouped(differ, lambda name: (before[name], now[name])).items()
    ]
    what = "Convolutions are computed by others than in the run that resumes, so results differ within rounding"
    return [f"{what}: {'; '.join(groups)}"] if groups else []


def describe(layers: Mapping[str, Layer]) -> list[str]:
    """Lines for the log about the plan on a GPU."""
    own = [name for name, layer in layers.items() if "own" in layer.backends.values()]
    rest = [name for name, layer in layers.items() if name not in own]
    mixed = [name for name in own if len({*layers[name].backends.values()}) > 1]
    parts = [f"own kernels in {_names(own)}"] if own else []
    for passes, names in _grouped(mixed, lambda name: _by_cudnn(layers[name])).items():
        parts.append(f"cuDNN for the {passes} of {_names(names)}: it is faster")
    for reason, names in _grouped(rest, lambda name: layers[name].obstacle or "it is faster").items():
        parts.append(f"cuDNN in {_names(names)}: {reason}")
    return [f"Convolutions: {'; '.join(parts)}"] if parts else []


def _strided(network: nn.Module) -> dict[str, Any]:
    return {name: module for name, module in network.named_modules() if hasattr(module, "backends")}


def _switch(config: Config) -> str:
    """The key that turns own kernels off; empty if none does."""
    switches = {
        "convolutions is cudnn": config.convolutions == "cudnn",
        "enable_amp is false": not config.enable_amp,
        "channels_last is false": not config.channels_last,
    }
    return next((reason for reason, is_off in switches.items() if is_off), "")


def _by_cudnn(layer: Layer) -> str:
    return " and ".join(name for name, backend in layer.backends.items() if backend == "cuDNN")


def _summary(layer: Layer) -> str:
    backends = {*layer.backends.values()}
    return backends.pop() if len(backends) == 1 else f"own, but cuDNN for the {_by_cudnn(layer)}"


def _grouped(names: Iterable[str], key: Any) -> dict[Any, list[str]]:
    groups = dict[Any, list[str]]()
    for name in names:
        groups.setdefault(key(name), []).append(name)
    return groups


def _names(names: Iterable[str]) -> str:
    """Names in a list, with "down1 to down6" for consecutive numbers."""
    runs: list[list[tuple[str, int]]] = []
    for name in names:
        stem, digits = re.findall(r"^(.*?)(\d*)$", name)[0]
        number = int(digits or -1)
        last = runs[-1] if runs else []
        step = number - last[-1][1] if last and digits and last[-1][0] == stem else 0
        if abs(step) == 1 and last[-1][1] >= 0 and (len(last) == 1 or last[-1][1] - last[-2][1] == step):
            last.append((stem, number))
        else:
            runs.append([(stem, number)])
    written = ([f"{stem}{number if number >= 0 else ''}" for stem, number in run] for run in runs)
    ranges = ([f"{run[0]} to {run[-1]}"] if len(run) > 2 else run for run in written)
    return ", ".join(itertools.chain(*ranges))
