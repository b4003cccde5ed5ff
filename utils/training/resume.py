"""Where a training begins: at its own newest checkpoint, at another run's, with weights alone, or from nothing."""

from __future__ import annotations

import contextlib
import math
import shutil
from pathlib import Path
from typing import Any

import torch

from utils.config import Config
from utils.distributed.world import World, restarted
from utils.errors import UserError
from utils.files import recover
from utils.runs.logger import lock
from utils.training import checkpoint
from utils.training.checkpoint import FOLDER, Checkpoint, DamagedCheckpoint

# What decides which samples a step sees: a position in another order of samples means nothing.
ORDER_KEYS = ("seed", "Nsamples", "global_batch_size", "data_size", "box_size", "symmetries", "dataset")


# In the folder of checkpoints while --resume=no is asked for and not yet carried out: a job that is started again
# before that must not go on from what it was to replace.
ANEW = ".anew"


def starts_anew(resume: str) -> bool:
    """A job that its launcher starts again goes on, whatever its command line says."""
    return resume == "no" and not restarted()


def find(directory: Path, resume: str, world: World) -> Checkpoint | None:
    """What a training in `directory` goes on from, the same on every rank; `resume` is auto, no or another run."""
    found: Checkpoint | None = None
    with world.raise_together():
        if world.is_root:
            anew = directory / FOLDER / ANEW
            if starts_anew(resume):
                with contextlib.suppress(OSError):
                    anew.touch()
            elif resume != "no" or not anew.exists():
                found = _newest(directory, None if resume in ("auto", "no") else Path(resume))
    path = world.gather_objects(found and str(found.path))[0]
    with world.raise_together():
        if path is not None and found is None:
            try:
                found = checkpoint.load(Path(path), digests=False)
            except DamagedCheckpoint as damage:
                raise UserError(
                    f"{path}, which rank 0 has found whole, is not so here: {damage}; "
                    f"set expdir to a directory that all nodes share"
                ) from None
    if found is not None and found.path.parent.resolve() != (directory / FOLDER).resolve():
        found.position.best_loss = math.inf  # the best one stays there: here it is the best of those written here
    return found


def _newest(directory: Path, elsewhere: Path | None) -> Checkpoint | None:
    if (directory / FOLDER).is_dir():
        with contextlib.suppress(OSError), lock(directory):  # a directory that cannot be written to is told of later
            recover(directory / FOLDER)
        found = checkpoint.newest(directory / FOLDER)
        if found is not None:
            return found
    if elsewhere is None:
        return None
    folder = elsewhere / FOLDER if (elsewhere / FOLDER).is_dir() else elsewhere
    found = checkpoint.newest(folder)
    if found is None:
        raise UserError(f"--resume={elsewhere}: there is no checkpoint in it; give a run's directory, auto or no")
    return found


def comparable(config: Config) -> dict[str, Any]:
    """A config as a checkpoint keeps it. The global batch says it all: the local one depends on the ranks."""
    return {**config.model_dump(), "local_batch_size": None}


def changes(saved: Checkpoint, config: Config) -> list[str]:
    """What has changed since, for the log; UserError where a step would now see other samples."""
    before, now = saved.weights["config"], comparable(config)
    for key in ORDER_KEYS:
        if before.get(key, now[key]) != now[key]:
            raise UserError(
                f"{saved.path} is of a training with {key} {before[key]}, this one has {now[key]}, so it would not "
                f"go on where that one stopped; give this one a --run_num of its own (--init_from takes weights alone)"
            )
    return [f"{key} {before[key]} -> {value}" for key, value in now.items() if before.get(key, value) != value]


def random_state(device: torch.device) -> list[torch.Tensor]:
    """Of torch's own generators, on the host and on the device."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def restore_random(saved: Checkpoint, world: World) -> None:
    """Each rank draws on where it stopped; on another number of ranks, or kind of device, there is no such place."""
    states = saved.training["random"]
    if len(states) != world.size or len(states[world.rank]) != len(random_state(world.device)):
        return
    host, *device = states[world.rank]
    torch.set_rng_state(host)
    if device:
        torch.cuda.set_rng_state(device[0], world.device)


def discard(directory: Path) -> None:
    """Removes the checkpoints of the run that a new one replaces."""
    folder = directory / FOLDER  # perhaps a link to another file system
    try:
        for step in checkpoint.saved_steps(folder):
            shutil.rmtree(checkpoint.place(folder, step))
        for name in (checkpoint.BEST, ANEW):
            (folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"--resume=no: cannot remove {error.filename}: {error.strerror}; remove it by hand, or give a --run_num"
        ) from None
