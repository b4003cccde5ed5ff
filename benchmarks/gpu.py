"""The measurements that need a GPU, in three calls of at most 8 minutes each: `make bench-gpu CALL=1`.

python -m benchmarks.gpu --call 1          peaks, convolutions, the fastest rungs, and the best one's step in detail
python -m benchmarks.gpu --call 2          pytest -m gpu, in parallel processes
python -m benchmarks.gpu --call 3          single options, comparisons, loaders, and the original's way to its best
python -m benchmarks.gpu --rungs A TF32    these rungs alone
python -m benchmarks.gpu --call 1 --dry_run    on any machine: what the call would reach, at assumed costs
python -m benchmarks.gpu --draw FILE.json      writes the page and the plot of a result again

A call writes call<N>.json and call<N>.md to benchmarks/results/<gpu>/ after each part, the most important part first.
Parts without time left are listed, and a part that exceeds the limit ends the call. It needs torch, numpy, h5py,
pyyaml, pydantic and tensorboard, and creates its data.
"""

from __future__ import annotations

import importlib
import sys
import time

STARTED = time.perf_counter()
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
    if missing := missing_packages():
        sys.stderr.write(f"error: missing packages: {', '.join(missing)}; install them with pip\n")
        sys.exit(2)
    from benchmarks import gpu_calls

    gpu_calls.main(__doc__, STARTED)


if __name__ == "__main__":
    main()
