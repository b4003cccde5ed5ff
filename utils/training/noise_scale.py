"""The gradient noise scale: the batch size above which larger batches stop saving steps.

docs/large_batches.md explains it. The gradient of a batch and that of a part of it have the same mean and different
noise. Their squared norms give the noise, and the norm of the gradient without it.
Source: McCandlish, Kaplan, Amodei & OpenAI Dota Team 2018, arXiv:1812.06162, appendix A.
"""

from utils.run import tags

SUMS = ("gradient", "noise", "steps")  # weighted sums over the steps of |G|² and of S, and the number of steps
MIN_STEPS = 20  # below that, no result is given
SMOOTHING = 0.99  # decay per step of the weight of earlier steps: the mean is over about the last hundred


class NoiseScale:
    """|G|², the squared norm of the true gradient, and S, the trace of one sample's covariance, smoothed over steps.

    The noise scale is S / |G|². Estimates of a single step scatter widely, and their ratio has no mean.
    """

    def __init__(self, part: float, batch: float, sums: dict[str, float]) -> None:
        """`part` < `batch`, in samples. `sums` has the SUMS by name, none at first, and is updated in place."""
        self._part, self._batch, self._sums = part, batch, sums
        sums.update({name: sums.get(name, 0.0) for name in SUMS})

    def add(self, part_norm_squared: float, batch_norm_squared: float) -> None:
        """Adds a step's squared gradient norms: of a part of the batch, mean over the parts, and of the batch."""
        part, batch = self._part, self._batch
        gradient = (batch * batch_norm_squared - part * part_norm_squared) / (batch - part)
        noise = (part_norm_squared - batch_norm_squared) / (1 / part - 1 / batch)
        for name, value in {"gradient": gradient, "noise": noise}.items():
            self._sums[name] = SMOOTHING * self._sums[name] + (1 - SMOOTHING) * value
        self._sums["steps"] += 1

    @property
    def samples(self) -> float | None:
        """The noise scale in samples; None if an estimate is not positive, as before the first step."""
        gradient, noise = self._sums["gradient"], self._sums["noise"]
        return noise / gradient if gradient > 0 and noise > 0 else None

    @property
    def result(self) -> float | None:
        return self.samples if self._sums["steps"] >= MIN_STEPS else None

    def scalars(self) -> dict[str, float]:
        """The noise scale and the relative progress per step at this batch, for TensorBoard."""
        scale = self.samples
        return {} if scale is None else {tags.NOISE_SCALE: scale, tags.NOISE_PROGRESS: 1 / (1 + scale / self._batch)}

    def sentence(self) -> str:
        """The meaning of the result for the batch size, in one sentence; empty before MIN_STEPS steps."""
        scale, batch = self.samples, self._batch
        if self._sums["steps"] < MIN_STEPS:
            return ""
        if scale is None:
            return f"Larger batches than {batch:g} would save steps: the noise scale is too large to measure"
        advice = "Larger batches would save steps"
        if batch / scale > 2:
            advice = "Larger batches would save few steps, so expect little from more ranks"
        elif batch / scale > 0.5:
            advice = "Larger batches would save steps, with diminishing returns"
        size = f"{scale:,.0f}" if scale >= 100 else f"{scale:.1f}"
        # A step's progress, relative to one without noise, is 1 / (1 + scale / batch).
        saved = scale / (2 * (batch + scale))
        return (
            f"{advice}: twice the batch of {batch:g} would save {100 * saved:.0f} % of the steps. The noise in the "
            f"gradient equals the gradient at a batch of {size} samples (its noise scale)"
        )
