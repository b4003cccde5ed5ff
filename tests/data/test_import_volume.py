"""The importer: the same channels from every layout, plausible files only, parts that do not touch, bounded memory."""

from __future__ import annotations

import os
import shlex
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from nyx_files import CM_PER_KM, GAS, UNIVERSE, physical_fields, simulated_fields, write_nyx

import predict
import train
from utils import cli
from utils import config as configs
from utils.config.sections import TransformConfig
from utils.data import import_volume, imported_config
from utils.data.channels import volume_channels
from utils.data.files import hdf5
from utils.data.files.hdf5 import FieldReader, open_volume
from utils.data.import_volume import main
from utils.evaluation.callback import evaluation_grid
from utils.evaluation.volume import config_of_files
from utils.steps import build

SHAPE = (12, 6, 8)
FIELDS = physical_fields(SHAPE)
DARK, DARK_VELOCITY = "dark_matter_density", [f"dark_matter_velocity_{axis}" for axis in "xyz"]
ABOUT = ["--box_size=6", "--hubble=0.675", "--omega_m=0.31", "--omega_l=0.69", "--omega_b=0.0487", "--redshift=3"]


def contents(path: Path) -> dict[str, np.ndarray]:
    with h5py.File(path) as file:
        return {name: file[name][...] for name in file}


def attributes(path: Path) -> dict[str, Any]:
    with h5py.File(path) as file:
        return dict(file.attrs)


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_nyx(tmp_path_factory.mktemp("nyx") / "snapshot.h5", FIELDS)


@pytest.fixture
def box(tmp_path: Path) -> Path:
    """The output of `run` and `refuse`."""
    return tmp_path / "out" / "box.h5"


@pytest.fixture
def run(box: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """run(input, *flags): the text that the command prints."""

    def go(source: Path, *flags: str) -> str:
        main([f"--input={source}", f"--output={box}", *flags])
        return capsys.readouterr().out

    return go


@pytest.fixture
def refuse(box: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """refuse(input, *flags, says=…): one line, exit code 2, and no file."""

    def go(source: Path, *flags: str, says: str) -> None:
        with pytest.raises(SystemExit) as stop:
            main([f"--input={source}", f"--output={box}", *flags])
        out, err = capsys.readouterr()
        assert (stop.value.code, out, err.count("\n")) == (2, "", 1), err
        assert says in err
        assert not box.parent.exists() or os.listdir(box.parent) == []

    return go


# --- channels --------------------------------------------------------------------------------------------------------


def test_channels_have_the_published_transforms_and_attributes_that_state_everything(
    run: Any, box: Path, snapshot: Path, tmp_path: Path
) -> None:
    run(snapshot)
    volume = open_volume(box, (1, 5))
    assert volume.mapped
    assert (volume.shape, volume.cell) == (SHAPE, 0.5)
    speeds = [FIELDS[name] / 900 for name in GAS[1:4]]
    np.testing.assert_allclose(volume.inputs[0], np.log(FIELDS[DARK]) / 14, atol=1e-7)
    expected = [np.log(FIELDS["baryon_density"]) / 14, *speeds, np.log(FIELDS["temperature"]) / 8 - 1.5]
    np.testing.assert_allclose(volume.targets, expected, atol=3e-7)
    found = attributes(box)
    cosmology = {"cosmology_H0": 67.5, "cosmology_Om0": 0.31, "cosmology_Ode0": 0.69, "cosmology_Ob0": 0.0487}
    for name, value in {"box_size_mpc_h": 6.0, "redshift": 3.0, **cosmology, **TransformConfig().model_dump()}.items():
        assert found[name] == pytest.approx(value), name
    assert (found["input"], bool(found["periodic"])) == (str(snapshot), True)


def other_layouts(folder: Path, name: str) -> tuple[Path, list[str]]:
    """The fields in another layout, and the flags that it needs."""
    units = {key: values * (CM_PER_KM if key.startswith("velocity") else 1) for key, values in FIELDS.items()}
    if name == "raw":
        for key, values in units.items():
            values.astype("<f4").tofile(folder / f"{key}.f32")
        return folder, [*ABOUT, "--shape=12,6,8", "--velocity_units=cm/s"]
    if name == "npy":
        for key, values in units.items():
            np.save(folder / f"{key}.npy", values.astype(">f8"))
        return folder, [*ABOUT, "--velocity_units=cm/s"]
    return write_nyx(folder / "snapshot.h5", FIELDS, chunks=(5, 4, 3), compression="gzip"), []


@pytest.mark.parametrize("name", ["raw", "npy", "compressed"])
def test_every_layout_gives_the_same_channels(
    run: Any, box: Path, snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """In one slab or in several, whose sums round differently if densities are divided by their mean."""
    run(snapshot)
    expected = contents(box.rename(tmp_path / "expected.h5"))
    (tmp_path / "in").mkdir()
    source, flags = other_layouts(tmp_path / "in", name)
    monkeypatch.setattr(hdf5, "SLAB_VALUES", 5 * 6 * 8)
    run(source, *flags)
    for key, values in contents(box).items():
        np.testing.assert_allclose(values, expected[key], atol=0 if name == "compressed" else 2e-7)
    found, wanted = attributes(box), attributes(tmp_path / "expected.h5")
    assert found == pytest.approx(wanted | {"input": str(source)})


def test_camels_grids_are_divided_by_their_mean_and_empty_cells_get_the_floor(
    run: Any, box: Path, tmp_path: Path
) -> None:
    grids = np.random.default_rng(0).uniform(1e9, 1e10, (3, *SHAPE))
    grids[1, 2, 3, 4] = 0
    for key in ("Mcdm", "Mgas", "T"):
        np.save(tmp_path / f"Grids_{key}_IllustrisTNG_LH_128_z=0.0.npy", grids + (key == "T"))
    run(tmp_path, "--index=1", "--box_size=25")
    found, grid = contents(box), grids[1]
    expected = np.log(np.maximum(grid / grid.mean(), np.exp(-14))) / 14
    np.testing.assert_allclose(found["Nbody"][0], expected, atol=1e-7)
    np.testing.assert_allclose(found["Hydro"], [expected, np.log(grid + 1) / 8 - 1.5], atol=3e-7)
    assert attributes(box)["density_floor_of_mean"] == np.exp(-14)
    run(tmp_path, "--index=1", "--validation_index=2", "--box_size=25")
    np.testing.assert_array_equal(contents(box.with_name("box_train.h5"))["Hydro"], found["Hydro"])
    other = np.log(grids[2] / grids[2].mean()) / 14
    np.testing.assert_allclose(contents(box.with_name("box_val.h5"))["Nbody"][0], other, atol=1e-7)


# --- missing fields, and the config that fits ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "targets"),
    [
        ([DARK], list(GAS)),
        ([DARK, *DARK_VELOCITY], list(GAS[:4])),
        ([DARK], ["baryon_density", "temperature"]),
        ([DARK], ["baryon_density"]),
    ],
)
def test_missing_fields_leave_out_channels_and_the_written_config_fits(
    run: Any, box: Path, tmp_path: Path, inputs: list[str], targets: list[str]
) -> None:
    fields = {**FIELDS, **dict(zip(DARK_VELOCITY, (FIELDS[name] for name in GAS[1:4]), strict=True))}
    source = write_nyx(tmp_path / "snapshot.h5", {name: fields[name] for name in (*inputs, *targets)})
    command = shlex.split(run(source).splitlines()[-1])
    assert command[:2] == ["python", "train.py"]
    options = cli.parse(command[2:])
    config = configs.load(options.yaml_config, options.config)
    assert (config.train_path, config.val_path, config.box_size) == (str(box), str(box), [[[*SHAPE]], [[*SHAPE]]])
    assert (config.N_in_channels, config.N_out_channels) == (len(inputs), len(targets))
    assert volume_channels(config_of_files(str(box), str(box))) == volume_channels(config), "evaluate.py --prediction"
    stored, channels = contents(box), volume_channels(config)
    for dataset, names, each in zip(("Nbody", "Hydro"), (inputs, targets), channels, strict=True):
        physical = [channel.to_physical(values) for channel, values in zip(each, stored[dataset], strict=True)]
        np.testing.assert_allclose(physical, [fields[name] for name in names], rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(("cells", "parent"), [(63, "demo"), (64, "base")])
def test_the_config_extends_one_whose_crops_fit(tmp_path: Path, cells: int, parent: str) -> None:
    """Also for paths with a dollar sign, which configs expand; cubes are stated by one number."""
    folder = tmp_path / "my $HOME"
    folder.mkdir()
    volumes = {folder / "a.h5": (128, cells, 128), folder / "b.h5": (80, 80, 80)}
    lines = imported_config.write_config(folder / "512.yaml", volumes, (4, 5))
    options = cli.parse(shlex.split(lines[-1])[2:])
    shipped = configs.load("config/UNet.yaml", parent)
    changed = configs.differences(configs.load(options.yaml_config, options.config), shipped)
    assert changed.pop("train_path") == str(folder / "a.h5")
    assert changed.pop("val_path") == str(folder / "b.h5")
    assert [changed.pop(key) for key in imported_config.NPY_KEYS] == [None] * 4
    own = {"symmetries": "full", "expdir": "./runs"} if parent == "base" else {}
    assert changed == {"box_size": [[[128, cells, 128]], 80], **own}


@pytest.mark.parametrize(("cells", "crop", "scales"), [(24, 16, 3), (13, 8, 2), (4, 4, 1), (2, 2, 1)])
def test_the_config_of_a_part_that_is_smaller_than_a_crop_trains(
    tmp_path: Path, cells: int, crop: int, scales: int
) -> None:
    """Fixed: its data_size was that of the demo. No validation volume is a warning, too."""
    lines = imported_config.write_config(tmp_path / "a.yaml", {tmp_path / "a.h5": (cells, 64, 64)}, (4, 5))
    assert "validation uses the training volume" in lines[1]
    assert lines[2] == f"warning: crops have {crop} cells per side, because a side has {cells}; import larger parts"
    assert lines[3] == "to train:"
    config = configs.load(str(tmp_path / "a.yaml"), "a")
    assert (config.data_size, config.network.scales, config.network.width) == (crop, scales, 16)
    output = build.network(config)(torch.zeros(1, 4, crop, crop, crop))
    assert output.shape == (1, 5, crop, crop, crop)
    assert {name: configs.load("config/UNet.yaml", name).data_size for name in imported_config.CROPS} == (
        imported_config.CROPS
    )


def test_without_gas_only_the_inputs_are_written(run: Any, box: Path, tmp_path: Path) -> None:
    printed = run(write_nyx(tmp_path / "snapshot.h5", {DARK: FIELDS[DARK]}))
    assert os.listdir(box.parent) == ["box.h5"]
    assert printed.splitlines()[-1] == "without baryon_density it is an input of predict.py only"
    assert FieldReader(str(box), "Nbody", 1, TransformConfig()).shape == SHAPE


# --- contradictions --------------------------------------------------------------------------------------------------


def change(path: Path, place: str, key: Any, value: Any) -> None:
    """Sets an attribute (`key` is its name), values (`key` is their place), or, without a key, the whole dataset."""
    with h5py.File(path, "r+") as file:
        if isinstance(key, str):
            file[place].attrs[key] = value
        elif key is not None:
            file[place][key] = value
        else:
            del file[place]
            if value is not None:
                file[place] = value


@pytest.mark.parametrize(
    ("place", "key", "value", "says"),
    [
        ("native_fields/temperature", None, np.ones((12, 6, 7)), "give one grid"),
        ("domain", "size", [6.0, 3.0, 4.1], "are not cubes"),
        ("universe", "hubble", 67.5, "cosmology_H0 is 6750, expected 10 to 200"),
        ("domain", "size", [6000.0, 3000.0, 4000.0], "cell size (Mpc/h) is 500, expected"),
        ("native_fields/temperature", (3, 4, 5), np.nan, "native_fields/temperature[3, 4, 5] is nan"),
        ("native_fields/temperature", (0, 1, 2), 0, "native_fields/temperature[0, 1, 2] is 0, which is impossible"),
        ("native_fields/temperature", ..., 4.1, "a mean of 4.1 K is implausible"),
        ("native_fields/baryon_density", ..., 1e-30, "has a mean of 1e-30 although it is in units of the mean"),
        ("native_fields/velocity_z", "units", "km/s", "e+07 km/s is implausible; give its unit with --vel"),
        ("native_fields/velocity_z", "units", "furlong", "velocity_z is in furlong; give --velocity_units"),
        ("native_fields/velocity_x", None, None, "give dark_matter_density, with gas also baryon_density, and all com"),
        (f"native_fields/{DARK}", None, None, "has the fields baryon_density, velocity_x"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused_and_nothing_is_left(
    refuse: Any, tmp_path: Path, place: str, key: Any, value: Any, says: str
) -> None:
    source = write_nyx(tmp_path / "snapshot.h5", FIELDS)
    change(source, place, key, value)
    refuse(source, says=says)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--redshift=2"], "states redshift 3, not 2; remove --redshift"),
        (["--box_size=25"], "states box_size 6, not 25; remove --box_size"),
        (["--velocity_units=km/s"], "is implausible"),
        (["--split=0.9"], "leaves -15 training and 11 validation planes of 12"),
    ],
)
def test_an_unsuitable_flag_is_refused(refuse: Any, snapshot: Path, flags: list[str], says: str) -> None:
    refuse(snapshot, *flags, says=says)


@pytest.mark.parametrize(
    ("ending", "flags", "says"),
    [
        ("f32", ["--velocity_units=cm/s"], "do not state their shape; give --shape X,Y,Z"),
        ("f32", ["--shape=12,6,8"], "velocity_x.f32 is in an unknown unit; give --velocity_units"),
        ("f32", ["--shape=12,6,9"], "has 2304 bytes, but 12 × 6 × 9 float32 values have 2592"),
        ("npy", ["--index=1"], "is (12, 6, 8); choose a box of (N, X, Y, Z)"),
        ("txt", [], "has neither .f32 nor .npy files"),
    ],
)
def test_a_directory_that_does_not_match_is_refused(
    refuse: Any, tmp_path: Path, ending: str, flags: list[str], says: str
) -> None:
    for key in (DARK, *GAS):
        path = tmp_path / f"{key}.{ending}"
        np.save(path, FIELDS[key]) if ending == "npy" else FIELDS[key].tofile(path)
    refuse(tmp_path, *flags, says=says)


def test_complex_fields_are_refused(refuse: Any, tmp_path: Path) -> None:
    """Fixed: their imaginary parts were dropped."""
    np.save(tmp_path / f"{DARK}.npy", FIELDS[DARK].astype(np.complex64))
    refuse(tmp_path, says=f"{DARK}.npy holds complex64, expected real numbers; write it as float32")


def test_training_and_validation_are_imported_together_or_not_at_all(
    refuse: Any, snapshot: Path, tmp_path: Path
) -> None:
    other = write_nyx(tmp_path / "other.h5", {name: FIELDS[name] for name in (DARK, *GAS[:4])})
    refuse(snapshot, f"--validation={other}", says="need the same fields")
    other = write_nyx(tmp_path / "damaged.h5", FIELDS)
    change(other, "native_fields/temperature", (3, 4, 5), np.nan)
    refuse(snapshot, f"--validation={other}", says="native_fields/temperature[3, 4, 5] is nan")
    refuse(snapshot, f"--validation={other}", "--split=0.2", says="remove it or --validation")


def test_grids_of_different_simulations_are_not_mixed(refuse: Any, tmp_path: Path) -> None:
    for key, suite in (("Mcdm", "IllustrisTNG"), ("Mgas", "IllustrisTNG"), ("T", "SIMBA")):
        np.save(tmp_path / f"Grids_{key}_{suite}_CV_128_z=0.0.npy", FIELDS[DARK])
    refuse(tmp_path, says="has fields of different simulations")


def test_the_input_is_not_overwritten(run: Any, box: Path, capsys: pytest.CaptureFixture[str]) -> None:
    box.parent.mkdir()
    before = write_nyx(box, FIELDS).read_bytes()
    with pytest.raises(SystemExit):
        run(box, "--overwrite")
    assert box.read_bytes() == before
    assert "is the input; give another --output" in capsys.readouterr().err


# --- parts, memory ---------------------------------------------------------------------------------------------------


def test_parts_of_a_box_do_not_touch_also_across_its_faces(
    run: Any, box: Path, snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(snapshot)
    whole = contents(box)
    monkeypatch.setattr(import_volume, "GAP", 2)
    (box.parent / "box_val.h5").write_text("mine")
    with pytest.raises(SystemExit):
        run(snapshot, "--split=0.25")
    assert sorted(os.listdir(box.parent)) == ["box.h5", "box.yaml", "box_val.h5"], "nothing without --overwrite"
    written = box.with_suffix(".yaml").read_text()
    assert "kept" in run(snapshot, "--split=0.25", "--overwrite")
    assert box.with_suffix(".yaml").read_text() == written, "it may have been edited"
    for name, planes, length in (("train", slice(0, 5), 4.0), ("val", slice(7, 10), 4.0)):
        path = box.parent / f"box_{name}.h5"
        for dataset, values in contents(path).items():
            np.testing.assert_array_equal(values, whole[dataset][:, planes])
        found = attributes(path)
        assert (found["box_size_mpc_h"], bool(found["periodic"])) == (length, False)
        assert found["input_planes"].tolist() == [planes.start, planes.stop]
    window = {"evaluation.window": 4, "evaluation.overlap": 1}
    config = configs.load("config/UNet.yaml", "test", window)
    grid = evaluation_grid(config, open_volume(box.parent / "box_train.h5", (1, 5)))
    assert grid.x.origins == (0, 1), "evaluations during a run do not wrap"


def test_memory_does_not_grow_with_the_box(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hdf5, "SLAB_VALUES", 4 * 32 * 32)
    peaks, sizes = [], []
    for planes in (32, 256):
        source = write_nyx(tmp_path / f"{planes}.h5", physical_fields((planes, 32, 32)))
        sizes.append(source.stat().st_size)
        run(source, "--overwrite")  # what is imported and cached once
        tracemalloc.start()
        try:
            run(source, "--overwrite")
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert peaks[1] - peaks[0] < 0.05 * (sizes[1] - sizes[0]), peaks  # the list of slabs grows


# --- inputs that were once misread -----------------------------------------------------------------------------------


def test_attributes_may_be_arrays_of_one_element_and_a_part_of_a_box_stays_one(
    run: Any, box: Path, tmp_path: Path
) -> None:
    """Fixed: such a velocity was refused, such a density divided by its mean; an import was always periodic."""
    source = write_nyx(tmp_path / "snapshot.h5", {**FIELDS, DARK: 1.2 * FIELDS[DARK]})
    run(source)
    expected = contents(box)
    with h5py.File(source, "r+") as file:
        file.attrs["periodic"] = np.array([0])
        for dataset in file["native_fields"].values():
            dataset.attrs["units"] = np.array([dataset.attrs["units"]])
    run(source, "--overwrite")
    for name, values in contents(box).items():
        np.testing.assert_array_equal(values, expected[name])
    assert not attributes(box)["periodic"]


# --- training --------------------------------------------------------------------------------------------------------


def test_import_and_train_are_two_commands_without_further_flags(
    box: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nyx writes no dark-matter velocity: N_in_channels 1. Fields are those of a small simulation."""
    snapshots, fields = [], {}
    for grid, split in ((24, "train"), (16, "val")):
        fields = simulated_fields(grid, box_size=grid / 2, seed=grid, n_steps=3, redshift=3.0, threads=1)
        snapshots.append(write_nyx(tmp_path / f"{split}.h5", fields))
    main([f"--input={snapshots[0]}", f"--validation={snapshots[1]}", f"--output={box}"])
    command, yaml = shlex.split(capsys.readouterr().out.splitlines()[-1]), box.with_suffix(".yaml")
    small = "extends: test\n  num_epochs: 1\n  lambda_rho: 1e-3\n  evaluation: {every_epochs: 1}\n  device: cpu"
    written = yaml.read_text()
    assert "extends: demo" in written, "the box is too small for base"
    yaml.write_text(written.replace("extends: demo", small).replace("./runs", str(tmp_path)))
    train.main(command[2:])
    checkpoint, gas, valid = tmp_path / "box" / "1ranks" / "00", tmp_path / "gas.h5", box.with_name("box_val.h5")
    config = configs.load(str(checkpoint / "config.yaml"), "box")
    assert (config.N_in_channels, config.box_size, config.vector_channels.inputs) == (1, [24, 16], [])
    assert (checkpoint / "evaluation").is_dir()
    predict.main([f"--checkpoint={checkpoint}", f"--input={valid}", f"--output={gas}", "--format=nyx", "--device=cpu"])
    with h5py.File(gas) as file:
        assert dict(file["universe"].attrs) == pytest.approx(UNIVERSE)
        dark_matter = file[f"native_fields/{DARK}"][...]
    np.testing.assert_allclose(dark_matter, np.maximum(fields[DARK], np.exp(-14)), rtol=1e-5)
