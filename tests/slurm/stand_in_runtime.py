"""Replaces srun and the container runtimes in tests of submit_pm.sh: stand_in_runtime.py NAME OPTION ... COMMAND ...

Each accepts only options that the real program has, requires those without which a run would not work, and starts
the command with the variables and in the directory that the real program would. Nothing is mounted: the path in
TRAIN_EXIT_FILE is translated instead. The command finds what was asked for in the variable STAND_IN, as JSON.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
STEP = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "1"}
ENDED_BY_SLURM = 143


@dataclass
class Container:
    """The container that the options ask for."""

    runtime: str
    image: str
    mounts: list[str]  # SOURCE:DESTINATION
    directory: str | None = None  # None: the present one, which the container can see
    gpus: list[str] = field(default_factory=list)  # options for GPUs and network
    variables: list[str] | None = None  # patterns of the variables that reach the command; None: all do

    def environment(self) -> dict[str, str]:
        """The variables of the command. Exits if something that the command needs is not mounted."""
        places: dict[str, str] = {}
        for mount in self.mounts:
            source, _, destination = mount.partition(":")
            assert destination.startswith("/"), mount
            assert ":" not in destination, mount
            assert Path(source).is_dir(), f"no directory {source}"
            places[destination] = source
        if self.directory is not None:
            assert places.get(self.directory) == self.directory, f"{self.directory} is not mounted"
        kept = [*self.variables, "PATH"] if self.variables is not None else ["*"]
        known = {name: text for name, text in os.environ.items() if any(fnmatch.fnmatch(name, each) for each in kept)}
        file = Path(known["TRAIN_EXIT_FILE"])
        if file.is_absolute():
            known["TRAIN_EXIT_FILE"] = str(Path(places[str(file.parent)], file.name))
        asked = {"runtime": self.runtime, "image": self.image, "mounts": places, "gpus": self.gpus}
        return {**known, "STAND_IN": json.dumps(asked)}


class Parser(argparse.ArgumentParser):
    def __init__(self) -> None:
        super().__init__(allow_abbrev=False, add_help=False)

    def option(self, name: str, value: str) -> None:
        """A required option with one possible value."""
        self.add_argument(name, required=True, choices=[value])

    def read(self, words: list[str]) -> argparse.Namespace:
        self.add_argument("command", nargs=argparse.REMAINDER)
        return self.parse_args(words)


def shifter(words: list[str]) -> tuple[Container, list[str]]:
    parser = Parser()
    parser.add_argument("--image", default=os.environ.get("SLURM_SPANK_SHIFTER_IMAGE"))
    parser.add_argument("--module", required=True, choices=["gpu,nccl-plugin", "gpu,nccl-cu13-plugin"])
    parser.add_argument("--volume", action="append", default=[])
    given = parser.read(words)
    assert given.image, "no image"
    return Container("shifter", given.image, given.volume, None, [given.module]), given.command


def podman(words: list[str]) -> tuple[Container, list[str]]:
    parser = Parser()
    parser.add_argument("subcommand", choices=["run"])
    parser.add_argument("--rm", action="store_true", required=True)
    parser.option("--net", "host")
    parser.option("--ipc", "host")
    parser.add_argument("--gpu", action="store_true", required=True)
    plugin = parser.add_mutually_exclusive_group(required=True)
    for name in ("--nccl", "--nccl-cu13"):
        plugin.add_argument(name, dest="plugin", action="store_const", const=name)
    parser.add_argument("--volume", action="append", default=[])
    parser.add_argument("--workdir", required=True)
    parser.add_argument("--env", action="append", default=[])
    parser.add_argument("image")
    given = parser.read(words)
    gpus = ["--gpu", given.plugin]
    return Container("podman-hpc", given.image, given.volume, given.workdir, gpus, given.env), given.command


def apptainer(words: list[str]) -> tuple[Container, list[str]]:
    parser = Parser()
    parser.add_argument("subcommand", choices=["exec"])
    parser.add_argument("--nv", action="store_true", required=True)
    parser.add_argument("--bind", action="append", default=[])
    parser.add_argument("--pwd", required=True)
    parser.add_argument("image")
    given = parser.read(words)
    return Container("apptainer", given.image, given.bind, given.pwd, ["--nv"]), given.command


def srun(words: list[str]) -> tuple[Container | None, list[str]]:
    """The container of Pyxis, which is a plug-in of srun, or None."""
    parser = Parser()
    parser.add_argument("-u", action="store_true", required=True)
    parser.add_argument("-X", action="store_true", required=True)
    parser.option("-K", "1")
    parser.option("--cpu-bind", "cores")
    parser.add_argument("--cpus-per-task")
    pyxis = "--container-image" in " ".join(words)
    if pyxis:
        for name in ("image", "mounts", "workdir"):
            parser.add_argument(f"--container-{name}", required=True)
    given = parser.read(words)
    if not pyxis:
        return None, given.command
    mounts = given.container_mounts.split(",")
    return Container("pyxis", given.container_image, mounts, given.container_workdir), given.command


RUNTIMES = {"shifter": shifter, "podman-hpc": podman, "apptainer": apptainer, "singularity": apptainer, "srun": srun}


def forward_signals(command: list[str], environment: dict[str, str], directory: str | None) -> int:
    """Runs the command as a child that gets this process's signals, and returns its exit code as a shell would."""
    child = subprocess.Popen(command, env=environment, cwd=directory)
    for number in SIGNALS:
        signal.signal(number, lambda number, _: child.send_signal(number))
    code = child.wait()
    return code if code >= 0 else 128 - code


def main(name: str, words: list[str]) -> int:
    container, command = RUNTIMES[name](words)
    environment = dict(os.environ) if container is None else container.environment()
    directory = None if container is None else container.directory
    if name == "srun":
        code = forward_signals(command, {**environment, **STEP}, directory)
        return ENDED_BY_SLURM if code else 0  # of the other ranks: the highest code
    if name == "shifter":
        os.execvpe(command[0], command, environment)
    return forward_signals(command, environment, directory)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
