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
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

TOP = Path(__file__).parent.parent
sys.path[:0] = [str(TOP), str(TOP / "tests"), str(TOP / "tests" / "slurm")]

from slurm_cluster import Unavailable  # noqa: E402 # found by the path above
from soak_launchers import AGENT, RANKS, LauncherFactory, Plain, open_launcher  # noqa: E402
from trainings import assert_same_training, best, directory  # noqa: E402
from volume_files import write_volume  # noqa: E402

from utils.training.checkpoint import FOLDER, saved_steps  # noqa: E402

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
# The exit code of a rank that gets a signal. Other ranks: done, failed because of a peer, bad input (a survivor that
# waited for its peer in the rendezvous), and 76: the peer is gone.
CODES = {signal.SIGKILL: 137, signal.SIGINT: 130, signal.SIGTERM: 75, signal.SIGUSR1: 75}
OTHER_CODES = {0, 1, 2, 76}
CLOCKS = ("seconds", "samples_per_second")  # measured times in summary.json


class PlannedStop(NamedTuple):
    """Signals to ranks some time after a phase or a number of log lines is reached, or SIGKILL before a step."""

    victims: Sequence[int]
    phase: str = ""
    seconds: float = 0.0
    lines: int = 0
    step: int | None = None
    signals: Sequence[tuple[signal.Signals, float]] = ((signal.SIGKILL, 0.0),)  # and the seconds before each


class Stop(NamedTuple):
    """An executed stop, and the seconds from it to the end of the last survivor."""

    victims: set[int]
    phase: str
    codes: list[int]  # of the ranks or the launcher
    seconds: float


def write_data(folder: Path) -> list[str]:
    """Writes small volumes; returns their flags."""
    train, valid = (write_volume(folder / f"{name}.h5", seed=k) for k, name in enumerate(("train", "valid"), 1))
    return [f"--set=train_path={train}", f"--set=val_path={valid}", "--set=device=cpu"]


class Run:
    """One training run in a folder of its own."""

    def __init__(self, folder: Path, flags: list[str], ranks: int, launcher: LauncherFactory) -> None:
        self.directory = directory(folder, ranks)
        self.launcher = launcher([*flags, f"--set=expdir={folder}"], folder.with_suffix(".log"), ranks)

    def saved(self) -> list[int]:
        return saved_steps(self.directory / FOLDER)

    def is_saving(self) -> bool:
        return any((self.directory / FOLDER).glob(".*.partial"))

    def has_summary(self) -> bool:
        return (self.directory / "summary.json").exists()

    def phase(self, last_step: int | None = None) -> str:
        """The phase that this start has reached."""
        text = self.launcher.text()
        if TRAINS not in text and WRITES_SUMMARY not in text:
            return START
        if last_step in self.saved():
            return END
        return SAVE if self.is_saving() else BETWEEN

    def files(self) -> set[str]:
        """The files of the run, without those of TensorBoard, which has one per start, and without the lock.

        Of the checkpoints, those of the last and the best step: a stop signal saves other ones.
        """
        kept = {f"step_{self.saved()[0]:08d}", best(self.directory)}
        paths = [path.relative_to(self.directory) for path in self.directory.rglob("*")]
        others = [path for path in paths if any(re.fullmatch(r"step_\d+", part) for part in {*path.parts} - kept)]
        return {str(path) for path in paths if "events.out" not in path.name and path not in others} - {".lock"}


class StopTest:
    """An undisturbed training run, and stopped ones, which must end with its bits."""

    def __init__(self, folder: Path, flags: list[str], ranks: int = RANKS, launcher: LauncherFactory = Plain) -> None:
        self._settings = ([*flags, *write_data(folder)], ranks, launcher)
        self._folder, self._whole = folder, Run(folder / "undisturbed", *self._settings)
        self.durations = self._train_undisturbed()  # of the phases, in seconds
        self._last_step = self._whole.saved()[0]
        self.lines = self._whole.launcher.text().count("\n")

    def _train_undisturbed(self) -> dict[str, float]:
        run, steps, moments = self._whole, list[int](), dict[str, float]()
        run.launcher.start()
        while not run.launcher.has_ended():
            if 0 in run.launcher.running():
                moments.setdefault(START, time.monotonic())
            if run.phase() != START:
                moments.setdefault(BETWEEN, time.monotonic())
            if run.saved() != steps:
                steps, moments[END] = run.saved(), time.monotonic()
            time.sleep(0.01)
        ended = time.monotonic()
        assert not any(run.launcher.wait()), run.launcher.text()[-3000:]
        durations = {START: moments[BETWEEN] - moments[START], END: ended - moments[END]}
        return {**durations, **dict.fromkeys((BETWEEN, SAVE), moments[END] - moments[BETWEEN])}

    def run(self, name: str, plan: Sequence[PlannedStop]) -> list[Stop]:
        """Trains with one planned stop of each start; returns the executed ones.

        AssertionError unless it ends with the same bits, records, best checkpoint, summary and files as the
        undisturbed run, and nothing partial.
        """
        run, done = Run(self._folder / name, *self._settings), list[Stop]()
        for planned in (*plan, None):
            if run.has_summary() and run.launcher.has_ended():
                break  # the next start would be another run
            stop = self._start_and_stop(run, planned or PlannedStop([]))
            if stop is not None:
                done.append(stop)
        assert list(run.directory.parent.iterdir()) == [run.directory], "every start continues the first run"
        assert_same_training(self._whole.directory, run.directory, self._last_step)
        texts = [(one.directory / "summary.json").read_text() for one in (self._whole, run)]
        expected, summary = ({**json.loads(text), **dict.fromkeys(CLOCKS)} for text in texts)
        assert summary == expected
        assert run.files() == self._whole.files()
        return done

    def _start_and_stop(self, run: Run, planned: PlannedStop) -> Stop | None:
        """Starts the run, stops it and waits for the consequences; None if the run ended by itself."""
        launcher, victims, running = run.launcher, set[int](), None
        launcher.start([] if planned.step is None else [(rank, planned.step) for rank in planned.victims])
        if planned.victims and planned.step is None:
            self._wait_for_moment(run, planned)
            for number, seconds in planned.signals:
                time.sleep(seconds)
                running = launcher.running()
                for name in set(running) & set(planned.victims):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(running[name], number)
                        victims.add(name)
        phase, saved, stopped = run.phase(self._last_step), run.saved(), time.monotonic()
        codes = launcher.wait(victims, running)
        seconds = time.monotonic() - stopped
        if planned.step is not None:
            victims = {rank for rank, code in enumerate(codes) if code == CODES[signal.SIGKILL]}
        if type(launcher) is Plain or not planned.victims:
            numbers = {number for number, _ in planned.signals}
            allowed = OTHER_CODES | {CODES[number] for number in numbers} if planned.victims else {0}
            if run.has_summary():
                allowed |= {128 + number for number in numbers}  # a run that is done catches no signals
            ended = f"exit codes {codes} after {planned}; see {run.directory}:\n{launcher.text()[-3000:]}"
            assert set(codes) <= allowed, ended
        assert 0 not in codes or run.has_summary(), f"exit codes {codes} without a summary after {planned}"
        assert max(run.saved(), default=0) >= max(saved, default=0), f"{planned}: a checkpoint of {saved} is lost"
        return Stop(victims, phase, codes, seconds) if victims and (not codes or any(codes)) else None

    def _wait_for_moment(self, run: Run, planned: PlannedStop) -> None:
        """Returns at the planned moment, or when the run has ended."""
        launcher = run.launcher

        def is_reached() -> bool:
            if planned.lines:
                return launcher.text().count("\n") >= planned.lines
            if planned.phase == START:
                return bool(set(planned.victims) & set(launcher.running()))
            phase = run.phase(self._last_step)
            return phase == END or (planned.phase != END and phase != START)

        while not is_reached() and not launcher.has_ended():
            time.sleep(0.002)
        time.sleep(planned.seconds)
        while planned.phase == SAVE and not run.is_saving() and not launcher.has_ended():
            time.sleep(0.001)


def draw_plan(draw: random.Random, count: int, launcher: str, durations: dict[str, float]) -> list[PlannedStop]:
    """Kills of one training run; those of the end phase, and some of the start, come after the last checkpoint."""
    plan = []
    for phase in draw.choices(list(WEIGHTS), list(WEIGHTS.values()), k=count):
        victims = list(range(RANKS)) if draw.random() < 0.4 else [draw.randrange(RANKS)]
        if launcher == "torchrun" and draw.random() < 0.25:
            victims = [AGENT]
        # A resumed training run is shorter: later moments would often find it finished.
        latest = {START: 0.8, END: 0.9}.get(phase, 0.6)
        last = phase == END or (phase == START and draw.random() < 0.3)
        plan.append((last, PlannedStop(victims, phase, draw.uniform(0.0, latest) * durations[phase])))
    draw.shuffle(plan)
    return [planned for _, planned in sorted(plan, key=lambda pair: pair[0])]


def soak(kills: int, seed: int, folder: Path, launcher: str = "plain") -> list[Stop]:
    """Carries out that many kills at random moments, over several runs of six epochs with pictures in their report."""
    draw, done = random.Random(seed), list[Stop]()
    with open_launcher(launcher) as factory:
        test = StopTest(folder, [*FLAGS, "--num_epochs=6", "--set=report_pictures=true"], RANKS, factory)
        while len(done) < kills:
            plan = draw_plan(draw, min(kills - len(done), 10), launcher, test.durations)
            done += test.run(f"soak{len(done)}", plan)
            slowest = max((kill.seconds for kill in done), default=0.0)
            print(f"{launcher}: {len(done)} kills, same bits, survivors ended within {slowest:.1f} s", flush=True)
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kills", type=int, nargs="?", default=100)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32), help="drawn if absent")
    parser.add_argument("--launchers", default="plain", metavar="NAME,NAME,…", help="plain, torchrun, srun")
    options = parser.parse_args()
    launchers = options.launchers.split(",")
    if not set(launchers) <= {"plain", "torchrun", "srun"}:
        parser.error(f"unknown launcher in {options.launchers}; use plain, torchrun or srun")
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it warns about each restart
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # stops the cluster of srun
    for index, launcher in enumerate(launchers):
        print(f"{launcher}: seed {options.seed}", flush=True)
        folder = tempfile.mkdtemp(prefix="soak-")
        share = options.kills * (index + 1) // len(launchers) - options.kills * index // len(launchers)
        try:
            kills = soak(share, options.seed, Path(folder), launcher)
        except Unavailable as reason:
            print(f"{launcher}: skipped, {reason}", flush=True)
            continue
        shutil.rmtree(folder)  # kept after an error
        phases = Counter(kill.phase for kill in kills)
        counts = ", ".join(f"{phase} {phases[phase]}" for phase in WEIGHTS)
        print(f"{launcher}: every run ended with the bits of an undisturbed one; {counts}", flush=True)


if __name__ == "__main__":
    main()
