"""Networks of users: `network.name: my_module.MyNetwork` names a class that Python finds from the working directory."""

import contextlib
import importlib
import importlib.util
import inspect
import logging
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from utils.config import Config, did_you_mean
from utils.data.datasets import get_dataset
from utils.data.loaders.base import meta_batch
from utils.errors import UserError

log = logging.getLogger(__name__)

SHIPPED = ("unet",)  # networks for volumes whose outputs the tests check
LIBRARIES = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent), "<")  # not the places of a user's error


def is_checked(config: Config) -> bool:
    """True for a network that is not one of this project's, and so may have any fault."""
    return "." in config.network.name or not (config.is_classification or config.network.name in SHIPPED)


def build(name: str, offered: Mapping[str, Any], options: Mapping[str, Any]) -> nn.Module:
    """An instance of the class; UserError if it cannot be found or built.

    It gets all `options`, and of what is `offered` what its constructor has.
    """
    kind = _find(name)
    parameters = inspect.signature(kind).parameters.values()
    keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    named = {parameter.name: parameter for parameter in parameters if parameter.kind in keyword}
    accepts_all = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters)
    known = f"; known: {', '.join(named) or 'none'}"
    for option in [] if accepts_all else options:
        if option not in named:
            raise UserError(f"network {name} has no option {option}{did_you_mean(option, named)}{known}")
    arguments = {key: value for key, value in offered.items() if key in named} | dict(options)
    for option, parameter in named.items():
        if parameter.default is parameter.empty and option not in arguments:
            raise UserError(f"network {name} needs its option {option}; set network.options.{option}{known}")
    with one_line(f"cannot build network {name} with {arguments}"):
        return kind(**arguments)


@torch.no_grad()
def check_output(config: Config, network: nn.Module, device: torch.device) -> None:
    """Calls the network once, on a sample of zeros; UserError unless its output has the shape of the targets.

    May draw from torch's global generators.
    """
    name, batch = config.network.name, meta_batch(config, 1)
    given, target = list(batch.inputs.shape), list(batch.targets.shape)
    if config.dataset.name is not None:
        target.append(get_dataset(config.dataset.name).classes)  # logits
    was_training = network.training
    with one_line(f"network {name} fails on an input {given} (target {target})"):
        outputs = network.eval()(*(torch.zeros_like(part, device=device) for part in batch.network_inputs))
    network.train(was_training)
    shape = list(outputs.shape) if isinstance(outputs, torch.Tensor) else type(outputs).__name__
    if shape != target:
        raise UserError(f"network {name}: output {shape}, target {target}; correct the network")


def _find(name: str) -> type[nn.Module]:
    """The class; logs from which file the module is imported, before that file runs."""
    module_name, _, class_name = name.rpartition(".")
    if not all(part.isidentifier() for part in name.split(".")):
        raise UserError(f"network.name {name!r} is not the name of a class; write it as my_module.MyNetwork")
    with _working_directory_first():
        if module_name not in sys.modules:
            spec = importlib.util.find_spec(module_name.partition(".")[0])
            if spec is None:
                raise UserError(f"network.name {name}: no module {module_name} in {os.getcwd()}; correct the name")
            log.info("network %s from %s", name, spec.origin or list(spec.submodule_search_locations or []))
        with one_line(f"network.name {name}: cannot import {module_name}"):
            module = importlib.import_module(module_name)
    classes = [key for key, value in vars(module).items() if _is_network(value) and value.__module__ == module_name]
    kind: Any = getattr(module, class_name, None)
    if not _is_network(kind):
        fault = "is no class derived from torch.nn.Module" if hasattr(module, class_name) else "does not exist"
        known = f"; {module_name} has {', '.join(classes) or 'no networks'}"
        raise UserError(f"network.name {name}: {class_name} {fault}{did_you_mean(class_name, classes)}{known}")
    return kind


def _is_network(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)


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
