"""A mode of the suite: DISTURB=1 make test changes random inputs by a relative 1e-7, about the last bit of a float32.

Another CPU rounds differently by as much. A test that fails in this mode has a value on the edge of a bin, on a
threshold or on a tie, and may fail on another machine. The change depends on the value alone, so equal inputs stay
equal. conftest.py and preload.py import this module, so that it acts in the tests and in the ranks that they start.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

RELATIVE = 1e-7


class DisturbedGenerator(np.random.Generator):
    """A numpy generator whose floating-point values are disturbed."""

    def random(self, *args: Any, **options: Any) -> Any:
        return disturbed(super().random(*args, **options))

    def uniform(self, *args: Any, **options: Any) -> Any:
        return disturbed(super().uniform(*args, **options))

    def normal(self, *args: Any, **options: Any) -> Any:
        return disturbed(super().normal(*args, **options))

    def standard_normal(self, *args: Any, **options: Any) -> Any:
        return disturbed(super().standard_normal(*args, **options))


def disturbed(values: Any) -> Any:
    """Numbers, numpy arrays or tensors, changed by at most RELATIVE."""
    sine = torch.sin if isinstance(values, torch.Tensor) else np.sin
    factor = 1 + RELATIVE * sine(1e4 * values)
    return values * (factor.astype(values.dtype) if isinstance(values, np.ndarray) else factor)


def install() -> None:
    """Replaces the functions that make random inputs, for the rest of the process."""
    original = np.random.default_rng
    np.random.default_rng = lambda seed=None: DisturbedGenerator(original(seed).bit_generator)  # type: ignore[assignment]
    for name in ("rand", "randn"):
        setattr(torch, name, _after(getattr(torch, name)))


def _after(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def call(*args: Any, **options: Any) -> torch.Tensor:
        result = function(*args, **options)
        with torch.no_grad():
            return disturbed(result.detach()).requires_grad_(result.requires_grad)

    return call


if os.environ.get("DISTURB"):
    install()
