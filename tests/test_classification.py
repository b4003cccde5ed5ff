"""Tests of classification tasks in the same trainer, on one rank and on several ranks."""

import re
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
import trainings
from dataset_files import write
from log_lines import refusal
from processes import run_ranks
from trainings import TOP, YAML, metrics, train_on

import train
from analysis.evaluation.baselines import class_frequency_loss
from utils import config as configs
from utils.data.datasets import open_dataset
from utils.data.loaders import open_loaders, open_volumes
from utils.distributed.world import World
from utils.steps import build

NAMES = list(configs.read_file(str(TOP / "config" / "classification.yaml")))  # which UNet.yaml finds next to it
FAST = ("mnist_cnn", "reuters_cnn", "cifar10_bn")
# Small enough for two epochs on the small files.
SMALL = {"Nsamples": 12, "Nsamples_val": 4, "local_batch_size": 4, "num_epochs": 2, "log_interval": 2}


def error_of(arguments: list[str], capsys: Any) -> str:
    return refusal(train.main, [f"--yaml_config={YAML}", "--set=device=cpu", *arguments], capsys)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in NAMES])
def test_config_passes_the_preflight_and_trains(name: str, tmp_path: Path, capsys: Any) -> None:
    """On files in the published format."""
    dataset = str(configs.load(YAML, name).dataset.name)
    flags = [f"--config={name}", f"--set=expdir={tmp_path}", f"--set=dataset.directory={tmp_path / 'data'}"]
    flags += [f"--set={key}={value}" for key, value in SMALL.items()]
    if dataset == "digits":
        pytest.importorskip("sklearn")
    else:
        assert f"in {tmp_path / 'data'}; set dataset.directory to" in error_of(flags, capsys)
        write(dataset, tmp_path / "data")
    flags += [f"--yaml_config={YAML}", "--set=device=cpu", "--set=dataset.verify=false"]
    train.main([*flags, "--preflight=2"])
    assert capsys.readouterr().out.endswith("preflight: all checks passed\n")
    train.main(flags)
    directory = tmp_path / name / "1ranks" / "00"
    last = [record for record in metrics(directory) if "Loss/valid" in record][-1]
    assert last["step"] == 6
    assert 0 <= last["Accuracy/valid"] <= last["Top5 accuracy/valid"] <= 1
    assert "guessing by class frequency" in (directory / "out.log").read_text()
    assert (directory / "loss_curves.png").stat().st_size > 10_000


FASHION = Path("/usr/share/datasets/fashion-mnist")
has_fashion = pytest.mark.skipif(not FASHION.is_dir(), reason="Debian's package dataset-fashion-mnist is not installed")


def train_fashion(world: World, expdir: Path, flags: list[str]) -> None:
    flags = [f"--set=dataset.directory={FASHION}", f"--set=expdir={expdir}", "--set=report_pictures=false", *flags]
    train_on(world, ["--config=fmnist_lenet", "--set=device=cpu", *flags])


@pytest.mark.slow
@has_fashion
@pytest.mark.parametrize("seed", [0, 1])
def test_ten_epochs_of_fashion_mnist_reach_82_percent(seed: int, tmp_path: Path, monkeypatch: Any) -> None:
    """In the best epoch: accuracies of successive epochs differ by several percent. Compiled, which saves a fifth."""
    monkeypatch.setattr(processes, "GENEROUS", 1800.0)
    run_ranks(train_fashion, 2, tmp_path, [f"--set=seed={seed}", "--enable_jit"])
    records = metrics(tmp_path / "fmnist_lenet" / "2ranks" / "00")
    assert max(record.get("Accuracy/valid", 0.0) for record in records) >= 0.82


def train_digits(world: World, flags: list[str]) -> dict[str, float]:
    """Trains; returns the baseline of the validation labels."""
    train_on(world, ["--set=device=cpu", *flags])
    config = configs.load(YAML, "digits_naive").for_world(world.size)
    return class_frequency_loss(open_loaders(open_volumes(config), world).valid, world)


@pytest.mark.parametrize(
    ("epochs", "samples", "validated", "accuracy"),
    [(1, 64, 101, 0.0), pytest.param(3, 1437, 357, 0.93, marks=pytest.mark.slow)],
)
def test_two_ranks_learn_digits(epochs: int, samples: int, validated: int, accuracy: float, tmp_path: Path) -> None:
    """The ranks have different numbers of validation samples: all measures are means over samples, not over ranks."""
    pytest.importorskip("sklearn")
    flags = ["--config=digits_bn", f"--set=expdir={tmp_path}", f"--set=Nsamples_val={validated}"]
    flags += [f"--set=num_epochs={epochs}", f"--set=Nsamples={samples}", "--set=report_pictures=false"]
    baselines = run_ranks(train_digits, 2, flags)
    labels = torch.from_numpy(open_dataset(configs.load(YAML, "digits_naive").dataset)[1]["valid"].labels)
    entropy = float(torch.distributions.Categorical(torch.bincount(labels).double()).entropy())
    assert baselines == [{"guessing by class frequency": pytest.approx(entropy, rel=1e-9)}] * 2
    directory = tmp_path / "digits_bn" / "2ranks" / "00"
    records = metrics(directory)
    last = [record for record in records if "Loss/valid" in record][-1]
    assert last["Accuracy/valid"] > accuracy
    if accuracy:
        assert "Noise/scale (critical batch)" in records[-3]
    config = configs.load(str(directory / "config.yaml"), "digits_bn").for_world(1)
    network = build.network(config).eval()
    network.load_state_dict(trainings.last(directory).weights["network"])
    data = open_dataset(config.dataset)[1]["valid"]
    labels = torch.from_numpy(data.labels[:validated])
    with torch.no_grad():
        outputs = network(torch.from_numpy(data.inputs[:validated]).float() / 16)
    is_label = outputs.argsort(1, descending=True)[:, :5] == labels[:, None]
    assert last["Accuracy/valid"] == pytest.approx(float(is_label[:, 0].double().mean()), abs=1e-6)
    assert last["Top5 accuracy/valid"] == pytest.approx(float(is_label.any(1).double().mean()), abs=1e-6)
    assert last["Loss/valid"] == pytest.approx(float(torch.nn.functional.cross_entropy(outputs, labels)), rel=1e-4)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--config=digits_bn", "--set=dataset.name=digit"], "unknown .*digit.*digits"),
        (["--config=digits_bn", "--set=network.norm=ghost(32)", "--set=accumulation_steps=2"], "micro-batch of 16 "),
        (["--config=digits_bn", "--set=Nsamples=1500"], "Nsamples 1500 is more than the 1437 train samples of digits"),
        (["--config=digits_bn", "--set=metrics=[recal]"], "name recal; known: accuracy, top5_accuracy; .* my_module.f"),
    ],
)
def test_invalid_input_is_reported_in_one_line(flags: list[str], says: str, tmp_path: Path, capsys: Any) -> None:
    if "Nsamples" in says:
        pytest.importorskip("sklearn")
    line = error_of([*flags, f"--set=expdir={tmp_path / 'runs'}", f"--set=dataset.directory={tmp_path}"], capsys)
    assert re.search(says, line), line
    assert not (tmp_path / "runs").exists()
