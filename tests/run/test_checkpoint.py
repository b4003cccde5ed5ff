"""Checkpoints on disk are intact or skipped, and read without running code; no disk error ends a run."""

import contextlib
import errno
import hashlib
import logging
import os
import pickle
import shutil
import signal
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from processes import GENEROUS, run_ranks
from trainings import ALONE, assert_equal, killed, names

from utils.config import Config
from utils.distributed import world as worlds
from utils.distributed.world import World
from utils.errors import UserError
from utils.files import recover
from utils.run import checkpoint as checkpoints
from utils.run import writer as checkpoint_writer
from utils.run.checkpoint import BEST, CHECKSUMS, TRAINING, WEIGHTS, load_newest, read_weights, step_directory
from utils.run.choice import Choice
from utils.run.directory import RunDirectory
from utils.run.start import Start, find_start
from utils.run.state import TrainState
from utils.run.writer import BackgroundWriter
from utils.steps import build
from utils.volumes.opened import Volumes


def tensors(value: float) -> dict[str, Any]:
    moments = {0: {"step": torch.tensor(value), "exp_avg": torch.full((40,), value)}}
    return {
        "network": {"weight": torch.full((40,), value), "count": torch.tensor(3)},
        "optimizer": {"kind": "Adam", "state": moments, "param_groups": [{"lr": 1e-3, "params": [0]}]},
        "scaler": {},
        "random": [[torch.get_rng_state()]],
    }


def writer(folder: Path, keep_last: int = 2) -> BackgroundWriter:
    return BackgroundWriter(folder, Config(num_epochs=3, checkpoint={"keep_last": keep_last}), {})


def save(saves: BackgroundWriter, step: int, best_step: int = 0) -> None:
    """Saves tensors filled with the step; they are written when this returns."""
    saves.save(tensors(float(step)), TrainState(step=step, best_step=best_step), wait=True)


def folder_of(tmp_path: Path, steps: tuple[int, ...] = (1, 2)) -> Path:
    saves = writer(tmp_path / "checkpoints", len(steps))
    for step in steps:
        save(saves, step)
    return tmp_path / "checkpoints"


def newest(folder: Path) -> checkpoints.Checkpoint:
    saved = load_newest(folder)
    assert saved is not None
    return saved


def assert_newest(folder: Path, step: int) -> None:
    saved = newest(folder)
    assert (saved.path, saved.state.step) == (step_directory(folder, step), step)
    assert set(saved.weights["network"]["weight"].tolist()) == {step}
    assert saved.training["optimizer"]["state"][0]["step"] == step


def directories(*steps: int) -> list[str]:
    """The names in a folder with these checkpoints and a best one."""
    return [BEST, *(step_directory(Path(), step).name for step in sorted(steps))]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def rewrite_digests(directory: Path) -> None:
    lines = (f"{hashlib.sha256((directory / name).read_bytes()).hexdigest()}  {name}\n" for name in (WEIGHTS, TRAINING))
    (directory / CHECKSUMS).write_text("".join(lines))


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 0x20  # changes the case of a letter, the smallest change
    path.write_bytes(content)


def test_round_trip_of_tensors_config_and_state(tmp_path: Path) -> None:
    state, content = TrainState(epoch=2, batch=3, step=17, unlogged=[(0.25, 1.5)], final_loss=0.125), tensors(0.25)
    channels_last = torch.arange(24.0).reshape(1, 2, 3, 2, 2).to(memory_format=torch.channels_last_3d)
    content["network"]["channels_last"] = channels_last
    writer(tmp_path).save(content, state, wait=True)
    saved = newest(tmp_path)
    assert Config.model_validate(saved.weights["config"]).num_epochs == 3
    assert [saved.weights[key] for key in ("epoch", "step", "final_loss")] == [2, 17, 0.125]
    assert_equal(saved.weights["network"], content["network"])
    assert saved.weights["network"]["channels_last"].stride() == channels_last.stride()
    assert torch.equal(saved.training["random"][0][0], content["random"][0][0])
    # NaN is not equal to NaN, but has the same repr.
    assert repr(saved.state) == repr(state)
    if shutil.which("sha256sum"):
        assert subprocess.run(["sha256sum", "-c", "--strict", CHECKSUMS], cwd=saved.path).returncode == 0
    (tmp_path / "other").touch()
    modes = {path.stat().st_mode for path in (tmp_path / "other", *saved.path.iterdir())}
    assert len(modes) == 1, "readable for colleagues, as temporary files are not"


def test_saves_are_written_in_the_background_and_hangs_reported(tmp_path: Path, caplog: Any, monkeypatch: Any) -> None:
    """Training may change its tensors as soon as `save` returns; the next save writes the new values."""
    may_write, write = threading.Event(), checkpoint_writer.write
    monkeypatch.setattr(BackgroundWriter, "WAIT_SECONDS", 0.01)
    monkeypatch.setattr(BackgroundWriter, "CLOSE_SECONDS", 0.01)
    monkeypatch.setattr(checkpoint_writer, "write", lambda *content: may_write.wait(GENEROUS) and write(*content))
    saves, content = writer(tmp_path), tensors(2.0)
    for step in (2, 3):
        saves.save(content, TrainState(step=step), wait=False)
        content["network"]["weight"] += 1
        content["optimizer"]["state"][0]["step"] += 1
    skipped = "No checkpoint at step 3: the one before it is still being written; earlier ones are kept"
    assert warnings(caplog) == [skipped]
    with pytest.raises(UserError, match=f"^the checkpoint of step 3 is not in {tmp_path}: it is still being written; "):
        saves.check()
    may_write.set()
    monkeypatch.undo()
    with pytest.raises(UserError):  # step 3 was requested, and is lost
        saves.check()
    assert_newest(tmp_path, 2)
    saves.save(content, TrainState(step=4), wait=False)
    saves.check()
    assert_newest(tmp_path, 4)


@pytest.mark.parametrize(("value", "dtype"), [("nan", torch.float32), ("inf", torch.bfloat16), ("-inf", torch.float16)])
def test_non_finite_weights_are_never_saved(tmp_path: Path, caplog: Any, value: str, dtype: torch.dtype) -> None:
    """A stop in between must not report the checkpoint as saved; the next save is tried."""
    saves, content = writer(tmp_path), tensors(1.0)
    saves.check()  # nothing to save so far
    content["network"] |= {"none": torch.zeros(0), "half": torch.full((70_000,), 60_000.0).to(dtype)}
    saves.save(content, TrainState(step=1), wait=True)
    assert checkpoints.saved_steps(tmp_path) == [1], "large values are finite"
    content["network"]["half"][69_999] = float(value)
    saves.save(content, TrainState(step=2), wait=True)
    assert "No checkpoint at step 2: the weights are not finite" in caplog.text
    with pytest.raises(UserError, match=rf"^the checkpoint of step 2 is not in {tmp_path}: the weights are not finite"):
        saves.check()
    content["network"]["half"][69_999] = 0
    saves.save(content, TrainState(step=3), wait=True)
    assert checkpoints.saved_steps(tmp_path) == [3, 1]
    saves.check()


@pytest.mark.parametrize("name", [WEIGHTS, TRAINING, CHECKSUMS])
def test_any_flipped_bit_is_detected(tmp_path: Path, name: str) -> None:
    directory = step_directory(folder_of(tmp_path), 2)
    path = directory / name
    for index in range(0, path.stat().st_size, 1 if name == CHECKSUMS else 7):
        flip(path, index)
        with pytest.raises(checkpoints.DamagedCheckpoint):
            checkpoints.verify(directory)
        flip(path, index)
    checkpoints.verify(directory)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda path: os.truncate(path / WEIGHTS, 999), "weights.pt is damaged"),
        (lambda path: (path / TRAINING).unlink(), "training.pt: No such file"),
        (lambda path: (path / CHECKSUMS).write_text(""), "weights.pt is damaged"),
    ],
)
def test_a_damaged_checkpoint_is_skipped_and_named(tmp_path: Path, caplog: Any, damage: Any, says: str) -> None:
    folder = folder_of(tmp_path)
    damage(step_directory(folder, 2))
    (path,) = (folder / name for name in names(folder) if name != "step_00000001")
    assert_newest(folder, 1)
    (warning,) = warnings(caplog)
    assert warning.startswith(f"Checkpoint {path} is skipped: {says}")
    if "weights" in says:
        with pytest.raises(UserError, match=r"^cannot read [^\n]*weights\.pt[^\n]*$"):
            read_weights(path)
    else:
        assert read_weights(path), "weights do not need the rest"
    shutil.rmtree(step_directory(folder, 1))
    with pytest.raises(UserError, match=rf"^no usable checkpoint in .*{path.name} .*--run_num"):
        load_newest(folder)
    save(writer(folder, 1), 1)
    assert_newest(folder, 1)  # the damaged one does not displace what this run saves now


class Bomb:
    def __reduce__(self) -> tuple:
        return os.mkdir, ("went-off",)


@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (lambda path: torch.save({"format": 2, "network": Bomb()}, path), "is damaged or not a PyTorch checkpoint"),
        (lambda path: path.write_bytes(pickle.dumps(Bomb(), 2)), "is damaged or not a PyTorch checkpoint"),
        (lambda path: torch.save({"weight": torch.zeros(1)}, path), "was not written by this version"),
    ],
)
def test_unknown_files_are_refused(tmp_path: Path, monkeypatch: Any, write: Any, reason: str, capfd: Any) -> None:
    """As weights and in a run directory; no code in them is run, and PyTorch's advice to do so is not repeated."""
    monkeypatch.chdir(tmp_path)
    weights = step_directory(folder_of(tmp_path, (1,)), 1) / WEIGHTS
    write(weights)
    rewrite_digests(weights.parent)
    with pytest.raises(UserError, match=rf"^cannot read {weights}: weights.pt {reason}[^\n]*; [^\n]*$"):
        read_weights(weights)
    with pytest.raises(UserError, match=rf"^no usable checkpoint in [^\n]*weights.pt {reason}[^\n]*$") as caught:
        load_newest(tmp_path / "checkpoints")
    assert "weights_only" not in "".join([str(caught.value), *capfd.readouterr()])
    assert not Path("went-off").exists()


def only_rank_0_reads(world: World, folder: str) -> list[Any]:
    """What each rank resumes from, the weights of --init_from, and an error; only rank 0 sees and reads the files."""
    os.chdir(Path(folder, str(world.rank)))
    worlds.BROADCAST_BYTES = 1000
    if not world.is_root:
        checkpoints.read = mock.Mock(side_effect=AssertionError)
    saved = find_start(Choice(RunDirectory(Path())), None, Config().model_dump(), world)._checkpoint
    step = mock.Mock()
    Start({}, folder + f"/{world.rank}", None, False).restore(step, Volumes(Config(), None), world)
    if world.is_root:
        flip(saved.path / WEIGHTS, 300)
    with pytest.raises(UserError, match="no usable checkpoint") as caught:
        find_start(Choice(RunDirectory(Path())), None, Config().model_dump(), world)
    content = [saved.weights, saved.training, saved.state]
    return [str(saved.path), repr(content), repr(step.load_weights.call_args.args), str(caught.value)]


def test_rank_0_reads_for_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed: each rank read the whole checkpoint, and the link to the best one, which a run in progress may replace."""
    save(writer(tmp_path / "0" / "checkpoints"), 8, best_step=8)
    (tmp_path / "1").mkdir()
    monkeypatch.chdir(tmp_path / "0")
    saved = newest(Path("checkpoints"))
    first, second = run_ranks(only_rank_0_reads, 2, str(tmp_path))
    assert first == second
    content = [saved.weights, saved.training, saved.state]
    assert first[:3] == [str(saved.path), repr(content), repr((saved.weights["network"],))]


def test_a_copy_without_links_has_the_same_best_checkpoint(tmp_path: Path) -> None:
    """Fixed: without the link no epoch had lowered the loss; the directory in place of a link was never renewed."""
    saves = writer(tmp_path / "run" / "checkpoints", 3)
    save(saves, 8)
    with pytest.raises(UserError, match=f"{checkpoints.NO_BEST}; .*for example the last one, .*/step_00000008"):
        read_weights(tmp_path / "run")
    for step in (16, 24):
        save(saves, step, best_step=16)
    directory = shutil.copytree(tmp_path / "run", tmp_path / "directory")
    without = shutil.copytree(tmp_path / "run", tmp_path / "without", symlinks=True)
    (without / "checkpoints" / BEST).unlink()
    assert not (directory / "checkpoints" / BEST).is_symlink()

    def best_steps(run: Path) -> list[int]:
        new, best = RunDirectory(tmp_path / "new"), f"{run}/checkpoints/best"
        start = find_start(Choice(new, best), None, Config().model_dump(), ALONE)
        return [read_weights(run)["step"], read_weights(run / "checkpoints" / BEST)["step"], start.state.step]

    for run in (tmp_path / "run", directory, without):
        assert best_steps(run) == [16] * 3
        save(writer(run / "checkpoints", 9), 32, 32)
        assert best_steps(run) == [32] * 3
        assert os.readlink(run / "checkpoints" / BEST) == "step_00000032"
    (without / "checkpoints" / BEST).unlink()
    flip(without / "checkpoints" / "step_00000032" / WEIGHTS, 0)
    assert best_steps(without) == [16] * 3, "the newest intact one counts"
    shutil.rmtree(without / "checkpoints" / "step_00000016")
    with pytest.raises(UserError, match=r"no best checkpoint: step_00000016 is missing; give .* the last one, "):
        read_weights(without)


def test_a_directory_above_runs_is_refused_with_the_runs_in_it(tmp_path: Path) -> None:
    save(writer(tmp_path / "demo" / "2ranks" / "00" / "checkpoints"), 8)
    with pytest.raises(UserError, match=f"; give .*, for example {tmp_path}/demo/2ranks/00$"):
        read_weights(tmp_path)
    with pytest.raises(UserError, match=f"^--resume={tmp_path}: it holds no .*, for example .*/demo/2ranks/00$"):
        find_start(Choice(RunDirectory(tmp_path / "new"), str(tmp_path)), None, Config().model_dump(), ALONE)


@pytest.mark.parametrize(
    ("function", "fault", "kept", "linked"),
    [
        ("fsync", "write checkpoint {}/step_00000002", [1], 1),
        # A FAT file system has no links. Fixed: "Cannot write checkpoint" was logged, and old ones were never removed.
        ("symlink", "point {}/best to the best checkpoint", [2, 1], 1),
        ("rmdir", "remove an old checkpoint in {}", [2, 1], 2),  # as on NFS while a prediction reads it
    ],
)
def test_a_disk_error_is_one_warning_and_costs_no_other_checkpoint(
    tmp_path: Path, caplog: Any, function: str, fault: str, kept: list[int], linked: int
) -> None:
    """A fixed bug: if that was the best one, readers found none, and suggested a worse one than the one before it."""
    saves = writer(tmp_path, 1)
    save(saves, 1, best_step=1)
    with mock.patch.object(os, function, side_effect=PermissionError(1, "Operation not permitted")):
        save(saves, 2, best_step=2)
    (warning,) = warnings(caplog)
    assert warning.startswith(f"Cannot {fault.format(tmp_path)}: Operation not permitted")
    assert names(tmp_path) == directories(*kept), "nothing partial is left"
    assert os.readlink(tmp_path / BEST) == f"step_{linked:08d}"
    assert_newest(tmp_path, kept[0])
    with contextlib.nullcontext() if 2 in kept else pytest.raises(UserError, match="step 2 is not in"):
        saves.check()
    save(saves, 3, best_step=2)
    assert names(tmp_path) == directories(kept[0], 3)
    assert read_weights(tmp_path / BEST)["step"] == kept[0]


def test_a_stale_handle_at_the_best_checkpoint_is_one_warning(tmp_path: Path, caplog: Any, monkeypatch: Any) -> None:
    """A fixed bug: it ended the thread with a traceback, and old checkpoints stayed."""
    saves = writer(tmp_path, 1)
    save(saves, 1, best_step=1)
    is_dir, stale = Path.is_dir, OSError(errno.ESTALE, os.strerror(errno.ESTALE))
    fail = mock.Mock(side_effect=stale)
    monkeypatch.setattr(Path, "is_dir", lambda path: fail() if path.name == "step_00000002" else is_dir(path))
    save(saves, 2, best_step=2)
    assert warnings(caplog) == [f"Cannot point {tmp_path}/best to the best checkpoint: {stale.strerror}"]
    save(saves, 3, best_step=2)
    assert names(tmp_path) == directories(1, 2, 3)


def test_checkpoints_that_a_new_run_removes_are_free_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that resumes removes none of them before it has written the next one."""
    folder, size = folder_of(tmp_path), build.model_size(Config().for_world(1))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=size.checkpoint - 1))
    checkpoint_writer.check_space(folder, size, resumes=False)
    with pytest.raises(UserError, match="a checkpoint needs about"):
        checkpoint_writer.check_space(folder, size, resumes=True)


def die_at(folder: str, step: int, function: str, call: int) -> None:
    """Saves other numbers at `step`, and kills its process at the given call of a function of `os`."""
    real, calls = getattr(os, function), []

    def die(*arguments: Any, **keywords: Any) -> Any:
        calls.append(arguments)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **keywords)

    setattr(os, function, die)
    writer(Path(folder)).save(tensors(5.0), TrainState(step=step, best_step=step), wait=True)


@pytest.mark.parametrize(
    ("step", "function", "call", "left"),
    [
        (3, "fsync", 1, 2),  # everything is written, nothing is on the disk
        (3, "rename", 1, 2),
        (2, "rename", 2, 2),  # the old checkpoint of this step has been moved aside
        (3, "replace", 1, 3),  # the new link has not replaced the old one
        (3, "rmdir", 1, 3),  # an old checkpoint is being removed
    ],
)
def test_killed_during_a_save(tmp_path: Path, step: int, function: str, call: int, left: int) -> None:
    """After the next start's recovery, the newest checkpoint is intact and nothing partial is left."""
    folder = folder_of(tmp_path)
    (folder / BEST).symlink_to("step_00000002")
    killed(die_at, str(folder), step, function, call)
    before = names(folder)
    recover(folder)
    saved = newest(folder)
    assert saved.state.step == left, before
    assert float(saved.weights["network"]["weight"][0]) == (5.0 if left == 3 else 2.0)
    assert names(folder) == directories(*checkpoints.saved_steps(folder)), before
    save(writer(folder), 4, best_step=4)
    assert_newest(folder, 4)
    assert os.readlink(folder / BEST) == "step_00000004"
