"""README.md and docs/: links, anchors, commands, flags, quoted figures, and generated tables.

A figure quoted from benchmarks/results is followed by an HTML comment with the file and the key that it comes from:

    458<!-- loaders.json#results.inmem.median --> samples/s
    1.44<!-- ladder.json#rungs.3.SYNTHETIC.median / #rungs.0."NO-COMM".median * 100 --> %

Numbers in a key are list indices; a part of a key that contains a dot is quoted. Terms after an operator (* / + -, from
left to right) are numbers, or `#` and another key of the file. The figure must be the value rounded to the digits
quoted; 1:05 is compared in seconds. Any other comment names another source (`<!-- published -->`) and is not compared.

`<!-- quoted from FILE -->` before a code block: each line of the block is a line of that file. Tables between
`<!-- table: NAME -->` and `<!-- end -->` are those that `make docs` (docs/generate.py) would write.
"""

import contextlib
import importlib.util
import io
import json
import operator
import re
import shlex
from functools import cache
from pathlib import Path

import pytest
import yaml
from processes import TOP

from docs import generate
from utils import __version__, config

RESULTS, README = TOP / "benchmarks/results", TOP / "README.md"
DOCS = generate.pages()
PAGES = [*DOCS, TOP / "CHANGELOG.md", *sorted((TOP / "example_logs").rglob("*.md")), *sorted(RESULTS.rglob("*.md"))]
SOURCES = ["*.py", "*.sh", "config/*.yaml", "docker/*", "benchmarks/*", "networks/*.py", "utils/**/*.py", "Makefile"]

# The comment above a block of commands, and the block.
COMMANDS = re.compile(r"(?:<!-- ([^\n]*?) -->\n)?^```(?:bash|sh|shell)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
MARKED_TABLE = re.compile(r"<!-- table: .*?<!-- end -->", re.DOTALL)
COMMENT = re.compile(r"<!--(.*?)-->", re.DOTALL)
# A number, perhaps a unit, and the comment.
FIGURE = re.compile(r"([-−]?\d[\d,]*(?:\.\d+)?(?::\d\d)*)(?:\s?[^\s\d<|]{1,12})?<!--(.*?)-->", re.DOTALL)
# A program of this repository, with the script that submit_pm.sh runs, and its arguments.
STARTED = r"(?:^| )(?:\./)?(\w+\.(?:py|sh))|-m ((?:utils|benchmarks)\.\S+)"
PROGRAM = re.compile(rf"(?:TRAIN_SCRIPT=(\S+).*)?(?:{STARTED})( .*|$)")
MODULES = {"train.py": "train", "train_graph.py": "train", "submit_pm.sh": "train", "predict.py": "predict"}
MODULES |= {"evaluate.py": "evaluate", "export.py": "export", "simulation": "simulation.simulate"}
OPERATORS = {"*": operator.mul, "/": operator.truediv, "+": operator.add, "-": operator.sub}

CONFIGS = {name for path in generate.tracked("config/*.yaml") for name in config.read_file(str(path))}
docs = pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)


@cache
def without_blocks(page: Path) -> str:
    """The text of a page without its fenced code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def code_spans(page: Path) -> list[str]:
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", without_blocks(page))]


def links(page: Path) -> list[str]:
    """The targets of all links and pictures, without web addresses."""
    text = re.sub(r"`[^`]*`", "code", without_blocks(page))
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"https?:|mailto:", link)]


@cache
def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    names: list[str] = []
    for heading in re.findall(r"^#+ +(.+?) *$", without_blocks(page), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", COMMENT.sub("", heading))
        names.append(re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-"))
    repeated = {f"{name}-{number}" for name in names for number in range(1, names.count(name))}
    return {*names} | repeated


def broken(links: list[str], page: Path) -> list[str]:
    """The links of a page whose file or heading does not exist."""
    faults = []
    for link in links:
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            faults.append(link)
    return faults


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(TOP)))
def test_relative_links_and_anchors_exist_and_lines_are_short(page: Path) -> None:
    assert broken(links(page), page) == []
    lines = MARKED_TABLE.sub("", page.read_text(encoding="utf-8")).splitlines()
    assert page.is_relative_to(RESULTS) or [line[:100] for line in lines if len(line) > 400] == []


def test_the_readme_links_to_every_page_but_that_of_developers_and_pages_named_in_the_code_exist() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 160
    targets = {link.partition("#")[0] for link in links(README)}
    assert {str(page.relative_to(TOP)) for page in DOCS[1:]} - targets == {"docs/index.md"}
    files = [file for pattern in SOURCES for file in generate.tracked(pattern) if file.suffix != ".png"]
    named = {link for file in files for link in re.findall(r"docs/\w+\.md(?:#[\w-]+)?", file.read_text())}
    assert broken(sorted(named), README) == []


def test_the_paths_in_the_data_flow_exist() -> None:
    texts = re.findall(r">([^<]+)</text>", (TOP / "docs/data_flow.svg").read_text(encoding="utf-8"))
    paths = re.findall(r"\b[a-z]\w*(?:/[\w.]+)+|\b\w+\.py\b", " ".join(texts))
    assert "utils/data/plan.py" in paths
    assert [path for path in paths if not (TOP / path).exists()] == []


def lookup(file: str, key: str) -> float:
    """The number under a key of a results file."""
    value = json.loads((RESULTS / file).read_text(encoding="utf-8"))
    for quoted, plain in re.findall(r'"([^"]*)"|([^."]+)', key):
        name = quoted or plain.strip()
        value = value[int(name)] if isinstance(value, list) else value[name]
    assert isinstance(value, int | float), f"{file}#{key} is {value!r}"
    return float(value)


def evaluate(source: str) -> float:
    """The value that a comment such as `a.json#b.c / #d.e * 100` describes."""
    file, _, terms = " ".join(source.split()).partition("#")
    first, *others = re.split(r"\s+([*/+-])\s*(?=[#\d.-])", terms)
    value = lookup(file, first)
    for symbol, term in zip(others[::2], others[1::2], strict=True):
        value = OPERATORS[symbol](value, lookup(file, term[1:]) if term.startswith("#") else float(term))
    return value


def is_rounded(quoted: str, value: float) -> bool:
    """True if `value` rounds to `quoted` at the digits quoted."""
    plain, number = quoted.replace(",", "").replace("−", "-"), 0.0
    for part in plain.split(":"):
        number = 60 * number + float(part)
    return abs(value - number) <= 0.5 * 10 ** -len(plain.partition(".")[2]) * (1 + 1e-9)


@docs
def test_figures_are_those_of_the_results(page: Path) -> None:
    text = re.sub(r"`[^`]*`", "", without_blocks(page))
    figures = [(quoted, source) for quoted, source in FIGURE.findall(text) if "#" in source]
    values = [(quoted, source, evaluate(source)) for quoted, source in figures]
    assert [figure for figure in values if not is_rounded(figure[0], figure[2])] == []
    # A comment at the start of a line ends the paragraph, which only comments above a block may do.
    assert re.findall(r"^\s*<!--(?! (?:quoted from|long|not run:|table:|end) ).*", text, re.MULTILINE) == []
    comments = [source for source in COMMENT.findall(text) if ".json#" in source]
    assert sorted(comments) == sorted(source for _, source in figures), "a comment without a number before it"


def commands(page: Path) -> list[str]:
    """The commands in the page's bash blocks, and the code spans that begin with a command."""
    blocks = COMMANDS.findall(page.read_text(encoding="utf-8"))
    lines = [line for _, block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += [span for span in code_spans(page) if re.match(r"(python|torchrun|make|sbatch|srun) ", span)]
    return [" ".join(shlex.split(line, comments=True)) for line in lines]


@cache
def flags_of(module: str) -> set[str]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.raises(SystemExit):
        importlib.import_module(module).main(["--help"])
    return set(re.findall(r"(?<![\w-])--?\w+", printed.getvalue()))


def faults_in(command: str) -> list[str]:
    """The targets, programs, flags, configs and keys of a command that do not exist."""
    if command.startswith("make "):
        makefile = (TOP / "Makefile").read_text(encoding="utf-8")
        return [word for word in command.split()[1:] if word.islower() and f"\n{word}:" not in makefile]
    program = PROGRAM.search(command)
    if program is None or (program[2] and (TOP / program[2]).is_file() and program[2] not in MODULES):
        return []  # no program with flags
    module = MODULES.get(program[1] or program[2] or program[3], program[3])
    if module is None or importlib.util.find_spec(module) is None:
        return [program[2] or program[3]]
    words = program[4].split()
    given = [word.partition("=")[0] for word in words if re.match(r"--?\w", word) and not re.match(r"-\d", word)]
    faults = [flag for flag in given if flag not in flags_of(module)]
    faults += unknown_keys(re.findall(r"--set[= ](\S+)", program[4]))
    return faults + [name for name in re.findall(r"--config[= ](\S+)", program[4]) if name not in CONFIGS]


def unknown_keys(settings: list[str]) -> list[str]:
    """The settings KEY=VALUE whose keys no config has; keys of network.options belong to the network."""
    known = {"key", *config.flatten(config.Config()), *config.Config.model_fields}
    keys = {setting: setting.partition("=")[0] for setting in settings if setting.lower() != "key=value"}
    return [setting for setting, key in keys.items() if key not in known and not key.startswith("network.options.")]


@docs
def test_commands_exist_with_their_flags_configs_and_keys(page: Path) -> None:
    faults = {command: faults_in(command) for command in commands(page)}
    assert {command: names for command, names in faults.items() if names} == {}
    settings = [value for span in code_spans(page) for value in re.findall(r"--set (\S+)", span)]
    assert unknown_keys(settings) == []
    # Only this project's flags have underscores.
    flags = {flag for span in code_spans(page) for flag in re.findall(r"(?<![\w-])--[a-z]+_\w+", span)}
    assert flags <= set().union(*map(flags_of, (*MODULES.values(), "utils.volumes.import_volume")))


@docs
def test_tables_are_up_to_date_and_quoted_blocks_are_lines_of_their_files(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert generate.render(text) == text, "run make docs"
    for file, block in re.findall(r"<!-- quoted from (\S+) -->\s*```\w*\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        lines = {line.strip() for line in (TOP / file).read_text(encoding="utf-8").splitlines()}
        assert [line for line in block.splitlines() if line.strip() not in lines] == []


def test_every_module_has_a_caption_and_every_key_a_reader() -> None:
    """docs/index.md lists both."""
    rows = generate.module_rows()
    assert [path for path, caption in rows if " " not in caption or not caption.endswith(".")] == []
    assert [key for key, readers in generate.key_rows() if not readers] == []


def test_the_table_of_neutral_keys_has_all_of_them() -> None:
    text = (TOP / "docs" / "reliability.md").read_text(encoding="utf-8")
    table = text.split('"The same config" is decided by key')[1].split("\n\n")[1]
    missing = {key for key in config.NeutralKeys.model_fields if f"`{key}`" not in table}
    named = {"enable_benchy", "train_path_npy_data", "train_path_npy_label", "val_path_npy_data", "val_path_npy_label"}
    assert missing - named == {"report_baselines", "report_pictures"}


def test_metadata_agrees() -> None:
    """Keys with a meaning, version, license, authors; continuous integration runs the make targets."""
    meanings = {key.strip("`"): meaning for key, _, meaning in generate.config_keys() if meaning}
    assert meanings.keys() == config.flatten(config.Config()).keys()
    citation = yaml.safe_load((TOP / "CITATION.cff").read_text(encoding="utf-8"))
    license_text = (TOP / "LICENSE").read_text(encoding="utf-8")
    assert citation["version"] == __version__
    assert f'\nversion = "{__version__}"\n' in (TOP / "pyproject.toml").read_text(encoding="utf-8")
    assert license_text.startswith(f"{citation['license']} License")
    assert [f"Copyright (c) 2026 {author['name']}" in license_text for author in citation["authors"]] == [True]
    jobs = yaml.safe_load((TOP / ".github/workflows/ci.yml").read_text(encoding="utf-8"))["jobs"]
    steps = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert {*steps} == {"make check", "make test", "make test-slow"}
