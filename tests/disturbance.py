"""A mode of the suite: DISTURB=1 make test changes random inputs by a relative 1e-7, about the last bit of a float32.

Another CPU rounds differently by as much. A test that fails in this mode has a value on the edge of a bin, on a
threshold or on a tie, and may fail on another machine. The change depends on the value alone, so equal inputs stay
equal. conftest.py and preload.py import this module, so that it acts in the tests and in the ranks that they start.
"""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

RELATIVE = 1e-7


def disturbed(draw: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes random numbers, numpy arrays or tensors, which are then changed by at most RELATIVE."""

    @torch.no_grad()
    def call(*args: Any, **options: Any) -> Any:
        values = draw(*args, **options)
        sine = torch.sin if isinstance(values, torch.Tensor) else np.sin
        result = values * (1 + RELATIVE * sine(1e4 * values))
        return result.requires_grad_(values.requires_grad) if isinstance(values, torch.Tensor) else result

    return call


if os.environ.get("DISTURB"):
    names = ("random", "uniform", "normal", "standard_normal")
    methods = {name: disturbed(getattr(np.random.Generator, name)) for name in names}
    generator = type("DisturbedGenerator", (np.random.Generator,), methods)
    original = np.random.default_rng
    np.random.default_rng = lambda seed=None: generator(original(seed).bit_generator)  # type: ignore[assignment]
    torch.rand, torch.randn = disturbed(torch.rand), disturbed(torch.randn)
