"""benchmarks/flux.py: a small run, and the gas of its boxes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import flux


def test_small_run_writes_its_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(flux, "GROUP", 100)  # 12² lines: the last group is smaller
    options = ["--side=8", "--large=12", "--trials=2", "--threads=1", f"--output={tmp_path}"]
    monkeypatch.setattr("sys.argv", ["flux", *options])
    flux.main()
    result = json.loads((tmp_path / "flux.json").read_text())
    assert len(result["cases"]) == 6
    assert {case["seconds"]["n"] for case in result["cases"].values()} == {2}
    assert result["provenance"]["command"]
    assert "| 12³ along 1 axis | 0.02 | 2.27 |" in capsys.readouterr().out


def test_gas_is_like_that_of_the_forest() -> None:
    lines = flux.make_lines(4000, 128, 0.04, torch.Generator().manual_seed(0))
    assert float(lines.density.mean()) == pytest.approx(1, rel=0.05)
    assert float(lines.velocity.std()) == pytest.approx(flux.VELOCITY_SPREAD, rel=1e-3)
    assert 0.04 < float((lines.temperature > 1e5).double().mean()) < 0.07
