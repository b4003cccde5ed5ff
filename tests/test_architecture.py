"""Import rules (see LAYERS), the place of some code, and forbidden calls, by the sources without importing them."""

import ast
import graphlib
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

from docs.generate import ROOT, tracked

# From the lowest layer to the highest: a package imports packages of lower layers, and of its own none but itself.
UTILS = "constants launchers powers | errors | progress log | files | config | cli lookup | distributed | optim"
UTILS += " | volumes | data | steps | run | profiling | training | preflight"
ANALYSIS = "slabs | modes | inference | lyman_alpha | evaluation"
LAYERS = [[f"utils.{name}" for name in names.split()] for names in UTILS.split("|")]
LAYERS += [[f"analysis.{name.strip()}"] for name in ANALYSIS.split("|")] + [["simulation"]]
LAYER = {name: number for number, names in enumerate(LAYERS) for name in names}
WINGS = ("networks", "utils", "simulation", "analysis")
# Libraries that training on existing data does not need. Functions that use them import them.
OPTIONAL = {"apex", "colossus", "matplotlib", "nvidia", "rich", "scipy", "sklearn", "tensorboard", "triton"}
# Modules that import optional libraries, for kernels, figures and simulated data. Others import them in functions.
TRITON = "cudnn l1 pointwise smoothing hopper.common hopper.edges hopper.layers hopper.strided"
TRITON_MODULES = {f"networks.ops.{name}" for name in TRITON.split()}
FIGURES = {"analysis.evaluation.figures"}
SIMULATION = "channels cooling evolution fourier gravity linear_theory hydro particle_mesh simulate __main__"
NEEDING = (
    TRITON_MODULES | FIGURES | {"evaluate", "utils.optim.cells"} | {f"simulation.{name}" for name in SIMULATION.split()}
)
# Unpickling, YAML's object construction and shells execute code that a file or a text contains. torch's object
# collectives unpickle what other processes send.
UNSAFE = re.compile(
    r"^\s*(import|from) (cloudpickle|dill|joblib|pickle|shelve)\b|^\s*from yaml import|^\s*from torch import .*\bload\b"
    r"|\bos\.(system|popen)\b|\bsubprocess\.getoutput\b|\b(allow_pickle|shell)=(?!False)"
    r"|\byaml\.((unsafe|full)_load|C?(Full|Unsafe)?Loader\b|load(_all)?\((?!.*SafeLoader))"
    r"|\btorch\.load\((?!.*weights_only=True)|(gather|scatter|broadcast|send|recv)_object(_list)?\b"
)


class Import(NamedTuple):
    """One imported dotted name; `from a import b` is a.b, which may be a module or a name in a module."""

    name: str
    at_import: bool  # executed when the module is imported, not when a function is called
    line: int


def imports(node: ast.AST, at_import: bool = True) -> Iterator[Import]:
    for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    at_import = at_import and not for_types and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    if isinstance(node, ast.Import | ast.ImportFrom):
        package = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        assert not getattr(node, "level", 0), f"line {node.lineno}: relative import; these checks need absolute imports"
        yield from (Import(package + alias.name, at_import, node.lineno) for alias in node.names)
    for child in ast.iter_child_nodes(node):
        yield from imports(child, at_import)


def unsafe_statements(tree: ast.Module) -> list[str]:
    """The statements of a module, one line each, that match UNSAFE."""
    return [line for line in ast.unparse(tree).splitlines() if UNSAFE.search(line)]


# The files of entry scripts, the wings and benchmarks by dotted module name.
FILES = [*tracked("*.py"), *(path for name in (*WINGS, "benchmarks") for path in (ROOT / name).rglob("*.py"))]
SOURCES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}
ENTRY_SCRIPTS = {path.stem for path in tracked("*.py")}


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(SOURCES[module].read_text(encoding="utf-8"))


@cache
def imports_of(module: str) -> list[Import]:
    return list(imports(tree_of(module)))


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def faults(package: str, forbidden: Callable[[str, Import], bool]) -> list[str]:
    """The forbidden imports in modules of a package; "" stands for all."""
    modules = [module for module in SOURCES if not package or within(module, package)]
    assert modules, package
    pairs = [(module, used) for module in modules for used in imports_of(module)]
    return [f"{module}, line {used.line}: {used.name}" for module, used in pairs if forbidden(module, used)]


def module_of(name: str) -> str:
    """The module of the project that an import of this dotted name loads; "" for other packages."""
    while name and name not in SOURCES:
        name = name.rpartition(".")[0]
    return name


def test_networks_imports_only_torch_and_itself_and_only_builders_import_it() -> None:
    """The exceptions are the modules of Triton kernels, which are imported when the first kernel is needed."""
    allowed = {"abc", "collections", "contextlib", "dataclasses", "functools", "importlib", "math", "typing"}
    allowed |= {"networks", "torch"}

    def forbidden(module: str, imported: Import) -> bool:
        return imported.name.split(".")[0] not in allowed | ({"triton"} if module in TRITON_MODULES else set())

    assert faults("networks", forbidden) == []
    builders = "utils.steps", "utils.preflight", "utils.run.open_run", "analysis.lyman_alpha.loss"
    builders += ("utils.optim.cells",)  # launches kernels
    builders += tuple(f"analysis.inference.{name}" for name in ("export", "sliding_window", "trained_network"))

    def builds(module: str, imported: Import) -> bool:
        return within(imported.name, "networks") and not module.startswith(builders)

    assert faults("utils", builds) == faults("analysis", builds) == faults("simulation", builds) == []


def test_no_module_imports_an_entry_script() -> None:
    """The exception is train_graph.py, which is train.py with another step."""
    assert {"train", "train_graph", "predict", "evaluate", "export"} == ENTRY_SCRIPTS
    for package in (*WINGS, *ENTRY_SCRIPTS):
        others = ENTRY_SCRIPTS - ({"train"} if package == "train_graph" else set())
        assert faults(package, lambda _, imported, others=others: imported.name.split(".")[0] in others) == []


def test_packages_import_only_packages_of_lower_layers() -> None:
    """So no two packages import each other."""

    def package_of(module: str) -> str:
        return ".".join(module.split(".")[: 1 if module.startswith("simulation") else 2])

    def forbidden(module: str, imported: Import) -> bool:
        importing, package = package_of(module), package_of(module_of(imported.name))
        return package in LAYER and package != importing and LAYER[package] >= LAYER[importing]

    modules = [module for module in SOURCES if module.startswith(WINGS[1:]) and module not in ("utils", "analysis")]
    assert {package_of(module) for module in modules} == set(LAYER)
    assert len(LAYER) <= 25
    assert [fault for wing in WINGS[1:] for fault in faults(wing, forbidden)] == []


def test_imports_of_modules_have_no_cycles() -> None:
    """Imports in functions count, too."""
    graph = {module: {module_of(imported.name) for imported in imports_of(module)} - {""} for module in SOURCES}
    assert {"utils.config", "utils.errors"} <= graph["utils.cli"]
    assert "networks.ops.cudnn" in graph["networks.ops"]
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError with the modules of a cycle


def test_optional_libraries_and_the_simulation_are_imported_in_functions() -> None:
    """The simulation needs scipy and colossus, so a module that imports it at the top would also need them."""
    optional = OPTIONAL | NEEDING | {"torch.utils.tensorboard"}

    def forbidden(module: str, imported: Import) -> bool:
        allowed = module in NEEDING or not imported.at_import
        return not allowed and any(within(imported.name, library) for library in optional)

    assert faults("", forbidden) == []


def test_entry_scripts_and_the_trainer_do_not_distinguish_the_root_rank() -> None:
    for module in (*ENTRY_SCRIPTS, "utils.training.trainer"):
        assert ".is_root" not in ast.unparse(tree_of(module)), module


def test_program_runs_no_code_from_files_and_starts_no_shell() -> None:
    faults = {module: unsafe_statements(tree_of(module)) for module in SOURCES}
    # The one exception: its `find_class` refuses all names, except those for which it has its own stand-ins.
    allowed = {"utils.data.datasets": ["import pickle"]}
    assert {module: lines for module, lines in faults.items() if lines} == allowed
