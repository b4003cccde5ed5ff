"""Tests of the keys and flags of the tutorial's later editions: amp_mode and enable_fused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from utils import cli
from utils.config import Config, load, to_yaml
from utils.config.aliases import ALIASES
from utils.errors import UserError


def load_text(folder: Path, text: str, overrides: dict[str, Any] | None = None) -> Config:
    """The config 'test' with this text as its YAML mapping."""
    path = folder / "configs.yaml"
    path.write_text(f"test: {{{text}}}")
    return load(str(path), "test", overrides)


@pytest.mark.parametrize(
    ("values", "overrides", "enabled", "precision"),
    [
        ("amp_mode: none", {}, False, "bfloat16"),
        ("amp_mode: None", {}, False, "bfloat16"),
        ("amp_mode: False", {}, False, "bfloat16"),
        ("amp_mode: 'fp16'", {}, True, "float16"),
        ("amp_mode: bf16", {}, True, "bfloat16"),
        ("amp_mode: none, enable_amp: True", {}, True, "bfloat16"),
        ("amp_mode: none, enable_amp: True, precision: float16", {}, True, "float16"),
        ("amp_mode: fp16, enable_amp: False", {}, True, "float16"),
        ("amp_mode: fp16, enable_fused: True, enable_jit: False", {}, True, "float16"),
        ("amp_mode: none", {"enable_amp": True}, True, "bfloat16"),
        ("amp_mode: fp16", {"enable_amp": False}, False, "float16"),
        ("amp_mode: fp16", {"precision": "bfloat16"}, True, "bfloat16"),
        ("amp_mode: fp16", {"amp_mode": "bf16"}, True, "bfloat16"),
        ("enable_amp: True, precision: float16", {"amp_mode": "bf16"}, True, "bfloat16"),
        ("amp_mode: bf16, enable_amp: True", {"amp_mode": None}, False, "bfloat16"),
    ],
)
def test_amp_mode_of_a_yaml_file_and_its_overrides(
    tmp_path: Path, values: str, overrides: dict[str, Any], enabled: bool, precision: str
) -> None:
    config = load_text(tmp_path, values, overrides)
    assert (config.enable_amp, config.precision) == (enabled, precision)
    (tmp_path / "config.yaml").write_text(to_yaml(config, "test"))
    assert load(str(tmp_path / "config.yaml"), "test") == config
    assert not any(key in (tmp_path / "config.yaml").read_text() for key in ALIASES)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ("amp_mode: fp8", "amp_mode must be none, fp16 or bf16, not 'fp8'"),
        ("amp_mode: True", "amp_mode must be none, fp16 or bf16, not True"),
        ("amp_mode: [fp16]", "amp_mode must be none, fp16 or bf16, not ['fp16']"),
        ("amp_mode: bf16, precision: float16", "amp_mode bf16 contradicts precision float16"),
        ("amp_mode: bf16, enable_amp: 1", "enable_amp must be a valid boolean, got 1"),
        ("enable_fused: 'on'", "enable_fused must be true or false, not 'on'"),
    ],
)
def test_invalid_values_of_later_editions_are_refused(tmp_path: Path, values: str, says: str) -> None:
    with pytest.raises(UserError, match=f"^config 'test': {re.escape(says)}"):
        load_text(tmp_path, values)


@pytest.mark.parametrize(
    ("flags", "enabled", "precision"),
    [
        ("--amp_mode=none", False, "bfloat16"),
        ("--amp_mode=fp16", True, "float16"),
        ("--amp_mode bf16", True, "bfloat16"),
        ("--amp_mode=fp16 --enable_amp --enable_fused", True, "float16"),
        ("--set=amp_mode=fp16", True, "float16"),
        ("--set=amp_mode=None", False, "bfloat16"),
        ("--set=amp_mode=fp16 --set=precision=float16", True, "float16"),
        # --set overrides flags.
        ("--enable_amp --set=amp_mode=none", False, "bfloat16"),
        ("--amp_mode=fp16 --set=enable_amp=false", False, "float16"),
        ("--amp_mode=fp16 --set=precision=bfloat16", True, "bfloat16"),
        ("--amp_mode=none --set=amp_mode=fp16", True, "float16"),
    ],
)
def test_amp_mode_of_the_command_line(tmp_path: Path, flags: str, enabled: bool, precision: str) -> None:
    for values in ("enable_amp: True", "enable_amp: False"):
        config = load_text(tmp_path, values, cli.parse(flags.split()).overrides)
        assert (config.enable_amp, config.precision) == (enabled, precision)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--enable_amp", "--amp_mode=none"], "command line: amp_mode none contradicts enable_amp true"),
        (["--set=amp_mode=fp16", "--set=enable_amp=false"], "amp_mode fp16 contradicts enable_amp false"),
        (["--set=amp_mode=bf16", "--set=precision=float16"], "amp_mode bf16 contradicts precision float16"),
        (["--amp_mode=fp8"], "command line: amp_mode must be none, fp16 or bf16, not 'fp8'"),
        (["--set=enable_fused=1"], "command line: enable_fused must be true or false, not 1"),
    ],
)
def test_contradictions_on_the_command_line_are_refused(flags: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        cli.parse(flags)
