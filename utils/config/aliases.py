"""Keys of the tutorial's later editions (SC22 to SC25), translated into this project's keys when they are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from utils.errors import UserError

ALIASES = ("amp_mode", "enable_fused")
AMP_MODES = {"none": "", "fp16": "float16", "bf16": "bfloat16"}  # the values of amp_mode, and their precision


def translate(values: Mapping[str, Any], source: str, on_command_line: bool = False) -> dict[str, Any]:
    """A copy of `values`, which all come from one `source`, with this project's keys only.

    Either of amp_mode and enable_amp turns mixed precision on: configs of SC22 inherit `amp_mode: none` and set
    `enable_amp: True`. On the command line, where nothing is inherited, that is a contradiction.
    enable_fused has no effect, because Adam is always fused.
    """
    translated = {key: value for key, value in values.items() if key not in ALIASES}
    if not isinstance(values.get("enable_fused", True), bool):
        raise UserError(f"{source}: enable_fused must be true or false, not {values['enable_fused']!r}")
    if "amp_mode" not in values:
        return translated
    mode = "none" if values["amp_mode"] is None or values["amp_mode"] is False else values["amp_mode"]
    if not isinstance(mode, str) or mode not in AMP_MODES:
        raise UserError(f"{source}: amp_mode must be none, fp16 or bf16, not {mode!r}")
    precision, is_on = AMP_MODES[mode], mode != "none"
    if translated.setdefault("enable_amp", is_on) is (not is_on):
        if on_command_line:
            raise UserError(f"{source}: amp_mode {mode} contradicts enable_amp {str(not is_on).lower()}; remove one")
        translated["enable_amp"] = True
    if is_on and translated.setdefault("precision", precision) != precision:
        raise UserError(f"{source}: amp_mode {mode} contradicts precision {translated['precision']}; change one")
    return translated
