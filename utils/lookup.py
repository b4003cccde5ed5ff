"""Entries of tables such as LOADERS and OPTIMIZERS by name."""

from collections.abc import Mapping
from typing import TypeVar

from utils.config import did_you_mean
from utils.errors import UserError

Entry = TypeVar("Entry")


def lookup(table: Mapping[str, Entry], name: str, key: str, remedy: str = "") -> Entry:
    """The entry `key`, the value of the config key `name`; UserError with the known ones if there is none."""
    if key not in table:
        raise UserError(f"{name}: unknown name {key}; known: {', '.join(table)}{did_you_mean(key, table)}{remedy}")
    return table[key]
