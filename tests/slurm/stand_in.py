"""Replaces train.py in tests of what reaches a rank and how it exits; starts quickly, because it needs no PyTorch.

stand_in.py dump DIRECTORY [ANYTHING ...]    writes these and the environment to DIRECTORY/<rank>.json
stand_in.py wait                             waits for a signal and exits with 75, like a run; after a restart: 0
stand_in.py deaf                             like wait, but does not catch signals
stand_in.py late                             like wait, but rank 0 exits first, and the others no longer catch signals
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))

from utils.errors import EXIT_RESUMABLE, record_exit_code

RANK = os.environ["RANK"]


def write(text: str) -> None:
    os.write(1, f"rank {RANK} {text}\n".encode())  # in one call: lines of several ranks must not interleave


def main(action: str, arguments: list[str]) -> int:
    if action == "dump":
        path = Path(arguments[0], f"{RANK}.json")
        path.write_text(json.dumps({"argv": sys.argv, "environment": dict(os.environ)}))
        return 0
    if "SLURM_RESTART_COUNT" in os.environ:
        write("is restarted")
        return 0
    stopped: list[int] = []
    for number in () if action == "deaf" else (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, _: stopped.append(number))
    write("waits")
    while not stopped:
        time.sleep(0.05)
    write(f"saves after {signal.Signals(stopped[0]).name}")
    if action == "late" and RANK != "0":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(1800)
    return EXIT_RESUMABLE


if __name__ == "__main__":
    code = main(sys.argv[1], sys.argv[2:])
    record_exit_code(code)
    sys.exit(code)
