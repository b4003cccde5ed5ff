"""A damaged file of a run directory is read as data, or reported in one line: never a traceback, never other results.

Each file is damaged in many ways, with fixed seeds. Where a digest protects a file, no damage may go unnoticed.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from damage import bytewise, replacements, valuewise
from trainings import NoWaiting, assert_equal
from utils.training.directory import _earlier

import train
from utils import config as configs
from utils.distributed.launch import Launch
from utils.distributed.world import World
from utils.errors import UserError
from utils.evaluation import report, results, training_figures
from utils.inference.trained_network import TrainedNetwork
from utils.provenance import read_provenance
from utils.steps import build
from utils.training import checkpoint, evaluations, resume, summary
from utils.training.loggers.base import LoggedRun, Resumed, RunLogger, read_records

TOP = Path(__file__).parent.parent.parent
ALONE = World(Launch("test"), torch.device("cpu"))
STEP = 16
few_or_many = pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.slow)])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, data_flags: list[str]) -> Path:
    """The directory of a finished run with evaluations."""
    expdir = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(TOP)
        NoWaiting().install(patched.setattr)
        changes = {"expdir": expdir, "evaluation.every_epochs": 2, "checkpoint.keep_last": 1}
        changes |= {"report_baselines": "false", "report_pictures": "false"}
        train.main(["--config=test", *data_flags, *(f"--set={key}={value}" for key, value in changes.items())])
    run = expdir / "test" / "1ranks" / "00"
    best = run / "checkpoints" / "best"
    if best.readlink().name != f"step_{STEP:08d}":
        shutil.rmtree(best.resolve())
        best.unlink()
        best.symlink_to(f"step_{STEP:08d}")
    return run


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of the run's directory, to be damaged."""
    return shutil.copytree(trained, tmp_path / "run", symlinks=True)


def one_line(error: Exception) -> str:
    text = str(error)
    assert text
    assert "\n" not in text
    assert len(text) < 3000
    return text


def outcomes(path: Path, versions: Iterable[bytes | str], read: Callable[[], Any]) -> list[Any]:
    """What `read` returns for each version of the file, or the UserError that it raises; nothing else may be raised."""
    found = []
    for version in versions:
        path.write_bytes(version if isinstance(version, bytes) else version.encode("utf-8", "surrogatepass"))
        found.append(outcome(read))
    return found


def outcome(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except UserError as error:
        one_line(error)
        return error


def errors_in(found: list[Any]) -> int:
    return sum(isinstance(each, UserError) for each in found)


# --- JSON and YAML ---------------------------------------------------------------------------------------------------


@few_or_many
def test_provenance(run: Path, count: int) -> None:
    """It once ended a resumed training with a traceback if it was a list, or nested deeply."""
    path = run / "provenance.json"
    content = path.read_bytes()

    def read() -> None:
        record = read_provenance(path)
        assert isinstance(record, dict)
        json.dumps(record, indent=2)
        earlier = _earlier(path)
        assert all(isinstance(each, dict) for each in earlier)
        json.dumps({"earlier": earlier}, indent=2)

    record = json.loads(content)
    outcomes(path, bytewise(content, count, 1), read)
    outcomes(path, valuewise({**record, "earlier": [record, record]}, count, 2), read)
    for _ in replacements(path):
        read()


@few_or_many
def test_metrics(run: Path, count: int, caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    """A line `{"step": null}` once ended a resumed training with a traceback."""
    path = run / "metrics.jsonl"
    content = path.read_bytes()
    whole = {json.dumps(record) for record in read_records(path)}
    assert len(whole) > 4

    def read() -> list[dict[str, Any]]:
        records = read_records(path)
        for record in records:
            assert record["step"] >= 0
            assert all(math.isfinite(value) for value in record.values())
        return records

    def resume_and_read() -> list[dict[str, Any]]:
        logger = RunLogger(LoggedRun(run, Resumed(STEP)))
        logger.scalars({"Loss/train": 1.0}, STEP + 1)
        logger.close()
        *kept, last = read()
        assert (last["step"], last["Loss/train"]) == (STEP + 1, 1.0)
        assert all(record["step"] <= STEP for record in kept)
        return kept

    lines = [json.loads(line) for line in content.splitlines()]
    versions = ["\n".join(map(json.dumps, [*lines[:3], json.loads(json.dumps(lines[3])), *lines[4:]])) + "\n"]
    versions += [f"{json.dumps(lines[0])}\n{text}\n" for text in valuewise(lines[-1], count, 3)]
    monkeypatch.setattr("utils.files._flush", lambda path: None)
    outcomes(path, [*bytewise(content, count, 4), *versions], read)
    found = outcomes(path, [*bytewise(content, count, 4), *versions], resume_and_read)
    assert errors_in(found) == 0
    some = [*bytewise(content, 8, 5), '{"step": 1, "$\\bad$/valid": 1}\n', '{"step": 1, "Loss/train": -1e299}\n']
    outcomes(path, some, lambda: training_figures.write_loss_curves(run, "l1"))
    for kind in replacements(path):
        logger = RunLogger(LoggedRun(run, Resumed(STEP)))
        logger.scalars({"Loss/train": 1.0}, STEP + 1)
        logger.close()
        assert kind in ("missing", "dangling link") or "Cannot record scalars" in caplog.text
        caplog.clear()


@few_or_many
def test_summary(run: Path, count: int) -> None:
    """A damaged summary is that of an unfinished run, which is then written again."""
    path = run / "summary.json"
    content = path.read_bytes()

    def read() -> bool:
        return summary.is_finished(run, STEP, ALONE)

    assert read()
    for found in (
        outcomes(path, bytewise(content, count, 6), read),
        outcomes(path, valuewise(json.loads(content), count, 7), read),
    ):
        assert errors_in(found) == 0
        assert False in found
    assert not any(read() for _ in replacements(path))


@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_config(run: Path, count: int) -> None:
    path = run / "config.yaml"
    content = path.read_bytes()

    def read() -> configs.Config:
        return configs.load(str(path), configs.default_name(str(path)), {"seed": 3})

    before = read()
    found = outcomes(path, bytewise(content, count, 8), read)
    found += outcomes(path, valuewise({"test": before.model_dump(mode="json")}, count, 9), read)
    assert all(isinstance(each, configs.Config | UserError) for each in found)
    assert errors_in(found) > count / 2
    for kind in replacements(path):
        assert isinstance(outcome(read), UserError), kind


# --- evaluations -----------------------------------------------------------------------------------------------------


@few_or_many
def test_evaluation(run: Path, count: int, caplog: pytest.LogCaptureFixture) -> None:
    """The archive has checksums: no damage of its bytes may change a result."""
    path = evaluations.path_of_step(run / evaluations.FOLDER, STEP)
    content, whole = path.read_bytes(), results.load(path)
    arrays = dict(np.load(path))
    for found in outcomes(path, bytewise(content, count, 10), lambda: results.load(path)):
        if not isinstance(found, UserError):
            np.testing.assert_equal(asdict(found), asdict(whole))
    for number, text in enumerate(valuewise(json.loads(str(arrays["text"])), count, 11)):
        np.savez(path, **{**arrays, "text": np.array(text)})
        assert isinstance(outcome(lambda: results.load(path)), results.Results | UserError), number
    path.write_bytes(content)
    for kind in replacements(path):
        assert isinstance(outcome(lambda: results.load(path)), UserError), kind
    path.write_bytes(content[:-1])
    assert report.write_run_report(run) == []
    assert f"An evaluation is missing in the report: {path} holds no evaluation" in caplog.text


# --- checkpoints -----------------------------------------------------------------------------------------------------


@few_or_many
@pytest.mark.parametrize("name", [checkpoint.WEIGHTS, checkpoint.TRAINING, checkpoint.CHECKSUMS])
def test_checkpoint(run: Path, name: str, count: int) -> None:
    folder = run / checkpoint.FOLDER
    whole = checkpoint.load_newest(folder)
    assert whole is not None
    path = whole.path / name
    found = outcomes(path, bytewise(path.read_bytes(), count, 12), lambda: checkpoint.load_newest(folder))
    for each in found:
        if not isinstance(each, UserError):
            assert name == checkpoint.CHECKSUMS
            assert_equal(each.weights, whole.weights)
            assert_equal(each.training, whole.training)
    assert errors_in(found) > 0.9 * count
    # A large file of weights is read to its end.
    for kind in replacements(path, *(["large"] if name != checkpoint.CHECKSUMS else [])):
        assert isinstance(outcome(lambda: checkpoint.load_newest(folder)), UserError), kind
        assert name != checkpoint.WEIGHTS or isinstance(outcome(lambda: checkpoint.read_weights(run)), UserError), kind


@few_or_many
def test_weights_without_digests(run: Path, tmp_path: Path, count: int) -> None:
    """Weights that were copied alone; a changed value cannot be noticed."""
    path = tmp_path / "weights.pt"
    content = checkpoint.weights_file(run).read_bytes()

    def read() -> TrainedNetwork:
        return TrainedNetwork.load(path, torch.device("cpu"))

    outcomes(path, [content], read)
    outcomes(path, bytewise(content, count, 13), read)
    for kind in replacements(path, "large"):
        assert isinstance(outcome(read), UserError), kind


@pytest.mark.parametrize("key", [*checkpoint.WEIGHTS_KEYS, *checkpoint.TRAINING_KEYS])
@pytest.mark.parametrize("value", [None, 1, "x", [], {}, [None], {"x": None}, {1: 2}, torch.zeros(2)], ids=str)
def test_checkpoint_with_a_value_of_another_type(run: Path, data_flags: list[str], key: str, value: Any) -> None:
    """The digests match: such a file was written by another program, or another version of this one."""
    whole = checkpoint.load_newest(run / checkpoint.FOLDER)
    assert whole is not None
    weights, training = dict(whole.weights), dict(whole.training)
    (weights if key in weights else training)[key] = value
    checkpoint.write(whole.path, weights, training)
    config = configs.load(str(run / "config.yaml"), "test").for_world(1)

    def resume_training() -> None:
        start = resume.find_start(run, "auto", None, config.model_dump(), ALONE)
        start.restore(build.step(config, ALONE, build.model(config)), ALONE)

    found = outcome(resume_training)
    assert isinstance(found, UserError) or key in ("optimizer", "scaler", "random", "config", "state")
    outcome(lambda: TrainedNetwork.load(run, torch.device("cpu")))


def test_link_to_the_best_checkpoint(run: Path) -> None:
    link, step = run / checkpoint.FOLDER / checkpoint.BEST, checkpoint.step_directory(Path(), STEP).name
    for target in ("nowhere", checkpoint.BEST, "/dev/zero", "..", ".", f"{step}/weights.pt", "x" * 250, f"../{step}"):
        link.unlink()
        link.symlink_to(target)
        found = outcome(lambda: checkpoint.weights_file(run))
        assert isinstance(found, UserError) or found.samefile(run / checkpoint.FOLDER / step / checkpoint.WEIGHTS)
