"""The training step of the configs for GPUs, rehearsed on CUDA tensors without data: backends, layouts, fused kernels.

It needs a CUDA build of torch, a C compiler and CUDA's headers, but no GPU. In an environment of its own:

python3 -m venv cuda
cuda/bin/pip install torch==2.14.1 'nvidia-cuda-crt==13.0.*' numpy pydantic h5py pyyaml tensorboard
CUDA_PYTHON=cuda/bin/python make test-slow

It takes about 6 GB. nvidia-cuda-crt has the version of CUDA for which torch was built (torch.version.cuda).
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from utils.steps.backends import FAULTY_CUDNN

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
OWN = [f"Triton {name}" for name in ("gather", "scatter", "weight_gradient", "sum_splits")]
OWN += [f"Triton {name}" for name in ("rows_to_blocks", "blocks_to_rows", "block_weight_gradient")]


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


def test_own_kernels_compute_the_convolutions_of_the_fastest_configs(rehearsed: dict[str, Any]) -> None:
    """Only what SOAP computes leaves the layout."""
    for name in (*OPTIMIZED, *FAST):
        step = rehearsed["steps"][name]
        assert step["convolutions"] == {}
        assert {"_fused_adam_", "Triton activation_backward", *OWN} == set(step["kernels"])
        layouts = step["not channels-last"]
        assert [text for text in layouts if name not in FAST or not text.startswith("optimizer")] == []


def test_cudnn_computes_channels_last_convolutions_and_every_fused_kernel_is_chosen(rehearsed: dict[str, Any]) -> None:
    """In half precision, where own kernels are not to be used or cannot be."""
    steps = rehearsed["steps"]
    for name, loss in (("cuDNN", ["tail_l1"]), ("cuDNN, no tail", ["l1", "l1_backward"]), ("width 20", ["tail_l1"])):
        convolutions = steps[name]["convolutions"]
        assert sum(convolutions.values()) == 24
        for text in convolutions:
            _, backend, dtype = text.split()
            assert backend in ("Cudnn", "CudnnTranspose")
            assert dtype in ("bfloat16", "float16")
        assert steps[name]["not channels-last"] == []
        fused = ["activation_backward", "bias_activation", *loss]
        assert set(steps[name]["kernels"]) == {"_fused_adam_", *(f"Triton {kernel}" for kernel in fused)}
    exact = steps["float32"]["convolutions"]
    assert all("Cudnn" in text and text.endswith("float32") for text in exact)


def test_a_prediction_avoids_cudnns_faulty_convolutions(rehearsed: dict[str, Any]) -> None:
    """PyTorch 2.9 replaces contiguous ones by a slow path. The first convolution converts the windows."""
    for name, kernels in (("auto", OWN[:2]), ("cudnn", [])):
        prediction = rehearsed["steps"][f"prediction, {name}"]
        assert sum(prediction["convolutions"].values()) == (0 if kernels else 12)
        assert all("Cudnn" in text for text in prediction["convolutions"])
        assert {*kernels} <= {*prediction["kernels"]}
        assert all("[32, 4, 64, 64, 64]" in line for line in prediction["not channels-last"])
    contiguous = rehearsed["steps"]["bfloat16 without channels-last"]["convolutions"]
    if rehearsed["torch"].startswith("2.9."):
        assert rehearsed["cudnn"] in FAULTY_CUDNN
        assert not any("Cudnn" in text for text in contiguous)
    elif rehearsed["cudnn"] not in FAULTY_CUDNN:
        assert all("Cudnn" in text for text in contiguous)
