"""Files and directories appear whole or not at all, whatever happens while they are written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from utils.files import appearing_whole, directory_appearing_whole, recover


def write(path: Path, text: str) -> None:
    with appearing_whole([path]) as (partial,):
        partial.write_text(text)


def write_directory(path: Path, text: str) -> None:
    with directory_appearing_whole(path) as partial:
        (partial / "one").write_text(text)
        (partial / "two").write_text(text)


WRITERS = {"file": write, "directory": write_directory}


def read(path: Path) -> str:
    if path.is_dir():
        one, two = ((path / name).read_text() for name in ("one", "two"))
        assert one == two
        return one
    return path.read_text()


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), ValueError("no")])
def test_a_block_that_fails_leaves_the_earlier_one_and_nothing_partial(
    tmp_path: Path, kind: str, error: BaseException
) -> None:
    target = tmp_path / "target"
    WRITERS[kind](target, "first")

    def fail_half_way() -> None:
        with appearing_whole([target]) if kind == "file" else directory_appearing_whole(target) as partial:
            (partial[0] if isinstance(partial, list) else partial / "one").write_text("half")
            raise error

    with pytest.raises(type(error)):
        fail_half_way()
    assert read(target) == "first"
    assert os.listdir(tmp_path) == ["target"]


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_disk_that_fails_in_the_end_leaves_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, error: BaseException
) -> None:
    target = tmp_path / "target"
    WRITERS[kind](target, "first")

    def fail(*_: object) -> None:
        raise error

    for function in ("fsync", "replace" if kind == "file" else "rename"):
        with monkeypatch.context() as patch:
            patch.setattr(os, function, fail)
            with pytest.raises(type(error)):
                WRITERS[kind](target, "second")
        assert read(target) == "first"
        assert os.listdir(tmp_path) == ["target"]


@pytest.mark.parametrize("kind", WRITERS)
def test_the_earlier_one_is_there_until_the_new_one_is_on_the_disk(tmp_path: Path, monkeypatch: Any, kind: str) -> None:
    target, seen, fsync = tmp_path / "target", [], os.fsync
    WRITERS[kind](target, "first")

    def look(descriptor: int) -> None:
        fsync(descriptor)
        seen.append(read(target))

    monkeypatch.setattr(os, "fsync", look)
    WRITERS[kind](target, "second")
    # In the end the directory is flushed, which makes the new name last.
    assert seen == ["first"] * (len(seen) - 1) + ["second"]
    assert len(seen) == (2 if kind == "file" else 4)
    assert read(target) == "second"
    assert os.listdir(tmp_path) == ["target"]


def test_file_systems_that_cannot_flush_a_directory_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync = os.fsync

    def fails_for_the_parent(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(tmp_path):
            raise OSError(22, "Invalid argument")
        fsync(descriptor)

    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("has no /proc")
    monkeypatch.setattr(os, "fsync", fails_for_the_parent)
    for kind, writer in WRITERS.items():
        writer(tmp_path / kind, "whole")
        assert read(tmp_path / kind) == "whole"


def test_recovery_tidies_partial_ones_and_brings_back_what_was_moved_aside(tmp_path: Path) -> None:
    for name in ("step_1", ".step_2.abc.partial", ".step_3.replaced", ".step_1.replaced"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "content").write_text(name)
    (tmp_path / ".metrics.jsonl.abc.partial").write_text("")
    (tmp_path / ".best.abc.partial").symlink_to("step_1")
    (tmp_path / ".best.def.partial").symlink_to("nowhere")
    (tmp_path / "notes.partial").write_text("a user's")
    (tmp_path / ".hidden").write_text("a user's")
    recover(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".hidden", "notes.partial", "step_1", "step_3"]
    assert (tmp_path / "step_1" / "content").read_text() == "step_1", "what a link leads to stays"
    assert (tmp_path / "step_3" / "content").read_text() == ".step_3.replaced"
    recover(tmp_path / "nowhere")
