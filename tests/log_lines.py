"""The format of log lines on stderr and in out.log."""

import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest

# The prefix of a line: time, logger's name, level.
LOG_LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} - \S+ - (?P<level>[A-Z]+) - ")


def messages(text: str, level: str | None = None) -> list[str]:
    """The messages of the log lines of a text; only those of one level, if given."""
    lines = [(line, LOG_LINE.match(line)) for line in text.splitlines()]
    return [line[match.end() :] for line, match in lines if match and level in (None, match["level"])]


def other_lines(text: str) -> list[str]:
    """The lines of a text that are neither log lines nor their indented continuations."""
    return [line for line in text.splitlines() if not LOG_LINE.match(line) and not line.startswith("  ")]


def refusal(command: Callable[[Sequence[str]], Any], arguments: Sequence[str], captured: Any) -> str:
    """The only line, apart from the log, that a command writes before it exits with code 2; `captured` is capsys."""
    with pytest.raises(SystemExit) as stop:
        command(arguments)
    output = captured.readouterr()
    assert (stop.value.code, output.out) == (2, ""), output.err
    (line,) = other_lines(output.err)
    assert line.startswith("error: ")
    return line


class CollectedLines(logging.Handler):
    """Collects the messages of a logger from INFO on, on any rank; replaces an earlier collector."""

    def __init__(self, logger: str) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.warnings: list[str] = []
        collected = logging.getLogger(logger)
        collected.handlers[:] = [self]
        collected.filters.clear()
        collected.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        (self.warnings if record.levelno >= logging.WARNING else self.lines).append(record.getMessage())
