"""Tests of utils.config: reading, types, checks, error messages, and batch sizes for a number of ranks."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from utils import cli
from utils import config as configs
from utils.config import Config, differences, flatten, load, parse_value, read_file, to_yaml, validate
from utils.config.messages import keys_of, similar
from utils.errors import UserError

PATHS = ["expdir", "train_path", "val_path", "use_cache"]
PATHS += [f"{split}_path_npy_{kind}" for split in ("train", "val") for kind in ("data", "label")]


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
    others = {"'1e-4'": "1e-4", "[0.9, 1e-3, None, on]": [0.9, 1e-3, None, "on"], "{a: 1e-3}": {"a": 1e-3}}
    for text, value in (numbers | constants | dict(zip(words, words, strict=True)) | others).items():
        parsed = parse_value(text)
        assert parsed == value, text
        assert type(parsed) is type(value), text
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
    path = write(tmp_path, text)
    short = load(path, "short")
    assert (short.num_epochs, short.enable_amp, short.use_cache) == (2, True, None)
    assert (short.lr_schedule.scaling, short.lr_schedule.start_lr) == ("linear", 1e-3)
    assert short.global_batch_size == Config().global_batch_size, "missing keys have their defaults"
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
    }
    config = validate(values, "test")
    for name in ("run one", "1e4", "2"):
        assert load(write(tmp_path, to_yaml(config, name)), name) == config


def test_the_log_shows_what_differs_from_the_defaults_and_from_the_inherited_config(tmp_path: Path) -> None:
    """It once began with all hundred keys. A path in the inherited config need not exist."""
    config = validate({"num_epochs": 3, "network": {"width": 8}}, "test")
    assert differences(Config(), config) == {"num_epochs": 10, "network.width": 64}
    path = write(
        tmp_path,
        "x: &x {num_epochs: 3, expdir: $MISSING/a, network: {width: 8, scales: 2}}\nequal: {extends: x}\n"
        "mine: {<<: *x, num_epochs: 3, expdir: b, optimizer: {name: soap}, network: {scales: 3}}\n",
    )
    shown = {name: configs.describe_config(config, path, name).splitlines() for name in ("x", "equal", "mine")}
    assert shown["equal"][0] == "Config equal extends x: equal"
    assert shown["equal"][2:] == shown["x"][1:]
    assert shown["mine"][0] == (
        "Config mine extends x: expdir b, network.scales 3, optimizer.name soap, optimizer.betas [0.95, 0.95]"
    )
    assert shown["x"] == [
        "Config x, keys that differ from the defaults:",
        "  num_epochs: 3 (default 10)",
        "  network.width: 8 (default 64)",
    ]


def test_config_may_be_in_another_file_of_the_same_directory(tmp_path: Path) -> None:
    """The given file comes first; of the other files, only one may contain the config."""
    path = write(tmp_path, "base: {seed: 1}\ntest: {seed: 2}")
    (tmp_path / "tuned.yaml").write_text("tuned: {seed: 3}")
    (tmp_path / "test.yaml").write_text("test: {seed: 4}\nboth: {seed: 7}")
    (tmp_path / "other.yaml").write_text("test: {seed: 8}\nboth: {seed: 9}")
    assert [load(path, "test").seed, load(path, "tuned", {"num_epochs": 5}).seed] == [2, 3]
    assert load(str(tmp_path / "test.yaml"), "test").seed == 4
    with pytest.raises(UserError, match=r"both is in .*other.yaml and in .*test.yaml; choose one with --yaml_config"):
        load(path, "both")


def test_error_for_an_unknown_config_lists_the_known_ones_and_unreadable_files(tmp_path: Path) -> None:
    """Fixed: a tab or a duplicate key in a file hid its configs. A config in two files was listed twice."""
    path = write(tmp_path, "base: {}\nshort: {}")
    (tmp_path / "tuned.yaml").write_text("base: {}\ntuned: {}")
    (tmp_path / "benchy-conf.yaml").write_text("IO: {batches: 30}")  # fixed: listed as a config
    (tmp_path / "tab.yaml").write_text("mine:\n\tseed: 1")
    (tmp_path / "twice.yaml").write_text("mine: {seed: 1, seed: 2}")
    faults = r"; cannot read \S*/tab.yaml: .*line 2.*; indent with spaces; cannot read \S*/twice.yaml: .*duplicate key"
    for name, hint, unreadable in (("tunde", "did you mean tuned?", "tuned$"), ("mine", "", faults)):
        with pytest.raises(UserError, match=f"^unknown config {name} in {re.escape(path)} and the other ") as caught:
            load(path, name)
        text = str(caught.value)
        assert "; known: base, short, tuned" in text
        assert hint in text
        assert re.search(unreadable, text), "only files that mention the config"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty; write named configs"),
        ("test:", "must hold named configs, .* test is None$"),
        ("- test", "must hold named configs"),
        ("test:\n  lr_schedule:\n    end_lr: 0.\n    end_lr: 1.", "line 3: duplicate key end_lr"),
        ("test: {num_epochs: 1", "cannot read .*expected ',' or '}'"),
        ("test: {seed: !!python/object/apply:os.getcwd []}", "cannot read .*constructor for the tag"),
    ],
)
def test_invalid_yaml_file_is_refused_in_one_line(tmp_path: Path, text: str, says: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(UserError, match=says) as caught:
        read_file(path)
    assert path in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unreadable_file_is_refused(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "none.yaml", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(UserError, match=f"cannot read {re.escape(str(path))}: {reason}.*--yaml_config"):
            read_file(str(path))


# --- paths ---------------------------------------------------------------------------------------------------------


def test_home_and_variables_are_expanded_in_all_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed bug: `expdir: ~/runs` created a directory named ~."""
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    monkeypatch.delenv("MISSING", raising=False)
    path = write(
        tmp_path, f"t: {{{', '.join(f'{key}: ~/{key}' for key in PATHS)}, dataset: {{directory: $SCRATCH/d}}}}"
    )
    config = load(path, "t")
    assert [getattr(config, key) for key in PATHS] == [f"/home/me/{key}" for key in PATHS]
    assert config.dataset.directory == "/scratch/me/d"
    assert load(path, "t", {"train_path": ["~/a", "${SCRATCH}1/b"]}).paths("train_path") == [
        "/home/me/a",
        "/scratch/me1/b",
    ]
    assert load(path, "t", {"expdir": "./~"}).expdir == "./~"
    for wrong, says in (("$MISSING/x", "variable MISSING"), ("~nobody-has-this-name/x", "no home directory")):
        with pytest.raises(UserError, match=f"expdir: .*{says}"):
            load(path, "t", {"expdir": wrong})
    dollar = load(path, "t", {"expdir": "a$$SCRATCH"})
    assert dollar.expdir == "a$SCRATCH"
    path_again = write(tmp_path, to_yaml(dollar, "t"))
    assert load(path_again, "t") == dollar, "config.yaml states the same path"
    options = cli.parse(["--config=test", "--resume=~/a", "--init_from=~/b"])  # shells leave ~ in --flag=~/x unchanged
    assert (options.resume, options.init_from) == ("/home/me/a", "/home/me/b")


# --- keys of the tutorial's later editions ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "flags", "enabled", "precision"),
    [
        ("amp_mode: None", "", False, "bfloat16"),
        ("amp_mode: 'fp16'", "", True, "float16"),
        ("amp_mode: none, enable_amp: True", "", True, "bfloat16"),
        ("amp_mode: none, enable_amp: True, precision: float16", "", True, "float16"),
        ("amp_mode: fp16, enable_amp: False, enable_fused: True", "", True, "float16"),
        ("amp_mode: none", "--set=enable_amp=true", True, "bfloat16"),
        ("amp_mode: fp16", "--set=enable_amp=false", False, "float16"),
        ("enable_amp: True, precision: float16", "--set=amp_mode=bf16", True, "bfloat16"),
        ("amp_mode: bf16, enable_amp: True", "--set=amp_mode=None", False, "bfloat16"),
        ("enable_amp: True", "--amp_mode=none", False, "bfloat16"),
        ("enable_amp: False", "--amp_mode=fp16 --enable_amp --enable_fused", True, "float16"),
        # --set overrides flags.
        ("enable_amp: True", "--enable_amp --set=amp_mode=none", False, "bfloat16"),
        ("enable_amp: True", "--amp_mode=fp16 --set=enable_amp=false", False, "float16"),
        ("enable_amp: False", "--amp_mode=fp16 --set=precision=bfloat16", True, "bfloat16"),
    ],
)
def test_amp_mode_of_a_yaml_file_and_of_the_command_line(
    tmp_path: Path, values: str, flags: str, enabled: bool, precision: str
) -> None:
    config = load(write(tmp_path, f"test: {{{values}}}"), "test", cli.parse(flags.split()).overrides)
    assert (config.enable_amp, config.precision) == (enabled, precision)


def test_an_unknown_amp_mode_is_refused() -> None:
    with pytest.raises(UserError, match="amp_mode must be none, fp16 or bf16, got 'fp8'"):
        cli.parse(["--amp_mode=fp8"])


# --- checking --------------------------------------------------------------------------------------------------------


def nested(key: str, value: Any) -> dict[str, Any]:
    """The nested mapping with this value at a dotted key."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def message(values: dict[str, Any]) -> str | None:
    """The error for these values; None if they are valid."""
    try:
        validate(values, "c")
    except UserError as error:
        return str(error)
    return None


WRONG: list[Any] = [None, "x", True, 3, 2.5, 1e300, -1, 10**25, math.nan, math.inf, "", {}, [], [None], ["x"], [[-1]]]


@pytest.mark.parametrize("key", list(keys_of(Config)))
def test_wrong_values_are_refused_in_one_line_that_names_the_key_and_the_value(key: str) -> None:
    refused = [(value, text) for value in WRONG if (text := message(nested(key, value))) is not None]
    assert len(refused) > 3, "values that this key must refuse"
    for value, text in refused:
        assert "\n" not in text
        # A combination of keys names all of them.
        assert re.match(rf"config 'c': {re.escape(key)}[.\d]*:? .*must .*got ", text) or key in text, (value, text)


def test_all_faults_are_reported_in_one_line() -> None:
    schedule = {"strat_lr": 1.0, "shape": "cosin"}
    values = {"num_epoch": 3, "seed": "x", "lr_schedule": schedule, "optimizer": {"eps": 0.0}, "network": 5}
    text = message({**values, "data_size": [1] * 10_000}) or ""
    assert "\n" not in text
    assert len(text) < 1500, "a long value is shortened"
    for part in (
        "config 'c': ",
        "unknown key num_epoch; did you mean num_epochs?",
        "unknown key lr_schedule.strat_lr; did you mean lr_schedule.start_lr?",
        "seed must be a valid integer, got 'x'",
        "lr_schedule.shape must be 'cosine', 'step' or 'constant', got 'cosin'",
        "optimizer.eps must be greater than 0, got 0.0",
        "network must be a section with keys, got 5",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("conv_init", "did you mean weight_init.conv_init?"),  # a fixed bug: it was answered with checkpoint
        ("step_lr", "--print_config prints all keys"),
        ("optimizer.lr", "did you mean lr_schedule or lr_schedule.start_lr or lr_schedule.end_lr?"),
        ("batch_size", "did you mean local_batch_size or global_batch_size or base_batch_size?"),
        ("lr_schedule.width", "did you mean network.width?"),
    ],
)
def test_unknown_keys_are_answered_with_similar_keys_of_all_sections(key: str, hint: str) -> None:
    assert message(nested(key, 1)) == f"config 'c': unknown key {key}; {hint}"


def test_only_near_names_are_suggested() -> None:
    """A fixed bug: amp_mode was answered with Nsamples, and patch_size with data_size."""
    keys = list(Config.model_fields)
    names = {"num_epoch": "num_epochs", "sed": "seed", "num_workers": "num_data_workers", "nsamples": "Nsamples"}
    for word, name in (names | {"exp_dir": "expdir", "cache": "use_cache"}).items():
        assert similar(word, keys) == [name]
    for word in ("amp_mode", "patch_size", "data_dir", "num_iters", "world_size", ""):
        assert similar(word, keys) == [], word


def test_numbers_and_booleans_accept_no_other_types() -> None:
    """Numbers refuse strings, booleans, NaN and infinity; booleans refuse everything but true and false."""
    checked = 0
    for key, default in flatten(Config()).items():
        if type(default) in (int, float, bool):
            for value in ["true", 1] if isinstance(default, bool) else ["3", True, math.nan, math.inf, [3]]:
                assert f"config 'c': {key} must " in (message(nested(key, value)) or "")
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


@pytest.mark.parametrize(
    ("values", "ranks", "says"),
    [
        ({"static_graph": True, "accumulation_steps": 2}, 1, "static_graph needs accumulation_steps 1"),
        (
            {"fused_tail": True, "network": {"space_to_depth": ["last"]}, "loss": "huber"},
            1,
            "fused_tail needs .*loss l1",
        ),
        ({"enable_benchy": True, "enable_manual_profiling": True}, 1, "cannot be combined"),
        ({"N_in_channels": 3}, 1, "vector_channels.inputs: there is no channel 3, since N_in_channels is 3"),
        ({"data_loader_config": "classification"}, 1, "classification and dataset.name must be set together"),
        ({"global_batch_size": 64}, 3, "global_batch_size 64 is not divisible by 3 ranks; use a multiple of 3"),
        ({"local_batch_size": 4, "accumulation_steps": 8}, 1, "not divisible by 1 ranks × accumulation_steps 8"),
        ({"Nsamples": 127, "local_batch_size": 64}, 2, "Nsamples 127 is less than global_batch_size 128"),
        ({"lr_schedule": {"shape": "step"}}, 1, "lr_schedule: shape step needs drop_epochs"),
        ({"lr_schedule": {"warmup_steps": 3, "warmup_epochs": 0.5}}, 1, "warmup_steps and warmup_epochs are both set"),
    ],
)
def test_contradictions_are_refused_with_a_remedy(values: dict[str, Any], ranks: int, says: str) -> None:
    with pytest.raises(UserError, match=says):
        validate(values, "test").for_world(ranks)


def test_warmup_longer_than_the_run_is_ignored_at_the_base_batch_size() -> None:
    config = Config(Nsamples=64, lr_schedule={"scaling": "sqrt", "warmup_steps": 1000})
    assert not config.for_world(1).warms_up


def test_full_scale_sets_the_number_of_scales_unless_network_scales_is_set() -> None:
    for full, scales, expected in ((True, None, 6), (False, None, 5), (True, 3, 3), (False, 3, 3)):
        assert validate({"full_scale": full, "network": {"scales": scales}}, "test").scales == expected
