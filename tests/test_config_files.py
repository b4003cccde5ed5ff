"""Tests of paths in configs, and of files and configs that extend others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import train
from utils import cli
from utils.config import default_name, load, names, to_yaml
from utils.config.paths import PathText
from utils.config.schema import Config
from utils.config.sections import DatasetConfig
from utils.errors import UserError

PATHS = ["expdir", "train_path", "val_path", "use_cache"]
PATHS += [f"{split}_path_npy_{kind}" for split in ("train", "val") for kind in ("data", "label")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    monkeypatch.delenv("MISSING", raising=False)
    monkeypatch.setenv("EMPTY", "")
    return tmp_path


def load_flags(*flags: str) -> Config:
    options = cli.parse([*flags])
    return load(options.yaml_config, options.config, options.overrides)


# --- paths -----------------------------------------------------------------------------------------------------------


def test_home_and_variables_are_expanded_in_all_paths_of_yaml_files_and_of_set(folder: Path) -> None:
    """Fixed bug: `expdir: ~/runs` created a directory named ~."""
    path = folder / "configs.yaml"
    path.write_text(f"test: {{{', '.join(f'{key}: ~/{key}' for key in PATHS)}, dataset: {{directory: $SCRATCH/data}}}}")
    config = load(str(path), "test")
    assert [getattr(config, key) for key in PATHS] == [f"/home/me/{key}" for key in PATHS]
    assert config.dataset.directory == "/scratch/me/data"
    for text, expanded in (
        ("~/", "/home/me/"),
        ("${SCRATCH}1/$SCRATCH", "/scratch/me1//scratch/me"),
        ("a~/$$SCRATCH$$$-$", "a~/$SCRATCH$$-$"),
        ("./~", "./~"),
    ):
        assert load_flags(f"--yaml_config={path}", "--config=test", f"--set=expdir={text}").expdir == expanded
    assert load_flags(f"--yaml_config={path}", "--set=network.norm=$SCRATCH").network.norm == "$SCRATCH", "no path"


def test_every_key_with_a_path_has_the_type_that_is_expanded() -> None:
    fields = {**Config.model_fields, **DatasetConfig.model_fields}
    declared = {name for name, field in fields.items() if "BeforeValidator" in f"{field.metadata}{field.annotation}"}
    assert declared == {*PATHS, "directory"}
    assert "BeforeValidator" in repr(PathText)


@pytest.mark.parametrize(
    ("path", "says"),
    [
        (
            "$MISSING/x",
            "expdir: the environment variable MISSING in '$MISSING/x' is not set; set it, or write $$ for $",
        ),
        ("$EMPTY", "expdir: the environment variable EMPTY in '$EMPTY' is not set"),
        ("~nobody-has-this-name/x", "expdir: no home directory for ~nobody-has-this-name"),
        ("", "expdir: expected a path, got None; YAML reads an empty value or a bare ~ as None"),
        ("''", "expdir: expected a path, got ''"),
        ("3", "expdir: expected a path, got 3"),
    ],
)
def test_a_path_that_cannot_be_expanded_is_refused(folder: Path, path: str, says: str) -> None:
    with pytest.raises(UserError, match=re.escape(says)):
        load_flags(f"--set=expdir={path}")


def test_saved_paths_are_not_expanded_again(folder: Path) -> None:
    path = folder / "configs.yaml"
    for text in ("$MISSING/${SCRATCH}", "$$", "a~/x"):
        path.write_text(to_yaml(load_flags(f"--set=expdir={text.replace('$', '$$')}"), "test"))
        assert load(str(path), "test").expdir == text


def test_flags_with_paths_expand_the_home_directory(folder: Path) -> None:
    """Shells leave the ~ in --flag=~/x unchanged."""
    options = cli.parse(["--config=test", "--resume=~/a", "--init_from=~/b"])
    assert (options.resume, options.init_from) == ("/home/me/a", "/home/me/b")


# --- extends ---------------------------------------------------------------------------------------------------------


def test_a_file_and_a_config_extend_others(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "shared").mkdir()
    (folder / "shared" / "base.yaml").write_text(
        "base: &base {seed: 1, num_epochs: 7, lr_schedule: {start_lr: 0.5, warmup_steps: 3}}\n"
        "demo: {<<: *base, Nsamples: 100}\nother: {seed: 4}"
    )
    (folder / "middle.yaml").write_text("extends: shared/base.yaml\nmiddle: {extends: base, num_epochs: 8}")
    path = folder / "mine.yaml"
    path.write_text(
        "extends: middle.yaml\nmine: {extends: middle, seed: 2, lr_schedule: {start_lr: 0.1}}\ndemo: {seed: 3}\n"
        "base: {extends: base, num_epochs: 9}\nother: {extends: mine}"
    )

    def values(name: str) -> tuple[int, int, int]:
        config = load(str(path), name)
        return config.seed, config.num_epochs, config.Nsamples

    default = Config().Nsamples
    assert values("mine") == (2, 8, default)
    assert load(str(path), "mine").lr_schedule.warmup_steps == 0, "a section replaces the whole section"
    assert values("demo") == (3, 7, 100), "a config of the same name inherits, without the base of this file"
    assert values("base") == (1, 9, default)
    assert values("middle") == (1, 8, default), "it was complete before this file's base"
    assert values("other") == (2, 8, default), "extends replaces the config of the same name"
    assert names(str(path)) == ["mine", "demo", "base", "other"]
    path.write_text("extends: middle.yaml\nmine: {extends: demo}")
    assert default_name(str(path)) == "mine", "the only one of its own"
    with pytest.raises(SystemExit) as stop:
        train.main([f"--yaml_config={path}", "--num_epochs=3", "--print_config"])
    assert stop.value.code == 0
    (folder / "printed.yaml").write_text(capsys.readouterr().out)
    assert load(str(folder / "printed.yaml"), "mine") == load(str(path), "mine", {"num_epochs": 3})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("extends: none.yaml\na: {}", "cannot read {folder}/none.yaml, which {folder}/a.yaml extends: No such file"),
        ("extends: a.yaml\na: {}", "the files {folder}/a.yaml -> {folder}/a.yaml extend each other; remove one"),
        (
            "extends: b.yaml\na: {}",
            "the files {folder}/a.yaml -> {folder}/b.yaml -> {folder}/a.yaml extend each other",
        ),
        ("extends: {a: 1}", "extends: expected the path of a YAML file, such as UNet.yaml, got {'a': 1}"),
        ("extends: ''\na: {}", "extends: expected the path of a YAML file, such as UNet.yaml, got ''"),
        (
            "extends: $MISSING/a.yaml\na: {}",
            "extends: the environment variable MISSING in '$MISSING/a.yaml' is not set",
        ),
        ("a: {extends: b}\nb: {extends: a}", "config 'a' of {folder}/a.yaml extends itself; remove one of the extends"),
        ("a: {extends: a}", "{folder}/a.yaml: config 'a' extends 'a', but no other config is known; to extend "),
        (
            "a: {extends: test}",
            "config 'a' extends 'test', but no other config is known; to extend configs of another file, add `ext",
        ),
        ("a: {extends: bsae}\nbase: {}", "config 'a' extends 'bsae', expected one of base; did you mean base?"),
        ("a: {extends: [base]}\nbase: {}", "config 'a' extends ['base'], expected one of base"),
    ],
)
def test_wrong_extends_is_refused_in_one_line(folder: Path, text: str, says: str) -> None:
    (folder / "a.yaml").write_text(text)
    (folder / "b.yaml").write_text("extends: ./a.yaml\nb: {}")
    with pytest.raises(UserError) as caught:
        load(str(folder / "a.yaml"), "a")
    assert says.replace("{folder}", str(folder)) in str(caught.value)
    assert "\n" not in str(caught.value)
