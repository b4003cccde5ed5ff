"""The kernel that updates with Adam and averages the weights, compared with torch's fused Adam and the average.

The kernel runs in Triton's interpreter. The last test compiles it for GPUs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_steps import LR, batch, differing, make_step, snapshot, weights
from torch import nn
from triton_compile import ARCHITECTURES, compile_kernel
from triton_interpreter import interpreted

from utils import optim
from utils.optim import adam_average
from utils.optim.adam_average import update_and_average
from utils.optim.ema import EMA

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
INTERPRETED = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns of divisions in unused lanes
DECAY = 0.9
KINDS: dict[str, type[torch.optim.Adam]] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


def import_kernel_again() -> None:
    """Triton decides whether to compile or to interpret a kernel when the module is imported."""
    adam_average._kernel.cache_clear()
    if sys.modules.pop("utils.optim.adam_kernel", None) is not None:
        del optim.adam_kernel  # type: ignore[attr-defined]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=on_gpu)])
def launched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.Tensor]]:
    """The parameters for which the kernel was launched. On the CPU it is interpreted."""
    seen: list[torch.Tensor] = []
    launch = adam_average._launch

    def record(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
        seen.append(arguments[0])
        launch(kernel, programs, *arguments, **constants)

    monkeypatch.setattr(adam_average, "_launch", record)
    pytest.importorskip("triton")
    if request.param == "cuda":
        import_kernel_again()
        yield seen
        return
    with interpreted(monkeypatch):
        import_kernel_again()
        yield seen
    import_kernel_again()


@pytest.fixture
def device(launched: list[torch.Tensor], request: pytest.FixtureRequest) -> str:
    return request.node.callspec.params["launched"]


class Training:
    """A layer with an optimizer and an average, and random gradients."""

    def __init__(self, kind: str, device: str, lr: float | torch.Tensor, betas: tuple[float, float]) -> None:
        torch.manual_seed(0)
        self.layer: nn.Module = nn.Conv3d(6, 10, 3).to(device)  # two blocks of the kernel
        self.layer.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
        settings = {"betas": betas, "weight_decay": 0.1, "capturable": isinstance(lr, torch.Tensor)}
        self.optimizer = KINDS[kind](self.layer.parameters(), lr=lr, fused=True, **settings)
        self.average = EMA(self.layer, DECAY)

    def step(self, number: int, finite: bool, strided: bool = False) -> None:
        """`strided`: gradients are not in the memory format of the weights."""
        generator = torch.Generator().manual_seed(number)
        for parameter in self.layer.parameters():
            gradient = torch.randn(parameter.shape, generator=generator).to(parameter.device)
            gradient = gradient if finite else gradient * torch.nan
            parameter.grad = gradient if strided else torch.empty_like(parameter).copy_(gradient)
        update_and_average(self.optimizer, self.average, torch.tensor(finite, device=parameter.device))

    def values(self) -> dict[str, torch.Tensor]:
        found = {}
        for name, parameter in self.layer.named_parameters():
            state = self.optimizer.state[parameter]
            found |= {name: parameter.detach(), f"average {name}": self.average.means[parameter]}
            found |= {f"{key} {name}": value for key, value in state.items()}
        return {name: value.clone() for name, value in found.items()} | self.average.state()["average"]["trained"]


@INTERPRETED
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("betas", "capturable"), [((0.9, 0.999), False), ((0.0, 0.95), True)], ids=str)
def test_the_kernel_equals_adam_and_the_average(
    launched: list[torch.Tensor], device: str, monkeypatch, kind: str, betas: tuple[float, float], capturable: bool
) -> None:
    """To rounding, over six steps of which two are skipped; a skipped one changes no bit."""
    lr = torch.tensor(LR, device=device) if capturable else LR
    plain, fused = (Training(kind, device, lr, betas) for _ in range(2))
    for number, finite in enumerate([False, True, True, False, True, True]):
        before = fused.values() if number else {}
        with monkeypatch.context() as patch:
            patch.setattr(adam_average, "_on_gpu", lambda tensor: True)
            fused.step(number, finite, strided=number % 2 > 0)
        with monkeypatch.context() as patch:
            patch.setattr(adam_average, "_on_gpu", lambda tensor: False)
            plain.step(number, finite)
        assert finite or not before or differing(fused.values(), before) == []
    assert len(launched) == 12
    expected, got = plain.values(), fused.values()
    assert float(got["step weight"]) == 4
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-6, atol=1e-7, msg=name)
        assert got[name].stride() == value.stride()
    assert int(fused.average.state()["average"]["updates"]) == 4


@INTERPRETED
def test_a_step_with_the_kernel_resumes_bit_for_bit_and_without_it_to_rounding(
    launched: list[torch.Tensor], device: str, monkeypatch, tmp_path: Path
) -> None:
    """The state is that of torch's Adam: a training may resume with or without the kernel."""
    if device == "cuda":
        pytest.skip("the batches are on the CPU")
    monkeypatch.setattr(adam_average, "_on_gpu", lambda tensor: True)
    whole = make_step("adam", ema_decay=DECAY)
    for number in range(2):
        whole(*batch(number), LR)
    torch.save(whole.state(), tmp_path / "state.pt")
    resumed, plain = make_step("adam", ema_decay=DECAY), make_step("adam", ema_decay=DECAY)
    for step in (resumed, plain):
        step.load_state(torch.load(tmp_path / "state.pt", weights_only=True))
    launched.clear()
    for number in range(2, 4):
        assert torch.equal(whole(*batch(number), LR), resumed(*batch(number), LR))
        if number == 2:
            with monkeypatch.context() as patch:
                patch.setattr(adam_average, "_on_gpu", lambda tensor: False)
                plain(*batch(number), LR)
            torch.testing.assert_close(weights(plain), weights(whole), rtol=1e-5, atol=1e-6)
    assert len(launched) == 4 * len(whole._parameters)
    assert differing(snapshot(whole), snapshot(resumed)) == []


def test_other_optimizers_and_other_devices_average_after_the_update(launched: list[torch.Tensor], device: str) -> None:
    if device == "cuda":
        pytest.skip("the batches are on the CPU")
    for optimizer in ("adam", "sgd"):
        step = make_step(optimizer, ema_decay=DECAY)
        step(*batch(), LR)
        assert int(step.state()["average"]["updates"]) == 1
    assert launched == []


@ARCHITECTURES
def test_the_kernel_compiles_for_a_gpu(tmp_path: Path, architecture: int) -> None:
    """Without spills; a thread reads and writes 16 bytes at a time."""
    pytest.importorskip("triton")
    import_kernel_again()
    kernel: Any = adam_average._kernel()
    constants = {"BETA1": 0.9, "BETA2": 0.999, "LOG_BETA1": -0.1, "LOG_BETA2": -0.001, "EPS": 1e-8, "WEIGHT_DECAY": 0.1}
    constants |= {"DECOUPLED": False, "BLOCK": adam_average.BLOCK}
    types = dict.fromkeys(kernel.arg_names, "*fp32") | {"size": "i32"}
    options = {"num_warps": adam_average.WARPS, "enable_fp_fusion": False}
    compiled = compile_kernel(kernel, types, constants, tmp_path, architecture, **options)
    assert compiled.stack == 0
    assert compiled.registers <= 80
    assert "ld.global.v4" in compiled.ptx
    assert "st.global.v4" in compiled.ptx
