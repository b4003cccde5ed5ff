"""The calibration of a predicted density: a filter of its logarithm, and a factor, fitted to the validation data.

A network learns the shortest waves last, and its output lacks their power long after its loss has settled.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from networks.ops.precision import at_least_float32

KEPT_CELLS = 2**25  # of the outputs per rank, for the mean density after the filter
LARGEST_FACTOR = 10.0  # beyond it, the data are in other units or the network has not learned the density


def shells(fields: Tensor) -> list[Tensor]:
    """Each inner cell of [..., D, D, D], and the sums of its 6, 12 and 8 neighbors at faces, edges and corners."""
    sums = [fields]  # by the number of axes along which the cells are neighbors
    for _ in range(3):
        moved = [part.movedim(-3, -1) for part in sums]  # the next axis is the last one; after three, the order is back
        # Without their sizes, which would leave arithmetic of Python in exported networks.
        inner, pairs = [part[..., 1:-1] for part in moved], [part[..., :-2] + part[..., 2:] for part in moved]
        sums = [inner[0], *map(torch.add, inner[1:], pairs), pairs[-1]]
    return sums


class Calibration(NamedTuple):
    """What corrects the logarithm x = ln(density) / scale of an output; None: nothing."""

    density_filter: list[float] | None = None  # weights of the `shells`, and a constant; the least squares of x
    density_factor: float | None = None  # mean density of the targets / of the outputs after the filter

    def apply(self, x: Tensor, scale: float) -> Tensor:
        """x [N, 1, D, D, D] in float32, corrected. At the faces, the neighbors that are missing equal the cell."""
        x = at_least_float32(x)
        if self.density_filter:
            x = filtered(F.pad(x, (1,) * 6, mode="replicate"), self.density_filter)
        return x + math.log(self.density_factor or 1.0) / scale


def filtered(fields: Tensor, weights: list[float]) -> Tensor:
    """The filter of a Calibration in the inner cells."""
    *factors, constant = weights
    return torch.stack([factor * part for factor, part in zip(factors, shells(fields), strict=True)]).sum(0) + constant


class CalibrationFit:
    """Fits a Calibration to one channel of outputs and targets [N, C, D, D, D] of a validation.

    It leaves out the cells at the faces: there predictions are worst, because a network sees no neighbors; predictions
    of whole volumes barely use them.
    """

    def __init__(self, channel: int, scale: float) -> None:
        self.channel, self.scale = channel, scale
        self.reset()

    def reset(self) -> None:
        self._moments: Tensor | float = 0.0  # sums of products of the shells, 1 and the target, [6, 6]
        self._kept: list[Tensor] = []  # outputs
        self._mean: Tensor | float = 0.0  # sum of the mean densities of their targets

    def add(self, outputs: Tensor, targets: Tensor) -> None:
        for output, target in zip(at_least_float32(outputs), targets, strict=True):
            x, true = output[self.channel], target[self.channel, 1:-1, 1:-1, 1:-1]
            rows = torch.stack([*shells(x), torch.ones_like(x[1:-1, 1:-1, 1:-1]), true.to(x)]).flatten(1).double()
            self._moments = self._moments + rows @ rows.T
            if len(self._kept) * x.numel() < KEPT_CELLS:
                self._kept.append(x.clone())  # the memory of a batch is used again
                self._mean = self._mean + torch.exp(self.scale * true.double()).mean()

    def result(self, total: Callable[[Tensor], Tensor], device: torch.device) -> Calibration:
        """`total` sums over all ranks, which all call it; no calibration if the densities are not plausible."""
        moments = total(torch.zeros(6, 6, dtype=torch.float64, device=device) + self._moments).cpu()
        if not moments.isfinite().all():
            return Calibration()
        # Least squares of smallest norm: the output of an untrained network may be the same everywhere.
        solution = torch.linalg.lstsq(moments[:5, :5], moments[:5, 5:], driver="gelsd").solution
        weights, means = solution.flatten().tolist(), torch.zeros(2, dtype=torch.float64, device=device)
        means[0] += self._mean
        kept, self._kept = self._kept, []  # frees their memory
        for x in kept:
            means[1] += torch.exp(self.scale * filtered(x, weights).double()).mean()
        target, predicted = total(means).tolist()
        factor = target / predicted if predicted > 0 else math.nan
        return Calibration(weights, factor) if 1 / LARGEST_FACTOR < factor < LARGEST_FACTOR else Calibration()
