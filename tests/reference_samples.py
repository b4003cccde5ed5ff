"""Digests of an epoch's samples by definition: a slice of each field, then `symmetry.apply`."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

from utils.config import Config
from utils.data import symmetry
from utils.data.loaders import Batch
from utils.data.plan import SamplePlan, Shape
from utils.distributed.launch import Launch
from utils.distributed.world import World

Fields = Sequence[np.ndarray]
VECTORS = [(1, 2, 3)]
ALONE = World(Launch("test"), torch.device("cpu"))


def loader_of(
    kind: Callable[..., Any], volumes: Any, plan: Any, rank: int = 0, ranks: int = 1, device: Any = "cpu", **keys: Any
) -> Any:
    """A loader of class `kind` for one rank; `keys` of its config."""
    config = Config().model_copy(update={"local_batch_size": 4} | keys)
    return kind(volumes, plan, config, World(Launch("test", rank, rank, ranks), torch.device(device)))


def cubes(*sides: int) -> tuple[Shape, ...]:
    return tuple((side, side, side) for side in sides)


def digest(batch: Batch) -> list[str]:
    """One digest of the bytes of each sample's inputs, targets and conditions, in the order [C, D, D, D]."""
    parts = [part.contiguous().numpy() for part in batch]
    return [_digest([part[slot] for part in parts]) for slot in range(len(parts[0]))]


def cut(field: np.ndarray, origin: np.ndarray, crop: int, index: int, mode: str = "full") -> np.ndarray:
    """A sample's crop of a field [C, X, Y, Z] under symmetry `index`."""
    x, y, z = (slice(start, start + crop) for start in origin)
    return symmetry.apply(field[:, x, y, z], int(index), VECTORS, mode)


def reference(
    volumes: Sequence[Fields], plan: SamplePlan, epoch: int, mode: str = "full", conditions: np.ndarray | None = None
) -> list[str]:
    """The digests of all samples of an epoch, in the plan's order; `conditions` of each volume, if given."""
    drawn = plan.epoch(epoch)
    ends = [[]] * len(volumes) if conditions is None else [[row] for row in conditions]
    return [
        _digest([*(cut(field, origin, plan.crop, index, mode) for field in volumes[volume]), *ends[volume]])
        for volume, origin, index in zip(drawn.volumes, drawn.origins, drawn.symmetries, strict=True)
    ]


def rank_batches(
    samples: list[Any], global_batch: int, rank: int, size: int, drop_last: bool, volumes: int = 1
) -> list[list[Any]]:
    """Samples rank, rank + size, … of each global batch, which is of one volume; empty batches are omitted."""
    per_volume = len(samples) // volumes
    of_volumes = [samples[start : start + per_volume] for start in range(0, len(samples), per_volume)]
    batches = [part[i : i + global_batch] for part in of_volumes for i in range(0, per_volume, global_batch)]
    parts = [batch[rank::size] for batch in batches if len(batch) == global_batch or not drop_last]
    return [part for part in parts if part]


def read_fields(path: Path | str) -> Fields:
    with h5py.File(path) as file:
        return file["Nbody"][...], file["Hydro"][...]


def write_signed_zeros(path: Path) -> None:
    """Sets some values to 0.0 and some to -0.0, which a negation must swap."""
    with h5py.File(path, "r+") as file:
        for name in ("Nbody", "Hydro"):
            values = file[name][...]
            values[:, ::3, ::2] = 0.0
            values[:, 1::3, ::2, ::2] = -0.0
            file[name][...] = values


def _digest(parts: list[np.ndarray]) -> str:
    return hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()
