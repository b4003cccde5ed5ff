"""docs/generate.py: the generated tables of the documentation are up to date and complete."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs import generate
from utils import config


@pytest.mark.parametrize("page", generate.pages(), ids=lambda page: page.name)
def test_tables_are_up_to_date(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert generate.render(text) == text, "run make docs"


def test_every_config_key_is_listed_with_its_meaning() -> None:
    rows = {key: meaning for key, _, meaning in generate.keys_of(config.Config)}
    assert rows.keys() == config.flatten(config.Config()).keys()
    assert [key for key, meaning in rows.items() if not meaning] == []


def test_an_unknown_table_is_an_error() -> None:
    with pytest.raises(FileNotFoundError, match="loss-of-everything"):
        generate.render("<!-- table: loss-of-everything -->\n<!-- end -->")


def test_columns_of_a_stored_table_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "benchmarks/results").mkdir(parents=True)
    stored = "| a | b | c |\n| --- | ---: | --- |\n| 1 | 2 \\| 3 | 4 |\n\n| d |\n| --- |\n"
    (tmp_path / "benchmarks/results/scores.md").write_text(stored, encoding="utf-8")
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    assert generate.stored_table("scores", 1, [3, 2]) == "| c | b |\n| --- | ---: |\n| 4 | 2 \\| 3 |\n"
    text = generate.render("<!-- table: scores columns 1 -->\n<!-- end -->\n<!-- table: scores 2 -->\n<!-- end -->")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert rows == ["| a |", "| --- |", "| 1 |", "| d |", "| --- |"]


def test_cells_show_what_markdown_would_hide() -> None:
    assert generate.table(["a"], [["<x> | `<y>`"]]).splitlines()[-1] == "| \\<x> \\| `<y>` |"
