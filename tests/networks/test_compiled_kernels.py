"""The fused kernels compiled for GPUs: registers, spills, rounding and atomic operations."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from triton_compile import ARCHITECTURES, compile_launches


def fields(channels: int, dtype: torch.dtype = torch.bfloat16, side: int = 64) -> torch.Tensor:
    x = torch.empty((2, channels, *[side] * 3), dtype=dtype, device="meta")
    return x.contiguous(memory_format=torch.channels_last_3d).requires_grad_()


@ARCHITECTURES
def test_registers(architecture: int, monkeypatch: Any, tmp_path: Path) -> None:
    """At most 64 per thread, for 32 warps per multiprocessor; more would leave too few loads in flight.

    Triton 3.6 needed 230 for the tanh of 5 channels with tiles as large as those of the other layers.
    """
    pytest.importorskip("triton")
    from networks.ops.l1 import l1, l1_of_blocks
    from networks.ops.pointwise import activation_gradient, bias_activation, bias_activation_twice, bias_relu_cat

    compiled = compile_launches(monkeypatch, tmp_path, architecture, products=False)
    few, some, many = (torch.empty(channels, device="meta") for channels in (5, 64, 512))
    bias_relu_cat(fields(64), some, fields(64))
    activation_gradient(fields(64), [fields(64)], "relu", 64, pads=True)
    twice = bias_activation_twice(fields(512, side=8), many, "leaky_relu")
    torch.autograd.backward(twice, [*map(torch.empty_like, twice)])
    bias_activation(fields(5, torch.float32), few, "tanh").mean().backward()
    l1(fields(8), fields(8, torch.float32).detach()).backward()
    l1_of_blocks(fields(40, torch.float16, 33).detach(), few, fields(5, torch.float32).detach(), torch.bfloat16)
    rounding = [name for name, *_, result in compiled if re.search(r"cvt\.rn\.bf16", result.ptx)]
    wide = [name for name, *_, result in compiled if re.search(r"ld\.global\S*\.v[24]\.", result.ptx)]
    passes = ["bias_activation_forward", "bias_activation_backward"]
    assert [name for name, *_ in compiled] == [*passes * 3, "l1_forward", "l1_backward", "blocks_l1"]
    assert [(name, result.registers) for name, *_, result in compiled if result.registers > 64] == []
    assert rounding == [*passes * 2, "l1_backward", "blocks_l1"], "a cast to bfloat16 must round to nearest"
    assert wide == [*passes * 2, "l1_forward", "l1_backward", "blocks_l1"], "loads must be wide"
