"""The commit in a result's provenance."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from utils import version_line


def test_without_git_the_commit_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the files on another machine has no history."""

    def no_checkout(command: list[str], **_: Any) -> Any:
        raise subprocess.CalledProcessError(128, command)

    monkeypatch.setattr(subprocess, "run", no_checkout)
    monkeypatch.delenv("GIT_COMMIT", raising=False)
    assert "commit unknown" in version_line()
    monkeypatch.setenv("GIT_COMMIT", "0123abc")
    assert "commit 0123abc" in version_line()
