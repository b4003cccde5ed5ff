"""Channels and their transforms; those of a run are those that its files state, which may not contradict each other."""

import itertools
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from nyx_files import DARK_MATTER, physical_fields, write_nyx
from trainings import YAML
from volume_files import write_volume

from utils import config as configs
from utils.config.channels import TRANSFORM, Channel, copied_channels, known_channels
from utils.errors import UserError
from utils.log import warn_once
from utils.steps import build
from utils.volumes.attributes import channel_attributes, common_simulation, file_channels, resolve_channels
from utils.volumes.hdf5 import FieldReader, open_volume
from utils.volumes.opened import Volumes
from utils.volumes.values import check_all

OTHER = {"velocity_scale_km_s": 500.0, "temperature_log10_center": 4.0}
SIMULATED = {"density_log_scale": 14.0, "velocity_scale_km_s": 1000.0}
DARK, PUBLISHED = known_channels("inputs", 4), known_channels("targets", 5)
UNKNOWN = {**TRANSFORM, "density_log_scale": None, "velocity_scale_km_s": None, "temperature_log10_scale": None}
CHANNELS = [
    Channel("wind z", "m/s", 0.3, component="wind z"),
    Channel("pressure", "K/cm3", 2.25, -1.5, is_log=True),
    Channel("ionization", "1", 0.7, 0.1),
    Channel("a, b / c", None, 3.0),
    Channel("wind x", "m/s", 0.3, component="wind x"),
    Channel("the middle", "m/s", 0.3, component="wind y"),
]


def of(**transform: float | None) -> list[Channel]:
    """The published targets with other values of the transform."""
    return known_channels("targets", 5, {**TRANSFORM, **transform})


def from_files(*files: dict[str, Any], given: Sequence[Channel] = ()) -> list[Channel]:
    """The targets of files with these attributes, and no names of channels."""
    stated = {f"{name}.h5": file_channels("targets", 5, part, None) for name, part in zip("ab", files, strict=False)}
    return resolve_channels("targets", 5, given, stated)


def named_file(path: Path, inputs: Sequence[Channel] = (), targets: Sequence[Channel] = (), **changes: Any) -> str:
    """A volume that names these channels, if any; changes of the attributes of its targets, None: removed."""
    write_volume(path, channels=(len(inputs) or 4, len(targets) or 5))
    with h5py.File(path, "r+") as file:
        for name, channels in (("Nbody", inputs), ("Hydro", targets)):
            file[name].attrs.update(channel_attributes(channels) if channels else {})
        for name, value in changes.items():
            del file["Hydro"].attrs[name]
            if value is not None:
                file["Hydro"].attrs[name] = value
    return str(path)


def warnings_of(caplog: Any) -> list[str]:
    """The warnings since the last call; each is logged again."""
    warn_once.cache_clear()
    texts = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return texts


def test_a_file_states_all_that_its_channels_are(tmp_path: Path) -> None:
    volume = open_volume(named_file(tmp_path / "a.h5", CHANNELS, CHANNELS[::-1]))
    assert volume.channels == (CHANNELS, CHANNELS[::-1])
    assert open_volume(write_volume(tmp_path / "b.h5")).channels == (None, None)
    # Of a program in C, and of one that writes only what it knows.
    texts = {"channels": np.array([channel.name.encode() for channel in CHANNELS]), "is_log": [0, 1, 0, 0, 0, 0]}
    texts |= {"unit": np.array([b"m/s", b"K/cm3", b"1", b"", b"m/s", b"m/s"]), "transform": None}
    assert open_volume(named_file(tmp_path / "c.h5", CHANNELS, CHANNELS, **texts)).channels[1] == CHANNELS
    few = dict.fromkeys(("unit", "component", "center", "is_log"))
    expected = [Channel(channel.name, scale=channel.scale) for channel in CHANNELS]
    assert open_volume(named_file(tmp_path / "d.h5", CHANNELS, CHANNELS, **few)).channels[1] == expected


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"scale": [1.0] * 4}, "Hydro has 5 channels, but 4 values in attribute scale; correct it"),
        ({"scale": [1.0, 0.0, 1.0, 1.0, 1.0]}, "attributes of .*a.h5: Hydro: .*scale must be greater than 0, got 0.0"),
        ({"component": ["", "v x", "v y", "v z", "v z"]}, "two channels are the component v z; correct one"),
        ({"component": ["", "v1", "v2", "v3", ""]}, "component must match .*, got 'v1'"),
    ],
)
def test_damaged_attributes_of_channels_are_one_line(tmp_path: Path, changes: Any, says: str) -> None:
    path = named_file(tmp_path / "a.h5", targets=PUBLISHED, **changes)
    with pytest.raises(UserError, match=says) as refused:
        open_volume(path)
    assert "\n" not in str(refused.value)


def test_transforms_of_files_win_over_the_config_with_one_warning(caplog: Any) -> None:
    """Values may be rounded. Without a statement the config's channels hold, else the published ones."""
    assert from_files() == from_files({"redshift": 2.0}) == PUBLISHED
    assert from_files(OTHER) == from_files(OTHER, {"redshift": 2.0}) == from_files({}, OTHER) == of(**OTHER)
    assert from_files({}, given=of(density_log_scale=10.0)) == of(density_log_scale=10.0)
    warnings_of(caplog)
    assert from_files(SIMULATED, SIMULATED, given=PUBLISHED) == of(**SIMULATED)
    (warning,) = warnings_of(caplog)
    difference = "gas velocity x value / (1000 km/s) instead of value / (900 km/s)"
    assert warning == f"a.h5 has other channels than the config, and overrides it: {difference}"
    with pytest.raises(UserError, match=r"^b\.h5 and a\.h5 have different channels: gas velocity x .* / \(500 km/s\)"):
        from_files(OTHER, SIMULATED, given=PUBLISHED)
    rounded = of(velocity_scale_km_s=500.001, temperature_log10_center=4.0)
    assert from_files(OTHER, given=rounded) == of(**OTHER)
    assert from_files(OTHER, given=of(velocity_scale_km_s=None, temperature_log10_center=4.0)) == of(**OTHER)
    assert warnings_of(caplog) == [], "an unknown transform contradicts none"


@pytest.mark.parametrize(
    ("targets", "says"),
    [
        ([*CHANNELS[1::-1], *CHANNELS[2:]], "instead of NAMES"),
        ([*CHANNELS[:3], *CHANNELS[4:]], "without a, b / c"),
        ([*CHANNELS, Channel("more")], "instead of NAMES"),
    ],
    ids=["swapped", "missing", "one more"],
)
def test_files_with_other_channels_are_refused_with_the_names(tmp_path: Path, targets: Any, says: str) -> None:
    first, second = tmp_path / "a.h5", tmp_path / "b.h5"
    named_file(first, targets=CHANNELS)
    named_file(second, targets=targets)
    with pytest.raises(UserError) as refused:
        Volumes.open(configs.validate({"train_path": str(first), "val_path": str(second)}, "c"), "hdf5")
    both = [", ".join(channel.name for channel in channels) for channels in (targets, CHANNELS)]
    difference = f"{both[0]} {says.replace('NAMES', both[1])}"
    assert f"{second} and {first} have different channels: {difference}; give files with the same" in str(refused.value)


def test_a_run_has_the_channels_that_its_files_name(tmp_path: Path, caplog: Any) -> None:
    """In place of other ones in the config, with one warning: numbers of channels, vectors and units."""
    path = named_file(tmp_path / "a.h5", CHANNELS, CHANNELS[:4:-1] + CHANNELS[:5])
    other = {"inputs": [{"name": "mass"}, *({"name": f"v {axis}", "component": f"v {axis}"} for axis in "xyz")]}
    for named in ({}, {"channels": other}, {"N_in_channels": 4, "N_out_channels": 5}):
        config = Volumes.open(configs.validate({"train_path": path, "val_path": path, **named}, "c"), "hdf5").config
        assert config.channels.inputs == [*config.volume_channels[0]] == CHANNELS
        assert (config.N_in_channels, config.N_out_channels) == (6, 6)
        assert config.vectors == ([[4, 5, 0]], [[5, 0, 1]])
        names = ", ".join(channel.name for channel in CHANNELS)
        says = f"{path} has other channels than the config, and overrides it: {names} without mass, v x, v y, v z"
        assert warnings_of(caplog) == ([says] if "channels" in named else [])


def test_a_training_on_several_simulations_has_what_they_share() -> None:
    first = {"redshift": 2.0, "cosmology": "planck18", "cosmology_H0": 67.7, "cell size (Mpc/h)": 0.1}
    second = {"redshift": 3.0, "cosmology": "planck18", "cosmology_H0": 67.70001}
    assert common_simulation([first, second]) == {"cosmology": "planck18", "cosmology_H0": 67.7}


def test_a_file_whose_transform_is_assumed_is_a_warning_that_names_it(caplog: Any) -> None:
    """Fixed: a checkpoint of other transforms predicted such a file silently."""
    text = "does not state its channels; those of config, checkpoint or other files hold"
    for files, given, path in (([{}], of(**OTHER), "a.h5"), ([OTHER, {}], [], "b.h5")):
        warnings_of(caplog)
        from_files(*files, given=given)
        (warning,) = warnings_of(caplog)
        assert warning.startswith(f"{path} {text}: gas velocity x value / (500 km/s); gas velocity y ")
        assert "temperature (log10(value / K) - 4) / 3.4" in warning
        assert "density" not in warning
    from_files({}, TRANSFORM)
    from_files({}, given=of(density_log_scale=None))
    assert warnings_of(caplog) == []


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("periodic", "False", False),
        ("periodic", np.bytes_("no"), False),
        ("periodic", [True, True, False], "expected true or false"),
        ("box_size_mpc_h", [20.0, 20.0, 20.0], 20.0),
        ("box_size_mpc_h", "20", 20.0),
        ("box_size_mpc_h", "20 Mpc/h", "expected a number"),
        ("box_size_mpc_h", 0.0, "make it a length"),
        ("redshift", [np.bytes_("3"), np.bytes_("2")], r"\['3', '2'\], expected a number"),
        ("redshift", np.bytes_("3.0"), 3.0),
        ("redshift", [], "expected a number"),
        ("velocity_scale_km_s", 0.0, "expected a number above 0"),
    ],
)
def test_attributes_of_other_types_are_read_or_refused(tmp_path: Path, name: str, value: Any, expected: Any) -> None:
    """Fixed: periodic "False" wrapped predictions around a cut box; vectors and texts gave tracebacks."""
    path = write_volume(tmp_path / "a.h5", **{name: value})
    if isinstance(expected, str):
        with pytest.raises(UserError, match=rf"a\.h5: .*{name} is .*{expected}") as caught:
            FieldReader(str(path), "Nbody", 4)
        assert not re.search(r"array\(|np\.|b'|dtype", str(caught.value)), "fixed: Python's notation"
        return
    reader = FieldReader(str(path), "Nbody", 4)
    assert reader.attributes[name] == expected
    assert type(reader.attributes[name]) is type(expected)
    assert reader.periodic is (expected if name == "periodic" else True)


@pytest.mark.parametrize(("place", "name"), [("/", "box_size_mpc_h"), ("domain", "size")])
def test_lengths_of_sides_are_compared_with_the_cells_along_each_axis(tmp_path: Path, place: str, name: str) -> None:
    """Fixed: the longest of the group domain counted for all axes; unequal ones of the attribute were "no number"."""
    for lengths in ([4.0, 8.0, 2.0], [8.0, 8.0, 8.0]):
        with h5py.File(write_volume(tmp_path / "a.h5", (8, 16, 4)), "r+") as file:
            file.require_group(place).attrs[name] = lengths
        if lengths[0] == 4.0:
            assert FieldReader(str(tmp_path / "a.h5"), "Nbody", 4).cell == 0.5
    with pytest.raises(UserError, match=r"a\.h5: cells of 1 × 0\.5 × 2 Mpc/h .* are not cubes; resample"):
        FieldReader(str(tmp_path / "a.h5"), "Nbody", 4)


def test_the_density_term_of_the_loss_has_the_density_log_scale_of_the_files(tmp_path: Path) -> None:
    """Fixed: it had 14, that of the published data set. The density may be any of the channels."""
    reversed_file = named_file(tmp_path / "b.h5", targets=of(density_log_scale=10.0)[::-1])
    for path, place in ((str(write_volume(tmp_path / "a.h5", density_log_scale=10.0)), 0), (reversed_file, 4)):
        config = configs.load(YAML, "test", {"train_path": path, "val_path": path, "lambda_rho": 0.5})
        fields = torch.zeros(1, 5, 2, 2, 2)
        fields[:, place] = 0.1
        loss = build.loss(Volumes.open(config, "hdf5").config)(fields, 0 * fields)
        assert float(loss) == pytest.approx(0.02 + 0.5 * math.expm1(1.0))


def test_a_training_has_the_transform_of_its_files(tmp_path: Path) -> None:
    """It can be repeated from its own config.yaml, which sets all keys, and continued by the same command."""
    files = {key: str(write_volume(tmp_path / f"{key}.h5", **OTHER)) for key in ("train_path", "val_path")}
    config = configs.load(YAML, "test", files)
    transformed = Volumes.open(config, "hdf5").config
    assert transformed.volume_channels[1] == (*of(**OTHER),)
    assert transformed == config.model_copy(update={"channels": transformed.channels})
    (tmp_path / "config.yaml").write_text(configs.to_yaml(transformed, "test"))
    repeated = configs.load(str(tmp_path / "config.yaml"), "test")
    assert configs.run_changes(Volumes.open(repeated, "hdf5").config, transformed) == []
    elsewhere = configs.load(YAML, "test", {"train_path": "/nowhere.h5", "val_path": "/nowhere.h5"})
    assert Volumes.open(elsewhere, "hdf5").config == elsewhere, "a loader of .npy files needs no HDF5 files"


def test_groups_of_nyx_stand_in_for_attributes_of_a_volume(tmp_path: Path) -> None:
    """Other programs write channels next to these groups, attributes as arrays of one element, and texts as bytes."""
    shape = (12, 6, 8)
    path = write_nyx(tmp_path / "normalized.h5", {DARK_MATTER: physical_fields(shape)[DARK_MATTER]})
    with h5py.File(path, "r+") as file:
        file["Nbody"] = np.zeros((4, *shape), np.float32)
        file.attrs["redshift"] = np.array([2.0], np.float32)
        file.attrs["cosmology"] = np.bytes_("planck18")
    reader = FieldReader(str(path), "Nbody", 4)
    stated = [reader.simulation[name] for name in ("cosmology_H0", "redshift", "cosmology")]
    assert (reader.cell, stated) == (0.5, [67.5, 2.0, "planck18"])


def test_the_defaults_are_the_transforms_of_the_published_data() -> None:
    """The formulas of public scripts for these files: rho = exp(14 x), v = 9e7 x cm/s, T = exp(8 (x + 1.5)) K."""
    x, cm_per_km = np.linspace(-1.2, 1.2, 25), 1e5
    physical = [np.exp(14 * x), *[9e7 * x / cm_per_km] * 3, np.exp(8 * (x + 1.5))]
    for channel, values in zip((*DARK, *PUBLISHED), (*physical[:4], *physical), strict=True):
        np.testing.assert_allclose(channel.to_physical(x), values, rtol=1e-13)
        np.testing.assert_allclose(channel.from_physical(values.copy()), x, rtol=1e-13, atol=1e-14)
    log10 = (np.log10(physical[4]) - TRANSFORM["temperature_log10_center"]) / TRANSFORM["temperature_log10_scale"]
    np.testing.assert_allclose(log10, x, rtol=1e-13, atol=1e-14)


def test_the_formula_is_that_of_from_physical() -> None:
    """It is what readers of a file see, in the notation of numpy but for ln."""
    values = np.array([3.0, 40.0, 5e3])
    names = {"log10": np.log10, "ln": np.log, "value": values, "K": 1}
    for transform in ({"scale": 7.0}, {"scale": 250.0, "center": 1e3}):
        for is_log in (False, True):
            channel = Channel("a", "K", is_log=is_log, **transform)
            formula = re.sub(r"(\d) K", r"\1", channel.formula())
            np.testing.assert_allclose(eval(formula, names), channel.from_physical(values.copy()), rtol=1e-8)


def test_channels_without_a_known_transform_have_names_only() -> None:
    """Of other numbers, with the vectors of another dataset or without those of a velocity, or with scales None."""
    unknown = [known_channels("inputs", 3), known_channels("targets", 6), known_channels("inputs", 4, vectors=[])]
    unknown.append(known_channels("targets", 5, vectors=[[2, 3, 4]]))
    for channels in unknown:
        assert [channel.name for channel in channels] == [f"channel {number}" for number in range(len(channels))]
    assert [channel.component for channel in unknown[-1]] == [None, None, *(f"vector 0 {axis}" for axis in "xyz")]
    named = *known_channels("inputs", 4, UNKNOWN), *known_channels("targets", 5, UNKNOWN)
    assert [channel.name for channel in named] == [channel.name for channel in (*DARK, *PUBLISHED)]
    for channel in (*itertools.chain(*unknown), *named):
        assert (channel.unit, channel.formula()) == (None, "unknown")
    partly = known_channels("targets", 5, {**TRANSFORM, "density_log_scale": None})
    assert [channel.unit is None for channel in partly] == [True, False, False, False, False]


@pytest.mark.parametrize(
    ("inputs", "targets", "copied"),
    [
        (DARK[:1], PUBLISHED, {0: 0}),
        (DARK, [PUBLISHED[0], PUBLISHED[4]], {0: 0}),
        (known_channels("inputs", 3), PUBLISHED, {0: 0, 1: 1, 2: 2}),
        (DARK[::-1], PUBLISHED, {0: 3, 1: 2, 2: 1, 3: 0}),
        (DARK, [PUBLISHED[4], PUBLISHED[0], Channel("metallicity")], {1: 0}),
    ],
    ids=str,
)
def test_inputs_are_compared_with_the_targets_of_the_same_quantity(inputs: Any, targets: Any, copied: Any) -> None:
    """Fixed: the baseline that copies the inputs took a velocity for a temperature if targets had no velocity."""
    assert copied_channels(inputs, targets) == copied


def test_the_documentation_writes_files_whose_channels_are_those_of_the_defaults(tmp_path: Path) -> None:
    """docs/data.md, Your own files."""
    page = (Path(__file__).parents[2] / "docs/data.md").read_text(encoding="utf-8")
    _, source = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    namespace: dict[str, Any] = {}
    exec(compile(source, "docs/data.md", "exec", dont_inherit=True), namespace)
    rng, shape = np.random.default_rng(1), (16, 16, 16)
    dark_rho, gas_rho, temperature = (np.exp(rng.normal(size=shape) + mean) for mean in (0, 3, 10))
    dark_velocity, gas_velocity = 300 * rng.normal(size=(2, 3, *shape))
    namespace["write"](tmp_path / "my.h5", dark_rho, list(dark_velocity), gas_rho, list(gas_velocity), temperature)
    volume = open_volume(tmp_path / "my.h5")
    assert volume.mapped
    expected = [dark_rho / dark_rho.mean(), *dark_velocity, gas_rho / gas_rho.mean(), *gas_velocity, temperature]
    for channel, stored, values in zip((*DARK, *PUBLISHED), (*volume.inputs, *volume.targets), expected, strict=True):
        np.testing.assert_allclose(channel.to_physical(stored.astype("f8")), values, rtol=1e-5)
    check_all(volume)
    assert np.isfinite(namespace["density"](np.eye(3))).all()
