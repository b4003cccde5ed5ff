"""The tables of docs/index.md: a line per module, and the modules that read each config key, from the sources."""

import ast
import re
import subprocess
from functools import cache
from pathlib import Path

from utils.config import Config, flatten

ROOT = Path(__file__).parents[1]
FOLDERS = ("networks", "utils", "analysis", "simulation", "benchmarks", "docs")


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
    """The modules that read a key, by usual names of variables that hold the config or a section, or name it in quotes.

    Those of utils/config, in which the config is also `self`, count if no other module does.
    """
    section, _, name = key.rpartition(".")
    holders = f"{section.rpartition('_')[2]}|options|start" if section else "config"
    ending = name[name.find("_npy") :] if "_npy" in name else name  # the beginning may be a variable
    read = re.compile(rf"({holders})\.{name}\b|[\"'}}]({name}|{ending})[\"']")
    mention = re.compile(rf"\b{section}\b|{section.title().replace('_', '')}Config")
    paths = [path for path, text in texts.items() if read.search(text) and mention.search(text)]
    outside = [path for path in paths if not path.startswith("utils/config/")]
    return outside or paths or [path for path, text in texts.items() if f"self.{name}" in text]


@cache
def key_rows() -> list[list[str]]:
    program = [path for path in sources() if not path.startswith(("benchmarks", "doc"))]
    texts = {path: (ROOT / path).read_text(encoding="utf-8") for path in program}
    return [[f"`{key}`", ", ".join(readers(key, texts))] for key in flatten(Config())]
