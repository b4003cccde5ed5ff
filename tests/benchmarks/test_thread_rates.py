"""benchmarks/threads.py with a stand-in for the training runs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import IO, Any

import pytest

from benchmarks import processes, threads
from utils import cli
from utils import config as configs


def test_each_case_is_measured_with_each_number_of_threads_and_each_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[tuple[int, int, str, str, int]] = []
    running: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def popen(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        running.append(start(*arguments, **options))
        return running[-1]

    def train(words: list[str], env: dict[str, str], log: IO[bytes], limit: None, directory: Path) -> int:
        options = cli.parse(words[words.index("train.py") + 1 :])
        config = configs.load(str(directory / "config/UNet.yaml"), options.config, options.overrides)
        assert (config.device, config.Nsamples, config.log_interval, config.seed) == ("cpu", 16, 1, 3)
        ranks = 2 if "--nproc-per-node=2" in words else 1
        busy = sum(process.poll() is None for process in running)
        assert env["OMP_NUM_THREADS"] == env["MKL_NUM_THREADS"]
        calls.append((config.network.width, ranks, env["OMP_NUM_THREADS"], env["GOMP_SPINCOUNT"], busy))
        records = [{"step": 1, threads.RATE: 9.0}, {"step": 2, threads.RATE: float(len(calls))}, {"step": 2}]
        path = Path(config.expdir, "run", "metrics.jsonl")
        path.parent.mkdir()
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return 0

    monkeypatch.setattr(threads, "cores", lambda: 4)
    monkeypatch.setattr(processes, "run_group", train)
    monkeypatch.setattr(threads.subprocess, "Popen", popen)
    flags = ["--trials=2", "--steps=1", "--widths", "2", "--set=seed=3", f"--output={tmp_path}"]
    monkeypatch.setattr("sys.argv", ["threads", *flags])
    threads.main()
    settings = [("1", "1000"), ("4", "1000"), ("4", "300000")]
    once = [(2, ranks, *setting, busy) for ranks in (1, 2) for busy in (0, 1) for setting in settings]
    assert calls == once * 2
    assert all(process.poll() is not None for process in running), "ended"
    result = json.loads((tmp_path / "threads.json").read_text())
    assert [(case["width"], case["ranks"], case["busy"]) for case in result["cases"]] == [
        (2, 1, False),
        (2, 1, True),
        (2, 2, False),
        (2, 2, True),
    ]
    assert result["cases"][1]["samples/s"]["4 threads, long"]["trials"] == [6.0, 18.0]
    assert "| 2 | 1 | yes | 10 (4 – 16) |" in capsys.readouterr().out

    monkeypatch.setattr(processes, "run_group", lambda words, env, log, *_: log.write(b"error: no data\n") and 2)
    with pytest.raises(SystemExit) as stop:
        threads.main()
    assert stop.value.code == 2
    assert capsys.readouterr().err.endswith("error: width 2, 1 ranks, 1 thread: no data\n")
