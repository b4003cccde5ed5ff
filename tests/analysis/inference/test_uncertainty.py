"""Standard deviations of predictions: their calibration, the file, several checkpoints, and their evaluation."""

import json
import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from log_lines import messages, refusal
from processes import run_ranks
from reference_samples import ALONE
from sample_results import draw_nothing
from trainings import predict_on
from volume_files import contents, write_volume

import evaluate
import predict
from analysis.evaluation import results
from analysis.evaluation.base import Compared
from analysis.evaluation.statistics import DENSITIES, Coverage
from analysis.inference.uncertainty import FILE, fit
from analysis.slabs import SlabFields, Slabs
from utils.config.channels import known_channels
from utils.run.checkpoint import read_weights
from utils.volumes.attributes import stated_channels


def test_the_fit_finds_how_errors_grow_with_the_spread() -> None:
    """Without any spread, as that of an equivariant network under symmetries, the errors alone are left."""
    generator = torch.Generator().manual_seed(0)
    variances = torch.randn(3, 400_000, generator=generator).mul(1.5).exp() * torch.tensor([[1e-4], [1e-6], [0.0]])
    expected = torch.tensor([[3.0], [0.5], [1.0]]) * variances + torch.tensor([[1e-5], [1e-6], [4e-4]])
    factors, floors = fit(expected * torch.randn(expected.shape, generator=generator).square(), variances)
    np.testing.assert_allclose(factors, [3.0, 0.5, 0.0], rtol=0.05)
    np.testing.assert_allclose(floors, [1e-5, 1e-6, 4e-4], rtol=0.05)


def test_coverage_of_known_errors() -> None:
    """Errors of the stated size are covered to 68 and 95 %; three times that size, in dense cells, to 26 and 49 %."""
    generator = np.random.default_rng(0)
    channels, slabs = known_channels("targets", 5), Slabs((48, 48, 48), ALONE)
    sigma = np.exp(generator.normal(-5, 1, (5, *slabs.shape))).astype(np.float32)
    predicted = generator.normal(0, 0.1, sigma.shape).astype(np.float32)
    dense = predicted[0] > 0  # above the mean density
    target = predicted + np.where(dense, 3, 1) * sigma * generator.normal(size=sigma.shape)
    reads = [slabs.stored(torch.from_numpy(values).float()) for values in (sigma, predicted, target)]
    compared = Compared(channels, channels, None, SlabFields(reads[1], reads[1], reads[2]), slabs, reads[0])
    shares = Coverage.compute(compared).shares
    counts = np.bincount(np.digitize(14 * predicted[0].flatten(), np.log(DENSITIES)), minlength=len(DENSITIES) + 1)
    for number, count in enumerate(counts):
        expected = (0.2611, 0.4865) if DENSITIES[number - 1] >= 1 and number else (0.6827, 0.95)
        np.testing.assert_allclose(shares[:, :, number], np.repeat([expected], 5, 0).T, atol=3 / np.sqrt(count))
    np.testing.assert_allclose(shares[:, :, -1], (shares[:, :, :-1] * counts).sum(2) / counts.sum(), rtol=1e-9)


@pytest.fixture(scope="module")
def files(trained_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two networks of one training run, whose validation volume is val.h5 there, and a box to predict."""
    folder, content = tmp_path_factory.mktemp("uncertainty"), read_weights(trained_run)
    write_volume(folder / "val.h5", seed=5)
    write_volume(folder / "box.h5", seed=7)
    config = content["config"] | {"val_path": str(folder / "val.h5")}
    density, *others = config["channels"]["targets"]
    other = config["channels"] | {"targets": [density | {"scale": 10.0}, *others]}
    for name, factor in (("a", 1.0), ("b", 1.1), ("other", 1.0)):
        network = {key: factor * tensor for key, tensor in content["network"].items()}
        stated = {"config": config | ({"channels": other} if name == "other" else {})}
        (folder / name).mkdir()
        torch.save(content | stated | {"network": network}, folder / name / "weights.pt")
    return folder


def predicted(files: Path, output: Path, *flags: str, networks: str = "a") -> dict[str, np.ndarray]:
    predict.main(command_line(files, output, *flags, networks=networks))
    return contents(output)


def command_line(files: Path, output: Path, *flags: str, networks: str = "a") -> list[str]:
    checkpoints = [str(files / name) for name in networks.split()]
    return ["--checkpoint", *checkpoints, f"--input={files / 'box.h5'}", f"--output={output}", "--device=cpu", *flags]


def test_calibrated_deviations_have_the_same_bits_on_any_ranks_and_blocks(files: Path, tmp_path: Path) -> None:
    """The calibration is measured once, by any ranks. Physical deviations of a logarithm are those of ln(value)."""
    plain = predicted(files, tmp_path / "plain.h5", "--symmetries=8")
    alone = predicted(files, tmp_path / "alone.h5", "--uncertainty", "--physical")
    np.testing.assert_array_equal(alone["Hydro"], plain["Hydro"])
    stored = (files / "a" / FILE).stat().st_mtime_ns
    predicted(files, tmp_path / "again.h5", "--uncertainty")
    assert (files / "a" / FILE).stat().st_mtime_ns == stored
    (files / "a" / FILE).unlink()
    run_ranks(predict_on, 2, command_line(files, tmp_path / "two.h5", "--uncertainty", "--physical", "--block=8"))
    with h5py.File(tmp_path / "two.h5") as file:
        for name, values in alone.items():
            np.testing.assert_array_equal(file[name][...], values)
        stated = {key: file["Hydro_std"].attrs[key] for key in ("factors", "floors", "volume")}
        channels = stated_channels(file["Hydro"])
        assert list(file["Hydro_physical_std"].attrs["units"]) == ["ln of the value", *["km/s"] * 3, "ln of the value"]
    assert stated["volume"] == str(files / "val.h5")
    for channel, physical, values in zip(channels, alone["Hydro_physical_std"], alone["Hydro_std"], strict=True):
        np.testing.assert_allclose(physical, channel.scale * values, rtol=1e-5)
    spread = np.square(alone["Hydro_std"]).reshape(5, -1)
    assert (spread.min(1) >= np.float32(stated["floors"]) * (1 - 1e-5)).all()
    assert (spread.max(1) > spread.min(1)).all()


def test_several_networks_have_a_mean_and_a_calibration_of_their_own(files: Path, tmp_path: Path) -> None:
    """Their spread includes that between the networks."""
    every = predicted(files, tmp_path / "both.h5", "--uncertainty", networks="a b")
    single = [predicted(files, tmp_path / f"{name}.h5", "--uncertainty", networks=name)["Hydro"] for name in "ab"]
    np.testing.assert_allclose(every["Hydro"], np.mean(single, axis=0), atol=1e-6)
    stored = {len(json.loads(key)): value for key, value in json.loads((files / "a" / FILE).read_text()).items()}
    assert stored.keys() == {8, 9}, "six options, the volume, and a digest per network"
    variances = (np.square(every["Hydro_std"]) - np.reshape(stored[9]["floors"], (5, 1, 1, 1))).mean((1, 2, 3))
    between = np.square(np.subtract(*single) / 2).mean((1, 2, 3)) * stored[9]["factors"]
    assert (variances > 0.9 * between).all()
    with h5py.File(tmp_path / "both.h5") as file:
        assert [Path(path).parent.name for path in file.attrs["checkpoint"]] == ["a", "b"]
        assert len(file.attrs["checkpoint_density_factor"]) == len(file.attrs["checkpoint_sha256"]) == 2


def test_each_of_several_networks_is_checked(files: Path, tmp_path: Path, capsys: Any) -> None:
    """Fixed: only the first one was, and filters of different versions were a traceback."""
    content = read_weights(files / "b" / "weights.pt")
    old = {"density_filter": content["density_filter"][:5], "simulation": {"redshift": 9.0}}
    for name, change in (("old", old), ("none", {"density_filter": None, "density_factor": None})):
        (files / name).mkdir()
        torch.save(content | change, files / name / "weights.pt")
    with h5py.File(files / "box.h5", "r+") as file:
        file.attrs["redshift"] = 3.0
    predicted(files, tmp_path / "two.h5", networks="a old")
    assert "redshift 3.0 instead of 9.0; see" in capsys.readouterr().err
    with h5py.File(tmp_path / "two.h5") as file:
        assert "redshift 3.0 instead of 9.0" in file.attrs["input_differences"]
        assert [len(values) for values in json.loads(file.attrs["checkpoint_density_filter"])] == [7, 5]
    line = refusal(predict.main, command_line(files, tmp_path / "none.h5", networks="a none"), capsys)
    assert "has no calibration; give --no_calibration" in line


def test_a_calibration_of_another_form_is_measured_again(files: Path, tmp_path: Path, capsys: Any) -> None:
    """A fixed bug: valid JSON that the program does not write, as after an edit by hand, was a traceback."""
    path = files / "b" / FILE
    path.unlink(missing_ok=True)
    expected = predicted(files, tmp_path / "gas.h5", "--uncertainty", networks="b")["Hydro_std"]
    ((key, measured),) = json.loads(path.read_text()).items()
    for form in ([3], {key: {}}, {key: measured | {"floors": ["x"] * 5}}, {key: measured | {"factors": []}}):
        path.write_text(json.dumps(form))
        again = predicted(files, tmp_path / "again.h5", "--uncertainty", "--overwrite", networks="b")["Hydro_std"]
        np.testing.assert_array_equal(again, expected)
        assert f"{path} is ignored: it is damaged; calibrating again" in capsys.readouterr().err
        assert json.loads(path.read_text()) == {key: measured}


def test_each_volume_has_a_calibration_of_its_own(files: Path, tmp_path: Path, capsys: Any) -> None:
    """Fixed: that of a given volume replaced that of the validation volume, even if it was the predicted box."""
    box, val, other = files / "box.h5", files / "val.h5", write_volume(tmp_path / "other.h5", seed=7, redshift=4.0)
    (files / "b" / FILE).unlink(missing_ok=True)
    predicted(files, tmp_path / "gas.h5", f"--uncertainty={box}", networks="b")
    lines = capsys.readouterr().err
    assert f"{box} is the volume of the calibration: its coverage is right by construction" in lines
    for volume, earlier, *flags in (
        (val, False, "--uncertainty", f"--input={other}"),
        (box, True, f"--uncertainty={box}"),
        (val, True, "--uncertainty"),
    ):
        predicted(files, tmp_path / "gas.h5", "--overwrite", *flags, networks="b")
        lines = capsys.readouterr().err
        known = f"were calibrated on {volume} before" if earlier else f"Calibrating the standard deviations on {volume}"
        assert known in lines
        with h5py.File(tmp_path / "gas.h5") as file:
            assert file["Hydro_std"].attrs["volume"] == str(volume)
        assert ("redshift 4.0 instead of 2.0" in lines) == (not earlier)
        assert (f"do not hold on {other}, unless they were calibrated on such a box" in lines) == (not earlier)
    os.utime(box, (0, 0))
    predicted(files, tmp_path / "gas.h5", "--overwrite", f"--uncertainty={box}", networks="b")
    assert f"Calibrating the standard deviations on {box}" in capsys.readouterr().err, "it has changed"


@pytest.mark.parametrize(
    ("networks", "flags", "says"),
    [
        ("b", "--uncertainty=FILES/no.h5", "FILES/no.h5 does not exist; name a volume with targets: --uncertainty VOL"),
        ("a", "--uncertainty --format=nyx", "--format nyx has no standard deviations; remove --uncertainty"),
        ("a other", "", "channels or transforms of FILES/other/weights.pt and FILES/a/weights.pt differ"),
    ],
)
def test_what_cannot_be_calibrated_is_refused(networks, flags, says, files: Path, tmp_path: Path, capsys: Any) -> None:
    """So is a checkpoint without a stored calibration whose validation volume is gone."""
    given = [flag.replace("FILES", str(files)) for flag in flags.split()]
    line = refusal(predict.main, command_line(files, tmp_path / "gas.h5", *given, networks=networks), capsys)
    assert says.replace("FILES", str(files)) in line
    assert [*tmp_path.iterdir()] == []


def test_evaluate_draws_the_coverage_of_a_file(files: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    draw_nothing(monkeypatch)
    for flags, has in (("--uncertainty", True), ("--symmetries=8", False)):
        gas = predicted(files, tmp_path / "gas.h5", flags, "--overwrite", networks="a b")
        arguments = [f"--prediction={tmp_path / 'gas.h5'}", f"--input={files / 'box.h5'}", "--device=cpu"]
        evaluate.main([*arguments, f"--output={tmp_path / 'report'}", "--overwrite"])
        summary = json.loads((tmp_path / "report" / "evaluation.json").read_text())
        assert (tmp_path / "report" / "coverage.png").exists() == ("coverage" in summary) == has
        if has:
            with h5py.File(files / "box.h5") as file:
                inside = np.abs(gas["Hydro"] - file["Hydro"][...]) <= gas["Hydro_std"]
            assert summary["coverage"].pop("densities, then all") == [*DENSITIES]
            shares = [part["68 %"][-1] for part in summary["coverage"].values()]
            np.testing.assert_allclose(shares, inside.mean((1, 2, 3)), rtol=1e-4)
            evaluated = results.load(tmp_path / "report" / "evaluation.npz")
            (temperature,) = evaluated.statistics["coverage"].shares[:, -1:, -1].T
            rows = [line.split()[-2:] for line in messages(capsys.readouterr().err) if line.startswith("temperature ")]
            assert [f"{share:.1%}" for share in temperature] in rows
