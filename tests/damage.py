"""Damaged versions of a file, for tests of the functions that read it: damaged bytes, values, and kinds of files."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# JSON texts of values that programs do not expect.
TEXTS = ["null", "true", "-1", "0", "1e308", "NaN", '""', '"x"', "[]", "{}", "[1]", '{"step": 1}', "16.0", '"16"']


def flip(content: bytes, rng: random.Random) -> bytes:
    changed = bytearray(content or b"x")
    for _ in range(rng.choice((1, 1, 1, 8))):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def truncate(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.randrange(len(content))]


def remove(content: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(content))
    return content[:place] + content[place + rng.randrange(1, 1 + len(content) // 2) :]


def zero(content: bytes, rng: random.Random) -> bytes:
    place, size = rng.randrange(len(content)), rng.randrange(1, 512)
    return content[:place] + bytes(len(content[place : place + size])) + content[place + size :]


BYTE_DAMAGES = (flip, truncate, remove, zero)


def bytewise(content: bytes, count: int, seed: int) -> Iterator[bytes]:
    """`count` damaged versions of the bytes, each different from them."""
    rng = random.Random(seed)
    yield from (b"", b"\0" * len(content))
    made = 2
    while made < count:
        version = rng.choice(BYTE_DAMAGES)(content, rng)
        if version != content:
            made += 1
            yield version


def valuewise(value: Any, count: int, seed: int) -> Iterator[str]:
    """`count` JSON texts that differ from `value` in one place, at any depth."""
    rng = random.Random(seed)
    yield from TEXTS
    for number in range(count - len(TEXTS)):
        changed = copy.deepcopy(value)
        holders = [holder for holder in _holders(changed) if holder]
        holder = rng.choice(holders)
        key = rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        marker = f"marker {number}"
        action = rng.choice(("replace", "replace", "replace", "remove", "rename", "wrap", "duplicate"))
        if action == "remove":
            del holder[key]
        elif action == "wrap":
            holder[key] = [holder[key]]
        elif action == "rename" and isinstance(holder, dict):
            holder[rng.choice(("", "x", "step", "$\\bad$/valid", "Loss/valid", "\0"))] = holder.pop(key)
        elif action == "duplicate" and isinstance(holder, dict):
            holder[marker] = rng.choice(list(holder.values()))
            yield json.dumps(changed).replace(json.dumps(marker), json.dumps(key))
            continue
        else:
            holder[key] = marker
        yield json.dumps(changed).replace(json.dumps(marker), rng.choice(TEXTS))


def _holders(value: Any) -> Iterator[Any]:
    """All lists and mappings in a value."""
    if isinstance(value, dict | list):
        yield value
        for part in value.values() if isinstance(value, dict) else value:
            yield from _holders(part)


REPLACEMENTS: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: None,
    "directory": lambda path: path.mkdir(),
    "dangling link": lambda path: path.symlink_to("nowhere"),
}


def replacements(path: Path, *without: str) -> Iterator[str]:
    """Replaces the file by something else, one after the other; restores it at the end."""
    kept = path.with_name(f"{path.name}.kept")
    path.rename(kept)
    for name, create in REPLACEMENTS.items():
        if name in without:
            continue
        create(path)
        yield name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    kept.rename(path)
