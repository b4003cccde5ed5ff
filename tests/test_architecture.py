"""Import rules and forbidden calls, checked on the sources without importing them.

networks stands alone, utils knows no network, loaders and steps meet in the entry scripts only.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
# Libraries that training on existing data does not need; they are imported inside the functions that use them.
OPTIONAL = {"apex", "colossus", "matplotlib", "nvidia", "rich", "scipy", "sklearn", "tensorboard", "triton"}
# Modules of the commands that make data, which may import the optional libraries.
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


def unsafe_calls(source: str, module: str = "module") -> list[str]:
    """Unpickling, YAML's object construction and shells: each runs code that a file or a text names."""
    faults = [found.name for found in imports(source, module) if found.name.split(".")[0] in PICKLES]
    for node in ast.walk(ast.parse(source)):
        fault = ""
        if isinstance(node, ast.Call):
            function, keywords = ast.unparse(node.func), {word.arg: ast.unparse(word.value) for word in node.keywords}
            if function.endswith("torch.load") and keywords.get("weights_only") != "True":
                fault = "torch.load without weights_only=True"
            elif function.endswith(("np.load", "numpy.load")) and keywords.get("allow_pickle", "False") != "False":
                fault = "numpy.load with allow_pickle"
            elif function in ("yaml.load", "yaml.load_all"):
                loader = keywords.get("Loader", ast.unparse(node.args[1]) if len(node.args) > 1 else "no Loader")
                if loader not in ("yaml.SafeLoader", "yaml.CSafeLoader"):
                    fault = f"{function} with {loader}"
            elif keywords.get("shell", "False") != "False":
                fault = f"{function} with a shell"
            elif function in ("os.system", "os.popen", "subprocess.getoutput"):
                fault = function
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "yaml" and node.attr in UNSAFE_YAML:
            fault = f"yaml.{node.attr}"
        elif isinstance(node, ast.ImportFrom) and node.module == "yaml":
            fault = "from yaml import …, write yaml.name"
        elif (
            isinstance(node, ast.ImportFrom) and node.module == "torch" and "load" in {name.name for name in node.names}
        ):
            fault = "from torch import load, write torch.load"
        if fault:
            faults.append(f"line {node.lineno}: {fault}")  # type: ignore[attr-defined] # these nodes have lines
    return faults


def sources() -> dict[str, Path]:
    """Dotted module name -> file of the program: entry scripts, networks, utils, benchmarks."""
    paths = [*ROOT.glob("*.py")]
    for directory in ("networks", "utils", "benchmarks"):
        paths += (ROOT / directory).rglob("*.py")
    parts = {path: path.relative_to(ROOT).with_suffix("").parts for path in paths}
    return {".".join(part[:-1] if part[-1] == "__init__" else part): path for path, part in parts.items()}


SOURCES = sources()
ENTRY_SCRIPTS = {path.stem for path in ROOT.glob("*.py")}


@functools.cache
def imports_of(module: str) -> list[Import]:
    path = SOURCES[module]
    return imports(path.read_text(encoding="utf-8"), module, path.name == "__init__.py")


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def offenders(package: str, *forbidden: str) -> list[str]:
    """Imports of the forbidden packages in modules of `package`."""
    modules = [module for module in SOURCES if within(module, package)]
    assert modules, package
    return [
        f"{module}, line {found.line}: {found.name}"
        for module in modules
        for found in imports_of(module)
        if any(within(found.name, other) for other in forbidden)
    ]


# --- import rules ----------------------------------------------------------------------------------------------------


def test_networks_imports_torch_and_itself_alone() -> None:
    """And triton inside the functions that make a kernel."""
    allowed = {"__future__", "collections", "dataclasses", "functools", "math", "networks", "torch", "typing"}
    found = [(module, found) for module in SOURCES if within(module, "networks") for found in imports_of(module)]
    assert any(within(name, "torch") for _, (name, _, _) in found)
    assert [
        (module, name, line)
        for module, (name, at_import, line) in found
        if name.split(".")[0] not in allowed and (at_import or not within(name, "triton"))
    ] == []


def test_packages_know_only_what_is_below_them() -> None:
    """The trainer gets built objects, never the config; loaders and steps do not know each other."""
    assert {"train", "predict"} <= ENTRY_SCRIPTS
    assert offenders("utils", "networks", *ENTRY_SCRIPTS) == []
    assert offenders("networks", *ENTRY_SCRIPTS) == []
    assert offenders("utils.data", "utils.steps") == []
    assert offenders("utils.steps", "utils.data") == []
    assert offenders("utils.trainer", "utils.config") == []


def test_optional_libraries_and_the_simulation_are_imported_where_they_are_used() -> None:
    """The simulation needs scipy and colossus, so a module that imports it at its top would need them, too."""
    forbidden = {*OPTIONAL, "torch.utils.tensorboard", *SIMULATION}
    assert [
        f"{module}, line {line}: {name}"
        for module in SOURCES
        for name, at_import, line in imports_of(module)
        if at_import and module not in SIMULATION and any(within(name, other) for other in forbidden)
    ] == []


# --- forbidden calls -------------------------------------------------------------------------------------------------


def test_program_runs_no_code_from_files_and_starts_no_shell() -> None:
    faults = {module: unsafe_calls(path.read_text(encoding="utf-8"), module) for module, path in SOURCES.items()}
    assert {module: found for module, found in faults.items() if found} == {}


# --- the checks themselves -------------------------------------------------------------------------------------------


def test_every_form_of_import_is_found() -> None:
    source = """
import a.b as c, d
from e import f, g as h
from ..j import k
class C:
    import p
def function():
    import q
    importlib.import_module("n.o")
if TYPE_CHECKING:
    import s
"""
    found = {name: at_import for name, at_import, _ in imports(source, "utils.data.native")}
    seen = ["a.b", "d", "e.f", "e.g", "utils.j.k", "p"]
    assert found == dict.fromkeys(seen, True) | dict.fromkeys(["q", "n.o", "s"], False)
    assert imports("from . import i", "utils.data", is_package=True)[0].name == "utils.data.i"


def test_unsafe_calls_are_found_and_safe_ones_pass() -> None:
    unsafe = ["torch.load(path)", "torch.load(path, weights_only=False)", "from torch import load"]
    unsafe += ["import pickle", "from pickle import loads", "np.load(path, allow_pickle=True)"]
    unsafe += ["yaml.load(text)", "yaml.load(text, yaml.Loader)", "yaml.load(text, Loader=yaml.FullLoader)"]
    unsafe += ["yaml.unsafe_load(text)", "class L(yaml.UnsafeLoader): pass", "from yaml import load"]
    unsafe += ["subprocess.run(line, shell=True)", "run(line, shell=flag)", "os.system(line)"]
    for source in unsafe:
        assert unsafe_calls(source), source
    safe = ["torch.load(path, map_location='cpu', weights_only=True)", "np.load(path, mmap_mode='r')"]
    safe += ["yaml.load(text, Loader=yaml.SafeLoader)", "yaml.safe_load(text)", "class L(yaml.SafeLoader): pass"]
    safe += ["subprocess.run(['ls'], shell=False)"]
    for source in safe:
        assert unsafe_calls(source) == [], source
