"""The command line of train.py: the tutorial's flags, --set, --preflight, --resume; also the parser of all scripts."""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from utils import version_line
from utils.config import Config, default_name, flatten, load, parse_value, to_yaml, translate
from utils.config.messages import similar
from utils.errors import UserError
from utils.launchers import launched_rank


@dataclass(frozen=True)
class Options:
    """The parsed command line.

    overrides: values of dotted config keys.
    preflight: number of ranks to check the run for; 0: the launched number; None: no preflight.
    gpu_memory: of the GPUs that the preflight checks the run for, in GiB.
    """

    yaml_config: str
    config: str
    run_num: str
    overrides: dict[str, Any]
    preflight: int | None
    resume: str | None
    init_from: str | None
    gpu_memory: int | None


class Parser(argparse.ArgumentParser):
    """Raises a UserError for invalid arguments, which rank 0 prints; prints help and version on rank 0 only."""

    def __init__(self, text: str | None) -> None:
        """`text`, usually the docstring of the module, is printed unchanged as the help's description."""
        super().__init__(description=text, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
        # Shells leave the ~ in --flag=~/x to the program. None is the type of arguments that have no other.
        self.register("type", None, os.path.expanduser)
        text = "print the versions of this program, PyTorch and Python, then exit"
        self.add_argument("--version", action="version", help=text)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._arguments = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        prefix = "unrecognized arguments: "
        unknown = message.removeprefix(prefix).split() if message.startswith(prefix) else []
        if "required" in message:  # a misspelled flag is the cause, if there is one
            flags = [argument for argument in self._arguments if argument.startswith("--")]
            unknown = [flag for flag in flags if flag.split("=")[0] not in self._option_string_actions]
        names = [name for argument in unknown for name in self._similar(argument)]
        hint = f"did you mean {', '.join(dict.fromkeys(names))}?" if names else "see --help"
        if any(VIT_FLAGS.fullmatch(argument.split("=")[0]) for argument in unknown):
            hint = "it belongs to SC23 to SC25, which train another network: see docs/tutorial.md#editions"
        raise UserError(f"{prefix + ' '.join(unknown) if unknown else message}; {hint}")

    def _similar(self, argument: str) -> list[str]:
        options, name = self._option_string_actions, argument.split("=")[0]
        if "--set" not in options:
            return similar(name, options)
        if argument.endswith((".yaml", ".yml")):
            return [f"--yaml_config {argument}"]
        spaced = re.search(r"--set[ =]([\w.]+)(?: *= +| +=? *)([^\s=-]\S*)", " ".join(self._arguments))
        if spaced and argument.strip("=") in ("", spaced[2]):
            return [f"--set {spaced[1]}={spaced[2]}"]
        keys = similar(name.lstrip("-"), flatten(Config())) if argument.startswith("-") or "=" in argument else []
        return similar(name, options) or [f"--set {key}=VALUE" for key in keys]

    @property
    def version(self) -> str:  # argparse reads it for --version
        return version_line()

    def _print_message(self, message: str, file: Any = None) -> None:
        if launched_rank() == 0:
            super()._print_message(message, file)


def positive(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def hdf5_output(text: str) -> str:
    """Converts the name of an HDF5 file to write, for argparse; refuses names of numpy's files."""
    if text.endswith((".npy", ".npz")):
        raise argparse.ArgumentTypeError(f"{text!r} would be an HDF5 file, not a file of numpy; name it *.h5")
    return os.path.expanduser(text)


def add_checkpoint_option(parser: argparse._ActionsContainer, **options: Any) -> None:
    text = "run directory (loads its best checkpoint), checkpoint directory, or weights.pt file"
    parser.add_argument("--checkpoint", help=text, **options)


SWITCHES = {
    "enable_amp": "mixed precision: bfloat16, or float16 with a gradient scaler if precision is float16",
    "enable_apex": "no effect: PyTorch's fused Adam equals apex's, which --set optimizer.name=apex_adam uses",
    "enable_fused": "no effect: adam is always fused",
    "enable_jit": "compile the network and the loss; if the compiler fails, training continues with a warning",
    "enable_benchy": "measure the throughput of input alone (IO), step alone (SYNTHETIC), both (FULL) and, with "
    "several ranks, of the step without gradient exchange (NO-COMM), then exit; settings: benchy-conf.yaml or "
    "BENCHY_CONFIG_FILE; results: benchy.json or BENCHY_OUTPUT",
    "enable_manual_profiling": "profile some steps, see the section profile of the config",
    "disable_broadcast_buffers": "DDP: do not broadcast buffers",
    "noddp": "do not exchange gradients",
}
VALUES: dict[str, tuple[type, str]] = {
    "amp_mode": (str, "mixed precision: none, fp16 (float16) or bf16 (bfloat16)"),
    "data_loader_config": (str, "loader: auto, lowmem, …; the error for an unknown name lists all"),
    "local_batch_size": (int, "samples per step and rank; sets the global batch size"),
    "num_epochs": (int, "number of epochs"),
    "num_data_workers": (int, "loader threads per rank"),
    "bucket_cap_mb": (float, "DDP: size of a gradient bucket in MB"),
    "profiler": (str, "profiler of --enable_manual_profiling: auto, nsys or torch"),
}
# Flags of the tutorial's editions SC23 to SC25, which train a vision transformer (ViT).
VIT_FLAGS = re.compile(r"--(num_iters|(row|col)_parallel_size|(tensor|context)_parallel|parallel_order)")


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        "Trains the network of a named config. A switch turns an option on; to turn off an option\n"
        "that the YAML file turns on, use --set, for example --set enable_amp=false."
    )
    parser.add_argument("--yaml_config", default="./config/UNet.yaml", help="file of named configs (%(default)s)")
    parser.add_argument("--config", help="name of the config (base, or the only config of the file)")
    text = "last part of the run directory's path (%(default)s); further runs are <run_num>-2, <run_num>-3, …"
    parser.add_argument("--run_num", default="00", help=text)
    text = "auto: continue the newest run of this run_num, also if it is finished; no: remove the earlier run from the "
    text += "run directory and start from scratch; DIR: resume from another run, on any ranks, or a checkpoint; "
    text += "without it, continue an interrupted run with the same config, otherwise start in a new directory"
    parser.add_argument("--resume", nargs="?", const="auto", metavar="auto|no|DIR", help=text)
    parser.add_argument("--init_from", metavar="FILE", help="start a new run from the weights of a checkpoint")
    for name, text in SWITCHES.items():
        parser.add_argument(f"--{name}", action="store_true", default=argparse.SUPPRESS, help=text)
    for name, (kind, text) in VALUES.items():
        parser.add_argument(f"--{name}", type=kind, default=argparse.SUPPRESS, help=text)
    text = "set any config key, with dots for keys in sections: --set lr_schedule.start_lr=1e-3; can be repeated. "
    text += """VALUE is YAML; ~ and $VAR in paths are expanded. Quote paths with # or ": ": --set 'expdir="a #1"'"""
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=text)
    text = "check the config, the data and the run directory for this number of ranks, then exit"
    parser.add_argument("--preflight", nargs="?", const=0, type=positive, metavar="RANKS", help=text)
    text = "with --preflight: GiB of memory of the GPUs of the run, on a machine without them, such as a login node"
    parser.add_argument("--gpu_memory", type=positive, metavar="GIB", help=text)
    text = "print the resolved config, with all keys, as a YAML file, then exit"
    parser.add_argument("--print_config", action="store_true", help=text)
    return parser


def read_changes(texts: Sequence[str]) -> dict[str, Any]:
    """Dotted keys and values from the arguments of --set."""
    changes = {}
    for text in texts:
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals or not key:
            raise UserError(f"--set {text}: expected key=value")
        changes[key] = parse_value(value, f"--set {text}")
        if str(changes[key]).count("#") < value.count("#"):
            raise UserError(
                f"--set {text}: YAML takes # for the start of a comment; quote the value: --set '{key}=\"…\"'"
            )
    return changes


def parse(argv: Sequence[str] | None = None) -> Options:
    """The options of train.py; raises UserError for an invalid command line."""
    arguments = build_parser().parse_args(argv)
    given = {name: value for name, value in vars(arguments).items() if name in SWITCHES or name in VALUES}
    flags = {"profile.profiler" if name == "profiler" else name: value for name, value in given.items()}
    changes = read_changes(arguments.set)
    if flags.get("enable_amp") and flags.get("amp_mode") == "none":
        raise UserError("--enable_amp and --amp_mode none contradict each other; remove one of them")
    if {"local_batch_size", "global_batch_size"} <= {*flags, *changes}:
        raise UserError("local_batch_size and global_batch_size both set the batch; remove one of them")
    # Each is translated on its own, so that --set overrides flags regardless of the spelling of either.
    flags, changes = map(translate, (flags, changes))
    name = default_name(arguments.yaml_config) if arguments.config is None else arguments.config
    for flag, part in (("--run_num", arguments.run_num), ("--config", name)):
        if not part.isprintable() or {"/", "\\"} & set(part) or part in ("", ".", ".."):
            raise UserError(f"{flag} {part!r} must be a plain name, because it is a part of the run directory's path")
    if arguments.gpu_memory is not None and arguments.preflight is None:
        raise UserError("--gpu_memory needs --preflight; add --preflight or remove --gpu_memory")
    if arguments.gpu_memory is not None and changes.setdefault("device", "cuda") == "cpu":
        raise UserError("--gpu_memory contradicts --set device=cpu; remove one of them")
    equal = ("yaml_config", "run_num", "preflight", "resume", "init_from", "gpu_memory")
    options = Options(config=name, overrides=flags | changes, **{key: getattr(arguments, key) for key in equal})
    if arguments.print_config:
        config = load(options.yaml_config, options.config, options.overrides)
        config.for_world(1)  # checks what no section can
        if launched_rank() == 0:
            print(to_yaml(config, options.config), end="")
        raise SystemExit(0)
    return options
