"""A resumed run ends as an uninterrupted one: same bits, same records, each once. It is finished with its summary."""

import contextlib
import importlib.util
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from log_lines import messages, other_lines
from processes import GENEROUS, run_ranks
from trainings import (
    ALONE,
    CLOCKS,
    STEPS,
    YAML,
    assert_equal,
    assert_same_training,
    curves,
    directory,
    killed,
    last,
    metrics,
    train_on,
)

import train
from utils import config as configs
from utils.distributed.signals import Signals
from utils.distributed.world import World
from utils.errors import Stopped, UserError
from utils.profiling.benchmark import Benchmark
from utils.run import checkpoint
from utils.run import open_run as runs
from utils.run.checkpoint import BEST, WEIGHTS, saved_steps, step_directory
from utils.run.loggers.base import RunRecords
from utils.run.start import Start
from utils.steps import build
from utils.steps.eager import EagerStep
from utils.training.reporter import Reporter

OFTEN = ["--set=checkpoint.every_steps=3", "--set=checkpoint.keep_last=9"]
CLASSIFICATION = """data_loader_config=classification dataset.name=digits network.name=mnist_cnn loss=cross_entropy
    metrics=[accuracy,top5_accuracy]"""
CASES: dict[str, list[str]] = {
    "apex_adam": ["--set=optimizer.name=apex_adam"],
    "nadam, float16": ["--set=optimizer.name=nadam", "--enable_amp", "--set=precision=float16"],
    "sgd": ["--set=optimizer.name=sgd", "--set=optimizer.momentum=0.9", "--set=lr_schedule.start_lr=0.01"],
    "averaged weights": ["--set=ema_decay=0.9", "--set=network.norm=batch"],
    "lamb, manual exchange": ["--set=optimizer.name=lamb", "--set=ddp=manual"],
    "soap": ["--set=optimizer.name=soap", "--set=optimizer.precondition_frequency=2"],
    "batch norm, own statistics": ["--set=network.norm=batch", "--disable_broadcast_buffers"],
    "ghost batches, micro-batches": ["--set=network.norm=ghost(1)", "--set=accumulation_steps=2"],
    "classification, dropout": [f"--set={setting}" for setting in CLASSIFICATION.split()],
}
# Also cases whose state may differ between ranks.
ON_TWO_RANKS = ["batch norm, own statistics", "averaged weights", "classification, dropout"]


class HookedStep(EagerStep):
    """Calls `after` with the number of each step of this process, counted from 1; `valid` scripts validation losses."""

    after: ClassVar[Callable[[int], None]] = staticmethod(lambda step: None)
    calls: ClassVar[int] = 0
    valid: ClassVar[dict[int, float]] = {}

    def __call__(self, *arguments: Any) -> torch.Tensor:
        loss = super().__call__(*arguments)
        HookedStep.calls += 1
        HookedStep.after(HookedStep.calls)
        return loss

    def evaluate(self, batch: Any) -> torch.Tensor:
        losses = super().evaluate(batch)
        return torch.full_like(losses, self.valid[self.calls]) if self.valid else losses

    @classmethod
    def hook(cls, after: Callable[[int], None] = lambda step: None, valid: dict[int, float] | None = None) -> None:
        cls.after, cls.calls, cls.valid = staticmethod(after), 0, valid or {}


def run(world: World, flags: list[str], after: int | None = None, valid: dict[int, float] | None = None) -> bool:
    """Trains in this process; False if it was stopped. The last rank gets a signal `after` that many steps."""
    signals = Signals()

    def interrupt(step: int) -> None:
        if step == after and world.rank == world.size - 1:
            signals.received = "SIGUSR1"

    HookedStep.hook(interrupt, valid)
    try:
        train_on(world, ["--config=test", "--set=report_baselines=false", *flags], HookedStep, signals)
    except Stopped:
        return False
    return True


def run_in_parts(world: World, flags: list[str], after: list[int]) -> None:
    """Trains to the end, stopped by a signal after each of these numbers of steps."""
    for steps in after:
        assert not run(world, flags, steps)
    assert run(world, flags)


def run_cases(world: World, flags: list[str], expdir: str, names: list[str]) -> None:
    """Trains each case once without stops and once with them."""
    logging.getLogger().setLevel(logging.INFO)
    for name in names:
        assert run(world, [*flags, *CASES[name], f"--set=expdir={expdir}/{name}/whole"])
        run_in_parts(world, [*flags, *CASES[name], f"--set=expdir={expdir}/{name}/parts"], [3, 6])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, data_flags: list[str]) -> Path:
    """The directory of an uninterrupted run, which tests must not change."""
    expdir = tmp_path_factory.mktemp("whole")
    assert run(ALONE, [*data_flags, *OFTEN, f"--set=expdir={expdir}"])
    assert saved_steps(directory(expdir) / "checkpoints") == [16, 15, 12, 9, 8, 6, 3]
    return directory(expdir)


@pytest.fixture
def finished(whole: Path, tmp_path: Path) -> Path:
    """A copy of `whole` as the run directory of `command`."""
    return shutil.copytree(whole, directory(tmp_path), symlinks=True)


SINGLE_STOPS = [pytest.param([step], marks=pytest.mark.slow if step % 8 else ()) for step in range(1, STEPS + 1)]


@pytest.mark.parametrize("after", [*SINGLE_STOPS, [1] * 15, [5, 4, 3]], ids=str)
def test_one_rank_interrupted_after_any_step(after: list[int], tmp_path: Path, data_flags: Any, whole: Path) -> None:
    """A fixed bug: after a stop in the last validation, the saved learning rate was that of the step before."""
    run_in_parts(ALONE, [*data_flags, *OFTEN, f"--set=expdir={tmp_path}"], after)
    assert_same_training(whole, directory(tmp_path))


def test_a_stop_and_a_kill_at_a_validation_record_it_once(tmp_path: Path, data_flags: Any, monkeypatch: Any) -> None:
    """A fixed bug: the records of the epoch's end were written before the kill, and again after it."""
    flags = [*data_flags, "--set=log_interval=3", "--set=log_noise_scale=true", "--set=accumulation_steps=2"]
    parts = [*flags, f"--set=expdir={tmp_path / 'parts'}"]
    assert run(ALONE, [*flags, f"--set=expdir={tmp_path / 'whole'}"])
    with monkeypatch.context() as patch:

        def evaluate(step: HookedStep, batch: Any) -> torch.Tensor:
            if step.calls:
                patch.setattr(Signals, "received", "SIGTERM")
            return EagerStep.evaluate(step, batch)

        patch.setattr(HookedStep, "evaluate", evaluate)
        assert not run(ALONE, parts)
        assert HookedStep.calls == 8
    with monkeypatch.context() as patch:
        record = Reporter.record_epoch
        patch.setattr(Reporter, "record_epoch", lambda *arguments: (record(*arguments), sys.exit(9)))
        with pytest.raises(SystemExit):
            run(ALONE, parts)
    assert run(ALONE, parts)
    assert_same_training(directory(tmp_path / "whole"), directory(tmp_path / "parts"))


@pytest.mark.parametrize("name", [name for name in CASES if name != ON_TWO_RANKS[0]])
def test_one_rank_with_every_optimizer(name: str, tmp_path: Path, data_flags: list[str]) -> None:
    if "classification" in name:
        pytest.importorskip("sklearn", reason="scikit-learn, which has the digits, is not installed")
    run_cases(ALONE, data_flags, str(tmp_path), [name])
    assert_same_training(directory(tmp_path / name / "whole"), directory(tmp_path / name / "parts"))


@pytest.mark.parametrize(("ranks", "names"), [(2, ON_TWO_RANKS), pytest.param(4, [*CASES][:6], marks=pytest.mark.slow)])
def test_several_ranks(ranks: int, names: list[str], tmp_path: Path, data_flags: list[str]) -> None:
    """Only the last rank gets the signal; all ranks stop after the same step, one step later."""
    names = names if importlib.util.find_spec("sklearn") else names[:2]
    run_ranks(run_cases, ranks, data_flags, str(tmp_path), names)
    for name in names:
        runs = [directory(tmp_path / name / part, ranks) for part in ("whole", "parts")]
        assert_same_training(*runs)
        assert "Stopping after step 4: a signal to another rank" in (runs[1] / "out.log").read_text()
        assert len(last(runs[1]).training["random"]) == ranks


def two_ranks_between(world: World, flags: list[str], source: str) -> list[bool]:
    """Stops a training run on two ranks, and finishes one that was stopped on one rank."""
    stopped = run(world, [*flags, "--run_num=two", "--set=checkpoint.every_steps=1"], 11)
    return [stopped, run(world, [*flags, "--run_num=one-two", f"--resume={source}"])]


def parameters(path: Path) -> torch.Tensor:
    return torch.cat([tensor.flatten().double() for tensor in last(path).weights["network"].values()])


def test_another_number_of_ranks_sees_the_same_samples(tmp_path: Path, data_flags: list[str]) -> None:
    """SGD, because Adam makes a large difference of a residual or an activation whose sign is changed by rounding."""
    flags = [*data_flags, *CASES["sgd"], f"--set=expdir={tmp_path}"]
    whole, stopped, resumable = (directory(tmp_path, *name) for name in ((1, "whole"), (1, "one"), (2, "two")))
    assert run(ALONE, [*flags, "--run_num=whole"])
    assert not run(ALONE, [*flags, "--run_num=one"], 11)
    assert run_ranks(two_ranks_between, 2, flags, str(stopped)) == [[False, True]] * 2
    assert run(ALONE, [*flags, "--run_num=two-one", f"--resume={resumable}"])
    expected = parameters(whole)
    for source, end in ((stopped, directory(tmp_path, 2, "one-two")), (resumable, directory(tmp_path, 1, "two-one"))):
        assert last(source).state.step in (11, 12)
        assert last(end).state.step == STEPS
        moved, error = ((parameters(path) - expected).norm() / expected.norm() for path in (source, end))
        assert error < min(1e-5, moved / 100)
        assert last(end).state.final_loss == pytest.approx(last(whole).state.final_loss, rel=1e-5)
        assert last(source).weights["density_factor"] is None, "that of an earlier validation"
        factors = [last(path).weights["density_factor"] for path in (end, whole)]
        assert factors[0] == pytest.approx(factors[1], rel=1e-5)


@pytest.fixture
def command(tmp_path: Path, data_flags: list[str], capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """command(*flags, after=f, code=0): a training run of config 'test' that ends with this exit code -> its stderr."""

    def start(*flags: str, after: Callable[[int], None] = lambda step: None, code: int = 0) -> str:
        HookedStep.hook(after)
        basics = [f"--yaml_config={YAML}", "--config=test", *data_flags, "--set=report_baselines=false"]
        with pytest.raises(SystemExit, match=f"^{code}$") if code else contextlib.nullcontext():
            train.main([*basics, f"--set=expdir={tmp_path}", *flags], HookedStep)
        return capsys.readouterr().err

    return start


def contents(run: Path) -> dict[str, Any]:
    paths = (path for path in run.rglob("*") if not path.is_dir() or path.is_symlink())
    return {str(path): path.readlink() if path.is_symlink() else path.read_bytes() for path in paths}


def test_a_run_resumes_with_damaged_records(command: Any, finished: Path) -> None:
    """Truncated, or valid JSON of another form, as after an edit by hand. They were tracebacks at each restart."""
    (finished / "config.yaml").write_text("")
    for name in ("summary.json", f"checkpoints/{BEST}"):
        (finished / name).unlink()
    for epochs, record in enumerate(("", "[]", '{"run_num": "00"}', '{"earlier": [3]}', '{"earlier": 3}'), start=3):
        (finished / "provenance.json").write_text(record)
        with (finished / "metrics.jsonl").open("a") as file:
            file.write('5\n[]\n{"loss": 1}\n{"step": "x"}\n{"step": 99, "Loss/va')
        command("--resume", f"--num_epochs={epochs}")
        assert json.loads((finished / "summary.json").read_text())["steps"] == 8 * epochs
    assert json.loads((finished / "provenance.json").read_text())["run_num"] == "00"
    assert [record["step"] for record in metrics(finished) if "Loss/valid" in record] == [*range(0, 57, 8)]
    assert checkpoint.read_weights(finished)["step"] == last(finished).state.best_step


def test_a_new_run_that_ends_before_it_begins_resumes_no_other(command: Any, finished: Path, monkeypatch: Any) -> None:
    """A job with --resume=no that ends while it still stages its data, or before it has removed the checkpoints."""
    before = saved_steps(finished / "checkpoints")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    for module, function in ((build, "open_loaders"), (runs, "_remove_run")):
        with monkeypatch.context() as patch:
            patch.setattr(module, function, lambda *_: sys.exit(143))
            command("--resume=no", "--num_epochs=1", code=143)
        assert saved_steps(finished / "checkpoints") == before, "nothing is removed before the new run starts"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert "Resuming" not in command("--resume=no", "--num_epochs=1")
    assert saved_steps(finished / "checkpoints") == [8]
    assert "Resuming" in command("--resume=no"), "from then on a restart resumes the new run"


def test_only_the_summary_is_missing_if_the_run_itself_had_trained_all_epochs(whole: Path) -> None:
    """An interrupted run is not finished by fewer epochs."""
    saved = last(whole)
    for trained, lacks_only_summary in ((2, True), (3, False)):
        saved.weights["config"]["num_epochs"] = trained
        start = Start({**saved.weights["config"], "num_epochs": 2}, None, saved, False)
        assert (start.is_complete, start.lacks_only_summary) == (True, lacks_only_summary)


def test_a_checkpoint_whose_run_saw_other_samples_is_refused(whole: Path) -> None:
    saved = last(whole)
    for key in ("seed", "Nsamples", "global_batch_size", "data_size", "box_size", "symmetries", "dataset.name"):
        with pytest.raises(UserError, match=f"was written by a run with {key} .* would see other samples; omit --res"):
            Start({**saved.weights["config"], key: "other"}, None, saved, False)
    moved = {**saved.weights["config"]["dataset"], "directory": "moved"}  # fixed: it was refused
    Start({**saved.weights["config"], "dataset": moved}, None, saved, False)


def test_another_loss_starts_the_search_for_the_best_checkpoint_again(whole: Path) -> None:
    """Fixed: losses of both were compared, and the best checkpoint stayed that of the smaller numbers."""
    for key, value, kept in (("val_path", "moved.h5", True), ("loss", "mse", False), ("lambda_rho", 0.5, False)):
        saved = last(whole)
        saved.training["loss"] = {"scale": 1}
        start = Start({**saved.weights["config"], key: value}, None, saved, False)
        assert bool(start.state.best_step) == kept == (saved.training["loss"] == {"scale": 1}), key


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("--resume={new}", "it holds no checkpoint; give a run directory, a checkpoint directory, auto or no"),
        ("--resume={new}/none", "no such directory; "),
        ("--resume={new}/damaged", "weights.pt is damaged: its digest does not match; recopy it"),
        ("--init_from={new}/damaged", "weights.pt is damaged: its digest does not match; recopy it"),
        ("--init_from={new}/none.pt", "no such file: "),
        ("--init_from={source}/training.pt", "holds no network; give weights.pt"),
        ("--resume={source} --set=network.width=8", "; undo network.width 4 -> 8, or omit --resume"),
        ("--resume={source} --set=optimizer.name=sgd", "does not fit this run: its optimizer is Adam, "),
        ("--init_from={source} --set=network.width=8", "does not fit this run: size mismatch for down1.weight: "),
    ],
)
def test_an_unusable_start_is_one_line(tmp_path: Path, command: Any, whole: Path, flag: str, says: Any) -> None:
    source = step_directory(whole / "checkpoints", 16)
    (shutil.copytree(source, tmp_path / "new" / "damaged") / WEIGHTS).write_text("damaged")
    flags = flag.format(new=tmp_path / "new", source=source).split()
    stderr = command(*flags, "--num_epochs=3", code=2)
    (line,) = [line for line in other_lines(stderr) if line.startswith("error: ")]
    assert line == stderr.splitlines()[-1]
    assert says in line
    assert flags[0].partition("=")[2] in line
    assert not directory(tmp_path).exists(), "nothing is written"


@pytest.mark.parametrize("given", ["", "/checkpoints/step_00000012"])
def test_the_checkpoint_of_another_run_is_resumed_once(tmp_path: Path, command: Any, whole: Path, given: str) -> None:
    """A fixed bug: --resume=<run>/checkpoints/step_00000012 reported that it holds no checkpoint."""
    run, source = directory(tmp_path), shutil.copytree(whole, directory(tmp_path, run_num="other"), symlinks=True)
    shutil.rmtree(step_directory(source / "checkpoints", 16))
    shutil.rmtree(step_directory(source / "checkpoints", 15))
    before = contents(source)
    flags = [f"--resume={source}{given}", "--set=checkpoint.every_steps=1"]
    stderr = command(*flags, after=lambda step: sys.exit(143) if step == 3 else None, code=143)
    assert f"Resuming from {source}/checkpoints/step_00000012, after step 12" in messages(stderr, "INFO")
    assert f"Resuming from {run}/checkpoints" in command(*flags), "its own checkpoint comes first"
    assert_equal(last(run).weights["network"], last(whole).weights["network"])
    assert contents(source) == before


def test_the_best_checkpoint_stays_across_a_resume(tmp_path: Path, data_flags: list[str]) -> None:
    """Validation losses 5 (untrained), 3, 1, 2, 4; stopped in the third epoch. Another run's best does not count."""
    flags = [*data_flags, f"--set=expdir={tmp_path}", "--num_epochs=4", "--set=checkpoint.keep_last=1"]
    source, elsewhere = directory(tmp_path), directory(tmp_path, run_num="elsewhere")
    assert not run(ALONE, flags, 20, valid={0: 5.0, 8: 3.0, 16: 1.0})
    assert saved_steps(source / "checkpoints") == [20, 16]
    assert os.readlink(source / "checkpoints" / BEST) == "step_00000016"
    assert run(ALONE, [*flags, "--run_num=elsewhere", f"--resume={source}"], valid={0: 9.0, 4: 2.0, 12: 4.0})
    assert saved_steps(elsewhere / "checkpoints") == [32, 24]
    assert os.readlink(elsewhere / "checkpoints" / BEST) == "step_00000024"
    assert run(ALONE, flags, valid={0: 9.0, 4: 2.0, 12: 4.0})
    assert saved_steps(source / "checkpoints") == [32, 16]
    assert os.readlink(source / "checkpoints" / BEST) == "step_00000016"
    assert (last(source).state.best_loss, last(source).state.best_step) == (1.0, 16)


def test_saves_every_two_minutes_and_at_the_end_of_each_epoch(tmp_path: Path, command: Any, monkeypatch: Any) -> None:
    now = [0.0]
    monkeypatch.setattr("utils.training.metrics.time", SimpleNamespace(perf_counter=lambda: now[0]))
    flags = ["--set=checkpoint.every_minutes=2", "--set=checkpoint.keep_last=99"]
    command(*flags, after=lambda step: now.append(now.pop() + 60))
    assert saved_steps(directory(tmp_path) / "checkpoints") == [16, 14, 11, 8, 6, 3]


def test_the_size_of_a_checkpoint_is_known_before_training(tmp_path: Path, data_flags: list[str]) -> None:
    """With every part that a checkpoint may have. The formats of its files add a few kB."""
    flags = [*data_flags, "--set=ema_decay=0.9", "--set=network.norm=batch", "--set=network.width=32"]
    flags += ["--set=optimizer.name=soap"]
    assert run(ALONE, [*flags, f"--set=expdir={tmp_path}", "--num_epochs=1"])
    saved = last(directory(tmp_path))
    size = sum(file.stat().st_size for file in saved.path.iterdir())
    config = configs.Config.model_validate(saved.weights["config"])
    assert 1 < size / build.model_size(config.for_world(1)).checkpoint < 1.02


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB; mounting it requires root."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command).returncode:
        pytest.skip("cannot mount a file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)  # lazily: log files in it may still be open


def fill(path: Path) -> None:
    """Writes a file until the disk is full to the last byte."""
    with open(path, "wb", buffering=0) as file:
        for size in (2**16, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of TensorBoard's thread
def test_a_full_disk_ends_no_training(disk: Path, command: Any, whole: Path) -> None:
    """Checkpoints, logs, curves and pictures are on it; it stays full to the end, and has space at the restart."""
    run = directory(disk)
    flags = ["--set=checkpoint.every_steps=4", f"--set=expdir={disk}", "--set=report_pictures=true"]

    def after(step: int) -> None:
        if step == 5:
            for thread in threading.enumerate():
                if thread.name == "checkpoint":
                    thread.join(GENEROUS)
            fill(disk / "filler")

    stderr = command(*flags, after=after, code=2)
    fault = "No space left on device"
    assert f"\nerror: the checkpoint of step 16 is not in {run}/checkpoints: {fault}; run the command" in stderr
    warnings = messages(stderr, "WARNING")
    assert sum(f": {fault}; earlier ones are kept" in line for line in warnings) == 3, "of steps 8, 12 and 16"
    assert warnings.count(f"Cannot record scalars in {run}: {fault}; the run continues") == 1
    assert len(warnings) <= 5, "at most one more, about pictures"
    assert "Traceback" not in stderr
    (disk / "filler").unlink()
    assert f"Resuming from {run}/checkpoints/step_00000004, after step 4" in messages(command(*flags), "INFO")
    assert_equal(last(run).weights["network"], last(whole).weights["network"])
    assert metrics(run) == metrics(whole)
    assert curves(run)["Loss/valid"] == curves(whole)["Loss/valid"]


def scalars(run: Path) -> dict[str, list[tuple[int, float]]]:
    return {tag: points for tag, points in curves(run).items() if tag not in CLOCKS}


def summary(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text())


def train_and_die(argv: list[str]) -> None:
    RunRecords.hparams = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment, method-assign]
    train.main(argv)


def test_a_restart_writes_a_missing_summary(tmp_path: Path, command: Any, whole: Path, data_flags: list[str]) -> None:
    """A run killed between its last checkpoint and its end once never got its hparam scalars."""
    argv = [f"--yaml_config={YAML}", "--config=test", *data_flags, f"--set=expdir={tmp_path}"]
    killed(train_and_die, argv)
    run = directory(tmp_path)
    assert not (run / "summary.json").exists()
    before = contents(run)
    assert "The summary of this run is missing" in command("--set=report_pictures=true")
    assert scalars(run) == scalars(whole), "each value once"
    assert {"loss_curves.png", "slices.png", "slices_largest_error.png"} < {*os.listdir(run)}
    assert (summary(run)["steps"], summary(run)["final_loss"]) == (16, summary(whole)["final_loss"])
    after = contents(run)
    for name in ("config.yaml", "provenance.json", "metrics.jsonl"):
        assert after[str(run / name)] == before[str(run / name)], f"{name} is that of the process that trained"


def test_a_run_that_never_beat_the_untrained_network_warns_at_its_end(tmp_path: Path, command: Any) -> None:
    """Fixed: only predict.py and export.py reported it, as a run that had no best checkpoint yet."""
    (warning,) = messages(command("--set=lr_schedule.start_lr=1e-30", "--num_epochs=1"), "WARNING")
    assert (
        f"{checkpoint.NO_BEST}; --checkpoint {directory(tmp_path)}/checkpoints/step_00000008 uses the last one"
        in warning
    )


def test_a_finished_run_is_left_unchanged(tmp_path: Path, command: Any, monkeypatch: Any) -> None:
    """The same command trains again, in a directory of its own; with --resume it has nothing to do."""
    run = directory(tmp_path)
    assert messages(command(), "WARNING") == []
    before = contents(run)
    printed = command("--set=log_interval=3")
    assert f"Run directory: {run}-2 (00 is finished; " in printed
    assert "Resuming" not in printed
    assert summary(run.with_name("00-2"))["steps"] == 16
    shutil.rmtree(run.with_name("00-2"))
    assert messages(command("--set=log_interval=3", "--resume"))[-2].startswith("Nothing was trained: ")
    command(f"--resume={run}", "--run_num=new")  # A fixed bug: it got the config and the summary of the other run.
    monkeypatch.setattr(Benchmark, "run", lambda benchmark: None)
    command("--resume", "--enable_benchy")
    assert contents(run) == before, "a benchmark writes to no run directory"
    assert [path.name for path in run.parent.iterdir()] == ["00"]


def test_more_epochs_replace_the_summary_and_continue_the_records(tmp_path: Path, command: Any) -> None:
    """All lines are in out.log, with those from before it was open."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    run, first = directory(tmp_path), command()
    records = metrics(run)
    assert "valid.h5: the inputs are " in messages(first)[0], "of the checks, before anything is written"
    second = command("--num_epochs=3", "--resume")
    assert messages((run / "out.log").read_text()) == messages(first) + messages(second)
    assert "num_epochs 2 -> 3" in second
    assert metrics(run)[: len(records)] == records
    curves = scalars(run)
    assert [step for step, _ in curves["Loss/valid"]] == [0, 8, 16, 24]
    assert summary(run)["steps"] == 24
    assert curves["hparam/final loss"] == [(25, curves["Loss/valid"][-1][1])], "of the longer run alone"
    content = EventAccumulator(str(run / "logs")).Reload().PluginTagToContent("hparams")
    shown = HParamsPluginData.FromString(content["_hparams_/session_start_info"]).session_start_info.hparams
    assert shown["num_epochs"].number_value == 3, "those of the shorter run were shown with the new loss"


def test_a_summary_that_cannot_be_written_is_no_success(command: Any, monkeypatch: Any) -> None:
    """The run ended with exit code 0 and a warning."""
    with monkeypatch.context() as patch:
        full = mock.Mock(side_effect=OSError(28, "No space left on device"))
        patch.setattr(runs, "asdict", full)
        stderr = command(code=2)
    remedy = "the network is saved; the same command writes it"
    assert re.search(f"summary.json: No space left on device; .*{remedy}$", stderr.splitlines()[-1])
