"""Which layers own kernels compute is known, logged and checked before the network runs; no kernel runs here."""

from pathlib import Path
from typing import Any

import pytest
import torch
from log_lines import refusal
from small_steps import world_on
from trainings import YAML

import train
from networks import strided
from utils import config as configs
from utils.config import Config
from utils.errors import UserError
from utils.steps import build, convolutions

GPU, CPU = torch.device("cuda"), torch.device("cpu")
NO_GPU = "there is no CUDA device"


@pytest.fixture(autouse=True)
def hopper(monkeypatch: Any) -> None:
    """A GPU on which the kernels would run."""
    monkeypatch.setattr(strided, "unavailable", lambda device: "" if device.type == "cuda" else NO_GPU)


def config_of(name: str = "bs64_opt", **changes: Any) -> Config:
    keys = {key.replace("__", "."): value for key, value in changes.items()}
    return configs.load(YAML, name, keys).for_world(1)


DOWN, UP = ", ".join(f"down{scale}" for scale in range(1, 7)), ", ".join(f"up{scale}" for scale in range(6, 1, -1))


def described(**changes: Any) -> str:
    return convolutions.describe(build.convolution_plan(config_of(**changes), GPU))


def test_the_log_names_what_computes_each_layer_and_why() -> None:
    all_layers = f"{DOWN}, {UP}, last"
    assert described() == described(convolutions="own") == f"{all_layers} by own kernels"
    for changes, reason in (
        ({"convolutions": "cudnn"}, "convolutions is cudnn"),
        ({"enable_amp": False}, "enable_amp is false"),
        ({"channels_last": False}, "channels_last is false"),
    ):
        assert described(**changes) == f"{all_layers} by cuDNN ({reason})"
    assert described(data_size=96, network__scales=1) == "down1, last by own kernels"
    sides = "; ".join(
        f"down{scale}, up{scale} by cuDNN (a side of {96 // 2**scale} cells is not a power of two up to 64)"
        for scale in (2, 3)
    )
    assert described(data_size=96, network__scales=3) == f"down1, last by own kernels; {sides}"


def test_classifiers_and_networks_without_such_layers_have_no_plan() -> None:
    classifier = configs.load(YAML.replace("UNet", "classification"), "mnist_cnn").for_world(1)
    for device in (CPU, GPU):
        assert build.convolution_plan(classifier, device) == {}
        with pytest.raises(UserError, match="own, but mnist_cnn has no layers for own kernels; set convolutions=auto"):
            build.check(classifier.model_copy(update={"convolutions": "own"}), world_on(device.type))


def test_required_kernels_that_cannot_compute_a_layer_are_an_error_before_data_are_read() -> None:
    for device, changes, says in (
        (CPU, {}, rf"^convolutions is own, but own kernels cannot compute down1: {NO_GPU}; set convolutions=auto$"),
        (GPU, {"enable_amp": False}, "cannot compute down1: enable_amp is false; set "),
        (GPU, {"network__width": 48}, "cannot compute down1: 48 channels are not a multiple of 64; set "),
    ):
        config = config_of(convolutions="own", **changes)
        with pytest.raises(UserError, match=says):
            build.check(config, world_on(device.type))
        build.check(config.model_copy(update={"convolutions": "auto"}), world_on(device.type))
    build.check(config_of(convolutions="own"), world_on("cuda"))


@pytest.mark.parametrize("more", [[], ["--enable_benchy"], ["--preflight"]])
def test_a_run_that_requires_kernels_which_cannot_run_ends_with_one_line(
    more: list[str], data_flags: list[str], tmp_path: Path, capsys: Any
) -> None:
    """A training leaves no run directory."""
    flags = ["--config=test", *data_flags, f"--set=expdir={tmp_path / 'runs'}", "--set=convolutions=own", *more]
    flags += ["--set=enable_amp=true", "--set=channels_last=true"]
    line = f"convolutions is own, but own kernels cannot compute down1: {NO_GPU}; set convolutions=auto"
    assert line in refusal(train.main, flags, capsys)
    assert not (tmp_path / "runs").exists()


def test_layers_of_the_network_have_the_value_of_the_config() -> None:
    for value in ("auto", "cudnn", "own"):
        network = build.network(config_of("test", convolutions=value))
        assert {layer.convolutions for layer in network.modules() if hasattr(layer, "plans_own")} == {value}
        build.check_output(config_of("test", convolutions=value))


def test_records_name_the_layers_that_differ() -> None:
    now = build.convolution_plan(config_of(network__scales=4, data_size=64), GPU)
    assert [*now] == ["down1", "down2", "down3", "down4", "up4", "up3", "up2", "last"]
    before = build.convolution_plan(config_of(network__scales=4, data_size=64), CPU)
    assert {*before.values()} == {f"PyTorch ({NO_GPU})"}
    assert convolutions.changes(now, now) == convolutions.changes({}, now) == []
    assert convolutions.changes({**before, "last": "PyTorch (of another reason)"}, before) == []
    (line,) = convolutions.changes({**now, "down1": "cuDNN (why)", "up3": "PyTorch (why)", "other": "own kernels"}, now)
    assert line.endswith(": down1 by cuDNN before, by own kernels now; up3 by PyTorch before, by own kernels now")
