"""Networks and losses; torch, and triton if there, is all they know. A new one is a module and a line in a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from networks.losses import L1Loss
from networks.unet import UNet, initialise

NETWORKS: dict[str, Callable[..., nn.Module]] = {"unet": UNet}
LOSSES: dict[str, Callable[..., nn.Module]] = {"l1": L1Loss}

__all__ = ["LOSSES", "NETWORKS", "build_loss", "build_network", "initialise"]


def build_network(name: str, crop: int, **options: Any) -> nn.Module:
    """The network `name` for crops of `crop` cells a side; ValueError where they do not fit."""
    network = _choose(NETWORKS, "network", name)(**options)
    multiple = getattr(network, "downsampling", 1)
    if not isinstance(multiple, int) or crop % multiple:
        raise ValueError(f"data_size {crop} is not a multiple of {multiple}, by which the network divides the grid")
    return network


def build_loss(name: str, **options: Any) -> nn.Module:
    """The loss `name`."""
    return _choose(LOSSES, "loss", name)(**options)


def _choose(table: Mapping[str, Callable[..., nn.Module]], kind: str, name: str) -> Callable[..., nn.Module]:
    if name not in table:
        raise ValueError(f"unknown {kind} {name}; known: {', '.join(table)}")
    return table[name]
