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
LARGEST_NAME, LARGEST_PATH = 255, 3000  # bytes; Linux allows 4095, and a run's files have longer paths than its expdir
VARIABLE = re.compile(r"\$(?:(\$)|(\w+)|\{(\w+)\})", re.ASCII)


class Verbatim(str):
    """A path that is not expanded."""


def expand(path: str) -> str:
    """The path with `~` and environment variables expanded, and $$ as a dollar sign; ValueError if one is not set."""

    def value(match: re.Match[str]) -> str:
        name = match[2] or match[3]
        if name is None:
            return "$"
        if name not in os.environ:
            raise ValueError(f"the environment variable {name} in {path!r} is not set; set it, or write $$ for $")
        return os.environ[name]

    home = os.path.expanduser(path)
    if home.startswith("~"):
        raise ValueError(f"no home directory for {path.split('/')[0]} in {path!r}; write ./{path} for a file named so")
    return VARIABLE.sub(value, home)


def _read(value: Any, info: ValidationInfo) -> Any:
    if not isinstance(value, str) or not value:
        hints = {None: " (YAML reads an empty value or a bare ~ as None)", "": " (. is the current directory)"}
        hint = hints.get(value, "") if value is None or isinstance(value, str) else ""
        raise ValueError(f"expected a path, got {value!r:.200}{hint}")
    if isinstance(value, Verbatim):
        return value
    return expand(value) if info.context == EXPAND else value


def _check(path: str) -> str:
    """Refuses what no file system accepts, before anything is written."""
    try:
        encoded = path.encode()
    except UnicodeEncodeError:
        raise ValueError(f"expected a path in UTF-8, got {path!r}; rename the file or directory") from None
    if not path:
        raise ValueError("expected a path, got an empty one: its environment variables are empty; set them")
    if "\0" in path:
        raise ValueError(f"expected a path without NUL characters, got {path!r}")
    longest = max(map(len, encoded.split(b"/")))
    if longest > LARGEST_NAME or len(encoded) > LARGEST_PATH:
        raise ValueError(
            f"expected a path of at most {LARGEST_PATH} bytes with names of at most {LARGEST_NAME}, got one of "
            f"{len(encoded)} bytes with a name of {longest}: {path:.40}…"
        )
    return path


def _write(path: str, info: SerializationInfo) -> str:
    if info.mode != FOR_A_FILE:
        return path
    return f"{'./' if path.startswith('~') else ''}{path}".replace("$", "$$")


PathText = Annotated[str, BeforeValidator(_read), AfterValidator(_check), PlainSerializer(_write)]

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
