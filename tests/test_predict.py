"""predict.py: its output file, one-line errors for bad input, and interruptions that leave every bit unchanged."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from log_lines import refusal
from processes import GENEROUS, context, run_ranks, wait_until
from volume_files import SIMULATED, smooth_field

import predict
from utils.config.sections import TransformConfig
from utils.data import import_volume
from utils.data.channels import target_channels
from utils.data.files.hdf5 import FieldReader
from utils.data.files.writer import BlockWriter
from utils.data.slabs import Slabs
from utils.distributed.launch import Launch
from utils.distributed.signals import Signals, StopSignals
from utils.distributed.world import World
from utils.errors import UserError
from utils.inference.sliding_window import SlidingWindowPredictor
from utils.inference.trained_network import TrainedNetwork
from utils.inference.window_grid import build_window_grid
from utils.training.checkpoint import BEST, FOLDER, WEIGHTS, digest, read_weights

BOX = (24, 16, 16)


def box_file(path: Path, shape: tuple[int, int, int] = BOX, **attributes: Any) -> Path:
    """A file with Nbody only, as from a simulation without gas."""
    fields = smooth_field(4, max(shape), np.random.default_rng(3)).astype(np.float32)
    with h5py.File(path, "w") as file:
        file["Nbody"] = fields[:, : shape[0], : shape[1], : shape[2]]
        file.attrs.update(attributes)
    return path


@pytest.fixture(scope="module")
def nbody(tmp_path_factory: pytest.TempPathFactory) -> Path:
    about = {"box_size_mpc_h": 12.0, "redshift": 2.0, "seed": 3, "cosmology": "planck18", "gas_adiabatic_index": 1.5}
    return box_file(tmp_path_factory.mktemp("nbody") / "nbody.h5", **about)


def command_line(run: Path, nbody: Path, output: Path, *flags: str) -> list[str]:
    return [f"--checkpoint={run}", f"--input={nbody}", f"--output={output}", "--device=cpu", *flags]


@pytest.fixture
def command(trained_run: Path, nbody: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """command(*flags): exit code and stderr of a prediction in this process, into <tmp_path>/hydro.h5."""

    def go(*flags: str) -> tuple[int, str]:
        code = 0
        try:
            predict.main(command_line(trained_run, nbody, tmp_path / "hydro.h5", *flags))
        except SystemExit as stop:
            code = int(stop.code or 0)
        output = capsys.readouterr()
        assert output.out == ""
        return code, output.err

    return go


@pytest.fixture(scope="module")
def whole(trained_run: Path, nbody: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted prediction by one rank, with physical values."""
    path = tmp_path_factory.mktemp("whole") / "hydro.h5"
    predict.main(command_line(trained_run, nbody, path, "--physical"))
    return path


def contents(path: Path) -> dict[str, np.ndarray]:
    with h5py.File(path) as file:
        return {name: file[name][...] for name in file}


# --- the file --------------------------------------------------------------------------------------------------------


def expected_hydro(run: Path, nbody: Path, window: int = 8, overlap: int = 4, periodic: bool = True) -> np.ndarray:
    """The sliding-window prediction without the command; tests/inference/test_sliding_window.py tests it."""
    network = TrainedNetwork.load(run, torch.device("cpu")).network
    field = contents(nbody)["Nbody"]
    grid = build_window_grid(field.shape[1:], window, overlap, periodic)  # type: ignore[arg-type]
    world = World(Launch("test"), torch.device("cpu"))
    predictor = SlidingWindowPredictor(
        torch.no_grad()(network), lambda x, y, z: field[:, x, y, z], grid, (4, 5), 7, world
    )
    return predictor.predict_planes(Slabs(grid.shape, world)).numpy()


def test_the_file_holds_the_prediction_and_its_provenance(whole: Path, trained_run: Path, nbody: Path) -> None:
    assert os.listdir(whole.parent) == ["hydro.h5"]
    weights = (trained_run / FOLDER / BEST / WEIGHTS).resolve()
    transform = TransformConfig(velocity_scale_km_s=SIMULATED["velocity_scale_km_s"])
    channels = target_channels(5, transform)
    with h5py.File(whole) as file:
        assert list(file) == ["Hydro", "Hydro_physical"]
        hydro, physical = file["Hydro"], file["Hydro_physical"]
        assert (hydro.shape, hydro.dtype, hydro.chunks) == ((5, *BOX), np.dtype("<f4"), None)
        np.testing.assert_allclose(hydro[...], expected_hydro(trained_run, nbody), atol=1e-6)
        assert list(hydro.attrs["channels"]) == [channel.name for channel in channels]
        assert list(hydro.attrs["transform"]) == [channel.formula() for channel in channels]
        for channel, values, converted in zip(channels, hydro, physical, strict=True):
            np.testing.assert_array_equal(converted, channel.to_physical(values))
        assert list(physical.attrs["units"]) == ["mean density", "km/s", "km/s", "km/s", "K"]
        attributes = dict(file.attrs)
    with h5py.File(nbody) as file:
        for name in ("box_size_mpc_h", "redshift", "seed", "cosmology"):
            assert attributes[name] == file.attrs[name]
    assert "gas_adiabatic_index" not in attributes, "it describes gas, which the input lacks"
    assert {key: attributes[key] for key in TransformConfig.model_fields} == transform.model_dump()
    content = read_weights(weights)
    assert attributes["made_by"] == "predict.py: a network's prediction"
    assert attributes["checkpoint"] == str(weights)
    assert attributes["checkpoint_sha256"] == digest(weights)
    for key in ("epoch", "step", "final_loss"):
        assert attributes[f"checkpoint_{key}"] == content[key]
    assert "width: 4" in attributes["config"]
    assert (attributes["window"], attributes["periodic"], attributes["precision"]) == (8, True, "float32")
    assert attributes["symmetries"] == 1
    assert {"command", "git_commit", "versions"} <= set(json.loads(attributes["provenance"]))
    fields = FieldReader(str(whole), "Hydro", 5, transform)  # a training run or evaluation can read it
    assert (fields.shape, fields.cell) == (BOX, 0.5)
    np.testing.assert_array_equal(fields.planes(slice(None), slice(3, 7)), contents(whole)["Hydro"][:, 3:7])
    fields.close()


def test_other_windows_and_precision(command: Any, trained_run: Path, nbody: Path, whole: Path, tmp_path: Path) -> None:
    """Windows do not wrap around the faces of a part of a box, which the importer writes with --split."""
    part = shutil.copy(nbody, tmp_path / "part.h5")
    with h5py.File(part, "r+") as file:
        file.attrs["periodic"] = False
    expected = expected_hydro(trained_run, nbody, 16, 11, periodic=False)
    for flag in ("--not_periodic", f"--input={part}"):
        code, stderr = command("--window=16", "--overlap=11", "--batch_size=1", "--overwrite", flag)
        assert code == 0, stderr
        assert re.search(
            r"wrote \S.*/hydro.h5: 24 × 16 × 16 cells, 3 windows of 16³ cells, overlapping by 12 cells, in \d+:\d\d$",
            stderr,
        )
        np.testing.assert_allclose(contents(tmp_path / "hydro.h5")["Hydro"], expected, atol=1e-6)
    code, stderr = command("--precision=bfloat16", "--overwrite")
    assert code == 0, stderr
    difference = np.abs(contents(tmp_path / "hydro.h5")["Hydro"] - contents(whole)["Hydro"]).max()
    assert 0 < difference < 0.02


def predict_on(world: World, flags: list[str]) -> None:
    predict.predict(predict.parse(flags), world, Signals())


def blocks_of_rank(world: World, flags: list[str]) -> list[int]:
    """Predicts; returns the numbers of the blocks that this rank has written."""
    write, numbers = BlockWriter.write, list[int]()

    def noted_write(self: BlockWriter, number: int, *block: Any) -> None:
        numbers.append(number)
        write(self, number, *block)

    BlockWriter.write = noted_write  # type: ignore[method-assign]
    predict_on(world, flags)
    return numbers


@pytest.mark.parametrize(("ranks", "flags"), [(2, []), (3, ["--block=8", "--batch_size=3"])])
def test_any_ranks_and_blocks_give_the_same_bits(
    ranks: int, flags: list[str], trained_run: Path, nbody: Path, whole: Path, tmp_path: Path
) -> None:
    arguments = command_line(trained_run, nbody, tmp_path / "hydro.h5", "--physical", *flags)
    written = [number for numbers in run_ranks(blocks_of_rank, ranks, arguments) for number in numbers]
    assert sorted(written) == [*range(len(written))], "each block once"
    assert_complete(tmp_path / "hydro.h5", whole)


COSMOLOGY = {
    "redshift": 3.0,
    "cosmology_H0": 67.66,
    "cosmology_Om0": 0.31,
    "cosmology_Ode0": 0.69,
    "cosmology_Ob0": 0.049,
}


def test_a_file_in_the_layout_of_nyx_holds_physical_values_that_the_importer_reads_back(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = box_file(tmp_path / "box.h5", box_size_mpc_h=12.0, **{**SIMULATED, **COSMOLOGY})
    code, _ = command(f"--input={box}")
    assert code == 0
    hydro = contents(tmp_path / "hydro.h5")["Hydro"]
    code, _ = command(f"--input={box}", "--format=nyx", "--overwrite")
    assert code == 0
    with h5py.File(tmp_path / "hydro.h5") as file:
        assert bytes(file.attrs["format"]) == b"nyx-lyaf"
        assert "checkpoint_sha256" in file.attrs
        assert file["domain"].attrs["size"] == pytest.approx([12.0, 8.0, 8.0])
        assert file["domain"].attrs["shape"].tolist() == [*BOX]
        universe = {"hubble": 0.6766, "omega_m": 0.31, "omega_l": 0.69, "omega_b": 0.049, "redshift": 3.0}
        assert dict(file["universe"].attrs) == pytest.approx(universe)
        fields = file["native_fields"]
        assert {name: bytes(each.attrs["units"]) for name, each in fields.items()} == {
            "baryon_density": b"(mean)",
            "dark_matter_density": b"(mean)",
            "temperature": b"K",
            **{f"velocity_{axis}": b"cm/s" for axis in "xyz"},
        }
        assert all((each.shape, each.dtype, each.chunks) == (BOX, "<f4", None) for each in fields.values())
        np.testing.assert_allclose(fields["velocity_z"], 1e5 * SIMULATED["velocity_scale_km_s"] * hydro[3], rtol=1e-6)
    monkeypatch.setattr(import_volume, "MEAN_RANGE", (0.0, np.inf))  # the network is not trained
    flag = f"--velocity_scale_km_s={SIMULATED['velocity_scale_km_s']}"
    import_volume.main([f"--input={tmp_path / 'hydro.h5'}", f"--output={tmp_path / 'back.h5'}", flag])
    back = contents(tmp_path / "back.h5")
    np.testing.assert_allclose(back["Hydro"], hydro, atol=3e-7)
    np.testing.assert_allclose(back["Nbody"][0], contents(box)["Nbody"][0], atol=3e-7)


def test_the_layout_of_nyx_needs_the_box_and_the_cosmology(refuse: Any, tmp_path: Path) -> None:
    refuse("remove --physical", flags=("--format=nyx", "--physical"))
    says = "does not state cosmology_H0, cosmology_Om0, cosmology_Ode0, cosmology_Ob0, which --format nyx needs"
    refuse(says, flags=("--format=nyx",))
    box = box_file(tmp_path / "bad.h5", **COSMOLOGY)
    says = f"h5py.File('{box}', 'a').attrs['box_size_mpc_h'] = NUMBER"
    refuse("does not state box_size_mpc_h, which", says, nbody=box, flags=("--format=nyx",))


# --- interruptions ---------------------------------------------------------------------------------------------------


def on_block(number: int, action: Callable[[], Any], before: bool = False) -> Callable[..., None]:
    """A replacement for BlockWriter.write that also calls `action` when that many blocks are written."""
    write, written = BlockWriter.write, 0

    def write_and_act(self: BlockWriter, *block: Any) -> None:
        nonlocal written
        written += 1
        if written == number and before:
            action()
        write(self, *block)
        if written == number and not before:
            action()

    return write_and_act


def assert_complete(output: Path, whole: Path) -> None:
    """The output has the bits of `whole`, and no unfinished file is left."""
    assert os.listdir(output.parent) == [output.name]
    found, expected = contents(output), contents(whole)
    assert list(found) == list(expected)
    for name, values in found.items():
        np.testing.assert_array_equal(values, expected[name])


BLOCKS = ("--physical", "--block=8")  # 12 blocks


def test_after_a_signal_the_same_command_resumes_to_the_same_bits(
    command: Any, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter, write, signals = StopSignals.__enter__, BlockWriter.write, []

    def remember(self: StopSignals) -> StopSignals:
        signals.append(self)
        return enter(self)

    def stop() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(lambda: signals[-1].received, what=lambda: "the signal")

    def predict_until(block: int, *flags: str) -> tuple[int, str]:
        """SIGTERM arrives while that block is written."""
        monkeypatch.setattr(BlockWriter, "write", write)
        monkeypatch.setattr(BlockWriter, "write", on_block(block, stop))
        return command(*flags)

    monkeypatch.setattr(StopSignals, "__enter__", remember)
    assert predict_until(1, "--overlap=5", "--precision=bfloat16", "--symmetries=8", "--block=8")[0] == 75
    code, log = predict_until(2, *BLOCKS)
    assert code == 75, log
    assert "was started with other windows, precision, symmetries, physical: starting from scratch" in log
    assert "12 blocks of up to 8³ cells; windows that blocks share: 238 % more" in log
    assert "Stopping after 2 of 12 blocks: SIGTERM; run the same command again to resume" in log
    assert not (tmp_path / "hydro.h5").exists()
    code, log = predict_until(1, "--physical", "--block=16")  # the file keeps its blocks
    assert code == 75, log
    assert "Resuming: 2 of 12 blocks are predicted" in log
    assert "Stopping after 3 of 12 blocks" in log
    code, log = predict_until(9, *BLOCKS)  # while the last block is written: too late to stop
    assert code == 0, log
    assert_complete(tmp_path / "hydro.h5", whole)


def die_at_the_fourth_block(world: World, flags: list[str]) -> None:
    """Rank 1, or the only one."""
    if world.rank == world.size - 1:
        BlockWriter.write = on_block(4, lambda: os.kill(os.getpid(), signal.SIGKILL), before=True)  # type: ignore[method-assign]
    predict_on(world, flags)


def die_alone(flags: list[str]) -> None:
    die_at_the_fourth_block(World(Launch("test"), torch.device("cpu")), flags)


def test_after_a_kill_another_number_of_ranks_resumes_to_the_same_bits(
    trained_run: Path, nbody: Path, whole: Path, tmp_path: Path
) -> None:
    flags = command_line(trained_run, nbody, tmp_path / "hydro.h5", *BLOCKS)
    process = context().Process(target=die_alone, args=(flags,))
    process.start()
    process.join(GENEROUS)
    assert process.exitcode == -signal.SIGKILL
    assert not (tmp_path / "hydro.h5").exists()
    record = (tmp_path / ".hydro.h5.blocks").read_bytes()
    assert record == b"\0" + b"\1" * 3 + b"\0" * 9
    run_ranks(predict_on, 2, flags)
    assert_complete(tmp_path / "hydro.h5", whole)


def fill_the_disk_of_rank_1(world: World, flags: list[str]) -> None:
    """Its first block cannot be written; all ranks fail with its error, and those of rank 0 are kept."""

    def full(*_: Any) -> None:
        raise UserError("cannot write hydro.h5: No space left on device; free some space")

    if world.rank == 1:
        BlockWriter.write = full  # type: ignore[method-assign]
    with pytest.raises(UserError, match=r"^rank 1: cannot write hydro.h5: No space left"):
        predict_on(world, flags)


def test_if_one_rank_fails_all_do_and_keep_finished_blocks(
    trained_run: Path, nbody: Path, whole: Path, tmp_path: Path
) -> None:
    flags = command_line(trained_run, nbody, tmp_path / "hydro.h5", *BLOCKS)
    run_ranks(fill_the_disk_of_rank_1, 2, flags)
    assert not (tmp_path / "hydro.h5").exists()
    predict.main(flags)
    assert_complete(tmp_path / "hydro.h5", whole)


def test_one_checkpoint_is_used_throughout_even_if_a_training_moves_best(
    trained_run: Path, nbody: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path and digest written to the file are those of the weights that were read."""
    copy = tmp_path / "run"
    shutil.copytree(trained_run, copy, symlinks=True)
    best = copy / FOLDER / BEST
    first, load = best.resolve(), TrainedNetwork.load

    def load_and_move(*arguments: Any) -> TrainedNetwork:
        trained = load(*arguments)
        best.unlink()
        best.symlink_to("step_99999999")
        return trained

    monkeypatch.setattr(TrainedNetwork, "load", load_and_move)
    predict.main(command_line(copy, nbody, tmp_path / "hydro.h5", "--window=16"))
    with h5py.File(tmp_path / "hydro.h5") as file:
        assert file.attrs["checkpoint"] == str(first / WEIGHTS)
        assert file.attrs["checkpoint_sha256"] == digest(first / WEIGHTS)


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.fixture
def refuse(trained_run: Path, nbody: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """refuse(*says, checkpoint=…, nbody=…, output=…, flags=…): one line, exit code 2, nothing but `left` is written."""
    here = {"checkpoint": trained_run, "nbody": nbody, "output": tmp_path / "out" / "hydro.h5"}

    def go(*says: str, flags: tuple[str, ...] = (), left: tuple[str, ...] = (), **others: Path) -> None:
        paths = here | others
        arguments = command_line(paths["checkpoint"], paths["nbody"], paths["output"], *flags)
        line = refusal(predict.main, arguments, capsys)
        assert all(part in line for part in says), line
        assert sorted(path.name for path in (tmp_path / "out").glob("*")) == sorted(left)

    return go


CLASSIFIER = {
    "dataset": {"name": "digits"},
    "data_loader_config": "classification",
    "loss": "cross_entropy",
    "network": {"name": "mnist_cnn"},
}


@pytest.mark.parametrize(
    ("change", "flags", "says"),
    [
        (CLASSIFIER, (), "a classifier (mnist_cnn); predict.py, evaluate.py and export.py need a network trained on"),
        ({"transform": {"density_log_scale": None}}, ("--physical",), "does not define physical values of gas density"),
        ({}, ("--window=10",), "--window 10 is not a multiple of 4, which the network needs"),
        ({}, ("--overlap=8",), "overlap 8 must be smaller than the window (8); 4 is recommended"),
        ({}, ("--window=0",), "argument --window: '0' is not a positive integer"),
    ],
)
def test_an_unsuitable_config_or_flag_is_a_one_line_error(
    refuse: Any, trained_run: Path, tmp_path: Path, change: dict[str, Any], flags: tuple[str, ...], says: str
) -> None:
    content = read_weights(trained_run)
    content["config"] |= change
    torch.save(content, tmp_path / "changed.pt")
    refuse(says, checkpoint=tmp_path / "changed.pt", flags=flags)


def test_a_missing_checkpoint_or_config_is_a_one_line_error(refuse: Any, trained_run: Path, tmp_path: Path) -> None:
    """tests/training/test_checkpoint.py tests every kind of damage."""
    refuse(f"no such file: {tmp_path / 'nowhere'}", checkpoint=tmp_path / "nowhere")
    content = read_weights(trained_run)
    del content["config"]
    torch.save(content, tmp_path / "changed.pt")
    says = "changed.pt has no config of its network; give weights that train.py has written"
    refuse(says, checkpoint=tmp_path / "changed.pt")


def test_weights_that_are_not_finite_are_refused(refuse: Any, trained_run: Path, tmp_path: Path) -> None:
    """Fixed: the prediction was NaN everywhere, with exit code 0."""
    content = read_weights(trained_run)
    name, weights = next(iter(content["network"].items()))
    weights.view(-1)[3] = float("nan")
    torch.save(content, tmp_path / "nan.pt")
    refuse(f"nan.pt: {name} has NaN or infinite values; give another checkpoint", checkpoint=tmp_path / "nan.pt")


def with_dataset(name: str, shape: tuple[int, ...]) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        with h5py.File(path, "w") as file:
            file[name] = np.zeros(shape, np.float32)

    return make


def in_km_s(path: Path) -> None:
    """Exported files take physical values, this command takes channels: the output would be nonsense."""
    with h5py.File(box_file(path), "r+") as file:
        file["Nbody"][1:] *= 10_000


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: None, "bad.h5; give another path"),  # a fixed bug: the remedy was one for training
        (with_dataset("Dark", (4, 16, 16, 16)), "has no dataset Nbody; it contains Dark"),
        (with_dataset("native_fields/temperature", (16, 16, 16)), "bad.h5 is a snapshot of Nyx; import it with python"),
        (with_dataset("Nbody", (4, 16, 4, 16)), "the box has 4 cells per side, fewer than a window's 8"),
        (
            lambda path: box_file(path, density_log_scale=10.0),
            "density_log_scale 10, the config has 14; import the file again with --density_log_scale 14",
        ),
        (in_km_s, "bad.h5: Nbody[1] holds physical values"),
    ],
)
def test_an_unsuitable_box_is_a_one_line_error(
    refuse: Any, tmp_path: Path, make: Callable[[Path], Any], says: str
) -> None:
    """tests/test_bad_input.py tests every kind of damaged file."""
    make(tmp_path / "bad.h5")
    refuse(says, nbody=tmp_path / "bad.h5")


def test_an_input_from_another_simulation_than_the_training_data_is_warned_about(
    command: Any, nbody: Path, tmp_path: Path
) -> None:
    """Only attributes that both files have are compared; those of the training data are in the checkpoint."""
    flags = ("--window=16", "--overwrite")
    box_file(tmp_path / "unknown.h5", cosmology_Om0=0.3)
    for same in (nbody, tmp_path / "unknown.h5"):
        assert "differs from" not in command(f"--input={same}", *flags)[1]
    about = {"box_size_mpc_h": 24.0, "redshift": 0.5, "cosmology": "WMAP9", "cosmology_H0": 67.67, "cosmology_Om0": 0.3}
    code, stderr = command(f"--input={box_file(tmp_path / 'other.h5', **about)}", *flags)
    assert code == 0
    (line,) = [line for line in stderr.splitlines() if "differs from" in line]
    assert line.endswith(
        f"WARNING - {tmp_path / 'other.h5'} differs from the training data: redshift 0.5 instead of 2.0, "
        f"cosmology WMAP9 instead of planck18, cell size (Mpc/h) 1.0 instead of 0.5; see docs/generalization.md"
    )


def test_a_non_finite_value_is_located(refuse: Any, command: Any, tmp_path: Path) -> None:
    """In the fixed file the prediction starts from scratch, because other values may have changed, too."""
    path = tmp_path / "bad.h5"
    with h5py.File(box_file(path), "r+") as file:
        file["Nbody"][2, 21, 3, 4] = np.nan
    hidden = (".hydro.h5.blocks", ".hydro.h5.journal", ".hydro.h5.partial")
    refuse(f"{path}: Nbody[2, 21, 3, 4] is nan; fix the file", nbody=path, left=hidden)
    with h5py.File(path, "r+") as file:
        file["Nbody"][2, 21, 3, 4] = 0
    code, log = command(f"--input={path}", f"--output={tmp_path / 'out' / 'hydro.h5'}")
    assert code == 0, log
    assert "was started with other input's size and time: starting from scratch" in log


def test_an_output_that_exists_or_is_the_input_is_a_one_line_error_and_kept(
    refuse: Any, nbody: Path, tmp_path: Path
) -> None:
    output = tmp_path / "precious.h5"
    output.write_text("precious")
    refuse("precious.h5 exists; give --overwrite to replace it, or another --output", output=output)
    refuse(f"{output}: ", "exists", output=output / "hydro.h5")
    refuse("x.npy' would be an HDF5 file, not a file of numpy; name it *.h5", output=tmp_path / "x.npy")
    assert output.read_text() == "precious"
    before = nbody.read_bytes()
    refuse(f"output {nbody} is the input; give another --output", output=nbody, flags=("--overwrite",))
    assert nbody.read_bytes() == before
