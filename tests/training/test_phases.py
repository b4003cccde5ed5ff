"""The phases of a training run: each reports progress often enough, and is named if it stops to do so."""

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import h5py
import pytest
import torch
from matplotlib.figure import Figure
from sample_results import SIMULATION

import train
from analysis import slabs
from analysis.evaluation import callback, figures
from analysis.lyman_alpha import forest
from utils.config.sections import TimeoutsConfig
from utils.data.loaders.threaded import ThreadedCropLoader
from utils.distributed.diagnosis import Diagnoser
from utils.distributed.heartbeat import Heartbeat
from utils.distributed.pulse import Phase
from utils.progress import Progress
from utils.run.writer import BackgroundWriter
from utils.steps.eager import EagerStep

LIMIT = 8  # pieces of work without progress from which on a run hangs
# One call is one piece of work. In each of the phases LONG there are more of them than the limit.
WORK = [(EagerStep, name) for name in ("__call__", "evaluate", "predict", "warm_up")]
WORK += [(torch.fft, name) for name in ("ifft", "rfft2", "irfft2", "rfft", "irfftn")]
WORK += [(callback, "read_cells"), (forest, "optical_depth"), (figures, "encode_png"), (BackgroundWriter, "save")]
LONG = {"data", "step", "validation", "prediction", "evaluation", "pictures", "end"}


class Clock:
    """A second passes with each piece of work. Diagnoses each of them, and what it would be if it did not end."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self.heartbeat, self.now = heartbeat, 0
        self.diagnoser = Diagnoser(0, 1, TimeoutsConfig(hang=LIMIT, silence=0))
        self.work, self.alarms, self.hanging = Counter[str](), list[str](), dict[str, str]()

    def tick(self) -> None:
        self.now += 1
        report = self.heartbeat.pulse.report
        report = report._replace(calls=report.calls + Progress.advances)
        self.diagnoser.add(self.now, {0: report}, False)
        if cause := self.diagnoser.cause(self.now):
            self.alarms.append(cause.line)
        self.work[report.phase] += 1
        self.hanging[report.phase] = str(self.diagnoser.cause(self.now + LIMIT))


def test_no_phase_hangs_while_it_works_and_one_that_stops_is_named(
    data_flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fixed: a run whose baselines took longer than `timeouts.hang` could never be completed."""
    clocks: list[Clock] = []
    monkeypatch.setattr(Heartbeat, "start", lambda self: clocks.append(Clock(self)))
    monkeypatch.setattr(Heartbeat, "leave", lambda self: None)

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments, **options: (clocks[0].tick(), function(*arguments, **options))[1]

    monkeypatch.setattr(figures, "encode_png", lambda figure: b"PNG")
    for owner, name in WORK:
        monkeypatch.setattr(owner, name, timed(getattr(owner, name)))
    monkeypatch.setattr(figures, "PICTURES", dict.fromkeys(figures.PICTURES, lambda results: Figure()))
    monkeypatch.setattr(slabs, "slab_planes", lambda shape: [slice(x, x + 1) for x in range(shape[0])])
    epoch = ThreadedCropLoader.epoch

    def batches(self: ThreadedCropLoader, *arguments: int) -> Iterator[Any]:
        for batch in epoch(self, *arguments):
            clocks[0].tick()
            yield batch

    monkeypatch.setattr(ThreadedCropLoader, "epoch", batches)
    valid = shutil.copy(data_flags[1].removeprefix("--set=val_path="), tmp_path / "valid.h5")
    with h5py.File(valid, "r+") as file:
        file.attrs.update(SIMULATION | {"box_size_mpc_h": 3.2})
    keys = {"expdir": tmp_path, "val_path": valid, "evaluation.every_epochs": 1, "report_pictures": "true"}
    keys |= {
        "loggers": "[]",
        "num_epochs": 1,
        "Nsamples": 8 * (LIMIT + 1),
        "Nsamples_val": 8 * (LIMIT + 1),
        "evaluation.sightlines": 16,
    }
    flags = [f"--set={key}={value}" for key, value in keys.items()]
    train.main(["--config=test", *data_flags, "--data_loader_config=lowmem", *flags])
    (clock,) = clocks
    assert not clock.alarms
    for phase in get_args(Phase):
        assert f"({phase}) for" in clock.hanging[phase]
        assert phase not in LONG or clock.work[phase] > LIMIT, phase
