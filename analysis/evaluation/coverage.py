"""The share of errors within the standard deviations that a predicted file states."""

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from analysis.evaluation import panels
from analysis.evaluation.base import Compared, EvaluatedVolume, Figure, Statistic, Table
from analysis.lyman_alpha.results import quotient
from utils.config.channels import GAS, density_place

COVERED = (1.0, 1.96)  # standard deviations, within which 68 and 95 % of Gaussian errors are
DENSITIES = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)  # / mean, ends of the bins


@dataclass(frozen=True)
class Coverage(Statistic):
    """Shares [2, C, bins + 1] of cells whose error is within COVERED standard deviations.

    In bins of predicted density (one bin if its unit is unknown) and, last, in all.
    """

    title = "Standard deviations"
    caption = """Share of cells whose error is at most one (lines) and 1.96 (dashed) of the file's standard deviations,
        by predicted density. Of Gaussian errors it would be 68 and 95 % (dotted)."""

    shares: np.ndarray

    @classmethod
    def compute(cls, compared: Compared) -> "Coverage | None":
        import torch

        deviation, targets, place = compared.deviation, compared.targets, density_place(compared.targets, GAS)
        if deviation is None:
            return None
        ends = np.empty(0) if place is None else targets[place].from_physical(np.array(DENSITIES))
        edges = torch.from_numpy(ends).float().to(compared.slabs.world.device)

        def count(planes: slice) -> torch.Tensor:
            """Cells [3, C, bins], and those within COVERED."""
            sigma, predicted, target = (read(slice(None), planes) for read in (deviation, *compared.fields[1:]))
            ratios, bins = (predicted - target).abs() / sigma, torch.bucketize(predicted[place or 0], edges)
            inside = (ratios[:, bins == number] for number in range(len(ends) + 1))  # [C, cells] of each bin
            limits = math.inf, *COVERED
            return torch.stack([torch.stack([(part <= limit).sum(1) for limit in limits]) for part in inside], dim=2)

        counts = compared.total((3, len(targets), len(ends) + 1), count)
        cells, *covered = np.concatenate([counts, counts.sum(2, keepdims=True)], axis=2)
        return cls(quotient(np.array(covered), cells))

    def table(self, volume: EvaluatedVolume) -> Table:
        shares = zip(volume.channels, *self.shares[..., -1], strict=True)
        rows = [[channel.name, f"{one:.1%}", f"{two:.1%}"] for channel, one, two in shares]
        return [["share of errors within", "σ (right: 68%)", "1.96 σ (right: 95%)"], *rows]

    def summary(self, volume: EvaluatedVolume) -> dict[str, Any]:
        shares = zip(volume.channels, *self.shares, strict=True)
        covered: dict[str, Any] = {channel.name: {"68 %": one, "95 %": two} for channel, one, two in shares}
        return covered | {"densities, then all": [*DENSITIES]}

    def draw(self, figure: Figure, volume: EvaluatedVolume) -> None:
        axes, colors = figure.subplots(), itertools.cycle(panels.PALETTE)
        places = np.append(DENSITIES, 3 * DENSITIES[-1])[-(self.shares.shape[2] - 1) :] / math.sqrt(3)
        for one, two, channel, color in zip(*self.shares, volume.channels, colors, strict=False):
            axes.plot(places, one[:-1], "o-", markersize=3, color=color, label=panels.plain(channel.name))
            axes.plot(places, two[:-1], "o--", markersize=3, color=color)
        for share, style, label in ((0.6827, "-", "within σ"), (0.95, "--", "within 1.96 σ")):
            axes.plot([], [], style, color="0.3", label=label)
            axes.axhline(share, color="0.3", linewidth=0.8, linestyle=":", zorder=0.5)
        axes.set(xscale="log", ylim=(0, 1), xlabel="predicted density / mean", ylabel="share of cells")
        figure.legend(loc="outside right upper", frameon=False)
