"""Faults of a config in one line: the key, pydantic's message, the value, and the keys that were probably meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any, get_origin

from pydantic import ValidationError

from utils.config.aliases import ALIASES
from utils.config.paths import LIST, ONE
from utils.config.schema import Config
from utils.config.sections import Section

LONGEST_SHOWN = 200  # characters of a value
MOST_LISTED = 12  # keys of a section
SIMILAR = 0.75  # difflib's ratio; below it, unrelated names that share a word, such as patch_size and data_size

# Names of other programs for the keys that are changed most.
SYNONYMS = {
    "lr": "lr_schedule.start_lr",
    "learning_rate": "lr_schedule.start_lr",
    "batch_size": "global_batch_size",
    "patch_size": "data_size",
    "model": "network.name",
    "output_dir": "expdir",
}


def describe(section: type[Section], error: ValidationError) -> str:
    """All faults of a section's values, in one line."""
    return "; ".join(_fault(section, fault) for fault in error.errors())


def _fault(section: type[Section], fault: Mapping[str, Any]) -> str:
    """One of pydantic's error records: "Input should be greater than 0" becomes "seed must be greater than 0"."""
    key = ".".join(str(part) for part in fault["loc"] if part not in (ONE, LIST))
    if fault["type"] == "extra_forbidden":
        return f"unknown key {key}{_hint(section, key)}"
    if fault["type"] == "value_error":  # raised by the schema's own checks, whose messages contain the value
        return f"{key}: {fault['ctx']['error']}".removeprefix(": ")
    rule = re.sub(r"^\w+ should ", "must ", fault["msg"].partition(" after validation")[0])
    if fault["type"] == "model_type":
        rule = f"must be a section; set keys in it, such as {next(iter(_keys_in(section, key)), key)}"
    value = repr(fault["input"])
    shown = value if len(value) <= LONGEST_SHOWN else f"{value[:LONGEST_SHOWN]} … ({len(value)} characters)"
    return f"{key} {rule}, got {shown}".lstrip()


def _hint(section: type[Section], key: str) -> str:
    """Suggests a known key, or all keys of the same section."""
    known = [*_dotted_keys(section), *ALIASES]
    meant = meant_keys(key, known)
    if meant:
        return f"; did you mean {' or '.join(meant)}?"
    siblings = list(_keys_in(section, key.rpartition(".")[0]))
    if 0 < len(siblings) <= MOST_LISTED:
        return f"; known: {', '.join(siblings)}"
    return "; --print_config prints all keys"


def meant_keys(key: str, known: Iterable[str] | None = None) -> list[str]:
    """The known keys (by default those of a config) that an unknown one may stand for."""
    known = list(_dotted_keys(Config) if known is None else known)
    parent, _, name = key.rpartition(".")
    same = [dotted for dotted in known if dotted.rpartition(".")[2] == name]
    same = same or [dotted for dotted in known if dotted == SYNONYMS.get(name)]
    siblings = {dotted.rpartition(".")[2]: dotted for dotted in known if dotted.rpartition(".")[0] == parent}
    match = similar(name, siblings)
    return same or ([siblings[match]] if match else [])


def _keys_in(section: type[Section], parent: str) -> Iterable[str]:
    """The keys whose section has the dotted key `parent`."""
    return (dotted for dotted in _dotted_keys(section) if dotted.rpartition(".")[0] == parent)


def _dotted_keys(section: type[Section], prefix: str = "") -> Iterable[str]:
    """All keys of a section and of the sections in it."""
    for name, field in section.model_fields.items():
        yield prefix + name
        kind = field.annotation
        # To Python 3.10, list[int] is an instance of type, but issubclass refuses it.
        if isinstance(kind, type) and get_origin(kind) is None and issubclass(kind, Section):
            yield from _dotted_keys(kind, f"{prefix}{name}.")


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
