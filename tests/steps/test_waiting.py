"""No training step makes the host wait for the device: it would idle in each step, and a CUDA graph cannot record it.

On tensors without data that pass as CUDA tensors, so that the step takes the paths of a GPU. One exception is allowed:
SOAP's first decomposition; tests/optim/test_soap.py tests later ones. NAdam and apex wait to skip updates.
"""

import contextlib
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from host_waits import HostWaits, WaitingTrace
from small_steps import ON_DEVICE
from step_trace import CPU, batch_of, fake_gpu

from docs.modules import tracked
from networks import LOSSES, strided
from utils import config as configs
from utils.config import Config, yaml_files
from utils.data.loaders.base import Batch, meta_batch
from utils.distributed.launch import Launch
from utils.distributed.world import World
from utils.optim import soap
from utils.optim.optimizers import build_optimizer
from utils.steps import build
from utils.steps.eager import EagerStep
from utils.training.integrity import digest

FOLDER = Path(__file__).parents[2] / "config"
SMALL = {"network.width": 4, "network.scales": 2, "data_size": 16}
ALL_SIZES = {"local_batch_size": 4, "device": "cpu"}
# The keys on which the operations of a step depend.
KEYS = ("network", "loss", "lambda_rho", "metrics", "optimizer", "enable_amp", "precision", "accumulation_steps")
KEYS += ("clip_grad_norm", "log_noise_scale", "ema_decay", "channel_weights", "channels_last", "fused_pointwise")
KEYS += ("fused_tail", "ddp")


@cache
def shipped() -> dict[str, Config]:
    """The shipped configs, small, one of each set of equal steps."""
    shipped_configs: dict[str, tuple[str, Config]] = {}
    for path in tracked("config/*.yaml"):
        for name in yaml_files.read_file(str(path)):
            labeled = configs.load(str(path), name, ALL_SIZES).is_classification
            config = configs.load(str(path), name, ALL_SIZES if labeled else {**ALL_SIZES, **SMALL})
            if config.optimizer.name in ON_DEVICE:
                shipped_configs.setdefault(repr([getattr(config, key) for key in KEYS]), (name, config))
    return dict(shipped_configs.values())


AVERAGE = {"ema_decay": 0.999}
# One setting at a time, of the fused step in bfloat16 or of the plain one.
SETTINGS: dict[str, tuple[str, Mapping[str, Any]]] = {
    **{f"optimizer {name}": ("bs64_fast", {"optimizer.name": name}) for name in ON_DEVICE},
    "optimizer soap without an average": ("bs64_fast", {"ema_decay": None}),
    **{f"loss {name}": ("base", {"loss": name}) for name, loss in LOSSES.items() if not loss.is_classification},
    "density term and channel weights": ("base", {"lambda_rho": 0.1, "channel_weights": [1, 2, 2, 2, 1]}),
    **{f"norm {name}": ("base", {"network.norm": name}) for name in ("batch", "sync_batch", "ghost(2)", "group")},
    "float16": ("base", {"enable_amp": True, "precision": "float16", "clip_grad_norm": 0.1}),
    "float16 with SOAP": ("bs64_fast", {"precision": "float16"}),
    "micro-batches": ("bs64_opt", {"accumulation_steps": 2, "log_noise_scale": True, "clip_grad_norm": 0.1, **AVERAGE}),
    "tail": ("bs64_opt", {"fused_tail": True, **AVERAGE}),
    "own convolutions": ("bs64_opt", {"fused_tail": True, "network.width": strided.BLOCK}),
}


def train(config: Config, recorded: bool) -> None:
    """Two steps, the first of which creates the optimizer's state; and what an integrity check computes."""
    trace = WaitingTrace()
    with fake_gpu(trace):
        model, world = build.network_with_loss(config), World(Launch("test"), CPU)
        if config.channels_last:
            model.network.to(memory_format=torch.channels_last_3d)
        optimizer = build_optimizer(config.optimizer, model.network.named_parameters(), 0.1, capturable=recorded)
        step = EagerStep(model, optimizer, config, world)
        parts = (torch.zeros_like(part, device=CPU) for part in meta_batch(config, config.local_batch_size or 0))
        batch = Batch(*parts) if config.is_classification else batch_of(config)
        with trace:
            for _ in range(2):
                # A graph step sets the learning rate on the device, and records the rest.
                step._train(batch) if recorded else step(batch, 0.1)
            assert step.replay(batch).shape == (2,)
            assert digest(step.replicated()).shape == ()


@pytest.mark.parametrize("recorded", [False, True], ids=["eager", "recorded"])
@pytest.mark.parametrize("name", ["shipped configs", *SETTINGS])
def test_a_step_does_not_wait(name: str, recorded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(soap, "is_recorded", lambda: recorded)
    monkeypatch.setattr(strided, "unavailable", lambda device: "")
    if name in SETTINGS:
        base, changes = SETTINGS[name]
        train(configs.load(str(FOLDER / "UNet.yaml"), base, {**ALL_SIZES, **SMALL, **changes}).for_world(1), recorded)
        return
    for name, config in shipped().items():
        print(name)  # shown after a failure
        train(config.for_world(1), recorded)


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
    trace = WaitingTrace()
    for context in (contextlib.nullcontext(), fake_gpu(trace)):
        with pytest.raises(HostWaits), context, trace:
            WAITS[name](torch.ones(3, 3))
    with WaitingTrace():
        torch.ones(3)[torch.tensor([1, 0])]
