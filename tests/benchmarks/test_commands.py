"""Small runs of the benchmarks: each writes its result with the keys of the stored one."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks import common, convergence, flux, integrity, loaders, volumes

TINY_LOADERS = ["--box=16", "--crop=8", "--batch=1", "--trials=1", "--starts=1", "--batches=2", "--epoch_batches=2"]
COMMANDS: dict[Any, list[str]] = {
    integrity: ["--width=2", "--scales=2", "--crop=8", "--batch=1", "--trials=2", "--steps=1", "--flips=1"],
    flux: ["--side=8", "--large=12", "--trials=2", "--threads=1"],
    loaders: [*TINY_LOADERS, "--settle=0", "--workers=1"],
    convergence: ["--grids", "16", "32", "--box_size=5", "--threads=1"],
}


@pytest.mark.parametrize("benchmark", COMMANDS, ids=lambda benchmark: benchmark.__name__.split(".")[1])
def test_a_small_run_writes_its_result(benchmark: Any, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    if benchmark is convergence:
        pytest.importorskip("colossus")
        from simulation import simulate

        monkeypatch.setattr(simulate, "SimulationOptions", partial(simulate.SimulationOptions, n_steps=4))
    name = benchmark.__name__.split(".")[1]
    monkeypatch.chdir(tmp_path)
    benchmark.main([*COMMANDS[benchmark], f"--output={tmp_path}"])
    result, stored = (json.loads((folder / f"{name}.json").read_text()) for folder in (tmp_path, common.RESULTS))
    assert stored.keys() - result.keys() <= {"load average at the start"}
    assert result["provenance"]["command"]
    text = (tmp_path / f"{name}.md").read_text()
    assert text in capsys.readouterr().out
    if benchmark is convergence:  # the documentation copies its table
        assert text.splitlines()[0] == (common.RESULTS / "convergence.md").read_text().splitlines()[0]
    if benchmark is loaders:
        assert {"lowmem", "inmem", "memory copy (bound)", "plain DataLoader, 1 processes"} <= set(result["results"])
        assert ("dali-lowmem" in result["results"]) == ("reading: DALI" in result["results"])


@pytest.mark.slow
def test_the_programs_for_whole_volumes_are_measured(tmp_path: Path) -> None:
    words = ["--grid=128", "--crop=16", "--width=2", "--trials=1", f"--folder={tmp_path / 'f'}", f"--output={tmp_path}"]
    volumes.main(words)
    assert json.loads((tmp_path / "volumes.json").read_text())["seconds"].keys() == {"predict", "evaluate"}
