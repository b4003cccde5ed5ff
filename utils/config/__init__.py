"""The configuration of a run: one named config of a YAML file, plus overrides; typed, checked and frozen."""

import contextlib
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from utils.config.messages import describe, did_you_mean
from utils.config.schema import Config, NeutralKeys
from utils.config.sections import EXPAND, FOR_A_FILE, Section
from utils.config.yaml_files import default_name, dump, find, parse_value, read_file
from utils.errors import UserError

__all__ = ("Config", "Section", "default_name", "did_you_mean", "parse_value", "read_file")

AnySection = TypeVar("AnySection", bound=Section)

# The values of amp_mode in the tutorial's later editions (SC22 to SC25), and their precision.
AMP_MODES = {"none": None, "fp16": "float16", "bf16": "bfloat16"}

# Neutral keys of measurements, such as the tutorial's: a run must not mix the speed of two loaders.
SPEED_KEYS = ("data_loader_config", "num_data_workers", "enable_manual_profiling")


def load(path: str, name: str, overrides: Mapping[str, Any] | None = None) -> Config:
    """The config `name` of a file or one next to it, with overrides by dotted keys: {'lr_schedule.start_lr': 1e-3}."""
    values, overrides = translate(find(path, name).values), translate(overrides or {})
    if "global_batch_size" in overrides:  # It replaces a local batch size in the file.
        values = {**values, "local_batch_size": None}
    for key, value in overrides.items():
        values = with_value(values, key.split("."), value, name)
    return validate(values, name)


def translate(values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `values`, which all come from one source, with this project's keys only.

    Either of amp_mode and enable_amp turns mixed precision on: configs of SC22 inherit `amp_mode: none` and set
    `enable_amp: True`.
    """
    translated = {key: value for key, value in values.items() if key != "amp_mode"}
    if "amp_mode" not in values:
        return translated
    mode = values["amp_mode"] or "none"  # YAML reads None as null
    if mode not in AMP_MODES:
        raise UserError(f"amp_mode must be none, fp16 or bf16, got {mode!r}")
    if mode == "none":
        return {"enable_amp": False, **translated}
    return {"precision": AMP_MODES[mode], **translated, "enable_amp": True}


def validate(values: Mapping[str, Any], name: str) -> Config:
    """The typed and checked config; raises UserError with all faults in one line."""
    return validate_section(Config, values, f"config '{name}'", EXPAND)


def validate_section(
    section: type[AnySection], values: Any, name: str, context: Mapping[str, bool] | None = None
) -> AnySection:
    """The typed values; UserError with all faults in one line after `name`. The context EXPAND expands paths."""
    try:
        return section.model_validate(values, context=context)
    except ValidationError as error:
        faults = "; ".join(describe(section, fault) for fault in error.errors())
        raise UserError(f"{name}: {faults}") from None


def flatten(config: Config | Mapping[str, Any]) -> dict[str, Any]:
    """The values by dotted keys, as --set takes them; the options of a network, optimizer or loss are one value."""
    flat: dict[str, Any] = {}
    for key, value in (config.model_dump() if isinstance(config, Config) else config).items():
        if isinstance(value, dict) and not key.endswith("options"):
            flat |= {f"{key}.{name}": inner for name, inner in flatten(value).items()}
        else:
            flat[key] = value
    return flat


def differences(config: Config, base: Config | None = None) -> dict[str, Any]:
    """The dotted keys whose values differ from those of `base`, or else from the defaults, with the config's values."""
    before = flatten(base or Config())
    return {key: value for key, value in flatten(config).items() if value != before[key]}


def describe_config(config: Config, path: str, name: str) -> str:
    """For the log: the keys that differ from the config that the file's one inherits from, and from the defaults."""
    lines, defaults = [], flatten(Config())
    with contextlib.suppress(UserError):  # the parent may be incomplete by itself, or the file be gone by now
        child = find(path, name)
        if child.parent is not None:
            both = (validate_section(Config, translate(named.values), name) for named in (child, child.parent))
            changes = ", ".join(f"{key} {value!s:.80}" for key, value in differences(*both).items())
            lines.append(f"Config {name} extends {child.parent.name}: {changes or 'equal'}")
    lines.append(f"Config {name}, keys that differ from the defaults:")
    lines += [f"  {key}: {value!s:.80} (default {defaults[key]})" for key, value in differences(config).items()]
    return "\n".join(lines)


def changes_result(key: str) -> bool:
    """False for a dotted key that only says where files are, how they are read, or what is logged and saved."""
    return key.split(".")[0] not in NeutralKeys.model_fields and key not in ("dataset.directory", "dataset.verify")


def run_changes(before: Config, now: Config) -> list[str]:
    """The dotted keys with different values that make another run: those that change its result or its speed."""
    return [key for key in differences(now, before) if changes_result(key) or key in SPEED_KEYS]


def to_yaml(config: Config, name: str) -> str:
    """A YAML file with this one config and all of its keys; `load` reads it back."""
    return dump({name: config.model_dump(mode=FOR_A_FILE)})


def with_value(values: Mapping[str, Any], path: list[str], value: Any, name: str) -> dict[str, Any]:
    """A copy of `values` with the value at a dotted path replaced."""
    first, *rest = path
    if not rest:
        return {**values, first: value}
    inner = values.get(first, {})
    if not isinstance(inner, Mapping):
        raise UserError(f"config '{name}': {first} is not a section, so {'.'.join(path)} cannot be set")
    return {**values, first: with_value(inner, rest, value, name)}
