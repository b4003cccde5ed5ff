"""The equilateral bispectrum agrees with a sum over all triangles."""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch

from utils.data.slabs import Slabs
from utils.distributed.launch import Launch
from utils.distributed.world import World
from utils.evaluation.bispectrum import equilateral_bispectrum
from utils.evaluation.results import Bispectrum

ONE = World(Launch("test"), torch.device("cpu"))
CELL = 0.5


def measured(predicted: np.ndarray, target: np.ndarray) -> Bispectrum:
    fields = [torch.tensor(field, dtype=torch.float32) for field in (predicted, target)]
    return equilateral_bispectrum(fields, Slabs(target.shape, ONE), CELL)


def sum_over_triangles(field: np.ndarray, low: float, high: float) -> tuple[int, float]:
    """The number of ordered triangles in a shell, and the bispectrum: all pairs of waves, one by one."""
    shape, longest = field.shape, max(field.shape)
    modes = np.fft.fftn(field) / field.size
    limits = [(side - 1) // 2 for side in shape]
    waves = {
        wave
        for wave in itertools.product(*(range(-limit, limit + 1) for limit in limits))
        if low < math.hypot(*(n * longest / side for n, side in zip(wave, shape, strict=True))) < high
    }
    products = []
    for first, second in itertools.product(waves, repeat=2):
        third = tuple(-a - b for a, b in zip(first, second, strict=True))
        if third in waves:
            products.append(modes[first] * modes[second] * modes[third])
    mean = sum(products).real / len(products) if products else math.nan
    return len(products), mean * (field.size * CELL**3) ** 2


def test_the_bispectrum_agrees_with_a_sum_over_all_triangles() -> None:
    """Also of a box whose sides differ, where the first shell has none."""
    for shape in ((10, 10, 10), (9, 12, 7)):
        fields = [np.exp(0.7 * np.random.default_rng(seed).standard_normal(shape)) for seed in (0, 1)]
        found = measured(*fields)
        for shell, (low, high) in enumerate(((0.5, 1.5), (1.5, 2.5))):
            for field, values in zip(fields, (found.predicted, found.target), strict=True):
                count, expected = sum_over_triangles(field, low, high)
                assert (count > 0) == (shell > 0 or shape == (10, 10, 10))
                np.testing.assert_allclose(values[shell], expected, rtol=1e-4, err_msg=f"{shape} {shell}")
