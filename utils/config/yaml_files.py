"""YAML files of named configs, and `extends`, by which a file or a config inherits from another.

`extends: UNet.yaml` at the top of a file adds the configs of another file, named relative to this one; a config that is
in both inherits the keys of the other one. `extends: base` in a config inherits the keys of another config. Keys are
inherited as by `<<: *base`: a section that is given again replaces the whole section.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from utils.config.messages import nearest
from utils.config.paths import expand
from utils.config.yaml_values import parse_value
from utils.errors import UserError, os_errors_for_users
from utils.files import read_text

EXTENDS = "extends"
Configs = dict[str, dict[str, Any]]  # name -> keys and values


def read_file(path: str) -> Configs:
    """The named configs of a YAML file, with the keys that they inherit, without those of files that it extends."""
    return _read(path)[0]


def default_name(path: str) -> str:
    """The config used if none is named: the only one in the file, as in a run's config.yaml, otherwise base."""
    configs = read_file(path)
    return next(iter(configs)) if len(configs) == 1 else "base"


def names(path: str) -> list[str]:
    """The names of a file's own configs; empty if the file belongs to another program."""
    try:
        return list(read_file(path))
    except UserError:
        return []


def find(path: str, name: str) -> dict[str, Any]:
    """The values of config `name` in the file, or else in the only other YAML file of its directory that has it."""
    configs, inherited = _read(path)
    known = inherited | configs
    if name in known:
        return known[name]
    matches: Configs = {}
    faults = ""
    for neighbor in sorted(Path(path).parent.glob("*.yaml")):
        try:
            configs = {} if neighbor == Path(path) else read_file(str(neighbor))
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
        f"unknown config {name} in {path} and the other YAML files of its directory; known: "
        f"{', '.join(known)}{nearest(name, known)}{faults}"
    )


def _read(path: str, extended_by: tuple[str, ...] = ()) -> tuple[Configs, Configs]:
    """The configs of a file, and those of the files that it extends, all with the keys that they inherit."""
    if os.path.realpath(path) in map(os.path.realpath, extended_by):
        raise UserError(f"the files {' -> '.join((*extended_by, path))} extend each other; remove one of the extends")
    action, remedy = f"cannot read yaml_config {path}", "run from the repository's root, or set --yaml_config"
    if extended_by:
        action, remedy = f"cannot read {path}, which {extended_by[-1]} extends", "correct the path after extends"
    try:
        with os_errors_for_users(action, remedy):
            configs = parse_value(read_text(path, errors="strict"), path)
    except UnicodeDecodeError as error:
        raise UserError(f"cannot read {path}: {error}; save the file in the encoding UTF-8") from None
    parent = configs.pop(EXTENDS, None) if isinstance(configs, dict) else None
    _check_configs(path, configs)
    inherited: Configs = {}
    if parent is not None:
        if not isinstance(parent, str) or not parent:
            raise UserError(f"{path}: extends: expected the path of a YAML file, such as UNet.yaml, got {parent!r}")
        try:
            target = Path(path).parent / expand(parent)
        except ValueError as error:
            raise UserError(f"{path}: extends: {error}") from None
        extended, further = _read(str(target), (*extended_by, path))
        inherited = further | extended
    return {name: _complete(path, name, configs, inherited) for name in configs}, inherited


def _check_configs(path: str, configs: Any) -> None:
    """Raises UserError if the values of a file are not named configs; names the first entry that is none."""
    rule = f"{path} must hold named configs, each a mapping of keys to values, such as base: {{seed: 1}}"
    if not isinstance(configs, dict):
        raise UserError(rule)
    for name, values in configs.items():
        if not isinstance(name, str) or not isinstance(values, dict):
            raise UserError(f"{rule}; correct or remove {name}, which is {values!r:.100}")


def _complete(
    path: str, name: str, configs: Configs, inherited: Configs, extended_by: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The keys of config `name` of a file, and those that it inherits from the file or from the `inherited` configs."""
    values = {key: value for key, value in configs[name].items() if key != EXTENDS}
    if name in extended_by:
        raise UserError(f"config '{name}' of {path} extends itself; remove one of the extends")
    if EXTENDS not in configs[name]:
        return inherited.get(name, {}) | values
    base = configs[name][EXTENDS]
    known = [key for key in inherited | configs if key != name or key in inherited]
    if not isinstance(base, str) or base not in known:
        expected = f"expected one of {', '.join(known)}" if known else "but no other config is known"
        hint = nearest(str(base), known)
        if not inherited and not hint:
            hint = f"; to extend configs of another file, add `{EXTENDS}: …/UNet.yaml` as the first line"
        raise UserError(f"{path}: config '{name}' extends {base!r}, {expected}{hint}")
    if base == name or base not in configs:
        return inherited[base] | values
    return _complete(path, base, configs, inherited, (*extended_by, name)) | values
