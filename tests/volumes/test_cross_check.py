"""The cross-check: simulated boxes pass, each mistake is named, and each command prints it."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nyx_files import DARK_MATTER, GAS, UNIVERSE, write_nyx
from processes import run_ranks
from volume_files import SIMULATED

import evaluate
import predict
import train
from benchmarks import cross_check as study
from utils.distributed.world import World
from utils.volumes import cross_check, import_volume
from utils.volumes.cross_check import BOUNDS, DENSITIES, FACES, GROWTH, MEANS, OFFSET, SLOPE
from utils.volumes.hdf5 import Volume, open_volume

BOX, OTHER, HALF = 1, 6, 40  # boxes of the study with 32³ cells


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("boxes")


@pytest.fixture(scope="module")
def box(runs: Path) -> Volume:
    return study.simulated(BOX, HALF, runs)[0]


@pytest.fixture(scope="module")
def mistakes(box: Volume, runs: Path) -> dict[str, tuple[str, Volume]]:
    """The text that names each mistake, and the box with it."""
    other, later = study.simulated(OTHER, HALF, runs)[0], study.simulated(BOX, HALF, runs, study.LATER)[0]
    return {name: (text, volume) for name, text, volume in study.wrong(box, other, later)}


def test_right_volumes_give_no_warning(box: Volume) -> None:
    """Also without velocities, not cubic, and parts; with fewer cells, or without a cosmology, less is known."""
    known = {kind: study.check(volume) for kind, volume in study.right(box)}
    known["no cosmology"] = study.check(replace(box, simulation={}))
    known["small"] = study.check(study.part(box, slice(23), periodic=False))
    known["at rest"] = study.check(study.moved(box, np.zeros_like))
    assert {kind: list(result.warnings) for kind, result in known.items() if result.warnings} == {}
    assert set(known["boxes"].values) == set(BOUNDS)
    assert set(known["without velocities"].values) == {FACES, DENSITIES, OFFSET, GROWTH, MEANS}
    assert set(known["boxes"].values) - set(known["no cosmology"].values) == {SLOPE, cross_check.FIT}
    assert not {FACES, SLOPE} & set(known["cubic parts"].values)
    for impossible in ({"redshift": -1.5}, {"redshift": -1.0}, {"cosmology_Om0": -1.0}):  # each ended in a traceback
        assert SLOPE not in study.check(replace(box, simulation=box.simulation | impossible)).values
    assert not known["small"].values


def test_each_mistake_is_named_and_no_other(mistakes: dict[str, tuple[str, Volume]]) -> None:
    assert len(mistakes) == 17
    texts = {text for text, _ in mistakes.values()}
    for name, (text, volume) in mistakes.items():
        named = [line.partition("?")[0] for line in study.check(volume).warnings]
        assert any(text in line for line in named), (name, named)
        further = [line for line in named for other in texts - {text} if other in line and text not in line]
        assert not further, (name, named)


def test_a_velocity_that_many_cells_share_is_no_value(box: Volume) -> None:
    """A physical one, such as -9999 km/s, is within 100 in units of the channel. Few cells may share one."""
    for step, warns in ((200, True), (20_000, False)):
        inputs = box.inputs.copy()
        inputs[1].flat[::step] = -9.999
        lines = study.check(replace(box, inputs=inputs)).warnings
        assert any("about -9.999 in channel units" in line for line in lines) == warns


def values_on(world: World, path: str) -> dict[str, float]:
    return dict(study.check(open_volume(path), world).values)


def test_ranks_share_the_blocks(box: Volume) -> None:
    """Some of them have none."""
    alone = dict(study.check(box).values)
    for values in run_ranks(values_on, 3, box.path):
        assert values == pytest.approx(alone, rel=1e-5)
    chunked = replace(box, inputs=Counted(box.inputs, (4, 5, 7, 6)))
    assert dict(study.check(chunked).values) == pytest.approx(alone, rel=1e-5)


def test_of_a_large_volume_some_planes_are_read_unless_it_is_stored_in_chunks(box: Volume) -> None:
    fields = [Counted(values, None) for values in box.fields]
    large = replace(box, inputs=fields[0], targets=fields[1])
    every = 8 * box.inputs[0].nbytes  # without the temperature
    study.check(large)
    complete = sum(values.bytes for values in fields)
    assert every < complete < 1.2 * every
    result = study.check(large, limit=every / 2)
    assert sum(values.bytes for values in fields) - complete <= every / 2
    assert set(result.values) == set(BOUNDS) - {OFFSET}
    assert not result.warnings
    wrong = study.moved(box, lambda _: -1)
    assert "wrong sign" in study.check(wrong, limit=every / 2).warnings[0]
    chunked = replace(box, inputs=Counted(box.inputs, (4, 8, 8, 8)))
    assert not study.check(chunked, limit=every / 2).values
    assert chunked.inputs.bytes == 0


class Counted:
    def __init__(self, values: np.ndarray, chunks: tuple[int, ...] | None) -> None:
        self.values, self.shape, self.chunks, self.bytes = values, values.shape, chunks, 0

    def __getitem__(self, place: Any) -> np.ndarray:
        self.bytes += self.values[place].nbytes
        return self.values[place]


def test_every_command_prints_it(box: Volume, trained_run: Path, tmp_path: Path, capsys: Any) -> None:
    """Of a box whose velocities are in √a units: importer, preflight, training, prediction, evaluation."""
    too_fast = study.moved(box, lambda _: (1 + box.attributes["redshift"]) ** 0.5)
    path, flags = tmp_path / "box.h5", ["--device=cpu", f"--checkpoint={trained_run}", f"--input={tmp_path / 'box.h5'}"]
    names = [DARK_MATTER, *(f"dark_matter_{name}" for name in GAS[1:4]), *GAS]
    channels, values = itertools.chain(*study.channels_of(box)), itertools.chain(*too_fast.fields)
    fields = {name: part.to_physical(field) for name, part, field in zip(names, channels, values, strict=True)}
    universe = {**UNIVERSE, "redshift": box.attributes["redshift"]}
    snapshot = write_nyx(tmp_path / "snapshot.h5", fields, box.cell or 1, universe)
    scale = f"--velocity_scale_km_s={SIMULATED['velocity_scale_km_s']}"
    training = [f"--set=train_path={path}", f"--set=val_path={path}", "--set=device=cpu"]
    training += ["--config=test", "--set=box_size=[32,32]", f"--set=expdir={tmp_path / 'runs'}", "--num_epochs=1"]
    for main, words, warning in (
        (import_volume.main, [f"--input={snapshot}", f"--output={path}", scale], " - WARNING - "),
        (train.main, [*training, "--preflight"], "preflight: warning: "),
        (train.main, training, " - WARNING - "),
        (predict.main, [*flags, f"--output={tmp_path / 'gas.h5'}"], " - WARNING - "),
        (evaluate.main, [*flags, f"--output={tmp_path / 'evaluation'}"], " - WARNING - "),
        (evaluate.main, [f"--prediction={tmp_path / 'gas.h5'}", flags[2], f"--output={tmp_path / 'own'}"], "WARNING"),
    ):
        main(words)
        output = capsys.readouterr()
        lines = (output.out + output.err).splitlines()
        assert sum("cross-check of " in line and line.endswith("32³ cells:") for line in lines) == 1, words
        assert sum(warning in line and "velocities in √a units" in line for line in lines) == 1, words
    page = (tmp_path / "own" / "report.html").read_text()
    texts = "velocities in √a units", "check the data, as the notes say", f"the prediction of {path}, 32³ cells: gas "
    assert all(text in page for text in texts)
