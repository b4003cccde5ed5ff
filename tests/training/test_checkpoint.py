"""Checkpoints on disk are intact or skipped, and read without running code; no disk error ends a run."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import pickle
import re
import shutil
import signal
import stat
import subprocess
import threading
import warnings as warnings_module
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
from utils.training import checkpointer as checkpointers
from utils.training.checkpoint import (
    BEST,
    CHECKSUMS,
    TRAINING,
    WEIGHTS,
    DamagedCheckpoint,
    load_newest,
    read_weights,
    saved_steps,
    step_directory,
    verify,
    weights_file,
)
from utils.training.checkpointer import AsyncCheckpointer, Checkpointer
from utils.training.host_copy import HostCopy
from utils.training.state import TrainState

FILES = (WEIGHTS, TRAINING, CHECKSUMS)


def tensors(value: float, numbers: int = 40) -> dict[str, Any]:
    """The tensors of a training run, all filled with `value`."""
    moments = {0: {"step": torch.tensor(value), "exp_avg": torch.full((numbers,), value)}}
    return {
        "network": {"weight": torch.full((numbers,), value), "count": torch.tensor(3)},
        "optimizer": {"kind": "Adam", "state": moments, "param_groups": [{"lr": 1e-3, "params": [0]}]},
        "scaler": {},
        "random": [[torch.get_rng_state()]],
    }


def writer(folder: Path, keep_last: int = 2) -> AsyncCheckpointer:
    return AsyncCheckpointer(folder, Config(num_epochs=3, checkpoint={"keep_last": keep_last}), {})


def save(checkpointer: Checkpointer, step: int, best_step: int = 0, numbers: int = 40) -> None:
    """Saves tensors filled with the step; they are written when this returns."""
    checkpointer.save(tensors(float(step), numbers), TrainState(step=step, best_step=best_step), wait=True)


def folder_of(tmp_path: Path, steps: tuple[int, ...] = (1, 2)) -> Path:
    tmp_path.mkdir(exist_ok=True)
    checkpointer = writer(tmp_path / "checkpoints", len(steps))
    for step in steps:
        save(checkpointer, step)
    return tmp_path / "checkpoints"


def assert_newest(folder: Path, step: int) -> None:
    """Asserts that the newest checkpoint is the one of `step`, with its tensors."""
    saved = load_newest(folder)
    assert saved is not None
    assert (saved.path, saved.state.step) == (step_directory(folder, step), step)
    assert torch.equal(saved.weights["network"]["weight"], torch.full_like(saved.weights["network"]["weight"], step))
    assert saved.training["optimizer"]["state"][0]["step"] == step


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def rewrite_digests(directory: Path) -> None:
    """Makes the digests match the present files."""
    lines = (f"{hashlib.sha256((directory / name).read_bytes()).hexdigest()}  {name}\n" for name in (WEIGHTS, TRAINING))
    (directory / CHECKSUMS).write_text("".join(lines))


@pytest.fixture
def may_write(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """An event that writes of checkpoints wait for."""
    event, write = threading.Event(), checkpointers.write

    def wait_and_write(*arguments: Any) -> None:
        assert event.wait(GENEROUS)
        write(*arguments)

    monkeypatch.setattr(checkpointers, "write", wait_and_write)
    return event


# --- what is saved ---------------------------------------------------------------------------------------------------


def test_round_trip_of_tensors_config_and_state(tmp_path: Path) -> None:
    state = TrainState(epoch=2, batch=3, step=17, losses=[0.5], unlogged=[(0.25, 1.5)], final_loss=0.125, best_step=9)
    content = tensors(0.25)
    content["network"]["channels_last"] = (
        torch.arange(24.0).reshape(1, 2, 3, 2, 2).to(memory_format=torch.channels_last_3d)
    )
    writer(tmp_path).save(content, state, wait=True)
    saved = load_newest(tmp_path)
    assert saved is not None
    assert Config.model_validate(saved.weights["config"]).num_epochs == 3
    assert [saved.weights[key] for key in ("epoch", "step", "final_loss")] == [2, 17, 0.125]
    assert saved.weights["network"].keys() == content["network"].keys()
    for name, tensor in content["network"].items():
        assert torch.equal(saved.weights["network"][name], tensor), name
    assert saved.weights["network"]["channels_last"].stride() == content["network"]["channels_last"].stride()
    assert torch.equal(saved.training["random"][0][0], content["random"][0][0])
    # NaN is not equal to NaN, but has the same repr.
    assert repr(saved.state) == repr(state)


def test_training_may_change_its_tensors_as_soon_as_save_returns(tmp_path: Path, may_write: threading.Event) -> None:
    """The write starts only after the change; the next save writes the new values, from the same host memory."""
    checkpointer, content = writer(tmp_path), tensors(1.0)
    checkpointer.save(content, TrainState(step=1), wait=False)
    assert saved_steps(tmp_path) == [], "save does not wait for the write"
    content["network"]["weight"] += 1
    content["optimizer"]["state"][0]["step"] += 1
    may_write.set()
    checkpointer.close()
    assert_newest(tmp_path, 1)
    checkpointer.save(content, TrainState(step=2), wait=True)
    assert_newest(tmp_path, 2)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(float("nan"), torch.float32), (float("inf"), torch.bfloat16), (-float("inf"), torch.float16)],
)
def test_non_finite_weights_are_never_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, value: float, dtype: torch.dtype
) -> None:
    checkpointer, content = writer(tmp_path), tensors(1.0)
    content["network"] |= {"none": torch.zeros(0), "half": torch.full((70_000,), 60_000.0).to(dtype)}
    checkpointer.save(content, TrainState(step=1), wait=True)
    assert saved_steps(tmp_path) == [1], "large values are finite"
    content["network"]["half"][69_999] = value
    checkpointer.save(content, TrainState(step=2), wait=True)
    assert saved_steps(tmp_path) == [1]
    assert "No checkpoint at step 2: the weights are not finite" in caplog.text
    content["network"]["half"][69_999] = 0
    checkpointer.save(content, TrainState(step=3), wait=True)
    assert saved_steps(tmp_path) == [3, 1]


def test_sha256sum_accepts_a_checkpoint(tmp_path: Path) -> None:
    if shutil.which("sha256sum") is None:
        pytest.skip("sha256sum is not installed")
    directory = step_directory(folder_of(tmp_path), 2)
    command = ["sha256sum", "-c", "--strict", CHECKSUMS]
    english = {**os.environ, "LC_ALL": "C"}
    result = subprocess.run(command, cwd=directory, env=english, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, f"{WEIGHTS}: OK\n{TRAINING}: OK\n"), result.stderr
    flip(directory / TRAINING, 50)
    assert subprocess.run(command, cwd=directory, capture_output=True).returncode != 0


def test_file_modes_follow_the_umask(tmp_path: Path) -> None:
    """Temporary files have mode 0600; checkpoints must stay readable for colleagues."""
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


def flip(path: Path, position: int) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)
        file.seek(position)
        file.write(bytes([byte[0] ^ 0x20]))  # changes the case of a letter, the smallest change


@pytest.mark.parametrize("name", FILES)
def test_any_flipped_bit_is_detected(tmp_path: Path, name: str) -> None:
    """In zip headers, pickle, tensors, the end of the file, and every letter of the digests."""
    directory = step_directory(folder_of(tmp_path), 2)
    path = directory / name
    for index in range(path.stat().st_size):
        flip(path, index)
        with pytest.raises(DamagedCheckpoint):
            verify(directory)
        flip(path, index)
    verify(directory)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "flipped in the middle": lambda path: flip(path, path.stat().st_size // 2),
    "cut": truncate,
    "empty": lambda path: path.write_bytes(b""),
    "removed": Path.unlink,
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_skipped_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, damage: str
) -> None:
    folder = folder_of(tmp_path)
    DAMAGE[damage](step_directory(folder, 2) / name)
    assert_newest(folder, 1)
    (warning,) = warnings(caplog)
    assert warning.startswith(f"Checkpoint {step_directory(folder, 2)} is skipped: ")
    assert name in warning or name == CHECKSUMS, "names the file, unless the digests themselves are damaged"
    if name == WEIGHTS:
        for path in (step_directory(folder, 2), step_directory(folder, 2) / WEIGHTS):
            with pytest.raises(UserError, match=r"^(cannot read|no such file:) [^\n]*weights\.pt[^\n]*$"):
                read_weights(path)
    DAMAGE[damage](step_directory(folder, 1) / name)
    with pytest.raises(UserError) as caught:
        load_newest(folder)
    assert says_what_to_do(str(caught.value), folder, [2, 1])


def says_what_to_do(line: str, folder: Path, steps: list[int]) -> bool:
    """The line names the skipped checkpoints, newest first, and says what to do."""
    named = [line.index(f"{step_directory(folder, step).name} (") for step in steps]
    return (
        "\n" not in line
        and line.startswith(f"no usable checkpoint in {folder}: ")
        and named == sorted(named)
        and line.endswith("start from scratch with --resume=no, which removes them, or with another --run_num")
    )


class Bomb:
    def __reduce__(self) -> tuple:
        return os.mkdir, ("went-off",)


def resave(name: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Changes one file's content; the digests are right afterward."""

    def make(directory: Path) -> None:
        torch.save(change(torch.load(directory / name, weights_only=True)), directory / name)
        rewrite_digests(directory)

    return make


def plain_pickle(directory: Path) -> None:
    (directory / TRAINING).write_bytes(pickle.dumps(Bomb(), protocol=2))
    rewrite_digests(directory)


def without(key: str) -> Callable[[dict[str, Any]], Any]:
    return lambda content: {name: value for name, value in content.items() if name != key}


OTHERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "another format": (
        resave(WEIGHTS, lambda content: {**content, "format": 1}),
        "weights.pt was not written by this version of the program",
    ),
    "a bomb": (
        resave(WEIGHTS, lambda content: {**content, "network": Bomb()}),
        "weights.pt is damaged or not a PyTorch checkpoint",
    ),
    "a pickled bomb": (plain_pickle, "training.pt is damaged or not a PyTorch checkpoint"),
    "no optimizer": (resave(TRAINING, without("optimizer")), "training.pt has no optimizer"),
    "no config": (resave(WEIGHTS, without("config")), "weights.pt has no config"),
    "an unknown field": (resave(TRAINING, lambda content: {**content, "state": {"stride": 1}}), "training.pt: "),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_a_checkpoint_of_another_program_with_correct_digests_is_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A checkpoint of another version or program; no code in it is run."""
    monkeypatch.chdir(tmp_path)
    make, says = OTHERS[kind]
    folder = folder_of(tmp_path)
    make(step_directory(folder, 2))
    verify(step_directory(folder, 2))
    assert_newest(folder, 1)
    assert f"Checkpoint {step_directory(folder, 2)} is skipped: {says}" in caplog.text
    shutil.rmtree(step_directory(folder, 1))
    with pytest.raises(UserError) as caught:
        load_newest(folder)
    assert says_what_to_do(str(caught.value), folder, [2])
    assert not Path("went-off").exists()


def test_other_files_in_the_folder_are_ignored(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, (1, 2, 100_000_000))
    shutil.rmtree(step_directory(folder, 100_000_000))
    for name in ("step_3", "step_00000004.old", "notes", ".step_00000005.abc.partial", ".step_00000006.replaced"):
        (folder / name).mkdir()
    (folder / "step_00000007").write_text("a file")
    (folder / "step_00000008").symlink_to("nowhere")
    (folder / "step_100000000").mkdir()
    assert saved_steps(folder) == [100_000_000, 8, 7, 2, 1]
    assert_newest(folder, 2)
    assert load_newest(tmp_path / "nowhere") is None
    assert load_newest(folder / "notes") is None


# --- weights alone ---------------------------------------------------------------------------------------------------


def test_weights_do_not_need_the_rest_of_the_checkpoint(tmp_path: Path) -> None:
    """weights.pt is read alone, with SHA256SUMS, and next to a damaged training.pt."""
    directory = step_directory(folder_of(tmp_path), 2)
    alone = shutil.copyfile(directory / WEIGHTS, tmp_path / "alone.pt")
    assert read_weights(alone)["step"] == 2
    for damage in (truncate, Path.unlink):
        damage(directory / TRAINING)
        content = read_weights(directory / WEIGHTS)
        assert content["step"] == content["network"]["weight"][0] == 2


def test_damaged_weights_are_reported_with_another_checkpoint(tmp_path: Path) -> None:
    """Fixed: four wrong bytes led to a paragraph of PyTorch that advised weights_only=False."""
    folder = folder_of(tmp_path)
    second, alone = step_directory(folder, 2), tmp_path / "alone.pt"
    content = (second / WEIGHTS).read_bytes()
    start = content.index(b"network")  # within the pickled structure
    (second / WEIGHTS).write_bytes(content[:start] + b"\xff\xff\xff\xff" + content[start + 4 :])
    shutil.copyfile(second / WEIGHTS, alone)
    with pytest.raises(UserError, match=rf"digest does not match; recopy it.*example {step_directory(folder, 1)}$"):
        read_weights(second)
    with pytest.raises(UserError, match=rf"^cannot read {alone}: alone.pt is damaged or not a PyTorch [^\n]*$"):
        read_weights(alone)


DAMAGED, OTHER = (
    "{name} is damaged or not a PyTorch checkpoint",
    "{name} was not written by this version of the program",
)
UNKNOWN_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "bomb in an archive": (lambda path: torch.save({"format": 2, "network": Bomb()}, path), DAMAGED),
    "pickled bomb": (lambda path: path.write_bytes(pickle.dumps(Bomb(), protocol=2)), DAMAGED),
    "TorchScript": (lambda path: torch.jit.script(torch.nn.Linear(1, 1)).save(str(path)), DAMAGED),
    "cut": (lambda path: (torch.save({"format": 2, "network": torch.zeros(99)}, path), truncate(path)), DAMAGED),
    "other weights": (lambda path: torch.save(torch.nn.Linear(1, 1).state_dict(), path), OTHER),
    "newer version": (lambda path: torch.save({"format": 3, "network": {}}, path), OTHER),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", UNKNOWN_FILES)
def test_files_of_other_programs_are_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """As weights and in a run directory; no code in them is run, and PyTorch's advice to do so is not repeated."""
    monkeypatch.chdir(tmp_path)
    make, says = UNKNOWN_FILES[kind]
    with warnings_module.catch_warnings():
        warnings_module.simplefilter("ignore")
        make(Path("x.pt"))
    with pytest.raises(UserError, match=rf"^cannot read x.pt: {re.escape(says.format(name='x.pt'))}; [^\n]*$"):
        read_weights(Path("x.pt"))
    folder = folder_of(tmp_path / "run", (1,))
    weights = step_directory(folder, 1) / WEIGHTS
    weights.unlink()
    Path("x.pt").rename(weights)
    if weights.is_file():
        rewrite_digests(weights.parent)
    with pytest.raises(
        UserError, match=r"^no usable checkpoint in [^\n]*: step_00000001 \(weights.pt[^\n]*$"
    ) as caught:
        load_newest(folder)
    assert "weights_only" not in str(caught.value)
    with pytest.raises(
        UserError, match=r"^no usable checkpoint in [^\n]*; give a run directory, a checkpoint directory"
    ):
        weights_file(tmp_path / "run")
    with pytest.raises(UserError, match=r"^cannot read [^\n]*: weights.pt[^\n]*$"):
        read_weights(weights.parent)
    assert not Path("went-off").exists()
    assert capfd.readouterr() == ("", "")


# --- rotation --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep_last", [1, 2, 3])
def test_the_last_checkpoints_and_the_best_stay(tmp_path: Path, keep_last: int) -> None:
    checkpointer, steps = writer(tmp_path, keep_last), list(range(1, 8))
    for step in steps:
        best = max(known for known in (1, 2, 5) if known <= step)
        save(checkpointer, step, best)
        assert os.readlink(tmp_path / BEST) == f"step_{best:08d}"
        assert saved_steps(tmp_path) == sorted({*steps[:step][-keep_last:], best}, reverse=True)
        assert names(tmp_path) == sorted(
            [BEST, *(step_directory(tmp_path, kept).name for kept in saved_steps(tmp_path))]
        )
        assert_newest(tmp_path, step)


@pytest.mark.parametrize("keep_last", [1, 2])
def test_a_skipped_later_checkpoint_does_not_displace_new_ones(tmp_path: Path, keep_last: int) -> None:
    """The run resumed before a damaged checkpoint: the next start needs what it saves now."""
    folder = folder_of(tmp_path, (4, 8))
    flip(step_directory(folder, 8) / WEIGHTS, 100)
    assert_newest(folder, 4)
    checkpointer = writer(folder, keep_last)
    for step in (5, 6, 7):
        save(checkpointer, step)
        assert_newest(folder, step)
    save(checkpointer, 8)
    assert_newest(folder, 8)
    assert saved_steps(folder) == [8, 7, 6][:keep_last]


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    """A training run that is stopped in a validation saves again at the same step."""
    checkpointer = writer(tmp_path)
    save(checkpointer, 1, best_step=1)
    checkpointer.save(tensors(5.0), TrainState(step=1), wait=True)
    saved = load_newest(tmp_path)
    assert saved is not None
    assert saved.weights["network"]["weight"][0] == 5
    assert names(tmp_path) == [BEST, "step_00000001"]


# --- errors while saving ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def limited_file_sizes() -> Iterator[None]:
    """Context in which large writes fail half-way."""
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def failing_on_directories() -> Any:
    """Context in which a directory cannot be flushed to the disk."""
    fsync = os.fsync

    def fail(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(5, "Input/output error")
        fsync(descriptor)

    return mock.patch.object(os, "fsync", fail)


def failing(function: str, error: Exception) -> Any:
    return mock.patch.object(os, function, side_effect=error)


@pytest.mark.parametrize(
    ("fails", "reason"),
    [
        (limited_file_sizes, "File too large"),
        (lambda: failing("fsync", OSError(5, "Input/output error")), "Input/output error"),
        (failing_on_directories, "Input/output error"),
        (lambda: failing("mkdir", OSError(30, "Read-only file system")), "Read-only file system"),
    ],
)
def test_a_disk_error_costs_one_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fails: Callable[[], Any], reason: str
) -> None:
    """One warning; the checkpoint before stays, and the next save succeeds."""
    checkpointer = writer(tmp_path)
    save(checkpointer, 1, best_step=1)
    with fails():
        save(checkpointer, 2, best_step=2, numbers=100_000)
    start = f"Cannot write checkpoint {step_directory(tmp_path, 2)}: "
    expected = [f"{start}{reason}; earlier ones are kept"]
    assert warnings(caplog) == expected
    assert_newest(tmp_path, 1)
    assert names(tmp_path) == [BEST, "step_00000001"], "nothing partial is left"
    assert os.readlink(tmp_path / BEST) == "step_00000001"
    save(checkpointer, 3, best_step=3, numbers=100_000)
    assert_newest(tmp_path, 3)
    assert names(tmp_path) == [BEST, "step_00000001", "step_00000003"]
    assert warnings(caplog) == expected


@pytest.mark.parametrize("function", ["symlink", "replace"])
def test_a_failing_link_leaves_the_checkpoint_and_the_earlier_link(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, function: str
) -> None:
    """Fixed: "Cannot write checkpoint" was logged instead, and old checkpoints were never removed."""
    checkpointer = writer(tmp_path, 1)
    save(checkpointer, 1, best_step=1)
    with failing(function, PermissionError(1, "Operation not permitted")):  # a FAT file system says so
        for step in (2, 3):
            save(checkpointer, step, best_step=step)
    line = f"Cannot point {tmp_path / BEST} to the best checkpoint: Operation not permitted"
    assert warnings(caplog) == [line] * 2
    assert names(tmp_path) == [BEST, "step_00000001", "step_00000003"]
    assert os.readlink(tmp_path / BEST) == "step_00000001"
    assert_newest(tmp_path, 3)
    checkpointer.check()


def test_a_save_that_hangs_is_reported_and_the_next_succeeds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, may_write: threading.Event
) -> None:
    clock = SimpleNamespace(now=0.0)

    class Writer(threading.Thread):
        """While it hangs, waiting for it takes the whole timeout, on the test's clock."""

        def join(self, timeout: float | None = None) -> None:
            if may_write.is_set():
                super().join(GENEROUS)
            else:
                clock.now += timeout or 0.0

    monkeypatch.setattr(checkpointers, "threading", SimpleNamespace(Thread=Writer))
    times = dict.fromkeys(("monotonic", "perf_counter"), lambda: clock.now)
    monkeypatch.setattr(checkpointers, "time", SimpleNamespace(**times))
    may_write.set()
    checkpointer = writer(tmp_path, 3)
    save(checkpointer, 1)
    may_write.clear()
    checkpointer.save(tensors(2.0), TrainState(step=2), wait=False)
    for _ in range(5):
        checkpointer.save(tensors(3.0), TrainState(step=3), wait=False)
    assert 10 <= clock.now < 10.3, "the run continues: five saves waited 10 s in total"
    assert caplog.text.count("No checkpoint at step 3: step 2 is still being written after 10 s") == 5
    checkpointer.save(tensors(3.0), TrainState(step=3, best_step=3), wait=False)
    assert 70 <= clock.now < 71, "the best one cannot be saved later"
    checkpointer.close()
    assert "The checkpoint of step 2 was not written in time" in caplog.text
    assert_newest(tmp_path, 1)
    with pytest.raises(UserError, match=f"^the checkpoint of step 3 is not in {tmp_path}: it is still being written; "):
        checkpointer.check()
    may_write.set()
    checkpointer.close()
    assert_newest(tmp_path, 2)
    with pytest.raises(UserError):  # step 3 was requested, and is lost
        checkpointer.check()
    save(checkpointer, 5)
    assert_newest(tmp_path, 5)
    checkpointer.check()


def test_a_check_waits_until_the_checkpoint_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, may_write: threading.Event
) -> None:
    """A fixed bug: a stop after a resume in a validation looked while the checkpoint of the same step was moved."""
    may_write.set()
    folder, write = folder_of(tmp_path), checkpointers.write
    may_write.clear()
    checkpointer = writer(folder)

    def move_and_write(target: Path, *content: Any) -> None:
        os.rename(target, moved := target.with_name(".moved"))
        moving.set()
        write(target, *content)
        shutil.rmtree(moved)

    moving = threading.Event()
    monkeypatch.setattr(checkpointers, "write", move_and_write)
    checkpointer.save(tensors(5.0), TrainState(step=2), wait=False)
    assert moving.wait(GENEROUS)
    threading.Timer(0.2, may_write.set).start()
    checkpointer.check()
    assert load_newest(folder) is not None


# --- kill -9 during a save ----------------------------------------------------------------------------------


def killed_at(folder: str, step: int, function: str, call: int) -> None:
    """Saves other numbers at `step`, and kills its process at the given call of a function of `os`."""
    real, calls = getattr(os, function), []

    def die(*arguments: Any, **keywords: Any) -> Any:
        calls.append(arguments)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **keywords)

    setattr(os, function, die)
    checkpointer = writer(Path(folder))
    content = checkpointer._copy.take(tensors(5.0))
    content["state"] = {"step": step}
    record = {"step": step, "best_step": step}
    checkpointer._write({"network": content.pop("network"), "config": {}, **record}, content)


@pytest.mark.parametrize(
    ("step", "function", "call", "left"),
    [
        (3, "fsync", 1, 2),  # everything is written, nothing is on the disk
        (3, "rename", 1, 2),
        (2, "rename", 2, 2),  # the old checkpoint of this step has been moved aside
        (3, "fsync", 5, 3),  # the new checkpoint has its name
        (3, "replace", 1, 3),  # the new link has not replaced the old one
        (3, "rmdir", 1, 3),  # an old checkpoint is being removed
    ],
)
def test_killed_during_a_save(tmp_path: Path, step: int, function: str, call: int, left: int) -> None:
    """After the next start's recovery, the newest checkpoint is intact and nothing partial is left."""
    folder = folder_of(tmp_path)
    checkpoint.update_symlink(folder / BEST, "step_00000002")
    process = context().Process(target=killed_at, args=(str(folder), step, function, call))
    process.start()
    process.join(GENEROUS)
    assert process.exitcode == -signal.SIGKILL
    before = names(folder)
    recover(folder)
    saved = load_newest(folder)
    assert saved is not None
    assert saved.state.step == left, before
    assert float(saved.weights["network"]["weight"][0]) == (5.0 if left == 3 else 2.0)
    assert names(folder) == sorted([BEST, *(step_directory(folder, kept).name for kept in saved_steps(folder))]), before
    save(writer(folder), 4, best_step=4)
    assert_newest(folder, 4)
    assert os.readlink(folder / BEST) == "step_00000004"


OUT_OF_MEMORY = RuntimeError("CUDA error: out of memory\nmore of it")
FAULTS: dict[str, Callable[[], Any]] = {
    "no memory for a copy (CUDA error: out of memory)": lambda: mock.patch.object(
        HostCopy, "take", side_effect=OUT_OF_MEMORY
    ),
    "the weights are not finite": lambda: mock.patch.object(HostCopy, "take", return_value=None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_lack_of_memory_or_finite_weights_costs_one_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    """Pinning host memory fails under a tight limit; the next save is tried. A stop in between must not report it."""
    checkpointer = writer(tmp_path)
    checkpointer.check()  # nothing to save so far
    with FAULTS[fault]():
        save(checkpointer, 1)
    assert warnings(caplog) == [f"No checkpoint at step 1: {fault}; earlier ones are kept"]
    with pytest.raises(UserError, match=rf"^the checkpoint of step 1 is not in {tmp_path}: {re.escape(fault)}; "):
        checkpointer.check()
    save(checkpointer, 2)
    assert saved_steps(tmp_path) == [2]
    checkpointer.check()
    shutil.rmtree(step_directory(tmp_path, 2))
    with pytest.raises(UserError, match=r"step 2 is not in .*: its checkpoint was removed; "):
        checkpointer.check()


def test_an_old_checkpoint_that_cannot_be_removed_does_not_make_a_save_fail(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As on NFS while a prediction reads it. The new checkpoint is on the disk, and a stop may say so."""
    checkpointer = writer(tmp_path, 1)
    save(checkpointer, 1)
    with failing("rmdir", OSError(39, "Directory not empty")):
        save(checkpointer, 2)
    assert warnings(caplog) == [f"Cannot remove an old checkpoint in {tmp_path}: Directory not empty"]
    checkpointer.check()
    save(checkpointer, 3)
    assert saved_steps(tmp_path) == [3]
