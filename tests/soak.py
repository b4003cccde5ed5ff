"""Kills runs at random moments, resumes them to the end, and compares the bits with an undisturbed training run.

python tests/soak.py 100                                      100 kills; make soak N=100 does the same
python tests/soak.py 200 --launchers plain,torchrun,srun      an equal share of the kills under each launcher
python tests/soak.py 0 --runs 20                              20 training runs with random configs and random stops
python tests/soak.py 0 --runs 1 --seed 7                      repeats the run whose line begins with "seed 7"

Kills are planned in four phases: in the start, between two saves, during a save, and in the end phase, which begins
when the last checkpoint is written and ends with summary.json. Victims are one rank, all ranks, or torchrun's agent.
"""

import argparse
import contextlib
import json
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

TOP = Path(__file__).parent.parent
sys.path[:0] = [str(TOP), str(TOP / "tests"), str(TOP / "tests" / "slurm")]

from slurm_cluster import Unavailable  # noqa: E402 # found by the path above
from soak_launchers import AGENT, BETWEEN, END, RANKS, SAVE, START, Plain, RunFactory, open_launcher  # noqa: E402
from trainings import YAML, assert_same_training  # noqa: E402
from volume_files import write_volume  # noqa: E402

from networks import LOSSES  # noqa: E402
from utils import config as configs  # noqa: E402
from utils.errors import UserError  # noqa: E402
from utils.optim.optimizers import OPTIMIZERS  # noqa: E402

# A save every third step in addition to each epoch's end: many kills hit a save. With this learning rate the
# validation loss is lowest after the first epoch, then after the fourth one, and never after the last one.
FLAGS = ["--set=checkpoint.every_steps=3", "--set=lr_schedule.start_lr=0.01", "--set=lr_schedule.shape=constant"]
# The survivor of a kill before the rendezvous waits so long.
FIXED = ["--config=test", "--set=report_baselines=false", "--set=timeouts.rendezvous=20", "--set=device=cpu"]
WEIGHTS = {START: 30, BETWEEN: 20, SAVE: 20, END: 30}
# The exit code of a rank that gets a signal. Other ranks: done, failed because of a peer, bad input (a survivor that
# waited for its peer in the rendezvous), and 76: the peer is gone.
CODES = {signal.SIGKILL: 137, signal.SIGINT: 130, signal.SIGTERM: 75, signal.SIGUSR1: 75}
OTHER_CODES = {0, 1, 2, 76}
CLOCKS = ("seconds", "samples_per_second", "goodput")  # measured times in summary.json
# Each run draws one value of each key; a value that stands there twice is twice as likely.
KEYS: dict[str, list[Any]] = {
    "optimizer.name": list(OPTIMIZERS),
    "loss": [name for name, kind in LOSSES.items() if kind.targets == "volumes"],
    "network.norm": ["none", "batch", "group", "ghost(1)"],
    "accumulation_steps": [1, 1, 2, 4],
    "ddp": ["torch", "torch", "manual"],
    "bucket_cap_mb": [25.0, 0.001],
    "ema_decay": [None, 0.5, 0.9],
    "clip_grad_norm": [None, 0.01],
    "precision": ["bfloat16", "float16"],
    "lr_schedule.shape": ["cosine", "constant", "cooldown"],
    "lr_schedule.start_lr": [0.0002, 0.01],
    "checkpoint.every_steps": [None, 1, 3, 5],
    "checkpoint.keep_last": [1, 2],
    "evaluation.every_epochs": [0, 0, 1],
    "data_loader_config": ["lowmem", "inmem", "resident"],
    "log_interval": [1, 3, 4],
    "num_epochs": [1, 2, 3],
    **{key: [False, True] for key in ("disable_broadcast_buffers", "log_noise_scale", "enable_amp", "channels_last")},
}


class PlannedStop(NamedTuple):
    """Signals to ranks some time after a phase or a number of log lines is reached."""

    victims: Sequence[int]
    phase: str = ""
    seconds: float = 0.0
    lines: int = 0
    signals: Sequence[tuple[signal.Signals, float]] = ((signal.SIGKILL, 0.0),)  # and the seconds before each


class Stop(NamedTuple):
    victims: set[int]
    phase: str
    codes: list[int]  # of the ranks or the launcher


class StopTest:
    """An undisturbed training run, and stopped ones, which must end with its bits."""

    def __init__(self, folder: Path, flags: list[str], ranks: int = RANKS, launcher: RunFactory = Plain) -> None:
        data = [f"--set={name}_path={write_volume(folder / f'{name}.h5', seed=len(name))}" for name in ("train", "val")]
        self._folder, self._start = folder, partial(launcher, [*FIXED, *data, *flags], ranks)
        self._whole = self._start(folder / "undisturbed")
        self.durations = self._train_undisturbed()  # of the phases, in seconds
        self._last_step = self._whole.saved()[0]
        self.lines = self._whole.text().count("\n")

    def _train_undisturbed(self) -> dict[str, float]:
        run, steps, moments = self._whole, list[int](), dict[str, float]()
        run.start()
        while not run.has_ended():
            if 0 in run.running():
                moments.setdefault(START, time.monotonic())
            if run.phase() != START:
                moments.setdefault(BETWEEN, time.monotonic())
            if run.saved() != steps:
                steps, moments[END] = run.saved(), time.monotonic()
            time.sleep(0.01)
        ended = time.monotonic()
        assert not any(run.wait()), run.text()[-3000:]
        durations = {START: moments[BETWEEN] - moments[START], END: ended - moments[END]}
        return {**durations, **dict.fromkeys((BETWEEN, SAVE), moments[END] - moments[BETWEEN])}

    def run(self, name: str, plan: Sequence[PlannedStop]) -> list[Stop]:
        """Trains with a planned stop of each start; asserts that it ends as undisturbed, and returns the stops."""
        run, done = self._start(self._folder / name), list[Stop]()
        for planned in (*plan, None):
            if run.has_summary() and run.has_ended():
                break  # the next start would be another run
            stop = self._start_and_stop(run, planned or PlannedStop([]))
            if stop is not None:
                done.append(stop)
        assert list(run.directory.parent.iterdir()) == [run.directory], "every start continues the first run"
        assert_same_training(self._whole.directory, run.directory, self._last_step)
        expected, summary = (json.loads((ended.directory / "summary.json").read_text()) for ended in (self._whole, run))
        assert {**summary, **dict.fromkeys(CLOCKS)} == {**expected, **dict.fromkeys(CLOCKS)}
        names = [{path.name for path in ended.directory.rglob("*")} for ended in (self._whole, run)]
        # Each start has a file of TensorBoard, and a stop signal saves another step.
        assert not {name for name in names[0] ^ names[1] if not name.startswith(("events", "step_"))}
        return done

    def _start_and_stop(self, run: Plain, planned: PlannedStop) -> Stop | None:
        """Starts the run, stops it and waits for the consequences; None if the run ended by itself."""
        victims, running = set[int](), None
        run.start()
        if planned.victims:
            self._wait_for_moment(run, planned)
            for number, seconds in planned.signals:
                time.sleep(seconds)
                running = run.running()
                for name in set(running) & set(planned.victims):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(running[name], number)
                        victims.add(name)
        phase, saved = run.phase(self._last_step), run.saved()
        codes = run.wait(victims, running)
        if type(run) is Plain or not planned.victims:
            numbers = {number for number, _ in planned.signals}
            allowed = OTHER_CODES | {CODES[number] for number in numbers} if planned.victims else {0}
            if run.has_summary() and planned.victims:
                allowed |= {128 + number for number in numbers}  # a run that is done catches no signals
            ended = f"exit codes {codes} after {planned}; see {run.directory}:\n{run.text()[-3000:]}"
            assert set(codes) <= allowed, ended
        assert 0 not in codes or run.has_summary(), f"exit codes {codes} without a summary after {planned}"
        assert max(run.saved(), default=0) >= max(saved, default=0), f"{planned}: a checkpoint of {saved} is lost"
        return Stop(victims, phase, codes) if victims and (not codes or any(codes)) else None

    def _wait_for_moment(self, run: Plain, planned: PlannedStop) -> None:
        """Returns at the planned moment, or when the run has ended."""

        def is_reached() -> bool:
            if planned.lines:
                return run.text().count("\n") >= planned.lines
            if planned.phase == START:
                return bool(set(planned.victims) & set(run.running()))
            phase = run.phase(self._last_step)
            return phase == END or (planned.phase != END and phase != START)

        while not is_reached() and not run.has_ended():
            time.sleep(0.002)
        time.sleep(planned.seconds)
        while planned.phase == SAVE and not run.is_saving() and not run.has_ended():
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
    draw, done, started = random.Random(seed), list[Stop](), 0
    with open_launcher(launcher) as factory:
        test = StopTest(folder, [*FLAGS, "--num_epochs=6", "--set=report_pictures=true"], RANKS, factory)
        while len(done) < kills:
            started += 1
            plan = draw_plan(draw, min(kills - len(done), 10), launcher, test.durations)
            done += test.run(f"soak{started}", plan)
            phases = dict(Counter(kill.phase for kill in done))
            print(f"{launcher}: {len(done)} kills, every run ended with the same bits; {phases}", flush=True)
    return done


def draw_config(draw: random.Random, ranks: int) -> dict[str, Any]:
    """The values of one valid config that are not the defaults of `test`."""
    default = configs.flatten(configs.load(YAML, "test"))
    while True:
        drawn = {key: draw.choice(values) for key, values in KEYS.items()}
        with contextlib.suppress(UserError):
            configs.load(YAML, "test", drawn).for_world(ranks)
            return {key: value for key, value in drawn.items() if default[key] != value}


def draw_stops(draw: random.Random, ranks: int, lines: int) -> list[PlannedStop]:
    """Stops for the first starts of a run; an uninterrupted start logs that many lines."""
    plan = []
    for _ in range(draw.randint(1, 4)):
        victims = list(range(ranks)) if draw.random() < 0.5 else [draw.randrange(ranks)]
        signals = [(draw.choice(list(CODES)), draw.uniform(0.0, 0.1)) for _ in range(draw.choice([1, 1, 1, 2]))]
        plan.append(PlannedStop(victims, lines=draw.randint(1, lines), signals=signals))
    return plan


def random_run(seed: int, folder: Path) -> list[Stop]:
    """Trains with a random config, with and without stops; returns the stops. AssertionError unless both are equal."""
    draw = random.Random(seed)
    ranks = draw.choice([1, 2])
    drawn = [f"--set={key}={json.dumps(value)}" for key, value in draw_config(draw, ranks).items()]
    print(f"seed {seed}: {ranks} ranks", *drawn, flush=True)
    drawn += ["--set=optimizer.momentum=0.9", "--set=optimizer.precondition_frequency=3"]
    test = StopTest(folder, drawn, ranks)
    plan = draw_stops(draw, ranks, test.lines)
    stops = test.run("stopped", plan)
    for planned, stop in zip(plan, stops, strict=False):
        print(f"  {planned.lines} lines, {planned.signals} to {planned.victims}: exit codes {stop.codes}", flush=True)
    return stops


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kills", type=int, nargs="?", default=100)
    parser.add_argument("--launchers", default="plain", metavar="NAME,NAME,…", help="plain, torchrun, srun")
    parser.add_argument("--runs", type=int, default=0, help="number of runs with random configs")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32), help="drawn if absent")
    options = parser.parse_args()
    launchers = options.launchers.split(",")
    if not set(launchers) <= {"plain", "torchrun", "srun"}:
        parser.error(f"unknown launcher in {options.launchers}; use plain, torchrun or srun")
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it warns about each restart
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # stops the cluster of srun
    kills, count, stops = options.kills, len(launchers), 0
    for index, launcher in enumerate(launchers if kills else ()):
        print(f"{launcher}: seed {options.seed}", flush=True)
        folder = Path(tempfile.mkdtemp(prefix="soak-"))
        try:
            soak(kills * (index + 1) // count - kills * index // count, options.seed, folder, launcher)
        except Unavailable as reason:
            print(f"{launcher}: skipped, {reason}", flush=True)
            continue
        shutil.rmtree(folder)  # kept after an error
    for seed in range(options.seed, options.seed + options.runs):
        folder = Path(tempfile.mkdtemp(prefix=f"soak-{seed}-"))
        stops += len(random_run(seed, folder))
        shutil.rmtree(folder)  # kept after an error
    print(f"{options.runs} runs of random configs, {stops} stops: each ended with the bits of an uninterrupted run")


if __name__ == "__main__":
    main()
