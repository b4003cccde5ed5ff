"""predict.py from outside: a file as described, bad input in one line, and interruptions that cost no bit."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from disks import fill, small_disk
from processes import run_ranks
from volume_files import smooth_field, write_volume

import predict
import train
from utils.channels import target_channels
from utils.checkpoint import BEST, DIGESTS, FOLDER, WEIGHTS, digest, read_weights
from utils.config import Transform
from utils.data import growing
from utils.data.growing import GrowingVolume
from utils.data.volumes import Fields
from utils.distributed import Launch, World
from utils.errors import UserError
from utils.stopping import NoSignals
from utils.tiling import tile_volume

TOP = Path(__file__).parent.parent
LOG_LINE = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} - \S+ - [A-Z]+ - "
BOX = (24, 16, 16)
ALONE = World(Launch("test"), torch.device("cpu"))


def box_file(path: Path, shape: tuple[int, int, int] = BOX, **attributes: Any) -> Path:
    """A file with Nbody alone, as simulations without gas give."""
    fields = smooth_field(4, max(shape), np.random.default_rng(3)).astype(np.float32)
    with h5py.File(path, "w") as file:
        file["Nbody"] = fields[:, : shape[0], : shape[1], : shape[2]]
        file.attrs.update(attributes)
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, data_flags: list[str]) -> Path:
    """A training's directory."""
    folder = tmp_path_factory.mktemp("trained")
    handlers, level = list(logging.getLogger().handlers), logging.getLogger().level
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(TOP)
        flags = ["--set=report_baselines=false", f"--set=expdir={folder}"]
        train.main(["--config=test", *data_flags, *flags])
    logging.getLogger().handlers[:] = handlers
    logging.getLogger().setLevel(level)
    return folder / "test" / "1GPU" / "00"


@pytest.fixture(scope="module")
def nbody(tmp_path_factory: pytest.TempPathFactory) -> Path:
    about = {"box_size_mpc_h": 12.0, "redshift": 2.0, "seed": 3, "cosmology": "planck18", "gas_adiabatic_index": 1.5}
    return box_file(tmp_path_factory.mktemp("nbody") / "nbody.h5", **about)


def command_line(run: Path, nbody: Path, output: Path, *flags: str) -> list[str]:
    return [f"--checkpoint={run}", f"--input={nbody}", f"--output={output}", "--device=cpu", *flags]


@pytest.fixture
def command(run: Path, nbody: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """command(*flags): exit code and stderr of a prediction in this process, into <tmp_path>/hydro.h5."""

    def go(*flags: str) -> tuple[int, str]:
        code = 0
        try:
            predict.main(command_line(run, nbody, tmp_path / "hydro.h5", *flags))
        except SystemExit as stop:
            code = int(stop.code or 0)
        output = capsys.readouterr()
        assert output.out == ""
        return code, output.err

    return go


def contents(path: Path) -> dict[str, np.ndarray]:
    with h5py.File(path) as file:
        return {name: file[name][...] for name in file}


def said(stderr: str) -> str:
    """The log, without times."""
    return "\n".join(re.sub(LOG_LINE, "", line) for line in stderr.splitlines())


# --- what is written -------------------------------------------------------------------------------------------------


def by_hand(run: Path, nbody: Path, tile: int = 8, step: int = 4, periodic: bool = True) -> np.ndarray:
    """The network on each tile, put together in numpy."""
    network = predict.load_trained(str(run), torch.device("cpu")).network
    field = contents(nbody)["Nbody"]
    tiling = tile_volume(field.shape[1:], tile, step, periodic)  # type: ignore[arg-type]
    result = np.zeros((5, *field.shape[1:]))
    axes = (tiling.x, tiling.y, tiling.z)
    for numbers in np.ndindex(*(len(axis.origins) for axis in axes)):
        covered = np.ix_(*(axis.covered(number) for axis, number in zip(axes, numbers, strict=True)))
        cells = (slice(None), *covered)
        with torch.no_grad():
            made = network(torch.from_numpy(field[cells])[None])[0].numpy()
        x, y, z = (axis.windows[number] for axis, number in zip(axes, numbers, strict=True))
        result[cells] += made * np.einsum("x,y,z->xyz", x, y, z)
    return result


def test_the_file_is_the_networks_and_says_what_it_is(command: Any, run: Path, nbody: Path, tmp_path: Path) -> None:
    code, stderr = command()
    assert code == 0, stderr
    assert re.search(r"wrote \S+/hydro.h5: 24 × 16 × 16 cells, 96 tiles of 8³, in \d+:\d\d$", stderr)
    assert os.listdir(tmp_path) == ["hydro.h5"]
    weights = (run / FOLDER / BEST / WEIGHTS).resolve()
    with h5py.File(tmp_path / "hydro.h5") as file:
        assert list(file) == ["Hydro"]
        hydro = file["Hydro"]
        assert (hydro.shape, hydro.dtype, hydro.chunks) == ((5, *BOX), np.dtype("<f4"), None)
        np.testing.assert_allclose(hydro[...], by_hand(run, nbody), atol=1e-6)
        channels = target_channels(5, Transform())
        assert list(hydro.attrs["channels"]) == [channel.name for channel in channels]
        assert list(hydro.attrs["transform"]) == [channel.formula() for channel in channels]
        attributes = dict(file.attrs)
    with h5py.File(nbody) as file:
        for name in ("box_size_mpc_h", "redshift", "seed", "cosmology"):
            assert attributes[name] == file.attrs[name]
    assert "gas_adiabatic_index" not in attributes, "that is how the input's own gas was made"
    assert {key: attributes[key] for key in Transform.model_fields} == Transform().model_dump()
    content = read_weights(weights)
    assert attributes["made_by"] == "predict.py: a network's prediction"
    assert attributes["checkpoint"] == str(weights)
    assert attributes["checkpoint_sha256"] == digest(weights)
    assert [attributes[f"checkpoint_{key}"] for key in ("epoch", "step", "final_loss")] == [
        content[key] for key in ("epoch", "step", "final_loss")
    ]
    assert "width: 4" in attributes["config"]
    assert attributes["input"] == str(nbody)
    assert json.loads(attributes["tile_origins"])[0] == [0, 4, 8, 12, 16, 20]
    assert (attributes["tile"], attributes["periodic"], attributes["precision"]) == (8, True, "float32")
    provenance = json.loads(attributes["provenance"])
    assert provenance["world_size"] == 1
    assert {"command", "git_commit", "versions"} <= set(provenance)


def test_the_file_can_be_trained_on_and_predicted_from_like_any(command: Any, nbody: Path, tmp_path: Path) -> None:
    """Its transform is that of the config, its dataset is mapped."""
    from utils.data.volumes import Fields

    assert command()[0] == 0
    fields = Fields(str(tmp_path / "hydro.h5"), "Hydro", 5, Transform())
    assert fields.shape == BOX
    assert fields.cell == 0.5
    np.testing.assert_array_equal(fields.planes(3, 7), contents(tmp_path / "hydro.h5")["Hydro"][:, 3:7])
    fields.close()


def test_physical_values_and_other_tiles(command: Any, run: Path, nbody: Path, tmp_path: Path) -> None:
    code, stderr = command("--physical", "--tile=16", "--step=5", "--not_periodic", "--batch_size=1")
    assert code == 0, stderr
    found = contents(tmp_path / "hydro.h5")
    np.testing.assert_allclose(found["Hydro"], by_hand(run, nbody, 16, 5, periodic=False), atol=1e-6)
    channels = target_channels(5, Transform())
    for channel, values, physical in zip(channels, found["Hydro"], found["Hydro_physical"], strict=True):
        np.testing.assert_array_equal(physical, channel.to_physical(values))
    with h5py.File(tmp_path / "hydro.h5") as file:
        about = file["Hydro_physical"].attrs
        assert list(about["channels"]) == [channel.name for channel in channels]
        assert list(about["units"]) == ["mean density", "km/s", "km/s", "km/s", "K"]
        assert (file.attrs["tile"], file.attrs["periodic"]) == (16, False)


def test_bfloat16_is_near_float32_and_another(command: Any, tmp_path: Path) -> None:
    assert command()[0] == 0
    exact = contents(tmp_path / "hydro.h5")["Hydro"]
    code, stderr = command("--precision=bfloat16", "--overwrite")
    assert code == 0, stderr
    difference = np.abs(contents(tmp_path / "hydro.h5")["Hydro"] - exact).max()
    assert 0 < difference < 0.02


@pytest.mark.parametrize("what", ["run", "checkpoint", "weights", "copy"])
def test_a_checkpoint_may_be_named_in_any_way(
    run: Path, nbody: Path, tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    best = run / FOLDER / BEST
    shutil.copy(best / WEIGHTS, tmp_path / "alone.pt")
    named = {"run": run, "checkpoint": best, "weights": best / WEIGHTS, "copy": tmp_path / "alone.pt"}[what]
    predict.main(command_line(named, nbody, tmp_path / "hydro.h5"))
    with h5py.File(tmp_path / "hydro.h5") as file:
        assert file.attrs["checkpoint_sha256"] == digest(best / WEIGHTS)
        assert Path(file.attrs["checkpoint"]) == named.resolve() / (WEIGHTS if what == "checkpoint" else "") or (
            what == "run"
        )


def predict_on(world: World, flags: list[str]) -> None:
    predict.paint(predict.parse(flags), world, NoSignals())


def test_two_ranks_make_what_one_makes(command: Any, run: Path, nbody: Path, tmp_path: Path) -> None:
    run_ranks(predict_on, 2, command_line(run, nbody, tmp_path / "two.h5", "--physical"))
    assert os.listdir(tmp_path) == ["two.h5"]
    assert command("--physical")[0] == 0
    found, expected = contents(tmp_path / "two.h5"), contents(tmp_path / "hydro.h5")
    np.testing.assert_allclose(found["Hydro"], expected["Hydro"], atol=1e-6)
    np.testing.assert_allclose(found["Hydro_physical"], expected["Hydro_physical"], rtol=1e-4, atol=1e-2)
    with h5py.File(tmp_path / "two.h5") as file:
        assert json.loads(file.attrs["provenance"])["world_size"] == 2


def test_an_existing_file_is_replaced_if_so_told_and_in_the_end(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hydro.h5").write_text("old")
    write = GrowingVolume.write

    def look_and_write(self: GrowingVolume, values: Any) -> None:
        assert (tmp_path / "hydro.h5").read_text() == "old"
        write(self, values)

    monkeypatch.setattr(GrowingVolume, "write", look_and_write)
    code, stderr = command("--overwrite")
    assert code == 0, stderr
    assert contents(tmp_path / "hydro.h5")["Hydro"].shape == (5, *BOX)
    assert os.listdir(tmp_path) == ["hydro.h5"]


# --- interruptions ---------------------------------------------------------------------------------------------------


@pytest.fixture
def stopped_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """stopped_after(n): SIGTERM comes while the n-th slab is written."""

    def arrange(slabs: int) -> None:
        write, written = GrowingVolume.write, 0

        def signalled(self: GrowingVolume, values: Any) -> None:
            nonlocal written
            write(self, values)
            written += 1
            if written == slabs:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.2)  # the thread that hears of it is another

        monkeypatch.setattr(GrowingVolume, "write", signalled)

    return arrange


def test_stopped_by_a_signal_the_same_command_goes_on_to_the_same_bits(
    command: Any, tmp_path: Path, stopped_after: Callable[[int], None]
) -> None:
    assert command("--physical")[0] == 0
    os.rename(tmp_path / "hydro.h5", tmp_path / "whole.h5")
    stopped_after(2)
    code, stderr = command("--physical")
    assert code == 75, stderr
    assert "Stopping after plane 8 of 24: SIGTERM; the same command goes on" in said(stderr)
    assert not (tmp_path / "hydro.h5").exists()
    stopped_after(1)
    code, stderr = command("--physical")
    assert code == 75, stderr
    assert "Going on after plane 8 of 24" in said(stderr)
    assert "Stopping after plane 12 of 24" in said(stderr)
    code, stderr = command("--physical")
    assert code == 0, stderr
    assert "Going on after plane 12 of 24" in said(stderr)
    found, expected = contents(tmp_path / "hydro.h5"), contents(tmp_path / "whole.h5")
    assert list(found) == list(expected) == ["Hydro", "Hydro_physical"]
    for name in found:
        np.testing.assert_array_equal(found[name], expected[name])
    assert sorted(os.listdir(tmp_path)) == ["hydro.h5", "whole.h5"]


def test_a_signal_while_the_last_slab_is_written_comes_too_late(
    command: Any, tmp_path: Path, stopped_after: Callable[[int], None]
) -> None:
    stopped_after(6)
    code, stderr = command()
    assert code == 0, stderr
    assert os.listdir(tmp_path) == ["hydro.h5"]


def test_of_other_weights_or_input_or_flags_it_begins_anew_and_says_so(
    command: Any, run: Path, nbody: Path, tmp_path: Path, stopped_after: Callable[[int], None]
) -> None:
    stopped_after(2)
    assert command()[0] == 75
    stopped_after(2)
    code, stderr = command("--step=3", "--precision=bfloat16")
    assert code == 75
    assert "was begun with other tiles, precision: starting over" in said(stderr)
    stopped_after(10**9)
    code, stderr = command("--step=3", "--precision=bfloat16")
    assert code == 0
    assert "Going on after plane 6 of 24" in said(stderr)


def test_killed_at_any_moment_the_same_command_goes_on_to_the_same_bits(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A process of its own, killed from outside while it paints."""
    nbody = box_file(tmp_path / "long.h5", (64, 16, 16))
    flags = ["--batch_size=1", "--step=3"]
    process = subprocess.Popen(
        [sys.executable, "predict.py", *command_line(run, nbody, tmp_path / "hydro.h5", *flags)], cwd=TOP
    )
    journal, deadline = tmp_path / ".hydro.h5.journal", time.monotonic() + 60
    while not (journal.exists() and json.loads(journal.read_text())["planes"] > 0):
        assert process.poll() is None, "it came to its end"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    planes = json.loads(journal.read_text())["planes"]
    assert 0 < planes < 64
    assert not (tmp_path / "hydro.h5").exists()
    predict.main(command_line(run, nbody, tmp_path / "hydro.h5", *flags))
    assert f"Going on after plane {planes} of 64" in said(capsys.readouterr().err)
    predict.main(command_line(run, nbody, tmp_path / "whole.h5", *flags))
    found, expected = contents(tmp_path / "hydro.h5")["Hydro"], contents(tmp_path / "whole.h5")["Hydro"]
    np.testing.assert_array_equal(found, expected)
    assert sorted(os.listdir(tmp_path)) == ["hydro.h5", "long.h5", "whole.h5"]


def test_a_second_command_at_the_same_output_is_refused(command: Any, tmp_path: Path) -> None:
    with growing._locked(tmp_path / ".hydro.h5.lock"):
        code, stderr = command()
    assert code == 2
    assert stderr.endswith("error: another process is writing hydro.h5; wait for it, or give another --output\n")
    assert os.listdir(tmp_path) == [".hydro.h5.lock"]
    assert command()[0] == 0


def test_the_network_is_one_even_if_a_training_moves_its_best_meanwhile(
    command: Any, run: Path, nbody: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written of the checkpoint is what was read of it."""
    copy = tmp_path / "run"
    shutil.copytree(run, copy, symlinks=True)
    best = copy / FOLDER / BEST
    first, load = best.resolve(), predict.load_trained
    other = first.with_name("step_99999999")
    shutil.copytree(first, other)
    (other / WEIGHTS).write_bytes(b"another")

    def load_and_move(checkpoint: str, device: torch.device) -> predict.Trained:
        trained = load(checkpoint, device)
        best.unlink()
        best.symlink_to(other.name)
        return trained

    monkeypatch.setattr(predict, "load_trained", load_and_move)
    predict.main(command_line(copy, nbody, tmp_path / "hydro.h5"))
    with h5py.File(tmp_path / "hydro.h5") as file:
        assert file.attrs["checkpoint"] == str(first / WEIGHTS)
        assert file.attrs["checkpoint_sha256"] == digest(first / WEIGHTS)


def test_progress_is_told_of_each_tile(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from utils import progress

    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    code, stderr = command("--batch_size=8")
    assert code == 0
    lines = [line for line in stderr.splitlines() if line.startswith("painting ")]
    assert all(re.search(r"hydro.h5: \d+/112 tiles, \d+:\d\d left$", line) for line in lines[:-1])
    assert len(lines) == 7 * 2 + 1, "of each batch, and the end"
    assert re.search(r"hydro.h5: 112 tiles in \d+:\d\d$", lines[-1])


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.fixture
def refuse(run: Path, nbody: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """refuse(*says, checkpoint=…, nbody=…, output=…, flags=…): one line and exit code 2, and nothing is written."""
    here = {"checkpoint": run, "nbody": nbody, "output": tmp_path / "out" / "hydro.h5"}

    def go(*says: str, flags: tuple[str, ...] = (), left: tuple[str, ...] = (), **others: Path) -> None:
        paths = here | others
        with pytest.raises(SystemExit) as stop:
            predict.main(command_line(paths["checkpoint"], paths["nbody"], paths["output"], *flags))
        output = capsys.readouterr()
        assert (stop.value.code, output.out) == (2, ""), output.err
        lines = [line for line in output.err.splitlines() if not re.match(LOG_LINE, line)]
        assert len(lines) == 1, output.err
        assert lines[0].startswith("error: ")
        for part in says:
            assert part in lines[0]
        folder = tmp_path / "out"
        assert sorted(os.listdir(folder) if folder.is_dir() else []) == sorted(left)

    return go


def changed_checkpoint(run: Path, folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    content = read_weights(run)
    change(content)
    torch.save(content, folder / "changed.pt")
    return folder / "changed.pt"


def other_width(content: dict[str, Any]) -> None:
    content["config"]["network"]["width"] = 8


def other_scales(content: dict[str, Any]) -> None:
    content["config"]["network"]["scales"] = 3


def unknown_key(content: dict[str, Any]) -> None:
    content["config"]["num_epoch"] = 1


def unknown_network(content: dict[str, Any]) -> None:
    content["config"]["network"]["name"] = "vnet"


def other_format(content: dict[str, Any]) -> None:
    content["format"] = 99


def without_network(content: dict[str, Any]) -> None:
    del content["network"]


def without_config(content: dict[str, Any]) -> None:
    del content["config"]


def of_a_classifier(content: dict[str, Any]) -> None:
    content["config"] |= {"dataset": {"name": "digits"}, "data_loader_config": "labelled", "loss": "cross_entropy"}
    content["config"]["network"] = {"name": "mnist_cnn"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (other_width, "changed.pt does not hold the network that its config names: size mismatch for down1.weight"),
        (other_scales, "changed.pt does not hold the network that its config names: Missing key(s)"),
        (unknown_key, "changed.pt': unknown key num_epoch; did you mean num_epochs?"),
        (unknown_network, "unknown network vnet; known: unet"),
        (other_format, "changed.pt is of format 99, this program reads format 1"),
        (without_network, "changed.pt holds no network"),
        (without_config, "changed.pt does not say of which network it is; give weights that train.py has written"),
        (of_a_classifier, "changed.pt is of a classifier (mnist_cnn); give one trained on volumes"),
    ],
)
def test_a_checkpoint_that_is_none_of_this_network_is_one_line(
    refuse: Any, run: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None], says: str
) -> None:
    refuse(says, checkpoint=changed_checkpoint(run, tmp_path, change))


def test_a_damaged_or_missing_checkpoint_is_one_line(refuse: Any, run: Path, tmp_path: Path) -> None:
    refuse(f"no such file: {tmp_path / 'nowhere'}", checkpoint=tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    refuse(f"no such file: {tmp_path / 'empty' / WEIGHTS}", checkpoint=tmp_path / "empty")
    copy = tmp_path / "copy"
    shutil.copytree(run / FOLDER / BEST, copy)
    content = bytearray((copy / WEIGHTS).read_bytes())
    content[len(content) // 2] ^= 1
    (copy / WEIGHTS).write_bytes(content)
    refuse(f"cannot read {copy / WEIGHTS}: weights.pt", checkpoint=copy)
    (copy / WEIGHTS).write_bytes(content[:1000])
    (copy / DIGESTS).unlink()
    refuse(f"cannot read {copy / WEIGHTS}: weights.pt", checkpoint=copy)
    (copy / WEIGHTS).write_text("no checkpoint")
    refuse(f"cannot read {copy / WEIGHTS}: weights.pt", checkpoint=copy)
    refuse("training.pt holds no network; weights.pt beside it does", checkpoint=run / FOLDER / BEST / "training.pt")


def no_file(path: Path) -> None:
    pass


def no_hdf5(path: Path) -> None:
    path.write_text("no HDF5")


def truncated(path: Path) -> None:
    box_file(path)
    path.write_bytes(path.read_bytes()[:-1000])


def with_dataset(name: str, data: np.ndarray) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        with h5py.File(path, "w") as file:
            file[name] = data

    return make


def with_group(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file.create_group("Nbody")


def with_nan(path: Path) -> None:
    with h5py.File(box_file(path), "r+") as file:
        file["Nbody"][2, 21, 3, 4] = np.nan


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (no_file, "no such file: "),
        (no_hdf5, "it is not an HDF5 file"),
        (truncated, "the file is truncated"),
        (with_dataset("Dark", np.zeros((4, 16, 16, 16), "f4")), "has no dataset Nbody; it holds Dark"),
        (with_group, "has no dataset Nbody; it holds group Nbody"),
        (with_dataset("Nbody", np.zeros((3, 16, 16, 16), "f4")), "Nbody is (3, 16, 16, 16), expected (4, X, Y, Z)"),
        (with_dataset("Nbody", np.zeros((4, 16, 16), "f4")), "Nbody is (4, 16, 16), expected (4, X, Y, Z)"),
        (with_dataset("Nbody", np.zeros((4, 16, 16, 16))), "Nbody is of type float64, expected little-endian float32"),
        (with_dataset("Nbody", np.zeros((4, 16, 4, 16), "f4")), "the box has 4 cells a side, fewer than a tile's 8"),
        (lambda path: box_file(path, density_log_scale=10.0), "density_log_scale 10, the config says 14; scale"),
        (lambda path: box_file(path, temperature_log10_center=4.0), "temperature_log10_center 4, the config says 5"),
    ],
)
def test_a_box_that_does_not_fit_is_one_line(
    refuse: Any, tmp_path: Path, make: Callable[[Path], Any], says: str
) -> None:
    make(tmp_path / "bad.h5")
    refuse(says, nbody=tmp_path / "bad.h5")


def test_physical_values_where_channels_belong_are_told(command: Any, run: Path, tmp_path: Path) -> None:
    """An exported file takes them, this command does not; nothing else would show that the gas is nonsense."""
    box_file(tmp_path / "box.h5")
    assert "Values of" not in command(f"--input={tmp_path / 'box.h5'}")[1]
    with h5py.File(tmp_path / "box.h5", "r+") as file:
        file["Nbody"][1:] *= 1000  # km/s
    code, stderr = command(f"--input={tmp_path / 'box.h5'}", "--overwrite")
    assert code == 0
    assert re.search(
        r"WARNING - Values of .*/box.h5 reach [0-9,]+, and those that networks are trained on about 1", stderr
    )


def test_a_value_that_is_no_number_is_named_with_its_place(refuse: Any, tmp_path: Path) -> None:
    """It is met when its layer is read; what was painted before it goes, since a mended file will be another one."""
    with_nan(tmp_path / "bad.h5")
    refuse(f"{tmp_path}/bad.h5: Nbody[2, 21, 3, 4] is nan; mend the file", nbody=tmp_path / "bad.h5")


def test_an_input_that_cannot_be_read_for_once_costs_nothing_of_what_is_painted(
    refuse: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unlike one that has to be mended: a file system may be back the next minute."""
    box_file(tmp_path / "good.h5")
    planes = Fields.planes

    def fail_late(self: Fields, start: int, stop: int) -> np.ndarray:
        if stop > 20:
            raise UserError(f"cannot read {self.path}: Input/output error")
        return planes(self, start, stop)

    monkeypatch.setattr(Fields, "planes", fail_late)
    hidden = (".hydro.h5.journal", ".hydro.h5.lock", ".hydro.h5.partial")
    refuse("Input/output error", nbody=tmp_path / "good.h5", left=hidden)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--tile=10",), "--tile 10 is not a multiple of 4, by which the network divides the grid"),
        (("--tile=20",), "the box has 16 cells a side, fewer than a tile's 20; give a larger box or smaller tiles"),
        (("--tile=0",), "argument --tile: '0' is no whole number above zero; see --help"),
        (("--step=0",), "argument --step: '0' is no whole number above zero; see --help"),
        (("--step=-1",), "argument --step: '-1' is no whole number above zero"),
        (("--step=9",), "step 9 does not suit a tile of 8 cells; give one from 1 to 8, best is half"),
        (("--batch_size=many",), "argument --batch_size: 'many' is no whole number above zero"),
        (("--precision=float16",), "argument --precision: invalid choice: 'float16'"),
        (("--tiles=8",), "unrecognized arguments: --tiles=8; see --help"),
        (("--over",), "unrecognized arguments: --over"),
    ],
)
def test_bad_flags_are_one_line(refuse: Any, flags: tuple[str, ...], says: str) -> None:
    refuse(says, flags=flags)


def test_a_lacking_flag_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        predict.main(["--input=a.h5"])
    assert stop.value.code == 2
    assert capsys.readouterr().err == (
        "error: the following arguments are required: --checkpoint, --output; see --help\n"
    )


def test_help_is_printed_by_the_first_rank_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as stop:
            predict.main(["--help"])
        assert stop.value.code == 0
    assert capsys.readouterr().out.count("--checkpoint CHECKPOINT") == 2, "in the usage and in the list, once each"


def test_cuda_where_there_is_none_is_one_line(refuse: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refuse("device is cuda, but torch sees no CUDA device", flags=("--device=cuda",))


def test_units_that_nobody_knows_are_one_line(refuse: Any, run: Path, tmp_path: Path) -> None:
    def forget(content: dict[str, Any]) -> None:
        content["config"]["transform"] = {"density_log_scale": None}

    checkpoint = changed_checkpoint(run, tmp_path, forget)
    refuse(
        "--physical: the checkpoint's config does not say how gas density was made of physical values; leave ",
        checkpoint=checkpoint,
        flags=("--physical",),
    )


def test_outputs_that_stand_in_the_way_are_one_line_and_kept(refuse: Any, nbody: Path, tmp_path: Path) -> None:
    output = tmp_path / "precious.h5"
    output.write_text("precious")
    refuse("precious.h5 exists; give --overwrite to replace it, or another --output", output=output)
    refuse("is a directory; give the name of a file", output=tmp_path, flags=("--overwrite",))
    refuse("cannot write ", "; give another --output", output=output / "hydro.h5")
    assert output.read_text() == "precious"
    before = nbody.read_bytes()
    refuse(f"output {nbody} is the input; give another --output", output=nbody, flags=("--overwrite",))
    assert nbody.read_bytes() == before


def test_a_directory_that_takes_no_files_is_one_line(refuse: Any, tmp_path: Path) -> None:
    from disks import remount

    with small_disk(tmp_path / "disk", "1m") as disk:
        remount(disk, "ro")
        refuse("cannot write ", "Read-only file system; give another --output", output=disk / "hydro.h5")
        assert os.listdir(disk) == []


def test_a_disk_too_small_is_one_line_before_anything_is_painted(refuse: Any, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "100k") as disk:
        refuse("MB free and the output takes", "free some space", output=disk / "hydro.h5")
        assert os.listdir(disk) == []


def test_a_disk_that_fills_is_one_line_and_the_same_command_goes_on(
    refuse: Any, command: Any, run: Path, nbody: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, written = GrowingVolume.write, 0

    def fill_up(self: GrowingVolume, values: Any) -> None:
        nonlocal written
        written += 1
        if written == 3:
            fill(tmp_path / "disk")
        write(self, values)

    assert command()[0] == 0
    with small_disk(tmp_path / "disk", "1m") as disk:
        with monkeypatch.context() as patched:
            patched.setattr(GrowingVolume, "write", fill_up)
            refuse("No space left on device; free some space, and the same command goes on", output=disk / "hydro.h5")
        assert not (disk / "hydro.h5").exists()
        (disk / "filler").unlink()
        predict.main(command_line(run, nbody, disk / "hydro.h5"))
        found, expected = contents(disk / "hydro.h5"), contents(tmp_path / "hydro.h5")
        np.testing.assert_array_equal(found["Hydro"], expected["Hydro"])
        assert os.listdir(disk) == ["hydro.h5"]


# --- the same at training time ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["train_path", "val_path"])
def test_training_on_channels_of_another_transform_is_one_line(
    data_flags: list[str], tmp_path: Path, key: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.chdir(TOP)
    with h5py.File(write_volume(tmp_path / "other.h5"), "r+") as file:
        file.attrs["density_log_scale"] = 10.0
    flags = [*data_flags, f"--set={key}={tmp_path / 'other.h5'}", f"--set=expdir={tmp_path / 'runs'}"]
    with pytest.raises(SystemExit) as stop:
        train.main(["--config=test", *flags])
    assert stop.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if not re.match(LOG_LINE, line)]
    assert lines == [
        f"error: {tmp_path / 'other.h5'} says that its channels were made with density_log_scale 10, the config says "
        f"14; scale the file's channels, or set transform.density_log_scale for a training on such files"
    ]
    assert not (tmp_path / "runs").exists()
    train.main(["--config=test", "--preflight", *flags, "--set=transform.density_log_scale=10.0"])
