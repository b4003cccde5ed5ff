"""provenance.json names the data of a run, and a training run that is resumed with other data warns."""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import h5py
import numpy as np
import pytest
from processes import run_ranks
from trainings import ALONE, YAML

from utils import config as configs
from utils.distributed.world import World
from utils.errors import UserError
from utils.training import checkpoint
from utils.training.choice import Request
from utils.training.provenance import BLOCKS, HEAD, data_changes, data_record
from utils.training.run import Run


@pytest.fixture
def start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Callable[..., list[str]]:
    """start(config, resumed): opens a run, and returns the warnings about its data."""

    def open_and_close(config: configs.Config, resumed: int | None = None) -> list[str]:
        caplog.clear()
        if resumed is not None:
            weights = {"network": {}, "config": config.model_dump(), "step": resumed}
            training = {"optimizer": {}, "scaler": {}, "random": [], "state": {"step": resumed}}
            checkpoint.write(checkpoint.step_directory(tmp_path / "run" / "checkpoints", resumed), weights, training)
        request = Request(config, "test", tmp_path / "run", "no" if resumed is None else "auto")
        with Run.open(request, ALONE) as run:
            run.restore(mock.Mock())
        return [line.getMessage() for line in caplog.records if line.levelno == logging.WARNING]

    return open_and_close


def recorded(tmp_path: Path) -> dict[str, Any]:
    return json.loads((tmp_path / "run" / "provenance.json").read_text())


def volumes(folder: Path, volume_file: Any) -> dict[str, Any]:
    """Changes of config 'test' for a training run on two volumes of their own."""
    folder.mkdir(exist_ok=True)
    names = {"train_path": 1, "val_path": 2}
    return {key: str(volume_file(folder / f"{key}.h5", seed=seed)) for key, seed in names.items()}


def change_one_value(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        file["Hydro"][-1, -1, -1, -1] += 1


def append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"more")


@pytest.mark.parametrize(("change", "says"), [(change_one_value, "other content"), (append, r"\d+ bytes instead of ")])
def test_a_resumed_run_warns_about_changed_data(
    tmp_path: Path, volume_file: Any, start: Any, change: Callable[[Path], None], says: str
) -> None:
    """It once continued silently on a file that had been replaced."""
    paths = volumes(tmp_path / "data", volume_file)
    config = configs.load(YAML, "test", paths)
    assert start(config) == []
    change(Path(paths["val_path"]))
    (warning,) = start(config, resumed=8)
    assert re.match(rf"val_path {paths['val_path']} differs from the data of the run that resumes: {says}", warning)
    assert start(config, resumed=8) == [], "each change is logged once"
    change(Path(paths["val_path"]))
    assert start(config) == [], "a training run from scratch mixes nothing"


def error_in_own_directory(world: World, folder: str) -> str:
    """The error of a run that opens relative paths in a directory of its own for each rank."""
    os.chdir(Path(folder, str(world.rank)))
    paths = {"train_path": "train_path.h5", "val_path": "val_path.h5"}
    request = Request(configs.load(YAML, "test", paths), "test", Path(folder, "run"))
    try:
        with Run.open(request, world):
            return ""
    except UserError as error:
        return str(error)


def test_ranks_that_see_different_data_at_one_path_are_refused(tmp_path: Path, volume_file: Any) -> None:
    """Fixed: each rank trained on its own file. Rank 2 has no validation file, which its loader would report."""
    for rank in range(3):
        paths = volumes(tmp_path / str(rank), volume_file)
    os.remove(paths["val_path"])
    assert run_ranks(error_in_own_directory, 3, str(tmp_path)) == [""] * 3
    for rank in (1, 2):
        change_one_value(tmp_path / str(rank) / "train_path.h5")
    for error in run_ranks(error_in_own_directory, 3, str(tmp_path)):
        start = "train_path train_path.h5 is another file on ranks 1, 2 than on rank 0: other content; use a path at "
        assert error.startswith(start)
    assert not (tmp_path / "run").exists()


def test_each_file_of_a_list_is_recorded_and_another_order_gets_a_warning(
    tmp_path: Path, volume_file: Any, start: Any
) -> None:
    """The volumes have the same shape; otherwise the run would be refused."""
    paths = volumes(tmp_path / "data", volume_file)
    both = [paths["train_path"], str(volume_file(tmp_path / "more.h5", seed=3))]
    start(configs.load(YAML, "test", {**paths, "train_path": both}))
    assert recorded(tmp_path)["data"].keys() == {"train_path[0]", "train_path[1]", "val_path"}
    moved = [str(shutil.copy(path, tmp_path / f"moved_{number}.h5")) for number, path in enumerate(both)]
    assert start(configs.load(YAML, "test", {**paths, "train_path": moved}), resumed=8) == []
    lines = start(configs.load(YAML, "test", {**paths, "train_path": moved[::-1]}), resumed=8)
    assert [line.split(" differs")[0] for line in lines] == [
        f"train_path[{number}] {path}" for number, path in enumerate(moved[::-1])
    ]


def test_only_files_that_the_loader_reads_are_recorded(tmp_path: Path, volume_file: Any) -> None:
    """A published data set has checksums of its own."""
    paths = volumes(tmp_path / "data", volume_file)
    for split, field in itertools.product(("train", "val"), ("data", "label")):
        path = tmp_path / f"{split}_{field}.npy"
        np.save(path, np.zeros(3, np.float32))
        paths[f"{split}_path_npy_{field}"] = str(path)
    for changes, keys in (
        ({"data_loader_config": "dali-lowmem"}, paths.keys()),
        ({}, {"train_path", "val_path"}),
        ({"data_loader_config": "synthetic"}, set()),
        ({"data_loader_config": "classification", "dataset.name": "mnist"}, set()),
    ):
        assert data_record(configs.load(YAML, "test", {**paths, **changes})).keys() == keys


def test_a_large_file_is_sampled_up_to_its_end(tmp_path: Path) -> None:
    """A 39 GB file costs as little as this one: a change anywhere in the first MiB or in the last block is noticed."""
    path, size = tmp_path / "train.h5", 2**35
    path.touch()
    os.truncate(path, size)
    config = configs.load(YAML, "test", {"train_path": str(path), "val_path": str(tmp_path / "none.h5")})
    before = data_record(config)
    assert before.keys() == {"train_path"}, "files that the loader does not need may be missing"
    for place, is_noticed in ((HEAD - 1, True), (size - 1, True), (HEAD + 1, False), (size // BLOCKS, True)):
        with path.open("r+b") as file:
            file.seek(place)
            file.write(b"x")
        assert bool(data_changes(before, data_record(config))) == is_noticed, place
        with path.open("r+b") as file:
            file.seek(place)
            file.write(b"\0")
