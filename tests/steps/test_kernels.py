"""Kernels are compiled before the first step: which ones, in parallel, and into a cache that can be written."""

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_steps import ALONE
from triton_interpreter import import_kernels_again

from networks import fused, strided
from utils.config import Config
from utils.config.sections import NetworkConfig
from utils.distributed import devices
from utils.steps import kernels

OPTIONS: dict[str, Any] = {"enable_amp": True, "channels_last": True, "fused_pointwise": True, "fused_tail": "auto"}


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
    monkeypatch.setattr(strided, "unavailable", lambda device: "")
    import_kernels_again()
    monkeypatch.setattr(driver, "_active", stand_in)
    yield tmp_path / "cache"
    import_kernels_again()


def config(**changes: Any) -> Config:
    network = NetworkConfig(width=64, scales=2, space_to_depth=["down1", "last"])
    return Config(data_size=8, network=network, **{**OPTIONS, "local_batch_size": 2, **changes})


@pytest.mark.slow
def test_all_kernels_of_a_step_are_compiled_once(hopper: Path) -> None:
    random = torch.get_rng_state()
    launches = kernels.launches(config(), torch.device("cpu"))
    names = {kernel.__name__ for kernel, *_ in launches}
    assert names >= {"gather", "scatter", "weight_gradient", "blocks_to_rows", "rows_to_blocks", "activation_backward"}
    assert "l1" not in names
    assert torch.equal(torch.get_rng_state(), random)
    kernels.in_parallel(launches)
    compiled = sorted(hopper.rglob("*.cubin"))
    assert {path.stem for path in compiled} == names
    before = [path.stat().st_mtime_ns for path in compiled]
    import_kernels_again()
    kernels.in_parallel(kernels.launches(config(), torch.device("cpu")))
    assert [path.stat().st_mtime_ns for path in sorted(hopper.rglob("*.cubin"))] == before


def test_a_network_without_kernels_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strided, "unavailable", lambda device: "none")
    assert (
        kernels.launches(config(enable_amp=False, fused_pointwise=False, fused_tail=False), torch.device("cpu")) == []
    )
    assert fused._dry_run is None


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


def test_a_cpu_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "launches", pytest.fail)
    kernels.compile_kernels(config(), ALONE)
