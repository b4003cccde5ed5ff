"""Checkpoints on disk are intact or skipped, and read without running code; no disk error ends a run."""

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
from processes import GENEROUS, context, run_ranks

from utils.config import Config
from utils.distributed import world as worlds
from utils.distributed.world import World
from utils.errors import UserError
from utils.files import recover
from utils.training import checkpoint as checkpoints
from utils.training import checkpoint_writer
from utils.training.checkpoint import (
    BEST,
    CHECKSUMS,
    NO_BEST,
    TRAINING,
    WEIGHTS,
    DamagedCheckpoint,
    load_newest,
    read_weights,
    saved_steps,
    step_directory,
    verify,
)
from utils.training.checkpoint_writer import BackgroundWriter, CheckpointWriter
from utils.training.resume import Start, find_start
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


def writer(folder: Path, keep_last: int = 2) -> BackgroundWriter:
    return BackgroundWriter(folder, Config(num_epochs=3, checkpoint={"keep_last": keep_last}), {})


def save(saves: CheckpointWriter, step: int, best_step: int = 0, numbers: int = 40) -> None:
    """Saves tensors filled with the step; they are written when this returns."""
    saves.save(tensors(float(step), numbers), TrainState(step=step, best_step=best_step), wait=True)


def folder_of(tmp_path: Path, steps: tuple[int, ...] = (1, 2)) -> Path:
    tmp_path.mkdir(exist_ok=True)
    saves = writer(tmp_path / "checkpoints", len(steps))
    for step in steps:
        save(saves, step)
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
    event, write = threading.Event(), checkpoint_writer.write

    def wait_and_write(*arguments: Any) -> None:
        assert event.wait(GENEROUS)
        write(*arguments)

    monkeypatch.setattr(checkpoint_writer, "write", wait_and_write)
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
    saves, content = writer(tmp_path), tensors(1.0)
    saves.save(content, TrainState(step=1), wait=False)
    assert saved_steps(tmp_path) == [], "save does not wait for the write"
    content["network"]["weight"] += 1
    content["optimizer"]["state"][0]["step"] += 1
    may_write.set()
    saves.close()
    assert_newest(tmp_path, 1)
    saves.save(content, TrainState(step=2), wait=True)
    assert_newest(tmp_path, 2)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(float("nan"), torch.float32), (float("inf"), torch.bfloat16), (-float("inf"), torch.float16)],
)
def test_non_finite_weights_are_never_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, value: float, dtype: torch.dtype
) -> None:
    """A stop in between must not report the checkpoint as saved; the next save is tried."""
    saves, content = writer(tmp_path), tensors(1.0)
    saves.check()  # nothing to save so far
    content["network"] |= {"none": torch.zeros(0), "half": torch.full((70_000,), 60_000.0).to(dtype)}
    saves.save(content, TrainState(step=1), wait=True)
    assert saved_steps(tmp_path) == [1], "large values are finite"
    content["network"]["half"][69_999] = value
    saves.save(content, TrainState(step=2), wait=True)
    assert saved_steps(tmp_path) == [1]
    assert "No checkpoint at step 2: the weights are not finite" in caplog.text
    with pytest.raises(UserError, match=rf"^the checkpoint of step 2 is not in {tmp_path}: the weights are not finite"):
        saves.check()
    content["network"]["half"][69_999] = 0
    saves.save(content, TrainState(step=3), wait=True)
    assert saved_steps(tmp_path) == [3, 1]
    saves.check()


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


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [truncate, Path.unlink, lambda path: path.write_bytes(b"")])
def test_a_damaged_checkpoint_is_skipped_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, damage: Callable[[Path], object]
) -> None:
    folder = folder_of(tmp_path)
    damage(step_directory(folder, 2) / name)
    assert_newest(folder, 1)
    (warning,) = warnings(caplog)
    assert warning.startswith(f"Checkpoint {step_directory(folder, 2)} is skipped: ")
    assert name in warning or name == CHECKSUMS, "names the file, unless the digests themselves are damaged"
    if name == WEIGHTS:
        for path in (step_directory(folder, 2), step_directory(folder, 2) / WEIGHTS):
            with pytest.raises(UserError, match=r"^(cannot read|no such file:) [^\n]*weights\.pt[^\n]*$"):
                read_weights(path)
    damage(step_directory(folder, 1) / name)
    with pytest.raises(UserError, match=r"^no usable checkpoint in .*step_00000002 .*step_00000001 .*--run_num"):
        load_newest(folder)


def test_a_checkpoint_that_was_renamed_is_skipped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A fixed bug: each start resumed from it, and discarded the progress of the one before."""
    folder = folder_of(tmp_path, (8, 12))
    step_directory(folder, 12).rename(step_directory(folder, 999))
    assert_newest(folder, 8)
    assert f"Checkpoint {step_directory(folder, 999)} is skipped: its files are of step 12" in caplog.text
    save(writer(folder), 16)
    assert_newest(folder, 16)


def test_weights_of_one_step_with_the_state_of_another_are_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A fixed bug: with recomputed digests, they resumed silently."""
    folder = folder_of(tmp_path, (8, 12, 16))
    newest = step_directory(folder, 16)
    shutil.copy(step_directory(folder, 12) / WEIGHTS, newest)
    rewrite_digests(newest)
    assert_newest(folder, 12)
    assert f"Checkpoint {newest} is skipped: its files are of step" in caplog.text


class Bomb:
    def __reduce__(self) -> tuple:
        return os.mkdir, ("went-off",)


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
    (directory / TRAINING).unlink()
    assert read_weights(directory)["step"] == 2


UNKNOWN_FILES: dict[str, Callable[[Path], object]] = {
    "bomb in an archive": lambda path: torch.save({"format": 2, "network": Bomb()}, path),
    "pickled bomb": lambda path: path.write_bytes(pickle.dumps(Bomb(), protocol=2)),
    "cut": lambda path: (torch.save({"format": 2, "network": torch.zeros(99)}, path), truncate(path)),
    "other weights": lambda path: torch.save(torch.nn.Linear(1, 1).state_dict(), path),
    "other format": lambda path: torch.save({"format": 1, "network": {}}, path),
}


@pytest.mark.parametrize("kind", UNKNOWN_FILES)
def test_files_of_other_programs_are_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """As weights and in a run directory; no code in them is run, and PyTorch's advice to do so is not repeated."""
    monkeypatch.chdir(tmp_path)
    reason = "was not written by this version" if "other" in kind else "is damaged or not a PyTorch checkpoint"
    UNKNOWN_FILES[kind](Path("x.pt"))
    with pytest.raises(UserError, match=rf"^cannot read x.pt: x.pt {reason}[^\n]*; [^\n]*$"):
        read_weights(Path("x.pt"))
    weights = step_directory(folder_of(tmp_path / "run", (1,)), 1) / WEIGHTS
    Path("x.pt").rename(weights)
    rewrite_digests(weights.parent)
    with pytest.raises(UserError, match=rf"^no usable checkpoint in [^\n]*weights.pt {reason}[^\n]*$") as caught:
        load_newest(tmp_path / "run" / "checkpoints")
    assert "weights_only" not in "".join([str(caught.value), *capfd.readouterr()])
    assert not Path("went-off").exists()


class LoadedWeights:
    """A step that keeps the weights it loads."""

    def load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        self.weights = weights


def only_rank_0_reads(world: World, folder: str) -> list[Any]:
    """What each rank resumes from, and the weights of --init_from; only rank 0 sees the directory, and reads files."""
    os.chdir(Path(folder, str(world.rank)))
    worlds.BROADCAST_BYTES = 1000
    if not world.is_root:
        checkpoints.read = mock.Mock(side_effect=AssertionError)
    start = find_start(Path(), None, None, Config().model_dump(), world)
    saved, step = start._checkpoint, LoadedWeights()
    assert saved is not None
    Start({}, folder + f"/{world.rank}").restore(step, world)  # type: ignore[arg-type]
    return [str(saved.path), repr([saved.weights, saved.training, saved.state]), repr(step.weights)]


def test_rank_0_reads_for_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed: each rank read the whole checkpoint, and the link to the best one, which a run in progress may replace."""
    save(writer(tmp_path / "0" / "checkpoints"), 8, best_step=8)
    (tmp_path / "1").mkdir()
    one, two = run_ranks(only_rank_0_reads, 2, str(tmp_path))
    assert one == two
    monkeypatch.chdir(tmp_path / "0")
    saved = load_newest(Path("checkpoints"))
    assert saved is not None
    assert one == [str(saved.path), repr([saved.weights, saved.training, saved.state]), repr(saved.weights["network"])]


def errors_of_ranks(world: World, folder: str) -> str:
    try:
        find_start(Path(folder), None, None, Config().model_dump(), world)
    except UserError as error:
        return str(error)
    return ""


def test_all_ranks_refuse_what_rank_0_cannot_read(tmp_path: Path) -> None:
    save(writer(tmp_path / "checkpoints"), 1)
    flip(tmp_path / "checkpoints" / "step_00000001" / WEIGHTS, 300)
    one, two = run_ranks(errors_of_ranks, 2, str(tmp_path))
    assert one == two
    assert "no usable checkpoint" in one


# --- the best checkpoint ---------------------------------------------------------------------------------------------


def test_a_run_directory_stands_for_its_best_checkpoint(tmp_path: Path) -> None:
    """Also a copy whose links have become directories."""
    saves = writer(tmp_path / "run" / "checkpoints")
    for step in (8, 16):
        save(saves, step, best_step=8)
    copy = shutil.copytree(tmp_path / "run", tmp_path / "copy")
    for run in (tmp_path / "run", copy):
        assert read_weights(run)["step"] == read_weights(run / "checkpoints" / BEST)["step"] == 8
    assert not (copy / "checkpoints" / BEST).is_symlink()


@pytest.mark.parametrize(("steps", "example"), [((8, 16), "the last one, {}/step_00000016"), ((), "a run directory, ")])
def test_a_run_without_its_best_checkpoint_is_one_line(tmp_path: Path, steps: tuple[int, ...], example: str) -> None:
    folder = folder_of(tmp_path, steps) if steps else tmp_path / "checkpoints"
    folder.mkdir(exist_ok=True)
    with pytest.raises(UserError) as caught:
        read_weights(tmp_path)
    reason = f"has no best checkpoint: {NO_BEST}; give another checkpoint, for example {example.format(folder)}"
    assert reason in str(caught.value)


def test_a_best_checkpoint_whose_save_failed_is_replaced_by_the_one_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fixed bug: after one failed save, readers found no best checkpoint and suggested a worse one than the link."""
    saves, real = writer(tmp_path / "checkpoints", keep_last=1), checkpoint_writer.write
    for step, best_step in ((8, 8), (16, 16), (24, 16), (32, 16)):
        monkeypatch.setattr(checkpoint_writer, "write", mock.Mock(side_effect=OSError(28, "")) if step == 16 else real)
        save(saves, step, best_step)
    assert saved_steps(tmp_path / "checkpoints") == [32, 8]
    assert read_weights(tmp_path)["step"] == 8


# --- rotation --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep_last", [1, 3])
def test_the_last_checkpoints_and_the_best_stay(tmp_path: Path, keep_last: int) -> None:
    saves, steps = writer(tmp_path, keep_last), list(range(1, 8))
    for step in steps:
        best = max(known for known in (1, 2, 5) if known <= step)
        save(saves, step, best)
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
    saves = writer(folder, keep_last)
    for step in (5, 6, 7):
        save(saves, step)
        assert_newest(folder, step)
    save(saves, 8)
    assert_newest(folder, 8)
    assert saved_steps(folder) == [8, 7, 6][:keep_last]


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


def failing(function: str, error: Exception) -> Any:
    return mock.patch.object(os, function, side_effect=error)


@pytest.mark.parametrize(
    ("fails", "reason"),
    [
        (limited_file_sizes, "File too large"),
        (lambda: failing("fsync", OSError(5, "Input/output error")), "Input/output error"),
        (lambda: failing("mkdir", OSError(30, "Read-only file system")), "Read-only file system"),
    ],
)
def test_a_disk_error_costs_one_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fails: Callable[[], Any], reason: str
) -> None:
    """One warning; the checkpoint before stays, and the next save succeeds."""
    saves = writer(tmp_path)
    save(saves, 1, best_step=1)
    with fails():
        save(saves, 2, best_step=2, numbers=100_000)
    start = f"Cannot write checkpoint {step_directory(tmp_path, 2)}: "
    expected = [f"{start}{reason}; earlier ones are kept"]
    assert warnings(caplog) == expected
    assert_newest(tmp_path, 1)
    assert names(tmp_path) == [BEST, "step_00000001"], "nothing partial is left"
    assert os.readlink(tmp_path / BEST) == "step_00000001"
    save(saves, 3, best_step=3, numbers=100_000)
    assert_newest(tmp_path, 3)
    assert names(tmp_path) == [BEST, "step_00000001", "step_00000003"]
    assert warnings(caplog) == expected


@pytest.mark.parametrize(
    ("function", "fault", "kept"),
    [
        # A FAT file system has no links. Fixed: "Cannot write checkpoint" was logged, and old ones were never removed.
        ("symlink", "point {}/best to the best checkpoint", [3, 1]),
        ("replace", "point {}/best to the best checkpoint", [3, 1]),
        ("rmdir", "remove an old checkpoint in {}", [3, 2, 1]),  # as on NFS while a prediction reads it
    ],
)
def test_a_link_or_removal_that_fails_costs_no_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, function: str, fault: str, kept: list[int]
) -> None:
    """The new checkpoint is on the disk, and a stop may say so. A link that cannot be replaced stays."""
    saves = writer(tmp_path, 1)
    save(saves, 1, best_step=1)
    with failing(function, PermissionError(1, "Operation not permitted")):
        for step in (2, 3):
            save(saves, step, best_step=step)
    assert warnings(caplog) == [f"Cannot {fault.format(tmp_path)}: Operation not permitted"] * 2
    assert saved_steps(tmp_path) == kept
    assert os.readlink(tmp_path / BEST) == ("step_00000003" if function == "rmdir" else "step_00000001")
    assert_newest(tmp_path, 3)
    saves.check()
    save(saves, 4, best_step=4)
    assert saved_steps(tmp_path) == [4]


def test_checkpoints_that_a_new_run_removes_are_free_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that resumes removes none of them before it has written the next one."""
    folder, config = folder_of(tmp_path), Config()
    free = checkpoint_writer.checkpoint_bytes(config) - 1
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    checkpoint_writer.check_space(folder, config, resumes=False)
    with pytest.raises(UserError, match="a checkpoint needs about"):
        checkpoint_writer.check_space(folder, config, resumes=True)


def test_a_save_that_hangs_is_reported_and_the_next_succeeds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, may_write: threading.Event
) -> None:
    monkeypatch.setattr(BackgroundWriter, "WAIT_SECONDS", 0.01)
    monkeypatch.setattr(BackgroundWriter, "CLOSE_SECONDS", 0.01)
    may_write.set()
    saves = writer(tmp_path, 3)
    saves.save(tensors(1.0), TrainState(step=1), wait=False)
    saves._thread.join(GENEROUS)
    may_write.clear()
    for step in (2, 3):
        saves.save(tensors(float(step)), TrainState(step=step), wait=False)
    assert warnings(caplog) == [
        "No checkpoint at step 3: the one before it is still being written; earlier ones are kept"
    ]
    assert_newest(tmp_path, 1)
    with pytest.raises(UserError, match=f"^the checkpoint of step 3 is not in {tmp_path}: it is still being written; "):
        saves.check()
    may_write.set()
    saves._thread.join(GENEROUS)
    with pytest.raises(UserError):  # step 3 was requested, and is lost
        saves.check()
    saves.save(tensors(5.0), TrainState(step=5), wait=False)
    saves._thread.join(GENEROUS)
    assert_newest(tmp_path, 5)
    saves.check()


def test_a_check_waits_until_the_checkpoint_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, may_write: threading.Event
) -> None:
    """A fixed bug: a stop after a resume in a validation looked while the checkpoint of the same step was moved."""
    may_write.set()
    folder, write = folder_of(tmp_path), checkpoint_writer.write
    may_write.clear()
    saves = writer(folder)

    def move_and_write(target: Path, *content: Any) -> None:
        os.rename(target, moved := target.with_name(".moved"))
        moving.set()
        write(target, *content)
        shutil.rmtree(moved)

    moving = threading.Event()
    monkeypatch.setattr(checkpoint_writer, "write", move_and_write)
    saves.save(tensors(5.0), TrainState(step=2), wait=False)
    assert moving.wait(GENEROUS)
    threading.Timer(0.2, may_write.set).start()
    saves.check()
    saved = load_newest(folder)
    assert saved is not None
    assert saved.weights["network"]["weight"][0] == 5
    assert names(folder) == ["step_00000001", "step_00000002"]


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
    saves = writer(Path(folder))
    content = saves._copy.take(tensors(5.0))
    content["state"] = {"step": step}
    record = {"step": step, "best_step": step}
    saves._write({"network": content.pop("network"), "config": {}, **record}, content)


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
    (folder / BEST).symlink_to("step_00000002")
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
