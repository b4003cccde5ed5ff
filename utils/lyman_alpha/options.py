"""Flags of evaluate.py for the Lyman-alpha flux; they have the names of keys of the config's section `evaluation`."""

from __future__ import annotations

import argparse
from typing import Any

from utils.config import parse_value, validate_section
from utils.config.sections import EvaluationConfig

DEFAULTS = EvaluationConfig()
FLAGS = {
    "mean_flux": "to which all fields are rescaled (the observed one at the file's redshift)",
    "sightlines": "number along each axis, at most; 0: all (%(default)s)",
    "pressure_smoothing": "of the dark matter for the baseline: standard deviation in Mpc/h (%(default)s)",
}


def add_flux_options(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for each key about the flux; `--no_flux` is `flux: false`."""
    group = parser.add_argument_group("Lyman-alpha flux")
    group.add_argument("--no_flux", dest="flux", action="store_false", help="skip it")
    for name, text in FLAGS.items():
        group.add_argument(f"--{name}", type=parse_value, default=getattr(DEFAULTS, name), help=text)


def take_flux_options(arguments: dict[str, Any]) -> EvaluationConfig:
    """Removes the values of these flags and returns them as a section; UserError if one is outside its limits."""
    values = {name: arguments.pop(name) for name in ("flux", *FLAGS)}
    return validate_section(EvaluationConfig, values, "Lyman-alpha flux")
