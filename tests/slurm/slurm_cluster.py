"""The Slurm that cluster.sh starts, and jobs of submit_pm.sh on it."""

import contextlib
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from processes import GENEROUS, TOP, is_free, wait_until

SCRIPT = Path(__file__).parent / "cluster.sh"
NODES = 2
UNAVAILABLE = 69  # cluster.sh's exit code where it cannot start a Slurm
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")


class Job:
    def __init__(self, cluster: "Cluster", number: str, output: Path) -> None:
        self.cluster, self.number, self._output = cluster, number, output

    def field(self, name: str) -> str:
        match = re.search(rf"\b{name}=(\S+)", self.cluster.run("scontrol", "show", "job", self.number))
        assert match, name
        return match[1]

    @property
    def state(self) -> str:
        return self.field("JobState")

    @property
    def output(self) -> str:
        return self._output.read_text() if self._output.exists() else ""

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        wait_until(condition, what=lambda: f"{what}; {self.state}; output:\n{self.output[-4000:]}")

    def wait_for(self, text: str, times: int = 1) -> None:
        self.wait_until(lambda: self.output.count(text) >= times, f"{times} × {text!r}")

    def ends(self, state: str) -> None:
        self.wait_until(lambda: self.state in ENDED, "end")
        assert self.state == state, f"{self.state}, not {state}; output:\n{self.output[-4000:]}"

    def is_requeued(self) -> None:
        """Waits for the requeue, and shortens the two minutes until the restart; not to zero, which nodes reject."""
        self.wait_until(lambda: self.field("Restarts") != "0" and self.state != "COMPLETING", "requeue")
        if self.state == "PENDING":
            self.cluster.run("scontrol", "update", f"JobId={self.number}", "StartTime=now+2")

    def signal_shell(self, name: str) -> None:
        """Signals only the shell of the batch script, as Slurm does before the time limit with --signal=B:…"""
        self.cluster.run("scancel", f"--signal={name}", "--batch", self.number)

    def processes(self, **environment: str) -> list[int]:
        """The ids of the job's processes that were started with these variables."""
        wanted = {f"{name}={value}".encode() for name, value in environment.items()}
        wanted.add(f"SLURM_JOB_ID={self.number}".encode())
        ids = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # the process has ended
                if wanted <= set((folder / "environ").read_bytes().split(b"\0")):
                    ids.append(int(folder.name))
        return ids


class Cluster:
    def __init__(self, directory: Path, port: int) -> None:
        self.directory = directory
        self._script = {**os.environ, "SLURM_CLUSTER_DIR": str(directory), "SLURM_CLUSTER_PORT": str(port)}
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SCRATCH"))}
        self.environment = {**kept, "SLURM_CONF": str(directory / "slurm.conf"), "PYTHON": sys.executable}

    def script(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(SCRIPT), *arguments]
        # The output goes to a file: the daemons would keep a pipe open.
        with open(self.directory.with_suffix(".txt"), "w+") as log:
            done = subprocess.run(command, env=self._script, stdout=log, stderr=log, timeout=900, check=False)
            log.seek(0)
            done.stdout = log.read()
        return done

    def run(self, *command: str, **variables: str) -> str:
        environment = {**self.environment, **variables}
        done = subprocess.run(command, cwd=TOP, env=environment, capture_output=True, text=True, timeout=GENEROUS)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout

    def submit(self, output: Path, options: str, *arguments: str, **variables: str) -> Job:
        """submit_pm.sh with sbatch's options; the output file has the job's number in its name."""
        command = ["sbatch", "--parsable", f"--output={output}/%j.out", *shlex.split(options)]
        number = self.run(*command, "submit_pm.sh", *arguments, **variables).strip()
        return Job(self, number, output / f"{number}.out")

    def stand_in(self, output: Path, options: str, *arguments: str, **variables: str) -> Job:
        return self.submit(output, options, *arguments, TRAIN_SCRIPT="tests/slurm/stand_in.py", **variables)

    def preempt(self) -> None:
        """A job of higher priority that needs all GPUs of both nodes."""
        wanted = ["--partition=high", "--nodes=2", "--gpus-per-node=4"]
        self.run("sbatch", *wanted, "--output=/dev/null", "--wrap=true")

    def freeze(self, node: str, job: Job) -> Callable[[], None]:
        """Simulates the failure of a node, which closes no connection; returns a function that starts an empty one."""
        ranks = job.processes(SLURMD_NODENAME=node)
        launchers = {int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1]) for rank in ranks}
        daemon = int((self.directory / f"slurmd-{node}.pid").read_text())
        assert ranks
        assert all("slurmstepd" in Path(f"/proc/{pid}/cmdline").read_text() for pid in launchers)
        frozen = [daemon, *launchers, *ranks]
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)
        self.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=gone")

        def bring_back() -> None:
            for pid in frozen:
                os.kill(pid, signal.SIGKILL)
            back = self.script("node", node)
            assert back.returncode == 0, back.stdout

        return bring_back


class Unavailable(Exception):
    """This machine cannot run its own Slurm; the message gives the reason."""


@contextlib.contextmanager
def private_cluster() -> Iterator[Cluster]:
    """Starts a Slurm of two nodes, and stops it at the end; raises Unavailable."""
    # Not in pytest's directory: slurm.conf allows no spaces in paths, and a socket's path must be short.
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    folder.chmod(0o755)
    # Consecutive free ports below the range of ephemeral ports.
    candidates = random.sample(range(30000, 32700), 100)
    port = next(first for first in candidates if all(is_free(first + number) for number in range(1 + NODES)))
    cluster = Cluster(folder / "cluster", port)
    try:
        up = cluster.script("up")
        if up.returncode == UNAVAILABLE:
            raise Unavailable(next(line for line in up.stdout.splitlines() if line.startswith("cluster.sh:")))
        assert up.returncode == 0, up.stdout
        yield cluster
    finally:
        down = cluster.script("down")
        assert down.returncode == 0, down.stdout
        shutil.rmtree(folder)
