"""Faults of a config in one line: the key, pydantic's message, the value, and the keys that were probably meant."""

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from utils.config.sections import LIST, ONE, Section

LONGEST_VALUE = 200  # characters
MOST_SUGGESTED = 3
# Rules that say more than pydantic's, by the type of its error.
RULES = {
    "bool_type": "must be true or false",
    "invalid_key": "is no name of a key",
    "list_type": "must be a list such as [a, b]",
    "model_type": "must be a section with keys",
}
SYNONYMS = {"learning_rate": "start_lr", "l2": "mse", "mae": "l1"}
SIMILAR = 0.75  # difflib's ratio; below it, unrelated names that share a word, such as patch_size and data_size


def describe(section: type[Section], fault: Mapping[str, Any]) -> str:
    """One of pydantic's error records: "Input should be greater than 0" becomes "seed must be greater than 0"."""
    key = ".".join(str(part) for part in fault["loc"] if part not in (ONE, LIST))
    if fault["type"] == "extra_forbidden":
        known = list(keys_of(section))
        is_config = "num_epochs" in known
        print_config = "; --print_config prints all keys" if is_config else f"; known: {', '.join(known)}"
        return f"unknown key {key}{did_you_mean(key, [*known, *['extends'] * is_config]) or print_config}"
    if fault["type"] == "value_error":  # raised by the schema's own checks
        return f"{key}: {fault['ctx']['error']}".removeprefix(": ")
    rule = re.sub(r"^\w+ should ", "must ", fault["msg"].partition(" after validation")[0])
    rule = RULES.get(fault["type"], rule)
    if fault["type"] == "model_type" and isinstance(fault["input"], str) and f"{key}.name" in keys_of(section):
        return f"{key} {rule}; did you mean {key}.name={fault['input']}?"
    return f"{key} {rule}, got {fault['input']!r:.{LONGEST_VALUE}}".lstrip()


def keys_of(section: type[Section], prefix: str = "") -> Iterable[str]:
    """All dotted keys of a section and of the sections in it."""
    for name, field in section.model_fields.items():
        yield prefix + name
        if field.annotation in Section.__subclasses__():
            yield from keys_of(field.annotation, f"{prefix}{name}.")


def similar(word: str, known: Iterable[str]) -> list[str]:
    """The few known names that contain `word` or are spelled almost like it; of dotted keys, the last part counts."""
    section, _, word = word.lower().rpartition(".")
    word = SYNONYMS.get(word, word)
    names = {name: name.rpartition(".")[2].lower() for name in known}
    close = difflib.get_close_matches(word, names.values(), n=1, cutoff=SIMILAR)
    for matches in (
        [name for name, last in names.items() if last == word],
        [name for name, last in names.items() if len(word) > 1 and f"_{word}" in f"_{last}"],
        [name for name, last in names.items() if last in close],
    ):
        siblings = [name for name in matches if section and name.lower().startswith(f"{section}.")]
        if 0 < len(siblings or matches) <= MOST_SUGGESTED:
            return siblings or matches
    return []


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A question that suggests the known names similar to `word`; empty if there is none."""
    names = similar(word, known)
    return f"; did you mean {' or '.join(names)}?" if names else ""
