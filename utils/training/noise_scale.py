"""The gradient noise scale: the batch size above which larger batches stop saving steps.

The gradient of a batch and the gradient of a part of it have the same mean and different noise. Their squared norms
give the noise, and the norm of the gradient without it; the noise scale is the batch size at which both are equal. At
much smaller batches, doubling the batch halves the number of steps; at much larger ones it saves few steps.
Source: McCandlish, Kaplan, Amodei & OpenAI Dota Team 2018, arXiv:1812.06162, appendix A.
"""

from __future__ import annotations

from collections.abc import Sequence

from utils.runs import tags

MIN_STEPS = 20  # below that, no result is given
SMOOTHING = 0.99  # decay per step of the weight of earlier steps: the mean is over about the last hundred


class NoiseScale:
    """|G|², the squared norm of the true gradient, and S, the trace of one sample's covariance, smoothed over steps.

    The estimates of a single step scatter widely, and their ratio has no mean: numerator and denominator are smoothed
    separately.
    """

    def __init__(self, part: float, batch: float, sums: Sequence[float] = ()) -> None:
        """`part` < `batch`, both in samples; `sums` are those of an earlier process that is resumed."""
        self._part, self._batch = part, batch
        self.sums = list(sums) or [0.0, 0.0, 0.0, 0.0]  # weighted sums of |G|², of S and of the weights; steps

    def add(self, part_norm_squared: float, batch_norm_squared: float) -> None:
        """Adds a step's squared gradient norms: of a part of the batch, mean over the parts, and of the batch."""
        part, batch = self._part, self._batch
        gradient = (batch * batch_norm_squared - part * part_norm_squared) / (batch - part)
        noise = (part_norm_squared - batch_norm_squared) / (1 / part - 1 / batch)
        for index, value in enumerate((gradient, noise, 1.0)):
            self.sums[index] = SMOOTHING * self.sums[index] + (1 - SMOOTHING) * value
        self.sums[3] += 1

    @property
    def gradient_norm_squared(self) -> float:
        """|G|². The estimate can be negative if noise dominates the gradient."""
        return self.sums[0] / self.sums[2] if self.sums[2] else 0.0

    @property
    def noise(self) -> float:
        """S, in units of a squared gradient times samples."""
        return self.sums[1] / self.sums[2] if self.sums[2] else 0.0

    @property
    def samples(self) -> float | None:
        """The noise scale S / |G|² in samples; None before the first step, or if an estimate is not positive."""
        known = self.sums[2] > 0 and self.gradient_norm_squared > 0 and self.noise > 0
        return self.noise / self.gradient_norm_squared if known else None

    def scalars(self) -> dict[str, float]:
        """The noise scale and the relative progress per step at this batch, for TensorBoard."""
        scale = self.samples
        return {} if scale is None else {tags.NOISE_SCALE: scale, tags.NOISE_PROGRESS: self.progress(scale)}

    def progress(self, scale: float) -> float:
        """Progress of a step at this batch, relative to one without noise: 1 / (1 + scale / batch)."""
        return 1 / (1 + scale / self._batch)

    def sentence(self) -> str:
        """The result in one sentence, with its meaning for the number of ranks."""
        if self.sums[3] < MIN_STEPS:
            return f"Gradient noise scale: not known after {self.sums[3]:g} steps, it needs {MIN_STEPS}"
        scale = self.samples
        if scale is None:
            return (
                f"Gradient noise scale: too large to measure with batch {self._batch:g}, since noise dominates the "
                f"gradient; larger batches pay off"
            )
        ratio = self._batch / scale
        saved = 1 - self.progress(scale) / (1 / (1 + scale / (2 * self._batch)))
        advice = "larger batches pay off"
        if ratio > 2:
            advice = "expect little from more ranks"
        elif ratio > 0.5:
            advice = "larger batches pay off less and less"
        size = f"{scale:,.0f}" if scale >= 100 else f"{scale:.1f}"
        return (
            f"Gradient noise scale: {size} samples. Batch {self._batch:g} is {ratio:.2g}× the noise scale: "
            f"{advice} (doubling the batch would save {100 * saved:.0f} % of the steps)"
        )
