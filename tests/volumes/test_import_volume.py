"""The importer: the same channels from every layout, plausible files only, parts that do not touch, bounded memory."""

import os
import re
import shlex
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from log_lines import refusal
from nyx_files import CM_PER_KM, GAS, physical_fields, write_nyx

from analysis.evaluation.volume import config_of_files
from utils import cli
from utils import config as configs
from utils.config.channels import known_channels
from utils.steps import build
from utils.volumes import hdf5, import_volume
from utils.volumes.convert_to_npy import convert
from utils.volumes.hdf5 import open_volume
from utils.volumes.import_volume import main
from utils.volumes.opened import Volumes, npy_keys

SHAPE = (12, 6, 8)
FIELDS = physical_fields(SHAPE)
DARK, DARK_VELOCITY = "dark_matter_density", [f"dark_matter_velocity_{axis}" for axis in "xyz"]
DENSER = 1.2  # the dark matter of Nyx's files, whose mean need not be 1
PRESSURE = np.exp(3 * np.random.default_rng(1).normal(size=SHAPE)).astype("f4")
ABOUT = ["--box_size_mpc_h=6", "--hubble=0.675", "--omega_m=0.31", "--omega_l=0.69", "--omega_b=0.0487", "--redshift=3"]
COSMOLOGY = {"cosmology_H0": 67.5, "cosmology_Om0": 0.31, "cosmology_Ode0": 0.69, "cosmology_Ob0": 0.0487}


def contents(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    with h5py.File(path) as file:
        return {name: file[name][...] for name in file}, dict(file.attrs)


@pytest.fixture
def box(tmp_path: Path) -> Path:
    """The output of `run`."""
    return tmp_path / "out" / "box.h5"


@pytest.fixture
def run(box: Path, capsys: Any) -> Any:
    """run(input, *flags): the text that the command prints."""
    return lambda source, *flags: (main([f"--input={source}", f"--output={box}", *flags]), capsys.readouterr().out)[1]


def write_layout(folder: Path, name: str) -> tuple[Path, list[str]]:
    """The fields in a layout, and the flags that it needs; `arrays`: attributes are arrays of one element."""
    fields = FIELDS
    if name in ("compressed", "raw"):  # with the velocity as one field of vectors
        velocity = np.stack([FIELDS[key] for key in GAS[1:4]], -1)
        fields = {**{key: values for key, values in FIELDS.items() if key not in GAS[1:4]}, "velocity": velocity}
    if name in ("nyx", "compressed", "arrays"):
        storage = {"chunks": True, "compression": "gzip"} if name == "compressed" else {}
        path = write_nyx(folder / "snapshot.h5", {**fields, DARK: DENSER * FIELDS[DARK]}, **storage)
        if name == "arrays":
            with h5py.File(path, "r+") as file:
                file.attrs["periodic"] = np.array([0])
                for dataset in file["native_fields"].values():
                    dataset.attrs["units"] = np.array([dataset.attrs["units"]])
        return path, []
    stored = {key: values * (CM_PER_KM if key.startswith("velocity") else 1) for key, values in fields.items()}
    ending, dtype = ("f32", "f4") if name == "raw" else ("npy", ">f8")
    source = files(ending, dtype, **{**dict.fromkeys(FIELDS), **stored})(folder)
    return source, [*ABOUT, "--velocity_units=cm/s", "--shape=12,6,8"]


@pytest.mark.parametrize("name", ["nyx", "compressed", "arrays", "raw", "npy"])
def test_every_layout_gives_the_published_channels_and_attributes_that_state_everything(
    run: Any, box: Path, tmp_path: Path, monkeypatch: Any, name: str
) -> None:
    """Fixed: of attributes in arrays, a velocity was refused, a density divided by its mean, a part was periodic."""
    (tmp_path / "in").mkdir()
    source, flags = write_layout(tmp_path / "in", name)
    if name != "nyx":
        monkeypatch.setattr(hdf5, "SLAB_VALUES", 5 * 6 * 8)  # sums over several slabs round differently
    run(source, *flags)
    volume = open_volume(box)
    assert (volume.mapped, volume.shape, volume.cell) == (True, SHAPE, 0.5)
    speeds = [FIELDS[key] / 900 for key in GAS[1:4]]
    targets = [np.log(FIELDS["baryon_density"]) / 14, *speeds, np.log(FIELDS["temperature"]) / 8 - 1.5]
    density = FIELDS[DARK] * (1 if name in ("raw", "npy") else DENSER)  # in unknown units divided by its mean
    np.testing.assert_allclose(volume.inputs[0], np.log(density) / 14, atol=1e-7)
    np.testing.assert_allclose(volume.targets, targets, atol=3e-7)
    simulation = {"box_size_mpc_h": 6.0, "redshift": 3.0, "density_floor_of_mean": np.exp(-14), **COSMOLOGY}
    origin = {"input": str(source), "made_by": "utils.volumes.import_volume", "periodic": name != "arrays"}
    assert contents(box)[1] == pytest.approx({**simulation, **origin})
    assert volume.channels == (known_channels("inputs", 1), known_channels("targets", 5))


def test_camels_grids_are_divided_by_their_mean_and_empty_cells_get_the_floor(
    run: Any, box: Path, tmp_path: Path
) -> None:
    grids = np.random.default_rng(0).uniform(1e9, 1e10, (3, *SHAPE))
    grids[1, 2, 3, 4] = 0
    for key in ("Mcdm", "Mgas", "T"):
        np.save(tmp_path / f"Grids_{key}_IllustrisTNG_LH_128_z=0.0.npy", 1e-5 * grids + 1 if key == "T" else grids)
    run(tmp_path, "--index=1", "--validation_index=2", "--box_size_mpc_h=25")
    for part, grid in (("train", grids[1]), ("val", grids[2])):
        imported, _ = contents(box.with_name(f"box_{part}.h5"))
        density = np.log(np.maximum(grid / grid.mean(), np.exp(-14))) / 14
        np.testing.assert_allclose(imported["Nbody"][0], density, atol=1e-7)
        np.testing.assert_allclose(imported["Hydro"], [density, np.log(1e-5 * grid + 1) / 8 - 1.5], atol=3e-7)


def test_what_a_new_user_overlooked_is_named(box: Path, tmp_path: Path, capsys: Any) -> None:
    """The training volume as validation, a misspelled file, and a few velocities of -9999, which no channel shows."""
    _, flags = write_layout(tmp_path, "npy")
    (tmp_path / "temperature.npy").rename(tmp_path / "Temperature.npy")
    velocities = np.load(tmp_path / "velocity_x.npy")
    velocities[3, 2, 1] = -9999
    np.save(tmp_path / "velocity_x.npy", velocities)
    main([f"--input={tmp_path}", f"--validation={tmp_path}", f"--output={box}", *flags])
    printed = capsys.readouterr().err
    assert "box_train.h5 and " in printed
    assert "training and validation use the same volume" in printed
    assert "Temperature.npy is not used; did you mean temperature?" in printed
    assert "velocity_x.npy has cells of (-9999.0, " in printed
    assert not [name for name in contents(box.with_name("box_val.h5"))[1] if name.startswith("temperature")]


@pytest.mark.parametrize(
    ("inputs", "targets"),
    [([DARK], list(GAS)), ([DARK, *DARK_VELOCITY], list(GAS[:4])), ([DARK], ["baryon_density", "temperature"])],
)
def test_missing_fields_leave_out_channels_and_the_written_config_fits(
    run: Any, box: Path, tmp_path: Path, inputs: list[str], targets: list[str]
) -> None:
    fields = {**FIELDS, **dict(zip(DARK_VELOCITY, (FIELDS[name] for name in GAS[1:4]), strict=True))}
    printed = run(write_nyx(tmp_path / "snapshot.h5", {name: fields[name] for name in (*inputs, *targets)}))
    assert "warning: validation uses the training volume" in printed
    (names,) = [line for line in printed.splitlines() if line.startswith("channels of Hydro: ")]
    assert ("temperature" in names) == ("temperature" in targets), "fixed: a field was missing without a word"
    command = shlex.split(printed.splitlines()[-1])
    assert command[:2] == ["python", "train.py"]
    options = cli.parse(command[2:])
    config = configs.load(options.yaml_config, options.config)
    assert (config.train_path, config.val_path, config.box_size) == (str(box), str(box), [[[*SHAPE]], [[*SHAPE]]])
    opened = Volumes.open(config, "hdf5").config
    assert (opened.N_in_channels, opened.N_out_channels) == (len(inputs), len(targets))
    known = config_of_files(str(box), str(box)).volume_channels
    assert known == opened.volume_channels == tuple(map(tuple, open_volume(box).channels)), "evaluate.py --prediction"
    stored, channels = contents(box)[0], opened.volume_channels
    for dataset, names, known in zip(("Nbody", "Hydro"), (inputs, targets), channels, strict=True):
        physical = [channel.to_physical(values) for channel, values in zip(known, stored[dataset], strict=True)]
        np.testing.assert_allclose(physical, [fields[name] for name in names], rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(
    ("cells", "found", "machine", "reason", "crop"),
    [
        (64, "cuda", None, "a GPU was found", 64),
        (64, "qsub", None, "qsub was found", 64),
        (64, "", "gpu", "of --for gpu", 64),
        (64, "cuda", "cpu", "of --for cpu", 32),
        (64, "", None, "neither a GPU nor sbatch or qsub was found; --for gpu writes one for a GPU", 32),
        (63, "cuda", "gpu", "crops of bs64_fast have 64 cells per side, and a side has 63", 32),
        (13, "", "cpu", "of --for cpu", 8),
    ],
)
def test_the_written_config_extends_one_that_the_volumes_and_the_machine_fit(
    tmp_path: Path, monkeypatch: Any, cells: int, found: str, machine: Any, reason: str, crop: int
) -> None:
    """Fixed: base has the tutorial's recipe, and login nodes have no GPU. Paths may have a dollar sign."""
    parent, scales = "bs64_fast" if crop == 64 else "demo", 2 if crop == 8 else 0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: found == "cuda")
    monkeypatch.setattr(shutil, "which", lambda name: name if name == found else None)
    folder = tmp_path / "my $HOME"
    folder.mkdir()
    volumes = {folder / "a.h5": (128, cells, 128), folder / "b.h5": (80, 80, 80)}
    lines = import_volume.write_config(folder / "512.yaml", volumes, machine)
    recipe = "global batch 64, learning rate 0.0008" if crop == 64 else "global batch 4, learning rate 0.0057"
    assert lines[0] == f"wrote {folder / '512.yaml'}, a config that extends {parent} ({recipe}), because {reason}"
    assert f"# {parent} has {recipe}, which belong together" in (folder / "512.yaml").read_text()
    again = [import_volume.write_config(folder / "512.yaml", {folder / name: (128,)}) for name in ("a.h5", "c")]
    assert [part[1:] for part in again] == [lines[-1:], []], "the config names other volumes"
    options = cli.parse(shlex.split(lines[-1])[2:])
    shipped = configs.load("config/UNet.yaml", parent)
    config = configs.load(options.yaml_config, options.config)
    expected = {"train_path": str(folder / "a.h5"), "val_path": str(folder / "b.h5")}
    expected |= dict.fromkeys(npy_keys("train_path", "val_path")) | {"box_size": [[[128, cells, 128]], 80]}
    expected |= {"expdir": "./runs"} if crop == 64 else {}
    expected |= {"data_size": crop, "network.scales": scales} if scales else {}
    assert configs.differences(config, shipped) == expected
    assert any(line.startswith("warning: crops have") for line in lines) == bool(scales)
    if scales:
        assert build.network(config)(torch.zeros(1, 4, crop, crop, crop)).shape == (1, 5, crop, crop, crop)


def test_without_gas_only_the_inputs_are_written(run: Any, box: Path, tmp_path: Path) -> None:
    assert "input of predict.py only" in run(write_nyx(tmp_path / "snapshot.h5", {DARK: FIELDS[DARK]}))
    assert [*contents(box)[0]] == ["Nbody"]
    assert os.listdir(box.parent) == ["box.h5"]


def nyx(place: str = "/", key: Any = "unused", value: Any = 0, **fields: Any) -> Any:
    """Writes a snapshot with other fields or without them (None), and another attribute or value at a place."""

    def write(folder: Path) -> Path:
        present = {name: values for name, values in {**FIELDS, **fields}.items() if values is not None}
        path = write_nyx(folder / "snapshot.h5", present)
        with h5py.File(path, "r+") as file:
            (file[place].attrs if isinstance(key, str) else file[place])[key] = value
        return path

    return write


def files(ending: str, dtype: str = "f4", **fields: Any) -> Any:
    """Writes a directory with a file per field, with other fields or without them (None)."""

    def write(folder: Path) -> Path:
        folder.mkdir(exist_ok=True)
        for key, values in {**FIELDS, **fields}.items():
            if values is not None and ending == "npy":
                np.save(folder / f"{key}.npy", values.astype(dtype))
            elif values is not None:
                values.astype(dtype).tofile(folder / f"{key}.{ending}")
        return folder

    return write


def datasets(*names: str) -> Any:
    """Writes an HDF5 file of another program, with datasets of these names."""

    def write(folder: Path) -> Path:
        with h5py.File(path := folder / "a.h5", "w") as file:
            file.update(dict.fromkeys(names, FIELDS[DARK]))
        return path

    return write


TEMPERATURE, VELOCITY = "native_fields/temperature", "native_fields/velocity_x"
AS_VALIDATION = ["--input={good}", "--validation={source}"]


@pytest.mark.parametrize(
    ("write", "flags", "says"),
    [
        (nyx(temperature=FIELDS["temperature"][:, :, 1:]), [], "give one grid"),
        (nyx(temperature=np.log10(FIELDS["temperature"])), [], "K is implausible; write temperatures in K, no"),
        (nyx(velocity_y=np.zeros(SHAPE)), [], "velocity_y is 0 everywhere; give another file"),
        (nyx(velocity_x=None), [], "all components of a velocity"),
        (nyx("domain", "size", [6.0, 3.0, 4.1]), [], "are not cubes"),
        (nyx("universe", "hubble", 67.5), [], "_H0 is 6750, expected 10 to 200; correct it: --hubble is H0 / (100 km"),
        (nyx("domain", "size", [6.0, 3.0]), [], "snapshot.h5: operands could not be broadcast together"),
        (nyx(TEMPERATURE, (0, 1, 2), 0), [], "native_fields/temperature[0, 1, 2] is 0, which is impossible"),
        (nyx(), ["--velocity_units=km/s"], "velocity_x states cm/s, not km/s; correct it, or remove --v"),
        (nyx(VELOCITY, "units", "kpc/yr"), [], "velocity_x is in kpc/yr; give --velocity_units (km/s, m/s, cm/s)"),
        (nyx(), ["--redshift=2"], "states redshift 3, not 2; remove --redshift"),
        (nyx(), ["--split=0.9"], "leaves -15 training and 11 validation planes of 12, with two gaps of 8; give a box"),
        (lambda folder: write_nyx(folder / "a.h5", physical_fields((40, 2, 2))), ["--split=20"], "0.05 to 0.55"),
        (datasets("PartType0/Masses"), [], "seems to be a snapshot of particles (Gadget, SWIFT); it contains Part"),
        (datasets("Nbody", "Hydro"), [], "is a volume already; set train_path to it, or give it to predict.py"),
        (datasets(*map("grid/{:02}".format, range(14))), [], "grid/11 and 2 more; link each grid to its name in docs"),
        (nyx(), ["--output={source}", "--overwrite"], "is the input; give another --output"),
        (nyx(temperature=None), AS_VALIDATION, "training and validation need the same fields"),
        (files("f32"), ["--velocity_units=cm/s"], "give --shape X,Y,Z"),
        (files("f32"), ["--shape=12,6,9"], "has 2304 bytes, but 12 × 6 × 9 float32 values have 2592"),
        (nyx(baryon_density=FIELDS[DARK] - 1), [], "impossible for a density; if it holds contrasts ρ/ρ̄ - 1, add 1"),
        (nyx(baryon_density=4 * FIELDS[DARK]), [], "or give --not_periodic if it is a part of a box"),
        (files("npy"), ["--mean_density", "1", "0"], "give a number above 0 per density, --mean_density DARK_MATTER_D"),
        (files("npy"), ["--not_periodic"], "MATTER_DENSITY BARYON_DENSITY: the mean of the whole box, not of a part"),
        (nyx(velocity=np.ones((*SHAPE, 3))), [], "has velocity and velocity_x; leave one of them"),
        (nyx(velocity=np.ones(SHAPE)), [], "native_fields/velocity is (12, 6, 8), expected (X, Y, Z, 3)"),
        (files("npy"), ["--index=1"], "is (12, 6, 8); choose a box of (N, X, Y, Z)"),
        (nyx(), ["--field=pressure=P"], "in/snapshot.h5 has no field P; correct --field"),
        (nyx(P=PRESSURE), ["--field=pressure"], "argument --field: pressure is not NAME=VALUE"),
        (nyx(P=PRESSURE), ["--field=v=P,P"], "--field v=P,P: give one field, or the components along x, y and z"),
        (nyx(P=0 * PRESSURE + 3), ["--field=pressure=P"], "native_fields/P is 300000 everywhere; give another file"),
        (nyx("native_fields/P", (3, 4, 5), np.nan, P=PRESSURE), ["--field=pressure=P"], "fields/P[3, 4, 5] is nan"),
        (
            nyx("native_fields/P", (3, 4, 5), 0, P=PRESSURE),
            [*AS_VALIDATION, "--field=pressure=P"],
            "in/snapshot.h5: native_fields/P has values of 0 or less, which have no logarithm; raise them in the file",
        ),
        (files("npy", dtype="c8"), [], "holds complex64, expected real numbers"),  # fixed: imaginary parts were dropped
    ],
)
def test_contradictory_input_is_refused_and_nothing_is_left(
    box: Path, tmp_path: Path, capsys: Any, write: Any, flags: list[str], says: str
) -> None:
    (tmp_path / "in").mkdir()
    source, good = write(tmp_path / "in"), write_nyx(tmp_path / "good.h5", {**FIELDS, "P": PRESSURE})
    given = [flag.format(good=good, source=source) for flag in flags]
    assert says in refusal(main, [f"--input={source}", f"--output={box}", *given], capsys)
    assert not box.parent.exists() or os.listdir(box.parent) == []


def other_fields(seed: int) -> dict[str, np.ndarray]:
    """Positive values over many decades and over a few, values with zeros, and a vector."""
    rng = np.random.default_rng(seed)
    fields = {"P": 1e3 * seed * np.exp(3 * rng.normal(size=SHAPE)), "C": seed * rng.uniform(4, 6, SHAPE)}
    fields |= {"Z": np.maximum(rng.normal(size=SHAPE), 0) * seed}
    vector = zip("zxy", rng.normal(size=(3, *SHAPE)) * [[[[4]]], [[[1]]], [[[2]]]] + 1, strict=True)
    return {
        name: values.astype("f4") for name, values in (fields | {f"B{axis}": part for axis, part in vector}).items()
    }


@pytest.mark.parametrize("ending", ["npy", "f32", "h5"])
def test_other_fields_become_channels_with_the_transform_of_the_training_box(
    run: Any, box: Path, tmp_path: Path, ending: str
) -> None:
    """A logarithm for positive values over many decades; a vector has one scale. All values are recovered."""
    sources, boxes = [], {"train": other_fields(1), "val": other_fields(2)}
    for seed, (part, fields) in enumerate(boxes.items()):
        known = physical_fields(SHAPE, seed)
        if ending != "h5":
            sources.append(files(ending, **known, **fields)(tmp_path / part))
            continue
        sources.append(write_nyx(tmp_path / f"{part}.h5", known))
        with h5py.File(sources[-1], "r+") as file:
            file["native_fields"].update(fields)
            file["native_fields/C"].attrs["units"] = "1/cm"
    flags = ["--field=pressure=P", "--unit=pressure=K/cm3", "--field=metals=Z", "--input_field=curvature=C"]
    flags += ["--field=magnetic field=Bx,By,Bz", "--unit=magnetic field=uG", f"--validation={sources[1]}"]
    about = ["--velocity_units=km/s", "--shape=12,6,8", *ABOUT] if ending != "h5" else []
    command = shlex.split(run(sources[0], *flags, *about).splitlines()[-1])
    volumes = {part: open_volume(box.with_name(f"box_{part}.h5")) for part in boxes}
    assert volumes["train"].channels == volumes["val"].channels
    inputs, targets = volumes["train"].channels
    assert [*inputs[:1], *targets[:5]] == [*known_channels("inputs", 1), *known_channels("targets", 5)]
    added = {"C": inputs[1], **dict(zip(("P", "Z", "Bx", "By", "Bz"), targets[5:], strict=True))}
    units = "1/cm" if ending == "h5" else "unit of the file"
    described = {name: (part.name, part.unit, part.component, part.is_log) for name, part in added.items()}
    expected = {"C": ("curvature", units, None, False), "P": ("pressure", "K/cm3", None, True)}
    expected |= {"Z": ("metals", "unit of the file", None, False)}
    names = {axis: f"magnetic field {axis}" for axis in "xyz"}
    assert described == expected | {f"B{axis}": (name, "uG", name, False) for axis, name in names.items()}
    assert {(added[f"B{axis}"].center, added[f"B{axis}"].scale) for axis in "xyz"} == {(0.0, added["Bz"].scale)}
    for part, volume in volumes.items():
        stored = dict(zip(added, (volume.inputs[1], *volume.targets[5:]), strict=True))
        for name, channel in added.items():
            scale = 0 if channel.is_log else channel.scale
            recovered = channel.to_physical(stored[name].astype("f8"))
            np.testing.assert_allclose(recovered, boxes[part][name], rtol=3e-6, atol=1e-6 * scale)
            if part == "train" and name[0] != "B":
                assert abs(stored[name].mean(dtype="f8")) < 0.01
            if part == "train" and name not in ("Bx", "By"):
                assert np.sqrt(np.mean((stored[name] - stored[name].mean()) ** 2)) == pytest.approx(1 / 3, rel=0.04)
    options = cli.parse(command[2:])
    config = Volumes.open(configs.load(options.yaml_config, options.config), "hdf5").config
    assert (config.N_in_channels, config.N_out_channels) == (2, 10)
    assert config.vectors == ([], [[1, 2, 3], [7, 8, 9]])


@pytest.mark.parametrize("unit", ["cm*s**-1", "cm s^-1", "cm / s", "cm s-1"])
def test_a_file_of_yt_is_imported_as_its_refusal_says(
    run: Any, box: Path, tmp_path: Path, capsys: Any, unit: str
) -> None:
    """Fixed: "it contains grid; give another file". yt writes datasets of its own names, with its spelling of units."""
    with h5py.File(path := write_nyx(tmp_path / "grid.h5", FIELDS), "r+") as file:
        file.move("native_fields", "grid")
        file.attrs["data_type"] = "yt_data_container"
        for name, field in file["grid"].items():
            field.attrs["units"] = unit if "velocity" in name else "K" if name == "temperature" else "g/cm**3"
    says = refusal(main, [f"--input={path}", f"--output={box}"], capsys)
    assert "seems to be a file of yt; it contains grid/baryon_density, grid/dark_matter_density, " in says
    (command,) = re.findall(r"in Python: (.*); then", says)
    linked = shutil.copy(path, tmp_path / "linked.h5")  # the first one is open in this process
    for name in FIELDS:
        line = command.replace(str(path), str(linked)).replace(DARK, name).replace("/NAME", f"/grid/{name}")
        exec(line, {"h5py": h5py})
    assert "channels of Hydro: " in run(linked, f"--validation={linked}")
    velocities = contents(box.with_name("box_val.h5"))[0]["Hydro"][1:4] * 900
    np.testing.assert_allclose(velocities, [FIELDS[name] for name in GAS[1:4]], rtol=1e-5)


def test_a_cut_out_of_an_overdense_part_has_the_channels_that_it_has_in_the_box(
    run: Any, box: Path, tmp_path: Path
) -> None:
    """Fixed: the region was periodic, its density divided by its own mean; one in units of the mean was refused."""
    fields, zoom = physical_fields((12, 6, 40)), np.s_[:, :, 32:]
    for name in (DARK, GAS[0]):
        fields[name][zoom] *= 4
        fields[name] /= fields[name].mean(dtype="f8")
    run(files("npy", **fields)(tmp_path / "whole"), "--velocity_units=km/s")
    expected, _ = contents(box)
    part = {name: values[zoom] for name, values in fields.items()}
    units = {DARK: 3e10 * part[DARK], GAS[0]: 7e-31 * part[GAS[0]].astype("f8")}
    given = ["--not_periodic", "--mean_density", "3e10", "7e-31", "--velocity_units=km/s"]
    for source, flags in (
        (files("npy", "f8", **{**part, **units})(tmp_path / "part"), given),
        (write_nyx(tmp_path / "part.h5", part), ["--not_periodic"]),
    ):
        run(source, *flags, "--overwrite")
        imported, attributes = contents(box)
        assert not attributes["periodic"]
        for name, values in imported.items():
            np.testing.assert_allclose(values, expected[name][(slice(None), *zoom)], atol=1e-6)


def test_the_recipe_for_gadget_arepo_and_tng_ends_in_an_import_without_warnings(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """docs/data.md. The file has peculiar velocities, lengths in Mpc/h and temperatures."""
    page = (Path(__file__).parents[2] / "docs/data.md").read_text(encoding="utf-8")
    blocks = page.split("### Gadget, AREPO and TNG\n")[1].replace("\\\n", "").split("```")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(blocks[1].removeprefix("python"), "docs/data.md", "exec", dont_inherit=True), names)
    main(shlex.split(blocks[3])[4:])
    output, volume = capsys.readouterr(), open_volume(tmp_path / "tng.h5")
    assert output.out.splitlines()[0] == "--box_size_mpc_h 8 --redshift 3"
    assert "WARNING" not in output.err
    assert (volume.cell, volume.simulation["redshift"]) == (0.25, 3.0)
    np.testing.assert_allclose(900 * volume.inputs[1:], names["waves"], rtol=1e-5)
    # T = 2/3 u mu m_p / k_B, u in (m/s)²
    temperature = 2 / 3 * 1e6 * names["energy"] * 0.5877 * 1.67262e-27 / 1.38065e-23
    np.testing.assert_allclose(np.exp(8 * (volume.targets[4] + 1.5)), temperature, rtol=1e-3)


def test_internal_energies_and_lengths_in_kpc_get_a_warning(box: Path, tmp_path: Path, capsys: Any) -> None:
    """Fixed: a mean of 249 "K", and a box of 4,000 "Mpc/h", passed without a word."""
    source = files("npy", temperature=FIELDS["temperature"] / 50)(tmp_path / "in")
    main([f"--input={source}", f"--output={box}", "--velocity_units=km/s", "--box_size_mpc_h=200"])
    length, energy = capsys.readouterr().err.splitlines()
    assert re.search(r"cell size \(Mpc/h\) is 16\.6667, .* are these in kpc/h\?$", length)
    assert re.search(r"a geometric mean of \d+ K is low .* no internal energies", energy)


def test_parts_of_a_box_do_not_touch_even_across_faces(run: Any, box: Path, tmp_path: Any, monkeypatch: Any) -> None:
    snapshot = write_nyx(tmp_path / "snapshot.h5", FIELDS)
    run(snapshot)
    whole, _ = contents(box)
    monkeypatch.setattr(import_volume, "GAP", 2)
    (box.parent / "box_val.h5").write_text("mine")
    with pytest.raises(SystemExit):
        run(snapshot, "--split=0.25")
    assert sorted(os.listdir(box.parent)) == ["box.h5", "box.yaml", "box_val.h5"], "nothing without --overwrite"
    written = box.with_suffix(".yaml").read_text()
    assert "kept" in run(snapshot, "--split=0.25", "--overwrite")
    assert box.with_suffix(".yaml").read_text() == written, "it may have been edited"
    for name, planes in (("train", slice(0, 5)), ("val", slice(7, 10))):
        fields, attributes = contents(box.parent / f"box_{name}.h5")
        for dataset, values in fields.items():
            np.testing.assert_array_equal(values, whole[dataset][:, planes])
        assert (attributes["box_size_mpc_h"], bool(attributes["periodic"])) == (4.0, False)
        assert attributes["input_planes"].tolist() == [planes.start, planes.stop]
    assert not open_volume(box.parent / "box_train.h5").periodic, "evaluations during a run do not wrap"


def test_memory_does_not_grow_with_the_box(run: Any, box: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(hdf5, "SLAB_VALUES", 4 * 32 * 32)
    peaks, sizes = [], []
    for planes in (32, 256):
        source = write_nyx(tmp_path / f"{planes}.h5", physical_fields((planes, 32, 32)))
        sizes.append(source.stat().st_size)
        run(source, "--overwrite")  # what is imported and cached once
        tracemalloc.start()
        try:
            run(source, "--overwrite")
            convert(box, overwrite=True)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert peaks[1] - peaks[0] < 0.05 * (sizes[1] - sizes[0]), peaks  # the list of slabs grows
