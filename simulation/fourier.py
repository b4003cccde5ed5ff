"""Fourier transforms on a periodic mesh, and work by slabs in threads, whose number does not change the results."""

import contextlib
import functools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

import torch
from torch import Tensor

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


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Threads in which torch and MKL start no others; `one_thread` alone is not enough for MKL's transforms."""
    return ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))


def in_order(function: Callable[[Item], Result], items: Iterable[Item], threads: int) -> Iterator[Result]:
    """Yields the function's results for the items in order, computed by `threads` threads.

    At most `threads` results wait for the reader, which bounds the memory; ThreadPoolExecutor.map has no such bound.
    The function must not call this one.
    """
    waiting: deque[Future[Result]] = deque()
    try:
        for item in items:
            waiting.append(_pool(threads).submit(function, item))
            if len(waiting) > threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        wait(waiting)  # after an error, too


def split_rows(rows: int, slabs: int) -> list[slice]:
    """Divides an array of `rows` rows into slabs whose sizes differ by at most one row."""
    return [slice(index * rows // slabs, (index + 1) * rows // slabs) for index in range(slabs)]


def in_slabs(work: Callable[[slice], object], cube: Tensor, threads: int) -> None:
    """Calls work(rows) for independent slabs of as many rows as `cube` has, about 10^6 cells each; 10^7 on a GPU."""
    rows = len(cube)
    slabs = max(1, rows**3 >> 23) if cube.is_cuda else max(MIN_SLABS, rows**3 >> 20)
    for _ in in_order(work, split_rows(rows, min(rows, slabs)), threads):
        pass


def wavenumbers(n: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """k_x [n, 1, 1], k_y [1, n, 1], k_z [1, 1, n // 2 + 1] of a real transform, in radians per cell."""
    kinds = torch.fft.fftfreq, torch.fft.rfftfreq
    full, half = ((2 * math.pi * kind(n, dtype=torch.float64)).float().to(device) for kind in kinds)
    return full[:, None, None], full[None, :, None], half[None, None, :]


def forward(field: Tensor, threads: int) -> Tensor:
    """Real [n, n, n] to complex64 [n, n, n // 2 + 1]."""
    n = len(field)
    modes = torch.empty(n, n, n // 2 + 1, dtype=torch.complex64, device=field.device)
    in_slabs(lambda rows: modes[rows].copy_(torch.fft.rfft2(field[rows])), modes, threads)
    in_slabs(lambda rows: modes[:, rows].copy_(torch.fft.fft(modes[:, rows], dim=0)), modes, threads)
    return modes


def backward(modes: Tensor, threads: int) -> Tensor:
    """The inverse of `forward`; destroys `modes`."""
    n = len(modes)
    field = torch.empty(n, n, n, device=modes.device)
    in_slabs(lambda rows: modes[:, rows].copy_(torch.fft.ifft(modes[:, rows], dim=0)), modes, threads)
    in_slabs(lambda rows: field[rows].copy_(torch.fft.irfft2(modes[rows], s=(n, n))), modes, threads)
    return field


def multiplied(modes: Tensor, factor: Callable[..., Tensor], threads: int) -> Tensor:
    """modes * factor(kx, ky, kz), slab by slab, without a full grid of wavenumbers in memory."""
    kx, ky, kz = wavenumbers(len(modes), modes.device)
    result = torch.empty_like(modes)
    in_slabs(lambda rows: torch.mul(modes[rows], factor(kx[rows], ky, kz), out=result[rows]), modes, threads)
    return result


def inverse_square(kx: Tensor, ky: Tensor, kz: Tensor) -> Tensor:
    """1 / k^2, and 0 for k = 0, since the mean of a periodic field has no potential."""
    square = kx * kx + ky * ky + kz * kz
    return square.masked_fill_(square == 0, torch.inf).reciprocal_()
