"""Tests of start_tensorboard.ipynb: its cells list runs, start TensorBoard on localhost, show its page and stop it.

Jupyter is not needed: the cells run in one namespace, as in a kernel, with a replacement for IPython's display.
"""

from __future__ import annotations

import json
import re
import sys
import types
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import GENEROUS, TOP

NOTEBOOK = TOP / "start_tensorboard.ipynb"


@pytest.fixture(scope="module")
def cells() -> dict[str, dict[str, Any]]:
    return {cell["id"]: cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]}


class Kernel:
    """A namespace in which cells are executed, and the objects that they display."""

    def __init__(self, cells: dict[str, dict[str, Any]]) -> None:
        self.cells, self.names, self.shown = cells, {"__name__": "__main__"}, []

    def run(self, cell: str) -> None:
        exec(compile("".join(self.cells[cell]["source"]), f"cell {cell}", "exec"), self.names)


@pytest.fixture
def kernel(cells: dict[str, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    """A kernel in a directory with an empty directory of runs."""
    kernel = Kernel(cells)
    module: Any = types.ModuleType("IPython.display")
    module.display = kernel.shown.append
    module.HTML = str
    module.IFrame = lambda url, width, height: f"frame of {url}"
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    monkeypatch.setattr("atexit.register", lambda function: function)
    for name in ("JUPYTERHUB_SERVICE_PREFIX", "LOGS_DIR", "SCRATCH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    yield kernel
    if "stop" in kernel.names:
        kernel.run("stop")


def test_the_runs_are_those_of_the_job_script(kernel: Kernel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The notebook looked in ./runs, where submit_pm.sh writes nothing."""
    logs = tmp_path / "scratch/nbody-unet/logs"
    default = re.search(r"LOGS_DIR-\$SCRATCH/(.*)\}", (TOP / "submit_pm.sh").read_text())
    assert default is not None
    assert logs == tmp_path / "scratch" / default[1]
    monkeypatch.setenv("SCRATCH", str(tmp_path / "scratch"))
    for path in (Path("runs"), logs, tmp_path / "other"):
        path.mkdir(parents=True, exist_ok=True)
        if path.name == "other":
            monkeypatch.setenv("LOGS_DIR", str(path))
        kernel.run("runs")
        assert kernel.names["runs"] == path


def test_runs_are_sorted_by_their_last_validation_loss(kernel: Kernel, capsys: pytest.CaptureFixture[str]) -> None:
    code = [cell for cell in kernel.cells.values() if cell["cell_type"] == "code"]
    assert all((cell["execution_count"], cell["outputs"]) == (None, []) for cell in code)
    losses = ['{"step": 0, "Loss/valid": 0.2}', '{"step": 50, "Step/loss": 0.1}', '{"step": 50, "Loss/valid": 0.05}']
    for run, lines in {
        "demo/2ranks/good": [*losses, '{"step": 60, "Loss/va'],  # an incomplete line
        "demo/2ranks/bad": ['{"step": 7, "Loss/valid": 0.3}'],
        "demo/1ranks/broken": ['{"step": 3, "Loss/valid": NaN}'],
        "demo/1ranks/started": [],
    }.items():
        metrics = Path("runs") / run / "metrics.jsonl"
        metrics.parent.mkdir(parents=True)
        metrics.write_text("\n".join(lines))
    kernel.run("runs")
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[1:] == [
        ["0.050000", "50", "demo/2ranks/good"],
        ["0.300000", "7", "demo/2ranks/bad"],
        ["nan", "3", "demo/1ranks/broken"],
        ["-", "-", "demo/1ranks/started"],
    ]
    Path("runs").rename("elsewhere")
    with pytest.raises(FileNotFoundError, match="set runs to the directory of the runs"):
        kernel.run("runs")


def test_cells_start_tensorboard_show_its_page_and_stop_it(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # no server listens there
    kernel.run("runs")
    kernel.run("start")
    process, port = kernel.names["server"]
    address = f"http://127.0.0.1:{port}/"
    assert kernel.shown[1] == f"frame of {address}"
    assert f"ssh -L {port}:127.0.0.1:{port}" in capsys.readouterr().out
    assert process.args[-6:] == ["--logdir", "runs", "--host", "127.0.0.1", "--port", str(port)]
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    page = direct.open(address, timeout=GENEROUS).read()
    assert b"TensorBoard" in page

    # Under a JupyterHub the page has another address; a running TensorBoard is not started again.
    monkeypatch.setenv("JUPYTERHUB_SERVICE_PREFIX", "/user/ada/")
    kernel.run("start")
    assert kernel.names["server"] == (process, port)
    assert kernel.shown[3] == f"frame of /user/ada/proxy/{port}/"

    kernel.run("stop")
    assert process.poll() is not None
    kernel.run("stop")  # a second call has no effect


def test_tensorboard_that_does_not_start_is_reported(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel.run("runs")
    program = Path("python-without-tensorboard")
    program.write_text("#!/bin/sh\necho No module named tensorboard >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program.resolve()))
    with pytest.raises(RuntimeError, match="TensorBoard did not start:\nNo module named tensorboard"):
        kernel.run("start")
    assert kernel.names["server"] is None
