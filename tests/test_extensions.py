"""docs/architecture.md: parts that it says how to add, and the release of graphs before the process group ends."""

import contextlib
import hashlib
import json
import re
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import h5py
import pytest
import torch
from reference_samples import digest, rank_batches, read_fields, reference
from sample_results import draw_nothing, sample_results
from trainings import ALONE, TOP, YAML, directory, last, metrics, train_on

import export
import predict
import train
from analysis.evaluation import figures, report, results, statistics, tables
from utils import cli
from utils import config as configs
from utils.data import loaders
from utils.data.loaders.base import sample_plan
from utils.distributed import world as worlds
from utils.errors import LocalError, Stopped, UserError
from utils.optim import optimizers
from utils.steps.eager import EagerStep
from utils.volumes.opened import PATH_KEYS


def section(title: str) -> tuple[str, str, str]:
    """The source of the new part, the line that registers it, and the path in the first line of the source."""
    page = (TOP / "docs" / "architecture.md").read_text(encoding="utf-8")
    (text,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE)
    source, line = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return source, line, source.splitlines()[0].removeprefix("# ")


def execute(source: str, namespace: dict[str, Any]) -> None:
    exec(compile(source, "docs/architecture.md", "exec", dont_inherit=True), namespace)


def train_with(flags: list[str], data_flags: list[str], expdir: Path) -> None:
    """Trains, and asserts that the validation loss falls."""
    common = [f"--yaml_config={YAML}", "--config=test", *data_flags, f"--set=expdir={expdir}"]
    train.main([*common, "--set=report_baselines=false", *flags])
    losses = [record["Loss/valid"] for record in metrics(directory(expdir)) if "Loss/valid" in record]
    assert losses[-1] < losses[0]


def test_the_documented_loader_carries_out_the_sample_plan(data_flags: list[str], monkeypatch: Any) -> None:
    """Both splits, complete epochs and one that resumes in the middle."""
    source, line, path = section("How to add a loader")
    module = ModuleType(path.removesuffix(".py").replace("/", "."))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    execute(source, vars(module))
    monkeypatch.setattr(loaders, "LOADERS", loaders.LOADERS | eval(f"{{{line}}}", vars(loaders) | {"plain": module}))
    options = cli.parse([f"--yaml_config={YAML}", "--config=test", *data_flags, "--data_loader_config=plain"])
    config = configs.load(options.yaml_config, options.config, options.overrides).for_world(1)
    opened = loaders.open_loaders(loaders.open_volumes(config), ALONE)
    for split, loader in (("train", opened.train), ("valid", opened.valid)):
        fields = read_fields(getattr(config, PATH_KEYS[split]))
        plan = sample_plan(config, split, [fields[0].shape[1:]])
        for epoch, first in ((0, 0), (1, 0), (2, 3)):
            samples = reference([fields], plan, epoch, config.symmetries)
            wanted = rank_batches(samples, config.global_batch_size, 0, 1, drop_last=split == "train")
            assert len(loader) == len(wanted)
            assert [digest(batch) for batch in loader.epoch(epoch, first)] == wanted[first:]


def test_the_documented_network_trains_predicts_and_is_exported(data_flags, tmp_path, monkeypatch, capfd: Any) -> None:
    """From a file of the working directory, whose path is logged; elsewhere, one line says that it is missing."""
    source, _, name = section("How to add a network")
    file = tmp_path / name
    file.write_text(source)
    (tmp_path / "elsewhere").mkdir()

    def run(main: Callable[..., None], *arguments: Any, folder: Path = tmp_path) -> str:
        """The log of a program that starts in a folder."""
        sys.modules.pop(file.stem, None)
        monkeypatch.chdir(folder)
        main(*arguments)
        return capfd.readouterr().err

    line = f"network my_networks.Pyramid from {file}"
    flags = ["--set=network.name=my_networks.Pyramid", "--set=network.options={depth: 2, width: 8}"]
    assert line in run(train_with, flags, data_flags, tmp_path)
    trained = f"--checkpoint={directory(tmp_path)}"
    flags = [trained, data_flags[1].replace("--set=val_path", "--input"), f"--output={tmp_path / 'gas.h5'}"]
    with pytest.raises(SystemExit, match="2"):
        run(predict.main, [*flags, "--device=cpu"], folder=tmp_path / "elsewhere")
    assert f"no module my_networks in {tmp_path / 'elsewhere'}; " in capfd.readouterr().err
    assert line in run(predict.main, [*flags, "--device=cpu"])
    assert line in run(export.main, [trained, f"--output={tmp_path / 'gas.pt2'}", "--units=channel"])
    with h5py.File(tmp_path / "gas.h5") as gas:
        assert gas["Hydro"].shape == (5, 16, 16, 16)
    sys.modules.pop(file.stem)


def test_the_documented_metric_is_reported_by_name(data_flags: list[str], tmp_path: Path, monkeypatch: Any) -> None:
    page = (TOP / "docs" / "architecture.md").read_text(encoding="utf-8")
    (source,) = re.findall(r"^```python\n(# my_metrics.py\n.*?)^```", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "my_metrics.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    train_with(["--set=metrics=[my_metrics.density_bias]"], data_flags, tmp_path)
    records, name = metrics(directory(tmp_path)), "My metrics.density bias/valid"
    assert len({record[name] for record in records if name in record}) > 1
    sys.modules.pop("my_metrics")


def test_the_documented_statistic_has_scalars_a_row_and_a_picture(tmp_path: Path, monkeypatch: Any) -> None:
    source, line, path = section("How to add a statistic")
    module = ModuleType(path.removesuffix(".py").replace("/", "."))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    execute(source, vars(module))
    monkeypatch.setitem(statistics.STATISTICS, "closeness", eval(f"{{{line}}}", vars(module))["closeness"])
    draw_nothing(monkeypatch)
    evaluation, output = sample_results(8, noise=1.0, cell=0.5), tmp_path / "report"
    close, medium, far = evaluation.statistics["closeness"].shares
    assert 0 < close < medium < far < 1
    report.write_report(output, evaluation, {}, ALONE)
    page = (output / report.PAGE).read_text()
    assert f"<td>1.5</td><td>{medium:.1%}</td>" in page
    assert "<h2>Closeness</h2>" in page
    assert ["1.5", f"{medium:.1%}"] in [text.split() for text in tables.lines(evaluation)]
    scalars = json.loads((output / report.SUMMARY).read_text())["scalars"]
    assert scalars["Evaluation closeness/within a factor of 1.5"] == pytest.approx(medium)
    assert (output / "closeness.png").exists()
    assert results.load(output / report.ARRAYS).statistics["closeness"].shares.tolist() == [close, medium, far]
    (curve,) = figures.draw("closeness", evaluation).axes[0].lines
    assert curve.get_ydata().tolist() == [close, medium, far]


def test_own_code_belongs_to_a_checkpoint(data_flags, tmp_path: Path, monkeypatch: Any, capfd: Any) -> None:
    """Fixed: an edited network predicted something else without a word. Old checkpoints do not state their code."""
    source, _, name = section("How to add a network")
    network, run, packages = tmp_path / name, directory(tmp_path), tmp_path / ".venv/lib/site-packages"
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(packages)
    imports = "import torch, json, helpers, installed, utils.files\n    from mine import layers"
    files = {
        name: f"{source}\n\ndef unused():\n    {imports}\n    from .top import anything",
        "mine/__init__.py": "if False:\n    from .sub import deep",
        "mine/sub/deep.py": "def unused():\n    from ..above import anything",
        "mine/layers.py": "no syntax",
    }
    own = {*files, "helpers.py", "mine/above.py", "top.py"}
    for path in (*own, "json.py", "utils/files.py", "mine/idle.py", packages / "installed.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(files.get(str(path), ""))

    def warned(main: Callable[..., None], *arguments: str) -> list[str]:
        """The files in the warnings of a program."""
        sys.modules.pop(network.stem, None)
        main([*arguments])
        text = "".join(capfd.readouterr())
        return re.findall(r" was trained with other code: (.*); restore it, or expect other results", text)

    flags = ["--set=network.name=my_networks.Pyramid", "--set=network.options={depth: 2, width: 8}", *data_flags]
    flags += [f"--yaml_config={YAML}", "--config=test", f"--set=expdir={tmp_path}", "--set=report_baselines=false"]
    exported = ["--overwrite", "--units=channel", f"--output={tmp_path / 'gas.pt2'}"]
    output = [f"--checkpoint={run}", "--overwrite", f"--output={tmp_path / 'gas.h5'}"]
    predicts = [predict.main, *output, data_flags[1].replace("--set=val_path", "--input"), "--device=cpu"]
    assert warned(train.main, *flags) == warned(*predicts) == []
    code = json.loads((run / "provenance.json").read_text())["code"]
    assert ({*code}, code["top.py"]) == (own, hashlib.sha256().hexdigest())
    (tmp_path / "mine/layers.py").write_text("padding = 'circular'")
    assert warned(*predicts) == ["mine/layers.py (changed)"]
    network.write_text(network.read_text().replace("helpers", "mine.idle"))
    changed = ["helpers.py (missing), mine/idle.py (new), mine/layers.py (changed), my_networks.py (changed)"]
    assert warned(export.main, f"--checkpoint={run}", *exported) == changed
    assert warned(train.main, *flags, f"--init_from={last(run).path}", "--preflight") == changed
    assert warned(train.main, *flags, "--resume", "--num_epochs=3") == changed
    saved = last(run).weights
    assert saved["code"].keys() == own - {"helpers.py"} | {"mine/idle.py"}
    del saved["code"]
    torch.save(saved, tmp_path / "old.pt")
    network.write_text(source)
    assert warned(export.main, f"--checkpoint={tmp_path / 'old.pt'}", *exported) == []
    sys.modules.pop(network.stem)


def test_the_documented_optimizer_trains(data_flags: list[str], tmp_path: Path, monkeypatch: Any) -> None:
    source, line, _ = section("How to add an optimizer")
    namespace = vars(optimizers).copy()
    execute(source, namespace)
    monkeypatch.setitem(optimizers.OPTIMIZERS, "adagrad", eval(f"{{{line}}}", namespace)["adagrad"])
    train_with(["--set=optimizer.name=adagrad"], data_flags, tmp_path)


@pytest.mark.parametrize("error", [None, Stopped(), UserError("wrong"), LocalError("wrong")], ids=repr)
def test_a_step_is_closed_and_released_before_the_process_group_is_destroyed(tmp_path, monkeypatch, error) -> None:
    """NCCL would wait forever for the step's CUDA graphs. The first import of the compiler once left such a cycle.

    After an error of this rank alone, the others may still use the group: it is not destroyed.
    """
    events: list[Any] = []

    class CyclicStep(EagerStep):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.cycle = self
            events.append(weakref.ref(self))

        def __call__(self, *arguments: Any) -> torch.Tensor:
            if error is not None:
                raise error
            return super().__call__(*arguments)

        def close(self) -> None:
            events.append("closed")

    flags = ["--config=test", "--set=data_loader_config=synthetic", f"--set=expdir={tmp_path}", "--num_epochs=1"]
    monkeypatch.setattr(worlds.dist, "destroy_process_group", lambda: events.append(events[0]()))
    with pytest.raises(type(error)) if error else contextlib.nullcontext(), worlds._leaving_group():
        train_on(ALONE, flags, CyclicStep)
    assert events[1:] == ["closed"] + [None] * (type(error) is not LocalError)
