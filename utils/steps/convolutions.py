"""The choice of own kernels or cuDNN for each strided convolution of a network (`convolutions`), before it runs."""

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from networks import strided
from utils.config import Config
from utils.data.loaders.base import meta_batch
from utils.errors import UserError
from utils.steps import own_network

OWN = "own kernels"
Plan = Mapping[str, str]  # for each layer what computes it, and in parentheses why it is not own kernels


def select(network: nn.Module, convolutions: str) -> None:
    for layer in _strided(network).values():
        layer.convolutions = convolutions


def plan(config: Config, network: nn.Module, device: torch.device) -> Plan:
    """The strided layers in their order on `device`. `network`: the config's, without values (build.py).

    Without entries for a network of a user that fails without values: it is reported when it is called.
    """
    layers, kinds = _strided(network), dict[str, str]()
    shapes = _shapes(config, network, layers) if layers else {}
    select(network, config.convolutions)
    library, dtype = "cuDNN" if device.type == "cuda" else "PyTorch", getattr(torch, config.precision)
    switches = {
        "convolutions is cudnn": config.convolutions == "cudnn",
        "enable_amp is false": not config.enable_amp,
        "channels_last is false": not config.channels_last,
    }
    general = strided.unavailable(device) or next((reason for reason, is_off in switches.items() if is_off), "")
    for name, shape in shapes.items():
        reason = general or layers[name].obstacle(shape, dtype, device)
        kinds[name] = f"{library} ({reason})" if reason else OWN
    return kinds


def _shapes(config: Config, network: nn.Module, layers: Mapping[str, Any]) -> dict[str, torch.Size]:
    """The shapes of the layers' inputs for one sample, in the order of the forward pass."""
    shapes = dict[str, torch.Size]()

    def note(name: str, _: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        shapes.setdefault(name, inputs[0].shape)

    select(network, "auto")
    for name, layer in layers.items():
        layer.register_forward_pre_hook(functools.partial(note, name))  # stays: the network is used for this alone
    try:
        with torch.no_grad():
            network.eval()(*meta_batch(config, 1).network_inputs)
    except Exception:
        if not own_network.is_checked(config):
            raise
    return shapes


def check(config: Config, network: nn.Module, device: torch.device) -> None:
    """Raises UserError if own kernels cannot compute a layer, or there is none; arguments as in `plan`."""
    if not _strided(network):
        raise UserError(
            f"convolutions is own, but {config.network.name} has no layers for own kernels; set convolutions=auto"
        )
    for name, what in plan(config, network, device).items():
        if not what.startswith(OWN):
            raise UserError(
                f"convolutions is own, but own kernels cannot compute {name}: {what.partition(' (')[2][:-1]}; set "
                "convolutions=auto"
            )


def changes(before: Plan, now: Plan) -> list[str]:
    """A line if two plans differ, except in reasons."""
    known = {name: [plan[name].split(" (")[0] for plan in (before, now)] for name in now if name in before}
    differ = {name: f"{old} before, by {new} now" for name, (old, new) in known.items() if old != new}
    what = "Other kernels compute convolutions than before, so results differ within rounding"
    return [f"{what}: {describe(differ)}"] if differ else []


def _strided(network: nn.Module) -> dict[str, Any]:
    return {name: module for name, module in network.named_modules() if hasattr(module, "plans_own")}


def describe(layers: Plan) -> str:
    """The layers by what computes them; empty if there are none."""
    groups = dict[str, list[str]]()
    for name, text in layers.items():
        groups.setdefault(text, []).append(name)
    return "; ".join(f"{', '.join(names)} by {text}" for text, names in groups.items())
