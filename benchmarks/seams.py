"""Influence of the window grid on a prediction: errors near the windows' faces, and differences between grids.

python -m benchmarks.seams --checkpoint runs/demo/2ranks/00 --input data/demo_val.h5

The first grid is the one that predict.py uses with the same --window and --overlap. The others are that grid shifted by
half a step, windows twice as large, a quarter of overlap, and no overlap. The first prediction of the whole volume is
kept in memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.common import Parser, save, settings
from utils import cli
from utils.distributed.devices import choose_device, out_of_memory_for_users
from utils.distributed.launch import Launch
from utils.distributed.world import World
from utils.errors import one_line_errors
from utils.evaluation.volume import INPUT, OUTPUT, VolumeFields
from utils.inference.sliding_window import ReadPlanes, Slab, SlidingWindowPredictor, predicted_slabs
from utils.inference.trained_network import InferenceOptions, TrainedNetwork, add_inference_options, build_predictor
from utils.inference.window_grid import WindowGrid, build_window_grid
from utils.log import configure_logging
from utils.training.checkpoint import resolve_weights

NEAR_CELLS = 2  # a cell closer than this to a window's face counts as near it

log = logging.getLogger(__name__)


class Variant(NamedTuple):
    """A window grid, applied to the volume after a shift by some cells along each axis."""

    name: str
    grid: WindowGrid
    shift: int = 0


class SeamError:
    """Mean absolute errors of one prediction near the faces of its windows and elsewhere, in channel values."""

    def __init__(self, grid: WindowGrid) -> None:
        self._near = near_faces(grid)
        self._errors, self._cells = np.zeros(2), np.zeros(2)  # elsewhere, near faces
        self._difference = 0.0

    def add(self, slab: Slab, target: torch.Tensor, reference: np.ndarray | None = None) -> None:
        """Adds planes; `target` and `reference`, the prediction of the first grid, are [C, n, Y, Z]."""
        near = torch.from_numpy(self._near[slab.start : slab.start + target.shape[1]]).to(target.device)
        error = (slab.predicted - target).abs().mean(0).double()
        for place, cells in enumerate((~near, near)):
            self._errors[place] += float((error * cells).sum())
            self._cells[place] += int(cells.sum())
        if reference is not None:
            difference = slab.predicted - torch.from_numpy(np.array(reference)).to(target.device)
            self._difference += float(difference.abs().mean(0).sum(dtype=torch.float64))

    def results(self) -> dict[str, float | None]:
        """Mean error, error near faces over that elsewhere (None if undefined), mean difference to the first grid."""
        with np.errstate(invalid="ignore", divide="ignore"):
            elsewhere, near = self._errors / self._cells
            ratio = float(near / elsewhere)
        cells = float(self._cells.sum())
        return {
            "l1": float(self._errors.sum()) / cells,
            "l1_near_faces_over_elsewhere": ratio if math.isfinite(ratio) else None,
            "difference_to_first": self._difference / cells,
        }


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(__doc__)
    cli.add_checkpoint_option(parser, required=True)
    parser.add_argument("--input", required=True, help=f"HDF5 file with {INPUT} and the true {OUTPUT}")
    add_inference_options(parser)
    with one_line_errors():
        options = parser.parse_args(argv)
        configure_logging(0)
        with out_of_memory_for_users("lower --batch_size or --window"):
            log.info("wrote %s", save("seams", measure(options), options.output))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Predicts the volume with each grid."""
    world = World(Launch("benchmark"), choose_device(options.device, 0))
    trained = TrainedNetwork.load(resolve_weights(options.checkpoint, world), world.device)
    inference = {field.name: getattr(options, field.name) for field in dataclasses.fields(InferenceOptions)}
    rows: list[dict[str, Any]] = []
    with closing(VolumeFields.open(options.input, None, trained.config)) as fields:
        first = build_predictor(trained, fields.inputs, InferenceOptions(**inference), world)
        reference = np.empty((first.channels[1], *first.grid.shape), np.float32)
        for variant in variants(first.grid, periodic=not options.not_periodic):
            errors = seam_error(variant, first, fields.target.planes, reference, is_first=not rows).results()
            rows.append({"name": variant.name, "windows": variant.grid.describe(), **errors})
            log.info(f"{variant.name}, {variant.grid.describe()}: {json.dumps(errors)}")
    return {"settings": settings(options), "shape": first.grid.shape, "grids": rows}


def variants(grid: WindowGrid, periodic: bool) -> Iterator[Variant]:
    """The first grid, and all other grids that fit the volume."""
    shape, window = grid.shape, grid.x.window
    step = grid.x.origins[1] - grid.x.origins[0] if len(grid.x.origins) > 1 else window
    yield Variant("as predicted", grid)
    if periodic and step > 1:
        yield Variant("shifted by half a step", grid, step // 2)
    if 2 * window <= min(shape):
        yield Variant("windows twice as large", build_window_grid(shape, 2 * window, None, periodic))
    quarter = window - max(1, 3 * window // 4)
    yield Variant("a quarter of overlap", build_window_grid(shape, window, quarter, periodic))
    yield Variant("no overlap", build_window_grid(shape, window, 0, periodic))


def seam_error(
    variant: Variant, first: SlidingWindowPredictor, target: ReadPlanes, reference: np.ndarray, is_first: bool
) -> SeamError:
    """Predicts with one grid. The first prediction fills `reference` [C, X, Y, Z]; later ones are compared with it."""
    shape, shift = first.grid.shape, variant.shift
    predictor = dataclasses.replace(first, grid=variant.grid, read=shifted(first.read, shift, shape))
    read_target = shifted(target, shift, shape)
    read_reference = shifted(lambda start, stop: reference[:, start:stop], shift, shape)
    errors = SeamError(variant.grid)
    for slab in predicted_slabs(predictor, variant.name):
        start, stop = slab.start, slab.start + slab.predicted.shape[1]
        if is_first:
            reference[:, start:stop] = slab.predicted.cpu().numpy()
        truth = torch.from_numpy(np.array(read_target(start, stop))).to(slab.predicted.device)
        errors.add(slab, truth, read_reference(start, stop))
    return errors


def near_faces(grid: WindowGrid) -> np.ndarray:
    """Mask [X, Y, Z] of the cells closer than NEAR_CELLS to an inner face of a window."""
    near = []
    for axis in (grid.x, grid.y, grid.z):
        periodic = any(origin + axis.window > axis.size for origin in axis.origins)
        faces = {place for origin in axis.origins for place in (origin, origin + axis.window)}
        faces = {face % axis.size for face in faces} if periodic else faces - {0, axis.size}
        center = np.arange(axis.size) + 0.5
        close = np.zeros(axis.size, dtype=bool)
        for face in faces:
            away = np.abs(center - face)
            close |= np.minimum(away, axis.size - away if periodic else away) < NEAR_CELLS
        near.append(close)
    return near[0][:, None, None] | near[1][:, None] | near[2]


def shifted(read: ReadPlanes, shift: int, shape: tuple[int, int, int]) -> ReadPlanes:
    """Reads a periodic volume of that shape shifted along each axis: cell `shift` becomes cell 0."""

    def planes(start: int, stop: int) -> np.ndarray:
        if shift == 0:
            return read(start, stop)
        place, count = (start + shift) % shape[0], stop - start
        parts = [read(place, min(place + count, shape[0]))]
        if place + count > shape[0]:
            parts.append(read(0, place + count - shape[0]))
        return np.roll(np.concatenate(parts, axis=1), (-shift, -shift), axis=(2, 3))

    return planes


if __name__ == "__main__":
    main()
