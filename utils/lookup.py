"""What a config names: entries of tables such as LOADERS, and classes of users such as my_module.MyNetwork."""

import ast
import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from utils.config import did_you_mean
from utils.errors import UserError
from utils.log import once_per_job

log = once_per_job(__name__)

Entry = TypeVar("Entry")
NOT_OWN = {"", "torch", "networks", "utils", "analysis", "simulation", *sys.stdlib_module_names}
LIBRARIES = (str(Path(__file__).parent), str(Path(torch.__file__).parent), "<")  # not the places of a user's error


def lookup(table: Mapping[str, Entry], name: str, key: str, remedy: str = "") -> Entry:
    """The entry `key`, the value of the config key `name`; UserError with the known ones if there is none."""
    if key not in table:
        raise UserError(f"{name}: unknown name {key}; known: {', '.join(table)}{did_you_mean(key, table)}{remedy}")
    return table[key]


def build_user_class(key: str, name: str, base: type, offered: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """An instance of the class `name`, the value of a config's `key`; UserError if it cannot be found or built.

    The class is derived from `base`. It gets all `options`, and of what is `offered` what its constructor has.
    """
    kind, what = _find(key, name, base), key.partition(".")[0]
    parameters = inspect.signature(kind).parameters.values()
    keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    named = {parameter.name: parameter for parameter in parameters if parameter.kind in keyword}
    accepts_all = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters)
    known = f"; known: {', '.join(named) or 'none'}"
    for option in [] if accepts_all else options:
        if option not in named:
            raise UserError(f"{what} {name} has no option {option}{did_you_mean(option, named)}{known}")
    arguments = {key: value for key, value in offered.items() if key in named} | dict(options)
    for option, parameter in named.items():
        if parameter.default is parameter.empty and option not in arguments:
            remedy = f"set {'loss_options' if what == 'loss' else f'{what}.options'}.{option}"
            raise UserError(f"{what} {name} needs its option {option}; {remedy}{known}")
    shown = {key: value for key, value in options.items() if key != "params"}
    with one_line(f"cannot build {what} {name} with {shown}"):
        return kind(**arguments)


def find_function(key: str, name: str) -> Any:
    """The function `name`, or an instance of it if it is a class of modules; UserError if it cannot be found."""
    found = _find(key, name)
    with one_line(f"{key} {name}: cannot be built"):
        return found() if isinstance(found, type) else found


def _find(key: str, name: str, base: type | None = None) -> Any:
    """The class, or without `base` the function; logs from which file the module is imported, before that file runs."""
    kind = f"class derived from {base.__name__}" if base else "function"
    module_name, _, class_name = name.rpartition(".")
    if not all(part.isidentifier() for part in name.split(".")):
        raise UserError(f"{key} {name!r} is not the name of a {kind.split()[0]}; write it as my_module.name")
    with _working_directory_first():
        if module_name not in sys.modules:
            if (spec := importlib.util.find_spec(module_name.partition(".")[0])) is None:
                raise UserError(f"{key} {name}: no module {module_name} in {os.getcwd()}; correct the name")
            file = spec.origin or list(spec.submodule_search_locations or [])
            log.info("%s %s from %s", key.partition(".")[0], name, file)
        with one_line(f"{key} {name}: cannot import {module_name}"):
            module = importlib.import_module(module_name)
    values = {name: value for name, value in vars(module).items() if callable(value)}
    if base:
        values = {name: value for name, value in values.items() if isinstance(value, type) and issubclass(value, base)}
    if class_name not in values:
        fault = f"is no {kind}" if hasattr(module, class_name) else "does not exist"
        classes = [name for name, value in values.items() if getattr(value, "__module__", "") == module_name]
        known = f"; {module_name} has {', '.join(classes) or f'no such {kind.split()[0]}'}"
        raise UserError(f"{key} {name}: {class_name} {fault}{did_you_mean(class_name, classes)}{known}")
    return values[class_name]


@contextlib.contextmanager
def _working_directory_first() -> Iterator[None]:
    """Context in which modules of the working directory are found first, as with `python -m`."""
    before = list(sys.path)
    sys.path.insert(0, os.getcwd())
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = before


def own_code(config: Mapping[str, Any]) -> dict[str, str]:
    """The SHA-256 of the files of a config's own network, loss and optimizer, and of what they import, by path.

    Of what they import, also in functions, only files below the working directory. The path is the module's, such as
    mine/layers.py. Executes nothing.
    """
    classes = config["network"]["name"], config["loss"], config["optimizer"]["name"]
    names, digests = [name.rpartition(".")[0] for name in classes], dict[str, str]()
    named = {name.partition(".")[0] for name in names}
    with _working_directory_first():
        places = [place for place in sys.path if not {"site-packages", "dist-packages"} & {*Path(place).parts}]
        for name in names:  # which grow
            top, package, base = name.partition(".")[0], name.split("."), name.replace(".", "/")
            files = ((place, path) for place in places for path in (f"{base}/__init__.py", f"{base}.py"))
            place, path = next((file for file in files if os.path.isfile(os.path.join(*file))), ("", ""))
            if path and top not in NOT_OWN and (top in named or Path(place).is_relative_to(os.getcwd())):
                content = Path(place, path).read_bytes()
                digests[path] = hashlib.sha256(content).hexdigest()
                with contextlib.suppress(SyntaxError, ValueError):  # this command may not import it
                    found = _imports(ast.parse(content), package if path.endswith("/__init__.py") else package[:-1])
                    names += [module for module in found if module not in names]
            names += {".".join(package[:-1])} - {*names}
    return digests


def _imports(tree: ast.Module, package: list[str]) -> Iterator[str]:
    """The names that a module of `package` imports: modules, and what is in them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            level, module = getattr(node, "level", 0), getattr(node, "module", None)
            above = package[: len(package) + 1 - level] if level else []
            yield from (".".join(filter(None, [*above, module, alias.name])) for alias in node.names)


def warn_of_other_code(source: str, weights: Mapping[str, Any]) -> None:
    """Warns if own code has changed since the run that wrote `weights`, the content of a weights.pt."""
    if (before := weights.get("code")) is None:
        return  # an old checkpoint
    now = own_code(weights["config"])
    kinds = dict.fromkeys(now, "new") | {file: "changed" if file in now else "missing" for file in before}
    if files := [f"{file} ({kinds[file]})" for file in sorted(kinds) if before.get(file) != now.get(file)]:
        log.warning("%s was trained with other code: %s; restore it, or expect other results", source, ", ".join(files))


@contextlib.contextmanager
def one_line(fault: str) -> Iterator[None]:
    """Turns any error of a user's code into a UserError in one line, with the place; memory errors pass."""
    try:
        yield
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        places = [frame for frame in frames if not frame.filename.startswith(LIBRARIES)]
        place = f" ({places[-1].filename}, line {places[-1].lineno})" if places else ""
        raise UserError(f"{fault}: {type(error).__name__}: {error}{place}") from error
