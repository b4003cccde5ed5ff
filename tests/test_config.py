"""Tests of utils.config: reading, types, checks, and batch sizes for a number of ranks."""

from __future__ import annotations

import itertools
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from utils.config import (
    REPLACED_KEYS,
    Config,
    differences,
    flatten,
    load,
    parse_value,
    read_file,
    similar,
    to_yaml,
    validate,
)
from utils.errors import UserError


def write(folder: Path, text: str) -> str:
    path = folder / "configs.yaml"
    path.write_text(text)
    return str(path)


# --- reading ---------------------------------------------------------------------------------------------------------


def test_yaml_values_are_parsed_as_yaml_1_2() -> None:
    """1e-4 is a number; on, yes and 1:30 are strings; None is null."""
    numbers = {"1e-4": 1e-4, "2.E-4": 2e-4, "+1E3": 1000.0, "0.": 0.0, ".5": 0.5, "-1.5": -1.5, ".inf": math.inf}
    numbers |= {"7": 7, "-3": -3, "0": 0}
    constants = {"True": True, "false": False, "None": None, "null": None, "~": None, "": None, "'None'": "None"}
    words = ["on", "yes", "no", "OFF", "y", "1:30", "1_000", "010", "0x10", "2024-01-31", "1e", "e5", "."]
    others = {
        "'1e-4'": "1e-4",
        "[0.9, 1e-3, None, on]": [0.9, 1e-3, None, "on"],
        "{scaling: none, start_lr: 1e-3}": {"scaling": "none", "start_lr": 1e-3},
    }
    for text, value in (numbers | constants | dict(zip(words, words, strict=True)) | others).items():
        found = parse_value(text)
        assert found == value, text
        assert type(found) is type(value), text
    assert math.isnan(parse_value(".nan"))


def test_merge_keys_and_overrides_change_single_keys(tmp_path: Path) -> None:
    text = """
base: &base
  num_epochs: 7
  enable_amp: True
  use_cache: None
  lr_schedule: {scaling: 'linear', start_lr: 1e-3, end_lr: 0., warmup_steps: 3}
short:
  <<: *base
  num_epochs: 2
"""
    short = load(write(tmp_path, text), "short")
    assert (short.num_epochs, short.enable_amp, short.use_cache) == (2, True, None)
    assert (short.lr_schedule.scaling, short.lr_schedule.start_lr) == ("linear", 1e-3)
    assert short.global_batch_size == Config().global_batch_size, "missing keys have their defaults"
    path = str(tmp_path / "configs.yaml")
    config = load(path, "short", {"lr_schedule.start_lr": 0.5, "optimizer.name": "sgd", "seed": 9})
    assert (config.lr_schedule.start_lr, config.lr_schedule.warmup_steps) == (0.5, 3)
    assert (config.optimizer.name, config.optimizer.betas, config.seed) == ("sgd", [0.9, 0.999], 9)
    replaced = load(path, "short", {"lr_schedule": {"start_lr": 0.5}}).lr_schedule
    assert (replaced.start_lr, replaced.warmup_steps) == (0.5, 0), "an override of a section replaces the whole section"


def test_saved_config_reads_back_the_same(tmp_path: Path) -> None:
    """Includes strings that look like numbers, and numbers as PyYAML writes them, such as 1.0e-10."""
    values: dict[str, Any] = {
        "expdir": "None-such: 'quoted' # words",
        "val_path_npy_data": "None",
        "train_path": "1e-4",
        "val_path": "010",
        "seed": 2**40,
        "lr_schedule": {"start_lr": 1e-10, "scaling": "linear"},
        "clip_grad_norm": 1e22,
        "use_cache": "on",
        "box_size": [128, 64],
    }
    config = validate(values, "test")
    for name in ("run one", "1e4", "2"):
        assert load(write(tmp_path, to_yaml(config, name)), name) == config
    del values["val_path_npy_data"]
    values["train_path"] = "data"  # PyYAML reads 1e-4 as a string and does not quote it
    assert load(write(tmp_path, yaml.safe_dump({"test": values})), "test") == validate(values, "test")


def test_differences_have_the_values_that_are_not_the_defaults_or_those_of_another_config() -> None:
    config = validate({"num_epochs": 3, "lr_schedule": {"start_lr": 1e-3}}, "test")
    assert differences(config) == {"num_epochs": 3, "lr_schedule.start_lr": 1e-3}
    assert differences(Config()) == {}
    assert differences(Config(), config) == {"num_epochs": 10, "lr_schedule.start_lr": 2e-4}


def test_config_may_be_in_another_file_of_the_same_directory(tmp_path: Path) -> None:
    """The given file comes first; of the other files, only one may contain the config."""
    path = write(tmp_path, "base: {seed: 1}\ntest: {seed: 2}")
    (tmp_path / "tuned.yaml").write_text("tuned: {seed: 3}\ndigits: {seed: 6}")
    (tmp_path / "test.yaml").write_text("test: {seed: 4}\nboth: {seed: 7}")
    (tmp_path / "other.yaml").write_text("test: {seed: 8}\nboth: {seed: 9}")
    assert load(path, "test").seed == 2
    assert load(path, "tuned").seed == 3
    assert load(path, "tuned", {"seed": 5, "lr_schedule.start_lr": 1.0}).seed == 5
    assert load(path, "digits").seed == 6
    assert load(str(tmp_path / "test.yaml"), "test").seed == 4
    with pytest.raises(
        UserError, match=r"^config both is in .*other.yaml and in .*test.yaml; choose one with --yaml_config"
    ):
        load(path, "both")


def test_error_for_an_unknown_config_lists_the_known_ones(tmp_path: Path) -> None:
    path = write(tmp_path, "base: {}\nshort: {}")
    (tmp_path / "tuned.yaml").write_text("tuned: {}")
    (tmp_path / "compose.yaml").write_text("services: {}")
    (tmp_path / "broken.yaml").write_text("[")
    (tmp_path / "folder.yaml").mkdir()
    for name in ("tunde", "configs", "../tuned", ""):
        says = f"^unknown config {name} in {re.escape(path)} and the other YAML files .*; known: base, short, .*tuned"
        with pytest.raises(UserError, match=says) as caught:
            load(path, name)
        assert ("; did you mean tuned?" in str(caught.value)) == (name in ("tunde", "../tuned"))


def test_error_for_an_unknown_config_names_the_files_that_cannot_be_read(tmp_path: Path) -> None:
    """Fixed: a tab or a duplicate key in a file hid its configs. A config in two files was listed twice."""
    path = write(tmp_path, "base: {}\nshort: {}")
    (tmp_path / "more.yaml").write_text("base: {}\nlong: {}")
    (tmp_path / "tab.yaml").write_text("mine:\n\tseed: 1")
    (tmp_path / "twice.yaml").write_text("mine: {seed: 1, seed: 2}")
    with pytest.raises(UserError) as caught:
        load(path, "mine")
    text = str(caught.value)
    assert "; known: base, short, long; cannot read " in text
    assert re.search(r"; cannot read \S*/tab.yaml: .*line 2.*; cannot read \S*/twice.yaml: line 1: duplicate key", text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("test:", "must hold named configs"),
        ("test: {}\nempty:", "must hold named configs, .*; correct or remove empty, which is None$"),
        ("str: hello\ntest: {}", "must hold named configs, .*; correct or remove str, which is 'hello'$"),
        ("test: {num_epochs: 1, num_epochs: 2}", "line 1: duplicate key num_epochs"),
        ("test:\n  lr_schedule:\n    end_lr: 0.\n    end_lr: 1.", "line 4: duplicate key end_lr"),
        ("test: {num_epochs: 1", "cannot read .*expected ',' or '}'"),
        ("test: {seed: !!python/object/apply:os.getcwd []}", "cannot read .*constructor for the tag"),
        ("test: {seed: !!int word}", "cannot read .*invalid literal"),
    ],
)
def test_invalid_yaml_file_is_refused_in_one_line(tmp_path: Path, text: str, says: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(UserError, match=says) as caught:
        read_file(path)
    assert path in str(caught.value)
    assert "\n" not in str(caught.value)


NINEFOLD = ["a: &a [x, x, x, x, x, x, x, x, x]"]
NINEFOLD += [f"{name}: &{name} [{', '.join(['*' + before] * 9)}]" for before, name in itertools.pairwise("abcdefghi")]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("\n".join(NINEFOLD), "line 5: more than 50000 values; each use of an alias counts"),
        (f"a: &a {{k: 1, l: 2, m: 3}}\nb: [{'*a, ' * 20_000}]", "line 2: more than 50000 values"),
        (f"[{'0,' * 50_001}]", "line 1: more than 50000 values"),
        ("&a [*a]", "line 1: the value with the anchor a contains itself"),
        ("a: 1\nb: &b\n  c: {d: [1, *b]}", "line 3: the value with the anchor b contains itself"),
        ("&a {<<: *a}", "line 1: the value with the anchor a contains itself"),
        ("[" * 5000, "it is nested too deeply"),
        ("- " * 5000, "it is nested too deeply"),
        ("!!bool word", "a value does not match its tag"),
        ("!!int ''", "a value does not match its tag"),
        ("1" * 5000, "a number has too many digits"),
    ],
)
def test_a_yaml_value_too_large_to_process_is_refused_in_one_line(tmp_path: Path, text: str, says: str) -> None:
    """Fixed bugs: ten lines of aliases stood for 9^10 values, and a value inside itself had no end."""
    with pytest.raises(UserError, match=f"^cannot read --set seed: {re.escape(says)}") as caught:
        parse_value(text, "--set seed")
    assert "\n" not in str(caught.value)
    indented = "".join(f"    {line}\n" for line in text.splitlines())
    with pytest.raises(UserError, match=r"cannot read .*configs\.yaml: "):
        read_file(write(tmp_path, f"test:\n  seed:\n{indented}"))


def test_aliases_within_the_limit_are_expanded() -> None:
    assert parse_value("{a: &a [1, 2], b: [*a, *a], c: {<<: &d {e: *a}}, f: *d}") == {
        "a": [1, 2],
        "b": [[1, 2], [1, 2]],
        "c": {"e": [1, 2]},
        "f": {"e": [1, 2]},
    }


def test_a_long_value_is_shortened_in_errors() -> None:
    with pytest.raises(UserError) as caught:
        validate({"seed": list(range(50_000)), "network": [1] * 50_000}, "c")
    assert len(str(caught.value)) < 2000
    assert "seed: expected an integer, got [0, 1, 2" in str(caught.value)


@pytest.mark.parametrize("kind", ["larger than a config", "device", "pipe", "directory"])
def test_a_file_that_is_no_config_is_refused_without_reading_all_of_it(tmp_path: Path, kind: str) -> None:
    """Fixed bugs: /dev/zero filled the memory, and a pipe without a writer was waited for forever."""
    path = tmp_path / "configs.yaml"
    if kind == "larger than a config":
        path.touch()
        os.truncate(path, 2**40)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    reason = {"larger than a config": "it has more than 1048576 bytes", "directory": "it is a directory"}
    says = f"^cannot read yaml_config {re.escape(str(path))}: {reason.get(kind, 'it is not a regular file')}; "
    with pytest.raises(UserError, match=says):
        read_file(str(path))


def test_unreadable_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "none.yaml"
    with pytest.raises(
        UserError, match=f"^cannot read yaml_config {re.escape(str(path))}: No such file .*--yaml_config"
    ):
        read_file(str(path))
    path.write_bytes("# α\ntest: {expdir: café}".encode() + b"\xff\xfe\x00")
    says = f"^cannot read {re.escape(str(path))}: byte 0xff in line 2 is not UTF-8; save the file in the encoding UTF-8"
    with pytest.raises(UserError, match=says):
        read_file(str(path))


# --- checking --------------------------------------------------------------------------------------------------------


def test_all_faults_are_reported_in_one_line() -> None:
    with pytest.raises(UserError) as caught:
        validate({"num_epoch": 3, "seed": "x", "lr_schedule": {"strat_lr": 1.0}, "optimizer": {"eps": 0.0}}, "test")
    message = str(caught.value)
    assert "\n" not in message
    for part in (
        "config 'test': ",
        "unknown key num_epoch; did you mean num_epochs?",
        "unknown key lr_schedule.strat_lr; did you mean lr_schedule.start_lr?",
        "seed: expected an integer, got 'x' (for example seed=0)",
        "optimizer.eps: expected a value above 0, got 0.0 (for example optimizer.eps=1e-08)",
    ):
        assert part in message


OPTIONAL_NUMBERS = {
    "checkpoint.every_minutes",
    "transform.density_log_scale",
    "transform.velocity_scale_km_s",
    "transform.temperature_log10_scale",
}


def nested(key: str, value: Any) -> dict[str, Any]:
    """The nested mapping with this value at a dotted key."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


@pytest.mark.parametrize(("key", "remedy"), REPLACED_KEYS.items())
def test_keys_of_earlier_versions_are_refused_with_a_remedy(key: str, remedy: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"config 'c': {key} {remedy}")):
        validate(nested(key, 1), "c")


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("conv_init", "unknown key conv_init; did you mean weight_init.conv_init?"),
        ("step_lr", "unknown key step_lr; --print_config prints all keys"),
        ("patch_size", "unknown key patch_size; did you mean data_size?"),
        ("lr", "unknown key lr; did you mean lr_schedule.start_lr?"),
        ("learning_rate", "unknown key learning_rate; did you mean lr_schedule.start_lr?"),
        ("optimizer.lr", "unknown key optimizer.lr; did you mean lr_schedule.start_lr?"),
        (
            "network.foo",
            "unknown key network.foo; known: network.name, network.width, network.scales, network.space_to_depth, "
            "network.norm",
        ),
        ("amp_mod", "unknown key amp_mod; did you mean amp_mode?"),
        ("lr_schedule.width", "unknown key lr_schedule.width; did you mean network.width?"),
        ("network.rewriten", "unknown key network.rewriten; network.rewritten is now network.space_to_depth"),
    ],
)
def test_unknown_keys_are_answered_with_similar_keys_of_all_sections_or_earlier_versions(key: str, says: str) -> None:
    """A fixed bug: conv_init, a key of weight_init, was answered with checkpoint."""
    with pytest.raises(UserError, match=rf"^config 'c': {re.escape(says)}$"):
        validate(nested(key, 1), "c")


def test_only_near_names_are_suggested() -> None:
    """A fixed bug: amp_mode was answered with Nsamples, and patch_size with data_size."""
    keys = list(Config.model_fields)
    for word, name in (
        ("num_epoch", "num_epochs"),
        ("epochs", "num_epochs"),
        ("num_workers", "num_data_workers"),
        ("nsamples", "Nsamples"),
        ("exp_dir", "expdir"),
        ("cache", "use_cache"),
        ("apex", "enable_apex"),
    ):
        assert similar(word, keys) == name
    for word in ("amp_mode", "patch_size", "data_dir", "time_means_path", "num_iters", "world_size", "path", "lr", ""):
        assert similar(word, keys) is None, word


def test_a_value_in_place_of_a_section_is_reported_without_pydantics_names() -> None:
    with pytest.raises(
        UserError, match=r"^config 'c': network: expected a section with keys, got 5; for example network.width=5$"
    ):
        validate({"network": 5}, "c")


def test_a_value_in_place_of_a_section_leads_to_the_key_that_accepts_it() -> None:
    for section, value, example in (
        ("optimizer", "adamw", "; for example optimizer.name=adamw"),
        ("early_stopping", 3, "; for example early_stopping.patience=3"),
        ("lr_schedule", 0.01, "; for example lr_schedule.start_lr=0.01"),
        ("timeouts", "x", ""),
        ("network", [1], ""),
    ):
        with pytest.raises(
            UserError, match=rf"^config 'c': {section}: expected a section .*{re.escape(example)}$"
        ) as e:
            validate({section: value}, "c")
        assert ("; for example " in str(e.value)) == bool(example)


def test_numbers_and_booleans_accept_no_other_types() -> None:
    """Numbers refuse strings, booleans, NaN and infinity; booleans refuse everything but true and false."""
    checked = 0
    for key, default in flatten(Config()).items():
        if type(default) not in (int, float, bool):
            continue
        wrong = ["true", 1] if isinstance(default, bool) else ["3", True, math.nan, math.inf, [3]]
        if key not in OPTIONAL_NUMBERS:
            wrong.append(None)
        for value in wrong:
            with pytest.raises(UserError, match=f"^config 'test': {key}: "):
                validate(nested(key, value), "test")
        checked += 1
    assert checked > 40


# --- batch sizes for a number of ranks -------------------------------------------------------------------------------


def test_batch_sizes_are_resolved_for_the_number_of_ranks() -> None:
    """The global batch is divided among the ranks; a local batch size sets the global one, and so the steps."""
    for ranks, local in ((1, 64), (8, 8), (64, 1)):
        resolved = Config(global_batch_size=64).for_world(ranks)
        assert (resolved.local_batch_size, resolved.global_batch_size) == (local, 64)
        assert resolved.for_world(ranks) == resolved
    resolved = Config(local_batch_size=16, global_batch_size=64, Nsamples=1024, num_epochs=3).for_world(8)
    assert (resolved.local_batch_size, resolved.global_batch_size) == (16, 128)
    assert (resolved.steps_per_epoch, resolved.total_steps) == (8, 24)


def test_global_batch_size_of_the_command_line_replaces_the_local_one_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "test: {local_batch_size: 32}")
    assert load(path, "test", {"global_batch_size": 48}).for_world(2).local_batch_size == 24
    assert load(path, "test", {"global_batch_size": 48, "local_batch_size": 8}).for_world(2).global_batch_size == 16
    assert load(path, "test").for_world(2).global_batch_size == 64
    with pytest.raises(UserError, match="global_batch_size 33 is not divisible by 2 ranks"):
        load(path, "test", {"global_batch_size": 33}).for_world(2)


@pytest.mark.parametrize(
    ("values", "ranks", "says"),
    [
        ({"static_graph": True, "accumulation_steps": 2}, 1, "static_graph needs accumulation_steps 1"),
        (
            {"fused_tail": True, "network": {"space_to_depth": ["last"]}, "loss": "huber"},
            1,
            "fused_tail needs loss l1; change that, or set fused_tail=false",
        ),
        (
            {"fused_tail": True, "network": {"name": "smooth_unet"}},
            1,
            "fused_tail: network smooth_unet has no such form; set fused_tail=false",
        ),
        ({"enable_benchy": True, "enable_manual_profiling": True}, 1, "cannot be combined"),
        (
            {"N_in_channels": 3},
            1,
            r"vector_channels.inputs \[\[1, 2, 3\]\]: channel 3 does not exist; channels count from 0, so use 0 to 2",
        ),
        ({"vector_channels": {"targets": [[1, 2, 2]]}}, 1, "must be lists of three different channels"),
        (
            {"network": {"space_to_depth": ["last", "last"]}},
            1,
            r"network.space_to_depth \['last', 'last'\] contains a layer twice",
        ),
        ({"data_loader_config": "classification"}, 1, "classification and dataset.name must be set together"),
        ({"global_batch_size": 64}, 3, "global_batch_size 64 is not divisible by 3 ranks; use 63"),
        ({"local_batch_size": 4, "accumulation_steps": 8}, 1, "local batch size 4 is not divisible by accumulation"),
        ({"Nsamples": 127, "local_batch_size": 64}, 2, "Nsamples 127 is less than global_batch_size 128"),
    ],
)
def test_contradictions_are_refused_with_a_remedy(values: dict[str, Any], ranks: int, says: str) -> None:
    with pytest.raises(UserError, match=says):
        validate(values, "test").for_world(ranks)


def test_warmup_longer_than_the_run_is_ignored_at_the_base_batch_size() -> None:
    config = Config(Nsamples=64, lr_schedule={"scaling": "sqrt", "warmup_steps": 1000})
    assert not config.for_world(1).warms_up


def test_full_scale_sets_the_number_of_scales_unless_network_scales_is_set() -> None:
    for full, scales, found in ((True, None, 6), (False, None, 5), (True, 3, 3), (False, 3, 3)):
        assert validate({"full_scale": full, "network": {"scales": scales}}, "test").scales == found
