"""Import rules and forbidden calls, checked on the sources without importing them.

networks stands alone, utils knows no network, loaders and steps meet in the entry scripts only.
"""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
# Libraries that training on existing data does not need; they are imported inside the functions that use them.
OPTIONAL = {"apex", "colossus", "matplotlib", "nvidia", "rich", "scipy", "sklearn", "tensorboard", "triton"}
# Modules of the commands that make data, which may import the optional libraries.
SIMULATION = {
    f"utils.simulation.{name}" for name in ("fourier", "gas", "linear_theory", "particle_mesh", "simulate", "__main__")
}
# Unpickling, YAML's object construction and shells: each runs code that a file or a text names.
UNSAFE = re.compile(
    r"^\s*(import|from) (cloudpickle|dill|joblib|pickle|shelve)\b|^\s*from yaml import|^\s*from torch import .*\bload\b"
    r"|\bos\.(system|popen)\b|\bsubprocess\.getoutput\b|\b(allow_pickle|shell)=(?!False)"
    r"|\byaml\.((unsafe|full)_load|C?(Full|Unsafe)?Loader\b|load(_all)?\((?!.*SafeLoader))"
    r"|\btorch\.load\((?!.*weights_only=True)",
)


class Import(NamedTuple):
    """One imported dotted name; `from a import b` is a.b, which may be a module or something in one."""

    name: str
    at_import: bool  # carried out when the module is imported, not when a function is called
    line: int


def imports(source: str) -> list[Import]:
    """All imports in a source text."""
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
            assert not node.level, f"line {node.lineno}: import by the absolute name, which these checks understand"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        found.extend(Import(name, at_import, getattr(node, "lineno", 0)) for name in names)
        for child in ast.iter_child_nodes(node):
            visit(child, at_import)

    visit(ast.parse(source), True)
    return found


def unsafe_statements(source: str) -> list[str]:
    """Lines of the source text, brought to one line per statement, that match UNSAFE."""
    return [line for line in ast.unparse(ast.parse(source)).splitlines() if UNSAFE.search(line)]


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
    return imports(SOURCES[module].read_text(encoding="utf-8"))


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def offenders(package: str, *forbidden: str) -> list[str]:
    """Imports of the forbidden packages in modules of `package`."""
    modules = [module for module in SOURCES if within(module, package)]
    assert modules, package
    return [
        f"{module}, line {found.info}: {found.name}"
        for module in modules
        for found in imports_of(module)
        if any(within(found.name, other) for other in forbidden)
    ]


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
    assert offenders("utils.training.trainer", "utils.config") == []


def test_optional_libraries_and_the_simulation_are_imported_where_they_are_used() -> None:
    """The simulation needs scipy and colossus, so a module that imports it at its top would need them, too."""
    forbidden = {*OPTIONAL, "torch.utils.tensorboard", *SIMULATION}
    assert [
        f"{module}, line {line}: {name}"
        for module in SOURCES
        for name, at_import, line in imports_of(module)
        if at_import and module not in SIMULATION and any(within(name, other) for other in forbidden)
    ] == []


def test_program_runs_no_code_from_files_and_starts_no_shell() -> None:
    faults = {module: unsafe_statements(path.read_text(encoding="utf-8")) for module, path in SOURCES.items()}
    # The one exception: its `find_class` refuses all names, except those for which it has its own stand-ins.
    allowed = {"utils.data.datasets.restricted_pickle": ["import pickle"]}
    assert {module: found for module, found in faults.items() if found} == allowed


def test_imports_inside_functions_are_distinguished_from_those_of_the_module() -> None:
    source = "import a.b as c, d\nfrom e import f, g as h\nclass C:\n    import p\ndef function():\n    import q\n"
    source += "if TYPE_CHECKING:\n    import s\n"
    found = {name: at_import for name, at_import, _ in imports(source)}
    assert found == dict.fromkeys(["a.b", "d", "e.f", "e.g", "p"], True) | dict.fromkeys(["q", "s"], False)


def test_unsafe_calls_are_found_and_safe_ones_pass() -> None:
    unsafe = ["torch.load(path)", "torch.load(path, weights_only=False)", "from torch import load", "import pickle"]
    unsafe += ["np.load(path, allow_pickle=True)", "yaml.load(text)", "yaml.load(text, Loader=yaml.FullLoader)"]
    unsafe += ["class L(yaml.UnsafeLoader): pass", "from yaml import load", "run(line, shell=flag)", "os.system(line)"]
    for source in unsafe:
        assert unsafe_statements(source), source
    safe = ["torch.load(path, map_location='cpu', weights_only=True)", "np.load(path, mmap_mode='r')"]
    safe += ["yaml.load(text, Loader=yaml.SafeLoader)", "class L(yaml.SafeLoader): pass", "run(['ls'], shell=False)"]
    for source in safe:
        assert unsafe_statements(source) == [], source
