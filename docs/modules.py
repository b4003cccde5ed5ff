"""The tables of docs/index.md: a line per module, and the modules that read each config key. Read from the sources."""

from __future__ import annotations

import ast
import inspect
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from utils.config import Config
from utils.config.sections import Section

ROOT = Path(__file__).parents[1]
FOLDERS = ("networks", "utils", "analysis", "simulation", "benchmarks", "docs", "docker")


def sources() -> dict[str, ast.Module]:
    """The program's modules by their paths: entry scripts, then each folder."""
    paths = [
        *sorted(ROOT.glob("*.py")),
        *(path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))),
    ]
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def caption(tree: ast.Module) -> str:
    """The first line of a module's docstring; empty if it has none."""
    return (ast.get_docstring(tree) or "").split("\n")[0]


def module_rows() -> list[list[str]]:
    """Path and caption of each module that has one or any code."""
    return [[f"[{path}](../{path})", caption(tree)] for path, tree in sources().items() if tree.body]


def sections(section: type[Section] = Config, prefix: str = "") -> Iterator[tuple[str, type[Section]]]:
    """The config and all its sections, with the prefix of their keys."""
    yield prefix, section
    for name, field in section.model_fields.items():
        if inspect.isclass(field.annotation) and issubclass(field.annotation, Section):
            yield from sections(field.annotation, f"{prefix}{name}.")


def readers() -> dict[str, list[str]]:
    """For each config key the modules that read it; those of utils/config alone if no other module does."""
    known, trees = list(sections()), sources()
    reads = {path: _read(tree, known) for path, tree in trees.items() if not path.startswith(("benchmarks", "doc"))}
    found: dict[str, list[str]] = {}
    for prefix, section in known:
        for name in section.model_fields:
            key = f"{prefix}{name}"
            paths = [path for path, keys in reads.items() if key in keys or (f"{prefix}*" in keys and key not in keys)]
            exact = [path for path in paths if key in reads[path]]
            outside = [path for path in exact or paths if not path.startswith("utils/config/")]
            found[key] = outside or exact or paths
    return found


def _read(tree: ast.Module, known: list[tuple[str, type[Section]]]) -> set[str]:
    """The keys that a module reads, from objects that are sections by name or annotation; `section.*` for a whole one.

    Keys of split names are built from texts, such as `_npy_data`.
    """
    holders: dict[str, set[str]] = defaultdict(set)  # prefixes by the names of variables and attributes
    types: dict[str, set[str]] = defaultdict(set)
    for prefix, section in known:
        holders[prefix.rstrip(".").rpartition(".")[2] or "config"].add(prefix)
        for base in section.__mro__:
            types[base.__name__].add(prefix)
    nodes = list(ast.walk(tree))
    if any(isinstance(node, ast.ClassDef) and node.name == Config.__name__ for node in nodes):
        holders["self"].add("")
    for node in nodes:
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation:
            name = node.arg if isinstance(node, ast.arg) else _last(node.target)
            holders[name] |= types.get(ast.unparse(node.annotation).removesuffix(" | None"), set())
        elif isinstance(node, ast.Assign):
            for target, value in zip(_parts(node.targets[0]), _parts(node.value), strict=False):
                if isinstance(value, ast.Attribute):
                    holders[_last(target)] |= holders.get(value.attr, set())
    keys = set[str]()
    for node in nodes:
        if isinstance(node, ast.Attribute):
            holder = _last(node.value).lstrip("_")
            keys |= {
                f"{prefix}{node.attr}" for prefix in holders.get("config" if holder.endswith("config") else holder, ())
            }
            keys |= {f"{prefix}*" for prefix in holders.get(node.attr, ()) if prefix}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "_" in node.value:
            fields = {f"{prefix}{name}" for prefix, section in known for name in section.model_fields}
            keys |= {key for key in fields if key == node.value or (node.value[0] == "_" and key.endswith(node.value))}
    return keys


def _parts(node: ast.expr) -> list[ast.expr]:
    return node.elts if isinstance(node, ast.Tuple) else [node]


def _last(node: ast.expr) -> str:
    """The last name of a variable or an attribute, else an empty text."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def key_rows() -> list[list[str]]:
    """Each config key with the modules that read it."""
    found, rows = readers(), []
    for prefix, section in sections():
        for name, field in section.model_fields.items():
            if not (inspect.isclass(field.annotation) and issubclass(field.annotation, Section)):
                rows.append([f"`{prefix}{name}`", ", ".join(found[f"{prefix}{name}"])])
    return rows
