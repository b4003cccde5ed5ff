"""The weights that a training is judged by and leaves: those that it trains, or their running mean (`ema_decay`).

After each update the mean moves a part of its way towards the new weights. It lags behind them, but the noise that
single batches bring in has cancelled out (Polyak & Juditsky 1992; Izmailov et al. 2018, arXiv:1803.05407).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

AVERAGE = "average"  # the key in a step's state


class NullEMA:
    """The weights as they are trained."""

    def __init__(self, network: nn.Module) -> None:
        self.network = network

    def restart(self) -> None:
        """From the weights as they are now."""

    def update(self, made: torch.Tensor) -> None:
        """After each step; `made`, a truth value on the device, says whether its update was made."""

    def state(self) -> dict[str, Any]:
        """What there is to keep beside the weights of `network`, by the tensors themselves."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state that has "network" and what `state` gave, unless it was made without an average."""


class EMA(NullEMA):
    """`network` is a copy of the trained one, with the running mean of its parameters, and its own running statistics.

    The t-th update, counted from 0, keeps min(decay, (1 + t) / (10 + t)) of the mean, so that the first weights are
    soon forgotten (TensorFlow's ExponentialMovingAverage does so, too). All of it is decided on the device.
    """

    def __init__(self, network: nn.Module, decay: float) -> None:
        # Buffers are shared with the trained network, not copied: the running statistics are those of its last step.
        super().__init__(copy.deepcopy(network, {id(buffer): buffer for buffer in network.buffers()}))
        self.network.requires_grad_(False)
        self._trained = dict(network.named_parameters())
        self._decay = decay
        self._updates = torch.zeros((), device=next(network.parameters()).device)

    @torch.no_grad()
    def restart(self) -> None:
        self._updates.zero_()
        for mean, trained in zip(self.network.parameters(), self._trained.values(), strict=True):
            mean.copy_(trained)

    @torch.no_grad()
    def update(self, made: torch.Tensor) -> None:
        kept = ((1 + self._updates) / (10 + self._updates)).clamp(max=self._decay)
        part = (1 - kept) * made
        for mean, trained in zip(self.network.parameters(), self._trained.values(), strict=True):
            mean.lerp_(trained, part)
        self._updates += made

    def state(self) -> dict[str, Any]:
        trained = {name: parameter.detach() for name, parameter in self._trained.items()}
        return {AVERAGE: {"trained": trained, "updates": self._updates}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        if AVERAGE in state:
            self.network.load_state_dict(state["network"])
            self._updates.copy_(state[AVERAGE]["updates"])


def trained_weights(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Those that training goes on with, of a step's state, with or without an average."""
    return {**state["network"], **state.get(AVERAGE, {"trained": {}})["trained"]}
