"""Options of the Lyman-alpha flux: flags of evaluate.py, and keys of the config's section `evaluation`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from utils.config import parse_value
from utils.config.sections import EvaluationConfig

DEFAULTS = EvaluationConfig()


@dataclass(frozen=True, kw_only=True)
class FluxOptions:
    """Options of the flux; keys and flags have the same names, except that --no_flux is flux: false."""

    flux: bool = True
    mean_flux: float | None = DEFAULTS.mean_flux
    sightlines: int = DEFAULTS.sightlines
    pressure_smoothing: float = DEFAULTS.pressure_smoothing


def add_flux_options(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for each field of FluxOptions."""
    group = parser.add_argument_group("Lyman-alpha flux")
    group.add_argument("--no_flux", dest="flux", action="store_false", help="skip it")
    for name, text in (
        ("mean_flux", "to which all fields are rescaled (the observed one at the file's redshift)"),
        ("sightlines", "number along each axis, at most; 0: all (%(default)s)"),
        ("pressure_smoothing", "of the dark matter for the baseline: standard deviation in Mpc/h (%(default)s)"),
    ):
        group.add_argument(f"--{name}", type=_limited(name), default=getattr(DEFAULTS, name), help=text)


def _limited(key: str) -> Callable[[str], Any]:
    """Converts a flag's text within the limits of the config key of the same name."""

    def convert(text: str) -> Any:
        try:
            return getattr(EvaluationConfig.model_validate({key: parse_value(text)}), key)
        except ValidationError as error:
            raise argparse.ArgumentTypeError(f"{text!r}: {error.errors()[0]['msg']}") from None

    return convert
