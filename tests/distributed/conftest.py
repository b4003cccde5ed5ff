"""Programs that a test starts, and that end with it."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from processes import Program


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Program]]:
    """start(arguments of Python, **environment) -> Program; the test's end kills all programs."""
    programs: list[Program] = []

    def start_program(arguments: Sequence[str], **variables: str) -> Program:
        output = tmp_path / f"program {len(programs)}"
        programs.append(Program(arguments, output, environment={**os.environ, **variables}))
        return programs[-1]

    yield start_program
    for program in programs:
        program.kill()
