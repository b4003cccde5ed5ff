"""predict.py: its output file, one-line errors for bad input, and interruptions that leave every bit unchanged."""

import contextlib
import itertools
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import h5py
import numpy as np
import pytest
import torch
from log_lines import refusal
from processes import run_ranks, wait_until
from reference_samples import ALONE
from trainings import killed, predict_on
from volume_files import SIMULATED, contents, smooth_field

import evaluate
import predict
from analysis.inference import prediction_file
from analysis.inference.sliding_window import SlidingWindowPredictor
from analysis.inference.trained_network import TrainedNetwork
from analysis.inference.window_grid import build_window_grid
from analysis.slabs import Slabs
from utils.config.channels import PLAUSIBLE, TRANSFORM, Channel, known_channels
from utils.distributed.signals import StopSignals
from utils.distributed.world import World
from utils.errors import UserError
from utils.run.checkpoint import BEST, WEIGHTS, file_digest, read_weights
from utils.volumes import import_volume
from utils.volumes.attributes import channel_attributes, stated_channels
from utils.volumes.hdf5 import FieldReader
from utils.volumes.writer import BlockWriter

BOX = (24, 16, 16)
SIMULATION = {"box_size_mpc_h": 12.0, "redshift": 2.0, "seed": 3, "cosmology": "planck18"}
UNIVERSE = {"cosmology_H0": 67.66, "cosmology_Om0": 0.31, "cosmology_Ode0": 0.69, "cosmology_Ob0": 0.049}


def box_file(path: Path, shape: tuple[int, int, int] = BOX, **attributes: Any) -> Path:
    """A file with Nbody only, as from a simulation without gas."""
    with h5py.File(path, "w") as file:
        file["Nbody"] = smooth_field(4, shape, np.random.default_rng(3)).astype(np.float32)
        file.attrs.update(attributes)
    return path


@pytest.fixture(scope="module")
def nbody(tmp_path_factory: Any) -> Path:
    return box_file(tmp_path_factory.mktemp("nbody") / "nbody.h5", gas_adiabatic_index=1.5, **SIMULATION)


def command_line(run: Path, nbody: Path, output: Path, *flags: str) -> list[str]:
    return [f"--checkpoint={run}", f"--input={nbody}", f"--output={output}", "--device=cpu", *flags]


@pytest.fixture
def command(trained_run: Path, nbody: Path, tmp_path: Path, capsys: Any):
    """command(*flags): the log of a prediction into <tmp_path>/hydro.h5; `code` is the expected exit code."""

    def go(*flags: str, code: int = 0) -> str:
        with pytest.raises(SystemExit, match=str(code)) if code else contextlib.nullcontext():
            predict.main(command_line(trained_run, nbody, tmp_path / "hydro.h5", *flags))
        output = capsys.readouterr()
        assert output.out == "", output.err
        return output.err

    return go


@pytest.fixture(scope="module")
def whole(trained_run: Path, nbody: Path, tmp_path_factory: Any) -> Path:
    """An uninterrupted prediction by one rank, with physical values."""
    path = tmp_path_factory.mktemp("whole") / "hydro.h5"
    predict.main(command_line(trained_run, nbody, path, "--physical"))
    return path


def assert_complete(output: Path, whole: Path) -> None:
    """The output has the bits of `whole`, and no unfinished file is left."""
    assert os.listdir(output.parent) == [output.name]
    result, expected = contents(output), contents(whole)
    assert list(result) == list(expected)
    for name, values in result.items():
        np.testing.assert_array_equal(values, expected[name])


def expected_hydro(run: Path, nbody: Path, window: int = 8, overlap: int = 4, periodic: bool = True) -> np.ndarray:
    """The sliding-window prediction without the command; tests/analysis/inference/test_sliding_window.py tests it."""
    network = torch.no_grad()(TrainedNetwork.load(run, torch.device("cpu")).network)
    field = contents(nbody)["Nbody"]
    grid = build_window_grid(field.shape[1:], window, overlap, periodic)  # type: ignore[arg-type]
    predictor = SlidingWindowPredictor(network, lambda x, y, z: field[:, x, y, z], grid, (4, 5), 7, ALONE)
    return predictor.predict_planes(Slabs(grid.shape, ALONE)).numpy()


def test_the_file_holds_the_prediction_and_its_provenance(whole: Path, trained_run: Path, nbody: Path) -> None:
    weights = (trained_run / "checkpoints" / BEST / WEIGHTS).resolve()
    channels = known_channels("targets", 5, {**TRANSFORM, "velocity_scale_km_s": SIMULATED["velocity_scale_km_s"]})
    with h5py.File(whole) as file:
        assert list(file) == ["Hydro", "Hydro_physical"]
        hydro, physical = file["Hydro"], file["Hydro_physical"]
        assert (hydro.shape, hydro.dtype, hydro.chunks) == ((5, *BOX), np.dtype("<f4"), None)
        np.testing.assert_allclose(hydro[...], expected_hydro(trained_run, nbody), atol=1e-6)
        assert stated_channels(hydro) == channels
        assert list(hydro.attrs["transform"]) == [channel.formula() for channel in channels]
        for channel, values, converted in zip(channels, hydro, physical, strict=True):
            np.testing.assert_array_equal(converted, channel.to_physical(values))
        assert list(physical.attrs["units"]) == ["mean density", "km/s", "km/s", "km/s", "K"]
        attributes = dict(file.attrs)
    assert "gas_adiabatic_index" not in attributes, "it describes gas, which the input lacks"
    content = read_weights(weights)
    expected = SIMULATION | {"window": 8, "periodic": True, "precision": "float32", "symmetries": 1}
    expected |= {"checkpoint": str(weights), "checkpoint_sha256": file_digest(weights)}
    expected |= {f"checkpoint_{key}": content[key] for key in ("epoch", "step", "final_loss")}
    assert {key: attributes[key] for key in expected} == expected
    assert "width: 4" in attributes["config"]
    assert {"command", "git_commit", "versions"} <= set(json.loads(attributes["provenance"]))
    fields = FieldReader(str(whole), "Hydro", 5)  # a training run or evaluation can read it
    assert fields.channels("targets") == channels
    assert (fields.shape, fields.cell) == (BOX, 0.5)
    fields.close()


def test_the_calibration_multiplies_the_density_once(command, trained_run: Path, tmp_path: Path, monkeypatch) -> None:
    """Fixed: the predicted gas lacked mass. --no_calibration gives the network's bits; evaluate.py reports the same."""
    content, volume = read_weights(trained_run), trained_run.parents[2] / "val.h5"
    assert content["density_factor"] > 0
    assert len(content["density_filter"]) == 7
    for name, factor in (("plain", None), ("raised", 1.05)):
        torch.save(content | {"density_filter": None, "density_factor": factor}, tmp_path / f"{name}.pt")
    plain, raised = (f"--checkpoint={tmp_path / name}.pt" for name in ("plain", "raised"))
    command(plain, f"--output={tmp_path / 'plain.h5'}", f"--input={volume}")
    log = command(raised, f"--output={tmp_path / 'own.h5'}", f"--input={volume}", "--no_calibration")
    assert "Gas density is multiplied" not in log
    expected = contents(tmp_path / "plain.h5")["Hydro"]
    np.testing.assert_array_equal(contents(tmp_path / "own.h5")["Hydro"], expected)
    assert "Gas density is multiplied by 1.0500, as" in command(raised, f"--input={volume}", "--physical")
    hydro = contents(tmp_path / "hydro.h5")
    np.testing.assert_array_equal(hydro["Hydro"][1:], expected[1:])
    np.testing.assert_allclose(hydro["Hydro_physical"][0], 1.05 * np.exp(14 * expected[0]), rtol=1e-5)
    with h5py.File(tmp_path / "hydro.h5") as file:
        assert file.attrs["checkpoint_density_factor"] == 1.05
    masses: list[float] = []
    monkeypatch.setattr(evaluate.report, "write_report", lambda output, result, *_: masses.append(result.mass_ratio))
    for flags in ([raised], [f"--prediction={tmp_path / 'hydro.h5'}"], [raised, "--no_calibration"]):
        evaluate.main([*flags, f"--input={volume}", f"--output={tmp_path / 'report'}", "--device=cpu"])
    assert masses == pytest.approx([masses[0], masses[0], masses[0] / 1.05], rel=1e-5)
    filtered = f"--checkpoint={tmp_path / 'filtered.pt'}"  # like older ones
    torch.save(content | {"density_filter": [2.0, 0.0, 0.0, 0.0, 0.01], "density_factor": 1.05}, filtered[13:])
    assert "multiplied by 1.0500 and filtered" in command(filtered, f"--input={volume}", "--overwrite")
    density = contents(tmp_path / "hydro.h5")["Hydro"][0]
    np.testing.assert_allclose(density, 2 * expected[0] + 0.01 + np.log(1.05) / 14, atol=1e-5)


def test_other_windows_and_precision(command: Any, trained_run: Path, nbody: Path, whole: Path, tmp_path: Path) -> None:
    """Windows do not wrap around the faces of a part of a box, which the importer writes with --split."""
    part = shutil.copy(nbody, tmp_path / "part.h5")
    with h5py.File(part, "r+") as file:
        file.attrs["periodic"] = False
    expected = expected_hydro(trained_run, nbody, 16, 11, periodic=False)
    for flag in ("--not_periodic", f"--input={part}"):
        log = command("--window=16", "--overlap=11", "--batch_size=1", "--overwrite", flag)
        assert "hydro.h5: 24 × 16 × 16 cells, 3 windows of 16³ cells, overlapping by 12 cells, in " in log
        assert "differs from" not in log, "the input has the redshift and cell of the training data"
        np.testing.assert_allclose(contents(tmp_path / "hydro.h5")["Hydro"], expected, atol=1e-6)
    command("--precision=bfloat16", "--overwrite")
    difference = np.abs(contents(tmp_path / "hydro.h5")["Hydro"] - contents(whole)["Hydro"]).max()
    assert 0 < difference < 0.02


def blocks_of_rank(world: World, flags: list[str]) -> list[int]:
    """Predicts; returns the numbers of the blocks that this rank has written."""
    with pytest.MonkeyPatch.context() as patch:
        noted = Mock(side_effect=BlockWriter.write)
        patch.setattr(BlockWriter, "write", lambda *arguments: noted(*arguments))
        predict_on(world, flags)
    return [call.args[1] for call in noted.call_args_list]


@pytest.mark.parametrize(("ranks", "flags"), [(2, []), (3, ["--block=8", "--batch_size=3"])])
def test_any_ranks_and_blocks_give_the_same_bits(ranks, flags, trained_run, nbody, whole, tmp_path: Path) -> None:
    arguments = command_line(trained_run, nbody, tmp_path / "hydro.h5", "--physical", *flags)
    written = [number for numbers in run_ranks(blocks_of_rank, ranks, arguments) for number in numbers]
    assert sorted(written) == [*range(len(written))], "each block once"
    assert_complete(tmp_path / "hydro.h5", whole)


def test_the_importer_reads_a_file_in_the_layout_of_nyx(command: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """A warning compares the input with the training data; only attributes that both state."""
    box = box_file(tmp_path / "box.h5", **{**SIMULATED, **UNIVERSE, "box_size_mpc_h": 24.0, "redshift": 3.0})
    differences = "redshift 3.0 instead of 2.0, cell size (Mpc/h) 1.0 instead of 0.5; see docs/generalization.md\n"
    assert f"WARNING - {box} differs from the training data: {differences}" in command(f"--input={box}")
    hydro = contents(tmp_path / "hydro.h5")["Hydro"]
    command(f"--input={box}", "--format=nyx", "--overwrite")
    with h5py.File(tmp_path / "hydro.h5") as file:
        assert "checkpoint_sha256" in file.attrs
        assert file["domain"].attrs["size"] == pytest.approx([24.0, 16.0, 16.0])
        speed = file["native_fields/velocity_z"]
        np.testing.assert_allclose(speed, 1e5 * SIMULATED["velocity_scale_km_s"] * hydro[3], rtol=1e-6)
    monkeypatch.setitem(PLAUSIBLE, "mean density", (0.0, np.inf))  # the network is not trained
    flag = f"--velocity_scale_km_s={SIMULATED['velocity_scale_km_s']}"
    import_volume.main([f"--input={tmp_path / 'hydro.h5'}", f"--output={tmp_path / 'back.h5'}", flag])
    back = contents(tmp_path / "back.h5")
    np.testing.assert_allclose(back["Hydro"], hydro, atol=3e-7)
    np.testing.assert_allclose(back["Nbody"][0], contents(box)["Nbody"][0], atol=3e-7)


BLOCKS = ("--physical", "--block=8")  # 12 blocks


def before_block(number: int, action: Callable[[], Any]) -> Callable[..., None]:
    """A replacement for BlockWriter.write that calls `action` before that many blocks are written."""
    write, calls = BlockWriter.write, itertools.count(1)

    def act_and_write(*arguments: Any) -> None:
        if next(calls) == number:
            action()
        write(*arguments)

    return act_and_write


def test_after_a_signal_a_command_resumes_to_the_same_bits(command, whole: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(prediction_file, "POLL_SECONDS", 0.0)  # the stop that the file records is read in time
    enter, signals = StopSignals.__enter__, []
    monkeypatch.setattr(StopSignals, "__enter__", lambda self: (signals.append(self), enter(self))[1])

    def stop() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(lambda: signals[-1].received, what=lambda: "the signal")

    def predict_until(block: int, *flags: str, code: int = 75) -> str:
        """SIGTERM arrives while that block is written."""
        with monkeypatch.context() as patch:
            patch.setattr(BlockWriter, "write", before_block(block, stop))
            return command(*flags, code=code)

    predict_until(1, "--overlap=5", "--precision=bfloat16", "--symmetries=8", "--no_calibration", "--block=8")
    log = predict_until(2, *BLOCKS)
    assert "was started with other windows, precision, symmetries, calibration, physical: starting from scratch" in log
    assert "Stopping after 2 of 12 blocks: SIGTERM; run the same command again to resume" in log
    assert not (tmp_path / "hydro.h5").exists()
    log = predict_until(1, "--physical", "--block=16")  # the file keeps its blocks
    assert "Resuming: 2 of 12 blocks are predicted" in log
    assert "Stopping after 3 of 12 blocks" in log
    assert "other windows: starting" in predict_until(1, "--not_periodic", *BLOCKS)
    predict_until(4, *BLOCKS)
    predict_until(9, *BLOCKS, code=0)  # while the last block is written: too late to stop
    assert_complete(tmp_path / "hydro.h5", whole)


def test_an_interrupt_says_what_is_kept_and_how_to_resume(command: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(BlockWriter, "write", before_block(3, Mock(side_effect=KeyboardInterrupt)))
    lines = command(*BLOCKS, code=130).splitlines()
    assert lines[-1] == "interrupted; 2 of 12 blocks are kept in a hidden file; run the same command again to resume"
    assert "Traceback" not in "".join(lines)


def die_at_the_fourth_block(flags: list[str]) -> None:
    BlockWriter.write = before_block(4, lambda: os.kill(os.getpid(), signal.SIGKILL))  # type: ignore[method-assign]
    predict_on(ALONE, flags)


def fill_the_disk_of_rank_1(world: World, flags: list[str]) -> None:
    if world.rank == 1:
        BlockWriter.write = Mock(side_effect=UserError("cannot write hydro.h5: No space left on device"))
    with pytest.raises(UserError, match=r"^rank 1: cannot write hydro.h5: No space left"):
        predict_on(world, flags)


def test_after_a_kill_and_a_full_disk_other_ranks_resume(trained_run, nbody, whole: Path, tmp_path: Path) -> None:
    """If one rank fails, all do; finished blocks are kept."""
    flags = command_line(trained_run, nbody, tmp_path / "hydro.h5", *BLOCKS)
    killed(die_at_the_fourth_block, flags)
    record = tmp_path / ".hydro.h5.blocks"
    assert record.read_bytes() == b"\0" + b"\1" * 3 + b"\0" * 9
    run_ranks(fill_the_disk_of_rank_1, 2, flags)
    assert record.read_bytes()[1:5] == b"\1" * 4, "rank 0 has written its first block"
    assert not (tmp_path / "hydro.h5").exists()
    run_ranks(predict_on, 2, flags)
    assert_complete(tmp_path / "hydro.h5", whole)


@pytest.fixture(scope="module")
def bad(trained_run: Path, tmp_path_factory: Any) -> Path:
    """A folder of checkpoints and boxes that do not suit the command."""
    folder = tmp_path_factory.mktemp("bad")
    content = read_weights(trained_run)
    config = content["config"]
    classifier = {"data_loader_config": "classification", "loss": "cross_entropy", "network": {"name": "mnist_cnn"}}
    torch.save(content | {"config": config | classifier | {"dataset": {"name": "digits"}}}, folder / "classifier.pt")
    inputs, (density, *others) = (config["channels"][side] for side in ("inputs", "targets"))
    channels = {"inputs": inputs, "targets": [density | {"unit": None}, *others]}
    unknown = {"config": config | {"channels": channels}, "density_factor": None}  # which could not be measured
    torch.save(content | unknown, folder / "unknown.pt")
    next(iter(content["network"].values())).view(-1)[3] = float("nan")
    torch.save(content, folder / "nan.pt")
    (folder / "npy").mkdir()
    (folder / "npy" / "density.npy").touch()
    box_file(folder / "flat.h5", (16, 4, 16))
    box_file(folder / "scale.h5", density_log_scale=10.0)
    with h5py.File(box_file(folder / "swapped.h5"), "r+") as file:
        file["Nbody"].attrs.update(channel_attributes([Channel(**inputs[number]) for number in (0, 2, 1, 3)]))
    box_file(folder / "cosmology.h5", redshift=3.0, **UNIVERSE)
    places: list[tuple[str, Any, float]] = [("percent", (slice(1, None), 2), 1e5), ("nan", (2, 21, 3, 4), np.nan)]
    for name, place, factor in places:
        with h5py.File(box_file(folder / f"{name}.h5"), "r+") as file:
            file["Nbody"][place] *= factor
    return folder


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--checkpoint=BAD/classifier.pt", "a classifier (mnist_cnn); predict.py, evaluate.py and export.py need"),
        ("--checkpoint=BAD/unknown.pt --physical", "values of gas density are unknown; do not give --physical"),
        # Fixed: the prediction was NaN everywhere, with exit code 0.
        ("--checkpoint=BAD/nan.pt", " has NaN or infinite values; give another checkpoint"),
        ("--checkpoint=BAD/nowhere", "no such file: BAD/nowhere"),
        ("--window=10", "--window 10 is not a multiple of 4, which the network needs"),
        ("--overlap=8", "overlap 8 is not from 0 to 7; 4 is recommended"),
        ("--input=BAD/nowhere.h5", "nowhere.h5; give another path"),  # fixed: the remedy was one for training
        ("--input=BAD/npy", "regular file; python -m utils.volumes.import_volume makes one of the .npy files in"),
        ("--input=BAD/flat.h5", "the box has 4 cells per side, fewer than a window's 8"),
        ("--input=BAD/scale.h5", "ln(value / mean density) / 10 instead of ln(value / mean density) / 14; give"),
        ("--input=BAD/swapped.h5", "other channels than the network: dark-matter density, dark-matter velocity y, "),
        ("--input=BAD/nan.h5", "BAD/nan.h5: Nbody[2, 21, 3, 4] is nan; fix the file"),
        # Fixed: few of a small box's values are beyond ±100, and the prediction was saturated everywhere.
        ("--input=BAD/percent.h5", "percent.h5 holds physical values, or other channels than those of the network; "),
        ("--format=nyx", "does not state cosmology_H0, cosmology_Om0, cosmology_Ode0, cosmology_Ob0, which --format"),
        ("--format=nyx --input=BAD/cosmology.h5", ".attrs['box_size_mpc_h'] = NUMBER"),
        ("--output=BAD/flat.h5", "flat.h5 exists; give --overwrite to replace it, or another --output"),
        ("--input=BAD/flat.h5 --output=BAD/flat.h5 --overwrite --window=4", "flat.h5 is the input; give another --o"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(flags, says, trained_run, nbody, bad, tmp_path, capsys) -> None:
    """tests/test_bad_input.py tests damaged files."""
    before = {path: file_digest(path) for path in bad.glob("*.*")}
    given = flags.replace("BAD", str(bad)).split()
    line = refusal(predict.main, command_line(trained_run, nbody, tmp_path / "out" / "hydro.h5", *given), capsys)
    assert says.replace("BAD", str(bad)) in line
    assert [*(tmp_path / "out").glob("*")] == []
    assert {path: file_digest(path) for path in bad.glob("*.*")} == before
