"""Evaluations as files: what is loaded is what was saved; a file that is none is refused, and nothing in it is run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from utils.channels import input_channels, target_channels
from utils.config import Transform
from utils.errors import UserError
from utils.evaluation import results
from utils.evaluation.results import Distribution, Plane, Results, Spectrum, load, save, telling_wavenumbers


def spectrum(shells: int = 8, seed: int = 0) -> Spectrum:
    k, modes, predicted, target, cross = np.random.default_rng(seed).uniform(1, 2, (5, shells))
    return Spectrum(k.cumsum(), modes.round(), predicted, target, cross)


def distribution(unit: str | None, is_log: bool, seed: int = 0) -> Distribution:
    predicted, target = np.random.default_rng(seed).integers(0, 2**40, (2, 6))
    return Distribution(np.linspace(-1, 1, 7), predicted, target, unit, is_log)


def example() -> Results:
    rng = np.random.default_rng(5)
    channels = target_channels(5, Transform())
    return Results(
        channels=channels,
        input_channels=input_channels(4, Transform()),
        cells=8,
        l1=rng.uniform(size=5),
        r2=rng.uniform(size=5),
        spectra={"density": spectrum(), "log density": spectrum(4, 1), "velocity": spectrum(seed=2)},
        length_unit="Mpc/h",
        distributions={
            "gas density": distribution("mean density", True),
            "velocity divergence": distribution("km/s per Mpc/h", False, 1),
            "channel 7": distribution(None, False, 2),
        },
        plane=Plane(np.arange(4.0), np.arange(3.0), *rng.integers(0, 9, (2, 3, 2))),
        divergence_r2=0.1 + 0.2,
        slices={
            name: rng.standard_normal((count, 8, 8)).astype(np.float32)
            for name, count in (("input", 4), ("target", 5), ("predicted", 5))
        },
        about={"epoch": 3, "checkpoint": "best", "tile": None, "cell": 0.5, "ema": True},
    )


def same(one: Any, other: Any) -> None:
    """Equal to the last bit, types of arrays included."""
    assert type(one) is type(other)
    if isinstance(one, np.ndarray):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    elif isinstance(one, Results | Spectrum | Distribution | Plane):
        same(vars(one), vars(other))
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for name, value in one.items():
            same(value, other[name])
    else:
        assert one == other or (one != one and other != other)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"plane": None, "divergence_r2": float("nan"), "distributions": {}, "spectra": {}, "about": {}},
        {"channels": target_channels(3, Transform()), "input_channels": input_channels(1, Transform())},
        {"channels": target_channels(5, Transform(temperature_log10_scale=None)), "length_unit": "cells"},
    ],
)
def test_what_is_loaded_is_what_was_saved(changes: dict[str, Any], tmp_path: Path) -> None:
    saved = dataclasses.replace(example(), **changes)
    path = tmp_path / "a new directory" / "evaluation.npz"
    save(saved, path)
    same(load(path), saved)
    assert [file.name for file in path.parent.iterdir()] == ["evaluation.npz"]


def test_numpy_reads_it_without_any_pickle(tmp_path: Path) -> None:
    save(example(), tmp_path / "evaluation.npz")
    with np.load(tmp_path / "evaluation.npz", allow_pickle=False) as file:
        assert all(file[name].dtype.kind in "fiU" for name in file.files)


def test_a_save_that_fails_leaves_the_older_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "evaluation.npz"
    save(example(), path)
    before = path.read_bytes()

    def full(file: Any, **arrays: Any) -> None:
        file.write(b"PK")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(results.np, "savez_compressed", full)
    with pytest.raises(OSError, match="No space left"):
        save(example(), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


class Planted:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


def test_a_pickle_in_a_file_is_refused_and_not_run(tmp_path: Path) -> None:
    path, planted = tmp_path / "evaluation.npz", tmp_path / "planted"
    save(example(), path)
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    arrays["l1"] = np.array([Planted(planted)], dtype=object)
    np.savez(path, **arrays)
    with pytest.raises(UserError, match="holds no evaluation"):
        load(path)
    assert not planted.exists()
    with np.load(path, allow_pickle=True) as file:  # so the trap was one
        _ = file["l1"]
    assert planted.exists()


@pytest.mark.parametrize("kept", [0, 1, 3, 200, 0.5, 0.99])
def test_a_file_that_was_cut_short_is_refused(kept: float, tmp_path: Path) -> None:
    path = tmp_path / "evaluation.npz"
    save(example(), path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept * len(whole)) if isinstance(kept, float) else kept])
    refused(path)


@pytest.mark.parametrize("place", [0.05, 0.3, 0.6, 0.9])
def test_a_file_with_damaged_bytes_is_refused(place: float, tmp_path: Path) -> None:
    path = tmp_path / "evaluation.npz"
    save(example(), path)
    whole = bytearray(path.read_bytes())
    start = int(place * len(whole))
    whole[start : start + 64] = bytes(byte ^ 0x5A for byte in whole[start : start + 64])
    path.write_bytes(whole)
    refused(path)


@pytest.mark.parametrize("missing", ["text", "l1", "spectrum 1 cross", "distribution 0 edges", "plane target"])
def test_a_file_that_lacks_a_part_is_refused(missing: str, tmp_path: Path) -> None:
    path = tmp_path / "evaluation.npz"
    save(example(), path)
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files if name != missing}
    np.savez(path, **arrays)
    refused(path)


@pytest.mark.parametrize("content", [b"a page of text", b"[]", np.random.default_rng(0).bytes(999)])
def test_a_file_of_another_kind_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "evaluation.npz"
    path.write_bytes(content)
    refused(path)


def test_an_array_alone_is_refused(tmp_path: Path) -> None:
    """np.load gives an array there, not a file of them."""
    np.save(tmp_path / "array.npy", np.zeros(3))
    refused(tmp_path / "array.npy")


@pytest.mark.parametrize("text", ['"text"', "[1]", "{", "{}", '{"spectra": 3}'])
def test_other_text_in_the_file_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "evaluation.npz"
    np.savez(path, text=np.array(text), l1=np.zeros(5), r2=np.zeros(5))
    refused(path)


def test_a_directory_and_a_file_that_is_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no such file: .*absent\.npz"):
        load(tmp_path / "absent.npz")
    refused(tmp_path)


def refused(path: Path) -> None:
    with pytest.raises(UserError) as raised:
        load(path)
    line = str(raised.value)
    assert str(path) in line
    assert "holds no evaluation" in line


def test_ratio_correlation_and_the_nearest_shell() -> None:
    found = Spectrum(
        k=np.array([1.0, 2.0, 3.0]),
        modes=np.array([6.0, 12.0, 8.0]),
        predicted=np.array([4.0, 1.0, 9.0]),
        target=np.array([1.0, 1.0, 4.0]),
        cross=np.array([2.0, 0.5, -6.0]),
    )
    np.testing.assert_array_equal(found.ratio, [4.0, 1.0, 2.25])
    np.testing.assert_array_equal(found.correlation, [1.0, 0.5, -1.0])
    assert [found.at(k) for k in (0.0, 1.4, 1.6, 2.6, 99.0)] == [0, 0, 1, 2, 2]


def test_scalars_tell_three_scales_of_every_spectrum() -> None:
    found = example()
    scalars = found.scalars()
    assert scalars["Evaluation/L1"] == pytest.approx(found.l1.mean())
    assert scalars["Evaluation/R2 temperature"] == found.r2[4]
    assert scalars["Evaluation/R2 velocity divergence"] == found.divergence_r2
    velocity = found.spectra["velocity"]
    for k in telling_wavenumbers(velocity):
        shell = velocity.at(k)
        assert scalars[f"Evaluation/r at k = {velocity.k[shell]:.3g}, velocity"] == velocity.correlation[shell]
        assert scalars[f"Evaluation/P ratio at k = {velocity.k[shell]:.3g}, velocity"] == velocity.ratio[shell]
    without = dataclasses.replace(found, divergence_r2=float("nan")).scalars()
    assert "Evaluation/R2 velocity divergence" not in without
