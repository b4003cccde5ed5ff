"""In train.py's place, where only what reaches a rank matters, or how it ends; without PyTorch, so within a second.

stand_in.py dump DIRECTORY [ANYTHING ...]    arguments and environment into DIRECTORY/<rank>.json
stand_in.py exit RANK CODE                   that rank ends with a message and that code, the others wait
stand_in.py wait                             until a signal, then 75, like a training; not when it was restarted
stand_in.py deaf                             the same as a program that does not catch its signals
stand_in.py late                             like wait, but rank 0 is gone before the others, which no longer listen
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

RANK = os.environ["RANK"]
EXIT_AGAIN = 75


def say(text: str) -> None:
    os.write(1, f"rank {RANK} {text}\n".encode())  # in one piece, or ranks' lines interleave


def main(action: str, arguments: list[str]) -> int:
    if action == "dump":
        path = Path(arguments[0], f"{RANK}.json")
        path.with_suffix(".part").write_text(json.dumps({"argv": sys.argv, "environment": dict(os.environ)}))
        path.with_suffix(".part").rename(path)
        return 0
    if action == "exit":
        if arguments[0] == RANK:
            print(f"error: rank {RANK} is out of luck", file=sys.stderr, flush=True)
            return int(arguments[1])
        time.sleep(600)
    if "SLURM_RESTART_COUNT" in os.environ:
        say("goes on")
        return 0
    stopped: list[int] = []
    if action in ("wait", "late"):
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, lambda number, _: stopped.append(number))
    say("waits")
    while not stopped:
        time.sleep(0.05)
    say(f"saves after {signal.Signals(stopped[0]).name}")
    if action == "late" and RANK != "0":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(600)
    return EXIT_AGAIN


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
