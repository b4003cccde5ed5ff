"""train.py with SOAP's products as a GPU would round them, or with fewer of them, for the study `soap_products`.

python -m benchmarks.rounded_soap TF32 --config=demo      any flags of train.py
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import train
from utils.distributed.launch import run_script
from utils.optim import soap

TF32, BFLOAT16 = 10, 7  # bits of the mantissa
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)


class Rounded(TorchDispatchMode):
    """Rounds the float32 operands of matrix products to this many bits of the mantissa; sums stay float32."""

    def __init__(self, bits: int) -> None:
        super().__init__()
        self._bits = bits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PRODUCTS:
            args = tuple(rounded(x, self._bits) if x.dtype == torch.float32 else x for x in args)
        return func(*args, **(kwargs or {}))


def rounded(x: torch.Tensor, bits: int) -> torch.Tensor:
    """x with this many bits of the mantissa, to nearest, ties to even."""
    drop = 23 - bits
    whole = x.view(torch.int32)
    whole = whole + (2 ** (drop - 1) - 1) + (whole >> drop & 1)
    return (whole >> drop << drop).view(torch.float32)


@contextlib.contextmanager
def in_tf32() -> Iterator[None]:
    """All of SOAP's products as in TF32."""
    plain = soap.Soap._precision

    @contextlib.contextmanager
    def precision(self: soap.Soap) -> Iterator[None]:
        with plain(self), Rounded(TF32):
            yield

    with mock.patch.object(soap.Soap, "_precision", precision):
        yield


@contextlib.contextmanager
def with_bfloat16_statistics() -> Iterator[None]:
    """As in TF32, and the statistics' products from bfloat16 values."""
    plain = soap.outer_product

    def product(x: torch.Tensor, number: int) -> torch.Tensor:
        with Rounded(BFLOAT16):
            return plain(x, number)

    with in_tf32(), mock.patch.object(soap, "outer_product", product):
        yield


@contextlib.contextmanager
def with_statistics_every_second_step() -> Iterator[None]:
    """With the decay of two steps."""
    plain, calls = soap._update_statistics, 0

    def update(statistics: Any, gradients: Any, weight: float, skip: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls % 2:
            plain(statistics, gradients, 1 - (1 - weight) ** 2, skip)

    with mock.patch.object(soap, "_update_statistics", update):
        yield


@contextlib.contextmanager
def with_channels() -> Iterator[None]:
    """As in TF32, with bases along channels only, not along the cells of kernels."""
    with in_tf32(), mock.patch.object(soap, "sides_with_basis", return_value=[0, 1]):
        yield


VARIANTS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "TF32": in_tf32,
    "bfloat16": with_bfloat16_statistics,
    "second": with_statistics_every_second_step,
    "channels": with_channels,
}


def main() -> None:
    with VARIANTS[sys.argv[1]]():
        train.main(sys.argv[2:])


if __name__ == "__main__":
    run_script(main)
