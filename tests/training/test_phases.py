"""The phases of a training run: each reports progress often enough, and is named if it stops to do so."""

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import torch
from sample_results import SIMULATION, empty_picture
from volume_files import write_volume

import train
from analysis import slabs
from analysis.evaluation import callback, drawing
from analysis.lyman_alpha import forest
from utils.config.sections import TimeoutsConfig
from utils.data.loaders.threaded import ThreadedCropLoader
from utils.distributed.diagnosis import Diagnoser
from utils.distributed.heartbeat import Heartbeat
from utils.distributed.pulse import Phase
from utils.progress import Progress
from utils.run.writer import BackgroundWriter
from utils.steps.eager import EagerStep

LIMIT = 8  # seconds without progress; each call of a function in WORK, and each batch of a loader, takes one
WORK = [(EagerStep, name) for name in ("__call__", "evaluate", "predict", "warm_up")]
WORK += [(torch.fft, name) for name in ("ifft", "rfft2", "irfft2", "rfft", "irfftn")]
WORK += [(callback, "read_cells"), (forest, "optical_depth"), (BackgroundWriter, "save")]
SHORT = {"start", "save"}  # no loops, so less than the limit in all


def test_phases_report_while_they_work_and_are_named_if_not(data_flags: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """Fixed: a run whose baselines took longer than `timeouts.hang` could never be completed."""
    clock, diagnoser = itertools.count(1), Diagnoser(0, 1, TimeoutsConfig(hang=LIMIT, silence=0))
    beats, work, alarms, hanging = list[Heartbeat](), Counter[str](), list[object](), dict[str, str]()

    def timed(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        now, report = next(clock), beats[0].pulse.report
        diagnoser.add(now, {0: report._replace(calls=report.calls + Progress.advances)}, False)
        alarms.append(diagnoser.cause(now))
        hanging[report.phase] = str(diagnoser.cause(now + LIMIT))
        work[report.phase] += 1
        return function(*arguments, **options)

    monkeypatch.setattr(Heartbeat, "start", lambda self: beats.append(self))
    monkeypatch.setattr(Heartbeat, "leave", lambda self: None)
    monkeypatch.setattr(
        drawing, "submit", lambda *call: SimpleNamespace(result=lambda: timed(empty_picture, *call).result())
    )
    monkeypatch.setattr(slabs, "slab_planes", lambda shape: [slice(x, x + 1) for x in range(shape[0])])
    for owner, name in WORK:
        call = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *some, call=call, **options: timed(call, *some, **options))
    epoch = ThreadedCropLoader.epoch
    monkeypatch.setattr(
        ThreadedCropLoader, "epoch", lambda *some: (timed(lambda value: value, batch) for batch in epoch(*some))
    )
    valid = write_volume(tmp_path / "valid.h5", **SIMULATION, box_size_mpc_h=3.2)
    keys = {"expdir": tmp_path, "val_path": valid, "evaluation.every_epochs": 1, "evaluation.sightlines": 16}
    keys |= {"report_pictures": "true", "loggers": "[]", "num_epochs": 1}
    keys |= dict.fromkeys(("Nsamples", "Nsamples_val"), 8 * (LIMIT + 1))
    train.main(
        ["--config=test", *data_flags, "--data_loader_config=lowmem", *(f"--set={k}={v}" for k, v in keys.items())]
    )
    assert not any(alarms)
    for phase in get_args(Phase):
        assert f"({phase}) for" in hanging[phase]
        assert phase in SHORT or work[phase] > LIMIT, phase
