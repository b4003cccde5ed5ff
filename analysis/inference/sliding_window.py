"""Sliding-window prediction: of a box of cells on one rank alone, or of a whole volume in slabs on all ranks.

The memory is that of a box, or of the own slab and a block of windows. Boxes are predicted with the same bits whatever
their size, and windows that two boxes share twice; slabs are equal within rounding, and each window is predicted once.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from analysis.inference.window_grid import Axis, AxisPart, Box, Segment, WindowGrid, window_count
from analysis.slabs import Slabs
from networks.ops import plan
from utils.data.symmetry import Vectors, apply_on_device, channel_table, inverse
from utils.distributed.world import World
from utils.volumes.page_cache import memory_limit

Predict = Callable[[Tensor], Tensor]

# Blocks of windows whose planes go to several ranks: enough to share them evenly, and small next to the planes.
BLOCKS_PER_RANK = 4
BLOCK_CELLS = 128**3


class Block(NamedTuple):
    """A predicted box of cells: `inputs` [C_in, x, y, z] and `predicted` [C_out, x, y, z], on the device."""

    inputs: Tensor
    predicted: Tensor


@dataclass(frozen=True)
class SlidingWindowPredictor:
    """Predicts a volume window by window; if `read` raises UserError on one rank, all ranks raise it."""

    predict: Predict  # [N, C_in, W, W, W] -> [N, C_out, W, W, W], on the world's device
    read: Callable[[slice, slice, slice], np.ndarray]  # -> input cells [C, x, y, z], float32, within the volume
    grid: WindowGrid
    channels: tuple[int, int]  # C_in, C_out
    batch_size: int  # windows per rank and forward pass
    world: World

    def most_cells(self, per_node: int) -> int:
        """Number of cells of a block that needs about a third of the memory of one of `per_node` ranks."""
        (inputs, outputs), device, limit = self.channels, self.world.device, memory_limit() // per_node // 3
        if device.type != "cuda":
            return limit // (4 * (2 * inputs + 3 * outputs))
        on_device = torch.cuda.mem_get_info(device)[0] // 3
        return min(limit // (4 * 3 * outputs), on_device // (4 * (inputs + outputs)))

    def predict_box(self, box: Box) -> Block:
        """Predicts cells on this rank alone, with bits that do not depend on the box: one order and batch size."""
        parts = self.grid.parts(box)
        inputs = self._read_box(parts)
        total = self._blend(inputs, parts, self.batch_size)
        for axis, part in enumerate(parts, start=1):
            inputs = inputs.narrow(axis, part.start - part.first, part.stop - part.start)
        return Block(inputs, total)

    def window_count(self) -> int:
        """Number of windows that this rank predicts in `predict_planes`."""
        rank = self.world.rank
        return sum(window_count(turn[rank]) for turn in self._turns() if rank < len(turn))

    def predict_planes(self, slabs: Slabs) -> Tensor:
        """Predicts this rank's planes [C_out, n, Y, Z]; every rank calls it. Each window is predicted on one rank."""
        total, rank = slabs.empty(self.channels[1]).zero_(), self.world.rank
        self.world.pulse.enter("prediction")
        for turn in self._turns():
            parts = turn[rank] if rank < len(turn) else ()
            with self.world.raise_together():
                inputs = self._read_box(parts) if parts else None
            self._send(None if inputs is None else self._blend(inputs, parts), turn, slabs, total)
            self.world.pulse.meet()
        return total

    def _turns(self) -> list[list[tuple[AxisPart, ...]]]:
        """Blocks of windows, in lists of one block per rank; the last list may be shorter."""
        ranks, grid = self.world.size, self.grid
        count = max(ranks, min(BLOCKS_PER_RANK * ranks, grid.windows // self.batch_size))
        ranges = grid.split_windows(max(grid.shape), count, BLOCK_CELLS)
        along = [[*map(axis.consecutive, parts)] for axis, parts in zip(grid, ranges, strict=True)]
        # Large ones first: the last turn, which some ranks may miss, is short.
        blocks = sorted(itertools.product(*along), key=window_count, reverse=True)
        return [blocks[first : first + ranks] for first in range(0, len(blocks), ranks)]

    def _send(self, blended: Tensor | None, turn: Sequence[Sequence[AxisPart]], slabs: Slabs, total: Tensor) -> None:
        """Adds the cells of all ranks' blocks of windows to the planes of their owners."""
        channels, (x, y, z) = self.channels[1], self.grid
        sender = turn[self.world.rank][:1] if blended is not None else []
        places = [[place for part in sender for place in _within(part, x, planes)] for planes in slabs.shares]
        sent = [[blended[:, place.window].flatten() for place in of_rank] for of_rank in places if blended is not None]
        sizes, pieces = [0] * self.world.size, []
        for number, parts in enumerate(turn):
            for place in _within(parts[0], x, slabs.planes):
                shape = channels, place.window.stop - place.window.start, parts[1].length, parts[2].length
                sizes[number] += math.prod(shape)
                pieces.append((parts, place.volume, shape))
        flat = torch.cat([total.new_empty(0), *itertools.chain(*sent)])
        sent_sizes = [sum(map(torch.numel, parts)) for parts in sent] or [0] * self.world.size
        values = self.world.exchange(flat, sent_sizes, sizes).split([math.prod(shape) for *_, shape in pieces])
        for (parts, planes, shape), piece in zip(pieces, values, strict=True):
            along = (axis.segments(part.first, part.length) for axis, part in zip((y, z), parts[1:], strict=True))
            for row, line in itertools.product(*along):
                cells = piece.view(shape)[:, :, row.window, line.window]
                total[:, slabs.local(planes), row.volume, line.volume] += cells

    def _blend(self, inputs: Tensor, parts: Sequence[AxisPart], fixed_batch: int = 0) -> Tensor:
        """Sum of weighted predictions in [start, stop) of each axis, [C_out, x, y, z], in batches of `fixed_batch`."""
        device, side = self.world.device, self.grid.x.window
        total = torch.zeros((self.channels[1], *(part.stop - part.start for part in parts)), device=device)
        along = [torch.from_numpy(axis.weights).to(device) for axis in self.grid]
        places = list(itertools.product(*(part.windows for part in parts)))
        windows = torch.zeros((self.batch_size, len(inputs), side, side, side), device=device)
        for begin in range(0, len(places), self.batch_size):
            batch = places[begin : begin + self.batch_size]
            for window, place in zip(windows, batch, strict=False):
                for x, y, z in itertools.product(*(part.inputs for part in place)):
                    window[:, x.window, y.window, z.window] = inputs[:, x.volume, y.volume, z.volume]
            outputs = self.predict(windows[: fixed_batch or len(batch)]).float()
            for output, place in zip(outputs, batch, strict=False):
                x_weights, y_weights, z_weights = (along[axis][part.number] for axis, part in enumerate(place))
                weighted = output * (x_weights.view(-1, 1, 1) * (y_weights.view(-1, 1) * z_weights))
                for x, y, z in itertools.product(*(part.outputs for part in place)):
                    total[:, x.volume, y.volume, z.volume] += weighted[:, x.window, y.window, z.window]
            self.world.pulse.advance(len(batch))
        return total

    def _read_box(self, parts: Sequence[AxisPart]) -> Tensor:
        """The input cells of all windows, [C_in, x, y, z]."""
        inputs = torch.empty((self.channels[0], *(part.length for part in parts)), device=self.world.device)
        pieces = (axis.segments(part.first, part.length) for axis, part in zip(self.grid, parts, strict=True))
        for x, y, z in itertools.product(*pieces):
            values = np.array(self.read(x.volume, y.volume, z.volume))
            inputs[:, x.window, y.window, z.window] = torch.from_numpy(values).to(inputs.device)
        return inputs


def _within(part: AxisPart, axis: Axis, planes: slice) -> Iterator[Segment]:
    """The cells of a part of an axis that lie in `planes`."""
    for cells, volume in axis.segments(part.first, part.length):
        start, stop = max(volume.start, planes.start), min(volume.stop, planes.stop)
        if start < stop:
            begin = cells.start + start - volume.start
            yield Segment(slice(begin, begin + stop - start), slice(start, stop))


def with_conditions(predict: Callable[..., Tensor], conditions: Sequence[float], device: torch.device) -> Predict:
    """`predict` with the conditions of a volume, the same for all windows; `predict` itself if there are none."""
    if not conditions:
        return predict
    row = torch.tensor([conditions], dtype=torch.float32, device=device)
    return lambda windows: predict(windows, row.expand(len(windows), -1))


def forward_pass(
    network: torch.nn.Module, precision: str, device: torch.device, window: int, kernels: str = "auto"
) -> Callable[..., Tensor]:
    """The forward pass in one of PRECISIONS. Sets cuDNN's switches; converts a network on a GPU to channels-last.

    In bfloat16, `kernels` (the config's key) chooses the operations for windows of `window` cells.
    """
    # cuDNN's search would choose other algorithms for other batch sizes, and so make results depend on them.
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    form = torch.channels_last_3d if device.type == "cuda" else torch.preserve_format
    # Convolutions follow the weights' format. Some versions of cuDNN fail in the other one: see steps/backends.py.
    network.to(memory_format=form)  # type: ignore[call-overload] # its stubs lack it

    if precision == "bfloat16":
        setting = plan.Setting(kernels, window, torch.bfloat16, device)
        plan.apply(network, plan.make(network, setting), setting.dtype)

    @torch.inference_mode()
    def predict(windows: Tensor, *conditions: Tensor) -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bfloat16"):
            return network(windows.contiguous(memory_format=form), *conditions)

    return predict


def symmetry_mean(
    networks: Sequence[Predict],
    count: int,
    channels: tuple[int, int],
    vectors: tuple[Vectors, Vectors],
    world: World,
    spread: bool = False,
) -> Predict:
    """The mean of the networks' predictions under the first `count` symmetries of the cube, mapped back, in float32.

    If these are a group, the mean is equivariant under it, regardless of the networks. `channels` and `vectors` are
    those of inputs and targets. `spread`: the variances of the predictions follow the means, [N, 2 C_out, W, W, W].
    """
    number = count * len(networks)
    if number == 1 and not spread:
        return networks[0]
    tables = (channel_table(*side, "full") for side in zip(channels, vectors, strict=True))
    before, after = ([torch.from_numpy(part).to(world.device) for part in table] for table in tables)

    @torch.inference_mode()
    def mean(windows: Tensor) -> Tensor:
        total = squares = torch.zeros((), device=windows.device)
        first = None
        for index, predict in itertools.product(range(count), networks):
            outputs = predict(apply_on_device(windows, index, *before)).float()
            outputs = apply_on_device(outputs, inverse(index), *after)
            total = total + outputs
            if spread:
                first = outputs if first is None else first
                squares = squares + (outputs - first).square()  # of small differences: rounding matters less
            world.pulse.advance()
        means = total / number
        if first is None:
            return means
        return torch.cat([means, (squares / number - (means - first).square()).clamp(min=0)], dim=1)

    return mean
