"""Files and directories that are whole or not there."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path


@contextlib.contextmanager
def atomic_write(targets: Sequence[Path]) -> Iterator[list[Path]]:
    """Paths to write to, beside the targets; the files take the targets' names in the end, or go if the block fails.

    What stood under those names stays until then. The temporary names lie in the same directory, since a rename does
    not cross file systems, and are not made of process ids, which containers that share a directory may share too.
    """
    partials = [_partial(target) for target in targets]
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


@contextlib.contextmanager
def atomic_directory(target: Path) -> Iterator[Path]:
    """A directory to write files to, beside the target; it takes the target's name, and place, in the end.

    Its files are on the disk by then; if the block fails, it goes.
    """
    partial = _partial(target)
    partial.mkdir(parents=True)
    try:
        yield partial
        for file in partial.iterdir():
            _flush(file)
        with contextlib.suppress(OSError):  # not every file system can do it with a directory
            _flush(partial)
        replaced = target.with_name(f".{target.name}.replaced")
        if target.exists():  # a directory takes no other's place while that has files in it
            shutil.rmtree(replaced, ignore_errors=True)
            os.rename(target, replaced)
        try:
            os.rename(partial, target)
        except BaseException:
            if replaced.exists():
                os.rename(replaced, target)
            raise
        shutil.rmtree(replaced, ignore_errors=True)
        with contextlib.suppress(OSError):
            _flush(target.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def recover(directory: Path) -> None:
    """Tidies up after a process that was killed while it wrote there; no other may be writing."""
    for partial in directory.glob(".*.partial"):
        if partial.is_dir() and not partial.is_symlink():
            shutil.rmtree(partial, ignore_errors=True)
        else:
            partial.unlink(missing_ok=True)
    for replaced in directory.glob(".*.replaced"):
        target = directory / replaced.name[1:].removesuffix(".replaced")
        if not target.exists():  # killed between two renames
            os.rename(replaced, target)
        shutil.rmtree(replaced, ignore_errors=True)


def _partial(target: Path) -> Path:
    return target.with_name(f".{target.name}.{uuid.uuid4().hex}.partial")


def _flush(path: Path) -> None:
    """Waits until what was written is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
