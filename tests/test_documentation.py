"""README.md and docs/: links, anchors, commands, flags, quoted figures, and generated tables.

A figure quoted from benchmarks/results is followed by an HTML comment with the file and the key that it comes from:

    458<!-- loaders.json#results.inmem.median --> samples/s
    5.2 %<!-- scaling/scaling.json#points.1."NO-COMM".share * 100 -->
    1.44<!-- ladder.json#rungs.3.SYNTHETIC.median / #rungs.0.SYNTHETIC.median --> times

File names are relative to benchmarks/results. Numbers in a key are list indices; a part of a key that contains a dot is
quoted. Further terms follow an operator (* / + -, from left to right): numbers, or `#` and another key of it. The
figure must be the value rounded to the digits quoted; 1:05 is compared in seconds. Any other comment names another
source (`<!-- published -->`) and is not compared. In a paragraph that links to a results file, every number with a unit
of measurement needs a comment; in the table after such a paragraph, every decimal number.

`<!-- quoted from FILE -->` before a code block: each line of the block is a line of that file. Tables between
`<!-- table: NAME -->` and `<!-- end -->` are those that `make docs` (docs/generate.py) would write.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
import json
import operator
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from processes import TOP

from docs import generate
from utils import cli, config

RESULTS = TOP / "benchmarks/results"
README = TOP / "README.md"
DOCS = generate.pages()
PAGES = [*DOCS, TOP / "CHANGELOG.md", *sorted((TOP / "example_logs").rglob("*.md")), *sorted(RESULTS.rglob("*.md"))]
SOURCES = ["*.py", "*.sh", "config/*.yaml", "docker/*", "benchmarks/*", "networks/*.py", "utils/**/*.py", "Makefile"]

# The comment above a block of commands, and the block.
COMMANDS = re.compile(r"(?:<!-- ([^\n]*?) -->\n)?^```(?:bash|sh|shell)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
MARKED_TABLE = re.compile(r"<!-- table: .*?<!-- end -->", re.DOTALL)
COMMENT = re.compile(r"<!--(.*?)-->", re.DOTALL)
# A number, perhaps a unit, and the comment.
FIGURE = re.compile(r"([-−]?\d[\d,]*(?:\.\d+)?(?::\d\d)*)(?:\s?[^\s\d<|]{1,12})?<!--(.*?)-->", re.DOTALL)
UNITS = r"%|samples/s|images/s|TFLOP/s|GB/s|GiB|GB|ms|s|seconds|minutes|times|points"
UNSOURCED = re.compile(rf"(?<![\w.,])(\d[\d,]*(?:\.\d+)?\s?(?:{UNITS}))(?![\w/]|\*{{0,2}}<!--)")
UNSOURCED_DECIMAL = re.compile(r"(?<![\w.,])(\d[\d,]*\.\d+)(?![\w.]|\*{0,2}<!--)")
OPERATORS = {"*": operator.mul, "/": operator.truediv, "+": operator.add, "-": operator.sub}


pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(TOP)))
docs = pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)


@cache
def without_blocks(page: Path) -> str:
    """The text of a page without its fenced code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


# --- links -----------------------------------------------------------------------------------------------------------


def links(page: Path) -> list[str]:
    """The targets of all links and pictures, without web addresses."""
    text = re.sub(r"`[^`]*`", "code", without_blocks(page))
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"https?:|mailto:", link)]


@cache
def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    found: dict[str, int] = {}
    names = set()
    for heading in re.findall(r"^#+ +(.+?) *$", without_blocks(page), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", COMMENT.sub("", heading))
        slug = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
        names.add(f"{slug}-{found[slug]}" if slug in found else slug)
        found[slug] = found.get(slug, 0) + 1
    return names


def fault_of(link: str, page: Path) -> str | None:
    """Reason why a link of a page leads nowhere; None if it does not."""
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if not target.exists():
        return f"{link}: no such file"
    if anchor and anchor not in anchors(target):
        return f"{link}: no such heading; {target.name} has {', '.join(sorted(anchors(target)))}"
    return None


@pages
def test_relative_links_and_anchors_exist(page: Path) -> None:
    assert [fault for link in links(page) if (fault := fault_of(link, page))] == []


def test_the_readme_links_to_every_page() -> None:
    targets = {link.partition("#")[0] for link in links(README)}
    assert {str(page.relative_to(TOP)) for page in DOCS[1:]} <= targets


def test_pages_named_in_the_code_exist() -> None:
    files = [file for pattern in SOURCES for file in TOP.glob(pattern) if file.is_file() and file.suffix != ".png"]
    named = {link for file in files for link in re.findall(r"docs/\w+\.md(?:#[\w-]+)?", file.read_text())}
    assert [fault for link in sorted(named) if (fault := fault_of(link, README))] == []


def test_the_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 160


@pages
def test_lines_are_at_most_400_characters(page: Path) -> None:
    if not page.is_relative_to(RESULTS):
        lines = MARKED_TABLE.sub("", page.read_text(encoding="utf-8")).splitlines()
        assert [line[:100] for line in lines if len(line) > 400] == []


# --- figures ---------------------------------------------------------------------------------------------------------


def lookup(file: str, key: str) -> float:
    """The number under a key of a results file."""
    value = load(file)
    for part in re.findall(r'"([^"]*)"|([^."]+)', key):
        name = part[0] or part[1].strip()
        value = value[int(name)] if isinstance(value, list) else value[name]
    assert isinstance(value, int | float), f"{file}#{key} is {value!r}"
    return float(value)


@cache
def load(file: str):
    return json.loads((RESULTS / file).read_text(encoding="utf-8"))


def evaluate(source: str) -> float:
    """The value that a comment such as `a.json#b.c / #d.e * 100` describes."""
    file, _, terms = " ".join(source.split()).partition("#")
    first, *rest = re.split(r"\s+([*/+-])\s*(?=[#\d.-])", terms)
    value = lookup(file, first)
    for symbol, term in zip(rest[::2], rest[1::2], strict=True):
        value = OPERATORS[symbol](value, lookup(file, term[1:]) if term.startswith("#") else float(term))
    return value


def is_rounded(quoted: str, value: float) -> bool:
    """True if `value` rounds to `quoted` at the digits quoted."""
    plain = quoted.replace(",", "").replace("−", "-")
    digits = len(plain.partition(".")[2])
    number = 0.0
    for part in plain.split(":"):
        number = 60 * number + float(part)
    return abs(value - number) <= 0.5 * 10**-digits * (1 + 1e-9)


@docs
def test_figures_are_those_of_the_results(page: Path) -> None:
    text = without_blocks(page)
    found = [(number, source) for number, source in FIGURE.findall(re.sub(r"`[^`]*`", "", text)) if "#" in source]
    faults = []
    for quoted, source in found:
        try:
            value = evaluate(source)
        except (LookupError, ValueError, OSError) as error:
            faults.append(f"{quoted}<!--{source}-->: {error!r}")
            continue
        if not is_rounded(quoted, value):
            faults.append(f"{quoted}<!--{source}-->: the value is {value:.6g}")
    assert faults == []
    # A comment at the start of a line ends the paragraph, which only comments above a block may do.
    assert re.findall(r"^\s*<!--(?! (?:quoted from|long|not run:|table:|end) ).*", text, re.MULTILINE) == []
    comments = [source for source in COMMENT.findall(re.sub(r"`[^`]*`", "", text)) if ".json#" in source]
    assert sorted(comments) == sorted(source for _, source in found), "a comment without a number before it"


@docs
def test_figures_next_to_a_link_to_results_have_a_source(page: Path) -> None:
    faults, links_before = [], False
    text = MARKED_TABLE.sub("", without_blocks(page))
    for block in re.split(r"\n\s*\n", re.sub(r"`[^`]*`", "code", text)):
        links_to_results = bool(re.search(r"\]\([^)]*benchmarks/results/[^)]*\.(json|md)\)", block))
        if links_to_results:
            faults += UNSOURCED.findall(" ".join(block.split()))
        elif links_before and block.startswith("|"):
            faults += UNSOURCED_DECIMAL.findall(COMMENT.sub("<!-- -->", block))
        links_before = links_to_results
    assert faults == []


@docs
def test_quoted_blocks_are_lines_of_their_files(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for file, block in re.findall(r"<!-- quoted from (\S+) -->\s*```\w*\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        lines = {line.strip() for line in (TOP / file).read_text(encoding="utf-8").splitlines()}
        assert [line for line in block.splitlines() if line.strip() not in lines] == []


def test_figures_are_compared_at_the_digits_quoted_and_need_a_source(tmp_path: Path, monkeypatch: Any) -> None:
    figures = [("1.44", 1.4449, True), ("1.44", 1.446, False), ("1,468", 1468.2, True), ("0:46", 45.505, True)]
    for quoted, value, expected in figures:
        assert is_rounded(quoted, value) is expected
    monkeypatch.setattr("test_documentation.RESULTS", tmp_path)
    (tmp_path / "t.json").write_text('{"a": [{"b-c": 2}, {"k = 0.2, d": 8}]}')
    assert evaluate('t.json#a.1."k = 0.2, d" / #a.0.b-c * -100 + 1') == -399
    text = "about 5 % and 3.2 samples/s, 4 ms<!-- x.json#a -->, 7<!-- x.json#a --> %, version 2.13, 512³ cells, 12s"
    assert UNSOURCED.findall(text) == ["5 %", "3.2 samples/s", "12s"]


# --- commands --------------------------------------------------------------------------------------------------------

TRAINING = ("train.py", "train_graph.py", "submit_pm.sh")
SCRIPTS = ("predict.py", "evaluate.py", "export.py")


def commands(page: Path) -> Iterator[list[str]]:
    """The words of every command in the page's bash blocks, and in code spans that begin with a command."""
    text = page.read_text(encoding="utf-8")
    lines = [line for _, block in COMMANDS.findall(text) for line in block.replace("\\\n", " ").splitlines()]
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", without_blocks(page))]
    lines += [span for span in spans if re.match(r"(python|torchrun|make|sbatch|srun) ", span)]
    for line in lines:
        if words := shlex.split(line, comments=True):
            yield words


@cache
def flags_of(program: str) -> frozenset[str]:
    """The flags of a script, or of a module that is run with python -m."""
    if program in TRAINING:
        return frozenset(cli.build_parser()._option_string_actions)
    name = {"utils.simulation": "utils.simulation.simulate"}.get(program, program.removesuffix(".py"))
    main = importlib.import_module(name).main
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr("sys.argv", [program, "--help"])
        with pytest.raises(SystemExit):
            main()
    return frozenset(re.findall(r"(?<![\w-])--?\w+", printed.getvalue()))


def program_in(words: list[str]) -> tuple[str, list[str]] | None:
    """The program of this repository that a command runs, and the words after it; None if it runs none."""
    for index, word in enumerate(words):
        if word == "-m" and words[index + 1].startswith(("utils.", "benchmarks.")):
            return words[index + 1], words[index + 2 :]
        name = word.removeprefix("./")
        if re.fullmatch(r"\w+\.(py|sh)", name):
            script = re.search(r"TRAIN_SCRIPT=(\S+)", " ".join(words[:index]))
            return (script[1] if script else name), words[index + 1 :]
    return None


def exists(program: str) -> bool:
    path = program if program.endswith((".py", ".sh")) else program.replace(".", "/")
    return any((TOP / each).is_file() for each in (path, f"{path}.py", f"{path}/__main__.py"))


def faults_in(words: list[str]) -> Iterator[str]:
    """The targets, files, flags, configs and keys of a command that do not exist."""
    if words[0] == "make":
        makefile = (TOP / "Makefile").read_text(encoding="utf-8")
        yield from (f"make {word}" for word in words[1:] if word.islower() and f"\n{word}:" not in makefile)
        return
    found = program_in(words)
    if found is None:
        return
    program, arguments = found
    if not exists(program):
        yield program
        return
    if program not in (*TRAINING, *SCRIPTS) and program.endswith((".sh", ".py")):
        return
    given = [word.partition("=")[0] for word in arguments if re.match(r"--?\w", word) and not re.match(r"-\d", word)]
    yield from (f"{program} {flag}" for flag in given if flag not in flags_of(program))
    for flag, value in itertools.pairwise([*arguments, ""]):
        name, _, attached = flag.partition("=")
        if name == "--set":
            yield from unknown_key(attached or value)
        if name == "--config" and (attached or value) not in config_names():
            yield flag


def unknown_key(setting: str) -> Iterator[str]:
    key = setting.partition("=")[0]
    placeholder = setting.lower() == "key=value" or key.startswith("network.options.")  # keys of the network
    if not placeholder and key not in config.flatten(config.Config()) and key not in config.Config.model_fields:
        yield f"--set {setting}"


@cache
def config_names() -> set[str]:
    return {name for path in (TOP / "config").glob("*.yaml") for name in config.read_file(str(path))}


@docs
def test_commands_exist_with_their_flags_configs_and_keys(page: Path) -> None:
    assert [(" ".join(words), list(faults_in(words))) for words in commands(page) if list(faults_in(words))] == []


@docs
def test_keys_and_flags_in_the_text_exist(page: Path) -> None:
    known = frozenset().union(*(flags_of(program) for program in (*TRAINING, *SCRIPTS, "utils.data.import_volume")))
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", without_blocks(page))]
    settings = [value for span in spans for value in re.findall(r"--set (\S+)", span)]
    assert [fault for setting in settings for fault in unknown_key(setting)] == []
    # Only this project's flags have underscores.
    flags = [flag for span in spans for flag in re.findall(r"(?<![\w-])--[a-z]+_\w+", span)]
    assert [flag for flag in flags if flag not in known] == []


def test_wrong_commands_are_found() -> None:
    for command, faults in (
        ("torchrun --nproc-per-node=2 train.py --config=demo --set network.width=8 --num_epochs -1", []),
        ("python train.py --config=dem --set network.wide=8", ["--config=dem", "--set network.wide=8"]),
        ("python -m benchmarks.loader", ["benchmarks.loader"]),
        ("TRAIN_SCRIPT=predict.py sbatch submit_pm.sh --tile 3", ["predict.py --tile"]),
        ("make tests", ["make tests"]),
    ):
        assert list(faults_in(shlex.split(command))) == faults


# --- generated tables ------------------------------------------------------------------------------------------------


@docs
def test_tables_are_up_to_date(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert generate.render(text) == text, "run make docs"


def test_every_config_key_is_listed_with_its_meaning() -> None:
    rows = {key: meaning for key, _, meaning in generate.keys_of(config.Config)}
    assert rows.keys() == config.flatten(config.Config()).keys()
    assert [key for key, meaning in rows.items() if not meaning] == []


def test_columns_of_a_stored_table_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "benchmarks/results").mkdir(parents=True)
    stored = "| a | b | c |\n| --- | ---: | --- |\n| 1 | 2 \\| 3 | 4 |\n\n| d |\n| --- |\n"
    (tmp_path / "benchmarks/results/scores.md").write_text(stored, encoding="utf-8")
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    assert generate.stored_table("scores", 1, [3, 2]) == "| c | b |\n| --- | ---: |\n| 4 | 2 \\| 3 |\n"
    text = generate.render("<!-- table: scores columns 1 -->\n<!-- end -->\n<!-- table: scores 2 -->\n<!-- end -->")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert rows == ["| a |", "| --- |", "| 1 |", "| d |", "| --- |"]
    with pytest.raises(FileNotFoundError, match="loss-of-everything"):
        generate.render("<!-- table: loss-of-everything -->\n<!-- end -->")
    # Cells show what Markdown would hide.
    assert generate.table(["a"], [["<x> | `<y>`"]]).splitlines()[-1] == "| \\<x> \\| `<y>` |"


# --- metadata --------------------------------------------------------------------------------------------------------


def test_the_citation_agrees_with_version_and_license() -> None:
    citation = yaml.safe_load((TOP / "CITATION.cff").read_text(encoding="utf-8"))
    project = (TOP / "pyproject.toml").read_text(encoding="utf-8")
    license_text = (TOP / "LICENSE").read_text(encoding="utf-8")
    assert f'version = "{citation["version"]}"' in project
    assert license_text.startswith(f"{citation['license']} License")
    assert [f"Copyright (c) 2026 {author['name']}" in license_text for author in citation["authors"]] == [True]


def test_continuous_integration_runs_the_make_targets() -> None:
    workflow = (TOP / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    steps = [step for job in yaml.safe_load(workflow)["jobs"].values() for step in job["steps"]]
    assert {step["run"] for step in steps if "run" in step} == {"make check", "make test", "make test-slow"}
