"""The simulation against linear theory, its conservation laws and symmetries, the gas closure, and the file."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest

pytest.importorskip("colossus", reason="colossus, which simulations need, is not installed")

from utils.channels import input_channels, target_channels
from utils.config import Transform
from utils.data import fourier, gas, linear_theory, particle_mesh, simulate
from utils.data.simulate import SimulationOptions
from utils.errors import UserError

LARGE = SimulationOptions(grid=64, box_size=512.0, redshift=1.0, seed=1, fixed_amplitude=True, threads=2)
SMALL = SimulationOptions(grid=48, seed=3, threads=2)


@pytest.fixture(scope="module")
def large() -> tuple[np.ndarray, np.ndarray]:
    """Physical fields of a box whose long waves are linear."""
    return simulate.simulate_fields(LARGE)


@pytest.fixture(scope="module")
def small() -> tuple[np.ndarray, np.ndarray]:
    """Physical fields of a small box with the default cell, redshift and steps."""
    return simulate.simulate_fields(SMALL)


@pytest.fixture(scope="module")
def channels(small: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The small box as a network sees it."""
    return gas.to_channels(small[0].copy()), gas.to_channels(small[1].copy())


def plane_wave(grid: int, axis: int, amplitude: float) -> tuple[np.ndarray, float]:
    """Displacement [3, n, n, n] along `axis` with div = amplitude cos(k x), and k."""
    k = 2 * np.pi * 2 / grid
    shape = [1, 1, 1]
    shape[axis] = grid
    field = np.zeros((3, grid, grid, grid), np.float32)
    field[axis] = (amplitude / k * np.sin(k * np.arange(grid))).astype(np.float32).reshape(shape)
    return field, k


# --- against linear theory -----------------------------------------------------------------------------------------


def test_large_scale_power_is_that_of_linear_theory(large: tuple[np.ndarray, np.ndarray]) -> None:
    k, power = fourier.power_spectrum(large[0][0] - 1, LARGE.box_length)
    linear = linear_theory.linear_power(linear_theory.make_cosmology(LARGE.cosmology), k, LARGE.redshift)
    resolved = k * LARGE.cell < 0.4  # 8 Mpc/h cells: beyond, the mesh's own window is seen
    assert resolved.sum() >= 4
    np.testing.assert_allclose(power[resolved] / linear[resolved], 1, atol=0.1)


def test_initial_modes_have_the_linear_power() -> None:
    options = SimulationOptions(grid=32, box_size=100.0, seed=5, fixed_amplitude=True)
    cosmology = linear_theory.make_cosmology(options.cosmology)
    modes = simulate.initial_modes(options, cosmology)
    k, power = fourier.power_spectrum(fourier.backward(modes, 32, 1), 100.0)
    np.testing.assert_allclose(power / linear_theory.linear_power(cosmology, k), 1, atol=0.05)  # k is a shell's mean


def test_random_amplitudes_scatter_about_the_linear_power() -> None:
    options = SimulationOptions(grid=32, box_size=100.0, seed=5)
    cosmology = linear_theory.make_cosmology(options.cosmology)
    modes = simulate.initial_modes(options, cosmology)
    k, power = fourier.power_spectrum(fourier.backward(modes, 32, 1), 100.0)
    ratio = power / linear_theory.linear_power(cosmology, k)
    assert np.ptp(ratio[:4]) > 0.05
    assert ratio[4:].mean() == pytest.approx(1, abs=0.05)


def test_divergence_of_velocity_obeys_continuity(large: tuple[np.ndarray, np.ndarray]) -> None:
    """div v = -a H f delta for linear waves: amplitude and phase, and only with components in their order."""
    contrast, velocity = large[0][0] - 1, large[0][1:]
    cosmology, z = linear_theory.make_cosmology(LARGE.cosmology), LARGE.redshift
    expected = -linear_theory.hubble(cosmology, z) / (1 + z) * linear_theory.growth_rate(cosmology, z)
    k = fourier.wavenumbers(LARGE.grid)
    size = np.sqrt(sum(component**2 for component in k))
    low = (size > 0) & (size < 0.4)

    def low_divergence(components: np.ndarray) -> np.ndarray:
        transformed = [np.fft.rfftn(component) for component in components]
        terms = [(1j * wave * part)[low] for wave, part in zip(k, transformed, strict=True)]
        return np.sum(terms, axis=0) / LARGE.cell

    source = expected * np.fft.rfftn(contrast)[low]

    def correlation(found: np.ndarray) -> float:
        product = np.real(np.vdot(source, found))
        return float(product / np.sqrt(np.vdot(source, source).real * np.vdot(found, found).real))

    found = low_divergence(velocity)
    assert correlation(found) > 0.97
    assert np.linalg.norm(found) / np.linalg.norm(source) == pytest.approx(1, abs=0.1)
    assert abs(correlation(low_divergence(velocity[[1, 2, 0]]))) < 0.5


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_plane_wave_grows_linearly(axis: int) -> None:
    cosmology = linear_theory.make_cosmology("planck18")
    clock = linear_theory.GrowthClock(cosmology, 24.0, 1.0, 10)
    start, end = clock.times[0], clock.times[-1]
    growing, _ = plane_wave(32, axis, amplitude=-0.5)
    particles = particle_mesh.Particles(np.float32(start) * growing, growing.copy(), 32)
    particle_mesh.evolve(particles, clock)

    def amplitude(found: np.ndarray) -> float:  # of the wave itself; the lattice's discreteness adds short waves
        return float(np.vdot(found, growing) / np.vdot(growing, growing))

    assert amplitude(particles.displacement) == pytest.approx(end, rel=0.03)
    assert amplitude(particles.velocity) == pytest.approx(1, rel=0.03)


def test_plane_wave_from_rest_grows_and_decays_as_in_einstein_de_sitter() -> None:
    """Displaced at rest it is 3/5 growing and 2/5 decaying mode: the force and the friction are both seen."""
    clock = linear_theory.GrowthClock(linear_theory.make_cosmology("EdS"), 9.0, 1.0, 40)
    displaced, _ = plane_wave(32, 0, amplitude=-0.01)
    particles = particle_mesh.Particles(displaced.copy(), np.zeros_like(displaced), 32)
    particle_mesh.evolve(particles, clock)
    ratio = clock.times[-1] / clock.times[0]
    expected = 0.6 * ratio + 0.4 * ratio**-1.5
    found = np.vdot(particles.displacement, displaced) / np.vdot(displaced, displaced)
    assert found == pytest.approx(expected, rel=0.03)


def test_second_order_displacement_of_two_crossed_waves() -> None:
    """For phi = cos x + cos y the source is cos x cos y: 2LPT by hand (Scoccimarro 1998)."""
    n, k, amplitude, time = 16, 2 * np.pi / 16, 0.3, 0.5
    x, y = np.meshgrid(k * np.arange(n), k * np.arange(n), indexing="ij")
    contrast = np.broadcast_to((amplitude * (np.cos(x) + np.cos(y)))[..., None], (n, n, n)).astype(np.float32)
    particles = particle_mesh.lpt_particles(fourier.forward(contrast, 1), n, time)
    first = -amplitude * np.sin(x) / k
    # laplacian phi2 = phi,xx phi,yy = A^2 cos x cos y, so d phi2/dx = A^2 / (2 k) sin x cos y
    second = -3 / 7 * amplitude**2 / (2 * k) * np.sin(x) * np.cos(y)
    np.testing.assert_allclose(
        particles.displacement[0], np.repeat((time * first + time**2 * second)[..., None], n, 2), atol=1e-5
    )
    np.testing.assert_allclose(
        particles.velocity[0], np.repeat((first + 2 * time * second)[..., None], n, 2), atol=1e-5
    )
    assert np.abs(particles.displacement[2]).max() < 1e-5


# --- conservation --------------------------------------------------------------------------------------------------


def test_mass_is_conserved(small: tuple[np.ndarray, np.ndarray]) -> None:
    dark, baryons = small
    assert dark[0].mean(dtype=np.float64) == pytest.approx(1, abs=1e-6)
    assert baryons[0].mean(dtype=np.float64) == pytest.approx(1, abs=1e-6)


def test_forces_of_the_particles_on_each_other_cancel() -> None:
    positions = np.random.default_rng(0).uniform(0, 16, (3, 4096)).astype(np.float32)
    density = particle_mesh.cic_deposit(positions, 16)[0]
    force = particle_mesh.cic_interpolate(particle_mesh.gravity(density), positions)
    assert np.abs(force.mean(axis=1, dtype=np.float64)).max() < 1e-5 * force.std()


def test_gravity_of_a_plane_wave() -> None:
    n, k = 32, 2 * np.pi / 32
    density = np.broadcast_to(1 + 0.1 * np.cos(k * np.arange(n))[None, :, None], (n, n, n)).astype(np.float32)
    force = particle_mesh.gravity(density)
    expected = np.broadcast_to(-0.1 / k * np.sin(k * np.arange(n))[None, :, None], (n, n, n))
    np.testing.assert_allclose(force[1], expected, atol=0.01 * np.abs(expected).max())
    assert np.abs(force[[0, 2]]).max() < 1e-6


# --- cloud in cell -------------------------------------------------------------------------------------------------


def test_deposit_by_hand() -> None:
    positions = np.array([[1.25], [2.0], [3.5]], np.float32)
    density = particle_mesh.cic_deposit(positions, 8)[0]
    assert np.count_nonzero(density) == 4
    assert density[1, 2, 3] == density[1, 2, 4] == 0.375
    assert density[2, 2, 3] == density[2, 2, 4] == 0.125


@pytest.mark.parametrize("place", [7.75, -0.25, 15.75])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_deposit_wraps(place: float, axis: int) -> None:
    positions = np.zeros((3, 1), np.float32)
    positions[axis] = place
    line = particle_mesh.cic_deposit(positions, 8)[0].sum(axis=tuple(other for other in range(3) if other != axis))
    np.testing.assert_array_equal(line, [0.75, 0, 0, 0, 0, 0, 0, 0.25])


def test_deposit_of_particles_in_any_order_is_that_of_one_by_one() -> None:
    rng = np.random.default_rng(1)
    positions = rng.uniform(-20, 20, (3, 300)).astype(np.float32)
    values = rng.standard_normal(300).astype(np.float32)
    found = particle_mesh.cic_deposit(positions, 8, (None, values), threads=2)
    expected = np.zeros((2, 8, 8, 8))
    for place, value in zip(positions.T.astype(np.float64), values, strict=True):
        cell = np.floor(place).astype(int)
        for corner in np.ndindex(2, 2, 2):
            weight = np.prod(np.where(corner, place - cell, 1 - (place - cell)))
            x, y, z = (cell + corner) % 8
            expected[:, x, y, z] += weight * np.array([1, value])
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_interpolation_by_hand_wraps_and_is_the_transpose_of_the_deposit() -> None:
    field = np.zeros((1, 8, 8, 8), np.float32)
    field[0, 0, 2, 3] = 1.0
    positions = np.array([[0.0, 7.5, -0.25, 4.0], [2.0, 2.0, 2.0, 2.0], [3.0, 3.0, 3.5, 3.0]], np.float32)
    np.testing.assert_array_equal(particle_mesh.cic_interpolate(field, positions)[0], [1.0, 0.5, 0.375, 0.0])
    fields = np.random.default_rng(2).standard_normal((1, 8, 8, 8)).astype(np.float32)
    product = np.vdot(particle_mesh.cic_deposit(positions, 8)[0], fields)
    assert product == pytest.approx(particle_mesh.cic_interpolate(fields, positions).sum(), rel=1e-5)


# --- determinism ---------------------------------------------------------------------------------------------------


def test_same_seed_gives_the_same_bits_for_any_number_of_threads() -> None:
    results = [
        simulate.simulate(SimulationOptions(grid=24, seed=7, n_steps=4, threads=threads)) for threads in (1, 2, 3, 1)
    ]
    for nbody, hydro in results[1:]:
        assert nbody.tobytes() == results[0][0].tobytes()
        assert hydro.tobytes() == results[0][1].tobytes()


def test_other_seed_gives_another_box() -> None:
    one, other = (simulate.simulate(SimulationOptions(grid=16, seed=seed, n_steps=2))[0] for seed in (1, 2))
    assert abs(np.corrcoef(one[0].ravel(), other[0].ravel())[0, 1]) < 0.3


@pytest.mark.parametrize(("grid", "particles"), [(8, 8), (9, 8), (17, 24)])
def test_odd_and_small_grids_and_other_particle_numbers(grid: int, particles: int) -> None:
    options = SimulationOptions(grid=grid, particles=particles, n_steps=2)
    dark, baryons = simulate.simulate_fields(options)
    assert dark.shape == (4, grid, grid, grid)
    assert dark[0].mean(dtype=np.float64) == pytest.approx(1, abs=1e-6)
    assert np.isfinite(dark).all()
    assert np.isfinite(baryons).all()


# --- channels ------------------------------------------------------------------------------------------------------


def test_channels_are_float32_finite_and_about_one(channels: tuple[np.ndarray, np.ndarray]) -> None:
    for volume, count in zip(channels, (4, 5), strict=True):
        assert volume.shape == (count, 48, 48, 48)
        assert volume.dtype == np.float32
        assert volume.flags.c_contiguous
        assert np.isfinite(volume).all()
        assert np.abs(volume).max() < 1.5
        assert np.mean(np.abs(volume) > 1) < 1e-3


def test_channels_vary_and_copying_the_input_is_not_the_answer(channels: tuple[np.ndarray, np.ndarray]) -> None:
    nbody, hydro = channels
    assert (hydro.std(axis=(1, 2, 3)) > 0.03).all()
    difference = np.abs(nbody - hydro[:4]).mean(axis=(1, 2, 3))
    assert difference[0] > 0.015
    assert (difference[1:] > 0.005).all()


def test_transforms_are_undone(small: tuple[np.ndarray, np.ndarray], channels: tuple[np.ndarray, np.ndarray]) -> None:
    (dark, baryons), (nbody, hydro) = small, channels
    np.testing.assert_allclose(np.exp(14 * nbody[0]), np.maximum(dark[0], gas.DENSITY_FLOOR), rtol=1e-5)
    for channel, values, expected in zip(target_channels(5, Transform()), hydro, baryons, strict=True):
        np.testing.assert_allclose(channel.to_physical(values), expected, rtol=1e-4)
    for channel, values, expected in zip(input_channels(4, Transform())[1:], nbody[1:], dark[1:], strict=True):
        np.testing.assert_allclose(channel.to_physical(values), expected, rtol=1e-5)


def test_to_channels_is_its_parts() -> None:
    fields = np.random.default_rng(0).uniform(1, 100, (5, 4, 4, 4)).astype(np.float32)
    found = gas.to_channels(fields.copy())
    np.testing.assert_array_equal(found[0], gas.density_to_channel(fields[0]))
    np.testing.assert_array_equal(found[1:4], gas.velocity_to_channel(fields[1:4]))
    np.testing.assert_array_equal(found[4], gas.temperature_to_channel(fields[4]))


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_velocity_component_is_along_its_array_axis(axis: int) -> None:
    """A compression along one array axis shows in that component, flowing towards the overdensity."""
    wave, k = plane_wave(16, axis, amplitude=-0.1)
    fields = particle_mesh.mass_and_momentum(particle_mesh.Particles(wave, wave, 16))
    across = tuple(other for other in range(3) if other != axis)
    profile = fields[0].mean(axis=across)
    assert 2 * np.mean((profile - 1) * np.cos(k * np.arange(16))) == pytest.approx(0.1, rel=0.1)
    slope = np.gradient(fields[1 + axis].mean(axis=across))
    assert np.corrcoef(slope, profile)[0, 1] < -0.9
    assert np.abs(np.delete(fields[1:], axis, axis=0)).max() < 1e-6


def test_empty_cells_get_their_neighbours_velocity() -> None:
    density = np.ones((16, 16, 16), np.float32)
    density[5:8, 5:8, 5:8] = 0
    velocity = gas.mass_weighted_velocity(density, np.stack([density * v for v in (100, -50, 0)]).astype(np.float32))
    for component, value in zip(velocity, (100, -50, 0), strict=True):
        np.testing.assert_allclose(component, value, atol=1e-3)


# --- the gas -------------------------------------------------------------------------------------------------------


def test_gas_is_smoother_than_dark_matter_and_equal_on_large_scales(small: tuple[np.ndarray, np.ndarray]) -> None:
    _, dark = fourier.power_spectrum(small[0][0] - 1, SMALL.box_length)
    k, baryons = fourier.power_spectrum(small[1][0] - 1, SMALL.box_length)
    ratio = baryons / dark
    np.testing.assert_allclose(ratio, np.exp(-((k * gas.FILTER_LENGTH) ** 2)), atol=0.05)
    assert ratio[0] > 0.9
    assert ratio[-1] < 0.1


def test_temperature_rises_with_density(small: tuple[np.ndarray, np.ndarray]) -> None:
    density, temperature = small[1][0], small[1][4]
    edges = np.quantile(density, np.linspace(0, 1, 9))
    medians = [np.median(temperature[(density >= a) & (density < b)]) for a, b in itertools.pairwise(edges)]
    assert (np.diff(medians) > 0).all()
    floor = gas.MEAN_DENSITY_TEMPERATURE * density ** (gas.ADIABATIC_INDEX - 1)
    assert (temperature > 0.999 * floor).all()
    assert 0.005 < np.mean(temperature > 2 * floor) < 0.5  # shocks are seen, and are not everywhere


def test_temperature_rises_where_flows_converge() -> None:
    n = 24
    density = np.ones((n, n, n), np.float32)
    velocity = np.zeros((3, n, n, n), np.float32)
    velocity[1] = (np.where(np.arange(n) < n // 2, 400, -400).astype(np.float32))[
        None, :, None
    ]  # meet at n/2, part at 0
    temperature = gas.gas_fields(density, velocity, 0.5, 1 / 3, 300.0)[4]
    assert temperature[:, n // 2].min() > 1e5
    np.testing.assert_allclose(temperature[:, 0], gas.MEAN_DENSITY_TEMPERATURE, rtol=1e-3)
    assert gas.shock_temperature(-velocity, 0.5, 1 / 3, 300.0)[:, n // 2].max() == 0


def test_closure_commutes_with_shifts(small: tuple[np.ndarray, np.ndarray]) -> None:
    dark, baryons = small
    moved = np.roll(dark, (5, -7, 11), axis=(1, 2, 3))
    found = gas.gas_fields(moved[0], moved[1:], SMALL.cell, *_expansion(SMALL))
    np.testing.assert_allclose(found, np.roll(baryons, (5, -7, 11), axis=(1, 2, 3)), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(("axes", "signs"), [((1, 0, 2), (1, 1, 1)), ((0, 1, 2), (1, -1, 1)), ((2, 0, 1), (-1, 1, -1))])
def test_closure_commutes_with_the_cubes_symmetries(
    small: tuple[np.ndarray, np.ndarray], axes: tuple[int, ...], signs: tuple[int, ...]
) -> None:
    """New axis i is old axis axes[i], mirrored where signs[i] is -1; the vectors' components move along."""

    def turned(fields: np.ndarray) -> np.ndarray:
        result = fields.copy()
        for axis, (old, sign) in enumerate(zip(axes, signs, strict=True)):
            result[1 + axis] = sign * fields[1 + old]
        result = result.transpose(0, *(1 + old for old in axes))
        return np.flip(result, tuple(1 + axis for axis in range(3) if signs[axis] < 0))

    dark, baryons = small
    moved = np.ascontiguousarray(turned(dark))
    found = gas.gas_fields(moved[0], moved[1:], SMALL.cell, *_expansion(SMALL))
    np.testing.assert_allclose(found, turned(baryons), rtol=1e-4, atol=1e-2)


def _expansion(options: SimulationOptions) -> tuple[float, float]:
    cosmology = linear_theory.make_cosmology(options.cosmology)
    return 1 / (1 + options.redshift), linear_theory.hubble(cosmology, options.redshift)


# --- the file and the command --------------------------------------------------------------------------------------


def command(path: Path, *more: str) -> list[str]:
    return ["--output", str(path), "--grid", "8", "--n_steps", "1", "--threads", "1", *more]


def test_command_writes_the_file_of_the_contract(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "box.h5"
    assert simulate.main(command(path, "--seed", "4")) == 0
    assert os.listdir(path.parent) == ["box.h5"]
    assert str(path) in capsys.readouterr().out
    nbody, hydro = simulate.simulate(SimulationOptions(grid=8, n_steps=1, seed=4))
    with h5py.File(path) as file:
        for name, expected in (("Nbody", nbody), ("Hydro", hydro)):
            assert file[name].dtype == np.float32
            assert file[name].chunks is None
            assert file[name].id.get_offset() is not None  # contiguous: can be mapped
            np.testing.assert_array_equal(file[name][:], expected)
        attributes = dict(file.attrs)
    assert attributes["seed"] == 4
    assert attributes["box_size_mpc_h"] == 4.0
    assert attributes["cosmology"] == "planck18"
    assert attributes["cosmology_Om0"] == pytest.approx(0.3111)
    assert attributes["velocity_scale_km_s"] == gas.VELOCITY_SCALE
    assert attributes["format_version"] == simulate.FORMAT_VERSION
    assert "utils.data.simulate" in attributes["made_by"]


def test_existing_output_is_kept_without_overwrite(tmp_path: Path) -> None:
    path = tmp_path / "box.h5"
    path.write_text("precious")
    with pytest.raises(SystemExit) as stop:
        simulate.main(command(path))
    assert stop.value.code == 2
    assert path.read_text() == "precious"
    assert simulate.main(command(path, "--overwrite")) == 0
    assert h5py.is_hdf5(path)
    assert os.listdir(tmp_path) == ["box.h5"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_failed_write_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(os, "fsync", fail)
    volume = np.zeros((4, 8, 8, 8), np.float32)
    with pytest.raises(UserError if isinstance(error, OSError) else KeyboardInterrupt):
        simulate.write(tmp_path / "box.h5", volume, volume, {})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--grid", "4"], "grid is 4; give at least 8"),
        (["--grid", "many"], "invalid int value"),
        (["--box_size", "-1"], "box_size is -1.0; give a positive length"),
        (["--box_size", "nan"], "box_size is nan"),
        (["--seed", "-1"], "seed is -1"),
        (["--particles", "2"], "particles is 2"),
        (["--n_steps", "0"], "n_steps is 0"),
        (["--threads", "0"], "threads is 0"),
        (["--cosmology", "plank18"], "did you mean planck18?"),
        (["--cosmology", "xyz"], "choose one of"),
        (["--redshift", "30"], "start_redshift is 24.0; give one above redshift = 30.0"),
        (["--redshift", "-0.5"], "redshift is -0.5"),
        (["--start_redshift", "1000"], "up to 200"),
        (["--sed", "1"], "--help"),
    ],
)
def test_bad_options_are_one_line_and_exit_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        simulate.main([*command(tmp_path / "box.h5"), *arguments])
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert message.count("\n") == 1
    assert words in message
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("output", ["", "file/box.h5"])
def test_output_that_cannot_be_written_is_refused_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], output: str
) -> None:
    (tmp_path / "file").write_text("a file where a directory is needed")
    with pytest.raises(SystemExit) as stop:
        simulate.main(command(tmp_path / output))
    assert stop.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_output_without_room_is_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(SystemExit) as stop:
        simulate.main(command(tmp_path / "box.h5"))
    assert stop.value.code == 2
    assert "free some space" in capsys.readouterr().err


def test_command_in_its_own_process(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    line = [sys.executable, "-m", "utils.data.simulate", "--output", str(tmp_path), "--grid", "8"]
    done = subprocess.run(line, cwd=root, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: output {tmp_path} is a directory; give the name of a file\n"
