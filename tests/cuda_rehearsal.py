"""One training step on CUDA tensors without data and without a GPU: the choices that PyTorch makes for a GPU.

python tests/cuda_rehearsal.py     prints what each config's step chooses, as JSON

It needs a CUDA build of torch, and tests/cuda_driver.c compiled and preloaded; tests/test_cuda_rehearsal.py does that.
"""

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from host_waits import WaitingTrace  # noqa: E402
from step_trace import batch_of, fake_gpu, phases  # noqa: E402

from analysis.inference.sliding_window import forward_pass  # noqa: E402
from benchmarks import common  # noqa: E402
from utils import config as configs  # noqa: E402
from utils.data.loaders import Batch  # noqa: E402
from utils.distributed.launch import Launch  # noqa: E402
from utils.distributed.world import World  # noqa: E402
from utils.optim import soap  # noqa: E402
from utils.steps import build  # noqa: E402
from utils.steps.graph import GraphStep  # noqa: E402

GPU, LR = torch.device("cuda", 0), 1e-4
OPTIMIZED = ("bs64_opt", "short_opt", "bs256_opt", "bs512_opt", "bs2048_opt", "bs8192_opt")
STEPS: dict[str, tuple[str, Mapping[str, Any]]] = {
    **{name: (name, {}) for name in (*OPTIMIZED, "bs64_fast", "bs512_fast")},
    "cuDNN": ("bs64_opt", {"convolutions": "cudnn"}),
    "cuDNN, no tail": ("bs64_opt", {"convolutions": "cudnn", "fused_tail": False, "ema_decay": 0.999}),
    "width 20": ("bs64_opt", {"network.width": 20}),
    "float32": ("base", {}),
    "bfloat16 without channels-last": ("base", {"enable_amp": True}),
}


class Construction(TorchDispatchMode):
    """Answers optimizers that check their learning rate, a tensor on the device, before the first step."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return LR
        return func(*args, **(kwargs or {}))


class Rehearsal(WaitingTrace):
    """Records the backend of each convolution, and leaves the layout of its result to PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.backends: Counter[str] = Counter()

    def _convolution(self, name: str, args: Sequence[Any], result: Any) -> Any:
        backward = name == "convolution_backward"
        x, weight, bias = (*args[1:3], None) if backward else args[:3]
        geometry = args[4:10] if backward else args[3:9]
        backend = torch._C._select_conv_backend(x, weight, bias, *geometry)
        if self._phase is not None:
            self.backends[f"{self._phase}: {backend.name} {str(x.dtype).removeprefix('torch.')}"] += 1
        self._check(name, [*args[: 3 if backward else 2], *(result if backward else [result])])
        return result


def rehearse(name: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Two steps of a GraphStep: one as before the recording, and one as recorded."""
    config = configs.load(common.YAML, name, {"local_batch_size": 64, "device": "cuda", **changes}).for_world(1)
    trace, world = Rehearsal(), World(Launch("rehearsal"), GPU)
    torch.backends.cuda.matmul.allow_tf32 = config.tf32  # as set_backends does, which needs a device
    with fake_gpu(trace, GPU):
        with Construction():
            step = build.step(config, world, build.network_with_loss(config), GraphStep)
        batch = Batch(*(part.to(GPU) for part in batch_of(config)))
        with trace:
            step(batch, LR)
        recorded = mock.patch.object(soap, "is_recorded", return_value=True)
        with step._on_stream(), phases(trace), recorded:
            step._train(batch)
    return choices(trace)


def rehearse_prediction(convolutions: str) -> dict[str, Any]:
    """A batch of windows, as predict.py computes it."""
    config = configs.load(common.YAML, "base", {"local_batch_size": 32, "device": "cuda", "convolutions": convolutions})
    trace = Rehearsal()
    with fake_gpu(trace, GPU):
        predict = forward_pass(build.network(config).to(GPU), "bfloat16", GPU)
        windows = torch.empty(32, 4, 64, 64, 64, device=GPU)
        with phases(trace), trace.phase("forward"):
            predict(windows)
    return choices(trace)


def choices(trace: Rehearsal) -> dict[str, Any]:
    kernels = sorted({name for _, name in trace.written if name.startswith(("Triton", "_fused"))})
    return {"convolutions": dict(trace.backends), "not channels-last": list(trace.layouts), "kernels": kernels}


if __name__ == "__main__":
    steps = {name: rehearse(*step) for name, step in STEPS.items()}
    steps |= {f"prediction, {name}": rehearse_prediction(name) for name in ("auto", "cudnn")}
    print(json.dumps({"torch": torch.__version__, "cudnn": torch.backends.cudnn.version(), "steps": steps}, indent=1))
