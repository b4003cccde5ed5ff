"""The configuration of a run: one named config of a YAML file, plus overrides; typed, checked and frozen.

`schema` declares every key; `aliases` translates other names of some. This module reads YAML files, applies overrides,
reports faults and writes a config back.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from utils.config.aliases import ALIASES, translate
from utils.config.schema import NEUTRAL_KEYS, Config, Section
from utils.config.yaml_values import dump, parse_value
from utils.errors import UserError, os_errors_for_users
from utils.files import MIB, read_text

AnySection = TypeVar("AnySection", bound=Section)

LARGEST_FILE = MIB  # a file of configs; the shipped ones have 4 KiB
LONGEST_SHOWN = 500  # characters of a value in an error message
SIMILAR = 0.75  # difflib's ratio; below it, unrelated names that share a word, such as patch_size and data_size

# Keys of configs that earlier versions wrote, and what became of them.
REPLACED_KEYS = {
    "noise_scale": "is now log_noise_scale",
    "network.rewritten": "is now network.space_to_depth",
    "loss_weights": "is now channel_weights",
    "max_skipped_updates": "is now max_consecutive_skips",
    "evaluation.tile": "is now evaluation.window",
    "evaluation.step": "was removed; set evaluation.overlap to window - step",
    "evaluation.budget": "was removed; set evaluation.every_epochs",
    "compiler": "was removed; enable_jit always uses torch.compile",
}


def read_file(path: str) -> dict[str, dict[str, Any]]:
    """The named configs of a YAML file, as plain dicts."""
    with os_errors_for_users(f"cannot read yaml_config {path}", "run from the repository's root, or set --yaml_config"):
        text = read_text(path, LARGEST_FILE)
    configs = parse_value(text, path)
    if not isinstance(configs, dict) or not all(
        isinstance(name, str) and isinstance(values, dict) for name, values in configs.items()
    ):
        raise UserError(f"{path} must hold named configs, each a mapping of keys to values")
    return configs


def default_name(path: str) -> str:
    """The config used if none is named: the only one in the file, as in a run's config.yaml, otherwise base."""
    configs = read_file(path)
    return next(iter(configs)) if len(configs) == 1 else "base"


def names(path: str) -> list[str]:
    """The names of a file's configs; empty if the file belongs to another program."""
    try:
        return list(read_file(path))
    except UserError:
        return []


def load(path: str, name: str, overrides: Mapping[str, Any] | None = None) -> Config:
    """The config `name` of the file, or of another file in its directory, with overrides applied.

    Overrides use dotted keys: {'num_epochs': 3, 'lr_schedule.start_lr': 1e-3}.
    """
    source = f"config '{name}'"
    values, overrides = translate(_find(path, name), source), translate(overrides or {}, source, on_command_line=True)
    if "global_batch_size" in overrides:  # It replaces a local batch size in the file.
        values = {**values, "local_batch_size": None}
    for key, value in overrides.items():
        values = _replace(values, key.split("."), value, name)
    return validate(values, name)


def validate(values: Mapping[str, Any], name: str) -> Config:
    """The typed and checked config; raises UserError with all faults in one line."""
    return validate_section(Config, values, f"config '{name}'")


def validate_section(section: type[AnySection], values: Any, name: str) -> AnySection:
    """The typed and checked values; raises UserError with all faults in one line that begins with `name`."""
    try:
        return section.model_validate(values)
    except ValidationError as error:
        faults = "; ".join(_fault(section, fault) for fault in error.errors())
        raise UserError(f"{name}: {faults}") from None


def flatten(config: Config) -> dict[str, Any]:
    """The config as a flat mapping from dotted keys, as --set takes them, to plain values."""

    def walk(prefix: str, values: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
        for key, value in values.items():
            if isinstance(value, dict):
                yield from walk(f"{prefix}{key}.", value)
            else:
                yield prefix + key, value

    return dict(walk("", config.model_dump()))


def differences(config: Config, base: Config | None = None) -> dict[str, Any]:
    """The dotted keys whose values differ from those of `base`, or else from the defaults, with the config's values."""
    before = flatten(base or Config())
    return {key: value for key, value in flatten(config).items() if value != before[key]}


def result_changes(before: Config, now: Config) -> list[str]:
    """The dotted keys with different values, without those that change no result."""

    def values(config: Config) -> dict[str, Any]:
        kept = {key: value for key, value in flatten(config).items() if not {key, key.split(".")[0]} & NEUTRAL_KEYS}
        # Only the synthetic loader gives other samples, and the resident one if it rounds them.
        matters = config.data_loader_config == "synthetic" or config.resident_dtype != "float32"
        return {**kept, "data_loader_config": config.data_loader_config if matters else None}

    one, other = values(before), values(now)
    return [key for key in other if one[key] != other[key]]


def to_yaml(config: Config, name: str) -> str:
    """A YAML file with this one config and all of its keys; `load` reads it back."""
    return dump({name: config.model_dump()})


def _find(path: str, name: str) -> dict[str, Any]:
    """The values of config `name` in the file, or else in the only other YAML file of its directory that has it."""
    configs = read_file(path)
    if name in configs:
        return configs[name]
    others = {str(file): names(str(file)) for file in sorted(Path(path).parent.glob("*.yaml")) if file != Path(path)}
    matches = [file for file, known in others.items() if name in known]
    if len(matches) > 1:
        raise UserError(f"config {name} is in {' and in '.join(matches)}; choose one with --yaml_config")
    if matches:
        return read_file(matches[0])[name]
    known = [*configs, *(other for held in others.values() for other in held)]
    raise UserError(
        f"unknown config {name} in {path} and the other YAML files of its directory; known: "
        f"{', '.join(known)}{nearest(name, known)}"
    )


def _replace(values: Mapping[str, Any], path: list[str], value: Any, name: str) -> dict[str, Any]:
    """A copy of `values` with the value at a dotted path replaced."""
    first, *rest = path
    if not rest:
        return {**values, first: value}
    inner = values.get(first, {})
    if not isinstance(inner, Mapping):
        raise UserError(f"config '{name}': {first} is not a section, so {'.'.join(path)} cannot be set")
    return {**values, first: _replace(inner, rest, value, name)}


def _fault(section: type[Section], fault: Any) -> str:
    """One line for one of pydantic's error records."""
    path = [str(part) for part in fault["loc"]]
    key = ".".join(path)
    if fault["type"] == "extra_forbidden":
        return f"{key} {REPLACED_KEYS[key]}" if key in REPLACED_KEYS else f"unknown key {key}{_hint(section, key)}"
    if fault["type"] in ("model_type", "dict_type"):
        return f"{key} must be a section with keys, not {_shown(fault['input'])}".lstrip()
    message = fault["msg"].removeprefix("Value error, ")
    if not path or fault["type"] in ("too_long", "too_short"):  # These messages already contain the value.
        return f"{key}: {message}" if path else message
    return f"{key}: {message}, not {_shown(fault['input'])}"


def _shown(value: Any) -> str:
    """The value for an error message, which stays readable if the value is long."""
    text = repr(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]} … ({len(text)} characters)"


def _hint(section: type[Section], key: str) -> str:
    """Suggests the same name in another section, a similar one in the same section, or an old one; may be empty."""
    parent, _, name = key.rpartition(".")
    known = list(_dotted_keys(section))
    same = [other for other in known if other.rpartition(".")[2] == name]
    if same:
        return f"; did you mean {' or '.join(same)}?"
    siblings = {other.rpartition(".")[2]: other for other in (*known, *ALIASES) if other.rpartition(".")[0] == parent}
    match = similar(name, siblings)
    if match:
        return f"; did you mean {siblings[match]}?"
    old = difflib.get_close_matches(key, REPLACED_KEYS, n=1, cutoff=0.8)
    return f"; {old[0]} {REPLACED_KEYS[old[0]]}" if old else ""


def _dotted_keys(section: type[Section], prefix: str = "") -> Iterable[str]:
    """All keys of a section and of the sections in it."""
    for name, field in section.model_fields.items():
        yield prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from _dotted_keys(field.annotation, f"{prefix}{name}.")


def similar(word: str, known: Iterable[str]) -> str | None:
    """The known name spelled almost like `word`, or else the only one that contains it; None if there is none."""
    word, lower = word.lower(), {name.lower(): name for name in known}
    matches = difflib.get_close_matches(word, lower, n=1, cutoff=SIMILAR)
    if not matches and len(word) > 2:
        matches = [name for name in lower if word in name]
    return lower[matches[0]] if len(matches) == 1 else None


def nearest(word: str, known: Iterable[str]) -> str:
    """A question that suggests the known name similar to `word`; empty if there is none."""
    match = similar(word, known)
    return f"; did you mean {match}?" if match else ""
