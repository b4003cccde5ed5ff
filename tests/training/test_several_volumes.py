"""Training on two volumes that are not cubes, and validation on several: results, and how a run resumes."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from log_lines import refusal
from processes import run_ranks
from trainings import YAML, directory, last, metrics, train_on
from volume_files import write_volume

import train
from analysis.evaluation import results
from utils.config import Config
from utils.volumes.opened import volume_names

BOXES = {"a": (16, 8, 12), "b": (8, 20, 9), "valid": (12, 8, 16)}


def test_a_training_on_two_volumes_resumes_with_moved_files_but_not_with_others(tmp_path: Path, capsys: Any) -> None:
    a, b, valid = (write_volume(tmp_path / f"{name}.h5", box, seed) for seed, (name, box) in enumerate(BOXES.items()))
    flags = [f"--yaml_config={YAML}", "--config=test", "--set=report_pictures=false", "--set=report_baselines=false"]
    flags += ["--set=loggers=[]", "--set=device=cpu", f"--set=expdir={tmp_path / 'runs'}", f"--set=val_path={valid}"]

    def command(*volumes: Path, epochs: int = 2) -> list[str]:
        return [*flags, "--resume", f"--num_epochs={epochs}", f"--set=train_path=[{','.join(map(str, volumes))}]"]

    train.main(command(a, b, epochs=1))
    run = directory(tmp_path / "runs")
    shapes = {name: list(box) for name, box in BOXES.items()}
    assert last(run).weights["config"]["box_size"] == [[shapes["a"], shapes["b"]], [shapes["valid"]]]
    moved = [shutil.move(path, tmp_path / f"moved_{path.name}") for path in (a, b)]
    train.main(command(*moved))
    assert "differs from the data" not in (run / "out.log").read_text()
    capsys.readouterr()
    line = refusal(train.main, command(*moved[::-1], epochs=3), capsys)
    assert f"was written by a run with box_size [[{shapes['a']}, {shapes['b']}], " in line
    assert last(run).state.epoch == 2


def test_names_of_validation_volumes_that_collide_lose_none() -> None:
    """Fixed: the mean over a/v.h5, b/v.h5 and c/v[0].h5 lacked one, and its loss."""
    for paths, expected in (
        (["a/v.h5", "b/v.h5", "c/v[0].h5"], ["v[0]", "v[1]", "v[0][2]"]),
        (["a/v.h5", "b/v.h5", "c/w.h5"], ["v[0]", "v[1]", "w"]),
    ):
        assert volume_names(Config(val_path=paths), "valid") == expected


def test_validation_on_several_volumes_reports_the_loss_of_each_and_their_mean(tmp_path: Path, capsys: Any) -> None:
    """The losses are those of runs that validate on one of them, on any number of ranks; evaluations use the first."""
    boxes = {"train": (16, 16, 16), **BOXES}
    paths = {name: write_volume(tmp_path / f"{name}.h5", box, seed) for seed, (name, box) in enumerate(boxes.items())}
    flags = ["--set=report_pictures=false", "--set=device=cpu", "--num_epochs=1", f"--set=train_path={paths['train']}"]

    def trained(*names: str, samples: int, ranks: int = 1) -> Path:
        folder = tmp_path / f"{'+'.join(names)}_{ranks}"
        data = f"--set=val_path=[{','.join(str(paths[name]) for name in names)}]"
        ends = "--set=evaluation.every_epochs=1" if ranks > 1 else "--set=report_baselines=false"
        more = [data, f"--set=Nsamples_val={samples}", f"--set=expdir={folder}", ends]
        run_ranks(train_on, ranks, ["--config=test", *flags, *more])
        return directory(folder, ranks)

    several = [trained("a", "b", samples=23, ranks=ranks) for ranks in (1, 2)]
    alone = {name: metrics(trained(name, samples=11)) for name in ("a", "b")}
    for record, *of_one in zip(metrics(several[0]), *alone.values(), strict=True):
        if "Loss/valid" in record:
            losses = [single["Loss/valid"] for single in of_one]
            assert [record["Loss/valid/a"], record["Loss/valid/b"]] == losses
            assert record["Loss/valid"] == pytest.approx(sum(losses) / 2, rel=1e-12)
            assert not any(name.startswith("Loss/valid/") for single in of_one for name in single)
    untrained = [metrics(run)[0] for run in several]
    assert untrained[1] == pytest.approx(untrained[0], rel=1e-5)
    assert last(several[1]).weights["config"]["box_size"] == [16, [list(BOXES["a"]), list(BOXES["b"])]]
    (evaluation,) = (several[1] / "evaluation").iterdir()
    assert results.load(evaluation).metadata["input"] == str(paths["a"])
    for second, says in (("b", "Nsamples_val 1 is less than the 2 volumes"), ("a", f"{paths['a']} is listed twice")):
        wrong = [f"--set=val_path=[{paths['a']},{paths[second]}]", "--set=Nsamples_val=1"]
        assert says in refusal(train.main, [f"--yaml_config={YAML}", "--config=test", *flags, *wrong], capsys)
