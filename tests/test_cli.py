"""Tests of utils.cli: the tutorial's flags, --set for every key, and invalid command lines."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import evaluate
import predict
import train
from utils import __version__, cli, version_line
from utils.config import Config, flatten, load, to_yaml
from utils.config.sections import ProfileConfig
from utils.data import get_loader
from utils.errors import UserError

CONFIGS = "test: {enable_amp: True, global_batch_size: 64, Nsamples: 1024}\nplain: {enable_amp: False}"


@pytest.fixture
def config_of(tmp_path: Path):
    """config_of(*flags) -> the config that this command line selects."""
    path = tmp_path / "configs.yaml"
    path.write_text(CONFIGS)

    def build(*flags: str, name: str = "test") -> Config:
        options = cli.parse([f"--yaml_config={path}", f"--config={name}", *flags])
        return load(options.yaml_config, options.config, options.overrides)

    return build


def changes(config_of: Any, *flags: str) -> dict[str, Any]:
    """The keys of config 'plain' that the flags change, with their new values."""
    before, after = flatten(config_of(name="plain")), flatten(config_of(*flags, name="plain"))
    return {key: value for key, value in after.items() if value != before[key]}


def test_each_flag_sets_only_its_key(config_of: Any) -> None:
    for switch in cli.SWITCHES:
        assert changes(config_of, f"--{switch}") == {switch: True}
    values: dict[str, tuple[str, Any]] = {
        "amp_mode": ("bf16", True),
        "data_loader_config": ("synthetic", "synthetic"),
        "local_batch_size": ("16", 16),
        "num_epochs": ("3", 3),
        "num_data_workers": ("8", 8),
        "bucket_cap_mb": ("100", 100.0),
        "profiler": ("torch", "torch"),
    }
    assert set(values) == set(cli.VALUES)
    for flag, (text, value) in values.items():
        key = {"profiler": "profile.profiler", "amp_mode": "enable_amp"}.get(flag, flag)
        assert changes(config_of, f"--{flag}", text) == changes(config_of, f"--{flag}={text}") == {key: value}


def test_absent_switch_keeps_the_value_of_the_yaml_file(config_of: Any) -> None:
    """The tutorial replaced the value by False if the flag was absent."""
    assert config_of().enable_amp
    assert config_of("--enable_amp", name="plain").enable_amp
    assert not config_of("--set", "enable_amp=false").enable_amp


def test_profiler_flag_keeps_the_other_keys_of_its_section(config_of: Any, tmp_path: Path) -> None:
    (tmp_path / "configs.yaml").write_text("test: {profile: {first_step: 3, profiler: torch}}")
    assert config_of("--profiler=nsys").profile == ProfileConfig(first_step=3, profiler="nsys")


def test_set_parses_yaml_values_and_overrides_flags_and_earlier_values() -> None:
    for text, key, value in (
        ("lr_schedule.start_lr=2.E-4", "lr_schedule.start_lr", 2e-4),
        ("use_cache=None", "use_cache", None),
        ("use_cache=/a=b", "use_cache", "/a=b"),
        (" seed = 3 ", "seed", 3),
        ("network.scales=", "network.scales", None),
    ):
        assert cli.parse(["--set", text]).overrides == {key: value}
    assert cli.parse(["--set=seed=1", "--set=seed=2"]).overrides == {"seed": 2}
    assert cli.parse(["--set=num_epochs=1", "--num_epochs=2"]).overrides == {"num_epochs": 1}


def test_quoted_paths_keep_every_character_and_survive_config_yaml(config_of: Any, tmp_path: Path) -> None:
    """A path such as '/x/run #1' was read as YAML, and the run went to /x/run."""
    for text in ("/x/run #1", "/x/a: b", "a=b", "null", "1", "{a: 'b\"", "*&!%@`", "ü"):
        config = config_of(f"--set=expdir={json.dumps(text)}")  # YAML's double quotes contain JSON's
        assert config.expdir == text
        (tmp_path / "copy.yaml").write_text(to_yaml(config, "test"))
        assert load(str(tmp_path / "copy.yaml"), "test").expdir == text
    with pytest.raises(UserError, match="YAML takes # for the start of a comment; quote the value"):
        cli.parse(["--set", "expdir=/x/run #1"])


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--set", "num_epochs"], "--set num_epochs: expected key=value"),
        (["--set", "num_epochs=["], r"cannot read --set num_epochs=\["),
        (["--num_epoch", "3"], "unrecognized arguments: --num_epoch 3; did you mean --num_epochs?"),
        (["--foo"], "unrecognized arguments: --foo; see --help"),
        (["--network.width", "3"], "config keys are set with --set network.width=VALUE"),
        (["--run_num", "../01"], "--run_num '../01' must be a plain name"),
        (["--config", "../x"], "--config '../x' must be a plain name"),  # it was written to outside expdir
        (["--config="], "--config '' must be a plain name"),
        (["--preflight", "few"], "argument --preflight: 'few' is not a positive integer; see --help"),
    ],
)
def test_invalid_command_line_raises_a_user_error(flags: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        cli.parse(flags)


def test_a_misspelled_required_flag_is_named(tmp_path: Path) -> None:
    """Fixed: predict.py --chekpoint only listed --checkpoint as missing."""
    given = ["--chekpoint=x", "--input", "y", "--output", "z.h5"]
    for script in (predict, evaluate):
        with pytest.raises(UserError, match=r"^unrecognized arguments: --chekpoint=x; did you mean --checkpoint\?"):
            script.parse(given)
        with pytest.raises(UserError, match=r"required.*; see --help"):
            script.parse(given[1:])


def test_a_yaml_error_has_one_place_and_does_not_repeat_the_input(tmp_path: Path) -> None:
    """Fixed: it called the file "<unicode string>" and copied its line."""
    path = tmp_path / "a.yaml"
    for text, says in (
        ('base: {seed: "1}', "line 1, column 17: found unexpected end of stream (while scanning a quoted scalar)"),
        ("base: {seed: 1}\nother: a: b", "line 2, column 9: mapping values are not allowed here"),
        ("base: \0", "unacceptable character #x0000: special characters are not allowed position 6"),
    ):
        path.write_text(text)
        with pytest.raises(UserError) as caught:
            cli.parse([f"--yaml_config={path}"])
        assert str(caught.value) == f"cannot read {path}: {says}"


def test_the_only_config_of_a_file_needs_a_plain_name_too(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("../x: {seed: 1}")
    with pytest.raises(UserError, match="must be a plain name"):
        cli.parse([f"--yaml_config={tmp_path / 'a.yaml'}"])


def test_an_unknown_loader_is_answered_with_a_similar_one() -> None:
    """Fixed: --data_loader_config=dali_lowmem only listed the loaders."""
    for name, hint in (("dali_lowmem", "did you mean dali-lowmem?"), ("tape", "choose one with --data_loader_config")):
        with pytest.raises(UserError, match=f"^unknown data_loader_config {name}; known: lowmem, .*auto; {hint}"):
            get_loader(name)


def test_defaults_and_flags_with_optional_values() -> None:
    for flags, resume in (
        ([], None),
        (["--resume"], "auto"),
        (["--resume", "no"], "no"),
        (["--resume=runs/test/2ranks/00"], "runs/test/2ranks/00"),
    ):
        options = cli.parse([*flags, "--init_from=a/weights.pt"])
        assert (options.resume, options.init_from, options.overrides) == (resume, "a/weights.pt", {})
    plain = cli.parse([])
    assert (plain.yaml_config, plain.config, plain.run_num) == ("./config/UNet.yaml", "base", "00")
    assert plain.preflight is None
    plain, eight = cli.parse(["--preflight"]), cli.parse(["--preflight", "8", "--config=short"])
    assert plain.preflight == 0
    assert (eight.preflight, eight.config) == (8, "short")


def test_version_is_one_line_of_every_script_and_the_same_in_all_files(capsys: pytest.CaptureFixture[str]) -> None:
    for script in (train, predict):
        with pytest.raises(SystemExit) as stop:
            script.main(["--version"])
        assert stop.value.code == 0
        expected = rf"nbody-unet {re.escape(__version__)}, commit (unknown|[0-9a-f]+)\S*, torch \S+, Python \S+\n"
        assert re.fullmatch(expected, capsys.readouterr().out)
    top = Path(train.__file__).parent
    assert f'\nversion = "{__version__}"\n' in (top / "pyproject.toml").read_text()
    assert f'\nversion: "{__version__}"\n' in (top / "CITATION.cff").read_text()


@pytest.mark.parametrize("script", ["train", "train_graph", "predict", "evaluate", "export"])
def test_a_missing_pytorch_is_one_line(script: str) -> None:
    """-S hides all installed packages."""
    done = subprocess.run(
        [sys.executable, "-S", f"{script}.py"],
        cwd=Path(train.__file__).parent,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("error: PyTorch is not installed: ")
    assert "make install" in done.stderr


def test_without_git_the_commit_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the files on another machine has no history."""

    def no_checkout(command: list[str], **_: Any) -> Any:
        raise subprocess.CalledProcessError(128, command)

    monkeypatch.setattr(subprocess, "run", no_checkout)
    monkeypatch.delenv("GIT_COMMIT", raising=False)
    assert "commit unknown" in version_line()
    monkeypatch.setenv("GIT_COMMIT", "0123abc")
    assert "commit 0123abc" in version_line()


def test_help_lists_every_flag_and_is_printed_only_by_rank_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = []
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as stop:
            train.main(["--help"])
        assert stop.value.code == 0
        outputs.append(capsys.readouterr())
    assert outputs[0].out + outputs[0].err + outputs[1].err == ""
    flags = ("yaml_config", "config", "run_num", "resume", "init_from", "set", "preflight", "version", "print_config")
    flags += (*cli.SWITCHES, *cli.VALUES)
    assert [flag for flag in flags if f"--{flag}" not in outputs[1].out] == []
