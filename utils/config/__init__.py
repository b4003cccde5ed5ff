"""The configuration of a run: one named config of a YAML file, plus overrides; typed, checked and frozen.

`schema` and `sections` declare every key, `paths` the type of those that are paths; `aliases` translates other names of
some keys; `yaml_files` reads named configs; `messages` describes faults. This module applies overrides, and writes a
config back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from utils.config.aliases import translate
from utils.config.messages import describe, meant_keys, nearest, similar
from utils.config.paths import EXPAND, FOR_A_FILE
from utils.config.schema import NEUTRAL_KEYS, Config
from utils.config.sections import Section
from utils.config.yaml_files import default_name, find, names, read_file
from utils.config.yaml_values import dump, parse_value
from utils.errors import UserError

__all__ = (
    "Config",
    "Section",
    "changes_result",
    "default_name",
    "differences",
    "flatten",
    "load",
    "meant_keys",
    "names",
    "nearest",
    "parse_value",
    "read_file",
    "result_changes",
    "similar",
    "to_yaml",
    "translate",
    "validate",
    "validate_section",
)

AnySection = TypeVar("AnySection", bound=Section)


def load(path: str, name: str, overrides: Mapping[str, Any] | None = None) -> Config:
    """The config `name` of the file, or of another file in its directory, with overrides applied.

    Overrides use dotted keys: {'num_epochs': 3, 'lr_schedule.start_lr': 1e-3}. `~` and environment variables are
    expanded in all paths.
    """
    source = f"config '{name}'"
    values, overrides = translate(find(path, name), source), translate(overrides or {}, source, on_command_line=True)
    if "global_batch_size" in overrides:  # It replaces a local batch size in the file.
        values = {**values, "local_batch_size": None}
    for key, value in overrides.items():
        values = _replace(values, key.split("."), value, name)
    return validate_section(Config, values, source, EXPAND)


def validate(values: Mapping[str, Any], name: str) -> Config:
    """The typed and checked config; raises UserError with all faults in one line."""
    return validate_section(Config, values, f"config '{name}'")


def validate_section(
    section: type[AnySection], values: Any, name: str, context: Mapping[str, Any] | None = None
) -> AnySection:
    """The typed and checked values; raises UserError with all faults in one line that begins with `name`."""
    try:
        return section.model_validate(values, context=context)
    except ValidationError as error:
        raise UserError(f"{name}: {describe(section, error)}") from None


def flatten(config: Config | Mapping[str, Any]) -> dict[str, Any]:
    """A config, or its plain values, as a flat mapping from dotted keys, as --set takes them."""

    def walk(prefix: str, values: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
        for key, value in values.items():
            if isinstance(value, dict):
                yield from walk(f"{prefix}{key}.", value)
            else:
                yield prefix + key, value

    return dict(walk("", config.model_dump() if isinstance(config, Config) else config))


def differences(config: Config, base: Config | None = None) -> dict[str, Any]:
    """The dotted keys whose values differ from those of `base`, or else from the defaults, with the config's values."""
    before = flatten(base or Config())
    return {key: value for key, value in flatten(config).items() if value != before[key]}


def changes_result(key: str) -> bool:
    """False for a dotted key that only says where files are, how they are read, or what is logged and saved."""
    return not {key, key.split(".")[0]} & NEUTRAL_KEYS


def result_changes(before: Config, now: Config) -> list[str]:
    """The dotted keys with different values, without those that change no result."""

    def values(config: Config) -> dict[str, Any]:
        kept = {key: value for key, value in flatten(config).items() if changes_result(key)}
        # Only the synthetic loader gives other samples, and the resident one if it rounds them.
        matters = config.data_loader_config == "synthetic" or config.resident_dtype != "float32"
        return {**kept, "data_loader_config": config.data_loader_config if matters else None}

    earlier, current = values(before), values(now)
    return [key for key in current if earlier[key] != current[key]]


def to_yaml(config: Config, name: str) -> str:
    """A YAML file with this one config and all of its keys; `load` reads it back."""
    return dump({name: config.model_dump(mode=FOR_A_FILE)})


def _replace(values: Mapping[str, Any], path: list[str], value: Any, name: str) -> dict[str, Any]:
    """A copy of `values` with the value at a dotted path replaced."""
    first, *rest = path
    if not rest:
        return {**values, first: value}
    inner = values.get(first, {})
    if not isinstance(inner, Mapping):
        raise UserError(f"config '{name}': {first} is not a section, so {'.'.join(path)} cannot be set")
    return {**values, first: _replace(inner, rest, value, name)}
