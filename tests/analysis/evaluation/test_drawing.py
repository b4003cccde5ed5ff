"""Tests of the process that draws."""

import io
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from processes import has_ended, wait_until
from sample_results import sample_results

from analysis.evaluation import drawing
from utils.errors import UserError


def test_a_process_of_its_own_draws_and_a_rank_never_holds_its_lock() -> None:
    """Fixed: a rank that drew missed heartbeats on a busy machine, and was taken for gone.

    Neither signals to the job nor errors of a picture end the process; if it is killed, another draws the next one.
    """
    results = sample_results(8, channels=(1, 2))
    pictures = {name: future.result() for name, future in drawing.draw(results).items()}
    assert list(pictures) == ["slices", "spectra", "distributions"]
    for picture in pictures.values():
        assert len(np.unique(np.asarray(Image.open(io.BytesIO(picture)).convert("L")))) > 10
    process, _ = drawing._drawing_process()
    assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text(), "also if it draws results"
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        process.send_signal(number)
    with pytest.raises(AttributeError):
        drawing.submit(drawing.picture, "spectra", replace(results, spectra=None)).result()
    assert drawing.submit(drawing.picture, "loss_curves", [], "l1", "").result().startswith(b"\x89PNG")
    with pytest.raises(FileNotFoundError):
        drawing.submit(os.stat, "/no_style").result()
    assert process.poll() is None
    with pytest.raises(UserError, match="the process that draws was ended, with exit code 9"):
        drawing.submit(os._exit, 9).result()
    assert drawing.submit(drawing.picture, "loss_curves", [], "l1", "").result().startswith(b"\x89PNG")
    assert drawing._drawing_process()[0] is not process


def test_the_process_that_draws_ends_with_its_caller_and_neither_imports_the_other_s_libraries() -> None:
    """PyTorch would take two seconds of a core in one, matplotlib one in the other."""
    lines = (
        "import os, sys",
        "from analysis.evaluation import drawing",
        "drawing.submit(drawing.picture, 'loss_curves', [], 'l1', '').result()",
        "process, _ = drawing._drawing_process()",
        "maps = open(f'/proc/{process.pid}/maps').read()",
        "print(process.pid, 'matplotlib' in sys.modules, 'libtorch' in maps, 'matplotlib' in maps, flush=True)",
        "os._exit(1)",
    )
    ended = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (1, "")
    pid, *imported = ended.stdout.split()
    assert imported == ["False", "False", "True"]
    wait_until(lambda: has_ended(int(pid)))
