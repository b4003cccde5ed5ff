"""Tests of start_tensorboard.ipynb: its cells list runs, start TensorBoard on localhost, show its page and stop it.

Jupyter is not needed: the cells run in one namespace, as in a kernel, with a replacement for IPython's display.
"""

import json
import re
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from processes import GENEROUS, TOP


class Kernel:
    """A namespace in which cells are executed, and the objects that they display."""

    def __init__(self) -> None:
        cells = json.loads((TOP / "start_tensorboard.ipynb").read_text(encoding="utf-8"))["cells"]
        assert all(not cell.get("execution_count") and not cell.get("outputs") for cell in cells)
        self.sources = {cell["id"]: "".join(cell["source"]) for cell in cells}
        self.names: dict[str, Any] = {"__name__": "__main__"}
        self.shown: list[str] = []

    def run(self, cell: str) -> None:
        exec(self.sources[cell], self.names)


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    """A kernel in a directory with an empty directory of runs."""
    kernel = Kernel()
    display = SimpleNamespace(display=kernel.shown.append, HTML=str, IFrame=lambda url, **_: f"frame of {url}")
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(display=display))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setattr("atexit.register", lambda function: function)
    monkeypatch.delenv("JUPYTERHUB_SERVICE_PREFIX", raising=False)
    monkeypatch.delenv("LOGS_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    yield kernel
    if "stop" in kernel.names:
        kernel.run("stop")


def test_runs_of_the_job_script_are_sorted_by_their_last_validation_loss(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    """The notebook looked in ./runs, where submit_pm.sh writes nothing."""
    monkeypatch.setenv("SCRATCH", str(tmp_path))
    kernel.run("runs")
    assert kernel.names["runs"] == Path("runs"), "there is no directory of jobs"
    (default,) = re.findall(r"LOGS_DIR-\$SCRATCH/(.*)\}", (TOP / "submit_pm.sh").read_text())
    folder = tmp_path / default
    capsys.readouterr()
    losses = '{"step": 0, "Loss/valid": 0.2}\n{"step": 50, "Loss/valid": 0.05}\n{"step": 50, "Step/loss": 0.1}\n'
    for run, lines in {
        "demo/2ranks/good": losses + '{"step": 60, "Loss/va',  # an incomplete line
        "demo/2ranks/bad": '{"step": 7, "Loss/valid": 0.3}',
        "demo/1ranks/broken": '{"step": 3, "Loss/valid": NaN}',
        "demo/1ranks/started": "",
    }.items():
        (folder / run).mkdir(parents=True)
        (folder / run / "metrics.jsonl").write_text(lines)
    kernel.run("runs")
    assert kernel.names["runs"] == folder
    assert [line.split() for line in capsys.readouterr().out.splitlines()[1:]] == [
        ["0.050000", "50", "demo/2ranks/good"],
        ["0.300000", "7", "demo/2ranks/bad"],
        ["nan", "3", "demo/1ranks/broken"],
        ["-", "-", "demo/1ranks/started"],
    ]
    monkeypatch.setenv("LOGS_DIR", "nowhere")
    Path("runs").rmdir()
    with pytest.raises(FileNotFoundError, match="set runs to the directory of the runs"):
        kernel.run("runs")


def test_cells_start_tensorboard_show_its_page_and_stop_it(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # no server listens there
    kernel.run("runs")
    kernel.run("start")
    process, port = kernel.names["server"]
    address = f"http://127.0.0.1:{port}/"
    pins = [{"plugin": "scalars", "tag": "Loss/train"}, {"plugin": "scalars", "tag": "Loss/valid"}]
    losses_first = f"?pinnedCards={urllib.parse.quote(json.dumps(pins))}#timeseries"
    assert kernel.shown[1] == f"frame of {address}{losses_first}"
    assert process.args[-6:] == ["--logdir", "runs", "--host", "127.0.0.1", "--port", str(port)]
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    assert b"TensorBoard" in direct.open(address, timeout=GENEROUS).read()

    # Under a JupyterHub the page has another address; a running TensorBoard is not started again.
    monkeypatch.setenv("JUPYTERHUB_SERVICE_PREFIX", "/user/ada/")
    kernel.run("start")
    assert kernel.names["server"] == (process, port)
    assert kernel.shown[3] == f"frame of /user/ada/proxy/{port}/{losses_first}"
    kernel.run("stop")
    assert process.poll() is not None
