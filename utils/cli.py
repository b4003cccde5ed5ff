"""The command line: the original's flags, --profiler, --set for every other key, --preflight."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from utils.config import default_name, parse_value
from utils.errors import UserError, launched_rank


@dataclass(frozen=True)
class Options:
    """What the command line says; `overrides` maps dotted keys to values."""

    yaml_config: str
    config: str
    run_num: str
    overrides: dict[str, Any]
    preflight: bool
    preflight_ranks: int | None
    resume: str = "auto"
    init_from: str | None = None
    plot: str | None = None


class Parser(argparse.ArgumentParser):
    """Its complaints are UserErrors, so that several ranks print one line, and its help is printed once."""

    def __init__(self, text: str | None) -> None:
        """`text`, such as a module's own, is the help, printed as it is."""
        super().__init__(description=text, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see --help")

    def print_help(self, file: Any = None) -> None:
        if launched_rank() == 0:
            super().print_help(file)


def positive(text: str) -> int:
    """A whole number above zero, for argparse."""
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above zero")
    return int(text)


class _TrainingParser(Parser):
    """It names the flag that may have been meant."""

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ").split("=")[0].split()
        match = difflib.get_close_matches(unknown[0], self._option_string_actions, n=1) if unknown else []
        hint = f"did you mean {match[0]}?" if match and message.startswith("unrecognized") else "see --help"
        raise UserError(f"{message}; {hint}")


def _rank_count(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of ranks")
    return int(text)


SWITCHES = {
    "enable_amp": "mixed precision",
    "enable_apex": "apex's fused Adam where it is installed, else torch's",
    "enable_jit": "compile the network and the loss",
    "enable_benchy": "measure IO, SYNTHETIC, FULL and NO-COMM throughput, and end",
    "enable_manual_profiling": "profile a window of steps",
    "disable_broadcast_buffers": "DDP: do not broadcast buffers",
    "noddp": "do not exchange gradients",
}
VALUES: dict[str, tuple[type, str]] = {
    "data_loader_config": (str, "lowmem, inmem, dali-lowmem, resident, synthetic, auto or classification"),
    "local_batch_size": (int, "samples a step a rank; the global batch is this times the ranks"),
    "num_epochs": (int, "epochs to train"),
    "num_data_workers": (int, "loader threads a rank"),
    "bucket_cap_mb": (float, "DDP: size of a gradient bucket in MB"),
    "profiler": (str, "what --enable_manual_profiling profiles with: auto, nsys or torch"),
}
KEYS = {"profiler": "profile.profiler"}  # of flags that set a key in a section


def build_parser() -> argparse.ArgumentParser:
    parser = _TrainingParser(
        "Trains the network of a named config. A switch turns on what the YAML leaves off;\n"
        "to turn off what the YAML switches on, use --set: --set enable_amp=false"
    )
    parser.add_argument("--yaml_config", default="./config/UNet.yaml", help="file of named configs (%(default)s)")
    parser.add_argument("--config", help="name of the config (base, or the only one there is)")
    parser.add_argument("--run_num", default="00", help="tag of the run, the last part of its directory (%(default)s)")
    parser.add_argument(
        "--resume",
        nargs="?",
        const="auto",
        default="auto",
        metavar="auto|no|DIR",
        help="go on from the run directory's newest checkpoint if there is one (auto), start anew and remove those "
        "there are (no), or go on from another run's, e.g. on another number of ranks (%(default)s)",
    )
    parser.add_argument("--init_from", metavar="FILE", help="start a new training with a checkpoint's weights alone")
    for name, text in SWITCHES.items():
        parser.add_argument(f"--{name}", action="store_true", default=None, help=text)
    for name, (kind, text) in VALUES.items():
        parser.add_argument(f"--{name}", type=kind, help=text)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any key of the config, dotted for nested ones: --set lr_schedule.start_lr=1e-3; may be repeated",
    )
    parser.add_argument(
        "--preflight",
        nargs="?",
        const=0,
        type=_rank_count,
        metavar="RANKS",
        help="check everything that can be known before training, for this many ranks, and end",
    )
    parser.add_argument(
        "--plot",
        nargs="?",
        const="learning_rate.png",
        metavar="FILE",
        help="with --preflight: draw the learning rate over all steps (learning_rate.png)",
    )
    return parser


def read_changes(texts: Sequence[str]) -> dict[str, Any]:
    """Dotted keys and values of --set's arguments."""
    changes: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise UserError(f"--set {text}: expected key=value")
        changes[key.strip()] = parse_value(value, f"--set {text}")
    return changes


def parse(argv: Sequence[str] | None = None) -> Options:
    """Raises UserError for what it cannot read."""
    arguments = build_parser().parse_args(argv)
    overrides: dict[str, Any] = {}
    for name in (*VALUES, *SWITCHES):
        value = getattr(arguments, name)
        if value is not None:
            overrides[KEYS.get(name, name)] = value
    overrides.update(read_changes(arguments.set))
    if any(part in arguments.run_num for part in ("/", "\\")) or arguments.run_num in ("", ".", ".."):
        raise UserError(f"--run_num {arguments.run_num!r} must be a plain name: it is the last part of a path")
    if arguments.plot is not None and arguments.preflight is None:
        raise UserError("--plot draws what a preflight finds; add --preflight, or leave it out")
    return Options(
        arguments.yaml_config,
        arguments.config or default_name(arguments.yaml_config),
        arguments.run_num,
        overrides,
        arguments.preflight is not None,
        arguments.preflight or None,
        arguments.resume,
        arguments.init_from,
        arguments.plot,
    )
