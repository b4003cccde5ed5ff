"""The training step of the configs for GPUs, rehearsed on CUDA tensors without data: backends, layouts, fused kernels.

It needs a CUDA build of torch, a C compiler and CUDA's headers, but no GPU. In an environment of its own:

python3 -m venv cuda
cuda/bin/pip install torch==2.14.1 'nvidia-cuda-crt==13.0.*' numpy pydantic h5py pyyaml tensorboard
CUDA_PYTHON=cuda/bin/python make test-slow

It takes about 6 GB. nvidia-cuda-crt has the version of CUDA for which torch was built (torch.version.cuda).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from utils.steps.backends import has_faulty_conv3d

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parent
PYTHON = os.environ.get("CUDA_PYTHON", sys.executable)
# Prints whether torch was built for CUDA, and directories that may hold CUDA's headers.
FIND = """
import site, pathlib, torch
print(torch.version.cuda or "")
for folder in site.getsitepackages():
    print(*pathlib.Path(folder).glob("nvidia/*/include"), sep="\\n")
"""
OPTIMIZED = ("bs64_opt", "short_opt", "bs256_opt", "bs512_opt", "bs2048_opt", "bs8192_opt")
FAST = ("bs64_fast", "bs512_fast")
POINTWISE = {"Triton activation_backward", "Triton bias_activation", "_fused_adam_"}


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cuda, *folders = subprocess.run([PYTHON, "-c", FIND], capture_output=True, text=True).stdout.splitlines() or [""]
    if not cuda:
        pytest.skip(f"{PYTHON} has no CUDA build of torch; {Path(__file__).name} says how to make an environment")
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    driver = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    command = ["cc", "-shared", "-fPIC", "-Werror", "-o", driver, f"-Wl,-soname,{driver.name}"]
    includes = [f"-I{folder}" for folder in (*folders, "/usr/local/cuda/include")]
    subprocess.run([*command, *includes, TESTS / "cuda_driver.c"], check=True, timeout=60)
    environment = {**os.environ, "LD_PRELOAD": str(driver)}
    command = [PYTHON, TESTS / "cuda_rehearsal.py"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_convolutions_run_in_cudnn_on_channels_last_tensors_and_every_fused_kernel_is_chosen(
    rehearsed: dict[str, Any],
) -> None:
    """In half precision; the stand-in for a GPU has too little shared memory for own convolutions.

    Only SOAP's bases, which are of the weights' sides in a fixed order, leave the layout.
    """
    steps = rehearsed["steps"]
    for name in (*OPTIMIZED, *FAST, "no tail"):
        convolutions = steps[name]["convolutions"]
        assert sum(convolutions.values()) == 24
        for text in convolutions:
            _, backend, dtype = text.split()
            assert backend in ("Cudnn", "CudnnTranspose")
            assert dtype in ("bfloat16", "float16")
        others = steps[name]["not channels-last"]
        assert [line for line in others if name not in FAST or not line.startswith("optimizer, ")] == []
        loss = {"Triton l1", "Triton l1_backward"} if name == "no tail" else {"Triton tail_l1"}
        assert set(steps[name]["kernels"]) == POINTWISE | loss
    exact = steps["float32"]["convolutions"]
    assert all("Cudnn" in text and text.endswith("float32") for text in exact)


def test_a_prediction_avoids_cudnns_faulty_convolutions(rehearsed: dict[str, Any]) -> None:
    """PyTorch 2.9 replaces contiguous ones by a slow path. The first convolution converts the windows."""
    prediction = rehearsed["steps"]["prediction"]
    assert all("Cudnn" in text for text in prediction["convolutions"])
    assert all("[32, 4, 64, 64, 64]" in line for line in prediction["not channels-last"])
    contiguous = rehearsed["steps"]["bfloat16 without channels-last"]["convolutions"]
    if rehearsed["torch"].startswith("2.9."):
        assert has_faulty_conv3d(rehearsed["cudnn"])
        assert not any("Cudnn" in text for text in contiguous)
    elif not has_faulty_conv3d(rehearsed["cudnn"]):
        assert all("Cudnn" in text for text in contiguous)
