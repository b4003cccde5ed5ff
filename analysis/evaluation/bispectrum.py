"""The equilateral bispectrum of log density."""

from dataclasses import dataclass

import numpy as np

from analysis.evaluation import base, panels
from analysis.lyman_alpha.results import PREDICTION, SHAPES, quotient
from utils.config.channels import GAS, density_place
from utils.run import tags


@dataclass(frozen=True)
class Bispectrum(base.Statistic):
    """Equilateral bispectrum of prediction and target, arrays [shells]; in the unit of length to the power of six."""

    title = "Bispectrum"
    caption = """The ratio of bispectra depends on the shapes of structures. They are shown relative to those of the
        target, on the axis of the power above; negative ratios lie on the lower edge. The sides of an equilateral
        triangle of waves have about the length k, those of a squeezed one k, k and the smallest length. The error in
        the table of the flux is the rms of k³ times the difference, relative to that of the target."""

    k: np.ndarray
    predicted: np.ndarray
    target: np.ndarray

    @classmethod
    def compute(cls, compared: base.Compared) -> "Bispectrum | None":
        from analysis.modes import Bispectra

        if (place := density_place(compared.targets, GAS)) is None:
            return None
        triangles = Bispectra(compared.slabs, compared.cell or 1.0)
        sides = (triangles.measure(compared.stored(read, place))[0] for read in compared.fields[1:])
        return cls(triangles.k, *sides)

    @property
    def ratio(self) -> np.ndarray:
        return quotient(self.predicted, self.target)

    @property
    def reference_ratios(self) -> dict[float, float]:
        """The ratio at large, middle and small scales, by k."""
        shells = base.reference_shells(self.k) if np.isfinite(self.k).any() else []
        return {float(self.k[shell]): float(self.ratio[shell]) for shell in shells}

    def scalars(self) -> dict[str, float]:
        ratios = self.reference_ratios.items()
        return {tags.evaluation("B ratio", f"{base.LOG_DENSITY} at k = {k:.3g}"): ratio for k, ratio in ratios}

    def table(self, volume: base.EvaluatedVolume) -> base.Table:
        header = f"bispectrum (k in {volume.wavenumber_unit})", base.LOG_DENSITY
        return [
            [*header],
            *([f"ratio at {k:.2g}", base.number_text(ratio)] for k, ratio in self.reference_ratios.items()),
        ]

    def draw(self, figure: base.Figure, volume: base.EvaluatedVolume) -> None:
        """Bispectra relative to those of the target, of log density and, if they are known, of the flux."""
        curves, flux = {f"{base.LOG_DENSITY}, {SHAPES[0]}": {PREDICTION: (self.k, self.ratio)}}, volume.flux
        for number, shape in enumerate(SHAPES if flux and flux.flux_bispectrum_k.size else ()):
            assert flux is not None
            ratios = {name: ratio[number] for name, ratio in flux.ratios_of("flux_bispectrum").items()}
            curves[f"flux, {shape}"] = {name: (flux.flux_bispectrum_k, ratio) for name, ratio in ratios.items()}
        panels.draw_ratios(figure, curves, panels.COLORS, "$B$", volume.wavenumber_unit)
