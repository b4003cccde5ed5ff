"""A training that is interrupted and goes on ends as if it had never stopped: same bits, same records, none twice."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from disks import fill, small_disk
from processes import run_ranks

import train
from utils import checkpoint, cli, trainer
from utils import config as configs
from utils.checkpoint import BEST, DIGESTS, FOLDER, TRAINING, WEIGHTS, Saving, place, saved_steps
from utils.distributed import Launch, World
from utils.errors import Stopped
from utils.steps.eager import EagerStep
from utils.stopping import NoSignals

YAML = str(Path(__file__).parent.parent / "config" / "UNet.yaml")
ALONE = World(Launch("test"), torch.device("cpu"))
STEPS = 16  # of config test: two epochs of eight
# They differ from run to run.
CLOCKS = {"seconds", "Step/samples per sec", "Step/TFLOP per sec per rank", "Step/data wait fraction"}
CLOCKS |= {"Avg iters per sec"}

CASES: dict[str, list[str]] = {
    "adam": [],
    "adam, 2 micro-batches": ["--set=accumulation_steps=2"],
    "adam, clipped": ["--set=clip_grad_norm=0.01", "--set=lr_schedule.end_lr=1e-3"],
    "apex_adam": ["--enable_apex"],
    "sgd": ["--set=optimizer.name=sgd", "--set=optimizer.momentum=0.9", "--set=lr_schedule.start_lr=0.01"],
    "plain sgd": ["--set=optimizer.name=sgd", "--set=lr_schedule.start_lr=0.01"],
    "bfloat16": ["--enable_amp"],
    "other intervals": ["--set=log_interval=3", "--set=checkpoint.every_steps=5"],
    "nadam": ["--set=optimizer.name=nadam"],
    "averaged weights": ["--set=ema_decay=0.9", "--set=network.norm=batch"],
    "lamb, by hand": ["--set=optimizer.name=lamb", "--set=ddp=manual"],
    "batch norm": ["--set=network.norm=batch"],
    "batch norm, own statistics": ["--set=network.norm=batch", "--disable_broadcast_buffers"],
    "sync_batch": ["--set=network.norm=sync_batch"],
    "ghost batches, micro-batches": ["--set=network.norm=ghost(1)", "--set=accumulation_steps=2"],
    "labelled samples, dropout": [
        "--set=data_loader_config=labelled",
        "--set=dataset.name=digits",
        "--set=network.name=mnist_cnn",
        "--set=loss=cross_entropy",
        "--set=metrics=[accuracy, top5_accuracy]",
    ],
}


# What ranks may do differently.
BETWEEN_RANKS = ["batch norm, own statistics", "sync_batch", "averaged weights", "labelled samples, dropout"]
ALONE_TOO = [name for name in CASES if name not in ("batch norm, own statistics", "sync_batch")]
SEVERAL = [*list(CASES)[:4], "sgd", "bfloat16", "other intervals"]


class Interruptions(NoSignals):
    """A signal comes to the last rank during the step that is asked for."""

    def __init__(self, rank: int, ranks: int, after: int | None) -> None:
        super().__init__()
        self.after = after if rank == ranks - 1 else None


class InterruptedStep(EagerStep):
    signals: ClassVar[Interruptions]

    def __call__(self, inputs: torch.Tensor, targets: torch.Tensor, rate: float) -> torch.Tensor:
        loss = super().__call__(inputs, targets, rate)
        if self.signals.after is not None:
            self.signals.after -= 1
            if self.signals.after == 0:
                self.signals.received = "SIGUSR1"
        return loss


def run(world: World, flags: list[str], after: int | None = None) -> bool:
    """One process's part of a training; False if it was stopped after so many steps of its own."""
    options = cli.parse([f"--yaml_config={YAML}", "--config=test", "--set=report_baselines=false", *flags])
    config = configs.load(options.yaml_config, options.config, options.overrides).for_world(world.size)
    InterruptedStep.signals = Interruptions(world.rank, world.size, after)
    try:
        train.run(options, config, world, InterruptedStep, InterruptedStep.signals)
    except Stopped:
        return False
    return True


def run_in_parts(world: World, flags: list[str], after: list[int]) -> None:
    """Stopped so many steps after each start, then left to end."""
    for steps in after:
        assert not run(world, flags, steps)
    assert run(world, flags)


def run_all(world: World, flags: list[str], expdir: str, cases: dict[str, list[str]], stops: list[int]) -> None:
    for name, case in cases.items():
        own = [*flags, *case]
        run_in_parts(world, [*own, f"--set=expdir={expdir}/{name}/whole"], [])
        run_in_parts(world, [*own, f"--set=expdir={expdir}/{name}/parts"], stops)


def directory(expdir: Path | str, ranks: int = 1, run_num: str = "00") -> Path:
    return Path(expdir) / "test" / f"{ranks}GPU" / run_num


def last(run: Path) -> checkpoint.Saved:
    saved = checkpoint.newest(run / FOLDER)
    assert saved is not None
    return saved


def metrics(run: Path) -> list[dict[str, float]]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in record.items() if key not in CLOCKS} for record in records]


def curves(run: Path) -> dict[str, list[tuple[int, float]]]:
    """TensorBoard's, as it shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "logs"), size_guidance={"scalars": 0}).Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def assert_equal(one: Any, other: Any, name: str = "") -> None:
    """Bit for bit."""
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, name
        assert torch.equal(one, other), name
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), name
        for key in one:
            assert_equal(one[key], other[key], f"{name}/{key}")
    elif isinstance(one, list):
        assert len(one) == len(other), name
        for index, pair in enumerate(zip(one, other, strict=True)):
            assert_equal(*pair, f"{name}/{index}")
    else:
        assert one == other, name


def assert_same_training(whole: Path, parts: Path, steps: int = STEPS) -> None:
    ends = [last(run) for run in (whole, parts)]
    assert ends[0].position.step == steps
    for end in ends:
        for clock in ("seconds", "epoch_seconds", "samples_per_second"):
            setattr(end.position, clock, 0.0)
            end.training["position"][clock] = 0.0
        end.weights["config"]["expdir"] = ""
    assert_equal(ends[0].weights, ends[1].weights)
    assert_equal(ends[0].training, ends[1].training)
    assert metrics(whole) == metrics(parts)
    expected, found = curves(whole), curves(parts)
    assert expected.keys() == found.keys()
    for tag, points in expected.items():
        assert [step for step, _ in points] == [step for step, _ in found[tag]], (
            f"{tag}: nothing twice, nothing left out"
        )
        if tag not in CLOCKS:
            assert points == found[tag], tag
    assert (whole / FOLDER / BEST).readlink() == (parts / FOLDER / BEST).readlink()


# --- bit for bit -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [[step] for step in range(1, STEPS)] + [[1] * 15, [5, 4, 3]], ids=str)
def test_one_rank_interrupted_after_any_step(after: list[int], tmp_path: Path, data_flags: list[str]) -> None:
    flags = [*data_flags, "--set=checkpoint.keep_last=1"]
    run_in_parts(ALONE, [*flags, f"--set=expdir={tmp_path}/whole"], [])
    run_in_parts(ALONE, [*flags, f"--set=expdir={tmp_path}/parts"], after)
    assert_same_training(directory(tmp_path / "whole"), directory(tmp_path / "parts"))


@pytest.mark.parametrize("name", ALONE_TOO)
def test_one_rank_with_every_optimizer(name: str, tmp_path: Path, data_flags: list[str]) -> None:
    run_all(ALONE, data_flags, str(tmp_path), {name: CASES[name]}, [3, 6])
    assert_same_training(directory(tmp_path / name / "whole"), directory(tmp_path / name / "parts"))


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "names"), [(2, ["adam", *BETWEEN_RANKS]), (4, SEVERAL)])
def test_several_ranks(ranks: int, names: list[str], tmp_path: Path, data_flags: list[str]) -> None:
    """The signal comes to the last rank alone: all stop after the same step, the one after."""
    cases = {name: CASES[name] for name in names}
    run_ranks(run_all, ranks, data_flags, str(tmp_path), cases, [3, 6], timeout=300)
    for name in cases:
        runs = [directory(tmp_path / name / part, ranks) for part in ("whole", "parts")]
        assert_same_training(*runs)
        assert "Stopping after step 4: a signal to another rank" not in (runs[0] / "metrics.jsonl").read_text()
        assert len(last(runs[1]).training["random"]) == ranks


# --- from outside ----------------------------------------------------------------------------------------------------


class HookedStep(EagerStep):
    """Calls `after` with the number of each step that this process has made, counted from 1."""

    after: ClassVar[Callable[[int], None]] = staticmethod(lambda step: None)
    made: ClassVar[int] = 0

    def __call__(self, inputs: torch.Tensor, targets: torch.Tensor, rate: float) -> torch.Tensor:
        loss = super().__call__(inputs, targets, rate)
        HookedStep.made += 1
        HookedStep.after(HookedStep.made)
        return loss


@pytest.fixture
def command(tmp_path: Path, data_flags: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """command(*flags, after=f): a training of config 'test' by its command line -> (exit code, stderr)."""

    def run(*flags: str, after: Callable[[int], None] = lambda step: None) -> tuple[int, str]:
        monkeypatch.setattr(HookedStep, "after", staticmethod(after))
        monkeypatch.setattr(HookedStep, "made", 0)
        code: Any = 0
        basics = [f"--yaml_config={YAML}", "--config=test", *data_flags, "--set=report_baselines=false"]
        try:
            train.main([*basics, f"--set=expdir={tmp_path}", *flags], HookedStep)
        except SystemExit as stop:
            code = stop.code
        return code, capsys.readouterr().err

    return run


LOG_LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} - \S+ - ([A-Z]+) - (.*)")


def said(stderr: str, level: str) -> list[str]:
    """The log's lines of that level."""
    found = (LOG_LINE.fullmatch(line) for line in stderr.splitlines())
    return [match[2] for match in found if match and match[1] == level]


def error_line(stderr: str) -> str:
    """The one line beside the log's; there is nothing else."""
    (line,) = (line for line in stderr.splitlines() if not LOG_LINE.fullmatch(line))
    assert line.startswith("error: ")
    return line


def contents(run: Path, *without: str) -> dict[str, Any]:
    """Of all files, by name; links by where they lead."""
    paths = (path for path in run.rglob("*") if not path.is_dir() or path.is_symlink())
    named = {str(path.relative_to(run)): path for path in paths if path.name not in without}
    return {name: path.readlink() if path.is_symlink() else path.read_bytes() for name, path in named.items()}


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


# --- damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [WEIGHTS, TRAINING, DIGESTS])
@pytest.mark.parametrize("kind", ["flipped", "cut", "removed", "a directory"])
def test_goes_on_from_the_one_before_a_damaged_one(tmp_path: Path, command: Any, name: str, kind: str) -> None:
    flags = ["--set=checkpoint.every_steps=2", "--set=checkpoint.keep_last=2"]
    assert command("--run_num=whole", *flags)[0] == 0
    run = directory(tmp_path)

    def stop(step: int) -> None:
        if step == 7:
            os.kill(os.getpid(), 15)
            threading.Event().wait(0.2)

    code, _ = command(*flags, after=stop)
    assert (code, saved_steps(run / FOLDER)) == (75, [7, 6])
    path = place(run / FOLDER, 7) / name
    if kind == "flipped":
        flip(path)
    elif kind == "cut":
        os.truncate(path, path.stat().st_size // 2)
    else:
        path.unlink()
        if kind == "a directory":
            path.mkdir()
    code, stderr = command(*flags)
    assert code == 0, stderr
    (warning,) = said(stderr, "WARNING")
    assert warning.startswith(f"Checkpoint {place(run / FOLDER, 7)} is skipped: ")
    assert f"Going on from {place(run / FOLDER, 6)}, after step 6" in said(stderr, "INFO")
    assert_same_training(directory(tmp_path, run_num="whole"), run)


def test_none_that_is_whole_is_one_line_and_nothing_changes(tmp_path: Path, command: Any) -> None:
    assert command()[0] == 0
    run = directory(tmp_path)
    flip(place(run / FOLDER, 16) / WEIGHTS)
    flip(place(run / FOLDER, 8) / TRAINING)
    before = contents(run)
    code, stderr = command("--num_epochs=3")
    assert code == 2
    line = error_line(stderr)
    assert line.startswith(f"error: no usable checkpoint in {run / FOLDER}: step_00000016 (weights.pt is not what was")
    assert "step_00000008 (training.pt is not what was written)" in line
    assert "--resume=no" in line
    assert contents(run) == before
    code, stderr = command("--resume=no", "--num_epochs=1")
    assert code == 0, stderr
    assert saved_steps(run / FOLDER) == [8]


# --- where a training begins -----------------------------------------------------------------------------------------


def test_resume_no_starts_anew_and_removes_the_old_ones(tmp_path: Path, command: Any) -> None:
    run = directory(tmp_path)
    assert command("--set=checkpoint.every_steps=3", "--set=checkpoint.keep_last=9")[0] == 0
    assert saved_steps(run / FOLDER) == [16, 15, 12, 9, 8, 6, 3]
    assert command("--resume=no", "--set=seed=5", "--num_epochs=1")[0] == 0
    assert saved_steps(run / FOLDER) == [8]
    assert [record["step"] for record in metrics(run) if "Loss/valid" in record] == [0, 8]
    assert [step for step, _ in curves(run)["Loss/valid"]] == [0, 8]


@pytest.mark.parametrize("count", ["SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"])
def test_a_job_that_is_started_again_goes_on_whatever_resume_says(
    tmp_path: Path, command: Any, monkeypatch: pytest.MonkeyPatch, count: str
) -> None:
    run = directory(tmp_path)
    assert command("--num_epochs=1")[0] == 0
    monkeypatch.setenv(count, "1")
    code, stderr = command("--resume=no")
    assert code == 0, stderr
    assert f"Going on from {place(run / FOLDER, 8)}, after step 8" in said(stderr, "INFO")
    assert saved_steps(run / FOLDER) == [16, 8]
    monkeypatch.setenv(count, "0")
    assert command("--resume=no", "--num_epochs=1")[0] == 0
    assert saved_steps(run / FOLDER) == [8], "the first start of a job is none again"


def test_a_new_training_that_is_cut_off_before_it_began_does_not_take_up_the_old_one(
    tmp_path: Path, command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job with --resume=no, preempted while it still stages its data, and started again by its launcher."""
    run = directory(tmp_path)
    assert command()[0] == 0
    with monkeypatch.context() as patch:
        patch.setattr(train, "build_loaders", lambda *_: sys.exit(143))
        assert command("--resume=no", "--num_epochs=1")[0] == 143
    assert saved_steps(run / FOLDER) == [16, 8], "nothing is lost before a new training begins"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    code, stderr = command("--resume=no", "--num_epochs=1")
    assert code == 0, stderr
    assert "Going on" not in stderr
    assert saved_steps(run / FOLDER) == [8]
    assert "Going on" in command("--resume=no")[1], "from then on it is the training that goes on"


def test_checkpoints_behind_a_link_are_removed_too(tmp_path: Path, command: Any) -> None:
    """The old run's would be taken for the new one's newest."""
    run, scratch = directory(tmp_path), tmp_path / "scratch"
    assert command()[0] == 0
    (run / FOLDER).rename(scratch)
    (run / FOLDER).symlink_to(scratch)
    assert command("--resume=no", "--num_epochs=1")[0] == 0
    assert saved_steps(run / FOLDER) == saved_steps(scratch) == [8]


def test_provenance_tells_of_every_part(tmp_path: Path, command: Any) -> None:
    run = directory(tmp_path)
    assert command("--num_epochs=1")[0] == 0
    assert command("--num_epochs=2")[0] == 0
    assert command("--num_epochs=3")[0] == 0
    record = json.loads((run / "provenance.json").read_text())
    assert len(record["earlier"]) == 2
    assert all("earlier" not in part and part["date"] <= record["date"] for part in record["earlier"])
    assert command("--resume=no", "--num_epochs=1")[0] == 0
    assert "earlier" not in json.loads((run / "provenance.json").read_text())


@pytest.mark.parametrize("flag", ["--resume", "--resume=auto"])
def test_a_complete_training_says_so_and_changes_nothing(tmp_path: Path, command: Any, flag: str) -> None:
    run = directory(tmp_path)
    assert command()[0] == 0
    before = contents(run, "out.log", "provenance.json")
    code, stderr = command(flag)
    assert code == 0, stderr
    told = said(stderr, "INFO")
    assert "This training is complete; raise num_epochs, start anew with --resume=no, or give a --run_num" in told
    assert HookedStep.made == 0
    assert contents(run, "out.log", "provenance.json") == before


def test_more_epochs_go_on_from_a_complete_training(tmp_path: Path, command: Any) -> None:
    """The schedule is that of three epochs from there on, so not the bits of three in a row."""
    run = directory(tmp_path)
    assert command()[0] == 0
    first = metrics(run)
    code, stderr = command("--num_epochs=3")
    assert code == 0, stderr
    assert any(line.startswith("Changed since: num_epochs 2 -> 3; the learning rate") for line in said(stderr, "INFO"))
    assert HookedStep.made == 8
    assert metrics(run)[: len(first)] == first
    assert [record["step"] for record in metrics(run) if "Loss/valid" in record] == [0, 8, 16, 24]
    assert last(run).position.epoch == 3


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--set=network.width=8"], " does not fit this training: it"),
        (["--set=network.scales=3"], " does not fit this training: it has no "),
        (["--set=optimizer.name=sgd"], " does not fit this training: its optimizer is Adam, this training's is SGD;"),
        (["--set=seed=1"], " is of a training with seed 0, this one has 1, so it would not go on where that one "),
        (["--set=global_batch_size=4"], " is of a training with global_batch_size 8, this one has 4, so "),
        (["--set=Nsamples=32"], " is of a training with Nsamples 64, this one has 32, so "),
        (["--set=symmetries=none"], " is of a training with symmetries full, this one has none, so "),
    ],
)
def test_another_training_is_one_line_and_nothing_is_overwritten(
    tmp_path: Path, command: Any, flags: list[str], says: str
) -> None:
    run = directory(tmp_path)
    assert command("--num_epochs=1")[0] == 0
    before = contents(run)
    code, stderr = command(*flags)
    assert code == 2, stderr
    line = error_line(stderr)
    assert line.startswith(f"error: {place(run / FOLDER, 8)}{says}")
    assert "--run_num" in line
    assert contents(run) == before
    assert command(*flags, "--run_num=own", "--num_epochs=1")[0] == 0


def test_another_run_without_checkpoints_is_one_line(tmp_path: Path, command: Any) -> None:
    (tmp_path / "other").mkdir()
    for elsewhere in (tmp_path / "other", tmp_path / "nowhere"):
        code, stderr = command(f"--resume={elsewhere}")
        assert code == 2
        says = f"error: --resume={elsewhere}: there is no checkpoint in it; give a run's directory, auto or no"
        assert error_line(stderr) == says
        assert not directory(tmp_path).exists()


def test_another_runs_checkpoint_stays_and_its_own_wins_afterwards(tmp_path: Path, command: Any) -> None:
    other, run = directory(tmp_path, run_num="other"), directory(tmp_path)
    assert command("--run_num=whole")[0] == 0
    assert command("--run_num=other", "--set=checkpoint.every_steps=3", "--set=checkpoint.keep_last=9")[0] == 0
    shutil.rmtree(place(other / FOLDER, 16))
    shutil.rmtree(place(other / FOLDER, 15))
    before = contents(other)
    code, stderr = command(f"--resume={other}")
    assert code == 0, stderr
    assert f"Going on from {place(other / FOLDER, 12)}, after step 12" in said(stderr, "INFO")
    assert (HookedStep.made, saved_steps(run / FOLDER)) == (4, [16])
    assert (run / FOLDER / BEST).readlink() == Path("step_00000016")
    whole = last(directory(tmp_path, run_num="whole"))
    assert_equal(last(run).weights["network"], whole.weights["network"])
    code, stderr = command(f"--resume={other}", "--num_epochs=3")
    assert code == 0, stderr
    assert f"Going on from {place(run / FOLDER, 16)}, after step 16" in said(stderr, "INFO")
    assert contents(other) == before


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Of all parameters, relative to their norm."""
    flat = [torch.cat([tensor.flatten().double() for tensor in part.values()]) for part in (one, other)]
    return float((flat[0] - flat[1]).norm() / flat[1].norm())


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_number_of_ranks_sees_the_same_samples(
    tmp_path: Path, data_flags: list[str], before: int, after: int
) -> None:
    """Stopped in the second epoch; parameters agree within rounding, and would not with other samples."""

    def go(ranks: int, flags: list[str], stop: int | None = None) -> None:
        own = [*data_flags, f"--set=expdir={tmp_path}", *flags]
        done = [run(ALONE, own, stop)] if ranks == 1 else run_ranks(run, ranks, own, stop)
        assert done == [stop is None] * ranks

    go(1, ["--run_num=whole"])
    go(before, ["--run_num=parts", "--set=checkpoint.every_steps=1"], 11)
    source = directory(tmp_path, before, "parts")
    assert last(source).position.step in (11, 12)
    go(after, ["--run_num=on", f"--resume={source}"])
    ends = [last(directory(tmp_path, 1, "whole")), last(directory(tmp_path, after, "on"))]
    assert [end.position.step for end in ends] == [16, 16]
    moved = distance(last(source).weights["network"], ends[0].weights["network"])
    assert distance(ends[1].weights["network"], ends[0].weights["network"]) < min(1e-5, moved / 100)
    assert ends[1].position.final_loss == pytest.approx(ends[0].position.final_loss, rel=1e-5)


# --- weights alone ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["file", "checkpoint", "best"])
def test_weights_alone_start_a_new_training(tmp_path: Path, command: Any, what: str) -> None:
    assert command("--run_num=source")[0] == 0
    folder = directory(tmp_path, run_num="source") / FOLDER
    path = {"file": place(folder, 16) / WEIGHTS, "checkpoint": place(folder, 16), "best": folder / BEST}[what]
    source = checkpoint.load(folder / BEST if what == "best" else place(folder, 16))
    code, stderr = command(f"--init_from={path}", "--set=seed=7", "--set=optimizer.name=sgd", "--num_epochs=1")
    assert code == 0, stderr
    assert f"Weights of {path}" in said(stderr, "INFO")
    end = last(directory(tmp_path))
    assert (end.position.step, end.position.epoch) == (8, 1)
    assert end.position.initial_loss == source.position.final_loss
    assert metrics(directory(tmp_path))[0]["Loss/valid"] == source.position.final_loss
    assert end.training["optimizer"]["kind"] == "SGD"


def test_weights_alone_bring_no_optimizer_state(tmp_path: Path, command: Any) -> None:
    assert command("--run_num=source")[0] == 0
    path = place(directory(tmp_path, run_num="source") / FOLDER, 16)
    assert command(f"--init_from={path}", "--num_epochs=1")[0] == 0
    moments = last(directory(tmp_path)).training["optimizer"]["state"]
    assert {int(state["step"]) for state in moments.values()} == {8}


def test_its_own_checkpoint_wins_over_weights_alone(tmp_path: Path, command: Any) -> None:
    assert command("--run_num=source")[0] == 0
    path = place(directory(tmp_path, run_num="source") / FOLDER, 8)
    flags = [f"--init_from={path}", "--set=seed=7"]
    assert command(*flags, "--num_epochs=1")[0] == 0
    code, stderr = command(*flags)
    assert code == 0, stderr
    told = said(stderr, "INFO")
    assert "--init_from has no effect: this training has a checkpoint of its own; give a --run_num" in told
    assert f"Going on from {place(directory(tmp_path) / FOLDER, 8)}, after step 8" in told


def test_weights_that_do_not_fit_or_cannot_be_read_are_one_line(tmp_path: Path, command: Any) -> None:
    assert command("--run_num=source")[0] == 0
    source = place(directory(tmp_path, run_num="source") / FOLDER, 16)
    damaged = tmp_path / "damaged"
    shutil.copytree(source, damaged)
    flip(damaged / WEIGHTS)
    for path, says, flags in (
        (source / TRAINING, f"cannot read {source / TRAINING}: training.pt holds no network", []),
        (source / WEIGHTS, f"{source / WEIGHTS} does not fit this training: its ", ["--set=network.width=8"]),
        (source / WEIGHTS, f"{source / WEIGHTS} does not fit this training: ", ["--set=network.scales=1"]),
        (tmp_path / "none.pt", f"no such file: {tmp_path / 'none.pt'}", []),
        (damaged, f"cannot read {damaged / WEIGHTS}: ", []),
        (damaged / WEIGHTS, f"cannot read {damaged / WEIGHTS}: ", []),
        (Path(YAML), f"cannot read {YAML}: {Path(YAML).name} is cut off, or no checkpoint of PyTorch's", []),
    ):
        code, stderr = command(f"--init_from={path}", *flags)
        assert code == 2, stderr
        assert error_line(stderr).startswith(f"error: {says}")
        assert error_line(stderr).endswith(("or its weights.pt", "; name a run of the same network"))
        assert not directory(tmp_path).exists(), "nothing is written"


# --- when it saves ---------------------------------------------------------------------------------------------------


def test_the_best_link_is_moved_after_each_epoch_and_resume_keeps_it(tmp_path: Path, command: Any) -> None:
    """The learning rate makes the second epoch worse than the first."""
    run = directory(tmp_path)
    flags = ["--num_epochs=4", "--set=checkpoint.keep_last=1", "--set=lr_schedule.start_lr=0.5"]
    seen = {}

    def look(step: int) -> None:
        if (run / FOLDER / BEST).is_symlink():
            seen[step] = os.readlink(run / FOLDER / BEST)

    def stop(step: int) -> None:
        look(step)
        if step == 20:
            os.kill(os.getpid(), 15)
            threading.Event().wait(0.2)

    assert command(*flags, after=stop)[0] == 75
    losses = {record["step"]: record["Loss/valid"] for record in metrics(run) if record.get("Loss/valid") is not None}
    best = min(losses, key=lambda step: losses[step])
    assert losses[8] != losses[16]
    if best:  # the untrained network is the best there can be, and is not saved
        assert seen[20] == f"step_{best:08d}"
        assert saved_steps(run / FOLDER) == sorted({20, best}, reverse=True)
    assert last(run).position.best_loss == losses[best]
    assert command(*flags)[0] == 0
    losses = {record["step"]: record["Loss/valid"] for record in metrics(run) if "Loss/valid" in record}
    best = min(losses, key=lambda step: losses[step])
    assert last(run).position.best_loss == losses[best]
    if best:
        assert os.readlink(run / FOLDER / BEST) == f"step_{best:08d}"


def test_saves_at_steps_minutes_and_each_epochs_end(
    tmp_path: Path, command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def saved(run_num: str, *flags: str, after: Callable[[int], None] = lambda step: None) -> list[int]:
        own = [f"--run_num={run_num}", "--set=checkpoint.keep_last=99", *flags]
        code, stderr = command(*own, after=after)
        assert code == 0, stderr
        return saved_steps(directory(tmp_path, run_num=run_num) / FOLDER)[::-1]

    assert saved("epochs", "--set=checkpoint.every_minutes=None") == [8, 16]
    assert saved("steps", "--set=checkpoint.every_steps=3") == [3, 6, 8, 9, 12, 15, 16]
    assert saved("defaults") == [8, 16]
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(trainer, "time", SimpleNamespace(perf_counter=lambda: clock.now))

    def a_minute_passes(step: int) -> None:
        clock.now += 60

    # More than two minutes after the last save, that of the epoch's end too.
    assert saved("minutes", "--set=checkpoint.every_minutes=2", after=a_minute_passes) == [3, 6, 8, 11, 14, 16]


# --- faults of the disk ----------------------------------------------------------------------------------------------


def wait_for_writes() -> None:
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join(20)


def test_a_full_disk_costs_checkpoints_and_no_training(tmp_path: Path, command: Any) -> None:
    """Only the checkpoints lie on it; it fills up after the second save, and is emptied before the last."""
    run = directory(tmp_path)
    flags = ["--set=checkpoint.every_steps=2", "--set=checkpoint.keep_last=2"]

    def after(step: int) -> None:
        if step == 5:
            wait_for_writes()
            fill(run / FOLDER)
        if step == 13:
            wait_for_writes()
            assert sorted(os.listdir(run / FOLDER)) == ["filler", "step_00000002", "step_00000004"]
            os.remove(run / FOLDER / "filler")

    with small_disk(run / FOLDER, "2m"):
        code, stderr = command(*flags, after=after)
        assert code == 0, stderr
        fault = "No space left on device; training goes on, earlier ones stay"
        steps = (6, 8, 10, 12)
        expected = [f"Cannot write checkpoint {place(run / FOLDER, step)}: {fault}" for step in steps]
        assert said(stderr, "WARNING") == expected
        assert "Traceback" not in stderr
        end = last(run)
    assert command("--run_num=whole", *flags)[0] == 0
    whole = last(directory(tmp_path, run_num="whole"))
    assert end.position.step == whole.position.step == 16
    assert_equal(end.weights["network"], whole.weights["network"])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of TensorBoard's thread
def test_a_disk_full_of_everything_ends_no_training(tmp_path: Path, command: Any) -> None:
    """Logs, curves and pictures lie on it, too; it stays full to the end, and is emptied before the next start."""
    run = directory(tmp_path / "disk")
    flags = ["--set=checkpoint.every_steps=4", f"--set=expdir={tmp_path / 'disk'}", "--set=report_pictures=true"]

    def after(step: int) -> None:
        if step == 5:
            wait_for_writes()
            fill(tmp_path / "disk")

    with small_disk(tmp_path / "disk", "2m"):
        code, stderr = command(*flags, after=after)
        assert code == 2, stderr
        why = f"the trained network is not in {run / FOLDER}: No space left on device; mend that"
        assert f"\nerror: {why}" in stderr
        warnings = said(stderr, "WARNING")
        fault = "No space left on device; training goes on"
        steps = [8, 12, 16]
        expected = [
            f"Cannot write checkpoint {place(run / FOLDER, step)}: {fault}, earlier ones stay" for step in steps
        ]
        assert [line for line in warnings if "checkpoint" in line] == expected
        assert warnings.count(f"Cannot record scalars in {run}: {fault}") == 1
        assert len(warnings) <= 5, "and one of pictures at most"
        assert "Traceback" not in stderr
        assert "DONE ---- rank 0" not in said(stderr, "INFO")
        os.remove(tmp_path / "disk" / "filler")
        code, stderr = command(*flags)
        assert code == 0, stderr
        assert f"Going on from {place(run / FOLDER, 4)}, after step 4" in said(stderr, "INFO")
        assert command("--run_num=whole")[0] == 0
        whole = directory(tmp_path, run_num="whole")
        assert_equal(last(run).weights["network"], last(whole).weights["network"])
        assert metrics(run) == metrics(whole)
        assert curves(run)["Loss/valid"] == curves(whole)["Loss/valid"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of TensorBoard's thread
def test_a_run_directory_that_is_removed_ends_no_training(tmp_path: Path, command: Any) -> None:
    run = directory(tmp_path)
    flags = ["--set=checkpoint.every_steps=2"]

    def after(step: int) -> None:
        if step == 11:
            wait_for_writes()
            shutil.rmtree(run)

    code, stderr = command(*flags, after=after)
    assert code == 0, stderr
    assert "Traceback" not in stderr
    end = last(run)
    assert command("--run_num=whole", *flags)[0] == 0
    whole = last(directory(tmp_path, run_num="whole"))
    assert end.position.step == whole.position.step == 16
    assert_equal(end.weights["network"], whole.weights["network"])


def test_a_save_that_hangs_ends_no_training(tmp_path: Path, command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run, release, write = directory(tmp_path), threading.Event(), checkpoint.write
    monkeypatch.setattr(Saving, "CLOSING_SECONDS", 0.3)
    monkeypatch.setattr(Saving, "PATIENCE_SECONDS", 0.3)
    monkeypatch.setattr(Saving, "BEST_SECONDS", 0.0)

    def hang(target: Path, *arguments: Any) -> None:
        if target.name == "step_00000006":
            assert release.wait(20)
        write(target, *arguments)

    monkeypatch.setattr(checkpoint, "write", hang)
    flags = ["--set=checkpoint.every_steps=2", "--set=checkpoint.keep_last=9"]
    code, stderr = command(*flags)
    assert code == 2, "trained to the end, but what came of it is not on the disk"
    assert f"\nerror: the trained network is not in {run / FOLDER}: it is still being written; mend that" in stderr
    (*missed, late) = said(stderr, "WARNING")
    steps = [8, 10, 12, 14, 16]
    assert [line.split(":")[0] for line in missed] == [f"No checkpoint at step {step}" for step in steps]
    assert late.startswith("The checkpoint of step 6 was not written in time")
    assert last(run).position.step == 4
    release.set()
    wait_for_writes()
    assert last(run).position.step == 6
    code, stderr = command(*flags)
    assert (code, said(stderr, "WARNING")) == (0, [])
    assert command("--run_num=whole", *flags)[0] == 0
    whole = directory(tmp_path, run_num="whole")
    assert_equal(last(run).weights["network"], last(whole).weights["network"])
    assert metrics(run) == metrics(whole)
