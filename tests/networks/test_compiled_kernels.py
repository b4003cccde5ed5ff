"""The fused kernels compiled for GPUs: registers, spills, rounding and atomic operations."""

import re
from pathlib import Path
from typing import Any

import pytest
from triton_compile import ARCHITECTURES, compile_kernel

from networks.ops import launch

FORWARD = {"y": "*bf16", "x": "*bf16", "bias": "*fp32", "skip": "*bf16"}
FORWARD |= {"cells": "i32", "y_stride": "i32"}
BACKWARD = {"x_gradient": "*bf16", "partial": "*fp32", "cells": "i32"}
for operand in ("y", "first", "second"):
    BACKWARD |= {operand: "*bf16", f"{operand}_stride": "i32", f"{operand}_pitch": "i32"}
LOSS = {"partial": "*fp32", "outputs": "*fp32", "targets": "*fp32", "count": "i32"}
LOSS_BACKWARD = {"outputs_gradient": "*bf16", "outputs": "*bf16", "targets": "*fp32"}
LOSS_BACKWARD |= {"gradient": "*fp32", "count": "i64"}
TAIL = {"blocks_gradient": "*bf16", "loss_partial": "*fp32", "bias_partial": "*fp32", "blocks": "*fp16"}
TAIL |= {"bias": "*fp32", "targets": "*fp32", "planes": "i32"}


def in_float32(types: dict[str, str]) -> dict[str, str]:
    return {name: "*fp32" if kind == "*bf16" else kind for name, kind in types.items()}


@ARCHITECTURES
@pytest.mark.parametrize(
    ("name", "types", "channels", "constants"),
    [
        ("bias_activation_forward", FORWARD, 64, {"ACTIVATION": "relu", "SKIP_CHANNELS": 64}),
        ("bias_activation_forward", in_float32(FORWARD), 5, {"ACTIVATION": "tanh", "SKIP_CHANNELS": 0}),
        ("bias_activation_backward", BACKWARD, 512, {"ACTIVATION": "leaky_relu", "TWICE": True}),
        ("bias_activation_backward", BACKWARD, 64, {"ACTIVATION": "relu", "TWICE": False, "SIDE": 64, "PITCH": 65}),
        # Triton 3.6 needed 230 registers for tiles as large as those of the other layers.
        ("bias_activation_backward", in_float32(BACKWARD), 5, {"ACTIVATION": "tanh", "TWICE": False}),
        ("l1_forward", LOSS, 1, {}),
        ("l1_backward", LOSS_BACKWARD, 1, {}),
        ("blocks_l1", TAIL, 5, {"DEPTH": 33, "ROWS": 33, "COLUMNS": 33, "TILE": 512}),
    ],
    ids=["concatenation", "tanh", "skip add", "padded", "tanh backward", "l1", "l1 backward", "tail"],
)
def test_registers(
    name: str, types: dict[str, str], channels: int, constants: dict[str, Any], architecture: int, tmp_path: Path
) -> None:
    """At most 64 per thread, for 32 warps per multiprocessor; more would leave too few loads in flight.

    No kernel uses atomic operations, whose order would vary between runs.
    """
    pytest.importorskip("triton")
    from networks.ops import l1, pointwise

    tile = pointwise._Tile.of(channels)
    defaults = {"CHANNELS": channels, "WIDTH": channels, "LANES": tile.lanes, "ROWS": tile.rows, "TILE": pointwise.TILE}
    constants = {**defaults, "NEGATIVE_SLOPE": pointwise.NEGATIVE_SLOPE, "SIDE": 0, "PITCH": 0, **constants}
    result = compile_kernel(
        getattr(l1, name, None) or getattr(pointwise, name),
        types,
        constants,
        tmp_path,
        architecture,
        unaligned=tuple(name for name in types if name.endswith("pitch") or (channels == 5 and "stride" in name)),
        num_warps=launch.WARPS,
        enable_fp_fusion=False,
    )
    assert (result.registers <= 64, result.stack) == (True, 0), result[:3]
    assert not re.search(r"\b(atom|red)\.(global|relaxed|add)", result.ptx)
    if "*bf16" in types.values() and name != "l1_forward":
        assert re.search(r"cvt\.rn\.bf16", result.ptx), "a cast to bfloat16 must round to nearest"
    if channels % 8 == 0 or name == "blocks_l1":
        width = "v2" if name == "blocks_l1" else "v4"
        assert re.search(rf"ld\.global\S*\.{width}\.", result.ptx), "loads must be wide"
