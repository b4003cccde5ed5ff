"""Sliding-window prediction of a whole volume on all ranks, in slabs along x.

Memory holds a slab of one window's thickness, regardless of the volume's length along x. Windows that begin at the same
plane form a layer. Ranks share the windows of a layer and sum their weighted predictions.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from utils.data.files.page_cache import memory_limit
from utils.distributed.world import World
from utils.inference.window_grid import AxisPart, Box, Segment, WindowGrid, wrapped_segments
from utils.progress import Progress

ReadBox = Callable[[slice, slice, slice], np.ndarray]  # -> input cells [C, x, y, z], float32, within the volume
Predict = Callable[[torch.Tensor], torch.Tensor]


class Slab(NamedTuple):
    """Finished planes, on every rank: `inputs` [C_in, n, Y, Z] and `predicted` [C_out, n, Y, Z], on the device."""

    number: int
    start: int
    inputs: torch.Tensor
    predicted: torch.Tensor


class Block(NamedTuple):
    """A predicted box of cells: `inputs` [C_in, x, y, z] and `predicted` [C_out, x, y, z], on the device."""

    box: Box
    inputs: torch.Tensor
    predicted: torch.Tensor


@dataclass(frozen=True)
class SlidingWindowPredictor:
    """Predicts a volume window by window; if `read` raises UserError on one rank, all ranks raise it."""

    predict: Predict  # [N, C_in, W, W, W] -> [N, C_out, W, W, W], on the world's device
    read: ReadBox
    grid: WindowGrid
    channels: tuple[int, int]  # C_in, C_out
    batch_size: int  # windows per rank and forward pass
    world: World

    @property
    def starts(self) -> tuple[int, ...]:
        """The first plane of each slab, and the end of the last one."""
        return (*self.grid.x.origins, self.grid.x.size)

    def window_count(self, first: int = 0) -> int:
        """Number of windows that this rank predicts for the slabs from number `first` on."""
        return len(self._own_windows()) * len(layers(self.grid, first))

    def slabs(self, first: int = 0, advance: Callable[[int], None] = lambda windows: None) -> Iterator[Slab]:
        """The slabs from number `first` on; every rank calls it.

        `advance` is called with the size of each batch of windows that this rank has predicted. A slab is valid until
        the next one is requested.
        """
        axis, device = self.grid.x, self.world.device
        begin, todo = axis.origins[first], layers(self.grid, first)
        inputs, total = (
            torch.zeros((channels, axis.window, *self.grid.shape[1:]), device=device) for channels in self.channels
        )
        known = 0  # planes of `inputs` that have been read
        for index, (origin, number) in enumerate(todo):
            with self.world.raise_together():
                self._read(origin + known, inputs[:, known:])
            self.world.heartbeat.progress("prediction")  # also on ranks that have no windows
            self._add_layer(number, inputs, total, advance)
            is_wanted = origin >= begin
            stop = self.starts[number + 1] if is_wanted else todo[index + 1][0]
            done = stop - origin  # planes that no later layer reaches
            if is_wanted:
                yield Slab(number, origin, inputs[:, :done], self.world.sum(total[:, :done]))
            known = axis.window - done
            for field in (inputs, total):
                field[:, :known] = field[:, done:].clone()
            total[:, known:] = 0

    def most_cells(self, per_node: int) -> int:
        """Number of cells of a block that needs about a quarter of the memory of one of `per_node` ranks."""
        limit, device = memory_limit() // per_node, self.world.device
        if device.type == "cuda":
            limit = min(limit, torch.cuda.mem_get_info(device)[0])
        return limit // 4 // (4 * (2 * self.channels[0] + 3 * self.channels[1]))

    def predict_box(self, box: Box, advance: Callable[[int], None] = lambda windows: None) -> Block:
        """Predicts a box of cells on this rank alone.

        The bits of a cell do not depend on the box: a cell's windows are added in the order of their numbers, and all
        batches have the same size. `advance` is called with the number of windows of each batch.
        """
        grid, device, side = self.grid, self.world.device, self.grid.x.window
        parts = grid.parts(box)
        inputs = self._read_box(parts)
        total = torch.zeros((self.channels[1], *(cells.stop - cells.start for cells in box)), device=device)
        along = [torch.from_numpy(axis.weights).to(device) for axis in grid.axes]
        places = list(itertools.product(*(part.windows for part in parts)))
        windows = torch.zeros((self.batch_size, len(inputs), side, side, side), device=device)
        for begin in range(0, len(places), self.batch_size):
            batch = places[begin : begin + self.batch_size]
            for window, place in zip(windows, batch, strict=False):
                for x, y, z in itertools.product(*(one.inputs for one in place)):
                    window[:, x.window, y.window, z.window] = inputs[:, x.volume, y.volume, z.volume]
            for output, place in zip(self.predict(windows).float(), batch, strict=False):
                x_weights, y_weights, z_weights = (along[axis][one.number] for axis, one in enumerate(place))
                weighted = output * (x_weights.view(-1, 1, 1) * (y_weights.view(-1, 1) * z_weights))
                for x, y, z in itertools.product(*(one.outputs for one in place)):
                    total[:, x.volume, y.volume, z.volume] += weighted[:, x.window, y.window, z.window]
            self.world.heartbeat.progress("prediction")
            advance(len(batch))
        for axis, part in enumerate(parts, start=1):
            inputs = inputs.narrow(axis, part.start - part.first, part.stop - part.start)
        return Block(box, inputs, total)

    def _read_box(self, parts: Sequence[AxisPart]) -> torch.Tensor:
        """The input cells of all windows, [C_in, x, y, z]."""
        inputs = torch.empty((self.channels[0], *(part.length for part in parts)), device=self.world.device)
        pieces = (
            wrapped_segments(part.first % axis.size, part.length, axis.size)
            for part, axis in zip(parts, self.grid.axes, strict=True)
        )
        for x, y, z in itertools.product(*pieces):
            values = np.array(self.read(x.volume, y.volume, z.volume))
            inputs[:, x.window, y.window, z.window] = torch.from_numpy(values).to(inputs.device)
        return inputs

    def _own_windows(self) -> list[tuple[int, int]]:
        return self.grid.layer()[self.world.rank :: self.world.size]

    def _read(self, start: int, out: torch.Tensor) -> None:
        """Reads planes from `start` on into `out` [C, n, Y, Z], wrapping around the end."""
        for inside, volume in wrapped_segments(start, out.shape[1], self.grid.x.size):
            planes = np.array(self.read(volume, slice(None), slice(None)))
            out[:, inside] = torch.from_numpy(planes).to(out.device)

    def _add_layer(
        self, number: int, inputs: torch.Tensor, total: torch.Tensor, advance: Callable[[int], None]
    ) -> None:
        """Adds this rank's weighted windows of layer `number` to `total` [C_out, W, Y, Z]."""
        axes = (self.grid.x, self.grid.y, self.grid.z)
        along_x, along_y, along_z = (torch.from_numpy(axis.weights).to(total.device) for axis in axes)
        side, mine = self.grid.x.window, self._own_windows()
        for begin in range(0, len(mine), self.batch_size):
            batch = mine[begin : begin + self.batch_size]
            self.world.heartbeat.progress("prediction")
            windows = torch.empty((len(batch), len(inputs), side, side, side), device=inputs.device)
            for window, place in zip(windows, batch, strict=True):
                for y, z in self._wrapped_segments(*place):
                    window[:, :, y.window, z.window] = inputs[:, :, y.volume, z.volume]
            for output, place in zip(self.predict(windows).float(), batch, strict=True):
                weights = along_y[place[0]].view(-1, 1) * along_z[place[1]]  # [W, W]
                weighted = output * (along_x[number].view(-1, 1, 1) * weights)
                for y, z in self._wrapped_segments(*place):
                    total[:, :, y.volume, z.volume] += weighted[:, :, y.window, z.window]
            advance(len(batch))

    def _wrapped_segments(self, y: int, z: int) -> Iterator[tuple[Segment, Segment]]:
        """The pieces of a window across its layer, split where it wraps around the box."""
        along_y, along_z = (
            wrapped_segments(axis.origins[number], axis.window, axis.size)
            for axis, number in ((self.grid.y, y), (self.grid.z, z))
        )
        return itertools.product(along_y, along_z)


def predicted_slabs(predictor: SlidingWindowPredictor, title: str, first: int = 0) -> Iterator[Slab]:
    """The predictor's slabs from number `first` on, with a progress bar."""
    with Progress(title, predictor.window_count(first), "windows") as progress:
        yield from predictor.slabs(first, progress.advance)


def layers(grid: WindowGrid, first: int = 0) -> list[tuple[int, int]]:
    """The layers that contribute to the slabs from number `first` on, in order: (first plane, number).

    Layers that begin before that slab and reach into it come first. In a periodic volume they may begin behind its end,
    and then have negative planes.
    """
    axis = grid.x
    begin = axis.origins[first]
    wraps = any(origin + axis.window > axis.size for origin in axis.origins)
    before = [(origin - axis.size, number) for number, origin in enumerate(axis.origins)] if wraps else []
    before += [(origin, number) for number, origin in enumerate(axis.origins[:first])]
    reaching = [(origin, number) for origin, number in before if origin > begin - axis.window]
    return reaching + [(axis.origins[number], number) for number in range(first, len(axis.origins))]


def forward_pass(network: torch.nn.Module, precision: str, device: torch.device) -> Predict:
    """The network's forward pass in one of PRECISIONS. Sets cuDNN's switches for the whole process.

    On a GPU, converts the network to channels-last.
    """
    # cuDNN's search would choose other algorithms for other batch sizes, and so make results depend on them.
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    if device.type == "cuda":
        # Convolutions follow the weights' format. Some versions of cuDNN fail in the other one: see steps/backends.py.
        network.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload] # its stubs lack it

    @torch.inference_mode()
    def predict(windows: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bfloat16"):
            return network(windows)

    return predict
