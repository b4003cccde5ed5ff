"""The SC21 tutorial's commands in turn, with one run number. Fixed: all but the first found the run complete."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import TOP, Completed
from processes import run as run_script
from steps.test_compile import why_no_compiler

from utils.data.loaders import dali
from utils.volumes.convert_to_npy import convert

# The sizes are a test's. enable_jit of bs64_opt is true in the tutorial; compiling takes most of the time of this test.
YAML = """
base: &base
  {data_loader_config: lowmem, expdir: runs, box_size: [16, 16], data_size: 8, global_batch_size: 16,
  base_batch_size: 16, network: {name: unet, width: 2, scales: 2}, Nsamples: 64, Nsamples_val: 16, device: cpu,
  report_pictures: False, train_path: FOLDER/train.h5, val_path: FOLDER/valid.h5,
  train_path_npy_data: FOLDER/train_data.npy, train_path_npy_label: FOLDER/train_label.npy,
  val_path_npy_data: FOLDER/valid_data.npy, val_path_npy_label: FOLDER/valid_label.npy}
short: {<<: *base, num_epochs: 4}
bs64_opt: &opt {<<: *base, data_loader_config: LOADER, enable_amp: True, enable_apex: True, enable_jit: False}
bs512_test: {<<: *opt, global_batch_size: 64, num_epochs: 3}
bs512_opt: {<<: *opt, global_batch_size: 64, num_epochs: 4}
"""
TRIALS = "{batches: 1, trials: 1, warmup_trials: 0}"

SHORT = "train.py --config=short --num_epochs 3"
WORKERS = f"{SHORT} --num_data_workers 4"
LOADER = f"{WORKERS} --data_loader_config=LOADER"
AMP, BENCHY = f"{LOADER} --enable_amp", "--num_epochs 10 --enable_benchy"
FUSED = f"{AMP} --enable_apex"
PROFILE = "--config=bs64_opt --num_epochs 4 --num_data_workers 8 --local_batch_size 16 --enable_manual_profiling"
WEAK = "train.py --num_data_workers 4 --local_batch_size 64 --config=bs64_opt --enable_benchy"
# In the order of the tutorial's README; `sbatch … submit_pm.sh X` is python train.py X.
COMMANDS = [
    SHORT,
    SHORT,
    "train.py --config=short --num_epochs 2 --enable_manual_profiling",
    f"train.py --config=short {BENCHY}",
    WORKERS,
    f"{SHORT} --num_data_workers 8",
    f"train.py --config=short --num_data_workers 8 {BENCHY}",
    LOADER,
    f"NVIDIA_TF32_OVERRIDE=0 {LOADER}",
    f"{LOADER} {BENCHY}",
    AMP,
    f"{AMP} --enable_manual_profiling",
    f"{AMP} {BENCHY}",
    FUSED,
    f"{FUSED} --enable_jit",
    f"{FUSED} --enable_jit {BENCHY}",
    "train_graph.py --config=short --num_epochs 3",
    "train.py --config=bs64_opt",
    "train.py --config=bs512_test",
    "train.py --config=bs512_opt",
    f"BENCHY_OUTPUT=weak_scale {WEAK}",
    f"BENCHY_OUTPUT=weak_scale_noddp {WEAK} --noddp",
    f"train.py {PROFILE}",
    f"train.py {PROFILE} --disable_broadcast_buffers",
    f"train.py {PROFILE} --disable_broadcast_buffers --bucket_cap_mb 100",
]
# Every flag but --enable_jit, whose compilation takes most of the time.
FEW = [SHORT, SHORT, f"NVIDIA_TF32_OVERRIDE=0 {LOADER}", FUSED, *COMMANDS[16:18], *COMMANDS[21:22], COMMANDS[-1]]


def loader() -> str:
    """DALI's loader, or another one if it is not installed."""
    try:
        dali.import_dali()
    except Exception:
        return "inmem"
    return "dali-lowmem"


@pytest.fixture
def folder(tmp_path: Path, volume_file: Any) -> Path:
    """A working directory with the program, small data and a YAML file with the tutorial's configs."""
    for seed, name in enumerate(("train", "valid")):
        convert(volume_file(tmp_path / f"{name}.h5", seed=seed))
    for script in ("train.py", "train_graph.py"):
        (tmp_path / script).symlink_to(TOP / script)
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "UNet.yaml").write_text(YAML.replace("FOLDER", str(tmp_path)).replace("LOADER", loader()))
    (tmp_path / "trials.yaml").write_text("".join(f"{kind}: {TRIALS}\n" for kind in ("IO", "SYNTHETIC", "FULL")))
    return tmp_path


def type_command(text: str, folder: Path) -> Completed:
    words = text.replace("LOADER", loader()).split()
    if why_no_compiler() is not None:
        words = [word for word in words if word != "--enable_jit"]
    variables = [word for word in words if re.match(r"[A-Z_0-9]+=", word)]
    environment = {**os.environ, "BENCHY_CONFIG_FILE": "trials.yaml", **dict(word.split("=", 1) for word in variables)}
    return run_script(words[len(variables) :], folder / "output", folder, environment)


@pytest.mark.parametrize("commands", [FEW, pytest.param(COMMANDS, marks=pytest.mark.slow)], ids=["few", "all"])
def test_commands_of_the_tutorial_have_their_effects(folder: Path, commands: list[str]) -> None:
    known: dict[Path, int] = {}
    for number, text in enumerate(commands):
        ended = type_command(text, folder)
        what = f"command {number + 1}: {text}:\n{ended.stderr}"
        runs = {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/1ranks/*")}
        if text.startswith("train_graph.py") and not torch.cuda.is_available():
            assert (ended.returncode, ended.stderr.count("\n")) == (2, 1), what
            assert "only CUDA devices have graphs" in ended.stderr
            assert runs == known, what
            continue
        assert ended.returncode == 0, what
        if "--enable_benchy" in text:
            for kind in ("IO", "SYNTHETIC", "FULL"):
                assert f"BENCHY::SUMMARY::{kind} average trial throughput: " in ended.stderr, what
            output = re.findall(r"BENCHY_OUTPUT=(\w+)", text) or ["benchy"]
            (folder / f"{output[0]}.json").unlink()
            assert runs == known, f"a benchmark has no run directory; {what}"
            continue
        assert "Avg train loss=" in ended.stderr, what
        (run,) = runs.keys() - known.keys()
        assert runs == {**known, run: runs[run]}, f"an earlier run was changed by {what}"
        assert (run / "summary.json").is_file(), what
        assert (run / "trace.json.gz").exists() == ("profiling" in text), what
        known = runs
    names = {path.name for path in folder.glob("runs/short/1ranks/*")}
    assert names == {"00", *(f"00-{number}" for number in range(2, 1 + len(names)))}
