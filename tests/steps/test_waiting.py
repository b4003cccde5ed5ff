"""No training step makes the host wait for the device: it would idle in each step, and a CUDA graph cannot record it.

On tensors without data that pass as CUDA tensors, so that the step takes the paths of a GPU. One exception is allowed:
SOAP's first decomposition; tests/optim/test_soap.py tests later ones. NAdam and apex wait to skip updates.
"""

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_gpu import CPU, HostWaits, Trace, batch_of, fake_gpu
from sample_results import SIMULATION
from small_steps import ON_DEVICE

from networks import LOSSES
from networks.ops import plan
from networks.ops.hopper.tiles import BLOCK
from utils import config as configs
from utils.config import Config
from utils.data.loaders.base import Batch, meta_batch
from utils.distributed.launch import Launch
from utils.distributed.world import World
from utils.optim import soap
from utils.optim.optimizers import build_optimizer
from utils.steps import build, kernels
from utils.steps.eager import EagerStep
from utils.training.integrity import digest, measured
from utils.volumes.attributes import CELL

FOLDER = Path(__file__).parents[2] / "config"
SMALL = {"network.width": 4, "network.scales": 2, "data_size": 16}
ALL_SIZES = {"local_batch_size": 4, "device": "cpu"}
AVERAGE = {"ema_decay": 0.999}
FLUX = {"loss": "analysis.lyman_alpha.loss.FluxLoss", "loss_options": {"simulation": {**SIMULATION, CELL: 0.2}}}
# One setting at a time, of the step in bfloat16 with kernels or of the plain one.
SETTINGS: dict[str, tuple[str, Mapping[str, Any]]] = {
    **{name: (name, {}) for name in ("base", "demo", "mnist_cnn")},
    "reuters_cnn": ("reuters_cnn", {"optimizer.name": "adam"}),
    **{f"optimizer {name}": ("bs64_fast", {"optimizer.name": name}) for name in ON_DEVICE},
    "optimizer soap without an average": ("bs64_fast", {"ema_decay": None}),
    **{f"loss {name}": ("base", {"loss": name}) for name, loss in LOSSES.items() if loss.targets == "volumes"},
    "loss of the flux": ("base", FLUX),
    "density term and channel weights": ("base", {"lambda_rho": 0.1, "channel_weights": [1, 2, 2, 2, 1]}),
    **{f"norm {name}": ("base", {"network.norm": name}) for name in ("batch", "sync_batch", "ghost(2)", "group")},
    "float16": ("base", {"enable_amp": True, "precision": "float16", "clip_grad_norm": 0.1}),
    "float16 with SOAP": ("bs64_fast", {"precision": "float16"}),
    "micro-batches": ("bs64_opt", {"accumulation_steps": 2, "log_noise_scale": True, "clip_grad_norm": 0.1, **AVERAGE}),
    "cuDNN": ("bs64_opt", AVERAGE),
    "Hopper": ("bs64_opt", {"network.width": BLOCK}),
}


def train(config: Config, recorded: bool = False) -> tuple[set[str], list[str]]:
    """Kernels of two steps and of an integrity check; large tensors in them in another order than channels-last."""
    trace = Trace()
    with fake_gpu() as launches:
        model, world = build.network_with_loss(config), World(Launch("test"), CPU)
        if config.channels_last:
            model.network.to(memory_format=torch.channels_last_3d)
        kernels.apply(model, kernels.setting(config, torch.device("cuda")))
        optimizer = build_optimizer(config.optimizer, dict(model.network.named_parameters()), 0.1, capturable=recorded)
        step = EagerStep(model, optimizer, config, world)
        parts = (torch.zeros_like(part, device=CPU) for part in meta_batch(config, config.local_batch_size or 0))
        batch = Batch(*parts) if config.dataset.name else batch_of(config)
        with trace:
            sums = torch.zeros(len(step.trained), 4, dtype=torch.float64, device=CPU)
            for exchange in (step.exchange, measured(step.trained.values(), sums)):
                step.exchange = exchange
                # A graph step sets the learning rate on the device, and records the rest.
                step._train(batch) if recorded else step(batch, 0.1)
            assert step.recompute(batch).shape == (2,)
            assert digest(step.replicated()).shape == ()
    return {launch.kernel.__name__ for launch in launches}, [*trace.layouts]


@pytest.mark.parametrize("recorded", [False, True], ids=["eager", "recorded"])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_step_does_not_wait(name: str, recorded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(soap, "is_recorded", lambda: recorded)
    monkeypatch.setattr(plan, "not_hopper", lambda device: "")
    base, changes = SETTINGS[name]
    file, small = ("classification", {}) if base.endswith("cnn") else ("UNet", SMALL)
    config = configs.load(str(FOLDER / f"{file}.yaml"), base, {**ALL_SIZES, **small, **changes})
    train(config.for_world(1), recorded)


@pytest.mark.parametrize(("value", "kernel"), [("auto", "strided_convolution"), ("cudnn", "blocks_l1")])
def test_no_large_tensor_leaves_the_channels_last_order(value: str, kernel: str, monkeypatch: Any) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(plan, "not_hopper", lambda device: "")
    config = configs.load(str(FOLDER / "UNet.yaml"), "bs64_opt", {"kernels": value, "device": "cpu"}).for_world(1)
    names, layouts = train(config)
    assert kernel in names
    assert ("strided_convolution" in names) == (value == "auto")
    assert layouts == []


WAITS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "a tensor read as a scalar": lambda x: torch._foreach_add_([x], x.sum()),
    "nonzero": lambda x: x.nonzero(),
    "a mask as index": lambda x: x[x > 0],
    "the status of a decomposition": lambda x: torch.linalg.eigh(x),
    "a copy to another device": lambda x: x.to("meta"),
}


@pytest.mark.parametrize("name", WAITS)
def test_an_operation_that_waits_is_refused(name: str) -> None:
    """With values and without. Integers as index do not wait."""
    for context in (contextlib.nullcontext(), fake_gpu()):
        with pytest.raises(HostWaits), context, Trace():
            WAITS[name](torch.ones(3, 3))
    with Trace():
        torch.ones(3)[torch.tensor([1, 0])]
