"""The scaling study: what it launches or submits, what it computes from the results, and what it refuses."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import common, scaling
from benchmarks.scaling import Point
from utils.errors import UserError

SYNTHETIC = ["--config=test", "--data_loader_config=synthetic", "--set", "device=cpu"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--ranks", "1", "3"], "--strong 8 cannot be divided among 3 ranks"),
        (["--set", "widht=3"], "unknown key widht"),
        (["--submit", "--ranks", "4", "6", "--strong", "12"], "6 ranks do not fill nodes of 4"),
    ],
)
def test_bad_input_is_found_before_anything_runs(tmp_path: Path, monkeypatch: Any, words: list[str], text: str) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("nothing must run"))
    monkeypatch.setattr(common, "failure_of", lambda *_, **__: pytest.fail("nothing must run"))
    with pytest.raises(UserError, match=text):
        scaling.main([*SYNTHETIC, f"--yaml_config={common.YAML}", *words, f"--output={tmp_path / 'out'}"])
    assert list(tmp_path.iterdir()) == []


def test_the_study_launches_every_point_with_the_same_threads(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """The report has the heads of the stored one, and lists missing results. A failed run ends the study."""
    calls: list[tuple[list[str], dict[str, str]]] = []

    def failure_of(words: list[str], log: Path, environment: dict[str, str]) -> str:
        calls.append((words, environment))
        ranks, local = (int(value) for value in re.findall(r"ranks(\d+)_batch(\d+)", environment["BENCHY_OUTPUT"])[0])
        assert f"--local_batch_size={local}" in words
        assert words[0] == sys.executable
        assert {"train.py", "--enable_benchy", "--config=test", "--bucket_cap_mb=3"} <= set(words)
        assert ("torch.distributed.run" in words) == (ranks > 1), "one rank needs no launcher"
        rates = {"IO": 80, "SYNTHETIC": 10, "FULL": 9} | ({"NO-COMM": 11} if ranks > 1 else {})  # of benchmark mode
        measured = {kind: {"median": float(rate * ranks)} for kind, rate in rates.items()}
        Path(environment["BENCHY_OUTPUT"]).write_text(json.dumps({"provenance": {"device": "a CPU"}, **measured}))
        return ""

    monkeypatch.setattr(common, "failure_of", failure_of)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(9)), raising=False)
    words = [*SYNTHETIC, "--ranks", "1", "2", "4", "--bucket_cap_mb=3", "--output", str(tmp_path)]
    scaling.main(words)
    points = [Point(1, 8), Point(2, 4), Point(2, 8), Point(4, 2), Point(4, 8)]  # weak and strong share the first one
    rounds = [point.name(number) for number in (1, 2, 3) for point in points]
    assert [Path(env["BENCHY_OUTPUT"]).name for _, env in calls] == rounds
    assert {env[name] for _, env in calls for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")} == {"2"}
    assert {env["BENCHY_CONFIG_FILE"] for _, env in calls} == {str(tmp_path / "points" / "benchy.yaml")}
    result = json.loads((tmp_path / "scaling.json").read_text())
    assert [(point["ranks"], point["FULL"]["n"]) for point in result["points"]] == [(p.ranks, 3) for p in points]
    assert result["series"][0]["efficiency"]["FULL"] == {"1": 1.0, "2": 1.0, "4": 1.0}
    for name, overhead in (("communication overhead", 1 - 10 / 11), ("input overhead", 1 - 9 / 10)):
        assert [point[name]["median"] for point in result["points"][1:]] == pytest.approx([overhead] * 4)
    text = (tmp_path / "scaling.md").read_text()
    assert text.strip() in capsys.readouterr().out
    stored = (common.RESULTS / "scaling/scaling.md").read_text()
    assert next(line for line in text.splitlines() if line.startswith("| ranks")) in stored.splitlines()
    (tmp_path / "points" / points[1].name(2)).unlink()
    scaling.main([*words, "--collect"])
    result = json.loads((tmp_path / "scaling.json").read_text())
    assert result["missing"] == [points[1].name(2)]
    assert [point["FULL"]["n"] for point in result["points"]] == [3, 2, 3, 3, 3]
    assert f"Missing: {points[1].name(2)}" in capsys.readouterr().out
    monkeypatch.setattr(common, "failure_of", lambda *_, **__: "no such disk; buy one")
    with pytest.raises(UserError, match="ranks 1, local batch 8 failed: no such disk; buy one; see "):
        scaling.main(words)


def test_every_point_without_a_result_is_submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(subprocess, "run", lambda words, cwd, env, check: jobs.append((words, env)))
    words = ["--config=bs64_opt", "--set", "seed=3", "--ranks", "1", "4", "32", "--weak", "64", "--strong", "--submit"]
    scaling.main([*words, f"--output={tmp_path}"])
    points = [(Point(ranks, 64), number) for number in (1, 2, 3) for ranks in (1, 4, 32)]
    for (command, environment), (point, number) in zip(jobs, points, strict=True):
        assert environment["BENCHY_OUTPUT"] == str(tmp_path / "points" / point.name(number))
        assert Path(environment["BENCHY_CONFIG_FILE"]).read_text().startswith("IO: {batches: 30,")
        size = [f"--nodes={max(1, point.ranks // 4)}", f"--ntasks={point.ranks}"]
        flags = ["--config=bs64_opt", "--set", "seed=3", "--enable_benchy", "--local_batch_size=64"]
        assert command == ["sbatch", *size, "submit_pm.sh", *flags]
    Path(jobs[0][1]["BENCHY_OUTPUT"]).write_text("{}")
    scaling.main([*words, f"--output={tmp_path}"])
    assert len(jobs) == 2 * len(points) - 1, "a point with a result is not submitted again"
