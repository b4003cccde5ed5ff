"""The choice of the operation that computes each layer of a network, and the loss, made before the first step.

A layer is a module with `halvings`, as those of networks/layers.py. The choice depends on its channels, the side of the
grid, precision and device, and on the key `kernels`: auto, the fastest; cudnn, what GPUs before Hopper get; torch.
"""

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from networks.ops import CUDNN, HOPPER, TORCH
from networks.ops.blocks import has_few_channels
from networks.ops.hopper import tiles

LAST = "last"  # the operation of a loss that the last layer computes
LOSS = "loss"  # the entry of the loss in a plan
OLDEST_TRITON = (3, 5)  # that compiles Hopper's kernels
fault = ""  # of Hopper's kernels in a trial: later plans of this process do without them


class Setting(NamedTuple):
    """All that a choice depends on, in addition to the network and the loss."""

    kernels: str  # the key: auto, cudnn or torch
    side: int  # of the network's input, a cube
    dtype: torch.dtype  # in which autocast computes convolutions
    device: torch.device
    obstacle: str = ""  # why PyTorch computes everything


class Choice(NamedTuple):
    """The operation of a layer or the loss, and the reason if it is not the fastest."""

    operation: str
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.operation} ({self.reason})" if self.reason else self.operation


Plan = Mapping[str, Choice]


def make(network: nn.Module, setting: Setting, loss: Any = None) -> dict[str, Choice]:
    """The choice for each layer by its name, in the order of the modules, and for the loss if there is one."""
    layers = layers_of(network)
    loss = loss if layers and hasattr(loss, "no_kernel") else None
    if general := needs_no_kernels(setting):
        return {name: Choice(TORCH, general) for name in [*layers, *([LOSS] if loss else [])]}
    hopper = "kernels is cudnn" if setting.kernels == CUDNN else fault or not_hopper(setting.device)
    plan = {name: _of_layer(layer, setting, hopper) for name, layer in layers.items()}
    if loss is not None:
        plan[LOSS] = _of_loss(network, loss, plan, setting)
    return plan


def layers_of(network: nn.Module) -> dict[str, Any]:
    return {name: module for name, module in network.named_modules() if hasattr(module, "halvings")}


def apply(network: nn.Module, plan: Plan, dtype: torch.dtype, loss: Any = None) -> None:
    """Gives each layer, and the loss, the operation that the plan has chosen for it."""
    layers = layers_of(network)
    names = [*layers]
    for name, layer in layers.items():
        layer.operation, layer.dtype = plan[name].operation, dtype
        # Hopper's kernels read the last layer's input with pads.
        layer.pads = name in names[-2:-1] and plan[names[-1]].operation == HOPPER
    if loss is not None and LOSS in plan:
        loss.operation = plan[LOSS].operation


def halves(layers: Sequence[Any]) -> dict[Any, Tensor]:
    """The weights, in half precision, of those layers that Hopper's kernels compute, by one operation.

    An optimizer may update a weight's `half_copy` with the weight, and then sets its `half_version`.
    """
    chosen = [layer for layer in layers if layer.operation == HOPPER]
    kept = {layer: layer.weight.half_copy for layer in chosen if _has_half(layer)}
    stale = [layer for layer in chosen if layer not in kept]
    form = torch.channels_last_3d
    copies = [torch.empty_like(layer.weight, dtype=layer.dtype, memory_format=form) for layer in stale]
    if copies:
        torch._foreach_copy_(copies, [layer.weight.detach() for layer in stale])
    for layer, copy in zip(stale, copies, strict=True):
        kept[layer] = copy
        if torch.is_grad_enabled():
            layer.weight.half_copy = copy
    return kept


def _has_half(layer: Any) -> bool:
    """True if the optimizer has updated the weight and its copy in half precision, and nobody the weight since."""
    weight = layer.weight
    return getattr(weight, "half_version", None) == weight._version and weight.half_copy.dtype == layer.dtype


def not_hopper(device: torch.device) -> str:
    """Why Hopper's kernels cannot run; empty if they can. Without a GPU to ask, only Triton counts."""
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(device)
        # Descriptors need compute capability 9. Gaming GPUs above it have less shared memory.
        if properties.major < 9 or getattr(properties, "shared_memory_per_block_optin", 0) < tiles.SHARED_MEMORY:
            return f"{properties.name} is not a Hopper GPU or a later one for data centers"
    # Triton 3.4, that of PyTorch 2.8, cannot compile a kernel that calls itself.
    version = importlib.import_module("triton").__version__
    is_old = tuple(int(part) for part in version.split(".")[:2]) < OLDEST_TRITON
    return f"Triton {version} is older than {'.'.join(map(str, OLDEST_TRITON))}" if is_old else ""


def describe(plan: Mapping[str, Any]) -> str:
    """The layers by what computes them; empty if there are none."""
    groups = dict[str, list[str]]()
    for name, choice in plan.items():
        groups.setdefault(str(choice), []).append(name)
    return "; ".join(f"{', '.join(names)} by {text}" for text, names in groups.items())


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """A line if two plans, as texts, differ, except in reasons."""
    known = {name: [plan[name].split(" (")[0] for plan in (before, now)] for name in now if name in before}
    differ = {name: f"{old} before, {new} now" for name, (old, new) in known.items() if old != new}
    text = "; ".join(f"{name}: {kinds}" for name, kinds in differ.items())
    return [f"Other kernels compute layers than before, so results differ within rounding: {text}"] if differ else []


def needs_no_kernels(setting: Setting) -> str:
    """Why PyTorch computes all layers; empty if Triton kernels may."""
    reasons: Iterable[tuple[str, bool]] = (
        ("there is no CUDA device", setting.device.type != "cuda"),
        ("kernels is torch", setting.kernels == TORCH),
        (setting.obstacle, bool(setting.obstacle)),
        ("Triton is not installed", importlib.util.find_spec("triton") is None),
    )
    return next((reason for reason, holds in reasons if holds), "")


def _of_layer(layer: Any, setting: Setting, not_hopper: str) -> Choice:
    if layer.halvings is None:
        return Choice(TORCH, "its grid is not stated: give halvings")
    if layer.norm:
        return Choice(TORCH, "a norm follows")
    reason = not_hopper or _hopper_obstacle(layer, setting)
    return Choice(CUDNN, reason) if reason else Choice(HOPPER)


def _hopper_obstacle(layer: Any, setting: Setting) -> str:
    """Why Hopper's kernels cannot compute the layer; empty if they can."""
    coarse, fine = layer.weight.shape[:2]
    fine_side = setting.side >> layer.halvings
    side, block = fine_side // 2, tiles.BLOCK
    if setting.dtype not in (torch.float16, torch.bfloat16):
        return "the precision is not float16 or bfloat16"
    if fine_side % 2 or not side:
        return f"a side of {fine_side} cells is not even"
    if has_few_channels(layer.weight) and layer.has_edge_kernels:
        if coarse % block:
            return f"{coarse} channels are not a multiple of {block}"
        return "" if fine_side**3 * fine < tiles.MOST_ELEMENTS else f"a grid of {fine_side}³ cells is too large"
    if coarse % block or fine % block:
        return f"{coarse} and {fine} channels are not both multiples of {block}"
    if side > tiles.LARGEST_SIDE or side & (side - 1):
        return f"a side of {side} cells is not a power of two up to {tiles.LARGEST_SIDE}"
    return ""


def _of_loss(network: nn.Module, loss: Any, plan: Plan, setting: Setting) -> Choice:
    # A subclass may compute something else after the last layer.
    is_unet = "l1" in vars(type(network)) and plan.get("last", Choice(TORCH)).operation != TORCH
    precision = "" if setting.dtype == torch.bfloat16 else "the last layer computes it in bfloat16 only"
    reason = loss.no_kernel or ("" if is_unet else "the network's last layer has no kernel for it") or precision
    return Choice(TORCH, reason) if reason else Choice(LAST)
