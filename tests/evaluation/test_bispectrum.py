"""The equilateral bispectrum agrees with closed forms and with a sum over all triangles."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

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


def triangle(sides: Sequence[tuple[int, int, int]], phases: Sequence[float], side: int = 16) -> np.ndarray:
    """The sum of cosines of these waves."""
    places = np.indices((side, side, side)) * 2 * math.pi / side
    return np.asarray(
        sum(np.cos(np.tensordot(wave, places, 1) + phase) for wave, phase in zip(sides, phases, strict=True))
    )


def test_three_waves_that_form_a_triangle_have_the_cosine_of_their_phases() -> None:
    """Of 12 ordered triples (6 orders, and the negative waves) each product is exp(± i phases) / 8."""
    phases = 0.3, 0.4, 0.5
    field = triangle([(2, -2, 0), (0, 2, -2), (-2, 0, 2)], phases)
    found = measured(field, triangle([(2, -2, 0), (0, 2, -2), (2, 0, 2)], phases))
    count, _ = sum_over_triangles(field, 2.5, 4.5)
    expected = 12 / 8 * math.cos(sum(phases)) / count * (field.size * CELL**3) ** 2
    np.testing.assert_allclose(found.predicted, [0, 0, expected, 0], rtol=1e-6, atol=1e-9 * expected)
    np.testing.assert_allclose(found.target, 0, atol=1e-9 * expected, err_msg="they do not form a triangle")


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
