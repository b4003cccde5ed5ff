"""YAML files of named configs, and `extends`, by which a file or a config inherits from another.

`extends: UNet.yaml` at the top of a file adds the configs of another file, named relative to this one; a config that is
in both inherits the keys of the other one. `extends: base` in a config inherits the keys of an earlier config. Keys are
inherited as by `<<: *base`: a section that is given again replaces the whole section.

Numbers and booleans are those of YAML 1.2: 1e-4 is a number, `on` and 1:30 are strings. Duplicate keys are errors.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import yaml

from utils.config.messages import did_you_mean
from utils.errors import UserError, os_remedy

EXTENDS = "extends"
Configs = dict[str, dict[str, Any]]  # name -> keys and values


class _StrictSafeLoader(yaml.SafeLoader):
    """PyYAML's safe loader with other implicit types, which refuses duplicate keys."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        names = [key.value for key, _ in node.value]
        for name in names:
            if names.count(name) > 1:
                raise yaml.YAMLError(f"line {node.start_mark.line + 1}: duplicate key {name}; remove one")
        return node


class _Dumper(yaml.SafeDumper):
    """PyYAML's safe dumper; also quotes strings that this module's loader would read as something else."""


_StrictSafeLoader.yaml_implicit_resolvers = {}
for _kind, _pattern, _first in (
    ("bool", "true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(0|[1-9]\d*)", "-+0123456789"),
    ("float", r"[-+]?(\.\d+|\d+\.\d*)([eE][-+]?\d+)?|[-+]?\d+[eE][-+]?\d+|[-+]?\.inf|\.nan", "-+.0123456789"),
    ("null", "~|null|Null|NULL|None|", ["~", "n", "N", ""]),  # None as in the tutorial's configs
    ("merge", "<<", "<"),
):
    for _class in (_StrictSafeLoader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(f"^({_pattern})$"), list(_first))


def parse_value(text: str, name: str = "a value") -> Any:
    """One YAML value. Errors mention `name`."""
    try:
        return yaml.load(text, Loader=_StrictSafeLoader)
    except yaml.MarkedYAMLError as error:  # its text names the input "<unicode string>" and repeats the line
        mark, context = error.problem_mark, f" ({error.context})" if error.context else ""
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise UserError(f"cannot read {name}: {place}{error.problem}{context}") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a wrong tag, such as !!int word
        reason = " ".join(str(error).replace('in "<unicode string>", ', "").split())
        raise UserError(f"cannot read {name}: {reason}") from None


def dump(values: dict[str, Any]) -> str:
    """A YAML text that `parse_value` reads back to the same values."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, default_flow_style=None)


def read_file(path: str) -> Configs:
    """The named configs of a YAML file, with the keys that they inherit, without those of files that it extends."""
    return _read(path)[0]


def default_name(path: str) -> str:
    """The config used if none is named: the only one in the file, as in a run's config.yaml, otherwise base."""
    configs = read_file(path)
    return next(iter(configs)) if len(configs) == 1 else "base"


def find(path: str, name: str) -> dict[str, Any]:
    """The values of config `name` in the file, or else in the only other YAML file of its directory that has it."""
    configs, inherited = _read(path)
    known = inherited | configs
    matches, faults = {path: known[name]} if name in known else {}, ""
    for neighbor in [] if matches else sorted(Path(path).parent.glob("*.yaml")):
        try:
            configs = read_file(str(neighbor))
        except UserError as error:  # possibly a file of another program
            configs, faults = {}, f"{faults}; {error}"
        known |= configs
        if name in configs:
            matches[str(neighbor)] = configs[name]
    if len(matches) > 1:
        raise UserError(f"config {name} is in {' and in '.join(matches)}; choose one with --yaml_config")
    for values in matches.values():
        return values
    raise UserError(
        f"unknown config {name} in {path} and the other YAML files of its directory{did_you_mean(name, known)}; "
        f"known: {', '.join(known)}{faults}"
    )


def _read(path: str, extended_by: tuple[str, ...] = ()) -> tuple[Configs, Configs]:
    """The configs of a file, and those of the files that it extends, all with the keys that they inherit."""
    if os.path.realpath(path) in map(os.path.realpath, extended_by):
        raise UserError(f"the files {' -> '.join((*extended_by, path))} extend each other; remove one of the extends")
    try:
        configs = parse_value(Path(path).read_text(encoding="utf-8", errors="replace"), path)
    except OSError as error:
        source = f"{EXTENDS} in {extended_by[-1]}" if extended_by else "--yaml_config"
        (remedy,) = os_remedy(error) or [f"correct {source}"]
        raise UserError(f"cannot read {path}: {error.strerror or error}; {remedy}") from None
    entries = configs.items() if isinstance(configs, dict) else [("the file", configs)]
    for name, values in entries:
        if not isinstance(values, dict) and name != EXTENDS:
            raise UserError(f"{path} must hold named configs, such as base: {{seed: 1}}, but {name} is {values!r:.100}")
    parent, inherited = configs.pop(EXTENDS, None), Configs()
    if parent is not None:
        target = Path(path).parent / os.path.expandvars(os.path.expanduser(str(parent)))
        extended, further = _read(str(target), (*extended_by, path))
        inherited = further | extended
    complete = Configs()
    for name, values in configs.items():
        base, known = values.pop(EXTENDS, name), inherited | complete
        if base != name and base not in known:
            raise UserError(
                f"{path}: config {name} extends {base}, which is no earlier config{did_you_mean(str(base), known)}"
            )
        complete[name] = (inherited if base == name else known).get(base, {}) | values
    return complete, inherited
