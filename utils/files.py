"""Files that are whole or not there."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path


@contextlib.contextmanager
def appearing_whole(targets: Sequence[Path]) -> Iterator[list[Path]]:
    """Paths to write to, beside the targets; the files take the targets' names in the end, or go if the block fails.

    What stood under those names stays until then. The temporary names lie in the same directory, since a rename does
    not cross file systems, and are not made of process ids, which containers that share a directory may share too.
    """
    partials = [target.with_name(f".{target.name}.{uuid.uuid4().hex}.partial") for target in targets]
    try:
        yield partials
        for partial in partials:
            _flush(partial)
        for partial, target in zip(partials, targets, strict=True):
            os.replace(partial, target)
        # The new names, too, should survive a crash; but the files are whole, and not every file system can do it.
        with contextlib.suppress(OSError):
            _flush(targets[0].parent)
    finally:
        for partial in partials:
            partial.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    """Waits until what was written is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
