"""Evaluation files: loading returns exactly what was saved. Scalars and derived curves by definition."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sample_results import sample_results

from utils.evaluation.results import Results, Spectrum, load, save


@pytest.fixture(scope="module")
def example() -> Results:
    return sample_results(8, epoch=3, checkpoint="best", window=None, cell=0.5, ema=True, flux=True)


def same(one: Any, other: Any) -> None:
    """Asserts that both are equal to the last bit, including array types."""
    assert type(one) is type(other)
    if isinstance(one, np.ndarray):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    elif dataclasses.is_dataclass(one):
        same(vars(one), vars(other))
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for name, value in one.items():
            same(value, other[name])
    else:
        assert one == other or (one != one and other != other)


def test_loading_returns_exactly_what_was_saved(example: Results, tmp_path: Path) -> None:
    nothing = {"phase_diagram": None, "divergence_r2": float("nan"), "distributions": {}, "spectra": {}, "metadata": {}}
    unknown = sample_results(8, channels=(1, 2))
    for number, saved in enumerate((example, dataclasses.replace(example, **nothing), unknown)):
        path = tmp_path / f"new directory {number}" / "evaluation.npz"
        save(saved, path)
        same(load(path), saved)
        with np.load(path, allow_pickle=False) as file:
            assert all(file[name].dtype.kind in "fiU" for name in file.files)
    np.savez(tmp_path / "pickle.npz", text=np.array([{}], dtype=object))
    with pytest.raises(ValueError, match="allow_pickle=False"):
        load(tmp_path / "pickle.npz")


def test_scalars_cover_three_scales_of_flux_and_spectra(example: Results) -> None:
    flux, scalars = example.flux, example.scalars()
    for name in ("prediction", "FGPA"):
        ratio = flux.fields[name].power / flux.fields["target"].power
        for mode in flux.reference_modes:
            assert scalars[f"Evaluation flux/P1D ratio at k = {flux.k[mode]:.3g}, {name}"] == ratio[mode]
        used = ratio[flux.k <= min(0.1, flux.k[-1] / 2)]
        assert scalars[f"Evaluation flux/P1D error, {name}"] == pytest.approx(np.abs(used - 1).mean())
        difference = np.abs(flux.fields[name].pdf - flux.fields["target"].pdf)
        assert scalars[f"Evaluation flux/PDF distance, {name}"] == pytest.approx(difference.sum() * 0.05 / 2)
        assert scalars[f"Evaluation flux/correlation, {name}"] == flux.fields[name].correlation
    assert scalars["Evaluation flux/mean before rescaling, target"] == flux.fields["target"].unscaled_mean
    assert scalars["Evaluation L1/all channels"] == pytest.approx(example.l1.mean())
    assert scalars["Evaluation R2/temperature"] == example.r2[4]
    assert scalars["Evaluation R2/velocity divergence"] == example.divergence_r2
    density = example.spectra["density"]
    for shell in density.reference_shells:
        assert scalars[f"Evaluation r/density at k = {density.k[shell]:.3g}"] == density.correlation[shell]
        assert scalars[f"Evaluation P ratio/density at k = {density.k[shell]:.3g}"] == density.ratio[shell]


def test_the_resolution_is_where_a_curve_first_falls_below_a_level() -> None:
    """Fixed: only too little power counted, so that T = 40 was reported as "not reached"."""
    k, one = np.arange(1.0, 6.0), np.ones(5)
    correlation, power = np.array([1.0, 0.98, 0.82, 0.42, 0.95]), np.array([1.0, 1.1, 0.9025, 0.64, 0.36])
    found = Spectrum(k, one, predicted=power, target=one, cross=correlation * np.sqrt(power))
    expected = {"r = 0.9": 2.5, "r = 0.5": 3.8, "T = 0.9": 3 + 1 / 3, "T = 0.5": None}
    assert found.resolutions == {name: k and pytest.approx(k) for name, k in expected.items()}
    far = Spectrum(k, one, predicted=1600 * one, target=one, cross=40 * one)
    assert far.resolutions == {"r = 0.9": None, "r = 0.5": None, "T = 0.9": 1.0, "T = 0.5": 1.0}
    assert far.resolution(np.array([1, 1, np.nan, 1, 1]), 0.9) == 3, "not finite"
    k = np.arange(1.0, 33.0)
    assert [k[shell] for shell in Spectrum(k, k, k, k, k).reference_shells] == [2.0, 8.0, 16.0]


def test_errors_of_flux_power_in_bands_and_bins(example: Results) -> None:
    """A band without a mode is absent; bins of k and mu without a mode, and small scales, are not used."""
    flux = example.flux
    k = np.array([0.004, 0.008, 0.02])
    p3d_k = np.array([[0.5, 1.0, 3.9], [np.nan, 1.5, 4.0]])
    ratios = {"power": np.array([1.1, 0.7, 1.2]), "p3d": np.array([[1.1, 0.9, 5.0], [np.nan, 1.2, 7.0]])}
    fields = {
        name: dataclasses.replace(flux.fields[name], **{key: factor**is_other for key, factor in ratios.items()})
        for is_other, name in enumerate(("target", "prediction"))
    }
    modes = np.isfinite(p3d_k).astype(float)
    found = dataclasses.replace(flux, k=k, p3d_k=p3d_k, p3d_modes=modes, fields=fields)
    assert found.band_errors("prediction") == {
        "0.003 to 0.01 s/km": pytest.approx(np.sqrt((0.1**2 + 0.3**2) / 2)),
        "0.01 to 0.03 s/km": pytest.approx(0.2),
        "0.003 to 0.03 s/km": pytest.approx(np.sqrt((0.1**2 + 0.3**2 + 0.2**2) / 3)),
    }
    assert found.p3d_errors("prediction") == {"to 2 h/Mpc": pytest.approx(np.sqrt((0.1**2 + 0.1**2 + 0.2**2) / 3))}
    none = np.empty((4, 0))
    assert dataclasses.replace(found, p3d_k=none, p3d_modes=none).p3d_errors("prediction") == {}
