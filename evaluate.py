"""Judges painted gas by physics: paints a whole box whose gas is known, measures, and draws a report.

python evaluate.py --checkpoint runs/demo/2GPU/00 --input data/demo_val.h5 --output evaluation
torchrun --nproc-per-node=2 evaluate.py --checkpoint runs/demo/2GPU/00 --input data/demo_val.h5 --output evaluation
python evaluate.py --prediction gas.h5 --input data/demo_val.h5 --output evaluation

The output directory then holds report.html, its pictures, evaluation.json (all scalars, and what made them) and
evaluation.npz (spectra, distributions, slices).
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import logging
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from predict import (
    INPUT,
    OUTPUT,
    InferenceOptions,
    Trained,
    add_inference_options,
    agree_on_weights,
    build_painter,
    load_trained,
)
from utils import cli
from utils.config import Config
from utils.data.files.hdf5 import Fields
from utils.distributed import world as distributed
from utils.distributed.world import World
from utils.errors import UserError, one_line_errors
from utils.evaluation import callback as during
from utils.evaluation import figures, results
from utils.evaluation import html_report as page
from utils.evaluation.results import Results
from utils.evaluation.statistics import VolumeStatistics
from utils.files import atomic_directory
from utils.inference.channels import input_channels, target_channels
from utils.inference.sliding_window import ReadPlanes, Slab, SlidingWindowPredictor
from utils.inference.window_grid import WindowGrid, build_window_grid
from utils.profiling.memory import out_of_memory_for_users
from utils.progress import Progress
from utils.runs import logger as logs

NEAR_CELLS = 2  # from a tile's face: what counts as beside it
SLAB_CELLS = 2**22  # at once, of a prediction that is read from a file

WRITTEN = {"report.html", "evaluation.json", "evaluation.npz", *(f"{name}.png" for name in figures.PICTURES)}

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Options(InferenceOptions):
    """What the command line says; the flags have these names."""

    input: str
    output: str
    checkpoint: str | None = None
    prediction: str | None = None
    target: str | None = None
    one_tiling: bool = False
    overwrite: bool = False


@dataclass(frozen=True)
class TilingFound:
    """How a prediction in such tiles comes out: means over cells and channels, of the channels' values."""

    name: str
    tiles: str
    error: float  # mean |prediction − target|
    seam: float  # error beside tiles' faces, over that elsewhere; NaN where nothing is elsewhere
    difference: float  # mean |prediction − that in the first tiles|


def main(argv: Sequence[str] | None = None) -> None:
    """Reads the command line and judges; bad input ends in one line and exit code 2."""
    with one_line_errors():
        options = parse(argv)
        with distributed.connect(options.device) as world:
            logs.configure_logging(world.is_root)
            with out_of_memory_for_users("lower --batch_size, or --tile"):
                evaluate(options, world)


def evaluate(options: Options, world: World) -> None:
    """Every rank calls it; rank 0 writes."""
    output, trained, painter, weights = Path(options.output), None, None, None
    with world.raise_together():
        check_directory(output, options.overwrite)
    if options.checkpoint is not None:
        weights = agree_on_weights(options.checkpoint, world)
    with world.raise_together():
        trained = load_trained(str(weights), world.device) if weights is not None else None
        config = trained.config if trained else Config()
        nbody = Fields(options.input, INPUT, config.N_in_channels, config.transform)
        hydro = Fields(options.target or options.input, OUTPUT, config.N_out_channels, config.transform)
        sources = [nbody, hydro]
        if options.prediction is not None:
            if not Path(options.prediction).exists():
                raise UserError(f"no such file: {options.prediction}; predict.py makes one")
            sources.append(Fields(options.prediction, OUTPUT, config.N_out_channels, config.transform))
        for other in sources[1:]:
            if other.shape != nbody.shape:
                raise UserError(
                    f"{OUTPUT} of {other.path} has {other.shape} cells, {INPUT} of {nbody.path} {nbody.shape}"
                )
        if trained is not None:
            painter = build_painter(trained, nbody, options, world)
    channels = target_channels(config.N_out_channels, config.transform)
    evaluation = VolumeStatistics(
        channels,
        input_channels(config.N_in_channels, config.transform),
        nbody.shape,
        nbody.cell,
        world,
        config.vector_channels.targets,
    )
    periodic = not options.not_periodic and all(bool(source.attributes.get("periodic", True)) for source in sources)
    notes = {} if periodic else {"note": "the box is not periodic, which spectra and divergence take it to be"}
    about = {"input": options.input, "cell": nbody.cell, **notes, **describe(options, weights, trained, painter)}
    tilings: list[TilingFound] = []
    if painter is None:
        slabs = read_slabs(sources[0], sources[2], world)
        found = during.judge(slabs, hydro.planes, evaluation, about, world)
    else:
        found, tilings = judge_network(painter, hydro.planes, evaluation, about, options, world)
    for source in sources:
        source.close()
    for line in during.in_words(found):
        log.info(line)
    for each in tilings:
        log.info(
            "%s (%s): L1 %.6f, beside tiles' faces %.3f of elsewhere, differs by %.6f",
            *(each.name, each.tiles, each.error, each.seam, each.difference),
        )
    if not periodic:
        log.warning(
            "The box is not periodic, which spectra and divergence take it to be: they are off beside its faces"
        )
    record = logs.provenance(world)
    with world.raise_together():
        if world.is_root:
            write(output, found, tilings, options, record)
            log.info("report: %s", output / "report.html")


def describe(
    options: Options, weights: Path | None, trained: Trained | None, painter: SlidingWindowPredictor | None
) -> dict[str, Any]:
    """Where the prediction comes from."""
    if trained is None or painter is None:
        return {"prediction": options.prediction}
    return {**trained.record, "checkpoint": str(weights), "tiles": painter.tiling.about()}


def read_slabs(inputs: Fields, predicted: Fields, world: World) -> Iterator[Slab]:
    """A prediction that lies in a file."""
    (size, *plane), start = inputs.shape, 0
    thickness = max(1, SLAB_CELLS // (plane[0] * plane[1]))
    for number, start in enumerate(range(0, size, thickness)):
        with world.raise_together():
            parts = [np.array(field.planes(start, min(start + thickness, size))) for field in (inputs, predicted)]
        yield Slab(number, start, *(torch.from_numpy(part).to(world.device) for part in parts))


# --- tilings ---------------------------------------------------------------------------------------------------------


def judge_network(
    painter: SlidingWindowPredictor,
    target: ReadPlanes,
    evaluation: VolumeStatistics,
    about: Mapping[str, Any],
    options: Options,
    world: World,
) -> tuple[Results, list[TilingFound]]:
    """Judges the prediction, and on rank 0 how much of it is due to the tiles that it was made in."""
    shape = painter.tiling.shape
    with tempfile.TemporaryFile(dir=Path(options.output).absolute().parent) as scratch:
        first: np.ndarray | None = None
        with world.raise_together():
            if world.is_root and not options.one_tiling:
                first = room_for((painter.channels[1], *shape), scratch)
        meter = SeamError(painter.tiling)

        def see(slab: Slab, truth: torch.Tensor) -> None:
            meter.see(slab, truth)
            if first is not None:
                first[:, slab.start : slab.start + slab.predicted.shape[1]] = slab.predicted.cpu().numpy()

        slabs = painted(painter, "painting", world)
        found = during.judge(slabs, target, evaluation, about, world, see)
        tilings = [meter.found("as predicted")]
        for name, shift, tiling in (
            [] if options.one_tiling else other_tilings(painter.tiling, not options.not_periodic)
        ):
            other = dataclasses.replace(painter, tiling=tiling, read=moved(painter.read, shift, shape))
            meter, truths = SeamError(tiling), moved(target, shift, shape)
            for slab in painted(other, f"painting, {name}", world):
                stop = slab.start + slab.predicted.shape[1]
                with world.raise_together():
                    truth = torch.from_numpy(np.array(truths(slab.start, stop))).to(world.device)
                before = None if first is None else moved(lambda a, b: first[:, a:b], shift, shape)(slab.start, stop)
                meter.see(slab, truth, before)
            tilings.append(meter.found(name))
    return found, tilings


def room_for(shape: tuple[int, ...], scratch: IO[bytes]) -> np.ndarray:
    """An array in that file; UserError where the disk has no room: writing to it later would end the process."""
    size = 4 * math.prod(shape)
    try:
        if hasattr(os, "posix_fallocate"):  # macOS lacks it
            os.posix_fallocate(scratch.fileno(), 0, size)
        else:
            os.truncate(scratch.fileno(), size)
    except OSError as error:
        raise UserError(
            f"no room for the {size / 1e9:.1f} GB of a prediction beside --output ({error.strerror}); free some "
            "space, or give --one_tiling"
        ) from None
    return np.memmap(scratch, np.float32, "r+", shape=shape)


def painted(painter: SlidingWindowPredictor, title: str, world: World) -> Iterator[Slab]:
    """The painter's slabs, with a bar."""
    with Progress(title, painter.tiles(), "tiles", silent=not world.is_root) as progress:
        yield from painter.slabs(advance=progress.advance)


def other_tilings(tiling: WindowGrid, periodic: bool) -> list[tuple[str, int, WindowGrid]]:
    """Name, cells by which the box is moved, tiles; those that fit the box."""
    shape, tile = tiling.shape, tiling.x.tile
    step = tiling.x.origins[1] - tiling.x.origins[0] if len(tiling.x.origins) > 1 else tile
    found = []
    if periodic and step > 1:
        found.append(("moved by half a step", step // 2, tiling))
    if 2 * tile <= min(shape):
        found.append(("tiles twice as large", 0, build_window_grid(shape, 2 * tile, None, periodic)))
    found.append(("a quarter overlapping", 0, build_window_grid(shape, tile, max(1, 3 * tile // 4), periodic)))
    found.append(("not overlapping", 0, build_window_grid(shape, tile, tile, periodic)))
    return found


def moved(read: ReadPlanes, shift: int, shape: tuple[int, int, int]) -> ReadPlanes:
    """A periodic volume of that shape, moved so that what lay at cell `shift` of each axis lies at 0."""

    def planes(start: int, stop: int) -> np.ndarray:
        if shift == 0:
            return read(start, stop)
        place, count = (start + shift) % shape[0], stop - start
        parts = [read(place, min(place + count, shape[0]))]
        if place + count > shape[0]:
            parts.append(read(0, place + count - shape[0]))
        return np.roll(np.concatenate(parts, axis=1), (-shift, -shift), axis=(2, 3))

    return planes


class SeamError:
    """Errors of one tiling's prediction, beside the faces of its tiles and elsewhere."""

    def __init__(self, tiling: WindowGrid) -> None:
        self._tiling, self._near = tiling, tiling.near_faces(NEAR_CELLS)
        self._errors, self._cells = np.zeros(2), np.zeros(2)  # elsewhere, beside faces
        self._difference = 0.0

    def see(self, slab: Slab, truth: torch.Tensor, before: np.ndarray | None = None) -> None:
        """`before` [C, n, Y, Z] is the prediction in the first tiles."""
        near = torch.from_numpy(self._near[slab.start : slab.start + truth.shape[1]]).to(truth.device)
        error = (slab.predicted - truth).abs().mean(0).double()
        for place, cells in enumerate((~near, near)):
            self._errors[place] += float((error * cells).sum())
            self._cells[place] += int(cells.sum())
        if before is not None:
            difference = slab.predicted - torch.from_numpy(np.array(before)).to(truth.device)
            self._difference += float(difference.abs().mean(0).sum(dtype=torch.float64))

    def found(self, name: str) -> TilingFound:
        with np.errstate(invalid="ignore", divide="ignore"):
            elsewhere, near = self._errors / self._cells
        cells = self._cells.sum()
        about, difference = self._tiling.about(), self._difference / cells
        return TilingFound(name, about, float(self._errors.sum() / cells), float(near / elsewhere), difference)


# --- what is written -------------------------------------------------------------------------------------------------


def write(
    output: Path, found: Results, tilings: Sequence[TilingFound], options: Options, record: Mapping[str, Any]
) -> None:
    """The output directory, whole or not at all."""
    history, records = [found], []
    run = Path(options.checkpoint) if options.checkpoint else None
    if run is not None and (run / during.FOLDER).is_dir():
        here = Path(options.input).resolve()
        of_this_box = [
            each for each in during.history(run / during.FOLDER) if Path(str(each.about.get("input"))).resolve() == here
        ]
        # This evaluation is of one of the run's checkpoints, and takes the place of the one made then.
        history = [each for each in of_this_box if each.about.get("step") != found.about.get("step")] + [found]
        history.sort(key=lambda each: each.about.get("step") or 0)
        records = logs.read_records(run / "metrics.jsonl")
    summary = {
        "scalars": found.scalars(),
        "spectra": {
            name: {
                f"k ({found.wavenumber_unit})": _short(each.k),
                "P ratio": _short(each.ratio),
                "r": _short(each.correlation),
            }
            for name, each in found.spectra.items()
        },
        "about": dict(found.about),
        "tilings": [dataclasses.asdict(each) for each in tilings],
        "provenance": dict(record),
    }
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with atomic_directory(output) as partial:
            results.save(found, partial / "evaluation.npz")
            (partial / "evaluation.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
            draw(partial, found, history, tilings, records, record)
    except OSError as error:
        raise UserError(f"cannot write {output}: {error.strerror or error}; give another --output") from None


def _short(values: np.ndarray) -> list[float | None]:
    """Six digits of each; JSON has no NaN."""
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in values]


def draw(
    folder: Path,
    found: Results,
    history: Sequence[Results],
    tilings: Sequence[TilingFound],
    records: Sequence[Mapping[str, Any]],
    record: Mapping[str, Any],
) -> None:
    """report.html and its pictures."""
    if importlib.util.find_spec("matplotlib") is None:
        log.info("matplotlib is not installed (pip install matplotlib): no pictures, no report")
        return
    for name, figure in figures.of(found):
        (folder / f"{name}.png").write_bytes(figures.encoded(figure))
    heads = ("tiles", "", "L1", "L1 beside tiles' faces / elsewhere", "mean |difference| to the first")
    rows = [
        (each.name, each.tiles, f"{each.error:.6f}", f"{each.seam:.3f}", f"{each.difference:.6f}") for each in tilings
    ]
    tables = [("Tilings", heads, rows)] if tilings else []
    about = {**found.about, **record}
    page.write(folder / "report.html", history, about, tables, [dict(each) for each in records])


def check_directory(output: Path, overwrite: bool) -> None:
    """UserError where a report may not be written there."""
    if output.exists() and not output.is_dir():
        raise UserError(f"output {output} is a file; give the name of a directory")
    try:
        there = {path.name for path in output.iterdir()} if output.exists() else set()
        output.absolute().parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output.absolute().parent):
            pass
    except OSError as error:
        raise UserError(f"cannot write {output}: {error.strerror or error}; give another --output") from None
    others = sorted(there - WRITTEN)
    if others:  # --overwrite would remove them
        raise UserError(f"output {output} holds {others[0]}, which is of no report; give another --output")
    if there and not overwrite:
        raise UserError(f"output {output} exists; give --overwrite to replace it, or another --output")


def parse(argv: Sequence[str] | None = None) -> Options:
    """Raises UserError for what it cannot read."""
    parser = cli.Parser(__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--checkpoint", help="a run's directory (its best one), a checkpoint's, or its weights.pt")
    what.add_argument("--prediction", help=f"HDF5 file with painted {OUTPUT}, as predict.py writes it")
    parser.add_argument("--input", required=True, help=f"HDF5 file with {INPUT}, and the true {OUTPUT}")
    parser.add_argument("--target", help=f"another file with the true {OUTPUT}")
    parser.add_argument("--output", required=True, help="directory of the report")
    parser.add_argument("--overwrite", action="store_true", help="replace that directory")
    parser.add_argument("--one_tiling", action="store_true", help="do not compare with other ways to cut the box")
    add_inference_options(parser)
    return Options(**vars(parser.parse_args(argv)))


if __name__ == "__main__":
    distributed.run_script(main)
