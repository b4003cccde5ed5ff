"""YAML files of named configs, and `extends`, by which a file or a config inherits from another.

`extends: UNet.yaml` at the top of a file adds the configs of another file, named relative to this one; a config that is
in both inherits the keys of the other one. `extends: base` in a config inherits the keys of another config. Keys are
inherited as by `<<: *base`: a section that is given again replaces the whole section.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.config.messages import nearest
from utils.config.paths import expand
from utils.config.yaml_values import parse_value
from utils.errors import UserError, os_errors_for_users
from utils.files import MIB, read_text

LARGEST_FILE = MIB  # a file of configs; the shipped ones have 4 KiB
MOST_FILES = 10  # that extend one another
EXTENDS = "extends"


@dataclass(frozen=True)
class ConfigFile:
    """A file's own named configs, and the file that it extends."""

    path: str
    configs: Mapping[str, Mapping[str, Any]]
    parent: ConfigFile | None = None

    def names(self) -> list[str]:
        """The names of its configs, and of those of the files that it extends."""
        return list(dict.fromkeys([*self.configs, *(self.parent.names() if self.parent else [])]))

    def values(self, name: str) -> dict[str, Any]:
        """The keys of one of the `names` and of all that it inherits from; raises UserError for a circle."""
        layers: list[Mapping[str, Any]] = []
        seen: set[tuple[str, str]] = set()
        file = self._holder(name)
        while file is not None:
            if (file.path, name) in seen:
                raise UserError(f"config '{name}' of {file.path} extends itself; remove one of the extends")
            seen.add((file.path, name))
            own = file.configs[name]
            layers.append({key: value for key, value in own.items() if key != EXTENDS})
            file, name = file._extended(name, own[EXTENDS]) if EXTENDS in own else (file._inherited(name), name)
        return {key: value for layer in reversed(layers) for key, value in layer.items()}

    def _holder(self, name: str) -> ConfigFile | None:
        """The first file that has a config of this name: this one, or one that it extends."""
        return self if name in self.configs else self._inherited(name)

    def _inherited(self, name: str) -> ConfigFile | None:
        return self.parent._holder(name) if self.parent else None

    def _extended(self, name: str, other: Any) -> tuple[ConfigFile, str]:
        """The file and the name of the config `other`, which config `name` extends."""
        found = None
        if isinstance(other, str):
            found = self._inherited(name) if other == name else self._holder(other)
        if found is None:
            known = [known for known in self.names() if known != name]
            expected = f"expected one of {', '.join(known)}" if known else "but no other config is known"
            hint = nearest(other, known) if isinstance(other, str) else ""
            if self.parent is None and not hint:
                hint = f"; to extend configs of another file, add `{EXTENDS}: …/UNet.yaml` as the first line"
            raise UserError(f"{self.path}: config '{name}' extends {other!r:.100}, {expected}{hint}")
        return found, other


def open_file(path: str, extended_by: tuple[str, ...] = ()) -> ConfigFile:
    """Reads a file of named configs and those that it extends; UserError if that fails or `extends` form a circle."""
    if os.path.realpath(path) in map(os.path.realpath, extended_by):
        raise UserError(f"the files {' -> '.join((*extended_by, path))} extend each other; remove one of the extends")
    if len(extended_by) == MOST_FILES:
        raise UserError(f"more than {MOST_FILES} files extend one another, from {extended_by[0]} to {path}; merge some")
    configs = parse_value(_text(path, extended_by), path)
    other = configs.pop(EXTENDS, None) if isinstance(configs, dict) else None
    _check_configs(path, configs)
    if other is None:
        return ConfigFile(path, configs)
    if not isinstance(other, str) or not other:
        raise UserError(f"{path}: extends: expected the path of a YAML file, such as UNet.yaml, got {other!r:.100}")
    try:
        target = str(Path(path).parent / expand(other))
    except ValueError as error:
        raise UserError(f"{path}: extends: {error}") from None
    return ConfigFile(path, configs, open_file(target, (*extended_by, path)))


def _check_configs(path: str, configs: Any) -> None:
    """Raises UserError if the values of a file are not named configs; names the first entry that is none."""
    fault = None if isinstance(configs, dict) else ""
    for name, values in configs.items() if isinstance(configs, dict) else ():
        if not isinstance(name, str) or not isinstance(values, dict):
            fault = f"; correct or remove {name!s:.100}, which is {values!r:.100}"
            break
    if fault is not None:
        rule = "must hold named configs, each a mapping of keys to values, such as base: {seed: 1}"
        raise UserError(f"{path} {rule}{fault}")


def _text(path: str, extended_by: tuple[str, ...]) -> str:
    action, remedy = f"cannot read yaml_config {path}", "run from the repository's root, or set --yaml_config"
    if extended_by:
        action, remedy = f"cannot read {path}, which {extended_by[-1]} extends", "correct the path after extends"
    if "\0" in path:
        raise UserError(f"{action!r}: a path has no NUL character; {remedy}")
    with os_errors_for_users(action, remedy):
        try:
            return read_text(path, LARGEST_FILE, errors="strict")
        except UnicodeDecodeError as error:
            line = error.object[: error.start].count(b"\n") + 1
            raise UserError(
                f"cannot read {path}: byte 0x{error.object[error.start]:02x} in line {line} is not UTF-8; save the "
                f"file in the encoding UTF-8"
            ) from None


def read_file(path: str) -> dict[str, dict[str, Any]]:
    """The named configs of a YAML file itself, as plain dicts."""
    return {name: dict(values) for name, values in open_file(path).configs.items()}


def default_name(path: str) -> str:
    """The config used if none is named: the only one in the file, as in a run's config.yaml, otherwise base."""
    configs = open_file(path).configs
    return next(iter(configs)) if len(configs) == 1 else "base"


def names(path: str) -> list[str]:
    """The names of a file's own configs; empty if the file belongs to another program."""
    try:
        return list(read_file(path))
    except UserError:
        return []


def find(path: str, name: str) -> dict[str, Any]:
    """The values of config `name` in the file, or else in the only other YAML file of its directory that has it."""
    file = open_file(path)
    if name in file.names():
        return file.values(name)
    others: dict[str, list[str]] = {}
    faults = []
    for other in map(str, sorted(Path(path).parent.glob("*.yaml"))):
        try:
            others |= {} if Path(other) == Path(path) else {other: list(read_file(other))}
        except UserError as error:  # possibly a file of another program
            faults.append(f"; {error}")
    matches = [other for other, known in others.items() if name in known]
    if len(matches) > 1:
        raise UserError(f"config {name} is in {' and in '.join(matches)}; choose one with --yaml_config")
    if matches:
        return open_file(matches[0]).values(name)
    known = list(dict.fromkeys([*file.names(), *(other for held in others.values() for other in held)]))
    raise UserError(
        f"unknown config {name} in {path} and the other YAML files of its directory; known: "
        f"{', '.join(known)}{nearest(name, known)}{''.join(faults)}"
    )
