"""Fourier transforms of fields on a periodic mesh, computed slab by slab in several threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import scipy.fft

MIN_SLABS = 16  # of a mesh, for any number of threads

Item = TypeVar("Item")


def in_order(function: Callable[[int], Item], count: int, threads: int) -> Iterator[Item]:
    """Yields function(0), function(1), ... in order, computed by `threads` threads.

    At most `threads` results wait for the reader, which bounds the memory; ThreadPoolExecutor.map has no such bound.
    """
    if threads == 1:
        yield from map(function, range(count))
        return
    waiting: deque[Future[Item]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for item in range(count):
            waiting.append(pool.submit(function, item))
            if len(waiting) > threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def slab(index: int, rows: int, slabs: int) -> slice:
    """Slab `index` of an array of `rows` rows; the sizes of slabs differ by at most one row."""
    return slice(index * rows // slabs, (index + 1) * rows // slabs)


def in_slabs(work: Callable[[slice], None], rows: int, threads: int) -> None:
    """Calls work(rows) for independent slabs of a cube of `rows` rows, about 10^6 cells each."""
    slabs = min(rows, max(MIN_SLABS, rows**3 >> 20))
    for _ in in_order(lambda index: work(slab(index, rows, slabs)), slabs, threads):
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


def power_spectrum(contrast: np.ndarray, box_size: float, threads: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Mean k in h/Mpc and mean power in (Mpc/h)^3 of shells one fundamental wide, from the fundamental to Nyquist.

    `contrast` is delta = density / mean - 1, [n, n, n]; `box_size` is in Mpc/h. There is no window correction.
    """
    n = len(contrast)
    power = np.abs(forward(contrast, threads)) ** 2 * (box_size**3 / n**6)
    k = np.sqrt(sum(component.astype(np.float64) ** 2 for component in wavenumbers(n))) * (n / (2 * np.pi))
    pairs = np.full(power.shape, 2.0)  # with the half space that a real transform omits
    pairs[..., 0] = 1.0
    if n % 2 == 0:
        pairs[..., -1] = 1.0
    shell = np.rint(k).astype(np.int64).ravel()
    count, wave, total = (np.bincount(shell, (pairs * part).ravel())[1 : n // 2 + 1] for part in (1.0, k, power))
    return wave / count * (2 * np.pi / box_size), total / count
