"""Tests of utils.cli: the tutorial's flags, --set for every key, and invalid command lines."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest

import evaluate
import predict
import train
from utils import cli
from utils.config import Config, flatten, load
from utils.config.sections import ProfileConfig
from utils.errors import UserError

Selects = Callable[..., Config]


@pytest.fixture
def config_of(tmp_path: Path) -> Selects:
    """config_of(*flags) -> the config that this command line selects."""
    path = tmp_path / "configs.yaml"
    path.write_text("plain: {}\namp: {enable_amp: True, profile: {first_step: 3, profiler: torch}}")

    def build(*flags: str, name: str = "plain") -> Config:
        options = cli.parse([f"--yaml_config={path}", f"--config={name}", *flags])
        return load(options.yaml_config, options.config, options.overrides)

    return build


def test_each_flag_sets_only_its_key(config_of: Selects) -> None:
    def changes(*flags: str) -> dict[str, Any]:
        before, after = flatten(config_of()), flatten(config_of(*flags))
        return {key: value for key, value in after.items() if value != before[key]}

    for switch in cli.SWITCHES:
        assert changes(f"--{switch}") == {switch: True}
    values: dict[str, Any] = {"data_loader_config": "synthetic", "local_batch_size": 16, "num_epochs": 3}
    values |= {"num_data_workers": 8, "bucket_cap_mb": 100.0, "profiler": "torch", "amp_mode": "bf16"}
    assert set(values) == set(cli.VALUES)
    keys = {"profiler": "profile.profiler", "amp_mode": "enable_amp"}
    for flag, value in values.items():
        expected = {keys.get(flag, flag): True if flag == "amp_mode" else value}
        assert changes(f"--{flag}", str(value)) == changes(f"--{flag}={value}") == expected


def test_absent_flags_keep_the_values_of_the_yaml_file(config_of: Selects) -> None:
    """The tutorial replaced the value by False if the switch was absent."""
    assert config_of(name="amp").enable_amp
    assert not config_of("--set", "enable_amp=false", name="amp").enable_amp
    assert config_of("--profiler=nsys", name="amp").profile == ProfileConfig(first_step=3, profiler="nsys")


def test_set_parses_yaml_values_and_overrides_flags_and_earlier_values(config_of: Selects) -> None:
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
    for path in ("/x/run #1", "/x/a: b", "{a: 'b\""):  # a bug: the run of '/x/run #1' went to /x/run
        assert config_of(f"--set=expdir={json.dumps(path)}").expdir == path


@pytest.mark.parametrize(
    ("parse", "flags", "says"),
    [
        (cli.parse, "--set num_epochs", "--set num_epochs: expected key=value"),
        (cli.parse, "--set num_epochs=[", r"cannot read --set num_epochs=\["),
        (cli.parse, "--set train_path=caf\udce9/a.h5", "not UTF-8; rename the file, or give the path of a link to it"),
        (cli.parse, "--set 'expdir=/x/run #1'", "YAML takes # for the start of a comment; quote the value"),
        (cli.parse, "--num_epoch 3", "unrecognized arguments: --num_epoch 3; did you mean --num_epochs?"),
        (cli.parse, "--network.width 3", "did you mean --set network.width=VALUE?"),
        # Fixed: the hint was about the first one.
        (cli.parse, "---num_epochs=3 --rate 3 --cofnig=x", r"--cofnig=x; did you mean --num_epochs, --config\?"),
        (cli.parse, "--set num_epochs = 3", r"unrecognized arguments: = 3; did you mean --set num_epochs=3\?"),
        (cli.parse, "--set num_epochs= 3", r"did you mean --set num_epochs=3\?"),
        # Of later editions of the tutorial.
        (cli.parse, "--tensor_parallel=4", "--tensor_parallel=4; it belongs to SC23 to SC25, which train another"),
        (cli.parse, "--run_num ../01", "--run_num '../01' must be a plain name"),
        (cli.parse, "--config ../x", "--config '../x' must be a plain name"),  # it was written to outside expdir
        (cli.parse, "--preflight few", "argument --preflight: 'few' is not a positive integer; see --help"),
        (cli.parse, "--gpu_memory 40", "--gpu_memory needs --preflight; add --preflight or remove --gpu_memory"),
        (cli.parse, "--preflight --gpu_memory 40 --set device=cpu", "--gpu_memory contradicts --set device=cpu"),
        (cli.parse, "--amp_mode=fp8", "amp_mode must be none, fp16 or bf16, got 'fp8'"),
        # Fixed: only --checkpoint was listed, as missing.
        (predict.parse, "--chekpoint=x --input y --output z.h5", r"--chekpoint=x; did you mean --checkpoint\?"),
        (evaluate.parse, "--input y --output z.h5", r"required.*; see --help"),
    ],
)
def test_invalid_command_line_raises_a_user_error(parse: Callable[..., Any], flags: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        parse(shlex.split(flags))


def test_defaults_and_flags_with_optional_values(tmp_path: Path) -> None:
    plain, eight = cli.parse([]), cli.parse(["--preflight", "8", "--config=short"])
    assert (plain.yaml_config, plain.config, plain.run_num) == ("./config/UNet.yaml", "base", "00")
    assert (plain.preflight, cli.parse(["--preflight"]).preflight) == (None, 0)
    assert (eight.preflight, eight.config) == (8, "short")
    for flags, resume in (([], None), (["--resume"], "auto"), (["--resume", "no"], "no"), (["--resume=a/00"], "a/00")):
        options = cli.parse([*flags, "--init_from=a.pt"])
        assert (options.resume, options.init_from, options.overrides) == (resume, "a.pt", {})
    (tmp_path / "a.yaml").write_text("mine: {seed: 1}")
    assert cli.parse([f"--yaml_config={tmp_path / 'a.yaml'}"]).config == "mine", "the only config of the file"


def test_version_and_help_are_printed_only_by_rank_0(monkeypatch: Any, capsys: Any) -> None:
    def printed(flag: str) -> str:
        with pytest.raises(SystemExit, match="0"):
            train.main([flag])
        return capsys.readouterr().out

    monkeypatch.setenv("PATH", "")  # without git; a copy of the files on another machine has no history, either
    for variable, commit in (("", "unknown"), ("0123abc", "0123abc")):
        monkeypatch.setenv("GIT_COMMIT", variable)
        line = rf"nbody-unet \S+, commit {commit}, torch \S+, Python \S+\n"
        assert re.fullmatch(line, printed("--version"))
    text = printed("--help")
    assert [flag for flag in cli.build_parser()._option_string_actions if flag not in text] == []
    monkeypatch.setenv("RANK", "1")
    assert printed("--help") == printed("--version") == ""


@pytest.mark.parametrize("script", ["train", "train_graph", "predict", "evaluate", "export", "simulation/__main__"])
def test_a_missing_pytorch_and_an_interrupt_during_the_imports_are_one_line(script: str, tmp_path: Path) -> None:
    """-S hides all installed packages. Python ends itself by SIGINT, which shells report as exit code 130."""
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
    top = Path(train.__file__).parent
    options: dict[str, Any] = {"cwd": top, "capture_output": True, "text": True, "timeout": 60}
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{top}"}
    done = subprocess.run([sys.executable, f"{script}.py"], env=environment, **options)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "interrupted\n")
    if "simulation" not in script:
        done = subprocess.run([sys.executable, "-S", f"{script}.py"], **options)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert done.stderr.startswith("error: PyTorch is not installed: ")
        assert "make install" in done.stderr


# Asking for the module pip, even find_spec, makes setuptools' distutils unusable in this process: inductor then fails.
INSTALLED = {distribution.name for distribution in distributions()}


@pytest.mark.skipif(not {"pip", "setuptools"} <= INSTALLED, reason="an installation needs pip and setuptools")
def test_an_installation_finds_the_packages_with_safe_path(tmp_path: Path) -> None:
    """PYTHONSAFEPATH=1, as hardened sites set it, was a traceback of each script."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(Path(train.__file__).with_name(name), tmp_path)
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--target", tmp_path / "site", "--editable", tmp_path], check=True, capture_output=True)
    (tmp_path / "utils").mkdir()
    (tmp_path / "utils" / "__init__.py").touch()
    script = f"import site, sys; sys.path.clear(); site.addsitedir({str(tmp_path / 'site')!r})"
    script += "; import utils; print(utils.__file__)"
    environment = os.environ | {"PYTHONSAFEPATH": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == f"{tmp_path / 'utils' / '__init__.py'}\n", done.stderr


def test_the_backend_of_a_notebook_has_no_effect() -> None:
    """A cell's command inherits it; once evaluate.py ended at its import, and a run lost its pictures."""
    environment = os.environ | {"MPLBACKEND": "module://a_package_of_the_kernel.backend"}
    command = [sys.executable, "-c", "import analysis.evaluation.figures"]
    subprocess.run(command, cwd=Path(train.__file__).parent, env=environment, check=True, timeout=600)
