"""Tests of the errors for wrong values: every key names what it expects in this program's words, and has limits."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from utils import cli
from utils.config import Config, validate
from utils.config.messages import SYNONYMS
from utils.config.sections import Section
from utils.errors import UserError

PYDANTIC = re.compile(
    r"Input should|Value error|Extra inputs|should have|Keys should|unable to|after validation|\[type="
)
# A mapping is no value of any key. Values in lists have their own types.
WRONG: list[Any] = [None, "x", True, 3, 2.5, 1e300, -1, 10**25, 10**400, float("nan"), float("inf"), "\ud800", "", {}]
WRONG += [{1: 2}, [], [None], ["x"], [-1], [10**25], [[1, 2, "x"]], [[1, 2, -3]], [1] * 9, ["", ""], b"x"]


def fields(section: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """All keys, with dots, and their fields; sections included."""
    for name, field in section.model_fields.items():
        yield prefix + name, field
        if field.annotation in Section.__subclasses__():
            yield from fields(field.annotation, f"{prefix}{name}.")


def nested(key: str, value: Any) -> dict[Any, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def message(values: dict[Any, Any]) -> str | None:
    try:
        validate(values, "c")
    except UserError as error:
        return str(error)
    return None


def is_combination(values: dict[Any, Any]) -> bool:
    """True if each value is valid by itself."""
    with pytest.raises(ValidationError) as caught:
        Config.model_validate(values)
    return caught.value.errors()[0]["loc"] == ()


@pytest.mark.parametrize("key", dict(fields(Config)))
def test_wrong_values_are_refused_in_the_programs_words(key: str) -> None:
    """Each message names the key, what is expected and what was found. Fixed bug: "Input should be a valid integer"."""
    refused = [(value, text) for value in WRONG if (text := message(nested(key, value))) is not None]
    assert len(refused) > 3, "values that this key must refuse"
    for value, text in refused:
        assert not PYDANTIC.search(text), text
        assert "\n" not in text
        if not is_combination(nested(key, value)):
            assert re.match(rf"config 'c': {re.escape(key)}(\.\d+)*: expected (?!another value).+, got ", text), text


def test_every_number_has_an_upper_limit() -> None:
    """Fixed bugs: log_interval 10**9 took 12 GB, and width 10**11, num_epochs 10**21 or collective 1e30 failed late."""
    checked = 0
    for key, _ in fields(Config):
        for value, huge in ((64, 10**31), (0.5, 1e31), ([64, 64], [10**31] * 2), ([0.5, 0.5], [1e31] * 2)):
            if message(nested(key, value)) is None:
                text = message(nested(key, huge))
                assert text is not None, f"{key} accepts {huge}"
                assert re.search(rf"{re.escape(key)}(\.0)?: expected a value (of at most|below) ", text)
                checked += 1
    assert checked > 60


@pytest.mark.parametrize(
    ("key", "largest", "refused"),
    [
        ("log_interval", 10**9, 10**22),
        ("Nsamples", 10**8, 10**14),
        ("Nsamples_val", 10**8, 10**12),
        ("network.width", 4096, 10**6),
        ("lr_schedule.start_lr", 1000.0, 1e300),
        ("num_epochs", 10**6, 10**9),
        ("num_data_workers", 1024, 10**5),
        ("timeouts.collective", 1e7, 1e30),
        ("global_batch_size", 2**20, 10**9),
        ("network.scales", 16, 10**9),
    ],
)
def test_limits_refuse_slips_and_allow_large_runs(key: str, largest: float, refused: float) -> None:
    assert message(nested(key, largest)) is None
    limit = largest if isinstance(largest, int) else f"{largest:g}"
    says = rf"config 'c': {key}: expected a value of at most {re.escape(str(limit))}( or None)?, got "
    assert re.match(says + re.escape(str(refused)), message(nested(key, refused)) or "")


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("", "expected a path, got '' (. is the current directory)"),
        (None, "expected a path, got None (YAML reads an empty value or a bare ~ as None)"),
        (3, "expected a path, got 3"),
        (
            "x" * 300,
            "expected a path of at most 3000 bytes with names of at most 255, got one of 300 bytes with a name of",
        ),
        ("x/" * 2000, "expected a path of at most 3000 bytes with names of at most 255, got one of 4000 bytes"),
        ("ü" * 128, "names of at most 255, got one of 256 bytes"),
        ("a\0b", "expected a path without NUL characters, got 'a\\x00b'"),
        ("\udcff", "expected a path in UTF-8, got '\\udcff'; rename the file or directory"),
    ],
)
def test_paths_that_no_file_system_accepts_are_refused(path: Any, says: str) -> None:
    """Fixed bug: an empty expdir trained in the current directory, and a NUL character ended in a traceback."""
    for key in ("expdir", "train_path", "dataset.directory"):
        assert f"config 'c': {key}: " in (text := message(nested(key, path)) or "")
        assert says in text
    assert message({"use_cache": path}) is None if path is None else says in (message({"use_cache": path}) or "")
    assert message({"expdir": "/".join(["directory"] * 40)}) is None, "a path of 400 characters"


def test_synonyms_lead_to_keys_and_are_no_keys() -> None:
    keys = dict(fields(Config))
    for word, key in SYNONYMS.items():
        assert key in keys
        assert word not in keys
        assert f"unknown key {word}; did you mean {key}?" in (message({word: 1}) or "")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--lr", "3"], "unrecognized arguments: --lr 3; config keys are set with --set lr_schedule.start_lr=VALUE"),
        (["--seed=3"], "unrecognized arguments: --seed=3; config keys are set with --set seed=VALUE"),
        (["--network.width", "3"], "config keys are set with --set network.width=VALUE"),
        (
            ["--set", "expdir=/x/run #1"],
            "--set expdir=/x/run #1: YAML takes # for the start of a comment; to keep it, use ",
        ),
        (["--set", "expdir=#1"], "to keep it, use --set_string 'expdir=#1'"),
    ],
)
def test_command_line_points_to_set_and_set_string(flags: list[str], says: str) -> None:
    """Fixed bug: --set expdir='/x/run #1' dropped what follows the # and trained in /x/run."""
    with pytest.raises(UserError, match=re.escape(says)):
        cli.parse(flags)
    assert cli.parse(["--set=expdir='/x/run #1'"]).overrides == {"expdir": "/x/run #1"}
