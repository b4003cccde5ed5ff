"""The records of a run: each point once across restarts; a full disk ends no run."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from disks import fill, small_disk
from trainings import NoWaiting
from utils.training.choice import Choice

from utils import config as configs
from utils.distributed.launch import Launch
from utils.distributed.world import World
from utils.errors import one_line_errors
from utils.training import directory
from utils.training.loggers.base import LoggedRun, Logger, Resumed, RunLogger
from utils.training.loggers.tensorboard import TensorBoardLogger

TOP = Path(__file__).parent.parent.parent
ALONE = World(Launch("test"), torch.device("cpu"))


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> NoWaiting:
    """Restarted runs do not wait for the next second."""
    clock = NoWaiting()
    clock.install(monkeypatch.setattr)
    return clock


@pytest.fixture
def config() -> configs.Config:
    return configs.load(str(TOP / "config/UNet.yaml"), "test")


def test_a_benchmark_writes_nothing_to_a_run_directory(
    tmp_path: Path, config: configs.Config, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    settings = config.model_copy(update={"enable_benchy": True})
    with directory.open_run(settings, "test", Choice(tmp_path), ALONE) as benchmark:
        benchmark.info("BENCHY::SUMMARY::IO average trial throughput: 1.000 +/- 0.000")
        benchmark.warning("Cannot find a GPU")
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    assert list(tmp_path.iterdir()) == []


def test_saved_config_keeps_the_global_batch_for_another_number_of_ranks(tmp_path: Path, config) -> None:
    directory.open_run(config.for_world(4), "test", Choice(tmp_path), ALONE).close()
    path = str(tmp_path / "config.yaml")
    again = configs.load(path, configs.default_name(path)).for_world(2)
    assert (again.global_batch_size, again.local_batch_size) == (8, 4)


def test_ctrl_c_is_one_line_and_exit_code_130(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, one_line_errors():
        raise KeyboardInterrupt
    assert (ended.value.code, capsys.readouterr().err) == (130, "interrupted\n")


# --- records across restarts -----------------------------------------------------------------------------------------


def record(logger: Logger, steps: Any) -> None:
    for step in steps:
        logger.scalars({"Loss/train": float(step)}, step)


def recorded(run: Path) -> list[int]:
    """The steps in metrics.jsonl, all of whose lines are complete, valid JSON."""
    text = (run / "metrics.jsonl").read_text()
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=pytest.fail)["step"] for line in text.splitlines()]


def shown(run: Path) -> list[int]:
    """The steps of TensorBoard's curve."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "logs"), size_guidance={"scalars": 0}).Reload()
    assert all(event.value == event.step for event in events.Scalars("Loss/train"))
    return [event.step for event in events.Scalars("Loss/train")]


def assert_records(run: Path, steps: Any) -> None:
    assert recorded(run) == list(steps)
    assert shown(run) == list(steps)


def start(path: Path, resumed: int | None = None) -> RunLogger:
    run = LoggedRun(path) if resumed is None else LoggedRun(path, Resumed(resumed))
    return RunLogger(run, [TensorBoardLogger(run)])


def test_a_new_training_replaces_the_records_and_a_resumed_one_continues_them(tmp_path: Path) -> None:
    for resumed, steps, kept in (
        (None, range(0, 10), range(0, 10)),
        (6, range(7, 12), range(0, 12)),  # 7 to 9 were made by a process that was killed before it saved
        (6, range(7, 9), range(0, 9)),
        (8, range(9, 9), range(0, 9)),  # complete: nothing more is recorded
        (8, range(9, 11), range(0, 11)),
        (0, range(1, 4), range(0, 4)),
        (None, range(0, 2), range(0, 2)),
    ):
        run = start(tmp_path, resumed)
        record(run, steps)
        run.close()
        assert_records(tmp_path, kept)


@pytest.mark.parametrize("rest", ['{"step": 4, "sec', '{"step": 4', "null\n", "\udcff\n"])
def test_a_half_written_line_is_removed(tmp_path: Path, rest: str) -> None:
    """Also a line that lacks only its line end, to which the next record would be appended."""
    run = start(tmp_path)
    record(run, range(4))
    run.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(rest.encode(errors="surrogateescape"))
    again = start(tmp_path, 3)
    record(again, range(4, 6))
    again.close()
    assert recorded(tmp_path) == list(range(6))
    assert (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)[:4] == lines, "kept lines are unchanged"
    assert not list(tmp_path.glob(".*.partial"))


def test_non_finite_values_are_not_recorded(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = start(tmp_path)
    run.scalars({"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.5, "e": 2}, 3)
    run.scalars({"a": math.nan}, 4)
    run.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    lines = [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]
    assert [{key: value for key, value in line.items() if key != "seconds"} for line in lines] == [
        {"step": 3, "d": 1.5, "e": 2},
        {"step": 4},
    ]
    events = EventAccumulator(str(tmp_path / "logs")).Reload()
    assert sorted(events.Tags()["scalars"]) == ["d", "e"]


def test_a_clock_far_behind_is_not_waited_for(tmp_path: Path, no_waiting: NoWaiting) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / f"events.out.tfevents.{int(time.time()) + 1000}.other.1.0").write_bytes(b"")
    (tmp_path / "logs" / "events.out.tfevents.notes").write_bytes(b"")
    run = start(tmp_path, 0)
    record(run, [1])
    run.close()
    assert no_waiting.ahead <= 2


def test_flushed_points_survive_a_kill(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.flush()
    assert sorted(os.listdir(tmp_path)) == ["out.log"], "a flush creates no files"
    record(run, range(5))
    run.flush()
    assert_records(tmp_path, range(5))
    run.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of TensorBoard's thread
def test_scalars_survive_a_full_disk_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """metrics.jsonl continues as soon as there is room, TensorBoard's curves with the next start."""
    logging.getLogger().setLevel(logging.INFO)
    with small_disk(tmp_path / "run", "200k") as disk:
        run = start(disk)
        record(run, range(5))
        run.flush()
        filler = fill(disk)
        for step in range(5, 400):
            record(run, [step])
            run.info("a line of the log")
            if step % 50 == 0:
                run.flush()
        os.remove(filler)
        record(run, range(400, 425))
        run.info("after it")
        run.close()
        assert "after it" in (disk / "out.log").read_text()
        again = start(disk, 424)
        record(again, range(425, 430))
        again.close()
        warnings = [line.getMessage() for line in caplog.records if line.levelno == logging.WARNING]
        assert warnings == [f"Cannot record scalars in {disk}: No space left on device; training continues"]
        assert "Traceback" not in capfd.readouterr().err
        for found, after in ((recorded(disk), range(401, 430)), (shown(disk), range(425, 430))):
            assert found == sorted(set(found))
            assert found[:5] == list(range(5))
            assert found[-len(after) :] == list(after)
        # A run whose disk is still full when it ends, and one that starts there:
        last = start(disk, 429)
        record(last, range(430, 435))
        last.flush()
        fill(disk)
        for step in range(435, 530):
            record(last, [step])
            last.info("a line of the log")
        last.close()
        assert len([line for line in caplog.records if line.levelno == logging.WARNING]) == 2
        assert "Traceback" not in capfd.readouterr().err
        assert set(range(425, 435)) <= set(shown(disk))
        start(disk, 434).close()


def test_a_pipe_in_place_of_the_log_is_refused(tmp_path: Path) -> None:
    """Opening it waited for a reader, forever."""
    os.mkfifo(tmp_path / "out.log")
    with pytest.raises(OSError, match="it is not a regular file"):
        start(tmp_path)
