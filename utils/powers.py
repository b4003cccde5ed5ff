"""Powers of tensors whose bits do not depend on a value's place in the tensor."""

from torch import Tensor


def power(x: Tensor, exponent: float) -> Tensor:
    """x ** exponent for x >= 0, for results that must not depend on the size of pieces or the number of threads.

    torch.pow computes most of a tensor with vector instructions and the rest value by value, and the two round
    differently; so do exp2, sigmoid and silu. log, exp and products round equally at all places, and need a third of
    the time. The relative error grows with the logarithm of the result: in float32 it is 1e-6 at 1e7 and at 1e-7.
    torch.pow may be used for the exponents -2, -1, -0.5, 0.5, 2 and 3, for which it computes products and roots.
    """
    return x.log().mul_(exponent).exp_()
