"""Writes the generated tables of the documentation: python -m docs.generate, or make docs.

A table lies between two markers, `<!-- table: NAME -->` and `<!-- end -->`, in a page of docs/ or in README.md. TABLES
has a function for each name; any other name is that of benchmarks/results/NAME.md, whose first table is copied, or with
`<!-- table: NAME 2 -->` its second one. `<!-- table: NAME columns 1 5 -->` copies the first and the fifth column.
tests/test_documentation.py checks that the pages are up to date.
"""

import argparse
import ast
import inspect
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml

import evaluate
import export
import predict
from networks import LOSSES, METRICS, NETWORKS, losses
from utils import cli
from utils.config import Config, flatten
from utils.config.sections import Section
from utils.data.datasets import DATASETS
from utils.data.loaders import LOADERS
from utils.optim.optimizers import OPTIMIZERS
from utils.run.loggers import LOGGERS

ROOT = Path(__file__).parents[1]
FOLDERS = ("networks", "utils", "analysis", "simulation", "benchmarks", "docs")
MARKED = re.compile(r"(<!-- table: (\S+)(?: (\d+))?(?: columns ([\d ]+))? -->\n).*?(<!-- end -->)", re.DOTALL)
# A key of a section, with the comments above it and behind it.
KEY = re.compile(r"((?:^    #.*\n)*)^    (\w+): [^#\n]*(?:# (.*))?$", re.MULTILINE)

# The tables of names to which the comments of keys refer.
NAMES: dict[str, Iterable[str]] = {"LOSSES": LOSSES, "METRICS": METRICS, "NETWORKS": NETWORKS, "DATASETS": DATASETS}
NAMES |= {"LOADERS": LOADERS, "OPTIMIZERS": OPTIMIZERS, "LOGGERS": LOGGERS}


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(map(_escape, line))} |\n" for line in [head, ["---"] * len(head), *rows])


def _escape(cell: str) -> str:
    """Text in which Markdown sees no column and, outside code, no HTML tag."""
    parts = cell.replace("|", "\\|").split("`")
    return "`".join(part if index % 2 else part.replace("<", "\\<") for index, part in enumerate(parts))


def flags(parser: argparse.ArgumentParser) -> str:
    """The flags of a parser, with the values that they take."""
    rows = []
    for action in parser._actions:
        if action.option_strings and action.help and action.dest not in ("help", "version"):
            text = parser._get_formatter()._expand_help(action)
            rows.append([f"`{_spelling(action)}`", f"{text}; required" if action.required else text])
    return table(["flag", "meaning"], rows)


def _spelling(action: argparse.Action) -> str:
    if action.nargs == 0:
        return action.option_strings[-1]
    values = action.metavar or ("|".join(map(str, action.choices)) if action.choices else action.dest.upper())
    return f"{action.option_strings[-1]} {f'[{values}]' if action.nargs == '?' else values}"


def comments_of(section: type[Section]) -> dict[str, str]:
    """The comment of each key of a section: the one in its line, or those in the lines directly above."""
    keys = KEY.findall("".join(inspect.getsource(base) for base in section.__mro__ if issubclass(base, Section)))
    return {key: " ".join([*re.findall("# (.*)", above), *filter(None, [behind])]) for above, key, behind in keys}


def config_keys() -> Iterator[list[str]]:
    for key, default in flatten(Config()).items():
        section, _, name = key.rpartition(".")
        owner: Any = Config.model_fields[section].annotation if section else Config
        meaning = _meaning(comments_of(owner)[name], owner.model_fields[name].annotation)
        yield [f"`{key}`", f"`{_default(default)}`", meaning]


def _default(value: Any) -> str:
    if value is None or isinstance(value, float):
        return "None" if value is None else f"{value:g}"
    return yaml.safe_dump(value, default_flow_style=True, width=200).removesuffix("\n...\n").strip()


def _meaning(comment: str, annotation: Any) -> str:
    listed = ", ".join(f"`{choice}`" for choice in _choices(annotation))
    if reference := re.search(r"\b[Nn]ames? of ([A-Z]+) in [\w./]*\w", comment):
        names = ", ".join(f"`{name}`" for name in NAMES[reference[1]])
        comment = comment.replace(reference[0], f"{reference[0]} ({names})")
    return f"{listed}: {comment}" if listed and comment else listed or comment


def _choices(annotation: Any) -> list[Any]:
    """The values of the Literal types in an annotation."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [choice for part in get_args(annotation) for choice in _choices(part)]


def known_losses() -> str:
    """The losses, with the first lines of their docstrings; constants of the module are replaced by their values."""
    rows = []
    for name, kind in LOSSES.items():
        meaning = re.sub(r"\b[A-Z_]{2,}\b", lambda match: str(vars(losses).get(match[0], match[0])), kind.__doc__ or "")
        rows.append([f"`{name}`", kind.targets, meaning.split("\n")[0]])
    return table(["loss", "of", "meaning"], rows)


def tracked(pattern: str) -> list[Path]:
    """The tracked files that match, without a user's own, such as a network in the root; all in a copy without git."""
    files = sorted(ROOT.glob(pattern))
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    names = {*listed.stdout.split("\0")}
    return files if listed.returncode else [path for path in files if str(path.relative_to(ROOT)) in names]


def sources() -> dict[str, ast.Module]:
    """The program's modules by their paths: entry scripts, then each folder."""
    paths = [*tracked("*.py"), *(path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))]
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def module_rows() -> list[list[str]]:
    """Path and first line of the docstring of each module that has one or any code."""
    captions = {path: (ast.get_docstring(tree) or "").split("\n")[0] for path, tree in sources().items() if tree.body}
    return [[f"[{path}](../{path})", caption] for path, caption in captions.items()]


def readers(key: str, texts: dict[str, str]) -> list[str]:
    """The modules that read a key, by usual names of variables that hold the config or a section, or that quote it."""
    section, _, name = key.rpartition(".")
    holders = f"{section.rpartition('_')[2]}|options|start" if section else "config"
    ending = name[name.find("_npy") :] if "_npy" in name else name  # the beginning may be a variable
    read = re.compile(rf"({holders})\.{name}\b|[\"'}}]({name}|{ending})[\"']")
    mention = re.compile(rf"\b{section}\b|{section.title().replace('_', '')}Config")
    paths = [path for path, text in texts.items() if read.search(text) and mention.search(text)]
    # Those of utils/config, in which the config is also `self`, count if no other module does.
    outside = [path for path in paths if not path.startswith("utils/config/")]
    return outside or paths or [path for path, text in texts.items() if f"self.{name}" in text]


@cache
def key_rows() -> list[list[str]]:
    program = [path for path in sources() if not path.startswith(("benchmarks", "doc"))]
    texts = {path: (ROOT / path).read_text(encoding="utf-8") for path in program}
    return [[f"`{key}`", ", ".join(readers(key, texts))] for key in flatten(Config())]


TABLES: dict[str, Callable[[], str]] = {
    "flags-train": lambda: flags(cli.build_parser()),
    "flags-predict": lambda: flags(predict.build_parser()),
    "flags-evaluate": lambda: flags(evaluate.build_parser()),
    "flags-export": lambda: flags(export.build_parser()),
    "config-keys": lambda: table(["key", "default", "meaning"], [*config_keys()]),
    "losses": known_losses,
    "modules": lambda: table(["module", "contents"], module_rows()),
    "key-readers": lambda: table(["key", "read by"], key_rows()),
}


def stored_table(name: str, number: int, columns: Sequence[int] = ()) -> str:
    """A table of a stored result, or only some of its columns; both are counted from 1."""
    text = (ROOT / "benchmarks/results" / f"{name}.md").read_text(encoding="utf-8")
    lines = re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE)[number - 1].strip().splitlines()
    if columns:
        rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines]
        lines = [f"|{'|'.join(row[column - 1] for column in columns)}|" for row in rows]
    return "\n".join(lines) + "\n"


def render(text: str) -> str:
    """The text of a page with up-to-date tables; FileNotFoundError for an unknown name."""

    def write(match: re.Match[str]) -> str:
        if match[2] in TABLES:
            lines = TABLES[match[2]]()
        else:
            lines = stored_table(match[2], int(match[3] or 1), [int(column) for column in (match[4] or "").split()])
        return f"{match[1]}\n{lines}\n{match[5]}"

    return MARKED.sub(write, text)


def main() -> None:
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if render(text) != text:
            page.write_text(render(text), encoding="utf-8")
            print(f"wrote {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
