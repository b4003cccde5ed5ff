"""Config keys of earlier versions: what their values in a checkpoint's config become in this version.

A YAML file or a flag with such a key is refused, as with any other unknown key.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from utils.config import flatten, with_value
from utils.config.channels import TRANSFORM, known_channels
from utils.config.schema import CHANNELS_KEYS

# The keys that a stored value becomes, in the order in which they apply: a later one overrides those of an earlier one.
REPLACED: dict[str, Callable[[Any], Mapping[str, Any]]] = {
    # bias, activation and concatenation in one kernel
    "fused_pointwise": lambda on: {"kernels": "auto" if on else "torch"},
    # auto, cudnn, own: the kernels of strided convolutions
    "convolutions": lambda choice: {"kernels": "cudnn"} if choice == "cudnn" else {},
    # unknown if true: all inputs, as they are, added to the outputs of the same quantity
    "network.adds_inputs": lambda on: {"network.adds_inputs": on} if on else {},
    # step is gone; a network is used in the same way regardless of its schedule
    "lr_schedule.shape": lambda shape: {"lr_schedule.shape": "constant" if shape == "step" else shape},
}
DROPPED = (
    "fused_tail",  # all that follows the last convolution in one kernel
    "network.space_to_depth",  # layers that are computed as dense convolutions
    "static_graph",  # DDP: every step uses the same parameters
    "gradient_compression",  # DDP: the type in which gradients are exchanged
    "cudnn_benchmark_limit",  # the number of algorithms that cuDNN times; 10 now
    "max_consecutive_skips",  # skipped updates in a row after which training stops; 10 now
    "early_stopping.patience",  # epochs without improvement after which training ends
    "early_stopping.min_delta",  # an improvement lowers the loss by more than this
    "evaluation.window",  # cells per side of the network's input; data_size now
    "evaluation.overlap",  # cells by which windows overlap; half a window now
    "evaluation.mean_flux",  # the mean flux; the observed one now, evaluate.py has a flag
    "evaluation.pressure_smoothing",  # that of FGPA; 0.1 Mpc/h now, evaluate.py has a flag
    "evaluation.fitted_on",  # a volume for further baselines; evaluate.py has a flag
    "integrity.action",  # stop or warn at a difference; stop now
    "lr_schedule.drop_epochs",  # the epochs of shape step after which the learning rate drops
    "lr_schedule.drop_factor",  # the factor of shape step
    "optimizer.merge_dims",  # soap: the view of a weight; kernel now
    "optimizer.max_precondition_dim",  # soap: the longest side with an eigenbasis; 512 now
    "optimizer.tf32",  # soap: matrix products in TF32; as the key tf32 now
    "profile.ranks",  # root or all: the ranks that are profiled; root now
    "timeouts.collective",  # seconds for one collective operation; 1800 now
    *(f"transform.{name}" for name in TRANSFORM),  # channels now
    *(f"vector_channels.{side}" for side in CHANNELS_KEYS),  # components in channels now
)


def update(config: Mapping[str, Any], source: object) -> dict[str, Any]:
    """The config of the checkpoint `source` with this version's keys."""
    values = flatten(config)
    transform = {name: values.get(f"transform.{name}", value) for name, value in TRANSFORM.items()}
    for side, key in CHANNELS_KEYS.items() if any(key.startswith("transform.") for key in values) else ():
        known = known_channels(side, values[key], transform, values.get(f"vector_channels.{side}"))
        values[f"channels.{side}"] = [asdict(channel) for channel in known]
    for key in DROPPED:
        values.pop(key, None)
    for key, becomes in REPLACED.items():
        if key in values:
            values |= becomes(values.pop(key))
    updated = dict[str, Any]()
    for key, value in values.items():
        updated = with_value(updated, key.split("."), value, str(source))
    return updated
