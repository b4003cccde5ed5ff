"""Exponential moving average of the weights (`ema_decay`), which is evaluated and saved in place of the last weights.

The average lags behind the trained weights, but the noise of single batches cancels out in it (Polyak & Juditsky 1992;
Izmailov et al. 2018, arXiv:1803.05407).
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

AVERAGE = "average"  # key in a step's state


class EMA:
    """`network` is a copy of the trained one: its parameters are averages, its running statistics are shared.

    The t-th update, counted from 0, keeps min(decay, (1 + t) / (10 + t)) of the average, so that the first weights are
    soon forgotten, as in TensorFlow's ExponentialMovingAverage. Everything is decided on the device.
    """

    def __init__(self, network: nn.Module, decay: float) -> None:
        # Buffers are shared with the trained network, not copied: the running statistics are those of its last step.
        self.network = copy.deepcopy(network, {id(buffer): buffer for buffer in network.buffers()})
        self.network.requires_grad_(False)
        self._network, self._trained = network, dict(network.named_parameters())  # in the order of the averages
        self._means: list[torch.Tensor] = list(self.network.parameters())
        self._decay = decay
        self._updates = torch.zeros((), device=next(network.parameters()).device)

    @torch.no_grad()
    def restart(self) -> None:
        self._updates.zero_()
        torch._foreach_copy_(self._means, list(self._trained.values()))

    @torch.no_grad()
    def update(self, updated: torch.Tensor) -> None:
        """Follows a training step; `updated`, a boolean on the device, is False if the step skipped its update."""
        kept = ((1 + self._updates) / (10 + self._updates)).clamp(max=self._decay)
        weight = (1 - kept) * updated
        for trained, mean in zip(self._trained.values(), self._means, strict=True):
            mean.lerp_(trained, weight)
        for buffer, shared in zip(self._network.buffers(), self.network.buffers(), strict=True):
            if buffer is not shared:  # the network has assigned a new one
                shared.copy_(buffer)
        self._updates += updated

    def state(self) -> dict[str, Any]:
        """Entries of a step's state in addition to "network"; they share the tensors."""
        named = self._network.named_parameters(remove_duplicate=False)  # tied weights by each of their names
        trained = {name: parameter.detach() for name, parameter in named}
        return {AVERAGE: {"trained": trained, "updates": self._updates}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Resumes from a step's state, unless it was saved without an average."""
        if AVERAGE in state:
            self.network.load_state_dict(state["network"])
            self._updates.copy_(state[AVERAGE]["updates"])


def trained_weights(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The weights of the trained network in a step's state, saved with or without an average."""
    return {**state["network"], **state.get(AVERAGE, {"trained": {}})["trained"]}
