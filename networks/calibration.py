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

KEPT_CELLS = 2**24  # of the outputs per rank, for the densities after the filter
NEWTON_STEPS = 6
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

    density_filter: list[float] | None = None  # weights of the `shells`, and a constant
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

    The filter has the least squares of x, times the power of the density for which the predicted and the true density
    have equal sums, and equal sums relative to the filtered density. The fit leaves out the cells at the faces: there
    predictions are worst, because a network sees no neighbors; predictions of whole volumes barely use them.
    """

    def __init__(self, channel: int, scale: float) -> None:
        self.channel, self.scale = channel, scale
        self.reset()

    def reset(self) -> None:
        self._moments: Tensor | float = 0.0  # sums of products of the shells, 1 and the target, [6, 6]
        self._kept: list[tuple[Tensor, Tensor]] = []  # outputs, and inner cells of their targets

    def add(self, outputs: Tensor, targets: Tensor) -> None:
        for output, target in zip(at_least_float32(outputs), targets, strict=True):
            x, true = output[self.channel], target[self.channel, 1:-1, 1:-1, 1:-1].to(output)
            rows = torch.stack([*shells(x), torch.ones_like(true), true]).flatten(1).double()
            self._moments = self._moments + rows @ rows.T
            if len(self._kept) * x.numel() < KEPT_CELLS:
                self._kept.append((x.clone(), true.clone()))  # the memory of a batch is used again

    def result(self, total: Callable[[Tensor], Tensor], device: torch.device) -> Calibration:
        """`total` sums over all ranks, which all call it; no calibration if the densities are not plausible."""
        moments = total(torch.zeros(6, 6, dtype=torch.float64, device=device) + self._moments).cpu()
        if not (moments.isfinite().all() and moments[4, 4]):  # the number of cells
            return Calibration()
        weights = _least_squares(moments[:5, :5], moments[:5, 5]).tolist()
        logarithms = [(self.scale * filtered(x, weights), self.scale * true) for x, true in self._kept]
        self._kept = []  # frees their memory
        shift, power, step, factor = 0.0, 1.0, torch.ones(2), math.nan
        for number in range(NEWTON_STEPS):
            sums = torch.zeros(2, 3, dtype=torch.float64, device=device)
            for pair in logarithms:
                x, true = (field.flatten().double() for field in pair)
                predicted, ways = torch.exp(shift + power * x), torch.stack([torch.ones_like(x), torch.exp(-x)])
                sums += ways @ torch.stack([predicted, predicted * x, true.exp()]).T / len(x)
            if not (sums := total(sums).cpu()).isfinite().all():
                break
            factor = float(sums[0, 2] / sums[0, 0]) if number == 0 else factor
            step = _least_squares(sums[:, :2], sums[:, 2] - sums[:, 0])
            shift, power = shift + float(step[0]), power + float(step[1])
        if step.abs().max() < 1e-6 and 0.5 < power < 2:  # otherwise, as of a network that has learned little, no power
            weights, factor = [power * weight for weight in weights], math.exp(shift)
        return Calibration(weights, factor) if 1 / LARGEST_FACTOR < factor < LARGEST_FACTOR else Calibration()


def _least_squares(matrix: Tensor, values: Tensor) -> Tensor:
    """The solution of smallest norm, since the output of an untrained network may be the same everywhere."""
    return torch.linalg.lstsq(matrix, values[:, None], driver="gelsd").solution.flatten()
