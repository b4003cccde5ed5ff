"""The simulation against linear theory, its conservation laws, its gas, and the output file."""

import itertools
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import h5py
import numpy as np
import pytest
import torch
from log_lines import refusal
from reference_samples import ALONE

pytest.importorskip("colossus", reason="colossus, which simulations need, is not installed")

from analysis.modes import PowerBins
from analysis.slabs import Slabs
from simulation import evolution, fourier, linear_theory, particle_mesh, simulate
from simulation.cooling import PrimordialGas
from simulation.simulate import SimulationOptions
from utils.config.channels import known_channels
from utils.progress import Progress
from utils.volumes import import_volume
from utils.volumes.hdf5 import DATASETS, open_volume

LARGE = SimulationOptions(grid=64, box_size=512.0, redshift=1.0, seed=1, n_steps=8, threads=1)
Fields = tuple[np.ndarray, np.ndarray]


@pytest.fixture(autouse=True, scope="module")
def tables() -> Iterator[None]:
    """The tables of heating and cooling, which take most of the time of a small box, are computed once."""
    change = cache(PrimordialGas(linear_theory.make_cosmology("planck18")).change)
    with mock.patch.object(PrimordialGas, "change", lambda _, *redshifts: change(*redshifts)):
        yield


@pytest.fixture(scope="module")
def large() -> Fields:
    """Physical fields of a box that is large enough for linear waves."""
    return simulate.simulate_fields(LARGE)


def power_spectrum(contrast: np.ndarray, box_size: float) -> tuple[np.ndarray, np.ndarray]:
    """Mean k in h/Mpc and mean power in (Mpc/h)^3 of the shells that test_statistics.py tests."""
    bins = PowerBins(Slabs(contrast.shape, ALONE), box_size / len(contrast))
    sums = bins.sums([torch.tensor(contrast, dtype=torch.float32)])[0].numpy()
    return bins.k[0], (sums * bins.volume / bins.modes)[0]


def test_large_scale_power_is_that_of_linear_theory(large: Fields) -> None:
    """That of the initial modes, which a seed draws, times the square of the growth factor."""
    cosmology = linear_theory.make_cosmology(LARGE.cosmology)
    initial = fourier.backward(simulate.initial_modes(LARGE, cosmology), 1).numpy()
    k, power = power_spectrum(large[0][0] - 1, LARGE.box_length)
    linear = power_spectrum(initial, LARGE.box_length)[1] * cosmology.growthFactor(LARGE.redshift) ** 2
    resolved = k * LARGE.cell < 0.4  # cells of 8 Mpc/h: the window of the mesh reduces the power of shorter waves
    assert resolved.sum() >= 4
    np.testing.assert_allclose(power[resolved] / linear[resolved], 1, atol=0.1)


def test_divergence_of_velocity_obeys_continuity(large: Fields) -> None:
    """Checks amplitude and phase of div v = -a H f delta for linear waves."""
    contrast, velocity = large[0][0] - 1, large[0][1:]
    cosmology, z = linear_theory.make_cosmology(LARGE.cosmology), LARGE.redshift
    expected = -100 * cosmology.Ez(z) / (1 + z) * linear_theory.growth_rate(cosmology, z)
    k = [part.numpy() for part in fourier.wavenumbers(LARGE.grid, torch.device("cpu"))]
    size = np.sqrt(sum(component**2 for component in k))
    low = (size > 0) & (size < 0.4)

    transformed = [np.fft.rfftn(component) for component in velocity]
    terms = [(1j * wave * part)[low] for wave, part in zip(k, transformed, strict=True)]
    result, source = np.sum(terms, axis=0) / LARGE.cell, expected * np.fft.rfftn(contrast)[low]
    lengths = np.linalg.norm(result), np.linalg.norm(source)
    assert np.vdot(source, result).real / np.prod(lengths) > 0.97
    assert lengths[0] / lengths[1] == pytest.approx(1, abs=0.1)


def test_plane_waves_from_rest_grow_and_decay_as_in_einstein_de_sitter() -> None:
    """Waves at rest are 3/5 growing and 2/5 decaying mode, by force and friction; such small ones do not interact."""
    clock = linear_theory.GrowthClock(linear_theory.make_cosmology("EdS"), 9.0, 1.0, 20)
    k = 2 * np.pi * 2 / 32
    displaced = (-0.01 / k * np.sin(k * np.indices((32, 32, 32)))).astype(np.float32)
    particles = particle_mesh.Particles(torch.from_numpy(displaced.copy()), torch.zeros(3, 32, 32, 32))
    physics = evolution.GasPhysics(PrimordialGas(linear_theory.make_cosmology("planck18")), 0.5, 0.0, 1.0)
    gas = physics.start(torch.zeros(32, 32, 32), particles, clock, 1)
    evolution.evolve(particles, gas, physics, clock, Progress("", 1, live_only=True))
    ratio = clock.times[-1] / clock.times[0]
    for end, start in zip(particles.displacement.numpy(), displaced, strict=True):
        assert np.vdot(end, start) / np.vdot(start, start) == pytest.approx(0.6 * ratio + 0.4 * ratio**-1.5, rel=0.03)


@pytest.mark.parametrize("axes", [(0, 1), (0, 2), (1, 2)])
def test_second_order_displacement_of_two_oblique_waves(axes: tuple[int, int]) -> None:
    """For delta = A cos kx cos ky both terms of the second-order source contribute, and the solution is analytic.

    phi1,xx phi1,yy - phi1,xy^2 = A^2 / 8 (cos 2kx + cos 2ky), so d phi2/dx = A^2 / (16 k) sin 2kx (Scoccimarro 1998).
    """
    n, k, amplitude, time = 16, 2 * np.pi / 16, 0.3, 0.5
    places = np.meshgrid(*[k * np.arange(n)] * 3, indexing="ij")
    x, y = places[axes[0]], places[axes[1]]
    contrast = (amplitude * np.cos(x) * np.cos(y)).astype(np.float32)
    particles = particle_mesh.lpt_particles(fourier.forward(torch.from_numpy(contrast), 1), time)
    first = -amplitude / (2 * k) * np.sin(x) * np.cos(y)
    second = -3 / 7 * amplitude**2 / (16 * k) * np.sin(2 * x)
    np.testing.assert_allclose(particles.displacement[axes[0]], time * first + time**2 * second, atol=1e-5)
    np.testing.assert_allclose(particles.velocity[axes[0]], first + 2 * time * second, atol=1e-5)
    assert float(particles.displacement[3 - sum(axes)].abs().max()) < 1e-5


def test_forces_cancel_between_particles_and_with_the_gas() -> None:
    """The sum over particles of the pull of particles and gas, and that over the gas, by their shares of the mass."""
    rng, share = np.random.default_rng(0), 0.16
    drawn = rng.uniform(0, 16, (3, 4096)), rng.uniform(0, 2, (16, 16, 16))
    positions, gas = (torch.from_numpy(values.astype(np.float32)) for values in drawn)
    dark = torch.zeros(1, 16**3)
    particle_mesh.add_particles(dark, positions, (), 16, 0, particle_mesh.TRIANGLE)
    on_particles, on_gas = evolution.accelerations(dark.view(16, 16, 16), gas / gas.mean(), share)
    force = particle_mesh.interpolate(on_particles, positions).double().mean(1)
    pull = (gas / gas.mean() * on_gas).double().mean((1, 2, 3))
    assert force.abs().max() > 1e-4 * on_gas.std(), "the gas pulls"
    assert ((1 - share) * force + share * pull).abs().max() < 1e-6 * on_gas.std()


@pytest.mark.parametrize(("grid", "largest"), [(12, 2), (8, 20)])
def test_deposit_equals_a_loop_over_particles(grid: int, largest: float) -> None:
    """Many particles are outside the periodic box; their slabs touch some rows of the mesh, or all of them."""
    rng, expected = np.random.default_rng(1), np.zeros((2, grid, grid, grid))
    displacement = rng.uniform(-largest, largest, (3, grid, grid, grid)).astype(np.float32)
    velocity = rng.standard_normal(displacement.shape, dtype=np.float32)
    places = (displacement + np.indices((grid, grid, grid))).reshape(3, -1).T
    for place, value in zip(places, velocity[0].ravel(), strict=True):
        cell = np.floor(place).astype(int)
        for corner in np.ndindex(2, 2, 2):
            weight = np.prod(np.where(corner, place - cell, 1 - (place - cell)))
            x, y, z = (cell + corner) % grid
            expected[:, x, y, z] += weight * np.array([1, value])
    particles = particle_mesh.Particles(torch.from_numpy(displacement), torch.from_numpy(velocity))
    result = particle_mesh.deposit(particles, threads=2, velocity=particles.velocity[:1], width=2)
    np.testing.assert_allclose(result, expected, atol=1e-5)


def test_a_seed_gives_the_same_bits_for_any_number_of_threads_and_another_seed_gives_another_box() -> None:
    pairs = (7, 1), (7, 2), (7, 3), (8, 2)
    options = (SimulationOptions(grid=20, seed=seed, n_steps=2, threads=threads) for seed, threads in pairs)
    first, *again, independent = map(simulate.simulate, options)
    for fields in again:
        assert [field.tobytes() for field in fields] == [field.tobytes() for field in first]
    assert abs(np.corrcoef(first[0][0].ravel(), independent[0][0].ravel())[0, 1]) < 0.3


@pytest.mark.parametrize("grid", [8, 17])
def test_odd_and_small_grids(grid: int) -> None:
    for fields in simulate.simulate_fields(SimulationOptions(grid=grid, n_steps=1)):
        assert fields.shape[1:] == (grid, grid, grid)
        assert np.isfinite(fields).all()
        assert fields[0].mean(dtype=np.float64) == pytest.approx(1, abs=1e-6), "mass is conserved"


def test_empty_cells_get_the_velocity_of_their_neighbors() -> None:
    density = np.ones((16, 16, 16), np.float32)
    density[5:8, 5:8, 5:8] = 0
    momentum = np.stack([density * speed for speed in (100, -50, 0)]).astype(np.float32)
    for component, speed in zip(simulate.mass_weighted_velocity(density, momentum), (100, -50, 0), strict=True):
        np.testing.assert_allclose(component, speed, atol=1e-3)


def test_gas_follows_dark_matter_has_the_measured_temperatures_and_is_hot_in_shocks() -> None:
    """The shells of the longest waves, 1.0 to 2.5 h/Mpc; velocities agree where the dark matter does not cross.

    Gaikwad et al. 2021 at z = 3: 14,750 K ± 1,300 and 1.225 ± 0.12; this small box, without long waves, has fewer
    shocks than a large one. The relation is that of the median.
    """
    options = SimulationOptions(grid=40, seed=3, threads=1)
    dark, gas = simulate.simulate_fields(options)
    powers = [power_spectrum(fields[0] - 1, options.box_length)[1][:2] for fields in (dark, gas)]
    np.testing.assert_allclose(powers[1] / powers[0], 1, atol=0.04)
    assert np.corrcoef(dark[1].ravel(), gas[1].ravel())[0, 1] > 0.95
    logarithm, kelvin, edges = np.log10(gas[0]).ravel(), gas[4].ravel(), np.linspace(-0.5, 0.5, 6)
    bins = [(low < logarithm) & (logarithm < high) & (kelvin < 1e5) for low, high in itertools.pairwise(edges)]
    medians = [np.log10(np.median(kelvin[cells])) for cells in bins]
    slope, level = np.polyfit((edges[1:] + edges[:-1]) / 2, medians, 1)
    assert 12_000 < 10**level < 16_000
    assert 1.2 < 1 + slope < 1.45
    assert kelvin.max() > 1e5
    assert kelvin.min() > 3_000


@pytest.mark.gpu
def test_a_box_on_a_gpu_is_that_of_the_cpu_and_repeats_bit_for_bit() -> None:
    options = SimulationOptions(grid=24, seed=3, n_steps=20, threads=1)
    boxes = [simulate.simulate_fields(replace(options, device=device)) for device in ("cpu", "cuda", "cuda")]
    for host, device, again in zip(*boxes, strict=True):
        np.testing.assert_array_equal(device, again)
        assert np.median(np.abs(np.log(device[::4] / host[::4]))) < 1e-3


def command(path: Path, *more: str) -> list[str]:
    return ["--output", str(path), "--grid", "8", "--n_steps", "1", "--threads", "1", *more]


def test_the_command_writes_both_volumes_contiguous_with_their_attributes(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "new" / "box.h5"
    assert simulate.main(command(path, "--seed", "4", "--box_size", "8")) == 0
    assert os.listdir(path.parent) == ["box.h5"]
    printed = capsys.readouterr()
    assert str(path) in printed.out
    assert "cells of 1 Mpc/h are too large" in printed.err
    expected = simulate.simulate(SimulationOptions(grid=8, n_steps=1, seed=4, box_size=8.0))
    with h5py.File(path) as file:
        for name, values in zip(("Nbody", "Hydro"), expected, strict=True):
            assert file[name].dtype == np.float32
            assert file[name].id.get_offset() is not None, "contiguous: can be mapped into memory"
            np.testing.assert_array_equal(file[name][:], values)
        assert file.attrs["cosmology_Om0"] == pytest.approx(0.3111)
        assert [file.attrs[name] for name in ("seed", "box_size_mpc_h", "cosmology")] == [4, 8.0, "planck18"]
    assert open_volume(path).channels == simulate.CHANNELS


def test_a_pair_has_the_linear_power_in_each_mode_and_initial_fields_that_sum_to_zero(tmp_path: Path) -> None:
    cosmology, options = linear_theory.make_cosmology("planck18"), SimulationOptions(grid=20, box_size=100.0, seed=5)
    members = [simulate.initial_modes(replace(options, paired=sign), cosmology) for sign in (1, -1)]
    assert torch.equal(members[0], -members[1])
    k = torch.stack([part.expand(20, 20, 11) for part in fourier.wavenumbers(20, torch.device("cpu"))]).norm(dim=0)
    wavenumbers = k[k > 0].double().numpy() * 20 / 100
    expected = cosmology.matterPowerSpectrum(wavenumbers, 0.0, model="eisenstein98") * 20**6 / 100**3
    np.testing.assert_allclose(members[0].abs()[k > 0].double().numpy() ** 2, expected, rtol=1e-4)

    assert simulate.main(command(tmp_path / "box.h5", "--paired")) == 0
    assert sorted(os.listdir(tmp_path)) == ["box.h5", "box_paired.h5"]
    with h5py.File(tmp_path / "box.h5") as first, h5py.File(tmp_path / "box_paired.h5") as second:
        assert (first.attrs["paired"], second.attrs["paired"]) == (1, -1)
        fields = [file["Nbody"][0].ravel() for file in (first, second)]
    assert np.corrcoef(*fields)[0, 1] < -0.5, "voids are clusters of the other one"


def test_a_snapshot_in_the_layout_of_nyx_is_imported_with_the_simulated_values(tmp_path: Path) -> None:
    snapshot, volume = tmp_path / "snapshot.h5", tmp_path / "box.h5"
    assert simulate.main(command(snapshot, "--seed", "4", "--format", "nyx")) == 0
    import_volume.main(["--input", str(snapshot), "--output", str(volume)])
    options = SimulationOptions(grid=8, n_steps=1, seed=4)
    described, fields = open_volume(volume).channels, simulate.simulate_fields(options)
    assert [*described] == [known_channels("inputs", 4), known_channels("targets", 5)]
    with h5py.File(volume) as file:
        for name, kinds, expected in zip(DATASETS, described, fields, strict=True):
            result = [channel.to_physical(values) for channel, values in zip(kinds, file[name], strict=True)]
            np.testing.assert_allclose(np.stack(result), expected, rtol=1e-5, atol=1e-3)
        for key in ("box_size_mpc_h", "redshift", "cosmology_H0", "cosmology_Om0", "cosmology_Ode0", "cosmology_Ob0"):
            assert file.attrs[key] == pytest.approx(simulate.file_attributes(options)[key])


def test_bad_options_are_reported_in_one_line_with_exit_code_2(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(simulate, "simulate", lambda *_: pytest.fail("the simulation ran"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(simulate, "memory_limit", lambda: 10**9)
    (tmp_path / "file").write_text("precious")
    for arguments, words in (
        ("--grid 4", "grid is 4; give 8 to 1290 cells per side"),
        ("--grid 1291", "grid is 1291; give 8 to 1290 cells per side"),
        ("--box_size nan", "box_size is nan; for 8 cells per side give 0.08 to 160 Mpc/h"),
        ("--seed -1", "seed is -1; give a number from 0"),
        ("--grid 1290", "GB; give a smaller --grid"),
        ("--redshift 60", "redshift is 60.0; give one from 0 to less than 49"),
        ("--device cuda", "finds no GPU; give --device cpu"),
        (f"--output {tmp_path / 'file'}", "give --overwrite"),
        (f"--output {tmp_path / 'file' / 'box.h5'}", "File exists"),
    ):
        assert words in refusal(simulate.main, [*command(tmp_path / "box.h5"), *arguments.split()], capsys)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    assert "free some space" in refusal(simulate.main, command(tmp_path / "box.h5"), capsys)
    assert (os.listdir(tmp_path), (tmp_path / "file").read_text()) == (["file"], "precious")
