"""Fourier transforms of fields on a periodic mesh, and work that is shared by the threads of one process."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import scipy.fft
import torch

MIN_SLABS = 16  # of a mesh, for any number of threads

Item = TypeVar("Item")
Result = TypeVar("Result")


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """torch uses one thread: others cost more than they gain on so few values, and may change the last bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def in_order(function: Callable[[Item], Result], items: Iterable[Item], threads: int) -> Iterator[Result]:
    """Yields the function's results for the items in order, computed by `threads` threads.

    At most `threads` results wait for the reader, which bounds the memory; ThreadPoolExecutor.map has no such bound.
    """
    waiting: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def split_rows(rows: int, slabs: int) -> list[slice]:
    """Divides an array of `rows` rows into slabs whose sizes differ by at most one row."""
    return [slice(index * rows // slabs, (index + 1) * rows // slabs) for index in range(slabs)]


def in_slabs(work: Callable[[slice], None], rows: int, threads: int) -> None:
    """Calls work(rows) for independent slabs of a cube of `rows` rows, about 10^6 cells each."""
    for _ in in_order(work, split_rows(rows, min(rows, max(MIN_SLABS, rows**3 >> 20))), threads):
        pass


def wavenumbers(n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """k_x [n, 1, 1], k_y [1, n, 1], k_z [1, 1, n // 2 + 1] of a real transform, in radians per cell."""
    full = (2 * np.pi * np.fft.fftfreq(n)).astype(np.float32)
    half = (2 * np.pi * np.fft.rfftfreq(n)).astype(np.float32)
    return full[:, None, None], full[None, :, None], half[None, None, :]


def forward(field: np.ndarray, threads: int) -> np.ndarray:
    """Real [n, n, n] to complex64 [n, n, n // 2 + 1]."""
    return scipy.fft.rfftn(field, workers=threads)


def backward(modes: np.ndarray, n: int, threads: int) -> np.ndarray:
    """The inverse of `forward`; may destroy `modes`."""
    return scipy.fft.irfftn(modes, s=(n, n, n), workers=threads, overwrite_x=True)


def multiplied(modes: np.ndarray, factor: Callable[..., np.ndarray], threads: int) -> np.ndarray:
    """modes * factor(kx, ky, kz), slab by slab, without a full grid of wavenumbers in memory."""
    n = len(modes)
    kx, ky, kz = wavenumbers(n)
    result = np.empty_like(modes)

    def work(rows: slice) -> None:
        np.multiply(modes[rows], factor(kx[rows], ky, kz), out=result[rows])

    in_slabs(work, n, threads)
    return result


def inverse_square(kx: np.ndarray, ky: np.ndarray, kz: np.ndarray) -> np.ndarray:
    """1 / k^2, and 0 for k = 0, since the mean of a periodic field has no potential."""
    square = kx * kx + ky * ky + kz * kz
    square[square == 0] = np.inf
    return 1 / square


def inverse_gradient(modes: np.ndarray, axis: int, threads: int) -> np.ndarray:
    """Component `axis` of -grad laplacian^-1 of the field with these modes, [n, n, n], in cells."""
    n = len(modes)

    def factor(*k: np.ndarray) -> np.ndarray:
        # An odd derivative of the Nyquist wave is not a real field and is set to zero.
        along = np.where(np.abs(k[axis]) > np.pi * (1 - 0.5 / n), 0, k[axis]) if n % 2 == 0 else k[axis]
        return (np.complex64(1j) * along) * inverse_square(*k)

    return backward(multiplied(modes, factor, threads), n, threads)
