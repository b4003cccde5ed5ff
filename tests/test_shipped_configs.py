"""Tests of the shipped configs, and of files with exactly the keys of the tutorial and of its later edition."""

from pathlib import Path
from typing import Any

import pytest
from trainings import YAML

import train
from utils.config import Config, load, read_file, to_yaml
from utils.optim.schedules import Schedule

# name: global_batch_size, Nsamples, Nsamples_val, num_epochs, data_loader_config, AMP + apex. The fast ones have this
# project's loader, and its kernels in place of the compiler.
TUTORIAL: dict[str, tuple[int, int, int, int, str, bool]] = {
    "base": (64, 65536, 8192, 10, "lowmem", False),
    "short": (64, 4096, 512, 4, "lowmem", False),
    "short_opt": (64, 4096, 512, 4, "auto", True),
    "bs64_opt": (64, 65536, 8192, 10, "auto", True),
    "bs256_opt": (256, 65536, 8192, 20, "auto", True),
    "bs512_test": (512, 65536, 8192, 10, "auto", True),
    "bs512_opt": (512, 65536, 8192, 40, "auto", True),
    "bs2048_opt": (2048, 65536, 8192, 160, "auto", True),
    "bs8192_opt": (8192, 65536, 8192, 320, "auto", True),
}
TUTORIAL_KEYS = """
base: &base
  {weight_init: {conv_init: 'normal', conv_scale: 0.02, conv_bias: 0.}, lambda_rho: 0, full_scale: True,
  global_batch_size: 64, base_batch_size: 64, Nsamples: 65536, Nsamples_val: 8192, num_epochs: 10,
  enable_amp: False, enable_apex: False, enable_benchy: False, enable_jit: False, expdir: '/logs',
  lr_schedule: {scaling: 'sqrt', start_lr: 2.E-4, end_lr: 0., warmup_steps: 128}, data_loader_config: 'lowmem',
  box_size: [1024, 512], data_size: 64, num_data_workers: 2, N_out_channels: 5,
  train_path: '/data/train.h5', train_path_npy_data: '/data/train_data.npy',
  train_path_npy_label: '/data/train_label.npy', val_path: '/data/val.h5', val_path_npy_data: '/data/val_data.npy',
  val_path_npy_label: '/data/val_label.npy', use_cache: None}
opt:
  <<: *base
  enable_amp: True
  global_batch_size: 512
"""
# Of the edition of SC22: amp_mode in place of enable_amp, except in a config that inherits `amp_mode: none`.
LATER_KEYS = TUTORIAL_KEYS.replace("enable_amp: False", "amp_mode: none")
LATER_KEYS += "bf16:\n  <<: *base\n  amp_mode: bf16\n  enable_fused: True\n"
# The sizes in these files, and those that a test can train with.
TINY = {
    "global_batch_size: 512": "global_batch_size: 4",
    "batch_size: 64": "batch_size: 2",
    "Nsamples: 65536": "Nsamples: 8",
    "Nsamples_val: 8192": "Nsamples_val: 4",
    "num_epochs: 10": "num_epochs: 1",
    "warmup_steps: 128": "warmup_steps: 1",
    "box_size: [1024, 512]": "box_size: [64, 64]",
}


def test_configs_of_the_tutorial_have_their_values() -> None:
    for name, (batch, samples, valid, epochs, loader, fast) in TUTORIAL.items():
        config = load(YAML, name)
        assert (config.global_batch_size, config.Nsamples, config.Nsamples_val) == (batch, samples, valid)
        assert (config.num_epochs, config.data_loader_config) == (epochs, loader)
        assert (config.enable_amp, config.enable_apex, config.enable_jit) == (fast, fast, False)
        assert (config.channels_last, config.kernels) == ((True, "auto") if fast else (False, "torch"))
        changes = {"lr_schedule", "box_size", "data_size", "optimizer", "symmetries", "ema_decay", "base_batch_size"}
        assert config.model_dump(include=changes) == load(YAML, "base").model_dump(include=changes)
        built = Schedule(config.for_world(1))
        assert built.peak == pytest.approx(2e-4 * (batch / 64) ** 0.5)
        assert built.warmup_steps == (128 if batch > 64 else 0)


def test_shipped_configs_are_valid_for_several_ranks_and_read_back(tmp_path: Path) -> None:
    names = set(read_file(YAML))
    fast, small = {"bs16_fast", "bs64_fast", "bs512_fast"}, {"demo", "demo_base", "demo_adam", "forest", "test"}
    assert names == {*TUTORIAL, *fast, *small}
    for name in names:
        config = load(YAML, name)
        for ranks in (1, 2, 4):
            resolved = config.for_world(ranks)
            assert resolved.local_batch_size == config.global_batch_size // ranks
        (tmp_path / "saved.yaml").write_text(to_yaml(resolved, name))
        assert load(str(tmp_path / "saved.yaml"), name) == resolved


def test_file_with_the_keys_of_the_tutorial_equals_the_shipped_base_except_for_two_keys(tmp_path: Path) -> None:
    path = tmp_path / "original.yaml"
    path.write_text(TUTORIAL_KEYS)
    assert load(str(path), "base").symmetries == "full"
    own_weights = {"weight_init.conv_init": "auto"}  # the same for this network
    assert load(str(path), "base", {"symmetries": "tutorial", "kernels": "torch", **own_weights}) == load(YAML, "base")
    opt = load(str(path), "opt")
    assert (opt.enable_amp, opt.enable_jit, opt.global_batch_size, opt.use_cache) == (True, False, 512, None)


@pytest.mark.parametrize(
    ("keys", "name", "step"),
    [
        (TUTORIAL_KEYS, "base", "no autocast"),
        (LATER_KEYS, "opt", "bfloat16 autocast"),
        (LATER_KEYS, "bf16", "bfloat16 autocast"),
    ],
    ids=["SC21", "SC22 with an inherited amp_mode", "SC22 with amp_mode"],
)
def test_files_with_the_keys_of_the_tutorial_and_of_its_later_edition_train(
    keys: str, name: str, step: str, tmp_path: Path, volume_file: Any, capsys: Any
) -> None:
    """Only values are replaced by tiny ones; the network is made narrow on the command line."""
    for old, new in (TINY | {"/data/": f"{tmp_path}/", "'/logs'": f"'{tmp_path}/logs'"}).items():
        assert old in keys
        keys = keys.replace(old, new)
    path = tmp_path / "theirs.yaml"
    path.write_text(keys)
    for seed, volume in enumerate(("train.h5", "val.h5")):
        volume_file(tmp_path / volume, box=64, seed=seed)
    ours = {"network.width": 2, "device": "cpu", "report_pictures": False}
    command = [f"--yaml_config={path}", f"--config={name}", *(f"--set={key}={value}" for key, value in ours.items())]
    train.main([*command, "--preflight"])
    printed = capsys.readouterr().out
    warnings = [line for line in printed.splitlines() if line.startswith("preflight: warning: ")]
    crop, *others = warnings
    assert "data_size 64 leaves a single crop; lower data_size" in crop
    physical = ("expected", "standard deviations of crops from those of the training")
    assert all(any(text in line for text in physical) for line in others), "the fields are random"
    assert printed.endswith(f"preflight: no errors; warnings: {len(warnings)}\n")
    train.main(command)
    (run,) = (tmp_path / "logs" / name).glob("*/00")
    log = (run / "out.log").read_text()
    for line in ("  Avg val loss=", f"Step: {step}\n", "symmetries: full\n", "DONE ---- rank 0"):
        assert line in log
    assert ("Config opt extends base: global_batch_size 4, enable_amp True\n" in log) == (name == "opt")
    saved = str(run / "config.yaml")
    expected = load(str(path), name, ours).model_copy(update={"channels": load(saved, name).channels})
    assert load(saved, name) == expected
    assert set(read_file(saved)[name]) == set(Config.model_fields), "saved with this project's keys only"
