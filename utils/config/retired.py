"""Config keys of earlier versions: what their values in a checkpoint's config become in this version.

A YAML file or a flag with such a key is refused, as with any other unknown key.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from utils.config import flatten
from utils.errors import UserError


@dataclass(frozen=True)
class RetiredKey:
    """`becomes` maps a stored value to keys of this version, or raises ValueError with a reason; None: dropped."""

    meaning: str
    becomes: Callable[[Any], Mapping[str, Any]] | None = None


# In the order in which they apply: a later one overrides the keys that an earlier one sets.
RETIRED = {
    "convolutions": RetiredKey("auto, cudnn, own: the kernels of strided convolutions"),
    "fused_pointwise": RetiredKey("bias, activation and concatenation in one kernel"),
    "fused_tail": RetiredKey("all that follows the last convolution in one kernel"),
    "network.space_to_depth": RetiredKey("layers that are computed as dense convolutions"),
}


def update(config: Mapping[str, Any], source: object) -> dict[str, Any]:
    """The config of a checkpoint with this version's keys; UserError if a value of `source` has no equivalent."""
    values, updated = flatten(config), dict[str, Any]()
    for key, retired in RETIRED.items():
        if key in values:
            value = values.pop(key)
            try:
                values |= retired.becomes(value) if retired.becomes else {}
            except ValueError as reason:
                before = f"{source} was trained with {key} {value!r:.80} ({retired.meaning})"
                raise UserError(f"{before}: {reason}; use the version that trained it") from None
    for key, value in values.items():
        *sections, name = key.split(".")
        place = updated
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return updated
