"""A network conditioned on redshift and cell size: training on two volumes, resume, prediction, evaluation, export."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import h5py
import numpy as np
import pytest
import torch
from log_lines import messages, refusal
from sample_results import draw_nothing
from trainings import YAML, assert_same_training, directory, last, metrics
from volume_files import write_volume

import evaluate
import export
import predict
import train
from analysis.inference.trained_network import TrainedNetwork
from simulation.simulate import SimulationOptions, file_attributes
from utils.config.sections import Condition
from utils.distributed.signals import StopSignals
from utils.volumes.attributes import CONDITIONS, simulation_of

REDSHIFTS, SIDES = {"first": 2.0, "second": 4.0, "valid": 2.0, "late": 5.0, "silent": None}, {"second": 24.0}
CONDITIONED = "--set=network.conditions=[redshift,cell]"
QUIET = ["--set=report_pictures=false", "--set=report_baselines=false"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Volumes with the same inputs, whose gas has an offset proportional to the redshift that they state."""
    folder = tmp_path_factory.mktemp("conditions")
    for name, redshift in REDSHIFTS.items():
        with h5py.File(write_volume(folder / f"{name}.h5", seed=1), "r+") as file:
            file["Hydro"][...] = 0.2 * file["Nbody"][...][[0, 1, 2, 3, 0]] + 0.2 * ((redshift or 3.0) - 3.0)
            file.attrs["box_size_mpc_h"] = SIDES.get(name, 16.0)
            if redshift is not None:
                file.attrs["redshift"] = redshift
    return folder


@pytest.fixture(scope="module")
def training(folder: Path) -> Callable[..., Path]:
    """training(expdir, *flags): a run on two volumes; its directory."""

    def go(expdir: str, *flags: str) -> Path:
        data = [f"--set=train_path=[{folder}/first.h5,{folder}/second.h5]", f"--set=val_path={folder}/valid.h5"]
        common = [f"--yaml_config={YAML}", "--config=test", "--set=device=cpu", f"--set=expdir={folder / expdir}"]
        train.main([*common, *QUIET, *data, CONDITIONED, *flags])
        return directory(folder / expdir)

    return go


@pytest.fixture(scope="module")
def run(training: Callable[..., Path]) -> Path:
    return training("whole")


def valid_loss(run: Path) -> float:
    return [record["Loss/valid"] for record in metrics(run) if "Loss/valid" in record][-1]


def test_conditions_lower_the_loss_of_gas_that_depends_on_them(run: Path, training: Callable[..., Path]) -> None:
    """The config of the checkpoint has the ranges of the training volumes."""
    assert last(run).weights["config"]["network"]["condition_ranges"] == [[2.0, 4.0], [1.0, 1.5]]
    length = ["--num_epochs=8", "--set=lr_schedule.start_lr=1e-2", "--set=symmetries=none"]
    without = valid_loss(training("without", *length, "--set=network.conditions=[]"))
    assert valid_loss(training("with", *length)) < 0.7 * without


def test_an_interrupted_run_ends_with_the_same_bits(run: Path, training: Callable[..., Path], monkeypatch: Any) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(StopSignals, "received", "SIGUSR1")  # so it stops after the first step
        with pytest.raises(SystemExit, match="75"):
            training("parts")
    assert_same_training(run, training("parts"))


def test_constant_conditions_and_untrained_ones_get_a_warning(training: Any, folder: Path, capsys: Any) -> None:
    volumes = f"--set=train_path={folder}/first.h5", f"--set=val_path={folder}/late.h5"
    training("warned", *volumes, "--num_epochs=1")
    printed = messages(capsys.readouterr().err, "WARNING")
    assert "network.conditions: redshift is 2 in all training volumes, so it has no effect" in printed
    assert any("late.h5: redshift 5 is outside the trained range 2 to 2" in line for line in printed)


def test_everything_that_calls_the_network_has_its_conditions(training: Any, monkeypatch: Any, tmp_path: Path) -> None:
    """Evaluation, pictures, baselines, preflight, benchmark; micro-batches, averaged weights, autocast, a norm."""
    draw_nothing(monkeypatch)
    options = ["--set=accumulation_steps=2", "--set=ema_decay=0.9", "--enable_amp", "--set=network.norm=group"]
    ends = [f"--set={key}=true" for key in ("report_pictures", "report_baselines")]
    run = training("options", *options, *ends, "--num_epochs=1", "--set=evaluation.every_epochs=1")
    assert len(list((run / "evaluation").iterdir())) == 1
    assert (run / "slices.png").exists()
    training("none", *options, "--preflight")
    settings = tmp_path / "benchy.yaml"
    settings.write_text("".join(f"{name}: {{batches: 1, trials: 1}}\n" for name in ("IO", "SYNTHETIC", "FULL")))
    monkeypatch.setenv("BENCHY_CONFIG_FILE", str(settings))
    monkeypatch.setenv("BENCHY_OUTPUT", str(tmp_path / "benchy.json"))
    training("none", *options, "--enable_benchy")
    assert (tmp_path / "benchy.json").exists()


def test_programs_use_the_conditions_of_their_input(run: Path, folder: Path, tmp_path: Path, capsys: Any) -> None:
    """All windows get those of the input. Values outside the trained range give a warning with both."""
    network = torch.no_grad()(TrainedNetwork.load(run, torch.device("cpu")).network)
    with h5py.File(folder / "late.h5") as file:
        fields = torch.from_numpy(file["Nbody"][...])[None]
    for name, redshift in (("first", 2.0), ("late", 5.0)):
        flags = [f"--checkpoint={run}", f"--input={folder / name}.h5", "--device=cpu", "--window=16", "--overlap=0"]
        predict.main([*flags, f"--output={tmp_path / name}.h5"])
        with h5py.File(tmp_path / f"{name}.h5") as file:
            expected = network(fields, torch.tensor([[redshift, 1.0]]))[0]
            np.testing.assert_allclose(file["Hydro"][...], expected, atol=1e-6)
        printed = capsys.readouterr().err
        assert f"Condition redshift: {redshift:g}, trained on 2 to 4\n" in printed
        warnings = [line for line in messages(printed, "WARNING") if "trained range" in line]
        warning = f"{folder}/late.h5: redshift 5 is outside the trained range 2 to 4; check the prediction"
        assert warnings == ([] if name == "first" else [warning])
    line = f"{folder}/silent.h5: redshift, which network.conditions redshift needs, is not stated as a number; set it, "
    for command, output in ((predict.main, "gas.h5"), (evaluate.main, "report")):
        flags = [f"--checkpoint={run}", f"--input={folder}/silent.h5", "--device=cpu", f"--output={tmp_path / output}"]
        assert line in refusal(command, flags, capsys)
    export.main([f"--checkpoint={run}", f"--output={tmp_path / 'gas.pt2'}"])  # compares the file with the network


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["network.conditions=[redhift]"], r"network\.conditions\.0 must be 'redshift', 'cell', .* or 'n_s'"),
        (["network.conditions=[omega_m]"], r"first\.h5: cosmology_Om0, which .* is not stated as a number; set it"),
        (["val_path=FOLDER/silent.h5"], r"silent\.h5: redshift, which .*; set it, in Python: h5py\.File"),
        (["data_loader_config=synthetic"], r"synthetic reads no volumes that state them; remove network\.conditions"),
        (["network.conditions=[cell,cell]"], r"conditions cell, cell has a name twice; remove one"),
        (["network.condition_ranges=[[1,2],[3,2]]"], r"condition_ranges has \[3, 2\]; set \[lowest, highest\]"),
        (["network.conditions=[redshift]", "init_from"], r"trained with .*cell.*, this run has \['redshift"),
        (["network.adds_vectors=true", "init_from"], "adds_vectors False, this run has True; .*adds_vectors=False"),
        (["train_path=[FOLDER/first.h5,FOLDER/late.h5]", "init_from"], r"condition_ranges=\[\[2\.0,4\.0\],\[1\.0,1"),
    ],
    ids=str,
)
def test_what_cannot_be_conditioned_is_refused_in_one_line(
    run: Path, folder: Path, training: Any, flags: list[str], says: str, capsys: Any
) -> None:
    given = [f"--init_from={run}" if key == "init_from" else f"--set={key}" for key in flags]
    given = [flag.replace("FOLDER", str(folder)) for flag in given]
    assert re.search(says, refusal(lambda arguments: training("refused", *arguments), given, capsys))


def test_every_known_condition_is_an_attribute_that_simulated_files_state() -> None:
    assert set(CONDITIONS) == set(get_args(Condition))
    assert set(CONDITIONS.values()) <= set(simulation_of(file_attributes(SimulationOptions()), 8, "")[1])
