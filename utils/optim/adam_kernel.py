"""The Triton kernel of adam_average.py, which imports this module when it needs it."""

import triton
import triton.language as tl


@triton.jit
def adam_average(  # type: ignore[no-untyped-def]
    parameters,
    gradients,
    first,
    second,
    averages,
    count,
    lr,
    weight,
    updated,
    size,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    LOG_BETA1: tl.constexpr,
    LOG_BETA2: tl.constexpr,
    EPS: tl.constexpr,
    WEIGHT_DECAY: tl.constexpr,
    DECOUPLED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adam's update number `count` of BLOCK values and of its moments; then averages += weight · (value − average).

    `count`, `lr`, `weight` and `updated` are scalars in memory. If `updated` is 0 instead of 1, nothing changes.
    """
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    used = place < size * tl.load(updated).to(tl.int32)
    value = tl.load(parameters + place, mask=used, other=0.0)
    gradient = tl.load(gradients + place, mask=used, other=0.0)
    momentum = tl.load(first + place, mask=used, other=0.0)
    square = tl.load(second + place, mask=used, other=0.0)
    average = tl.load(averages + place, mask=used, other=0.0)
    rate, share = tl.load(lr), tl.load(weight)
    if WEIGHT_DECAY != 0:
        if DECOUPLED:
            value -= rate * WEIGHT_DECAY * value
        else:
            gradient += WEIGHT_DECAY * value
    momentum = BETA1 * momentum + (1 - BETA1) * gradient
    square = BETA2 * square + (1 - BETA2) * gradient * gradient
    # In float32, 1 − 0.999 would lose four digits.
    made = tl.load(count).to(tl.float64)
    correction1 = (1 - tl.exp(LOG_BETA1 * made)).to(tl.float32)
    correction2 = (1 - tl.exp(LOG_BETA2 * made)).to(tl.float32)
    value -= (rate / correction1) * momentum / (tl.sqrt(square) / tl.sqrt(correction2) + EPS)
    # As torch's lerp does, from the nearer end.
    difference = value - average
    average = tl.where(share < 0.5, average + share * difference, value - difference * (1 - share))
    tl.store(parameters + place, value, mask=used)
    tl.store(first + place, momentum, mask=used)
    tl.store(second + place, square, mask=used)
    tl.store(averages + place, average, mask=used)
