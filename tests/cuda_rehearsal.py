"""One training step on CUDA tensors without data and without a GPU: the choices that PyTorch makes for a GPU.

python tests/cuda_rehearsal.py     prints what each config's step chooses, as JSON

It needs a CUDA build of torch, and tests/cuda_driver.c compiled and preloaded; tests/test_cuda_rehearsal.py does that.
"""

import json
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from fake_gpu import Trace, batch_of, fake_gpu  # noqa: E402

from analysis.inference.sliding_window import forward_pass  # noqa: E402
from benchmarks import common  # noqa: E402
from utils import config as configs  # noqa: E402
from utils.data.loaders import Batch  # noqa: E402
from utils.distributed.launch import Launch  # noqa: E402
from utils.distributed.world import World  # noqa: E402
from utils.optim import soap  # noqa: E402
from utils.steps import build, kernels  # noqa: E402
from utils.steps.graph import GraphStep  # noqa: E402

GPU, LR = torch.device("cuda", 0), 1e-4
STEPS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "bs64_opt": ("bs64_opt", {}),  # at this batch other _opt configs have the same step, as bs512_fast has bs64_fast's
    "bs64_fast": ("bs64_fast", {}),
    "cuDNN": ("bs64_opt", {"kernels": "cudnn"}),
    "cuDNN, float16": ("bs64_opt", {"kernels": "cudnn", "precision": "float16", "ema_decay": 0.999}),
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


class Rehearsal(Trace):
    """Also counts the backends of convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.backends: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name in ("convolution", "convolution_backward"):
            backward = name == "convolution_backward"
            x, weight, bias = (*args[1:3], None) if backward else args[:3]
            geometry = args[4:10] if backward else args[3:9]
            backend = torch._C._select_conv_backend(x, weight, bias, *geometry)
            self.backends[f"{backend.name} {str(x.dtype).removeprefix('torch.')}"] += 1
        return super().__torch_dispatch__(func, types, args, kwargs)


def rehearse(name: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Two steps of a GraphStep: one as before the recording, and one as recorded."""
    config = configs.load(common.YAML, name, {"local_batch_size": 64, "device": "cuda", **changes}).for_world(1)
    world = World(Launch("rehearsal"), GPU)
    torch.backends.cuda.matmul.allow_tf32 = config.tf32  # as set_backends does, which needs a device
    with fake_gpu(GPU) as launches:
        with Construction(), mock.patch.object(kernels, "compile_kernels"):  # a GPU tries them
            step = build.step(config, world, build.network_with_loss(config), GraphStep)
        batch = Batch(*(part.to(GPU) for part in batch_of(config)))
        with Trace():
            step(batch, LR)
        launches.clear()
        recorded = mock.patch.object(soap, "is_recorded", return_value=True)
        with step._on_stream(), Rehearsal() as trace, recorded:
            step._train(batch)
    return choices(trace, launches)


def rehearse_prediction(choice: str) -> dict[str, Any]:
    """A batch of windows, as predict.py computes it."""
    config = configs.load(common.YAML, "base", {"local_batch_size": 32, "device": "cuda"})
    with fake_gpu(GPU) as launches:
        predict = forward_pass(build.network(config).to(GPU), "bfloat16", GPU, 64, choice)
        windows = torch.empty(32, 4, 64, 64, 64, device=GPU)
        with Rehearsal() as trace:
            predict(windows)
    return choices(trace, launches)


def choices(trace: Rehearsal, launches: list[Any]) -> dict[str, Any]:
    names = sorted({*trace.optimizers, *(launch.kernel.__name__ for launch in launches)})
    return {"convolutions": dict(trace.backends), "not channels-last": list(trace.layouts), "kernels": names}


if __name__ == "__main__":
    steps = {name: rehearse(*step) for name, step in STEPS.items()}
    steps |= {f"prediction, {name}": rehearse_prediction(name) for name in ("auto", "cudnn")}
    print(json.dumps({"torch": torch.__version__, "cudnn": torch.backends.cudnn.version(), "steps": steps}, indent=1))
