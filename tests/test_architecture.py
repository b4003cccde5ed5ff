"""Which way the arrows point, and what no file may do: read from the sources, nothing is imported.

networks stands alone, utils knows no network, loaders and steps meet in the entry scripts only.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
# What trains a network on ready data does without; to be imported where it is used.
OPTIONAL = {"apex", "colossus", "matplotlib", "nvidia", "rich", "scipy", "sklearn", "tensorboard", "triton"}
# Modules of the commands that make data, which may need what they need.
SIMULATION = {f"utils.data.{name}" for name in ("fourier", "gas", "linear_theory", "particle_mesh", "simulate")}
PICKLES = {"cloudpickle", "dill", "joblib", "pickle", "shelve"}
UNSAFE_YAML = {"full_load", "full_load_all", "unsafe_load", "unsafe_load_all"}
UNSAFE_YAML |= {"Loader", "CLoader", "FullLoader", "UnsafeLoader", "CFullLoader", "CUnsafeLoader"}


class Import(NamedTuple):
    """One imported dotted name; `from a import b` is a.b, which may be a module or something in one."""

    name: str
    at_import: bool  # carried out when the module is imported, not when a function is called
    line: int


def imports(source: str, module: str, is_package: bool = False) -> list[Import]:
    """All imports in a source text, relative ones resolved, import_module("…") included."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    found: list[Import] = []

    def visit(node: ast.AST, at_import: bool) -> None:
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            at_import = False
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            at_import = False
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            names = [f"{origin}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            names = [argument.value for argument in node.args[:1] if isinstance(argument, ast.Constant)]
        found.extend(Import(name, at_import, getattr(node, "lineno", 0)) for name in names)
        for child in ast.iter_child_nodes(node):
            visit(child, at_import)

    visit(ast.parse(source), True)
    return found


def sources() -> dict[str, Path]:
    """Dotted module name -> file, of everything that is run: entry scripts, networks, utils, benchmarks."""
    paths = [*ROOT.glob("*.py")]
    for directory in ("networks", "utils", "benchmarks"):
        paths += (ROOT / directory).rglob("*.py")
    parts = {path: path.relative_to(ROOT).with_suffix("").parts for path in paths}
    return {".".join(part[:-1] if part[-1] == "__init__" else part): path for path, part in parts.items()}


SOURCES = sources()
ENTRY_SCRIPTS = {path.stem for path in ROOT.glob("*.py")}


def arrows(of: str, at_import_only: bool = False) -> Iterator[tuple[str, Import]]:
    """(module, import) of every module that is `of` or lies in it."""
    for module, path in SOURCES.items():
        if within(module, of):
            for found in imports(path.read_text(encoding="utf-8"), module, path.name == "__init__.py"):
                if found.at_import or not at_import_only:
                    yield module, found


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def offenders(of: str, *forbidden: str, at_import_only: bool = False) -> list[str]:
    return [
        f"{module}, line {found.line}: {found.name}"
        for module, found in arrows(of, at_import_only)
        if any(within(found.name, package) for package in forbidden)
    ]


def calls(source: str) -> Iterator[ast.Call]:
    return (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))


# --- the arrows ----------------------------------------------------------------------------------------------------


def test_networks_imports_torch_and_itself_alone() -> None:
    """And triton where a kernel is made."""
    allowed = {"__future__", "collections", "dataclasses", "functools", "math", "networks", "torch", "typing"}
    strangers = [
        (module, found)
        for module, found in arrows("networks")
        if found.name.split(".")[0] not in allowed and (found.at_import or not within(found.name, "triton"))
    ]
    assert strangers == []
    assert any(within(found.name, "torch") for _, found in arrows("networks"))


def test_utils_knows_no_network() -> None:
    assert offenders("utils", "networks") == []


def test_loaders_and_steps_do_not_know_each_other() -> None:
    assert offenders("utils.data", "utils.steps") == []
    assert offenders("utils.steps", "utils.data") == []


def test_the_trainer_receives_built_objects_never_the_config() -> None:
    assert list(arrows("utils.trainer"))
    assert offenders("utils.trainer", "utils.config") == []


def test_no_entry_script_is_imported_by_what_it_is_built_of() -> None:
    assert "train" in ENTRY_SCRIPTS
    assert offenders("utils", *ENTRY_SCRIPTS) == []
    assert offenders("networks", *ENTRY_SCRIPTS) == []


def test_optional_libraries_are_imported_where_they_are_used() -> None:
    found = {
        f"{module}, line {found.line}: {found.name}"
        for package in SOURCES
        for module, found in arrows(package, at_import_only=True)
        if module not in SIMULATION
        and (found.name.split(".")[0] in OPTIONAL or within(found.name, "torch.utils.tensorboard"))
    }
    assert found == set()


def test_the_simulation_is_imported_by_itself_alone() -> None:
    """It needs scipy and colossus, so whatever imports it at module level would need them too."""
    found = [
        f"{module}, line {found.line}: {found.name}"
        for package in ("utils", "networks", *ENTRY_SCRIPTS)
        for module, found in arrows(package, at_import_only=True)
        if module not in SIMULATION and any(within(found.name, part) for part in SIMULATION)
    ]
    assert found == []


# --- what no file may do -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", SOURCES)
def test_files_are_read_without_running_what_is_in_them(module: str) -> None:
    assert unsafe_reading(SOURCES[module].read_text(encoding="utf-8"), module) == []


@pytest.mark.parametrize("module", SOURCES)
def test_no_shell_is_given_a_command_line(module: str) -> None:
    assert shell_use(SOURCES[module].read_text(encoding="utf-8")) == []


def unsafe_reading(source: str, module: str = "module") -> list[str]:
    """Unpickling and YAML's object construction: both run code that a file names."""
    faults = [found.name for found in imports(source, module) if found.name.split(".")[0] in PICKLES]
    for call in calls(source):
        function, keywords = ast.unparse(call.func), {word.arg: ast.unparse(word.value) for word in call.keywords}
        if function.endswith("torch.load") and keywords.get("weights_only") != "True":
            faults.append(f"line {call.lineno}: torch.load without weights_only=True")
        if function.endswith(("np.load", "numpy.load")) and keywords.get("allow_pickle", "False") != "False":
            faults.append(f"line {call.lineno}: numpy.load with allow_pickle")
        if function in ("yaml.load", "yaml.load_all"):
            loader = keywords.get("Loader", ast.unparse(call.args[1]) if len(call.args) > 1 else "")
            if loader not in ("yaml.SafeLoader", "yaml.CSafeLoader"):
                faults.append(f"line {call.lineno}: {function} with {loader or 'no'} Loader")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "yaml" and node.attr in UNSAFE_YAML:
            faults.append(f"line {node.lineno}: yaml.{node.attr}")
        if isinstance(node, ast.ImportFrom) and node.module == "yaml":
            faults.append(f"line {node.lineno}: from yaml import …, write yaml.name")
        if isinstance(node, ast.ImportFrom) and node.module == "torch" and "load" in {name.name for name in node.names}:
            faults.append(f"line {node.lineno}: from torch import load, write torch.load")
    return faults


def shell_use(source: str) -> list[str]:
    faults = []
    for call in calls(source):
        shell = {word.arg: ast.unparse(word.value) for word in call.keywords}.get("shell", "False")
        if shell != "False" or ast.unparse(call.func) in ("os.system", "os.popen", "subprocess.getoutput"):
            faults.append(f"line {call.lineno}: {ast.unparse(call.func)}")
    return faults


# --- the tests' own reading ----------------------------------------------------------------------------------------


def test_every_form_of_import_is_seen() -> None:
    source = """
import a.b as c, d
from e import f, g as h
from . import i
from ..j import k
if True:
    import l
try:
    import m
except ImportError:
    m = importlib.import_module("n.o")
class C:
    import p
def function():
    import q
    __import__("r")
if TYPE_CHECKING:
    import s
"""
    found = {name: at_import for name, at_import, _ in imports(source, "utils.data.native")}
    seen = ["a.b", "d", "e.f", "e.g", "utils.data.i", "utils.j.k", "l", "m", "n.o", "p"]
    assert found == dict.fromkeys(seen, True) | dict.fromkeys(["q", "r", "s"], False)
    assert imports("from . import i", "utils.data", is_package=True)[0].name == "utils.data.i"


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "from torch import load",
        "import pickle",
        "from pickle import loads",
        "yaml.load(text)",
        "yaml.load(text, Loader=yaml.FullLoader)",
        "yaml.load(text, yaml.Loader)",
        "yaml.unsafe_load(text)",
        "class L(yaml.UnsafeLoader): pass",
        "from yaml import load",
        "np.load(path, allow_pickle=True)",
    ],
)
def test_unsafe_reading_is_recognised(source: str) -> None:
    assert unsafe_reading(source)


@pytest.mark.parametrize("source", ["subprocess.run(line, shell=True)", "os.system(line)", "run(line, shell=flag)"])
def test_shell_use_is_recognised(source: str) -> None:
    assert shell_use(source)


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(path, map_location='cpu', weights_only=True)",
        "yaml.load(text, Loader=yaml.SafeLoader)",
        "yaml.safe_load(text)",
        "class L(yaml.SafeLoader): pass",
        "np.load(path, mmap_mode='r')",
        "subprocess.run(['ls'], shell=False)",
    ],
)
def test_safe_calls_pass(source: str) -> None:
    assert unsafe_reading(source) == []
    assert shell_use(source) == []
