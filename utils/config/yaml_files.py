"""YAML files of named configs, and `extends`, by which a file or a config inherits from another (docs/reference.md).

A config that is also in a file that this one extends inherits the keys of the other one. Numbers and booleans are those
of YAML 1.2: 1e-4 is a number, `on` and 1:30 are strings. Duplicate keys are errors.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from utils.config.messages import did_you_mean
from utils.config.schema import Config
from utils.errors import UserError, os_remedy

EXTENDS, MERGE = "extends", "<<"
SHIPPED = Path(__file__).parents[2] / "config"


@dataclass(frozen=True)
class NamedConfig:
    """A config of a file: its values, with those that it inherits, and the config that it inherits from."""

    name: str
    values: dict[str, Any]
    parent: "NamedConfig | None" = None


Configs = dict[str, NamedConfig]


class _StrictSafeLoader(yaml.SafeLoader):
    """PyYAML's safe loader with other implicit types, which refuses duplicate keys."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        names = []
        for key, _ in node.value:
            if key.value in names:
                raise yaml.YAMLError(f"line {key.start_mark.line + 1}: duplicate key {key.value}; remove one")
            names.append(key.value)
        return node


class _Dumper(yaml.SafeDumper):
    """PyYAML's safe dumper; also quotes strings that this module's loader would read as something else."""


_StrictSafeLoader.yaml_implicit_resolvers = {}
for _kind, _pattern, _first in (
    ("bool", "true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(0|[1-9]\d*)", "-+0123456789"),
    ("float", r"[-+]?(\.\d+|\d+\.\d*)([eE][-+]?\d+)?|[-+]?\d+[eE][-+]?\d+|[-+]?\.inf|\.nan", "-+.0123456789"),
    ("null", "~|null|Null|NULL|None|", ["~", "n", "N", ""]),  # None as in the tutorial's configs
):
    for _class in (_StrictSafeLoader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(f"^({_pattern})$"), list(_first))


def parse_value(text: str, name: str = "a value") -> Any:
    """One YAML value. Errors mention `name`."""
    value = _parse(text, name)
    _apply_merge_keys(value, name, set())
    return value


def _parse(text: str, name: str) -> Any:
    """One YAML value, in which << is a key like others: its value is the mapping itself that the alias names."""
    try:
        return yaml.load(text, Loader=_StrictSafeLoader)
    except yaml.MarkedYAMLError as error:  # its text names the input "<unicode string>" and repeats the line
        mark, context = error.problem_mark, f" ({error.context})" if error.context else ""
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        hints = {
            "undefined alias": f"; << finds anchors above it in the same file, {EXTENDS}: NAME any config",
            "'\\t'": "; indent with spaces",
            "mapping values": "; indent all keys of a mapping alike, and quote values with a colon",
            "<block end>": "; indent all keys of a mapping alike",
        }
        hint = next((hint for words, hint in hints.items() if words in str(error)), "")
        raise UserError(f"cannot read {name}: {place}{error.problem}{context}{hint}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a wrong tag, such as !!int word
        reason = " ".join(str(error).replace('in "<unicode string>", ', "").split())
        if any("\udc80" <= letter <= "\udcff" for letter in text):  # bytes of the command line that are no UTF-8
            reason = "it is not UTF-8; rename the file, or give the path of a link to it"
        raise UserError(f"cannot read {name}: {reason}") from None


def _apply_merge_keys(value: Any, name: str, visited: set[int]) -> None:
    """Replaces each << by the keys that it names, in place, so that aliases of the mapping see them, too."""
    if id(value) in visited:
        return
    visited.add(id(value))
    parents = value.pop(MERGE, []) if isinstance(value, dict) else []
    parents = parents if isinstance(parents, list) else [parents]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    for part in (*parents, *inner):
        _apply_merge_keys(part, name, visited)
    for parent in parents:
        if not isinstance(parent, dict):
            fault = f"{name}: {MERGE} takes an alias such as *base, got {parent!r:.80}"
            raise UserError(f"{fault}; to name a config, write {EXTENDS}")
        _inherit(value, parent)


def _inherit(values: dict[str, Any], parent: dict[str, Any]) -> None:
    """Adds the parent's keys that `values` lacks, also those of the sections that are in both."""
    both = {**parent, **values}
    for key, value in values.items():
        if isinstance(value, dict) and isinstance(parent.get(key), dict):
            both[key] = dict(value)  # a copy, because aliases may share the section
            _inherit(both[key], parent[key])
    values.clear()
    values.update(both)


def dump(values: dict[str, Any]) -> str:
    """A YAML text that `parse_value` reads back to the same values."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, default_flow_style=None)


def read_file(path: str) -> dict[str, dict[str, Any]]:
    """The named configs of a YAML file, with the keys that they inherit, without those of files that it extends."""
    return {name: config.values for name, config in _read(path)[0].items()}


def default_name(path: str) -> str:
    """The config used if none is named: the only one, else base; UserError for a file with several, but no base."""
    names = [*read_file(path)]
    if len(names) > 1 and "base" not in names:
        raise UserError(f"{path} has several configs; choose one with --config: {', '.join(names)}")
    return names[0] if len(names) == 1 else "base"


def find(path: str, name: str) -> NamedConfig:
    """The config `name` in the file, or else in the only other YAML file of its directory that has it."""
    configs, inherited = _read(path)
    known = inherited | configs
    matches, faults = {path: known[name]} if name in known else {}, ""
    for neighbor in [] if matches else sorted(Path(path).parent.glob("*.yaml")):
        try:
            configs = _read(str(neighbor))[0]
        except UserError as error:  # possibly a file of another program
            configs, faults = {}, f"{faults}; {error}" if name in Path(neighbor).read_text(errors="replace") else faults
        for key, config in configs.items():
            if not config.values or config.values.keys() & Config.model_fields:  # else a file such as benchy-conf.yaml
                known[key] = config
        if name in configs:
            matches[str(neighbor)] = configs[name]
    if len(matches) > 1:
        raise UserError(f"config {name} is in {' and in '.join(matches)}; choose one with --yaml_config")
    for config in matches.values():
        return config
    fault = f"unknown config {name} in {path} and the other YAML files of its directory{did_you_mean(name, known)}"
    raise UserError(f"{fault}; known: {', '.join(known)}{faults}")


def _read(path: str, extended_by: tuple[str, ...] = ()) -> tuple[Configs, Configs]:
    """The configs of a file, and those of the files that it extends, all with the keys that they inherit."""
    if os.path.realpath(path) in map(os.path.realpath, extended_by):
        raise UserError(f"the files {' -> '.join((*extended_by, path))} extend each other; remove one of the extends")
    try:
        configs = _parse(Path(path).read_text(encoding="utf-8"), path)
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise UserError(f"cannot read {path}: line {line} is not UTF-8; save the file as UTF-8") from None
    except OSError as error:
        shipped, remedy = SHIPPED / Path(path).name, "correct --yaml_config"
        if extended_by:
            remedy = f"correct {EXTENDS} in {extended_by[-1]}"
        elif shipped.exists():
            remedy = f"run the command in {SHIPPED.parent}, or give --yaml_config {shipped}"
        (remedy,) = os_remedy(error) or [remedy]
        raise UserError(f"cannot read {path}: {error.strerror or error}; {remedy}") from error
    if isinstance(configs, dict) and MERGE in configs:  # whole configs
        _apply_merge_keys(configs, path, set())
    if configs is None:
        raise UserError(f"{path} is empty; write named configs, such as base: {{seed: 1}}")
    for name, values in configs.items() if isinstance(configs, dict) else [("the file", configs)]:
        if not isinstance(name, str):
            raise UserError(f"{path}: the name of a config must be a text, got {name!r}; write it in quotes")
        if not isinstance(values, dict) and name != EXTENDS:
            fault = f"{path} must hold named configs, such as base: {{seed: 1}}, but {name} is {values!r:.100}"
            raise UserError(f"{fault}{did_you_mean(name, [EXTENDS])}")
    file, inherited = configs.pop(EXTENDS, None), Configs()
    if file is not None:
        expanded = os.path.expandvars(os.path.expanduser(str(file)))
        near, shipped = Path(path).parent / expanded, SHIPPED / expanded
        is_other = near.exists() and os.path.realpath(near) != os.path.realpath(path)
        extended, further = _read(str(near if is_other or not shipped.exists() else shipped), (*extended_by, path))
        inherited = further | extended
    return _complete(path, configs, inherited), inherited


def _complete(path: str, configs: dict[str, dict[str, Any]], inherited: Configs) -> Configs:
    """The configs of a file with the keys that they inherit from earlier ones and from those of extended files."""
    complete, visited = Configs(), set[int]()
    for name, values in configs.items():
        known, merged = inherited | complete, values.get(MERGE)
        _apply_merge_keys(values, path, visited)
        base = values.pop(EXTENDS, name)
        if base != name and base not in list(known):
            hint = did_you_mean(str(base), known) or (
                f"; configs of another file need {EXTENDS}: UNet.yaml at the top of this one, anchors {MERGE}: *{base}"
            )
            raise UserError(f"{path}: config {name} extends {base}, which is no earlier config{hint}")
        parent = (inherited if base == name else known).get(base)
        if parent is None:
            first = next(iter(merged), None) if isinstance(merged, list) else merged
            parent = next((config for config in complete.values() if config.values is first), None)
        else:
            _inherit(values, parent.values)
        complete[name] = NamedConfig(name, values, parent)
    return complete
