"""The gradient noise scale: how large a batch can be before its gradient has little more to tell.

Gradients of a whole batch and of its parts are both unbiased, with different noise; what that noise is, and what the
gradient would be without it, follows from their two lengths. The batch at which both are equal is the noise scale.
Well below it, twice the batch takes half the steps; well above it, nearly as many steps as before.
Source: McCandlish, Kaplan, Amodei & OpenAI Dota Team 2018, arXiv:1812.06162, appendix A.
"""

from __future__ import annotations

from collections.abc import Sequence

LEAST_STEPS = 20  # before anything is said
SMOOTHING = 0.99  # of the weight of all steps before, from one step to the next: about the last hundred count


class NoiseScale:
    """|G|², the square of the true gradient, and S, the trace of one sample's covariance, smoothed over steps.

    A single step's estimates scatter widely, and their ratio has no mean: numerator and denominator are smoothed apart.
    """

    def __init__(self, part: float, batch: float, sums: Sequence[float] = ()) -> None:
        """`part` and `batch` in samples, part < batch; `sums` as they were when an earlier process stopped."""
        self._part, self._batch = part, batch
        self.sums = list(sums) or [0.0, 0.0, 0.0, 0.0]  # weighted, of |G|², S and the weights; and the steps

    def add(self, part_square: float, batch_square: float) -> None:
        """One step's squared gradient norms: of a part of the batch, on average over the parts, and of all of it."""
        part, batch = self._part, self._batch
        gradient = (batch * batch_square - part * part_square) / (batch - part)
        noise = (part_square - batch_square) / (1 / part - 1 / batch)
        for index, value in enumerate((gradient, noise, 1.0)):
            self.sums[index] = SMOOTHING * self.sums[index] + (1 - SMOOTHING) * value
        self.sums[3] += 1

    @property
    def gradient_square(self) -> float:
        """|G|²; its scatter can bring it below zero where noise is nearly all there is."""
        return self.sums[0] / self.sums[2] if self.sums[2] else 0.0

    @property
    def noise(self) -> float:
        """S, in units of a squared gradient times samples."""
        return self.sums[1] / self.sums[2] if self.sums[2] else 0.0

    @property
    def samples(self) -> float | None:
        """The noise scale S / |G|² in samples; None where too little is known, or noise is nearly all there is."""
        known = self.sums[2] > 0 and self.gradient_square > 0 and self.noise > 0
        return self.noise / self.gradient_square if known else None

    def scalars(self) -> dict[str, float]:
        """For TensorBoard: the critical batch, and the part of the possible progress a step that this batch makes."""
        scale = self.samples
        if scale is None:
            return {}
        return {"Noise/scale (critical batch)": scale, "Noise/progress of the largest possible": self.progress(scale)}

    def progress(self, scale: float) -> float:
        """How far a step at this batch gets, beside one without noise: 1 / (1 + scale / batch)."""
        return 1 / (1 + scale / self._batch)

    def sentence(self) -> str:
        """What it says about more ranks."""
        if self.sums[3] < LEAST_STEPS:
            return f"Gradient noise scale: {self.sums[3]:g} steps are too few to tell it"
        scale = self.samples
        if scale is None:
            return (
                f"Gradient noise scale: beyond what a batch of {self._batch:g} can tell; the noise is nearly all there "
                f"is, and larger batches pay"
            )
        ratio = self._batch / scale
        saved = 1 - self.progress(scale) / (1 / (1 + scale / (2 * self._batch)))
        verdict = "larger batches pay"
        if ratio > 2:
            verdict = "expect little from more ranks"
        elif ratio > 0.5:
            verdict = "larger batches pay less and less"
        size = f"{scale:,.0f}" if scale >= 100 else f"{scale:.1f}"
        return (
            f"Gradient noise scale: {size} samples. Batch {self._batch:g} is {ratio:.2g}× the noise scale: "
            f"{verdict} (twice the batch would save {100 * saved:.0f} % of the steps)"
        )
