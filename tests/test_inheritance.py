"""Configs that inherit from others, by `extends` or `<<`."""

from __future__ import annotations

from pathlib import Path

import pytest

from utils.config import Config, default_name, load, read_file
from utils.config.sections import LrScheduleConfig, OptimizerConfig
from utils.config.yaml_files import SHIPPED
from utils.errors import UserError


def write(folder: Path, text: str) -> str:
    path = folder / "configs.yaml"
    path.write_text(text)
    return str(path)


def test_a_file_and_a_config_extend_others(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "base.yaml").write_text(
        "base: &base {seed: 1, num_epochs: 7, lr_schedule: {start_lr: 0.5, warmup_steps: 3}}\n"
        "demo: {<<: *base, Nsamples: 100}\nother: {seed: 4}"
    )
    (tmp_path / "middle.yaml").write_text("extends: shared/base.yaml\nmiddle: {extends: base, num_epochs: 8}")
    path = write(
        tmp_path,
        "extends: middle.yaml\nmine: {extends: middle, seed: 2, lr_schedule: {start_lr: 0.1}}\ndemo: {seed: 3}\n"
        "base: {extends: base, num_epochs: 9}\nother: {extends: mine}",
    )

    def values(name: str) -> tuple[int, int, int]:
        config = load(path, name)
        return config.seed, config.num_epochs, config.Nsamples

    default = Config().Nsamples
    assert values("mine") == (2, 8, default)
    assert values("demo") == (3, 7, 100), "a config of the same name inherits, without the base of this file"
    assert values("base") == (1, 9, default)
    assert values("middle") == (1, 8, default), "it was complete before this file's base"
    assert values("other") == (2, 8, default), "extends replaces the config of the same name"
    assert list(read_file(path)) == ["mine", "demo", "base", "other"]
    assert [load(path, name).lr_schedule for name in ("mine", "middle")] == [
        LrScheduleConfig(start_lr=start_lr, warmup_steps=3) for start_lr in (0.1, 0.5)
    ]
    write(tmp_path, "extends: middle.yaml\nmine: {extends: demo}")
    assert default_name(path) == "mine", "the only one of its own"


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
    path, text = write(tmp_path, "extends: UNet.yaml\nmine: {extends: demo, seed: 3}"), "extends: UNet.yaml\nown: {}"
    demo = load(str(SHIPPED / "UNet.yaml"), "demo")
    assert load(path, "mine") == demo.model_copy(update={"seed": 3})
    (tmp_path / "UNet.yaml").write_text("demo: {num_epochs: 9}")
    assert load(path, "mine") == Config(num_epochs=9, seed=3)
    (tmp_path / "UNet.yaml").write_text(text)
    assert load(path, "demo") == demo


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("extends: none.yaml\na: {}", "cannot read {folder}/none.yaml: No such file or directory; correct extends in "),
        (
            "extends: b.yaml\na: {}",
            "the files {folder}/configs.yaml -> {folder}/b.yaml -> {folder}/configs.yaml extend",
        ),
        (
            "a: {extends: bsae}\nbase: {}",
            "which is no earlier config; configs of another file need extends: UNet.yaml at",
        ),
        ("a: {extends: [b, c]}", "config a extends ['b', 'c'], which is no earlier config"),
        ("a: {<<: *base}", "undefined alias 'base'"),
        ("a: {<<: *base}", "; << finds anchors above it in the same file, extends: NAME any config"),
        ("a: {<<: base}", "configs.yaml: << takes an alias such as *base, got 'base'; to name a config, write extends"),
        ("base: {}\na: {extends: bsae}", "config a extends bsae, which is no earlier config; did you mean base?"),
    ],
)
def test_wrong_extends_is_refused_in_one_line(tmp_path: Path, text: str, says: str) -> None:
    path = write(tmp_path, text)
    (tmp_path / "b.yaml").write_text("extends: ./configs.yaml\nb: {}")
    with pytest.raises(UserError) as caught:
        load(path, "a")
    assert says.replace("{folder}", str(tmp_path)) in str(caught.value)
