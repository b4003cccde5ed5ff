"""Evaluation during training: every so many epochs the whole validation box is painted and judged, on all ranks."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from utils.data.files.size_check import SizeCheck
from utils.data.files.hdf5 import Volume
from utils.distributed.world import World
from utils.errors import UserError
from utils.evaluation import figures
from utils.evaluation import html_report as page
from utils.evaluation import results as kept
from utils.evaluation.results import Results
from utils.evaluation.statistics import VolumeStatistics
from utils.files import recover
from utils.inference.sliding_window import ReadPlanes, Slab, SlidingWindowPredictor
from utils.profiling.memory import out_of_memory_for_users
from utils.runs import tags
from utils.runs.logger import NullLogger, read_records

FOLDER = "evaluation"
MEMORY_REMEDY = "take more ranks, a smaller evaluation.tile, or go on with --set evaluation.every_epochs=0"


class VolumeEvaluation:
    """Evaluates the whole validation volume every `every_epochs` epochs and after the last; keeps results in `folder`."""

    def __init__(
        self,
        painter: SlidingWindowPredictor,
        target: ReadPlanes,
        start: Callable[[], VolumeStatistics],
        *,
        every_epochs: int,
        num_epochs: int,
        folder: Path,
        world: World,
        logs: NullLogger,
        about: dict[str, Any],
    ) -> None:
        """`target(start, stop)` are planes [C, n, Y, Z] of the truth; `start` gives a new, empty evaluation."""
        self._painter, self._target, self._start = painter, target, start
        self._every_epochs, self._num_epochs = every_epochs, num_epochs
        self._folder, self._world, self._logs, self._about = folder, world, logs, about

    def after_epoch(self, epoch: int, step: int, stop_if_requested: Callable[[], None]) -> dict[str, float]:
        """Scalars of the evaluation after an epoch, none if it is not due; every rank calls it."""
        if epoch % self._every_epochs and epoch < self._num_epochs:
            return {}
        started = time.perf_counter()
        about = {**self._about, "epoch": epoch, "step": step, "tiles": self._painter.grid.about()}
        with out_of_memory_for_users(MEMORY_REMEDY):
            found = judge(
                self._painter.slabs(),
                self._target,
                self._start(),
                about,
                self._world,
                lambda slab, truth: stop_if_requested(),
            )
        if self._world.is_root:
            self._show(found, step)
        seconds = time.perf_counter() - started
        self._logs.info(f"  Evaluation, {self._painter.grid.count} tiles: {seconds:.3f} sec")
        for line in in_words(found):
            self._logs.info(f"  {line}")
        return found.scalars()

    def _show(self, found: Results, step: int) -> None:
        """Into the folder, where a full disk costs a warning, and TensorBoard."""
        try:
            kept.save(found, place(self._folder, step))
        except OSError as error:
            self._logs.warning(f"Cannot keep the evaluation in {self._folder}: {error.strerror or error}")
        self._draw(found, step)

    def _draw(self, found: Results, step: int) -> None:
        if importlib.util.find_spec("matplotlib") is None:
            return
        for name, figure in figures.of(found):
            self._logs.figure(tags.evaluation(name), figure, step)


def judge(
    slabs: Iterable[Slab],
    target: ReadPlanes,
    evaluation: VolumeStatistics,
    about: Mapping[str, Any],
    world: World,
    see: Callable[[Slab, torch.Tensor], Any] = lambda slab, truth: None,
) -> Results:
    """Holds a whole predicted box against the target; every rank calls it, and gets the same.

    `see` is given each slab, with the truth [C, n, Y, Z] on the device, in passing.
    """
    for slab in slabs:
        with world.raise_together():
            planes = np.array(target(slab.start, slab.start + slab.inputs.shape[1]))
        truth = torch.from_numpy(planes).to(world.device)
        evaluation.add(slab.start, slab.inputs, slab.predicted, truth)
        see(slab, truth)
    return evaluation.results(about)


def in_words(found: Results) -> list[str]:
    """An evaluation in a few lines, for logs and terminals."""
    width = max(len(channel.name) for channel in found.channels)
    lines = [
        f"{channel.name:<{width}}  L1 {l1:.6f}, R² {r2:.4f}"
        for channel, l1, r2 in zip(found.channels, found.l1, found.r2, strict=True)
    ]
    for name, spectrum in found.spectra.items():
        shells = [spectrum.at(k) for k in kept.telling_wavenumbers(spectrum)]
        told = "; ".join(
            f"k = {spectrum.k[shell]:.3g} {found.wavenumber_unit}: r {spectrum.correlation[shell]:.4f}, "
            f"P ratio {spectrum.ratio[shell]:.3f}"
            for shell in shells
        )
        lines.append(f"{name}: {told}")
    return lines


def draw(run: Path) -> list[Path]:
    """Writes report.html and, of several evaluations, evaluation.gif into a run's directory; what it has written."""
    kept_here = history(run / FOLDER)
    if not kept_here or importlib.util.find_spec("matplotlib") is None:
        return []
    made_by = json.loads((run / "provenance.json").read_text(encoding="utf-8"))
    about = {key: value for key, value in {**kept_here[-1].about, **made_by}.items() if key != "earlier"}
    written = [run / "report.html"]
    page.write(written[0], kept_here, about, loss_records=read_records(run / "metrics.jsonl"))
    if len(kept_here) > 1:
        written.append(run / "evaluation.gif")
        figures.movie(kept_here, written[1])
    return written


def place(folder: Path, step: int) -> Path:
    return folder / f"step_{step:08d}.npz"


def history(folder: Path) -> list[Results]:
    """All evaluations kept in a folder, in their order; those that cannot be read are left out."""
    found = []
    for path in sorted(folder.glob("step_*.npz")):
        try:
            found.append(kept.load(path))
        except UserError:
            continue
    return found


def forget_after(folder: Path, step: int) -> None:
    """Removes evaluations beyond the step that a training goes on from; an anew one has none before step 0."""
    if folder.is_dir():
        recover(folder)
    for path in folder.glob("step_*.npz"):
        if path.stem[5:].isdigit() and int(path.stem[5:]) > step:
            path.unlink(missing_ok=True)


def volume_planes(volume: Volume) -> tuple[ReadPlanes, ReadPlanes]:
    """Readers of a volume's inputs and targets, in planes along x; LocalError where a file has become shorter."""
    guard = SizeCheck(volume.files)

    def reader(field: Any) -> ReadPlanes:
        def planes(start: int, stop: int) -> np.ndarray:
            guard.check()
            return np.asarray(field[:, start:stop])

        return planes

    return reader(volume.inputs), reader(volume.targets)
