"""Kills runs at random moments, resumes them to the end, and compares the bits with an undisturbed training run.

python tests/soak.py 100                                      100 kills; make soak N=100 does the same
python tests/soak.py 200 --launchers plain,torchrun,srun      an equal share of the kills under each launcher

Kills are planned in four phases: in the start, between two saves, during a save, and in the end phase, which begins
when the last checkpoint is written and ends with summary.json. Victims are one rank, all ranks, or torchrun's agent.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

TOP = Path(__file__).parent.parent
sys.path[:0] = [str(TOP), str(TOP / "tests"), str(TOP / "tests" / "slurm")]

from slurm_cluster import Unavailable  # noqa: E402 # found by the path above
from soak_launchers import AGENT, RANKS, LauncherFactory, Plain, open_launcher  # noqa: E402

EPOCHS = 6
STEPS_PER_EPOCH = 8
# A save every third step in addition to each epoch's end: many kills hit a save. With this learning rate the
# validation loss is lowest after the first epoch, then after the fourth one, and never after the last one.
FLAGS = [
    "--config=test",
    "--set=checkpoint.every_steps=3",
    "--set=lr_schedule.start_lr=0.01",
    "--set=lr_schedule.shape=constant",
    "--set=report_baselines=false",
    "--set=timeouts.rendezvous=20",  # how long the survivor of a kill before the rendezvous waits
]
START, BETWEEN, SAVE, END = "start", "between saves", "save", "end"
WEIGHTS = {START: 30, BETWEEN: 20, SAVE: 20, END: 30}
TRAINS, WRITES_SUMMARY = "Warm-up, first forward", "The summary of this run is missing"  # lines of the log
# Of plain processes; 76: the peer is gone; 2: a survivor that waited for its peer in the rendezvous.
EXIT_CODES = {0, 1, 2, 76, -signal.SIGKILL}
CLOCKS = ("seconds", "samples_per_second")  # measured times in summary.json


class PlannedKill(NamedTuple):
    """A planned kill, in a phase, or by the victims themselves after `steps` steps."""

    victims: Sequence[int | str]
    phase: str = BETWEEN
    fraction: float = 0.0  # of the phase's duration
    steps: int | None = None


Planned = TypeVar("Planned")
Done = TypeVar("Done")


class Kill(NamedTuple):
    """An executed kill."""

    victims: list[int | str]
    phase: str
    seconds: float  # from the kill to the end of the last survivor


class Run(NamedTuple):
    """One training run of a soak test."""

    directory: Path
    launcher: Plain
    last_step: int

    def saved(self) -> list[int]:
        from utils.training.checkpoint import FOLDER, saved_steps

        return saved_steps(self.directory / FOLDER)

    def is_saving(self) -> bool:
        return any((self.directory / "checkpoints").glob(".*.partial"))

    def has_summary(self) -> bool:
        return (self.directory / "summary.json").exists()

    def has_finished(self) -> bool:
        """True if the next start would be another training run, in a directory of its own."""
        return self.has_summary() and self.launcher.has_ended()

    def phase(self) -> str:
        """The phase that this start has reached."""
        text = self.launcher.text()
        if TRAINS not in text and WRITES_SUMMARY not in text:
            return START
        if self.last_step in self.saved():
            return END
        return SAVE if self.is_saving() else BETWEEN


# --- one kill --------------------------------------------------------------------------------------------------------


def wait_for_moment(run: Run, planned: PlannedKill, durations: dict[str, float]) -> None:
    """Returns at the planned moment, or when the run has ended."""
    launcher, victims = run.launcher, set(planned.victims)
    reached = {START: lambda: victims & set(launcher.running()), END: lambda: run.phase() == END}
    begun = reached.get(planned.phase, lambda: run.phase() != START)
    while not begun():
        if launcher.has_ended():
            return
        time.sleep(0.01)
    time.sleep(planned.fraction * durations[planned.phase])
    while planned.phase == SAVE and not run.is_saving() and not launcher.has_ended():
        time.sleep(0.001)


def kill(durations: dict[str, float], run: Run, planned: PlannedKill) -> Kill | None:
    """Starts the run, carries out a kill and waits for its consequences; None if the run had ended before."""
    run.launcher.start({} if planned.steps is None else dict.fromkeys(planned.victims, planned.steps))
    victims: list[int | str] = []
    running: dict[int | str, int] = {}
    phase = planned.phase
    if planned.steps is None:
        wait_for_moment(run, planned, durations)
        running = run.launcher.running()
        for name in set(running) & set(planned.victims):
            with contextlib.suppress(ProcessLookupError):
                os.kill(running[name], signal.SIGKILL)
                victims.append(name)
        phase = run.phase()
    saved, killed = run.saved(), time.monotonic()
    codes = run.launcher.settle(victims, running)
    seconds = time.monotonic() - killed
    if type(run.launcher) is Plain:
        assert set(codes) <= EXIT_CODES, f"exit codes {codes} after {planned}; see {run.directory}"
        victims = [rank for rank, code in enumerate(codes) if code == -signal.SIGKILL]
    check_end(run, planned, codes, saved)
    ended_well = codes and not any(codes)
    return Kill(victims, phase, seconds) if victims and not ended_well else None


def check_end(run: Run, planned: object, codes: Sequence[int], saved: Sequence[int]) -> None:
    """Asserts that no summary and no checkpoint is missing after a start; `saved` are those of before its end."""
    assert 0 not in codes or run.has_summary(), f"exit codes {codes} without a summary after {planned}"
    assert max(run.saved(), default=0) >= max(saved, default=0), f"{planned}: a checkpoint of {saved} is lost"


def train_with_stops(
    run: Run, plan: Sequence[Planned], start_and_stop: Callable[[Run, Planned], Done | None]
) -> list[Done]:
    """Runs one training run to its end, with one planned stop of each start; returns the executed stops."""
    done: list[Done] = []
    for planned in plan:
        if run.has_finished():
            break
        executed = start_and_stop(run, planned)
        if executed is None:
            break  # the run has ended
        done.append(executed)
    if not run.has_finished():
        run.launcher.start({})
        codes = run.launcher.wait()
        assert not any(codes), f"exit codes {codes} at the end; see {run.directory}:\n" + run.launcher.text()[-3000:]
    directories = [path.name for path in run.directory.parent.iterdir()]
    assert directories == [run.directory.name], "every start continues the first run"
    return done


def measure(run: Run) -> dict[str, float]:
    """Trains once undisturbed; returns the durations of its phases in seconds."""
    run.launcher.start({})
    moments: dict[str, float] = {}
    while not run.launcher.has_ended():
        if moments or set(range(RANKS)) & set(run.launcher.running()):
            moments.setdefault(run.phase(), time.monotonic())
        time.sleep(0.01)
    codes = run.launcher.wait()
    assert not any(codes), f"exit codes {codes}; see {run.directory}:\n" + run.launcher.text()[-3000:]
    trained = min(moments.get(BETWEEN, moments[END]), moments.get(SAVE, moments[END]))
    training = moments[END] - trained
    ended = time.monotonic() - moments[END]
    return {START: trained - moments[START], BETWEEN: training, SAVE: training, END: ended}


# --- comparison ------------------------------------------------------------------------------------------------------


def assert_same_run(expected: Path, found: Path, steps: int) -> None:
    """Asserts that both ended with the same bits, records, best checkpoint, summary and files, and nothing partial."""
    from trainings import assert_same_training

    assert_same_training(expected, found, steps)
    summaries = [json.loads((run / "summary.json").read_text()) for run in (expected, found)]
    for summary in summaries:
        for clock in CLOCKS:
            summary.pop(clock)
    assert summaries[0] == summaries[1]
    differences = set(files(expected)) ^ set(files(found))
    assert not differences, differences


def files(run: Path) -> list[str]:
    """The files of a run, without those of TensorBoard, which has one per start, and without the lock.

    Of the checkpoints, those of the last and the best step: a stop signal saves other ones.
    """
    from trainings import best

    kept = {max(run.glob("checkpoints/step_*")).name, best(run)}
    paths = [path.relative_to(run) for path in run.rglob("*") if "events.out" not in path.name and path.name != ".lock"]
    return sorted(str(path) for path in paths if not any(re.fullmatch(r"step_\d+", x) for x in {*path.parts} - kept))


def write_data(folder: Path) -> list[str]:
    """Writes small volumes; returns their flags."""
    from volume_files import write_volume

    train, valid = (write_volume(folder / f"{name}.h5", seed=k) for k, name in enumerate(("train", "valid"), 1))
    return [f"--set=train_path={train}", f"--set=val_path={valid}", "--set=device=cpu"]


class KillTest:
    """Training runs in one folder, each compared with an undisturbed one of plain processes."""

    def __init__(self, folder: Path, epochs: int, pictures: bool, launcher: LauncherFactory = Plain) -> None:
        self._folder, self._steps, self._launcher = folder, STEPS_PER_EPOCH * epochs, launcher
        report = f"--set=report_pictures={str(pictures).lower()}"
        self._flags = [*FLAGS, *write_data(folder), f"--num_epochs={epochs}", report]
        self._undisturbed = self._new("undisturbed", Plain)
        train_with_stops(self._undisturbed, [], partial(kill, {}))
        self._durations: dict[str, float] = {}

    def _new(self, name: str, launcher: LauncherFactory) -> Run:
        flags = [*self._flags, f"--set=expdir={self._folder / name}"]
        starts = launcher(flags, self._folder / f"{name}.log")
        return Run(self._folder / name / "test" / f"{RANKS}ranks" / "00", starts, self._steps)

    def measure(self) -> None:
        """Measures the phases' durations under the launcher, by which kills are timed."""
        run = self._new("measured", self._launcher)
        self._durations = measure(run)
        assert_same_run(self._undisturbed.directory, run.directory, self._steps)

    def run(self, name: str, plan: Sequence[PlannedKill]) -> list[Kill]:
        """Returns the executed kills; AssertionError unless the result equals the undisturbed one."""
        run = self._new(name, self._launcher)
        kills = train_with_stops(run, plan, partial(kill, self._durations))
        assert_same_run(self._undisturbed.directory, run.directory, self._steps)
        return kills


def draw_plan(draw: random.Random, count: int, launcher: str) -> list[PlannedKill]:
    """Kills of one training run; those of the end phase, and some of the start, come after the last checkpoint."""
    plan = []
    for phase in draw.choices(list(WEIGHTS), list(WEIGHTS.values()), k=count):
        victims: list[int | str] = list(range(RANKS)) if draw.random() < 0.4 else [draw.randrange(RANKS)]
        if launcher == "torchrun" and draw.random() < 0.25:
            victims = [AGENT]
        # A resumed training run is shorter: later moments would often find it finished.
        latest = {START: 0.8, END: 0.9}.get(phase, 0.6)
        last = phase == END or (phase == START and draw.random() < 0.3)
        plan.append((last, PlannedKill(victims, phase, draw.uniform(0.0, latest))))
    draw.shuffle(plan)
    return [planned for _, planned in sorted(plan, key=lambda pair: pair[0])]


def soak(kills: int, seed: int, folder: Path, launcher: str = "plain", log: bool = False) -> list[Kill]:
    """Carries out that many kills at random moments, over several runs."""
    draw, done, started = random.Random(seed), list[Kill](), 0
    with open_launcher(launcher) as factory:
        test = KillTest(folder, EPOCHS, True, factory)
        test.measure()
        while len(done) < kills:
            started += 1
            more = test.run(f"soak{started}", draw_plan(draw, min(kills - len(done), 10), launcher))
            done += more
            if log:
                slowest = max((kill.seconds for kill in done), default=0.0)
                counts = f"{len(more)} kills, same bits; {len(done)} kills so far"
                print(f"{launcher}, run {started}: {counts}, survivors ended within {slowest:.1f} s", flush=True)
    return done


def table(launcher: str, kills: Sequence[Kill]) -> str:
    """Counts of the kills by phase and victims."""
    counts = Counter((kill.phase, "agent" if AGENT in kill.victims else len(kill.victims)) for kill in kills)
    names = {1: "one rank", 2: "all ranks", "agent": "torchrun's agent"}
    lines = [f"{launcher}: {len(kills)} kills"]
    for phase in WEIGHTS:
        parts = [f"{names[who]} {counts[phase, who]}" for who in names if counts[phase, who]]
        lines.append(f"  {phase:<15}{', '.join(parts) or 'none'}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kills", type=int, nargs="?", default=100)
    parser.add_argument("--seed", type=int, default=None, help="of moments and victims; drawn if absent")
    parser.add_argument("--launchers", default="plain", metavar="NAME,NAME,…", help="plain, torchrun, srun")
    options = parser.parse_args()
    launchers = options.launchers.split(",")
    unknown = set(launchers) - {"plain", "torchrun", "srun"}
    if unknown:
        parser.error(f"unknown launcher {', '.join(unknown)}; use plain, torchrun or srun")
    seed = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it warns about each restart
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # stops the cluster of srun
    for index, launcher in enumerate(launchers):
        print(f"{launcher}: seed {seed}", flush=True)
        folder = tempfile.mkdtemp(prefix="soak-")
        share = options.kills * (index + 1) // len(launchers) - options.kills * index // len(launchers)
        try:
            kills = soak(share, seed, Path(folder), launcher, log=True)
        except Unavailable as reason:
            print(f"{launcher}: skipped, {reason}", flush=True)
            continue
        shutil.rmtree(folder)  # kept after an error
        print(table(launcher, kills) + "\n  every training run ended with the bits of an undisturbed one", flush=True)


if __name__ == "__main__":
    main()
