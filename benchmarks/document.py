"""Writes the tables of benchmarks/results into README.md and docs/: `make docs`.

The lines between `<!-- table: NAME -->` and `<!-- end -->` become the first table of benchmarks/results/NAME.md; with
`<!-- table: NAME 2 -->` its second one.
"""

from __future__ import annotations

import re

from benchmarks.common import REPOSITORY, RESULTS, write_text
from utils.errors import one_line_errors

MARKED = re.compile(r"(<!-- table: (\S+)(?: (\d+))? -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def table(name: str, number: int = 1) -> str:
    """A table of a stored result."""
    text = (RESULTS / f"{name}.md").read_text(encoding="utf-8")
    return re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE)[number - 1].strip() + "\n"


def updated(text: str) -> str:
    """The text of a page with the tables as they are stored."""
    return MARKED.sub(lambda found: f"{found[1]}\n{table(found[2], int(found[3] or 1))}\n{found[5]}", text)


def main() -> None:
    for page in (REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))):
        text = page.read_text(encoding="utf-8")
        if updated(text) != text:
            write_text(page, updated(text))
            print(f"written: {page.relative_to(REPOSITORY)}")


if __name__ == "__main__":
    with one_line_errors():
        main()
