"""Progress of long operations, shown on rank 0: a live bar on a terminal, otherwise a line every few seconds."""

import sys
import time
from typing import Any

from utils.launchers import launched_rank

SECONDS_BETWEEN_LINES = 10.0


def format_duration(seconds: float) -> str:
    """The duration as h:mm:ss, or m:ss below one hour."""
    minutes, rest = divmod(round(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Progress:
    """Counts to `total` and shows the progress on stderr. Batch logs get lines instead of a bar that is redrawn."""

    advances = 0  # calls of `advance` in this process

    def __init__(self, description: str, total: int, unit: str = "steps", live_only: bool = False) -> None:
        """`live_only`: show a bar on a terminal, but print no lines elsewhere, because the caller logs its own."""
        self.description, self.total, self.unit = description, total, unit
        self.done = self._lines = 0
        self._silent, self._live_only = launched_rank() > 0, live_only
        self._bar: Any = None

    def __enter__(self) -> "Progress":
        self._started = self._last_line = time.monotonic()
        if not self._silent and sys.stderr.isatty():
            self._bar = _rich_bar(self.description, self.total)
        return self

    def advance(self, count: int = 1, note: str = "") -> None:
        """Adds `count`; `note`, such as a loss, is shown next to the count."""
        self.done += count
        Progress.advances += 1
        if self._silent:
            return
        if self._bar is not None:
            self._bar.update(0, completed=self.done, note=note)
            return
        now = time.monotonic()
        if not self._live_only and now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line, self._lines = now, self._lines + 1
            remaining = (now - self._started) / max(self.done, 1) * (self.total - self.done)
            line = f"{self.description}: {self.done}/{self.total} {self.unit}, {format_duration(remaining)} left"
            sys.stderr.write(f"{line} {note}".rstrip() + "\n")
            sys.stderr.flush()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self._lines and kind is None:
            took = format_duration(time.monotonic() - self._started)
            sys.stderr.write(f"{self.description}: {self.done} {self.unit} in {took}\n")


def _rich_bar(description: str, total: int) -> Any:
    """A started rich progress bar on stderr, or None if rich is not installed."""
    try:
        from rich import progress
        from rich.console import Console
    except ImportError:
        return None
    counts = progress.TextColumn("{task.completed}/{task.total} {task.fields[note]}")
    columns = *progress.Progress.get_default_columns(), counts
    bar = progress.Progress(*columns, console=Console(stderr=True), transient=True)
    bar.add_task(description, total=total, note="")
    bar.start()
    return bar
