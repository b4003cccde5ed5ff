"""What a config's network gets and predicts. Only `task_of` decides between volumes and classes of labeled samples."""

from typing import Any, NamedTuple

import torch

from utils.config import Config
from utils.config.channels import GAS, copied_channels, density_place
from utils.data.datasets import get_dataset

VOLUMES, CLASSES = "volumes", "classes"  # names of tasks, and of the targets of losses


class Task(NamedTuple):
    """Shapes are those of one sample."""

    name: str
    is_3d: bool  # the samples have the symmetries of the cube, and the network has 3D convolutions
    network_options: dict[str, Any]  # for networks whose constructors have them
    tensors: list[tuple[tuple[int, ...], torch.dtype]]  # inputs, targets and, if there are any, conditions
    output: tuple[int, ...]  # the shape of the network's output
    density: tuple[int, float, float] | None = None  # channel, scale and center of the gas density of the targets


def task_of(config: Config) -> Task:
    if config.dataset.name is not None:
        data = get_dataset(config.dataset.name)
        dtype = torch.float32 if data.vocabulary is None else torch.int64
        options = {"shape": data.shape, "classes": data.classes, "vocabulary": data.vocabulary}
        return Task(CLASSES, False, options, [(data.shape, dtype), ((), torch.int64)], (data.classes,))
    crop, inputs, targets, width = config.data_size, config.N_in_channels, config.N_out_channels, config.network.width
    options = {"crop": crop, "in_channels": inputs, "out_channels": targets, "width": width, "scales": config.scales}
    shapes = [(inputs, *(crop,) * 3), (targets, *(crop,) * 3), (len(config.network.conditions),)]
    tensors = [(shape, torch.float32) for shape in shapes if shape[0]]  # there may be no conditions
    sources, channels = config.volume_channels
    if config.network.adds_vectors:
        shared = [(a, b) for a, b in copied_channels(sources, channels).items() if channels[a].component]
        options["added"] = {a: b for a, b in shared if channels[a].formula() == sources[b].formula()}
    place = density_place(channels, GAS)
    density = None if place is None else (place, channels[place].scale, channels[place].center)
    return Task(VOLUMES, True, options, tensors, shapes[1], density)
