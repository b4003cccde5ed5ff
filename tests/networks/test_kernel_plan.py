"""The plan of what computes each layer: its reasons, its log line and records, and the kernels that follow from it.

No kernel runs here. tests/networks/launches.json has the launches of one step of each shipped config by the code of the
commit it names, with later kernels and options.
"""

import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_steps import world_on
from trainings import YAML

from networks import build_loss
from networks.layers import Last
from networks.ops import plan
from networks.ops.hopper import tiles
from networks.ops.launch import Launch
from networks.unet import UNet
from utils import config as configs
from utils.config import Config
from utils.config.yaml_files import read_file
from utils.steps import build, kernels

GPU, CPU = torch.device("cuda"), torch.device("cpu")
NOT_HOPPER = plan.not_hopper
OLD = "NVIDIA A100 is not a Hopper GPU or a later one for data centers"
LAUNCHES = json.loads((Path(__file__).parent / "launches.json").read_text())
DOWN, UP = ", ".join(f"down{scale}" for scale in range(1, 7)), ", ".join(f"up{scale}" for scale in range(6, 1, -1))


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU on which all kernels would run."""
    pytest.importorskip("triton")
    monkeypatch.setattr(plan, "not_hopper", lambda device: "")


def config_of(name: str = "bs64_opt", **changes: Any) -> Config:
    keys = {key.replace("__", "."): value for key, value in changes.items()}
    return configs.load(YAML, name, keys).for_world(1)


def described(device: torch.device = GPU, **changes: Any) -> str:
    return plan.describe(build.kernel_plan(config_of(**changes), device))


THIN, NORMS = {"network__scales": 1, "network__width": 48}, {"network__scales": 2, "network__norm": "batch"}
ODD, SIDE = {"network__scales": 2, "data_size": 96}, "a side of 24 cells is not a power of two up to 64"
BFLOAT16 = "the last layer computes it in bfloat16 only"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "{all} by hopper; loss by last"),
        ({"network__adds_vectors": True}, "{all} by hopper; loss by last"),
        ({"kernels": "cudnn"}, "{all} by cudnn (kernels is cudnn); loss by last"),
        ({"kernels": "torch"}, "{all}, loss by torch (kernels is torch)"),
        ({"enable_jit": True}, "{all}, loss by torch (enable_jit is true)"),
        ({"channels_last": False}, "{all}, loss by torch (channels_last is false)"),
        ({"loss": "mse"}, "{all} by hopper; loss by torch (the loss is MSELoss)"),
        ({"lambda_rho": 0.1}, "{all} by hopper; loss by torch (lambda_rho is 0.1, not 0)"),
        ({"channel_weights": [1, 2, 1, 1, 1]}, "{all} by hopper; loss by torch (channel_weights are set)"),
        ({"precision": "float16"}, "{all} by hopper; loss by torch ({no})"),
        ({"enable_amp": False}, "{all} by cudnn (the precision is not float16 or bfloat16); loss by torch ({no})"),
        (THIN, "down1, last by cudnn (48 channels are not a multiple of 64); loss by last"),
        (NORMS, "down1, down2, up2 by torch (a norm follows); last by hopper; loss by last"),
        (ODD, "down1, last by hopper; down2, up2 by cudnn ({odd}); loss by last"),
    ],
    ids=str,
)
def test_the_log_names_what_computes_each_layer_and_why(changes: dict[str, Any], says: str) -> None:
    assert described(**changes) == says.format(all=f"{DOWN}, {UP}, last", no=BFLOAT16, odd=SIDE)


class Doubled(UNet):
    def forward(self, *inputs: Any) -> torch.Tensor:
        return 2 * super().forward(*inputs)


class Own(torch.nn.Module):
    """Its layers have the names of the U-Net's, but it does not compute a loss."""

    before_last = UNet.before_last

    def __init__(self) -> None:
        super().__init__()
        self.last = Last(128, 5, halvings=0)


@pytest.mark.parametrize(("kind", "operation"), [(UNet, plan.LAST), (Doubled, plan.TORCH), (Own, plan.TORCH)])
def test_only_a_network_with_an_l1_of_its_own_is_asked_for_the_loss(kind: Any, operation: str) -> None:
    """Fixed: a network without one was asked for it, if it had a method `before_last`."""
    with torch.device("meta"):
        network, loss = kind(), build_loss("l1")
    made = plan.make(network, plan.Setting("auto", 64, torch.bfloat16, GPU), loss)
    assert made[plan.LOSS].operation == operation


def test_other_devices_and_a_missing_triton_have_their_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = f"{DOWN}, {UP}, last"
    assert described(CPU) == f"{layers}, loss by torch (there is no CUDA device)"
    monkeypatch.setattr(plan, "not_hopper", lambda device: OLD)
    assert described() == f"{layers} by cudnn ({OLD}); loss by last"
    monkeypatch.setattr(plan.importlib.util, "find_spec", lambda name: None)
    assert described() == f"{layers}, loss by torch (Triton is not installed)"


def test_triton_3_4_whose_cache_key_recurses_gets_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "not_hopper", NOT_HOPPER)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    properties = SimpleNamespace(major=9, name="NVIDIA H100", shared_memory_per_block_optin=tiles.SHARED_MEMORY)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    for version, chosen in (("3.4.0+git1", "cudnn (Triton 3.4.0+git1 is older than 3.5)"), ("3.10.0", "hopper")):
        monkeypatch.setattr("triton.__version__", version)
        assert described() == f"{DOWN}, {UP}, last by {chosen}; loss by last"


def test_a_run_logs_its_plan_on_a_gpu_only(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(build, "log_backends", lambda *_: None)
    caplog.set_level("INFO")
    classifier = configs.load(YAML.replace("UNet", "classification"), "mnist_cnn").for_world(1)
    assert build.kernel_plan(classifier, GPU) == {}
    for config, device in ((config_of(), "cpu"), (classifier, "cuda"), (config_of(network__scales=1), "cuda")):
        build.log_settings(config, world_on(device))
    assert [text for text in caplog.messages if "Kernels" in text] == ["Kernels: down1, last by hopper; loss by last"]
    caplog.clear()
    build.log_settings(config_of(enable_jit=True), world_on("cuda"))
    assert "kernels auto has no effect: torch.compile (--enable_jit) compiles PyTorch's operations" in caplog.messages


def test_records_name_the_layers_that_differ() -> None:
    now = build.kernel_plan(config_of(network__scales=2), GPU)
    before = build.kernel_plan(config_of(network__scales=2), CPU)
    assert plan.changes(now, now) == plan.changes({}, now) == []
    assert plan.changes({**before, "last": "torch (another reason)"}, before) == []
    (line,) = plan.changes({**now, "down1": "cudnn (reason)", "loss": "torch (reason)", "other": "hopper"}, now)
    assert line.endswith(": down1: cudnn before, hopper now; loss: torch before, last now")


def test_every_shipped_config_has_launches() -> None:
    """The loss of forest needs files; without channels_last, its network has none but PyTorch's."""
    names = {step.split()[0] for steps in LAUNCHES["steps"].values() for step in steps}
    assert names == set(read_file(YAML)) - {"forest"}


def text_of(launch: Launch) -> str:
    options = {key: value for key, value in launch.options.items() if key != "enable_fp_fusion"}
    return " ".join([launch.kernel.__name__, *(f"{key}={value}" for key, value in sorted(options.items()))])


@pytest.mark.parametrize("capability", LAUNCHES["steps"])
def test_the_launches_of_a_step_are_those_of_the_code_before(capability: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "not_hopper", lambda device: "" if capability == "9.0" else OLD)
    monkeypatch.setattr(Launch, "signature", lambda launch: id(launch))  # equal launches are kept
    for name, index in LAUNCHES["steps"][capability].items():
        label, *changes = name.split()
        config = config_of(label, **dict(change.split("=") for change in changes))
        build_model = functools.partial(build.network_with_loss, config)
        made = kernels.launches(config, kernels.setting(config, GPU), build_model)
        assert [text_of(launch) for launch in made] == [
            LAUNCHES["launches"][number] for number in LAUNCHES["lists"][index]
        ], name
