"""Faults of a config in this program's words: the key, what was expected, what was found, and keys that were meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from utils.config.aliases import ALIASES
from utils.config.paths import LIST, ONE
from utils.config.schema import Config
from utils.config.sections import Section

LONGEST_SHOWN = 500  # characters of a value
MOST_LISTED = 12  # keys of a section
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

# Names that other programs use, where the same name or a similar one would not lead to the key.
SYNONYMS = {
    "lr": "lr_schedule.start_lr",
    "learning_rate": "lr_schedule.start_lr",
    "min_lr": "lr_schedule.end_lr",
    "scheduler": "lr_schedule.shape",
    "warmup": "lr_schedule.warmup_steps",
    "batch_size": "global_batch_size",
    "epochs": "num_epochs",
    "workers": "num_data_workers",
    "num_workers": "num_data_workers",
    "crop_size": "data_size",
    "patch_size": "data_size",
    "amp": "enable_amp",
    "fp16": "enable_amp",
    "compile": "enable_jit",
    "grad_clip": "clip_grad_norm",
    "gradient_clipping": "clip_grad_norm",
    "gradient_accumulation_steps": "accumulation_steps",
    "random_seed": "seed",
    "model": "network.name",
    "depth": "network.scales",
    "filters": "network.width",
    "output_dir": "expdir",
    "log_dir": "expdir",
}

# What pydantic's error types expect; the types that carry a limit are below.
EXPECTED = {
    "int_type": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a string",
    "string_unicode": "a string in UTF-8",
    "list_type": "a list",
    "invalid_key": "a key that is a string",
}
LIMITS = {
    "greater_than_equal": "of at least",
    "greater_than": "above",
    "less_than_equal": "of at most",
    "less_than": "below",
}


def describe(section: type[Section], error: ValidationError) -> str:
    """All faults of a section's values, in one line."""
    return "; ".join(_fault(section, fault) for fault in error.errors())


def _fault(section: type[Section], fault: Mapping[str, Any]) -> str:
    """One of pydantic's error records."""
    location = tuple(part for part in fault["loc"] if part not in (ONE, LIST))
    key, kind, value = ".".join(map(str, location)), fault["type"], fault["input"]
    if kind == "extra_forbidden":
        return f"{key} {REPLACED_KEYS[key]}" if key in REPLACED_KEYS else f"unknown key {key}{_hint(section, key)}"
    if kind in ("model_type", "dict_type"):
        example = _example(section, location, value)
        return f"{key}: expected a section with keys, got {_shown(value)}{example}".removeprefix(": ")
    if kind == "value_error":  # raised by the schema's own checks, whose messages contain the value
        return f"{key}: {fault['ctx']['error']}".removeprefix(": ")
    expected, example = _expected(kind, fault.get("ctx", {}), value), ""
    path, field = _field(section, location)
    if field is not None and kind not in ("bool_type", "literal_error"):
        default = field.get_default()
        expected += " or None" if type(None) in get_args(field.annotation) else ""
        example = f" (for example {path}={default})" if default not in (None, [], "") else ""
    return f"{key}: expected {expected}, got {_shown(value)}{example}"


def _expected(kind: str, context: Mapping[str, Any], value: Any) -> str:
    """The value that an error type expects, without the words of pydantic's message."""
    if kind == "float_type" and type(value) is int:
        return "a number below 1e308"  # too large to convert
    if kind in LIMITS:
        (limit,) = (value for name, value in context.items() if name in ("ge", "gt", "le", "lt"))
        return f"a value {LIMITS[kind]} {f'{limit:g}' if isinstance(limit, float) else limit}"
    if kind.endswith(("too_short", "too_long")):
        limit, bound = (context["min_length"], "least") if "min_length" in context else (context["max_length"], "most")
        what, unit = ("string", "characters") if kind.startswith("string") else ("list", "values")
        return f"a {what} of at {bound} {limit} {unit}"
    if kind == "literal_error":
        return context["expected"].replace("'", "")
    return EXPECTED.get(kind, "another value")


def _field(section: type[Section], location: tuple[int | str, ...]) -> tuple[str, FieldInfo | None]:
    """The dotted key of the value at a location, which may be inside a list, and its field; None if there is none."""
    path: list[str] = []
    for part in location:
        field = section.model_fields.get(str(part))
        if field is None:
            break
        path.append(str(part))
        if not _is_section(field.annotation):
            return ".".join(path), field
        section = field.annotation  # type: ignore[assignment]
    return ".".join(path), None


def _example(section: type[Section], location: tuple[int | str, ...], value: Any) -> str:
    """The first key of the section at a location that accepts the value given in place of the section."""
    for part in location:
        section = section.model_fields[str(part)].annotation  # type: ignore[assignment]
        if not _is_section(section):
            return ""
    for name in section.model_fields if location and isinstance(value, str | int | float) else ():
        try:
            section.model_validate({name: value})
        except ValidationError:
            continue
        return f"; for example {'.'.join(map(str, location))}.{name}={value!s:.40}"
    return ""


def _is_section(annotation: Any) -> bool:
    # To Python 3.10, list[int] is an instance of type, but issubclass refuses it.
    return isinstance(annotation, type) and get_origin(annotation) is None and issubclass(annotation, Section)


def _shown(value: Any) -> str:
    """The value for an error message, which stays readable if the value is long."""
    try:
        text = repr(value)
    except ValueError:  # Python converts no integer of more than 4300 digits
        return "a value with too many digits"
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]} … ({len(text)} characters)"


# --- keys that were meant --------------------------------------------------------------------------------------------


def _hint(section: type[Section], key: str) -> str:
    """Suggests a key, an old one, or all keys of the same section."""
    parent, _, name = key.rpartition(".")
    known = list(_dotted_keys(section))
    meant = meant_keys(key, known)
    if meant:
        return f"; did you mean {' or '.join(meant)}?"
    siblings = {other.rpartition(".")[2]: other for other in (*known, *ALIASES) if other.rpartition(".")[0] == parent}
    match = similar(name, siblings)
    if match:
        return f"; did you mean {siblings[match]}?"
    old = difflib.get_close_matches(key, REPLACED_KEYS, n=1, cutoff=0.8)
    if old:
        return f"; {old[0]} {REPLACED_KEYS[old[0]]}"
    if 0 < len(siblings) <= MOST_LISTED:
        return f"; known: {', '.join(siblings.values())}"
    return "; --print_config prints all keys"


def meant_keys(key: str, known: Iterable[str] | None = None) -> list[str]:
    """The known keys (by default those of a config) that a key's last part names, or a word for one of them."""
    known = list(_dotted_keys(Config) if known is None else known)
    name = key.rpartition(".")[2]
    same = [other for other in known if other.rpartition(".")[2] == name]
    return same or [other for other in known if other == SYNONYMS.get(name)]


def _dotted_keys(section: type[Section], prefix: str = "") -> Iterable[str]:
    """All keys of a section and of the sections in it."""
    for name, field in section.model_fields.items():
        yield prefix + name
        if _is_section(field.annotation):
            yield from _dotted_keys(field.annotation, f"{prefix}{name}.")  # type: ignore[arg-type]


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
