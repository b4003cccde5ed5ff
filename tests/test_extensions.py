"""docs/architecture.md says how to add a loader, a network and an optimizer; these tests follow it and train."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import h5py
import pytest
import torch
from reference_samples import digest, rank_batches, read_fields, reference
from trainings import TOP, YAML, metrics

import export
import predict
import train
from utils import cli, data
from utils import config as configs
from utils.data.loaders.base import sample_plan
from utils.data.volumes import split_settings
from utils.distributed.launch import Launch
from utils.distributed.world import World
from utils.optim import optimizers

PAGE = (TOP / "docs" / "architecture.md").read_text(encoding="utf-8")


def section(title: str) -> tuple[str, str]:
    """The two code blocks of a section: the source of the new part, and the line that registers it."""
    (text,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    source, line = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return source, line


def execute(source: str, namespace: dict[str, Any]) -> None:
    exec(compile(source, "docs/architecture.md", "exec", dont_inherit=True), namespace)


def new_module(name: str, source: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module that a reader would write to the path in the first line of the code."""
    path = source.splitlines()[0].removeprefix("# ")
    module = ModuleType(path.removesuffix(".py").replace("/", "."))
    assert module.__name__.endswith(f".{name}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    execute(source, vars(module))
    return module


def add_plain_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adds the page's loader to LOADERS."""
    source, line = section("How to add a loader")
    module = new_module("plain", source, monkeypatch)
    monkeypatch.setattr(data, "LOADERS", data.LOADERS | eval(f"{{{line}}}", vars(data) | {"plain": module}))


def train_with(flags: list[str], data_flags: list[str], expdir: Path) -> list[float]:
    """The losses of a short training."""
    common = [f"--yaml_config={YAML}", "--config=test", *data_flags, f"--set=expdir={expdir}"]
    train.main([*common, "--set=report_baselines=false", "--set=report_pictures=false", *flags])
    records = metrics(expdir / "test" / "1ranks" / "00")
    return [record[tag] for record in records for tag in ("Step/loss", "Loss/valid") if tag in record]


def test_the_documented_loader_carries_out_the_sample_plan(
    data_flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both splits, complete epochs and one that resumes in the middle."""
    add_plain_loader(monkeypatch)
    options = cli.parse([f"--yaml_config={YAML}", "--config=test", *data_flags, "--data_loader_config=plain"])
    config = configs.load(options.yaml_config, options.config, options.overrides).for_world(1)
    loaders = data.open_loaders(config, World(Launch("test"), torch.device("cpu")))
    for split, loader in (("train", loaders.train), ("valid", loaders.valid)):
        fields = read_fields(getattr(config, split_settings(config, split).key))
        plan = sample_plan(config, split, [fields[0].shape[1:]])
        for epoch, first in ((0, 0), (1, 0), (2, 3)):
            samples = reference([fields], plan, epoch, config.symmetries)
            wanted = rank_batches(samples, config.global_batch_size, 0, 1, drop_last=split == "train")
            assert len(loader) == len(wanted)
            assert [digest(batch) for batch in loader.epoch(epoch, first)] == wanted[first:]


def test_the_documented_network_trains_predicts_and_is_exported(
    data_flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """From a file of the working directory, whose path is logged; elsewhere, one line says that it is missing."""
    source, _ = section("How to add a network")
    file = tmp_path / source.splitlines()[0].removeprefix("# ")
    file.write_text(source)
    (tmp_path / "elsewhere").mkdir()

    def run(main: Callable[..., None], *flags: str, folder: Path = tmp_path) -> str:
        """The log of a program that starts in a folder."""
        sys.modules.pop(file.stem, None)
        monkeypatch.chdir(folder)
        main([*flags])
        return capfd.readouterr().err

    train_flags = ["--set=network.name=my_networks.Pyramid", "--set=network.options={depth: 2, width: 8}"]
    run(lambda flags: train_with(flags, data_flags, tmp_path), *train_flags)
    records = metrics(tmp_path / "test" / "1ranks" / "00")
    losses = [record["Loss/valid"] for record in records if "Loss/valid" in record]
    assert losses[-1] < losses[0]
    line = f"network my_networks.Pyramid from {file}"
    assert line in (tmp_path / "test" / "1ranks" / "00" / "out.log").read_text()
    trained = f"--checkpoint={tmp_path / 'test' / '1ranks' / '00'}"
    flags = [trained, data_flags[1].replace("--set=val_path", "--input"), f"--output={tmp_path / 'gas.h5'}"]
    with pytest.raises(SystemExit, match="2"):
        run(predict.main, *flags, "--device=cpu", folder=tmp_path / "elsewhere")
    assert f"no module my_networks in {tmp_path / 'elsewhere'}; " in capfd.readouterr().err
    assert line in run(predict.main, *flags, "--device=cpu")
    assert line in run(export.main, trained, f"--output={tmp_path / 'gas.pt2'}", "--units=channel")
    with h5py.File(tmp_path / "gas.h5") as gas:
        assert gas["Hydro"].shape == (5, 16, 16, 16)
    sys.modules.pop(file.stem)


def test_the_documented_optimizer_trains(
    data_flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, line = section("How to add an optimizer")
    namespace = vars(optimizers).copy()
    execute(source, namespace)
    monkeypatch.setattr(optimizers, "OPTIMIZERS", optimizers.OPTIMIZERS | eval(f"{{{line}}}", namespace))
    losses = train_with(["--set=optimizer.name=adagrad"], data_flags, tmp_path)
    assert losses[-1] < losses[0]
