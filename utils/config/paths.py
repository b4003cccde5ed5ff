"""The type of config keys that are paths: `~`, `$VAR` and `${VAR}` are expanded when a config is loaded."""

from __future__ import annotations

import os
import re
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    PlainSerializer,
    SerializationInfo,
    Tag,
    ValidationInfo,
)

EXPAND = {"expand": True}  # the context of a validation that expands paths
FOR_A_FILE = "file"  # the mode of model_dump that writes paths so that reading them expands nothing
VARIABLE = re.compile(r"\$(?:(\$)|(\w+)|\{(\w+)\})", re.ASCII)


def expand(path: str) -> str:
    """The path with `~` and environment variables expanded, and $$ as a dollar sign; ValueError if one is not set."""

    def value(match: re.Match[str]) -> str:
        name = match[2] or match[3]
        if name is None:
            return "$"
        if not os.environ.get(name):
            raise ValueError(f"the environment variable {name} in {path!r} is not set; set it, or write $$ for $")
        return os.environ[name]

    home = os.path.expanduser(path)
    if home.startswith("~"):
        raise ValueError(f"no home directory for {path.split('/')[0]} in {path!r}; write ./{path} for a file named so")
    return VARIABLE.sub(value, home)


def _read(path: Any, info: ValidationInfo) -> Any:
    if not isinstance(path, str) or not path:
        hint = {None: "; YAML reads an empty value or a bare ~ as None", "": "; . is the current directory"}
        raise ValueError(f"expected a path, got {path!r:.200}{hint[path] if path in (None, '') else ''}")
    return expand(path) if info.context == EXPAND else path


def _write(path: str, info: SerializationInfo) -> str:
    return path.replace("$", "$$") if info.mode == FOR_A_FILE else path


PathText = Annotated[str, BeforeValidator(_read), PlainSerializer(_write)]

# Tags of the two types of a value that may also be a list; error messages omit them.
ONE, LIST = "=one", "=list"
one_or_list = Discriminator(lambda value: LIST if isinstance(value, list) else ONE)


def _distinct(paths: str | list[str]) -> str | list[str]:
    """Refuses a path that is listed twice; a list of one path is that path."""
    if isinstance(paths, str):
        return paths
    for number, path in enumerate(paths):
        if path in paths[:number]:
            raise ValueError(f"expected different paths, got {path} twice; remove one")
    return paths if len(paths) > 1 else paths[0]


# One path, or a list of paths.
PathTexts = Annotated[
    Annotated[PathText, Tag(ONE)] | Annotated[list[PathText], Field(min_length=1), Tag(LIST)],
    one_or_list,
    AfterValidator(_distinct),
]
