"""The keys of a config that differ from the defaults, for the log."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from utils.config import Config, differences, flatten

LINES, LONGEST_VALUE = 15, 80  # of the log; a value's length in characters


def describe_config(config: Config, name: str, given: Collection[str]) -> str:
    """The keys that differ from the defaults, in at most 15 lines; first those `given` on the command line."""
    changed, defaults = differences(config), flatten(Config())
    if "local_batch_size" not in given:
        changed.pop("local_batch_size", None)  # it follows from the global batch size and the number of ranks
    keys = sorted(changed, key=lambda key: not any(f"{key}.".startswith(f"{flag}.") for flag in given))
    shown = keys if len(keys) < LINES else keys[: LINES - 2]
    lines = [f"  {key}: {_value(changed[key])} (default {_value(defaults[key])})" for key in shown]
    if len(shown) < len(keys):
        where = "" if config.enable_benchy else ", in config.yaml"  # a benchmark writes none
        lines.append(f"  and {len(keys) - len(shown)} more{where}")
    title = "keys that differ from the defaults:" if keys else "all keys have their default values"
    return "\n".join([f"Config {name}, {title}", *lines])


def _value(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}…"
