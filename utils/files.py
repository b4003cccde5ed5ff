"""Atomic writes, locked files, copies with a progress bar, and checks of a command's output."""

import contextlib
import errno
import fcntl
import glob
import hashlib
import io
import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from utils.errors import UserError, os_errors_for_users, os_reason
from utils.progress import Progress

log = logging.getLogger(__name__)

MIB, GIB = 2**20, 2**30
HEAD, BLOCK, BLOCKS = MIB, 2**16, 64  # bytes: 5 MiB of a file of any size; a channel of nine is sampled 7 times
POLL_SECONDS, ABANDONED_SECONDS = 0.5, 3600.0
IN_USE = (BlockingIOError, PermissionError)  # the errors of a lock that is held; the latter on SMB


@contextlib.contextmanager
def atomic_write(targets: Sequence[Path]) -> Iterator[list[Path]]:
    """Yields temporary paths to write to; they are renamed to the targets at the end, or removed if the block fails.

    Earlier files of those names stay until then. The temporary files are in the same directory, since a rename does
    not cross file systems. Their names do not contain process ids, which containers that share a directory may share.
    An OSError names the first target.
    """
    partials = [_partial(target) for target in targets]
    for target in targets:
        remove_abandoned(target)
    try:
        yield partials
        for partial in partials:
            _flush(partial)
        for partial, target in zip(partials, targets, strict=True):
            os.replace(partial, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            for partial in partials:
                partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = targets[0]
        raise
    with contextlib.suppress(OSError):  # the files are complete under their names
        _flush(targets[0].parent)  # makes the new names survive a crash


@contextlib.contextmanager
def atomic_directory(target: Path) -> Iterator[Path]:
    """Yields a temporary directory, which replaces the target, or is removed if the block fails; see `atomic_write`."""
    partial = _partial(target)
    try:
        partial.mkdir(parents=True)
        yield partial
        for file in partial.iterdir():
            _flush(file)
        _flush(partial)
        replaced = target.with_name(f".{target.name}.replaced")
        if target.exists():  # a rename does not replace a directory that has files
            shutil.rmtree(replaced, ignore_errors=True)
            os.rename(target, replaced)
        os.rename(partial, target)
        shutil.rmtree(replaced, ignore_errors=True)
        _flush(target.parent)
    except OSError as error:
        error.filename = target
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def recover(directory: Path) -> None:
    """Cleans up after a process that was killed while it wrote to the directory; no other may be writing to it."""
    for partial in directory.glob(".*.partial"):
        remove(partial, ignore_errors=True)
    for replaced in directory.glob(".*.replaced"):
        target = directory / replaced.name[1:].removesuffix(".replaced")
        if not target.exists():  # killed between two renames
            os.rename(replaced, target)
        shutil.rmtree(replaced, ignore_errors=True)


def remove_abandoned(target: Path) -> None:
    """Removes temporary files that nobody has changed for an hour: a process was killed while it wrote the target."""
    for partial in target.parent.glob(f".{glob.escape(target.name)}.*.partial"):
        with contextlib.suppress(OSError):
            if time.time() - partial.stat().st_mtime > ABANDONED_SECONDS:
                partial.unlink()


def _partial(target: Path) -> Path:
    """A new temporary name in the target's directory, which another process may write to at the same time."""
    return target.with_name(f".{target.name}.{uuid.uuid4().hex}.partial")


def remove(path: Path, ignore_errors: bool = False) -> None:
    """Removes a file, a link, or a directory with all that is in it; `ignore_errors` counts for directories."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=ignore_errors, onerror=_raise_with_path)
    else:
        path.unlink(missing_ok=True)


def _raise_with_path(function: object, path: str, info: Any) -> NoReturn:
    """An error of shutil.rmtree, which names a file without its directory."""
    error: OSError = info[1]
    error.filename = path
    raise error


def _flush(path: Path) -> None:
    """Waits until the file or directory is on disk. Not every file system can flush a directory."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if not path.is_dir() or error.errno in (errno.EIO, errno.ENOSPC, errno.EDQUOT):
            raise


def open_locked(path: Path, fault: str, seconds: float = 0.0) -> io.FileIO:
    """Opens or creates a file that stays locked until it is closed or the process ends; it is not buffered.

    The lock is that of the file system (flock). Raises UserError(fault) if another process holds it for `seconds`, and
    OSError if the file is a link, whose target is not ours to change.
    """
    deadline = time.monotonic() + seconds
    while True:
        file = io.FileIO(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+b")
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except IN_USE:
            file.close()
        except OSError as error:
            reason = f"The file system of {path} has no locks ({os_reason(error)})"
            log.warning("%s: make sure that no other process writes there at the same time", reason)
            return file
        if time.monotonic() >= deadline:
            raise UserError(fault)
        time.sleep(POLL_SECONDS)


def is_locked(path: Path) -> bool:
    """True if a process seems to hold the lock of `open_locked(path)`; changes nothing."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, IN_USE)
    return False


def copy_file(source: str | Path, target: str | Path, description: str) -> None:
    """Copies a file's content and shows the progress; a copy to os.devnull reads it into the page cache."""
    buffer, done = memoryview(bytearray(2**24)), 0
    with (
        open(source, "rb", buffering=0) as read,
        open(target, "wb") as written,
        Progress(description, os.path.getsize(source) // MIB, "MiB") as progress,
    ):
        while count := read.readinto(buffer):
            written.write(buffer[:count])
            done += count
            progress.advance(done // MIB - progress.done)


def sample_digest(path: str | Path) -> str:
    """SHA-256 of the size, the first MiB, which holds the header, and blocks at equal distances up to the end."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest = hashlib.sha256(f"{size} ".encode())
        digest.update(file.read(HEAD))
        for number in range(1, BLOCKS + 1):
            file.seek(max(HEAD, number * (size - BLOCK) // BLOCKS))
            digest.update(file.read(BLOCK))
    return digest.hexdigest()


def read_json(path: Path) -> Any:
    """The value of a JSON file; raises OSError or ValueError if there is none."""
    return json.loads(path.read_text(encoding="utf-8", errors="replace"))


def to_json(value: Any, indent: int | None = 2) -> str:
    """JSON, indented or (None) in one line. It has no NaN and no infinity: they become null."""
    return json.dumps(json.loads(json.dumps(value), parse_constant=lambda _: None), indent=indent) + "\n"


def check_target(target: Path, overwrite: bool, option: str = "--output") -> None:
    """Raises UserError if a file must not be written to `target`; `option` is the flag that names it."""
    if target.is_dir():
        raise UserError(f"output {target} is a directory; give another {option}")
    if os.path.lexists(target) and not overwrite:
        raise UserError(f"output {target} exists; give --overwrite to replace it, or another {option}")


def make_output_directory(directory: Path, size: int, remedy: str = "give another --output") -> None:
    """Creates the directory; UserError if it is not writable, or its disk (not a quota) has less than `size` bytes."""
    with os_errors_for_users(f"cannot create directory {directory}", remedy):
        directory.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(directory).free
    if not os.access(directory, os.W_OK | os.X_OK):
        raise UserError(f"directory {directory} is not writable; {remedy}")
    if free < size:
        fault = f"directory {directory} has {free / 1e6:,.1f} MB free and the output needs {size / 1e6:,.1f} MB"
        raise UserError(f"{fault}; free some space, or {remedy}")
