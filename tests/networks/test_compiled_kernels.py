"""The fused kernels compiled for GPUs: registers, spills, rounding and atomic operations."""

import re
from pathlib import Path
from typing import Any

import pytest
from triton_compile import ARCHITECTURES, compile_kernel

from networks import fused, tail

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
        ("bias_activation", FORWARD, 64, {"ACTIVATION": "relu", "SKIP_CHANNELS": 64}),
        ("bias_activation", in_float32(FORWARD), 5, {"ACTIVATION": "tanh", "SKIP_CHANNELS": 0}),
        ("activation_backward", BACKWARD, 512, {"ACTIVATION": "leaky_relu", "TWICE": True}),
        ("activation_backward", BACKWARD, 64, {"ACTIVATION": "relu", "TWICE": False, "SIDE": 64, "PITCH": 65}),
        # Triton 3.6 needed 230 registers for tiles as large as those of the other layers.
        ("activation_backward", in_float32(BACKWARD), 5, {"ACTIVATION": "tanh", "TWICE": False}),
        ("l1", LOSS, 1, {}),
        ("l1_backward", LOSS_BACKWARD, 1, {}),
        ("tail_l1", TAIL, 5, {"DEPTH": 33, "ROWS": 33, "COLUMNS": 33, "TILE": tail.TILE}),
    ],
    ids=["concatenation", "tanh", "skip add", "padded", "tanh backward", "l1", "l1 backward", "tail"],
)
def test_registers(
    name: str, types: dict[str, str], channels: int, constants: dict[str, Any], architecture: int, tmp_path: Path
) -> None:
    """At most 64 per thread, for 32 warps per multiprocessor; more would leave too few loads in flight.

    No kernel uses atomic operations, whose order would vary between runs.
    """
    tile = fused._Tile.of(channels)
    defaults = {"CHANNELS": channels, "WIDTH": channels, "LANES": tile.lanes, "ROWS": tile.rows, "TILE": fused.TILE}
    constants = {**defaults, "NEGATIVE_SLOPE": fused.NEGATIVE_SLOPE, "SIDE": 0, "PITCH": 0, **constants}
    result = compile_kernel(
        getattr(fused.kernels(), name),
        types,
        constants,
        tmp_path,
        architecture,
        unaligned=tuple(name for name in types if name.endswith("pitch") or (channels == 5 and "stride" in name)),
        num_warps=fused.WARPS,
        enable_fp_fusion=False,
    )
    assert (result.registers <= 64, result.stack) == (True, 0), result[:3]
    assert not re.search(r"\b(atom|red)\.(global|relaxed|add)", result.ptx)
    if "*bf16" in types.values() and name != "l1":
        assert re.search(r"cvt\.rn\.bf16", result.ptx), "a cast to bfloat16 must round to nearest"
    if channels % 8 == 0 or name == "tail_l1":
        width = "v2" if name == "tail_l1" else "v4"
        assert re.search(rf"ld\.global\S*\.{width}\.", result.ptx), "loads must be wide"
