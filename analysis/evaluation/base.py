"""The base of statistics: class, what they compare, bins, parts of figures. It imports neither torch nor matplotlib."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from pydantic import ConfigDict

from analysis.lyman_alpha.results import FGPA, FITTED, PREDICTION, TARGET, TRANSFER, Flux
from utils.config.channels import DENSITY_UNIT, TEMPERATURE_UNIT, Channel, Channels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor

    from analysis.slabs import ReadPlanes, SlabFields, Slabs
else:
    Axes = Figure = Tensor = ReadPlanes = SlabFields = Slabs = Any

LOG_DENSITY = "log density"
# The bins are fixed before the first slab: decimal logarithms, from the emptiest voids to clusters.
LOG10_BINS = {DENSITY_UNIT: (-4.0, 6.0, 125), TEMPERATURE_UNIT: (2.0, 9.0, 140)}  # range, and number
CHANNEL_RANGE, CHANNEL_BINS = (-1.5, 1.5), 150  # of the values of all other channels; velocities up to 1500 km/s

# A palette that the color-blind can distinguish (Okabe & Ito 2008).
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9")
COLORS = {TARGET: "black", PREDICTION: PALETTE[1], TRANSFER: PALETTE[2], f"{FGPA}, {FITTED}": PALETTE[5]}
LOGARITHMS = {DENSITY_UNIT: r"$\log_{10}(\rho/\bar\rho)$", TEMPERATURE_UNIT: r"$\log_{10}(T/\mathrm{K})$"}
NEAR_ONE, LARGEST_RATIO = (0.5, 1.5), 1e3  # of an axis of ratios: its linear part, and the end of its logarithmic one
DECADE = 0.25  # length of a factor of ten in the logarithmic part, in units of the linear one

Table = list[list[str]]  # rows; the first one is the header


@dataclass(frozen=True, kw_only=True)
class EvaluatedVolume:
    """The channels of an evaluated volume, the size of its cells, and its flux."""

    channels: tuple[Channel, ...]  # of the target
    input_channels: tuple[Channel, ...]
    cell: float | None  # side of a cell in Mpc/h, if known
    flux: Flux | None = None  # None if it was not computed

    @property
    def wavenumber_unit(self) -> str:
        return "rad/cell" if self.cell is None else "h/Mpc"


@dataclass(frozen=True)
class Compared:
    """A prediction and its target, of which each rank has its own planes; every rank makes the same calls."""

    inputs: Channels
    targets: Channels
    cell: float | None  # in Mpc/h, if known
    fields: SlabFields
    slabs: Slabs
    deviation: ReadPlanes | None = None  # standard deviations of the prediction in channel units, if it has some

    def total(self, sizes: Sequence[int], part: Callable[[slice], Tensor]) -> np.ndarray:
        """The sum over all planes of what `part` returns for some of the own ones, float64; every rank gets it."""
        import torch  # here, because the process that draws does without

        sums = torch.zeros(*sizes, dtype=torch.float64, device=self.slabs.world.device)
        with self.slabs.world.raise_together():
            for piece in self.slabs.pieces():
                sums += part(piece)
        return self.slabs.world.sum(sums).cpu().numpy()

    def stored(self, read: ReadPlanes, place: int, is_exponential: bool = False) -> Tensor:
        """The own planes [n, Y, Z] of a target's physical value or its ln, or of the exponential of that logarithm."""
        channel, out = self.targets[place], self.slabs.empty()
        with self.slabs.world.raise_together():
            for piece in self.slabs.pieces():
                values = read(slice(place, place + 1), piece)[0] * channel.scale + channel.center
                out[self.slabs.local(piece)] = values.exp_() if is_exponential else values
        return out


class Statistic(ABC):
    """A statistic of a prediction and its target: a frozen dataclass of numbers and arrays, saved with the results."""

    __pydantic_config__ = ConfigDict(arbitrary_types_allowed=True)  # numpy's arrays are loaded as they are
    title: ClassVar[str]  # of its section in the report
    caption: ClassVar[str]  # below its picture

    @classmethod
    @abstractmethod
    def compute(cls, compared: Compared) -> "Statistic | None":
        """None if the channels do not allow it. Every rank calls it, and all get the same."""

    @abstractmethod
    def draw(self, figure: Figure, volume: EvaluatedVolume) -> None:
        """Draws its picture on an empty figure of 8 × 4.3 inches."""

    def scalars(self) -> dict[str, float]:
        """Scalars for TensorBoard and metrics.jsonl, by tag."""
        return {}

    def table(self, volume: EvaluatedVolume) -> Table:
        """A table of the log and the report; empty: none."""
        return []

    def summary(self, volume: EvaluatedVolume) -> dict[str, Any]:
        """Its part of evaluation.json; empty: none."""
        return asdict(self)  # type: ignore[call-overload]


class Bins(NamedTuple):
    """Bins of equal width in log10 of the physical value, or in the value: a linear map of the channel value."""

    edges: np.ndarray
    slope: float  # bin = slope · channel + offset
    offset: float

    @classmethod
    def of(cls, channel: Channel) -> "Bins":
        base = math.log(10) if channel.is_log else 1.0
        slope, offset = channel.scale / base, channel.center / base
        (low, high), number = (slope * end + offset for end in CHANNEL_RANGE), CHANNEL_BINS
        if channel.is_log and channel.unit in LOG10_BINS:
            low, high, number = LOG10_BINS[channel.unit]
        step = (high - low) / number
        return cls(np.linspace(low, high, number + 1), slope / step, (offset - low) / step)

    def places(self, values: Tensor) -> Tensor:
        """The bin of each channel value; values outside the edges, and NaN, are in the last or first bin."""
        places = (values.double() * self.slope + self.offset).nan_to_num_(nan=0.0)
        return places.clamp_(0.0, len(self.edges) - 2).long()


def converted(values: Any, source: Channel, target: Channel) -> Any:
    """Values of an input in the transform of the target with the same quantity; unchanged unless both are known."""
    same = (source.scale, source.center, source.is_log) == (target.scale, target.center, target.is_log)
    known = source.unit is not None and source.unit == target.unit
    return target.from_physical(source.to_physical(values)) if known and not same else values


def reference_shells(k: np.ndarray) -> list[int]:
    """The shells closest to twice the first k, and to 1/4 and 1/2 of the last k: fewer if some of them are the same."""
    first, last = k[np.isfinite(k)][[0, -1]]
    return sorted({int(np.nanargmin(np.abs(k - wanted))) for wanted in (min(2 * first, last), last / 4, last / 2)})


def number_text(value: float, digits: int = 3) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else "non-finite"


def plain(text: str) -> str:
    """A name or unit of a file, of which matplotlib shall read nothing as a formula."""
    return text.replace("$", r"\$")


def value_label(name: str, unit: str | None, is_log: bool) -> str:
    """Label of an axis of physical values."""
    if unit is None:
        return "channel value"
    return LOGARITHMS.get(unit, rf"$\log_{{10}}$({plain(name)} / {plain(unit)})") if is_log else plain(unit)


def scale_ratios(*panels: Axes) -> None:
    """The vertical axis of panels, on which no ratio leaves them: linear near 1, logarithmic beyond."""
    (low, high), ends = NEAR_ONE, (1 / LARGEST_RATIO, LARGEST_RATIO)

    def place(ratio: np.ndarray) -> np.ndarray:
        inner, outer = np.clip(ratio, low, high), np.clip(ratio, *ends)
        return inner + DECADE * np.log10(outer / inner)

    def ratio(place: np.ndarray) -> np.ndarray:
        inner = np.clip(place, low, high)
        return inner * 10 ** ((place - inner) / DECADE)

    shown = np.clip([axes.dataLim.intervaly for axes in panels], *ends)
    for axes in panels:
        axes.set_yscale("function", functions=(place, ratio))
        axes.set_yticks([0.001, 0.01, 0.1, 0.5, 0.75, 1, 1.25, 1.5, 10, 100, 1000])
        axes.set_ylim(min(shown.min(), low) / 1.1, 1.1 * max(shown.max(), high))
        axes.yaxis.set_major_formatter("{x:g}")
        for edge in NEAR_ONE:
            axes.axhline(edge, color="0.3", linewidth=0.8, linestyle=":", zorder=0.5)
    panels[0].text(0.01, 0.02, "logarithmic beyond the dots", transform=panels[0].transAxes, size="small", color="0.3")


def scale_wavenumbers(axes: Axes, k: np.ndarray, unit: str) -> None:
    """A logarithmic axis over all k, also if a diverged network leaves nothing to plot; labels 1, 2, 5 per decade."""
    axes.set(xscale="log", xlabel=f"wavenumber k ({unit})", xlim=(np.nanmin(k) / 1.1, np.nanmax(k) * 1.1))
    axes.xaxis.get_major_locator().set_params(subs=(1, 2, 5))  # type: ignore[call-arg]
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")


def occupied(values: np.ndarray, edges: np.ndarray) -> tuple[float, float]:
    """The outer edges of the bins whose value is not zero."""
    bins = np.flatnonzero(values)
    return edges[bins[0]], edges[bins[-1] + 1]


def draw_ratios(
    figure: Figure,
    panels: Mapping[str, Mapping[str, tuple[np.ndarray, np.ndarray]]],
    colors: Mapping[str, str],
    quantity: str,
    unit: str,
) -> None:
    """A panel per title: wavenumbers and ratios to the target by label; lines continue across bins without a mode."""
    figure.set_size_inches(2 + 4 * len(panels), 4.3)
    row = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (title, curves) in zip(row, panels.items(), strict=True):
        axes.axhline(1, color="0.3", linewidth=0.8)
        for name, (k, ratio) in curves.items():
            shown = np.isfinite(k)
            axes.plot(k[shown], ratio[shown], color=colors.get(name, PALETTE[0]), label=name, marker=".")
        axes.set_title(title)
        scale_wavenumbers(axes, np.concatenate([k for k, _ in curves.values()]), unit)
        axes.grid(alpha=0.25)
    scale_ratios(*row)
    row[0].set_ylabel(f"{quantity} relative to the target")
    figure.legend(*row[-1].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
