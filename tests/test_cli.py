"""The command line: the original's flags, --set for every key, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from utils import cli
from utils.config import Config, Profile, flatten, load
from utils.errors import UserError

ENABLE_AMP = "test: {enable_amp: True, global_batch_size: 64, Nsamples: 1024}\nplain: {enable_amp: False}"


@pytest.fixture
def config_of(tmp_path: Path):
    """config_of(*flags): the config that a command line comes to."""
    path = tmp_path / "configs.yaml"
    path.write_text(ENABLE_AMP)

    def build(*flags: str, name: str = "test") -> Config:
        options = cli.parse([f"--yaml_config={path}", f"--config={name}", *flags])
        return load(options.yaml_config, options.config, options.overrides)

    return build


def test_defaults_are_the_originals() -> None:
    options = cli.parse([])
    assert (options.yaml_config, options.config, options.run_num) == ("./config/UNet.yaml", "base", "00")
    assert options.overrides == {}
    assert not options.preflight
    assert Config().bucket_cap_mb == 25


@pytest.mark.parametrize(
    ("flags", "key", "value"),
    [
        (["--enable_amp"], "enable_amp", True),
        (["--enable_apex"], "enable_apex", True),
        (["--enable_jit"], "enable_jit", True),
        (["--enable_benchy"], "enable_benchy", True),
        (["--enable_manual_profiling"], "enable_manual_profiling", True),
        (["--disable_broadcast_buffers"], "disable_broadcast_buffers", True),
        (["--noddp"], "noddp", True),
        (["--data_loader_config", "synthetic"], "data_loader_config", "synthetic"),
        (["--data_loader_config=dali-lowmem"], "data_loader_config", "dali-lowmem"),
        (["--local_batch_size", "16"], "local_batch_size", 16),
        (["--num_epochs", "3"], "num_epochs", 3),
        (["--num_data_workers", "8"], "num_data_workers", 8),
        (["--bucket_cap_mb", "100"], "bucket_cap_mb", 100.0),
        (["--profiler", "torch"], "profile.profiler", "torch"),
    ],
)
def test_flags_set_their_key_alone(config_of: Any, flags: list[str], key: str, value: Any) -> None:
    before, after = flatten(config_of(name="plain")), flatten(config_of(*flags, name="plain"))
    assert {name: found for name, found in after.items() if found != before[name]} == {key: value}


def test_absent_switch_keeps_the_yamls_true_and_a_present_one_switches_on(config_of: Any) -> None:
    """The original overwrote the YAML with False where the flag was absent."""
    assert config_of().enable_amp
    assert not config_of(name="plain").enable_amp
    assert config_of("--enable_amp", name="plain").enable_amp
    assert not config_of("--set", "enable_amp=false").enable_amp


def test_profiler_leaves_the_other_keys_of_its_section_as_they_are(config_of: Any, tmp_path: Path) -> None:
    (tmp_path / "configs.yaml").write_text("test: {profile: {first_step: 3, profiler: torch}}")
    assert config_of("--profiler=nsys").profile == Profile(first_step=3, profiler="nsys")
    with pytest.raises(UserError, match=r"profile\.profiler: Input should be 'auto', 'nsys' or 'torch', not 'perf'"):
        config_of("--profiler=perf")


def test_local_batch_size_sets_the_global_batch_to_ranks_times_it(config_of: Any) -> None:
    settled = config_of("--local_batch_size", "16").for_world(8)
    assert (settled.local_batch_size, settled.global_batch_size, settled.steps_per_epoch) == (16, 128, 8)
    assert config_of().for_world(8).local_batch_size == 8


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("lr_schedule.start_lr=1e-4", "lr_schedule.start_lr", 1e-4),
        ("lr_schedule.start_lr=2.E-4", "lr_schedule.start_lr", 2e-4),
        ("use_cache=None", "use_cache", None),
        ("use_cache=/a=b", "use_cache", "/a=b"),
        ("expdir=on", "expdir", "on"),
        ("expdir=yes", "expdir", "yes"),
        (" seed = 3 ", "seed", 3),
        ("box_size=[32, 16]", "box_size", [32, 16]),
        ("network.scales=", "network.scales", None),
    ],
)
def test_set_takes_values_as_yaml_writes_them(text: str, key: str, value: Any) -> None:
    assert cli.parse(["--set", text]).overrides == {key: value}


def test_later_set_wins_over_an_earlier_one_and_over_a_flag() -> None:
    assert cli.parse(["--set=seed=1", "--set=seed=2"]).overrides == {"seed": 2}
    assert cli.parse(["--set=num_epochs=1", "--num_epochs=2"]).overrides == {"num_epochs": 1}


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--set", "num_epochs"], "--set num_epochs: expected key=value"),
        (["--set", "=3"], "--set =3: expected key=value"),
        (["--set", ""], "expected key=value"),
        (["--set"], "--set: expected one argument; see --help"),
        (["--set", "num_epochs=["], r"cannot read --set num_epochs=\["),
        (["--num_epoch", "3"], "unrecognized arguments: --num_epoch 3; did you mean --num_epochs?"),
        (["--num_epochs", "x"], "--num_epochs: invalid int value: 'x'; see --help"),
        (["--num_epochs", "1.5"], "--num_epochs: invalid int value: '1.5'"),
        (["--enable_amp=yes"], "--enable_amp: ignored explicit argument 'yes'"),
        (["word"], "unrecognized arguments: word"),
        (["--init_from"], "--init_from: expected one argument; see --help"),
        (["--init"], "unrecognized arguments: --init; did you mean --init_from?"),
        (["--resum=no"], "unrecognized arguments: --resum=no; did you mean --resume?"),
        (["--run_num", "../01"], "--run_num '../01' must be a plain name"),
        (["--run_num", ""], "--run_num '' must be a plain name"),
        (["--run_num", ".."], r"--run_num '\.\.' must be a plain name"),
        (["--preflight", "-1"], "argument --preflight: '-1' is no number of ranks; see --help"),
        (["--preflight", "few"], "argument --preflight: 'few' is no number of ranks; see --help"),
        (["--preflight", "0"], "argument --preflight: '0' is no number of ranks; see --help"),
    ],
)
def test_what_cannot_be_read_is_a_users_error(flags: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        cli.parse(flags)


@pytest.mark.parametrize(
    ("flags", "resume"),
    [
        ([], "auto"),
        (["--resume"], "auto"),
        (["--resume=auto"], "auto"),
        (["--resume", "no"], "no"),
        (["--resume=no"], "no"),
        (["--resume=runs/test/2GPU/00"], "runs/test/2GPU/00"),
        (["--resume", "--init_from=w.pt"], "auto"),
    ],
)
def test_resume_is_auto_no_or_a_directory(flags: list[str], resume: str) -> None:
    options = cli.parse(flags)
    assert options.resume == resume
    assert options.overrides == {}


def test_init_from_is_a_file() -> None:
    assert cli.parse([]).init_from is None
    assert cli.parse(["--init_from=a/weights.pt"]).init_from == "a/weights.pt"
    assert cli.parse(["--init_from", "a/weights.pt", "--resume=no"]).init_from == "a/weights.pt"


def test_preflight_with_and_without_a_number_of_ranks() -> None:
    plain, eight = cli.parse(["--preflight"]), cli.parse(["--preflight", "8", "--config=short"])
    assert (plain.preflight, plain.preflight_ranks) == (True, None)
    assert (eight.preflight, eight.preflight_ranks, eight.config) == (True, 8, "short")


@pytest.mark.parametrize("rank", ["0", "1"])
def test_help_is_printed_once_whatever_the_number_of_ranks(
    rank: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(SystemExit) as stop:
        cli.parse(["--help"])
    assert stop.value.code == 0
    assert bool(capsys.readouterr().out) == (rank == "0")
