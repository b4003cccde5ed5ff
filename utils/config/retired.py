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
# Keys of what is gone, or has one value now.
DROPPED = """fused_tail network.space_to_depth static_graph gradient_compression cudnn_benchmark_limit
    max_consecutive_skips early_stopping.patience early_stopping.min_delta evaluation.window evaluation.overlap
    evaluation.mean_flux evaluation.pressure_smoothing evaluation.fitted_on integrity.action lr_schedule.drop_epochs
    lr_schedule.drop_factor optimizer.merge_dims optimizer.max_precondition_dim optimizer.tf32 profile.ranks
    timeouts.collective"""


def update(config: Mapping[str, Any], source: object) -> dict[str, Any]:
    """The config of the checkpoint `source` with this version's keys."""
    values = flatten(config)
    transform = {name: values.get(f"transform.{name}", value) for name, value in TRANSFORM.items()}
    for side, key in CHANNELS_KEYS.items() if any(key.startswith("transform.") for key in values) else ():
        known = known_channels(side, values[key], transform, values.get(f"vector_channels.{side}"))
        values[f"channels.{side}"] = [asdict(channel) for channel in known]
    channels = [*(f"transform.{name}" for name in TRANSFORM), *(f"vector_channels.{side}" for side in CHANNELS_KEYS)]
    for key in (*DROPPED.split(), *channels):
        values.pop(key, None)
    for key, becomes in REPLACED.items():
        if key in values:
            values |= becomes(values.pop(key))
    updated = dict[str, Any]()
    for key, value in values.items():
        updated = with_value(updated, key.split("."), value, str(source))
    return updated
