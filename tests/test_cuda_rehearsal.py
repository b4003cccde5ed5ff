"""The training step of the configs for GPUs, rehearsed on CUDA tensors without data: backends, layouts, kernels.

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
FORWARD = {"strided_convolution", "transposed_convolution", "blocks_to_padded_rows", "rows_to_blocks", "sum_splits"}
FORWARD |= {"shuffle_cells"}
HOPPER = {*FORWARD, "strided_weight_gradient", "block_weight_gradient", "bias_activation_backward"}


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


def test_hopper_kernels_compute_the_fastest_configs(rehearsed: dict[str, Any]) -> None:
    """Only what SOAP computes leaves the layout."""
    for name in ("bs64_opt", "bs64_fast"):
        step = rehearsed["steps"][name]
        assert step["convolutions"] == {}
        own = {"adam_of_cells", "subtract_smoothed"} if name == "bs64_fast" else {"adam_of_cells"}
        assert {"_fused_adam_", *own} | HOPPER == set(step["kernels"])
        assert name == "bs64_fast" or step["not channels-last"] == []


def test_cudnn_computes_channels_last_convolutions_with_the_other_kernels(rehearsed: dict[str, Any]) -> None:
    """In half precision, where Hopper's kernels are not to be used or cannot be."""
    steps = rehearsed["steps"]
    for name, kernels in (("cuDNN", ["blocks_l1"]), ("cuDNN, float16", []), ("width 20", ["blocks_l1"])):
        convolutions = steps[name]["convolutions"]
        assert sum(convolutions.values()) == 24
        for text in convolutions:
            backend, dtype = text.split()
            assert backend in ("Cudnn", "CudnnTranspose")
            assert dtype in ("bfloat16", "float16")
        assert steps[name]["not channels-last"] == []
        around = ["bias_activation_backward", "bias_activation_forward", *kernels]
        assert set(steps[name]["kernels"]) == {"_fused_adam_", *around}
    exact = steps["float32"]["convolutions"]
    assert all("Cudnn" in text and text.endswith("float32") for text in exact)


def test_a_prediction_avoids_cudnns_faulty_convolutions(rehearsed: dict[str, Any]) -> None:
    """PyTorch 2.9 replaces contiguous ones by a slow path. The first convolution converts the windows."""
    for name, kernels in (("auto", FORWARD), ("cudnn", set())):
        prediction = rehearsed["steps"][f"prediction, {name}"]
        assert sum(prediction["convolutions"].values()) == (0 if kernels else 12)
        assert all("Cudnn" in text for text in prediction["convolutions"])
        assert kernels <= {*prediction["kernels"]}
        assert all("[32, 4, 64, 64, 64]" in line for line in prediction["not channels-last"])
    contiguous = rehearsed["steps"]["bfloat16 without channels-last"]["convolutions"]
    if rehearsed["torch"].startswith("2.9."):
        assert rehearsed["cudnn"] in FAULTY_CUDNN
        assert not any("Cudnn" in text for text in contiguous)
    elif rehearsed["cudnn"] not in FAULTY_CUDNN:
        assert all("Cudnn" in text for text in contiguous)
