"""TF32 and cuDNN's algorithm search follow the config and are logged; options without effect are logged."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from small_steps import world_on
from torch.torch_version import TorchVersion

from utils.config import Config
from utils.config.sections import NetworkConfig
from utils.errors import UserError
from utils.steps import build
from utils.steps.backends import log_backends, set_backends

cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def logged(caplog: Any, config: Config, device: torch.device = CUDA) -> list[str]:
    caplog.clear()
    with caplog.at_level("INFO"):
        log_backends(config, world_on(device.type))
    return caplog.messages


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = cudnn.allow_tf32, matmul.allow_tf32
    yield
    cudnn.allow_tf32, matmul.allow_tf32 = before
    cudnn.benchmark = False
    torch.use_deterministic_algorithms(False)


def test_backends_follow_the_config_unless_the_drivers_variable_overrides_it(monkeypatch: Any, caplog: Any) -> None:
    for tf32, search, line in (
        (True, False, "search off; float32 convolutions: TF32"),
        (False, True, "search on; float32 convolutions: IEEE"),
    ):
        config = Config(tf32=tf32, cudnn_benchmark=search)
        set_backends(config, CUDA)
        assert cudnn.benchmark == search
        assert cudnn.allow_tf32 is matmul.allow_tf32 is tf32
        assert logged(caplog, config)[0].endswith(line)
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    assert logged(caplog, Config())[0].endswith("float32 convolutions: IEEE (NVIDIA_TF32_OVERRIDE=0)")
    assert logged(caplog, Config(), CPU) == []


def test_a_cudnn_with_faulty_convolutions_is_refused_or_logged(monkeypatch: Any, caplog: Any) -> None:
    """cuDNN 9.8 to 9.14 without channels-last, which PyTorch 2.8 uses and PyTorch 2.9 avoids by a slow path."""
    for version, warns in ((90701, False), (90800, True), (91499, True), (91500, False)):
        monkeypatch.setattr(cudnn, "version", lambda version=version: version)
        assert (f"cuDNN {version}, 3D" in "".join(logged(caplog, Config(enable_amp=True))[1:])) is warns
        assert len(logged(caplog, Config())) == len(logged(caplog, Config(enable_amp=True, channels_last=True))) == 1
        for release in ("2.8.0+cu128", "2.9.0a0+50eac811a6.nv25.09", "2.9.0+cu130"):
            monkeypatch.setattr(torch, "__version__", TorchVersion(release))
            refused = warns and release != "2.9.0+cu130"
            with pytest.raises(UserError, match="may be wrong unless ch") if refused else contextlib.nullcontext():
                build.check(Config(enable_amp=True), world_on("cuda"))
            build.check(Config(enable_amp=True), world_on("cpu"))
            build.check(Config(enable_amp=True, channels_last=True), world_on("cuda"))


def test_a_faulty_nccl_is_logged(monkeypatch: Any, caplog: Any) -> None:
    for version, warns in (((2, 28, 2), False), ((2, 28, 3), True), ((2, 28, 8), True), ((2, 28, 9), False)):
        monkeypatch.setattr(torch.cuda.nccl, "version", lambda version=version: version)
        with caplog.at_level("INFO"):
            log_backends(Config(), world_on("cuda", 2))
        assert (f"NCCL 2.28.{version[-1]} may hang" in caplog.text) is warns
        assert len(logged(caplog, Config())) == 1


def test_deterministic_training_on_a_gpu_excludes_all_other_algorithms(monkeypatch: Any, caplog: Any) -> None:
    """And a later training in the same process is not affected."""
    for variable in ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO"):
        monkeypatch.setenv(variable, "")  # restored as it was at the end
        monkeypatch.delenv(variable)
    config = Config(deterministic=True)
    set_backends(config, CUDA)
    assert logged(caplog, config)[0].endswith("search off; float32 convolutions: TF32; deterministic algorithms")
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with pytest.raises(UserError, match=r"^deterministic needs CUBLAS_WORKSPACE_CONFIG :4096:8 or :16:8, not :0:0"):
        set_backends(config, CUDA)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert os.environ["NCCL_ALGO"] == "Ring"
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    with pytest.raises(UserError, match=r"^deterministic needs NCCL_ALGO Ring, not Tree; unset it"):
        set_backends(config, CUDA)
    for settings, device in ((Config(), CUDA), (config, CPU)):
        set_backends(settings, device)
        assert not torch.are_deterministic_algorithms_enabled()


def test_options_without_effect_are_logged() -> None:
    for changes, ranks, options in (
        ({"integrity": {"every": 1}, "noddp": True}, 2, ["integrity"]),
        ({"lr_schedule": {"warmup_epochs": 1.0}}, 1, ["lr_schedule's warm-up"]),
        ({"profile": {"profiler": "torch"}}, 1, ["the section profile (--profiler)"]),
        ({"enable_apex": True, "enable_fused": True}, 1, ["enable_apex", "enable_fused"]),
        ({"enable_amp": True, "precision": "float16"}, 1, ["float16 is very slow on a CPU; bfloat16, the"]),
    ):
        lines = build.options_without_effect(Config(**changes), world_on(size=ranks))
        assert [line.split(" has no effect")[0][:44] for line in lines] == options


@pytest.mark.gpu
def test_convolutions_use_tf32_only_if_it_is_enabled() -> None:
    """Measured by rounding errors: some versions of PyTorch and cuDNN used float32 although TF32 was enabled."""
    generator = torch.Generator().manual_seed(0)
    layer = torch.nn.Conv3d(64, 64, 4, stride=2, padding=1, bias=False)
    fields = torch.randn(2, 64, 16, 16, 16, generator=generator)
    exact = layer.double()(fields.double())
    layer.float().to(CUDA)
    errors = []
    for tf32 in (True, False):
        set_backends(Config(tf32=tf32), CUDA)
        result = layer(fields.to(CUDA)).double().cpu()
        errors.append(float((result - exact).norm() / exact.norm()))
    assert errors[0] > 5e-5 > errors[1]


def test_synchronized_batch_norm_of_several_ranks_needs_gpus() -> None:
    config = Config(network=NetworkConfig(norm="sync_batch"))
    for size, device in ((1, CPU), (2, CUDA)):
        build.check(config, world_on(device.type, size))
    with pytest.raises(UserError, match=r"sync_batch needs GPUs.*use ghost\(n\)"):
        build.check(config, world_on(size=2))
