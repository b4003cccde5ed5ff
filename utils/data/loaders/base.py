"""The contract of loaders, the base class of those that read crops, and the building of a loader for each split."""

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from utils.config import Config
from utils.data.plan import SamplePlan, Shape, rank_batches
from utils.data.task import task_of
from utils.distributed.world import World
from utils.volumes.hdf5 import Volume
from utils.volumes.opened import SAMPLES_KEYS, SPLITS, Volumes, all_volumes, volume_names
from utils.volumes.page_cache import warm_page_cache


@dataclass(frozen=True)
class Batch:
    """Inputs [N, C_in, D, D, D] and targets [N, C_out, D, D, D], on the run's device; iterates over its tensors."""

    inputs: torch.Tensor
    targets: torch.Tensor
    conditions: torch.Tensor | None = None  # of each crop's volume, [N, K] float32, as network.conditions lists them

    @property
    def network_inputs(self) -> list[torch.Tensor]:
        return [self.inputs] if self.conditions is None else [self.inputs, self.conditions]

    def first(self, samples: int) -> "Batch":
        return Batch(*(part[:samples] for part in self))

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([self.inputs, self.targets, *self.network_inputs[1:]])


class Loader(Protocol):
    """Loads this rank's batches of one split; a batch is valid until the next is requested, which reuses its memory."""

    volumes: Sequence[str] = ("",)  # names of the volumes that have a validation loss each
    batches: Sequence[slice] = ()  # the rows of an epoch's plan that this rank takes, one slice per batch

    def __len__(self) -> int:
        """Number of batches per epoch on this rank."""
        return len(self.batches)

    def volume_of(self, batch: int) -> int:
        """The index in `volumes` of the volume of a batch."""
        return 0

    def epoch(self, epoch: int, first_batch: int = 0) -> Generator[Batch, None, None]:
        """Yields the batches of one epoch, starting with `first_batch`."""

    def close(self) -> None:
        """Releases threads and files."""
        return None


class CropLoader(Loader):
    """Base class of loaders that carry out a sample plan.

    shapes: [N, C, D, D, D] of the inputs and the targets of a full batch.
    vectors: the vector fields of inputs and targets, as channel triples (x, y, z components).
    """

    def __init__(self, plan: SamplePlan, config: Config, world: World) -> None:
        """The batch sizes of the config are resolved for the world (`Config.for_world`)."""
        assert config.local_batch_size is not None
        size, drop_last = config.local_batch_size, plan.split == "train"
        self.plan, self.config, self.world = plan, config, world
        self.batches = rank_batches(plan.samples, size, world.rank, world.size, drop_last, plan.parts)
        self.volumes = volume_names(config, plan.split)[: plan.parts]
        crop, counts = (plan.crop,) * 3, (config.N_in_channels, config.N_out_channels)
        self.shapes = [(size, channels, *crop) for channels in counts]
        self.vectors = config.vectors

    def volume_of(self, batch: int) -> int:
        return self.batches[batch].start * self.plan.parts // self.plan.samples


class ConditionedLoader(CropLoader):
    """Adds conditions to the batches of a loader; `conditions` is [volumes, K]."""

    def __init__(self, loader: CropLoader, conditions: Sequence[Sequence[float]]) -> None:
        super().__init__(loader.plan, loader.config, loader.world)
        self._loader, self._conditions = loader, torch.tensor(conditions, dtype=torch.float32)

    def epoch(self, epoch: int, first_batch: int = 0) -> Generator[Batch, None, None]:
        volumes = torch.from_numpy(self.plan.epoch(epoch).volumes)
        conditions = self._conditions[volumes].to(self.world.device)  # once per epoch: the loop must not wait for it
        with contextlib.closing(self._loader.epoch(epoch, first_batch)) as batches:
            for rows, batch in zip(self.batches[first_batch:], batches, strict=True):
                yield replace(batch, conditions=conditions[rows])

    def close(self) -> None:
        self._loader.close()


@dataclass(frozen=True)
class DataSplits(contextlib.AbstractContextManager["DataSplits"]):
    train: Loader
    valid: Loader

    def __exit__(self, *_: object) -> None:
        with contextlib.closing(self.valid), contextlib.closing(self.train):
            pass


def memory_format(channels_last: bool) -> torch.memory_format:
    return torch.channels_last_3d if channels_last else torch.contiguous_format


def meta_batch(config: Config, samples: int) -> Batch:
    """Tensors with the shapes and types of a batch of `samples`, on torch's meta device."""
    return Batch(*(torch.empty(samples, *shape, dtype=kind, device="meta") for shape, kind in task_of(config).tensors))


def sample_plan(config: Config, split: str, boxes: Iterable[Shape]) -> SamplePlan:
    """The plan of one split, 'train' or 'valid', for volumes of these shapes."""
    samples = getattr(config, SAMPLES_KEYS[split])
    plan = SamplePlan(samples, tuple(boxes), config.data_size, config.seed, split, config.symmetries)
    return replace(plan, samples=samples - samples % plan.parts)


def build_splits(build: Callable[[str], Loader], world: World) -> DataSplits:
    """Builds the loaders of both splits. If one fails on any rank, all ranks fail and close what they have built."""
    with contextlib.ExitStack() as built:
        with world.raise_together():
            train, valid = (built.enter_context(contextlib.closing(build(split))) for split in SPLITS)
        built.pop_all()
    return DataSplits(train, valid)


def build_crop_loaders(
    volumes: Volumes,
    world: World,
    splits: Mapping[str, Sequence[Volume]],
    loader: Callable[[Sequence[Volume], SamplePlan, Config, World], CropLoader],
) -> DataSplits:
    """Builds a loader for the volumes of each split, see `build_splits`; files are read into the page cache first.

    splits: what the loader reads, `volumes` or those of its own storage, which have no files.
    """
    both = all_volumes(splits)
    if files := [path for volume in both for path in volume.files]:
        warm_page_cache(files, [field for volume in both if volume.mapped for field in volume.fields], world)
    config = volumes.config

    def build(split: str) -> Loader:
        plan = sample_plan(config, split, [volume.shape for volume in splits[split]])
        conditions = volumes.conditions(split) if config.network.conditions else []
        built = loader(splits[split], plan, config, world)
        return ConditionedLoader(built, conditions) if conditions else built

    return build_splits(build, world)
