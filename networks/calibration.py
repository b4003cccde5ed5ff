"""The calibration of a predicted density: a filter of its logarithm, a shift and power of dense gas, and a factor.

A network learns the shortest waves last, and its output lacks their power long after its loss has settled.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from networks.ops.precision import at_least_float32

KEPT_CELLS = 2**24  # of the outputs per rank, for the densities after the filter
NEWTON_STEPS = 6
DENSE = math.log(100)  # the logarithm of the density / its mean at which half of the gas counts as dense
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
    """What corrects the logarithm x = (ln(density) - center) / scale of an output; None: nothing."""

    density_filter: list[float] | None = None  # see `corrected`
    density_factor: float | None = None  # of all densities after it

    def apply(self, x: Tensor, scale: float, center: float = 0.0) -> Tensor:
        """x [N, 1, D, D, D] in float32, corrected. At the faces, the neighbors that are missing equal the cell."""
        x = at_least_float32(x)
        if self.density_filter:
            x = corrected(F.pad(x, (1,) * 6, mode="replicate"), self.density_filter, scale, center)
        return x + math.log(self.density_factor or 1.0) / scale


def corrected(fields: Tensor, numbers: Sequence[float], scale: float, center: float = 0.0) -> Tensor:
    """The inner cells: y = x + (1 - d) filter, plus d (shift + power (y - x of DENSE)); d: the share of dense gas.

    numbers: weights of the `shells` and a constant, which are the filter; shift; power. Those of older checkpoints end
    after the filter, which gives y itself.
    """
    weights, (constant, *of_dense) = numbers[:4], numbers[4:]
    filtered = torch.stack([weight * part for weight, part in zip(weights, shells(fields), strict=True)]).sum(0)
    filtered = filtered + constant
    if not of_dense:
        return filtered
    x, (shift, power) = fields[..., 1:-1, 1:-1, 1:-1], of_dense
    dense = torch.sigmoid(scale * x + center - DENSE)
    y = x + (1 - dense) * filtered
    return y + dense * (shift + power * (y - (DENSE - center) / scale))


class CalibrationFit:
    """Fits a Calibration to one channel of outputs and targets [N, C, D, D, D] of a validation.

    The filter has the least squares of x. With factor, shift and power, predicted and true density have equal sums,
    also weighted by the inverse and by the root of the filtered density: voids count as much as clusters, which get
    neither too much mass nor too high peaks. The fit leaves out the cells at the faces: there predictions are
    worst, because a network sees no neighbors; predictions of whole volumes barely use them.
    """

    def __init__(self, channel: int, scale: float, center: float = 0.0) -> None:
        self.channel, self.scale, self.center = channel, scale, center
        self.reset()

    def reset(self) -> None:
        self._moments: Tensor | float = 0.0  # sums of products of the shells, 1 and what is missing, [6, 6]
        self._kept: list[tuple[Tensor, Tensor]] = []  # outputs, and inner cells of their targets

    def add(self, outputs: Tensor, targets: Tensor) -> None:
        for output, target in zip(at_least_float32(outputs), targets, strict=True):
            x, true = output[self.channel], target[self.channel, 1:-1, 1:-1, 1:-1].to(output)
            own = x[1:-1, 1:-1, 1:-1]
            rows = torch.stack([*shells(x), torch.ones_like(true), true - own]).flatten(1).double()
            rows[:5] *= 1 - torch.sigmoid(self.scale * own + self.center - DENSE).flatten()
            self._moments = self._moments + rows @ rows.T
            if len(self._kept) * x.numel() < KEPT_CELLS:
                self._kept.append((x.clone(), true.clone()))  # the memory of a batch is used again

    def result(self, total: Callable[[Tensor], Tensor], device: torch.device) -> Calibration:
        """`total` sums over all ranks, which all call it; no calibration if the densities are not plausible."""
        moments = total(torch.zeros(6, 6, dtype=torch.float64, device=device) + self._moments).cpu()
        if not (moments.isfinite().all() and moments[4, 4]):  # no cells, or dense ones alone
            return Calibration()
        numbers = [*_least_squares(moments[:5, :5], moments[:5, 5]).tolist(), 0.0, 0.0]
        inner, units = (slice(1, -1),) * 3, (self.scale, self.center)
        fields = [(x[inner], corrected(x, numbers, *units), true) for x, true in self._kept]
        self._kept = []  # frees their memory
        fit, step, factor = torch.zeros(3, dtype=torch.float64), torch.ones(3), math.nan  # ln(factor), shift, power
        for number in range(NEWTON_STEPS):
            sums = torch.zeros(3, 4, dtype=torch.float64, device=device)
            for cells in fields:
                x, y, true = (self.scale * field.flatten().double() + self.center for field in cells)
                one, dense = torch.ones_like(x), torch.sigmoid(x - DENSE)
                ways = torch.stack([one, dense, dense * (y - DENSE)])
                density = torch.exp(y + fit.to(x) @ ways)
                conditions = torch.stack([one, torch.exp(-y), torch.exp((y - DENSE) / 2)])
                sums += conditions @ torch.cat([density * ways, (true.exp() - density)[None]]).T / len(x)
            if not (sums := total(sums).cpu()).isfinite().all():
                break
            factor = 1 + float(sums[0, 3] / sums[0, 0]) if number == 0 else factor
            step = _least_squares(sums[:, :3], sums[:, 3])
            fit = fit + step
        if step.abs().max() < 1e-6 and -0.75 < fit[2] < 1:  # otherwise the network has learned little
            numbers[5:], factor = [float(fit[1]) / self.scale, float(fit[2])], math.exp(fit[0])
        return Calibration(numbers, factor) if 1 / LARGEST_FACTOR < factor < LARGEST_FACTOR else Calibration()


def _least_squares(matrix: Tensor, values: Tensor) -> Tensor:
    """The solution of smallest norm, since the output of an untrained network may be the same everywhere."""
    return torch.linalg.lstsq(matrix, values[:, None], driver="gelsd").solution.flatten()
