"""The identity of a run: short texts that are the same on all of its ranks, so that ranks of two runs never mix."""

from __future__ import annotations

import hashlib
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from utils.distributed.launch import Launch
from utils.errors import LocalError, os_errors_for_users

TOP = Path(__file__).parents[2]
PACKAGES = ("networks", "utils")


def digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:12]


def identify(launch: Launch, known: Mapping[str, str]) -> dict[str, str]:
    """The identity of this rank's run: `known` by the entry script, command line, program and launcher.

    It contains nothing that may differ between ranks of a run, such as the host or the device.
    """
    return {
        **known,
        "command line": digest(shlex.join(sys.argv[1:])),
        "program": program_digest(),
        "job": launch.job,
        "number of ranks": str(launch.world_size),
    }


def program_digest() -> str:
    """Digest of the program's source files. It does not call git, which many ranks would do at the same time."""
    script = Path(getattr(sys.modules["__main__"], "__file__", None) or "")
    # Editors create hidden files next to those that they edit, also links to nowhere.
    paths = sorted(path for package in PACKAGES for path in (TOP / package).rglob("[!.]*.py"))
    with os_errors_for_users("cannot read the program's files", "check the file system", LocalError):
        files = {str(path.relative_to(TOP)): path.read_bytes() for path in paths}
        if script.is_file():
            files["script"] = script.read_bytes()
    return digest("".join(f"{name}\0{hashlib.sha256(data).hexdigest()}\n" for name, data in files.items()))


def describe_differences(rank: int, own: Mapping[str, str], expected: Mapping[str, str]) -> str:
    """One line that names what differs between a rank and rank 0; empty if nothing does."""
    names = [name for name in {**expected, **own} if own.get(name, "") != expected.get(name, "")]
    if not names:
        return ""
    differences = ", ".join(f"{name} ({own.get(name) or 'none'}, not {expected.get(name) or 'none'})" for name in names)
    return (
        f"rank {rank} belongs to another run than rank 0: it differs in {differences}; start all ranks with the same "
        "command and program in the same directory, and give each of several runs a MASTER_PORT of its own"
    )
