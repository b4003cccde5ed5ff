"""Time and memory of simulating a training volume, each grid in a separate process.

python -m benchmarks.simulate --grids 128 256
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.common import save


def measure(grid: int, directory: str) -> dict[str, float]:
    """Seconds of the command, including the output, and its peak resident memory, in GiB and in bytes per cell."""
    command = [sys.executable, "-m", "utils.simulation", "--output", str(Path(directory) / f"{grid}.h5")]
    started = time.perf_counter()
    subprocess.run([*command, "--grid", str(grid), "--seed", "1"], check=True)
    seconds = time.perf_counter() - started
    # The largest of all children so far, so grids are measured in increasing order.
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    (Path(directory) / f"{grid}.h5").unlink()
    return {"seconds": seconds, "peak GiB": peak / 2**30, "peak bytes per cell": peak / grid**3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grids", type=int, nargs="+", default=[128, 256], help="cells per side")
    options = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory(dir=".") as directory:
        for grid in sorted(options.grids):
            results[str(grid)] = measure(grid, directory)
            print(f"{grid}³: {results[str(grid)]['seconds']:.1f} s, {results[str(grid)]['peak GiB']:.2f} GiB")
    print(f"written: {save('simulate', {'settings': vars(options), 'grids': results})}")


if __name__ == "__main__":
    main()
