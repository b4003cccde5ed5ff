"""Checkpoints on disk: intact or skipped, read without running code; no fault of the disk ends a training."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import pickle
import shutil
import signal
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from processes import GENEROUS, context

from utils.config import Config
from utils.errors import UserError
from utils.files import recover
from utils.training import checkpoint
from utils.training.checkpoint import (
    BEST,
    DIGESTS,
    TRAINING,
    WEIGHTS,
    Checkpointer,
    DamagedCheckpoint,
    NullCheckpointer,
    TrainState,
    newest,
    place,
    read_weights,
    saved_steps,
    verify,
)

FILES = (WEIGHTS, TRAINING, DIGESTS)


def state(value: float, numbers: int = 40) -> dict[str, Any]:
    """The state of a training whose every number is `value`."""
    moments = {0: {"step": torch.tensor(value), "exp_avg": torch.full((numbers,), value)}}
    return {
        "network": {"weight": torch.full((numbers,), value), "count": torch.tensor(3)},
        "optimizer": {"kind": "Adam", "state": moments, "param_groups": [{"lr": 1e-3, "params": [0]}]},
        "scaler": {},
        "random": [[torch.get_rng_state()]],
    }


def save(saving: NullCheckpointer, step: int, is_best: bool = False, numbers: int = 40) -> None:
    """Saves a state whose numbers are its step; it is written when this returns."""
    saving.save(state(float(step), numbers), TrainState(step=step), is_best=is_best, last_chance=True)


def folder_of(tmp_path: Path, steps: tuple[int, ...] = (1, 2)) -> Path:
    saving = Checkpointer(tmp_path / "checkpoints", {"seed": 0}, keep_last=len(steps))
    for step in steps:
        save(saving, step)
    return tmp_path / "checkpoints"


def assert_newest(folder: Path, step: int) -> None:
    """The newest checkpoint is the one of `step`, with what was saved at it."""
    saved = newest(folder)
    assert saved is not None
    assert (saved.path, saved.position.step) == (place(folder, step), step)
    assert torch.equal(saved.weights["network"]["weight"], torch.full_like(saved.weights["network"]["weight"], step))
    assert saved.training["optimizer"]["state"][0]["step"] == step


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def rewrite_digests(directory: Path) -> None:
    """Makes the list of digests match the files as they are now."""
    lines = (f"{hashlib.sha256((directory / name).read_bytes()).hexdigest()}  {name}\n" for name in (WEIGHTS, TRAINING))
    (directory / DIGESTS).write_text("".join(lines))


@pytest.fixture
def may_write(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Writes of checkpoints wait for it."""
    event, write = threading.Event(), checkpoint.write

    def wait_and_write(*arguments: Any) -> None:
        assert event.wait(GENEROUS)
        write(*arguments)

    monkeypatch.setattr(checkpoint, "write", wait_and_write)
    return event


# --- what is saved ---------------------------------------------------------------------------------------------------


def test_round_trip_of_tensors_config_and_position(tmp_path: Path) -> None:
    config = Config(num_epochs=3).model_dump()
    position = TrainState(
        epoch=2, batch=3, step=17, losses=[0.5], interval=[(0.25, 1.5)], final_loss=0.125, best_step=9
    )
    content = state(0.25)
    content["network"]["turned"] = torch.arange(24.0).reshape(1, 2, 3, 2, 2).to(memory_format=torch.channels_last_3d)
    Checkpointer(tmp_path, config, 2).save(content, position, is_best=True, last_chance=True)
    saved = newest(tmp_path)
    assert saved is not None
    assert Config.model_validate(saved.weights["config"]) == Config(num_epochs=3)
    assert [saved.weights[key] for key in ("epoch", "step", "final_loss")] == [2, 17, 0.125]
    assert saved.weights["network"].keys() == content["network"].keys()
    for name, tensor in content["network"].items():
        assert torch.equal(saved.weights["network"][name], tensor), name
    assert saved.weights["network"]["turned"].stride() == content["network"]["turned"].stride()
    assert torch.equal(saved.training["random"][0][0], content["random"][0][0])
    # Two NaN are not equal, but written alike.
    assert repr(saved.position) == repr(position)


def test_training_may_change_its_tensors_as_soon_as_save_returns(tmp_path: Path, may_write: threading.Event) -> None:
    """The write starts only after they have changed; the next save writes the new values, in the same memory."""
    saving, content = Checkpointer(tmp_path, {}, 2), state(1.0)
    saving.save(content, TrainState(step=1), is_best=False, last_chance=False)
    assert saved_steps(tmp_path) == [], "it does not wait for the write"
    content["network"]["weight"] += 1
    content["optimizer"]["state"][0]["step"] += 1
    may_write.set()
    saving.close()
    assert_newest(tmp_path, 1)
    saving.save(content, TrainState(step=2), is_best=False, last_chance=True)
    assert_newest(tmp_path, 2)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(float("nan"), torch.float32), (float("inf"), torch.bfloat16), (-float("inf"), torch.float16)],
)
def test_non_finite_weights_are_never_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, value: float, dtype: torch.dtype
) -> None:
    saving, content = Checkpointer(tmp_path, {}, 2), state(1.0)
    content["network"] |= {"none": torch.zeros(0), "half": torch.full((70_000,), 60_000.0).to(dtype)}
    saving.save(content, TrainState(step=1), is_best=False, last_chance=True)
    assert saved_steps(tmp_path) == [1], "large ones are finite"
    content["network"]["half"][69_999] = value
    saving.save(content, TrainState(step=2), is_best=False, last_chance=True)
    assert saved_steps(tmp_path) == [1]
    assert "No checkpoint at step 2: the network's weights are not all numbers" in caplog.text
    content["network"]["half"][69_999] = 0
    saving.save(content, TrainState(step=3), is_best=False, last_chance=True)
    assert saved_steps(tmp_path) == [3, 1]


def test_sha256sum_accepts_a_checkpoint(tmp_path: Path) -> None:
    if shutil.which("sha256sum") is None:
        pytest.skip("has no sha256sum")
    directory = place(folder_of(tmp_path), 2)
    command = ["sha256sum", "-c", "--strict", DIGESTS]
    english = {**os.environ, "LC_ALL": "C"}
    result = subprocess.run(command, cwd=directory, env=english, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, f"{WEIGHTS}: OK\n{TRAINING}: OK\n"), result.stderr
    flip(directory / TRAINING, 50)
    assert subprocess.run(command, cwd=directory, capture_output=True).returncode != 0


def test_file_modes_follow_the_umask(tmp_path: Path) -> None:
    """Files that a temporary name made 0600 could not be read by colleagues."""
    for mask in (0o022, 0o007):
        before = os.umask(mask)
        try:
            folder = folder_of(tmp_path / str(mask))
        finally:
            os.umask(before)
        for path in (folder, *folder.rglob("*")):
            expected = 0o777 if path.is_dir() else 0o666
            assert stat.S_IMODE(path.stat().st_mode) == expected & ~mask, path


# --- damage ----------------------------------------------------------------------------------------------------------


def flip(path: Path, place: int) -> None:
    with open(path, "r+b") as file:
        file.seek(place)
        byte = file.read(1)
        file.seek(place)
        file.write(bytes([byte[0] ^ 0x20]))  # turns a capital letter into a small one, the least change


@pytest.mark.parametrize("name", FILES)
def test_every_byte_counts(tmp_path: Path, name: str) -> None:
    """Zip headers, pickle, tensors, the end, and every letter of the digests."""
    directory = place(folder_of(tmp_path), 2)
    path = directory / name
    for index in range(path.stat().st_size):
        flip(path, index)
        with pytest.raises(DamagedCheckpoint):
            verify(directory)
        flip(path, index)
    verify(directory)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def directory_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE: dict[str, Callable[[Path], None]] = {
    "flipped at the start": lambda path: flip(path, 0),
    "flipped in the middle": lambda path: flip(path, path.stat().st_size // 2),
    "cut": truncate,
    "empty": lambda path: path.write_bytes(b""),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\n"),
    "removed": Path.unlink,
    "a directory": directory_instead,
    "foreign": lambda path: path.write_bytes(b"\x89PNG\r\n" * 100),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_skipped_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, damage: str
) -> None:
    folder = folder_of(tmp_path)
    DAMAGE[damage](place(folder, 2) / name)
    assert_newest(folder, 1)
    (warning,) = warnings(caplog)
    assert warning.startswith(f"Checkpoint {place(folder, 2)} is skipped: ")
    assert name in warning or name == DIGESTS, "it names the file, too, unless the digests themselves are wrong"
    if name == WEIGHTS:
        for path in (place(folder, 2), place(folder, 2) / WEIGHTS):
            with pytest.raises(UserError, match=r"^(cannot read|no such file:) [^\n]*weights\.pt[^\n]*$"):
                read_weights(path)
    DAMAGE[damage](place(folder, 1) / name)
    with pytest.raises(UserError) as caught:
        newest(folder)
    assert says_what_to_do(str(caught.value), folder, [2, 1])


def says_what_to_do(line: str, folder: Path, steps: list[int]) -> bool:
    """The line names the skipped checkpoints, newest first, and says what to do."""
    named = [line.index(f"{place(folder, step).name} (") for step in steps]
    return (
        "\n" not in line
        and line.startswith(f"no usable checkpoint in {folder}: ")
        and named == sorted(named)
        and line.endswith("start anew with --resume=no, which removes them, or with another --run_num")
    )


class Bomb:
    def __reduce__(self) -> tuple:
        return os.mkdir, ("went-off",)


def resave(name: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Changes one file's content; the digests are right afterwards."""

    def make(directory: Path) -> None:
        torch.save(change(torch.load(directory / name, weights_only=True)), directory / name)
        rewrite_digests(directory)

    return make


def plain_pickle(directory: Path) -> None:
    (directory / TRAINING).write_bytes(pickle.dumps(Bomb(), protocol=2))
    rewrite_digests(directory)


def without(key: str) -> Callable[[dict[str, Any]], Any]:
    return lambda content: {name: value for name, value in content.items() if name != key}


FOREIGN: dict[str, tuple[Callable[[Path], None], str]] = {
    "format 2": (
        resave(WEIGHTS, lambda content: {**content, "format": 2}),
        "weights.pt is of format 2, this program reads format 1",
    ),
    "a tensor": (resave(TRAINING, lambda content: torch.zeros(3)), "training.pt is of format None"),
    "a bomb": (resave(WEIGHTS, lambda content: {**content, "network": Bomb()}), "weights.pt: "),
    "a pickled bomb": (plain_pickle, "training.pt is cut off, or no checkpoint of PyTorch's"),
    "no position": (resave(TRAINING, without("position")), "training.pt has no position"),
    "no config": (resave(WEIGHTS, without("config")), "weights.pt has no config"),
    "an unknown place": (resave(TRAINING, lambda content: {**content, "position": {"stride": 1}}), "training.pt: "),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_foreign_checkpoint_with_right_digests_is_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """One of another version or of another program; no code in it is run."""
    monkeypatch.chdir(tmp_path)
    make, says = FOREIGN[kind]
    folder = folder_of(tmp_path)
    make(place(folder, 2))
    verify(place(folder, 2))
    assert_newest(folder, 1)
    assert f"Checkpoint {place(folder, 2)} is skipped: {says}" in caplog.text
    shutil.rmtree(place(folder, 1))
    with pytest.raises(UserError) as caught:
        newest(folder)
    assert says_what_to_do(str(caught.value), folder, [2])
    assert not Path("went-off").exists()


def test_only_checkpoints_are_looked_at(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, (1, 2, 100_000_000))
    shutil.rmtree(place(folder, 100_000_000))
    for name in ("step_3", "step_00000004.old", "notes", ".step_00000005.abc.partial", ".step_00000006.replaced"):
        (folder / name).mkdir()
    (folder / "step_00000007").write_text("a file")
    (folder / "step_00000008").symlink_to("nowhere")
    (folder / "step_100000000").mkdir()
    assert saved_steps(folder) == [100_000_000, 8, 7, 2, 1]
    assert_newest(folder, 2)
    assert newest(tmp_path / "nowhere") is None
    assert newest(folder / "notes") is None


# --- weights alone ---------------------------------------------------------------------------------------------------


def test_weights_do_not_need_the_rest_of_the_checkpoint(tmp_path: Path) -> None:
    """weights.pt alone, with SHA256SUMS, or next to a damaged training.pt: the weights are as written."""
    directory = place(folder_of(tmp_path), 2)
    alone = shutil.copyfile(directory / WEIGHTS, tmp_path / "alone.pt")
    assert read_weights(alone)["step"] == 2
    for damage in (truncate, Path.unlink):
        damage(directory / TRAINING)
        content = read_weights(directory / WEIGHTS)
        assert content["step"] == content["network"]["weight"][0] == 2


def test_files_of_other_programs_are_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line for each, and no code in it is run."""
    monkeypatch.chdir(tmp_path)
    torch.save({"format": 1, "network": Bomb()}, "saved.pt")
    torch.save(torch.nn.Linear(1, 1).state_dict(), "others.pt")
    Path("pickled.pt").write_bytes(pickle.dumps(Bomb(), protocol=2))
    for name, says in (("saved.pt", ""), ("pickled.pt", ""), ("others.pt", "others.pt is of format None")):
        with pytest.raises(UserError, match=rf"^cannot read {name}: {says}[^\n]*$"):
            read_weights(Path(name))
    assert not Path("went-off").exists()


# --- rotation --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep_last", [1, 2, 3])
def test_the_last_checkpoints_stay_and_the_best(tmp_path: Path, keep_last: int) -> None:
    saving, steps = Checkpointer(tmp_path, {}, keep_last), list(range(1, 8))
    for step in steps:
        save(saving, step, is_best=step in (1, 2, 5))
        best = max(known for known in (1, 2, 5) if known <= step)
        assert os.readlink(tmp_path / BEST) == f"step_{best:08d}"
        assert saved_steps(tmp_path) == sorted({*steps[:step][-keep_last:], best}, reverse=True)
        assert names(tmp_path) == sorted([BEST, *(place(tmp_path, kept).name for kept in saved_steps(tmp_path))])
        assert_newest(tmp_path, step)


@pytest.mark.parametrize("keep_last", [1, 2])
def test_a_later_checkpoint_that_was_skipped_takes_no_others_place(tmp_path: Path, keep_last: int) -> None:
    """The training resumed from before a damaged checkpoint: what it saves now is what the next start needs."""
    folder = folder_of(tmp_path, (4, 8))
    flip(place(folder, 8) / WEIGHTS, 100)
    assert_newest(folder, 4)
    saving = Checkpointer(folder, {"seed": 0}, keep_last)
    for step in (5, 6, 7):
        save(saving, step)
        assert_newest(folder, step)
    save(saving, 8)
    assert_newest(folder, 8)
    assert saved_steps(folder) == [8, 7, 6][:keep_last]


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    """A training that is stopped in a validation saves at the same step again and again."""
    saving = Checkpointer(tmp_path, {}, 2)
    save(saving, 1, is_best=True)
    saving.save(state(5.0), TrainState(step=1), is_best=False, last_chance=True)
    saved = newest(tmp_path)
    assert saved is not None
    assert saved.weights["network"]["weight"][0] == 5
    assert names(tmp_path) == [BEST, "step_00000001"]


# --- faults while saving ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def limited_file_sizes() -> Iterator[None]:
    """Writes fail half-way."""
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def failing(function: str, error: Exception) -> Any:
    return mock.patch.object(os, function, side_effect=error)


@pytest.mark.parametrize(
    ("fails", "reason"),
    [
        (limited_file_sizes, "File too large"),
        (lambda: failing("fsync", OSError(5, "Input/output error")), "Input/output error"),
        (lambda: failing("rename", MemoryError("no memory")), "MemoryError('no memory')"),
        (lambda: failing("mkdir", OSError(30, "Read-only file system")), "Read-only file system"),
    ],
)
def test_a_fault_of_the_disk_costs_one_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fails: Callable[[], Any], reason: str
) -> None:
    """One warning; the checkpoint before stays, and the next save succeeds."""
    saving = Checkpointer(tmp_path, {}, 2)
    save(saving, 1, is_best=True)
    with fails():
        save(saving, 2, is_best=True, numbers=100_000)
    start = f"Cannot write checkpoint {place(tmp_path, 2)}: "
    expected = [f"{start}{reason}; training goes on, earlier ones stay"]
    assert warnings(caplog) == expected
    assert_newest(tmp_path, 1)
    assert names(tmp_path) == [BEST, "step_00000001"], "nothing partial is left"
    assert os.readlink(tmp_path / BEST) == "step_00000001"
    save(saving, 3, is_best=True, numbers=100_000)
    assert_newest(tmp_path, 3)
    assert names(tmp_path) == [BEST, "step_00000001", "step_00000003"]
    assert warnings(caplog) == expected


@pytest.mark.parametrize("function", ["symlink", "replace"])
def test_a_link_that_cannot_be_made_leaves_the_checkpoint_and_the_earlier_link(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, function: str
) -> None:
    saving = Checkpointer(tmp_path, {}, 2)
    save(saving, 1, is_best=True)
    with failing(function, PermissionError(1, "Operation not permitted")):  # a FAT file system says so
        save(saving, 2, is_best=True)
    assert "Operation not permitted" in caplog.text
    assert names(tmp_path) == [BEST, "step_00000001", "step_00000002"]
    assert os.readlink(tmp_path / BEST) == "step_00000001"
    assert_newest(tmp_path, 2)


def test_a_save_that_hangs_is_reported_and_the_next_succeeds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, may_write: threading.Event
) -> None:
    clock = SimpleNamespace(now=0.0)

    class Writer(threading.Thread):
        """Waiting for it while it hangs takes all of the time allowed, by the test's clock alone."""

        def join(self, timeout: float | None = None) -> None:
            if may_write.is_set():
                super().join(GENEROUS)
            else:
                clock.now += timeout or 0.0

    monkeypatch.setattr(checkpoint, "threading", SimpleNamespace(Thread=Writer))
    times = dict.fromkeys(("monotonic", "perf_counter"), lambda: clock.now)
    monkeypatch.setattr(checkpoint, "time", SimpleNamespace(**times))
    may_write.set()
    saving = Checkpointer(tmp_path, {}, 3)
    save(saving, 1)
    may_write.clear()
    saving.save(state(2.0), TrainState(step=2), is_best=False, last_chance=False)
    for _ in range(5):
        saving.save(state(3.0), TrainState(step=3), is_best=False, last_chance=False)
    assert 10 <= clock.now < 10.3, "training goes on: five of them have waited 10 s, all together"
    assert caplog.text.count("No checkpoint at step 3: that of step 2 is still being written, for 10 s") == 5
    saving.save(state(3.0), TrainState(step=3), is_best=True, last_chance=False)
    assert 70 <= clock.now < 71, "the best one does not come again"
    saving.close()
    assert "The checkpoint of step 2 was not written in time; earlier ones stay" in caplog.text
    assert_newest(tmp_path, 1)
    assert saving.fault == "it is still being written"
    may_write.set()
    saving.close()
    assert_newest(tmp_path, 2)
    assert saving.fault is not None, "step 3 was asked for, and is lost"
    save(saving, 5)
    assert_newest(tmp_path, 5)
    assert saving.fault is None


# --- kill -9 during a save ----------------------------------------------------------------------------------


def killed_at(folder: str, step: int, function: str, call: int) -> None:
    """Saves other numbers at `step`, and kills itself at that call of the function of `os`."""
    real, calls = getattr(os, function), []

    def die(*arguments: Any, **keywords: Any) -> Any:
        calls.append(arguments)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **keywords)

    setattr(os, function, die)
    saving = Checkpointer(Path(folder), {}, 2)
    content = saving._copy.take(state(5.0))[1]
    content["position"] = {"step": step}
    saving._write(step, {"network": content.pop("network"), "config": {}}, content, True)


@pytest.mark.parametrize(
    ("step", "function", "call", "left"),
    [
        (3, "fsync", 1, 2),  # all is written, nothing is on the disk
        (3, "rename", 1, 2),
        (2, "rename", 2, 2),  # the one of this step has been moved aside
        (3, "fsync", 5, 3),  # the new one has its name
        (3, "replace", 1, 3),  # the new link has not taken the old one's name
        (3, "rmdir", 1, 3),  # an old one is being removed
    ],
)
def test_killed_during_a_save(tmp_path: Path, step: int, function: str, call: int, left: int) -> None:
    """The newest is intact at once, or after the next start's recovery, and nothing partial is left."""
    folder = folder_of(tmp_path)
    checkpoint.point_to(folder / BEST, "step_00000002")
    process = context().Process(target=killed_at, args=(str(folder), step, function, call))
    process.start()
    process.join(GENEROUS)
    assert process.exitcode == -signal.SIGKILL
    before = names(folder)
    recover(folder)
    saved = newest(folder)
    assert saved is not None
    assert saved.position.step == left, before
    assert float(saved.weights["network"]["weight"][0]) == (5.0 if left == 3 else 2.0)
    assert names(folder) == sorted([BEST, *(place(folder, kept).name for kept in saved_steps(folder))]), before
    save(Checkpointer(folder, {}, 2), 4, is_best=True)
    assert_newest(folder, 4)
    assert os.readlink(folder / BEST) == "step_00000004"


def test_no_memory_for_a_copy_costs_the_checkpoint_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Pinning host memory fails under a tight limit; the next save is tried."""
    saving, error = Checkpointer(tmp_path, {}, 2), RuntimeError("CUDA error: out of memory\nmore of it")
    with mock.patch.object(checkpoint.HostCopy, "take", side_effect=error):
        save(saving, 1)
    assert "No checkpoint at step 1: no memory for a copy (CUDA error: out of memory); training goes on" in caplog.text
    save(saving, 2)
    assert saved_steps(tmp_path) == [2]
