"""Options of a prediction, shared by predict.py and evaluate.py."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from utils.cli import positive

PRECISIONS = ("float32", "tf32", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class InferenceOptions:
    """Options of a prediction; the flags have the same names."""

    window: int | None = None
    overlap: int | None = None
    batch_size: int | None = None
    precision: str = "float32"
    device: str = "auto"
    not_periodic: bool = False

    def wraps(self, attributes: Mapping[str, Any]) -> bool:
        """True if windows wrap around the faces of a box, whose file may state that it is not periodic."""
        return not self.not_periodic and bool(attributes.get("periodic", True))


def add_inference_options(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for each field of InferenceOptions."""
    group = parser.add_argument_group("inference")
    group.add_argument("--window", type=positive, help="cells per side of one network input (the config's data_size)")
    group.add_argument("--overlap", type=int, help="cells by which neighboring windows overlap (half a window)")
    group.add_argument("--batch_size", type=positive, help="windows per rank and forward pass (4; on a GPU 32)")
    group.add_argument("--precision", choices=PRECISIONS, default="float32", help="arithmetic precision (%(default)s)")
    group.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="device to run on (%(default)s)"
    )
    group.add_argument("--not_periodic", action="store_true", help="do not wrap around the faces of the box")
