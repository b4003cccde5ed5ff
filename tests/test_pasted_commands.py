"""The shell blocks of README.md and docs/ run as they are pasted, in order, and leave nothing that git would add.

A comment on the line above a block states when it runs; without one it runs in `make test`:

    <!-- long -->                  it runs in `make test-slow`
    <!-- not run: needs Slurm -->  it never runs, for this reason

The blocks of one page run in one shell, in a copy of the repository, first those of the README. In the copy the volumes
and the demo's training are smaller (SMALLER); the commands are the same. With larger ones, the demo's network is better
than simple predictors.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import TOP
from test_documentation import COMMANDS, DOCS

import train

TINY = "--grid 32 --n_steps 4"
SMALLER = {
    "Makefile": dict.fromkeys(("--grid 128", "--grid 96"), TINY),
    "config/UNet.yaml": {
        "{name: 'unet', width: 16, scales: 4}": "{name: 'unet', width: 4, scales: 2}",
        "box_size: [128, 96]": "box_size: [32, 32]",
        "data_size: 32": "data_size: 16",
        "Nsamples: 1600": "Nsamples: 64",
        "Nsamples_val: 128": "Nsamples_val: 16",
        "log_interval: 50": "log_interval: 4",
    },
}
# In the pages' commands.
SMALLER_GRIDS = dict.fromkeys(("--grid 512", "--grid 256", "--grid 128"), TINY)


def replace_all(text: str, changes: dict[str, str]) -> str:
    for old, new in changes.items():
        text = text.replace(old, new)
    return text


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the repository as a git checkout of its own, with this environment as .venv."""
    environment = Path(sys.prefix)
    if not (environment / "bin/activate").exists() or not (environment / ".ready").exists():
        pytest.skip("the tests do not run in a virtual environment that make has created")
    listed = subprocess.run(["git", "ls-files", "-coz", "--exclude-standard"], cwd=TOP, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    top = tmp_path / "checkout"
    for name in filter(None, listed.stdout.split("\0")):
        if (TOP / name).is_file():
            (top / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(TOP / name, top / name)
    os.utime(top / "pyproject.toml", (0, 0))  # older than .ready: make does not install anything
    for name, sizes in SMALLER.items():
        text = (top / name).read_text(encoding="utf-8")
        assert [size for size in sizes if size not in text] == []
        (top / name).write_text(replace_all(text, sizes), encoding="utf-8")
    subprocess.run(["git", "init", "-q"], cwd=top, check=True)
    subprocess.run(["git", "add", "-A"], cwd=top, check=True)
    (top / ".venv").symlink_to(environment)
    return top


@pytest.mark.parametrize("marks", [{""}, pytest.param({"", "long"}, marks=pytest.mark.slow)], ids=["short", "all"])
def test_blocks_run_as_pasted(checkout: Path, marks: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    for page in DOCS:
        blocks = COMMANDS.findall(page.read_text(encoding="utf-8"))
        assert [mark for mark, _ in blocks if not re.match(r"$|long$|not run: ", mark)] == [], page
        lines = "".join(text for mark, text in blocks if mark in marks).splitlines()
        lines = [line for line in lines if not re.match(r"make test\b", line)]  # without this suite
        script = replace_all("\n".join(lines), SMALLER_GRIDS)
        script = f"set -eE -o pipefail\ntrap 'echo \"failed: $BASH_COMMAND\"' ERR\nsource .venv/bin/activate\n{script}"
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        ended = subprocess.run(["bash", "-c", script], cwd=checkout, text=True, errors="replace", **streams)
        assert ended.returncode == 0, f"{page}:\n{ended.stdout[-8000:]}"
    status = subprocess.run(["git", "status", "--porcelain"], cwd=checkout, capture_output=True, text=True, check=True)
    new = [line for line in status.stdout.splitlines() if not line.startswith("A ")]
    assert new == [], "files that .gitignore does not list, or files of the repository that have changed"


@pytest.mark.slow
def test_training_on_simulated_boxes_beats_simple_predictors(tmp_path: Path, monkeypatch: Any, capfd: Any) -> None:
    """The demo had --resume=no, which removed the earlier run."""
    pytest.importorskip("colossus", reason="colossus, which simulations need, is not installed")
    from simulation.simulate import main as simulate

    monkeypatch.chdir(TOP)
    recipe = subprocess.run(["make", "--dry-run", "demo"], capture_output=True, text=True, check=True).stdout
    (command,) = re.findall(r"-m torch.distributed.run .* train.py (.*)", recipe)
    settings = {"box_size": "[64, 64]", "Nsamples": 1200, "Nsamples_val": 64, "expdir": tmp_path / "runs"}
    for name, seed in (("train", 1), ("val", 2)):
        settings[f"{name}_path"] = tmp_path / f"{name}.h5"
        simulate(["--output", f"{tmp_path / name}.h5", "--grid", "64", "--seed", str(seed)])
    assert command == "--config=demo"
    train.main([command, "--num_epochs=2", *(f"--set={key}={value}" for key, value in settings.items())])
    output = capfd.readouterr().err
    predictors = {"untrained network": 6, "best constant per channel": 4, "copying density and velocities": 1}
    for name, ratio in predictors.items():
        assert float(re.search(rf"{name}\s+\d\.\d+\s+(\d+\.\d+) times the trained", output)[1]) > ratio
    for picture in ("loss_curves.png", "slices.png"):
        assert next(tmp_path.glob(f"runs/demo/1*/00/{picture}")).stat().st_size > 10_000
