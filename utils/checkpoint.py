"""Trained weights on disk: written whole or not at all, read without running any code in them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from torch import nn

from utils.errors import UserError
from utils.files import appearing_whole

LAST, BEST = "weights_last.pt", "weights_best.pt"


class NoCheckpoint:
    """Saves nothing: for ranks other than 0."""

    def save(self, network: nn.Module, *, epoch: int, step: int, valid_loss: float) -> None:
        pass


class WeightsFile(NoCheckpoint):
    """The last epoch's weights and the best one's, in the run directory."""

    def __init__(self, directory: Path, config: dict[str, Any]) -> None:
        self._directory, self._config = directory, config
        self._best = float("inf")

    def save(self, network: nn.Module, *, epoch: int, step: int, valid_loss: float) -> None:
        content = {
            "network": {name: value.detach().cpu() for name, value in network.state_dict().items()},
            "config": self._config,
            "epoch": epoch,
            "step": step,
            "valid_loss": valid_loss,
        }
        write_atomically(content, self._directory / LAST)
        if valid_loss < self._best:
            self._best = valid_loss
            write_atomically(content, self._directory / BEST)


def write_atomically(content: dict[str, Any], path: Path) -> None:
    """torch.save that leaves the earlier file in place until the new one is whole on the disk."""
    memory = io.BytesIO()
    torch.save(content, memory)  # straight into a file it covers a full disk's OSError with a RuntimeError of its own
    try:
        with appearing_whole([path]) as (partial,):
            partial.write_bytes(memory.getbuffer())
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error


def read_weights(path: Path) -> dict[str, Any]:
    """What `WeightsFile` wrote."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"no such file: {path}") from None
    except Exception as error:
        raise UserError(f"cannot read {path}: {(str(error) or repr(error)).splitlines()[0]}") from None
