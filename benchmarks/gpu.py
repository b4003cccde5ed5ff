"""The measurements that need a GPU, in three calls of at most 8 minutes each: `make bench-gpu CALL=1`.

python -m benchmarks.gpu --call 1          peaks, convolutions, the fastest rungs, the best one's step in detail, and
                                           larger batches and the tutorial's options
python -m benchmarks.gpu --call 2          pytest -m gpu, in parallel processes
python -m benchmarks.gpu --call 3          single options, comparisons, loaders, and the tutorial's steps to its best
python -m benchmarks.gpu --rungs A TF32    these rungs alone
python -m benchmarks.gpu --call 1 --dry_run    on any machine: what the call would reach, at assumed costs
python -m benchmarks.gpu --draw FILE.json      writes the page and the plot of a result again

A call writes call<N>.json and call<N>.md to benchmarks/results/<gpu>/ after each part, the most important part first.
Parts without time left are listed, and a part that exceeds the limit ends the call. If a fault of the device ends the
process, another one continues with the next part. It needs torch, numpy, h5py, pyyaml, pydantic and tensorboard, and
creates its data.
"""

from __future__ import annotations

import importlib
import multiprocessing
import signal
import sys
import time

from utils.errors import EXIT_RESUMABLE

STARTED = time.perf_counter()
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PROCESSES = 25  # at most, should each end before its first part; a call has fewer parts
# Module and package that pip installs.
REQUIRED = {
    "torch": "torch",
    "numpy": "numpy",
    "h5py": "h5py",
    "yaml": "pyyaml",
    "pydantic": "pydantic",
    "tensorboard": "tensorboard",
}


def missing_packages() -> list[str]:
    """The required packages that cannot be imported, or what they themselves lack."""
    missing = []
    for module, package in REQUIRED.items():
        try:
            importlib.import_module(module)
        except ImportError as error:
            missing.append(package if error.name in (None, module) else f"{error.name} (for {package})")
    return missing


def main() -> None:
    """Runs the command line in this process."""
    if missing := missing_packages():
        sys.stderr.write(f"error: missing packages: {', '.join(missing)}; install them with pip\n")
        sys.exit(2)
    from benchmarks import gpu_calls

    gpu_calls.main(__doc__, STARTED)


def _child() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    main()


def supervise() -> None:
    """Runs the command line in a child process. If a fault ends the child, another one runs the parts that are left.

    After a fault, all operations on the device fail in that process, and its device memory is freed only when it ends.
    So this process does not use the device: it does not even import torch.
    """
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    for _ in range(PROCESSES):
        # A forked child has the same STARTED, and so the same deadline.
        process = multiprocessing.get_context("fork").Process(target=_child)
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # one during the start would leave the child behind
        process.start()
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            process.join()
        finally:  # also after a signal
            process.terminate()
            process.join()
        code = process.exitcode or 0
        if code >= 0 and code != EXIT_RESUMABLE:
            break
        sys.stderr.write(f"a fault has ended the process: exit code {code}\n")
    sys.exit(code)


if __name__ == "__main__":
    supervise()
