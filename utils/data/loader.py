"""The contract that every loader fulfills, and the entry that registers one in LOADERS."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch


class Batch(NamedTuple):
    """inputs [N, C_in, D, D, D] and targets [N, C_out, D, D, D], on the run's device."""

    inputs: torch.Tensor
    targets: torch.Tensor


class Loader(Protocol):
    """Loads this rank's batches of one split.

    A batch is valid until the next one is requested, because its memory is reused.
    """

    def __len__(self) -> int:
        """Number of batches per epoch on this rank."""

    def epoch(self, epoch: int, first_batch: int = 0) -> Generator[Batch, None, None]:
        """Yields the batches of one epoch, starting with `first_batch`."""

    def close(self) -> None:
        """Releases threads and files."""
        return None


@dataclass(frozen=True)
class Loaders:
    """The loaders of both splits, as a context manager that closes them."""

    train: Loader
    valid: Loader

    def __enter__(self) -> Loaders:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.train.close()
        finally:
            self.valid.close()


@dataclass(frozen=True)
class LoaderSpec:
    """An entry of LOADERS.

    build: build(config, world) returns the loaders of both splits for one rank. Every rank calls it, and all fail if
      one does. The batch sizes of the config are resolved for the world (`Config.for_world`).
    reads: the kind of files that the loader reads, None if it reads none.
    requires: raises UserError with the install command if a package that the loader needs is missing.
    on_device: `build` has a third argument, the number of bytes that training needs on the device.
    """

    build: Callable[..., Loaders]
    reads: Literal["hdf5", "npy", "classification"] | None = "hdf5"
    requires: Callable[[], object] | None = None
    on_device: bool = False


def memory_format(channels_last: bool) -> torch.memory_format:
    return torch.channels_last_3d if channels_last else torch.contiguous_format
