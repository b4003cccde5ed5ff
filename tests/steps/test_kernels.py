"""Kernels are compiled before the first step, into a writable cache; interpreted steps with them equal plain ones."""

import functools
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from processes import run_ranks
from small_steps import ALONE, flat_parameters, make_step
from triton_interpreter import kernel_modules, replace_launch, small_kernels, use_small_blocks

from networks import build_loss, build_network, initialize
from networks.ops import plan
from networks.ops.launch import Launch
from utils.config import Config
from utils.config.sections import NetworkConfig
from utils.data.loaders import Batch
from utils.distributed import devices
from utils.distributed.world import World
from utils.steps import build, kernels


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Triton compiles for an H100, without one, into an empty cache; its directory."""
    pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    target = GPUTarget("cuda", 90, 32)
    stand_in = SimpleNamespace(
        get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda device: 0
    )
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(plan, "not_hopper", lambda device: "")
    monkeypatch.setattr(driver, "_active", stand_in)
    forget_compiled()
    yield tmp_path / "cache"
    forget_compiled()


def forget_compiled() -> None:
    """Kernels that this process has compiled are read from the cache again."""
    for module in kernel_modules():
        for kernel in vars(module).values():
            getattr(kernel, "device_caches", {}).clear()


def config(width: int = 64, **changes: Any) -> Config:
    options = {"enable_amp": True, "channels_last": True, "local_batch_size": 2, "data_size": 8}
    return Config(network=NetworkConfig(width=width, scales=2), **{**options, **changes})


def launches(**changes: Any) -> list[Launch]:
    settings = config(**changes)
    chosen = kernels.setting(settings, torch.device("cuda"))
    return kernels.launches(settings, chosen, lambda: build.network_with_loss(settings))


@pytest.mark.slow
def test_all_kernels_of_a_step_are_compiled_once(hopper: Path) -> None:
    random = torch.get_rng_state()
    needed = launches()
    names = {launch.kernel.__name__ for launch in needed}
    assert names >= {"strided_convolution", "transposed_convolution", "rows_to_blocks", "bias_activation_backward"}
    assert torch.equal(torch.get_rng_state(), random)
    kernels.in_parallel(needed)
    compiled = sorted(hopper.rglob("*.cubin"))
    assert {path.stem for path in compiled} == names
    before = [path.stat().st_mtime_ns for path in compiled]
    forget_compiled()
    kernels.in_parallel(launches())
    assert [path.stat().st_mtime_ns for path in sorted(hopper.rglob("*.cubin"))] == before


def test_a_cache_that_cannot_be_written_is_replaced(monkeypatch: Any, tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with caplog.at_level(logging.WARNING):
        devices.use_writable_cache()
    assert devices.cache_directory().is_dir()
    assert str(tmp_path) in caplog.text
    devices.cache_directory().rmdir()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "new"))
    devices.use_writable_cache()
    assert devices.cache_directory() == tmp_path / "new"


def compiled(world: World, fault: str = "", rank: int = 0) -> tuple[str, dict[str, Any]]:
    """The plan after kernels are compiled, and the strides of the weights, if one kernel has a fault on a rank.

    The interpreter takes the place of the GPU, and a function that of the compiler; it raises on unknown options.
    """
    settings, broken = config(width=16, precision="float16"), "transposed_convolution" if world.rank == rank else ""

    def compile_one(kernel: Any, *arguments: Any, grid: Any, num_warps: int, **options: Any) -> None:
        if {*options} - {*kernel.arg_names} - {"num_stages", "enable_fp_fusion", "maxnreg"}:
            raise TypeError(f"unknown options {options}")
        if fault == "compilation" and kernel.fn.__name__ == broken:
            raise RuntimeError("ptxas failed")

    def run(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
        launch(kernel, programs, *arguments, **constants)
        if fault == "result" and kernel.fn.__name__ == broken:
            arguments[2].zero_()

    with pytest.MonkeyPatch.context() as patch, small_kernels(patch):
        use_small_blocks(patch)
        launch = replace_launch(patch, run)
        patch.setattr("triton.runtime.interpreter.InterpretedFunction.warmup", compile_one, raising=False)
        patch.setattr(
            plan, "needs_no_kernels", lambda setting: "kernels is torch" if setting.kernels == "torch" else ""
        )
        patch.setattr(plan, "fault", "")
        patch.setattr(plan, "not_hopper", lambda _: "an A100" if fault == "A100" and broken else "")
        patch.setattr(kernels, "TRIAL_SIDE", 8)
        step = build.step(settings, world, build.network_with_loss(settings))
        chosen = plan.describe(build.kernel_plan(settings, world.device))
    return chosen.partition("; ")[0], {name: x.stride() for name, x in step.network.state_dict().items()}


def test_cudnn_replaces_hopper_kernels_that_fail(caplog: Any) -> None:
    """The weights have the same layout."""
    chosen, usual = compiled(ALONE)
    assert (chosen, caplog.messages) == ("down1, down2, up2, last by hopper", [])
    for fault, text in (("compilation", "RuntimeError: ptxas failed"), ("result", "differ from PyTorch's by 100 %")):
        chosen, layout = compiled(ALONE, fault)
        assert chosen.startswith("down1, down2, up2, last by cudnn (rank 0: ")
        assert [text in line for line in caplog.messages] == [True]
        assert layout == usual
        caplog.clear()


def test_ranks_with_other_gpus_make_the_same_collectives() -> None:
    """Fixed: a rank without Hopper's kernels missed an exchange, and took the next message for a fault."""
    (first, _), (second, _) = run_ranks(functools.partial(compiled, fault="A100", rank=1), 2)
    assert (first, second) == ("down1, down2, up2, last by hopper", "down1, down2, up2, last by cudnn (an A100)")


def test_hopper_kernels_that_fail_on_one_rank_are_replaced_on_all() -> None:
    (first, _), (second, _) = run_ranks(functools.partial(compiled, fault="compilation", rank=1), 2)
    assert first == second == "down1, down2, up2, last by cudnn (rank 1: RuntimeError: ptxas failed)"


BATCH, LR = 4, 0.1
OPTIONS: list[dict[str, Any]] = [{}, {"ddp": "manual", "accumulation_steps": 2}]


def train(world: World, kernels: str, dtype: str = "float16", **options: Any) -> tuple[float, np.ndarray]:
    """The loss of one step, each rank on its part of the batch, and the change of the parameters."""
    network, loss = build_network("unet", crop=8, width=16, scales=2), build_loss("l1")
    initialize(network, torch.Generator().manual_seed(0), scale=0.1)
    network.to(memory_format=torch.channels_last_3d)
    setting = plan.Setting(kernels, 8, getattr(torch, dtype), torch.device("cuda"))
    plan.apply(network, plan.make(network, setting, loss), setting.dtype, loss)
    half = {"enable_amp": True, "channels_last": True, "precision": dtype} if dtype != "float32" else {}
    step = make_step(world=world, network=network, loss=loss, bucket_cap_mb=0.01, **half, **options)
    generator, before = torch.Generator().manual_seed(1), flat_parameters(step).clone()
    inputs, targets = (torch.rand(BATCH, channels, 8, 8, 8, generator=generator) - 0.5 for channels in (4, 5))
    parts = (x[world.rank :: world.size].contiguous(memory_format=torch.channels_last_3d) for x in (inputs, targets))
    return float(step(Batch(*parts), LR)), (flat_parameters(step) - before).numpy()


def train_all(world: World, kinds: list[dict[str, Any]] = OPTIONS) -> list[tuple[float, np.ndarray]]:
    with pytest.MonkeyPatch.context() as patch, small_kernels(patch):
        use_small_blocks(patch)
        return [train(world, "auto", **options) for options in kinds]


def distance(first: np.ndarray, second: np.ndarray) -> float:
    return float(np.linalg.norm(first - second) / np.linalg.norm(second))


def test_a_step_with_own_kernels_equals_the_plain_one() -> None:
    """Alone with micro-batches, and on two ranks with either exchange, whose ranks end with the same bits."""
    exact_loss, exact = train(ALONE, "torch", "float32")
    error = distance(train(ALONE, "torch")[1], exact)
    results = train_all(ALONE, OPTIONS[1:])
    for (first_loss, first), (second_loss, second) in zip(*run_ranks(train_all, 2), strict=True):
        assert np.array_equal(first, second)
        results.append(((first_loss + second_loss) / 2, first))
    for loss, change in results:
        assert loss == pytest.approx(exact_loss, rel=1e-4)
        assert distance(change, exact) < 2 * error
