"""Tests of utils.config: reading, inheritance, types, checks, error messages, and batch sizes for a number of ranks."""

import math
import re
from pathlib import Path
from typing import Any

import pytest

from utils import cli
from utils.config import Config, default_name, flatten, load, parse_value, read_file, to_yaml, validate
from utils.config.channels import Channel, known_channels
from utils.config.messages import keys_of, similar
from utils.config.sections import LrScheduleConfig, OptimizerConfig
from utils.config.yaml_files import SHIPPED
from utils.errors import UserError


def write(folder: Path, text: str) -> str:
    path = folder / "configs.yaml"
    path.write_text(text)
    return str(path)


def nested(key: str, value: Any) -> dict[str, Any]:
    """The nested mapping with this value at a dotted key."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def message(values: dict[str, Any]) -> str:
    """The error for these values; empty if they are valid."""
    try:
        validate(values, "c")
    except UserError as error:
        return str(error)
    return ""


def test_yaml_values_are_parsed_as_yaml_1_2() -> None:
    """1e-4 is a number; on, yes and 1:30 are strings; None is null."""
    numbers = {"1e-4": 1e-4, "2.E-4": 2e-4, "+1E3": 1000.0, "0.": 0.0, ".5": 0.5, ".inf": math.inf, "-3": -3, "0": 0}
    constants = {"True": True, "false": False, "None": None, "null": None, "~": None, "": None, "'None'": "None"}
    words = {word: word for word in ("on", "yes", "OFF", "y", "1:30", "1_000", "010", "0x10", "2024-01-31", "1e", ".")}
    others = {"'1e-4'": "1e-4", "[0.9, 1e-3, None, on]": [0.9, 1e-3, None, "on"], "{a: 1e-3}": {"a": 1e-3}}
    for text, value in (numbers | constants | words | others).items():
        parsed = parse_value(text)
        assert (parsed, type(parsed)) == (value, type(value)), text


def test_saved_config_reads_back_the_same(tmp_path: Path) -> None:
    """Includes strings that look like numbers or YAML, and numbers as PyYAML writes them, such as 1.0e-10."""
    values: dict[str, Any] = {
        "expdir": "None-such: 'quoted' # words",
        "val_path_npy_data": "None",
        "train_path": ["1e-4", "{a: 'b\"", "*&!%@`", "ü"],
        "val_path": "010",
        "seed": 2**40,
        "lr_schedule": {"start_lr": 1e-10, "scaling": "linear"},
        "clip_grad_norm": 1e22,
        "use_cache": "on",
    }
    config = validate(values, "test")
    for name in ("run one", "1e4", "2"):
        assert load(write(tmp_path, to_yaml(config, name)), name) == config


def test_overrides_change_single_keys(tmp_path: Path) -> None:
    path = write(tmp_path, "a: {enable_amp: True, use_cache: None, lr_schedule: {start_lr: 1e-3, warmup_steps: 3}}")
    config = load(path, "a", {"lr_schedule.start_lr": 0.5, "optimizer.name": "sgd", "seed": 9})
    assert (config.enable_amp, config.use_cache, config.seed) == (True, None, 9)
    assert config.lr_schedule == LrScheduleConfig(start_lr=0.5, warmup_steps=3)
    assert (config.optimizer.name, config.optimizer.betas) == ("sgd", [0.9, 0.999])
    replaced = load(path, "a", {"lr_schedule": {"start_lr": 0.5}}).lr_schedule
    assert replaced == LrScheduleConfig(start_lr=0.5), "an override of a section replaces the whole section"


def test_a_file_and_a_config_extend_others(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "base.yaml").write_text(
        "base: &base {seed: 1, num_epochs: 7}\ndemo: {<<: *base, Nsamples: 100}\nother: {seed: 4}"
    )
    (tmp_path / "middle.yaml").write_text("extends: shared/base.yaml\nmiddle: {extends: base, num_epochs: 8}")
    path = write(
        tmp_path,
        "extends: middle.yaml\nmine: {extends: middle, seed: 2}\ndemo: {seed: 3}\n"
        "base: {extends: base, num_epochs: 9}\nother: {extends: mine}",
    )
    assert load(path, "mine") == Config(seed=2, num_epochs=8)
    # A config of the same name inherits, without the base of this file.
    assert load(path, "demo") == Config(seed=3, num_epochs=7, Nsamples=100)
    assert load(path, "base") == Config(seed=1, num_epochs=9)
    assert load(path, "middle") == Config(seed=1, num_epochs=8), "it was complete before this file's base"
    assert load(path, "other") == Config(seed=2, num_epochs=8), "extends replaces the config of the same name"
    assert list(read_file(path)) == ["mine", "demo", "base", "other"]


@pytest.mark.parametrize("how", ["extends: demo", "<<: *demo", "<<: [*seed, *demo]", "extends: demo, <<: *seed"])
def test_a_section_keeps_the_inherited_keys_that_it_lacks(how: str, tmp_path: Path) -> None:
    """Fixed bug: `lr_schedule: {start_lr: 0.004}` reset all other keys of the section to their defaults, silently."""
    path = write(
        tmp_path,
        "base: &base {optimizer: {name: soap, eps: 1e-6}, seed: 5}\n"
        "demo: &demo {<<: *base, optimizer: {<<: {eps: 1e-5, weight_decay: 1e-4}, betas: [0.5, 0.5]}, num_epochs: 3}\n"
        f"seed: &seed {{seed: 6}}\nmine: {{{how}, optimizer: {{eps: 1e-4}}}}",
    )
    mine, demo = load(path, "mine"), load(path, "demo").optimizer
    assert demo == OptimizerConfig(name="soap", eps=1e-5, weight_decay=1e-4, betas=[0.5, 0.5])
    assert mine.optimizer == demo.model_copy(update={"eps": 1e-4})
    assert (mine.num_epochs, mine.seed) == (3, 6 if "seed" in how else 5)
    assert load(write(tmp_path, "<<: {a: {seed: 5}}\na: {num_epochs: 3}"), "a") == Config(seed=5, num_epochs=3)


def test_a_file_in_another_directory_extends_the_shipped_one(tmp_path: Path) -> None:
    """Its own directory comes first. A file may have the name of the shipped one."""
    path = write(tmp_path, "extends: UNet.yaml\nmine: {extends: demo, seed: 3}")
    demo = load(str(SHIPPED / "UNet.yaml"), "demo")
    assert load(path, "mine") == demo.model_copy(update={"seed": 3})
    (tmp_path / "UNet.yaml").write_text("extends: UNet.yaml\nown: {}")
    assert load(path, "demo") == demo
    (tmp_path / "UNet.yaml").write_text("demo: {num_epochs: 9}")
    assert load(path, "mine") == Config(num_epochs=9, seed=3)


def test_config_is_found_in_another_file_of_the_same_directory(tmp_path: Path) -> None:
    """Fixed: a tab in a file hid its configs; keys of benchy-conf.yaml were listed as configs."""
    path = write(tmp_path, "base: {seed: 1}\ntest: {seed: 2}")
    (tmp_path / "other.yaml").write_text("test: {seed: 8}\ntuned: {seed: 3}\nboth: {seed: 9}")
    (tmp_path / "test.yaml").write_text("test: {seed: 4}\nboth: {seed: 7}\nIO: {batches: 30}")
    (tmp_path / "tab.yaml").write_text("mine:\n\tseed: 1")
    assert [load(path, "test").seed, load(path, "tuned", {"num_epochs": 5}).seed] == [2, 3]
    assert load(str(tmp_path / "test.yaml"), "test").seed == 4
    known = r"; known: base, test, tuned, both"
    for name, says in {
        "both": r"both is in .*other.yaml and in .*test.yaml; choose one with --yaml_config",
        "tunde": rf"^unknown config tunde in {re.escape(path)} and the other .*; did you mean tuned\?{known}$",
        "mine": rf"^unknown config mine .*{known}; cannot read \S*/tab.yaml: .*line 2.*; indent with spaces",
    }.items():
        with pytest.raises(UserError, match=says):
            load(path, name)


def test_invalid_yaml_file_is_refused_in_one_line(tmp_path: Path) -> None:
    path = write(tmp_path, "")
    (tmp_path / "b.yaml").write_text("extends: ./configs.yaml\nb: {}")
    for text, says in {
        "": f"{path} is empty; write named configs",
        "a:": f"{path} must hold named configs, such as base: {{seed: 1}}, but a is None",
        "a:\n  lr_schedule:\n    end_lr: 0.\n    end_lr: 1.": f"{path}: line 4: duplicate key end_lr",
        "a: {seed: !!python/object/apply:os.getcwd []}": "could not determine a constructor for the tag",
        "a: {seed: 1}\nother: a: b": f"{path}: line 2, column 9: mapping values are not allowed here; indent all keys",
        "a:\n  seed: 1\n   tf32: true": "mapping values are not allowed here; indent all keys of a mapping alike",
        "extends: none.yaml\na: {}": f"cannot read {tmp_path}/none.yaml: No such file or directory; correct extends",
        "extends: b.yaml\na: {}": f"the files {path} -> {tmp_path}/b.yaml -> {path} extend",
        "base: {}\na: {extends: bsae}": "config a extends bsae, which is no earlier config; did you mean base?",
        "a: {<<: *base}": "undefined alias 'base'; << finds anchors above it in the same file",
        # Fixed: a name that is no text was a traceback.
        "64: {}": f"{path}: the name of a config must be a text, got 64; write it in quotes",
        "extend: UNet.yaml\na: {}": "but extend is 'UNet.yaml'; did you mean extends?",
        "a: {extend: base}": "config 'a': unknown key extend; did you mean extends?",
        "a: {<<: base}": f"{path}: << takes an alias such as *base, got 'base'; to name a config, write extends",
    }.items():
        write(tmp_path, text)
        with pytest.raises(UserError) as caught:
            load(path, "a")
        assert says in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_file_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    """Fixed: a path in Latin-1 was read with other characters, so that the run went to another directory."""
    path = Path(write(tmp_path, ""))
    for content, line in (("a: {}\nb: {expdir: läufe}".encode("latin-1"), 2), ("a: {}".encode("utf-16"), 1)):
        path.write_bytes(content)
        with pytest.raises(UserError, match=f"^cannot read {path}: line {line} is not UTF-8; save the file as UTF-8$"):
            load(str(path), "a")


def test_without_a_name_a_file_of_several_configs_is_no_choice(tmp_path: Path) -> None:
    """Fixed: the shipped `base` was trained, if the file extended UNet.yaml or stood next to it."""
    path = write(tmp_path, "extends: UNet.yaml\na: {}\nb: {}")
    with pytest.raises(UserError, match=f"^{path} has several configs; choose one with --config: a, b$"):
        default_name(path)
    assert default_name(write(tmp_path, "extends: UNet.yaml\na: {}")) == "a"
    assert default_name(write(tmp_path, "a: {}\nbase: {}")) == "base"


def test_from_another_directory_the_error_names_the_repository(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    shipped = SHIPPED / "UNet.yaml"
    for path, remedy in (
        ("./config/UNet.yaml", f"run the command in {SHIPPED.parent}, or give --yaml_config {shipped}"),
        ("./config/mine.yaml", "correct --yaml_config"),
    ):
        with pytest.raises(UserError, match=f"^cannot read {path}: No such file or directory; {remedy}$"):
            load(path, "a")


def test_home_and_variables_are_expanded_in_all_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed bug: `expdir: ~/runs` created a directory named ~."""
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    keys = ["expdir", "train_path", "val_path", "use_cache"]
    keys += [f"{split}_path_npy_{kind}" for split in ("train", "val") for kind in ("data", "label")]
    config = validate({key: f"~/{key}" for key in keys} | {"dataset": {"directory": "$SCRATCH/d"}}, "t")
    assert [getattr(config, key) for key in keys] == [f"/home/me/{key}" for key in keys]
    assert config.dataset.directory == "/scratch/me/d"
    assert validate({"train_path": ["~/a", "${SCRATCH}1/b"]}, "t").train_path == ["/home/me/a", "/scratch/me1/b"]
    assert "expdir: " in message({"expdir": "$MISSING/x"})
    assert "no home directory" in message({"expdir": "~nobody-has-this-name/x"})
    dollar = validate({"expdir": "./~/a$$SCRATCH"}, "t")
    assert dollar.expdir == "./~/a$SCRATCH"
    assert load(write(tmp_path, to_yaml(dollar, "t")), "t") == dollar, "config.yaml states the same path"
    options = cli.parse(["--config=test", "--resume=~/a", "--init_from=~/b"])  # shells leave ~ in --flag=~/x unchanged
    assert (options.resume, options.init_from) == ("/home/me/a", "/home/me/b")


def test_amp_mode_of_the_tutorials_later_editions(tmp_path: Path) -> None:
    for values, flags, enabled, precision in (
        ("amp_mode: none, enable_amp: True, precision: float16", "", True, "float16"),
        ("amp_mode: fp16, enable_amp: False, enable_fused: True", "", True, "float16"),
        ("amp_mode: none", "--set=enable_amp=true", True, "bfloat16"),
        ("enable_amp: True, precision: float16", "--set=amp_mode=bf16", True, "bfloat16"),
        ("amp_mode: bf16, enable_amp: True", "--set=amp_mode=None", False, "bfloat16"),
        # --set overrides flags.
        ("enable_amp: True", "--enable_amp --set=amp_mode=none", False, "bfloat16"),
        ("enable_amp: True", "--amp_mode=fp16 --set=enable_amp=false", False, "float16"),
    ):
        config = load(write(tmp_path, f"test: {{{values}}}"), "test", cli.parse(flags.split()).overrides)
        assert (config.enable_amp, config.precision) == (enabled, precision), (values, flags)


WRONG: list[Any] = [None, "x", True, 3, 2.5, 1e300, -1, 10**25, math.nan, math.inf, "", {}, [], [None], ["x"], [[-1]]]


def test_wrong_values_of_every_key_are_refused_in_one_line_that_names_the_key_and_the_value() -> None:
    """Numbers refuse strings, booleans, NaN and infinity; booleans refuse everything but true and false."""
    defaults, numbers = flatten(Config()), 0
    for key in keys_of(Config):
        refused = [(value, text) for value in WRONG if (text := message(nested(key, value)))]
        assert len(refused) > 3, f"{key}: values that it must refuse"
        for value, text in refused:
            assert "\n" not in text
            # A combination of keys names all of them.
            assert re.match(rf"config 'c': {re.escape(key)}[.\d]*:? .*must .*got ", text) or key in text, (value, text)
        if type(defaults.get(key)) in (int, float, bool):
            for value in ["true", 1] if isinstance(defaults[key], bool) else ["3", True, math.nan, math.inf, [3]]:
                assert f"config 'c': {key} must " in message(nested(key, value)), value
            numbers += 1
    assert numbers > 40


def test_all_faults_are_reported_in_one_line_with_similar_keys_of_all_sections() -> None:
    text = message({"num_epoch": 3, "data_size": [1] * 10_000, "lr_schedule": {"shape": "cosin"}, "optimizer": "sgd"})
    assert len(text.splitlines()[0]) == len(text) < 1000, "a long value is shortened"
    for part in (
        "unknown key num_epoch; did you mean num_epochs?",
        "lr_schedule.shape must be 'cosine', 'constant' or 'cooldown', got 'cosin'",
        "optimizer must be a section with keys; did you mean optimizer.name=sgd?",
    ):
        assert part in text
    for key, hint in {
        "conv_init": "did you mean weight_init.conv_init?",  # a fixed bug: it was answered with checkpoint
        "step_lr": "--print_config prints all keys",
        "learning_rate": "did you mean lr_schedule.start_lr?",
        "optimizer.lr": "did you mean lr_schedule or lr_schedule.start_lr or lr_schedule.end_lr?",
        "batch_size": "did you mean local_batch_size or global_batch_size or base_batch_size?",
        "lr_schedule.width": "did you mean network.width?",
    }.items():
        assert message(nested(key, 1)) == f"config 'c': unknown key {key}; {hint}"
    keys = list(Config.model_fields)
    assert similar("num_workers", keys) == ["num_data_workers"]
    assert similar("patch_size", keys) == similar("amp_mode", keys) == [], "a fixed bug: data_size and Nsamples"


def test_batch_sizes_are_resolved_for_the_number_of_ranks(tmp_path: Path) -> None:
    """The global batch is divided among the ranks; a local batch size sets the global one, and so the steps."""
    resolved = Config(global_batch_size=64).for_world(8)
    assert (resolved.local_batch_size, resolved.global_batch_size) == (8, 64)
    assert resolved.for_world(8) == resolved
    resolved = Config(local_batch_size=16, global_batch_size=64, Nsamples=1024, num_epochs=3).for_world(8)
    assert (resolved.steps_per_epoch, resolved.total_steps) == (8, 24)
    path = write(tmp_path, "test: {local_batch_size: 32}")  # an override of the global one replaces it
    for overrides, sizes in (({"global_batch_size": 48}, (24, 48)), ({"local_batch_size": 8}, (8, 16)), ({}, (32, 64))):
        resolved = load(path, "test", overrides).for_world(2)
        assert (resolved.local_batch_size, resolved.global_batch_size) == sizes
    for full, scales, expected in ((True, None, 6), (False, None, 5), (True, 3, 3)):
        assert validate({"full_scale": full, "network": {"scales": scales}}, "test").scales == expected


def test_contradictions_are_refused_with_a_remedy() -> None:
    def vector(**axes: Any) -> dict[str, Any]:
        named = [{"name": axis, "component": f"v {axis}", **keys} for axis, keys in axes.items()]
        return {"channels": {"targets": named}}

    alike = "channels: the components of v need one unit, one scale, no center and no logarithm"
    for values, ranks, says in (
        ({"enable_benchy": True, "enable_manual_profiling": True}, 1, "cannot be combined"),
        ({"channels": {"targets": [{"name": "a"}] * 2}}, 1, "channels: two channels have the name a; rename one"),
        (vector(x={}, z={}), 1, "channels: the vector v has no component y; add it, or make all scalars"),
        (vector(x={}, y={"scale": 2.0}, z={}), 1, alike),
        (vector(x={}, y={}, z={"unit": "G"}), 1, alike),
        (vector(**{axis: {"center": 1.0} for axis in "xyz"}), 1, alike),
        ({"channels": {"targets": [{"name": "a"}]}, "channel_weights": [1.0, 2.0]}, 1, "channel_weights must have 1 v"),
        ({"data_loader_config": "classification"}, 1, "classification and dataset.name must be set together"),
        ({"global_batch_size": 64}, 3, "64 is not divisible by 3 ranks; use a multiple of 3, or start 2 of them"),
        ({"local_batch_size": 4, "accumulation_steps": 8}, 1, "_steps 8 must divide local_batch_size 4"),
        ({"Nsamples": 127, "local_batch_size": 64}, 2, "Nsamples 127 is less than global_batch_size 128"),
        ({"lr_schedule": {"warmup_steps": 3, "warmup_epochs": 0.5}}, 1, "warmup_steps and warmup_epochs are both set"),
    ):
        with pytest.raises(UserError, match=says):
            validate(values, "test").for_world(ranks)


def test_named_channels_set_their_number_and_the_vectors(tmp_path: Path) -> None:
    """Also in place of given numbers; the channels of the other side stay those of their number."""
    named = [{"name": name, "unit": "G", "scale": 2, "component": f"field {name}"} for name in "zxy"] + [{"name": "q"}]
    path = write(tmp_path, to_yaml(validate({"channels": {"targets": named}, "N_out_channels": 9}, "c"), "a"))
    for config in (load(path, "a"), load(path, "a", {"channels": {"targets": named}, "N_out_channels": 2})):
        assert (config.N_in_channels, config.N_out_channels) == (4, 4)
        assert config.vectors == ([[1, 2, 3]], [[1, 2, 0]])
        inputs, targets = config.volume_channels
        assert inputs == (*known_channels("inputs", 4),)
        assert targets == (*(Channel(name, "G", 2.0, component=f"field {name}") for name in "zxy"), Channel("q"))
    assert load(path, "a", {"channels": {}}).volume_channels[1] == (*known_channels("targets", 4),)
    scalars = validate({"N_in_channels": 3, "N_out_channels": 2}, "c")
    assert scalars.vectors == ([], []), "fixed: the default vectors had channels that these data lack"
