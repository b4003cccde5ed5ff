"""Config keys of earlier versions: what their values in a checkpoint's config become in this version.

A YAML file or a flag with such a key is refused, as with any other unknown key.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from utils.config import flatten, with_value
from utils.config.channels import TRANSFORM, known_channels
from utils.config.schema import CHANNELS_KEYS
from utils.errors import UserError


@dataclass(frozen=True)
class RetiredKey:
    """`becomes` maps a stored value to keys of this version, or raises ValueError with a reason; None: dropped."""

    meaning: str
    becomes: Callable[[Any], Mapping[str, Any]] | None = None


# In the order in which they apply: a later one overrides the keys that an earlier one sets.
RETIRED = {
    "fused_pointwise": RetiredKey(
        "bias, activation and concatenation in one kernel", lambda on: {"kernels": "auto" if on else "torch"}
    ),
    "convolutions": RetiredKey(
        "auto, cudnn, own: the kernels of strided convolutions",
        lambda choice: {"kernels": "cudnn"} if choice == "cudnn" else {},
    ),
    "fused_tail": RetiredKey("all that follows the last convolution in one kernel"),
    "network.space_to_depth": RetiredKey("layers that are computed as dense convolutions"),
    "static_graph": RetiredKey("DDP: every step uses the same parameters"),
    "gradient_compression": RetiredKey("DDP: the type in which gradients are exchanged"),
    "cudnn_benchmark_limit": RetiredKey("the number of algorithms that cuDNN times; 10 now"),
    "max_consecutive_skips": RetiredKey("skipped updates in a row after which training stops; 10 now"),
    "early_stopping.patience": RetiredKey("epochs without improvement after which training ends"),
    "early_stopping.min_delta": RetiredKey("an improvement lowers the loss by more than this"),
    "evaluation.window": RetiredKey("cells per side of the network's input; data_size now"),
    "evaluation.overlap": RetiredKey("cells by which windows overlap; half a window now"),
    "evaluation.mean_flux": RetiredKey("the mean flux; the observed one now, evaluate.py has a flag"),
    "evaluation.pressure_smoothing": RetiredKey("that of FGPA; 0.1 Mpc/h now, evaluate.py has a flag"),
    "evaluation.fitted_on": RetiredKey("a volume for further baselines; evaluate.py has a flag"),
    "integrity.action": RetiredKey("stop or warn at a difference; stop now"),
    "lr_schedule.drop_epochs": RetiredKey("the epochs of shape step after which the learning rate drops"),
    "lr_schedule.drop_factor": RetiredKey("the factor of shape step"),
    # A network is used in the same way regardless of its schedule.
    "lr_schedule.shape": RetiredKey(
        "step is gone", lambda shape: {"lr_schedule.shape": "constant" if shape == "step" else shape}
    ),
    "optimizer.merge_dims": RetiredKey("soap: the view of a weight; kernel now"),
    "optimizer.max_precondition_dim": RetiredKey("soap: the longest side with an eigenbasis; 512 now"),
    "optimizer.tf32": RetiredKey("soap: matrix products in TF32; as the key tf32 now"),
    "profile.ranks": RetiredKey("root or all: the ranks that are profiled; root now"),
    "timeouts.collective": RetiredKey("seconds for one collective operation; 1800 now"),
    **{f"transform.{name}": RetiredKey("a transform; channels now") for name in TRANSFORM},
    **{f"vector_channels.{side}": RetiredKey("vectors; components in channels now") for side in CHANNELS_KEYS},
}


def update(config: Mapping[str, Any], source: object) -> dict[str, Any]:
    """The config of a checkpoint with this version's keys; UserError if a value of `source` has no equivalent."""
    values = flatten(config)
    transform = {name: values.get(f"transform.{name}", value) for name, value in TRANSFORM.items()}
    for side, key in CHANNELS_KEYS.items() if any(key.startswith("transform.") for key in values) else ():
        known = known_channels(side, values[key], transform, values.get(f"vector_channels.{side}"))
        values[f"channels.{side}"] = [asdict(channel) for channel in known]
    for key, retired in RETIRED.items():
        if key in values:
            value = values.pop(key)
            try:
                values |= retired.becomes(value) if retired.becomes else {}
            except ValueError as reason:
                before = f"{source} was trained with {key} {value!r:.80} ({retired.meaning})"
                raise UserError(f"{before}: {reason}; use the version that trained it") from None
    updated = dict[str, Any]()
    for key, value in values.items():
        updated = with_value(updated, key.split("."), value, str(source))
    return updated
