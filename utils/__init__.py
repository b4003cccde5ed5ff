"""Everything a training run is assembled from; `networks` is the only part kept apart."""

import os

__version__ = "0.1.0"  # also in pyproject.toml and CITATION.cff

# libgomp reads this when PyTorch is imported, which entry scripts do after this package. By default a thread that waits
# for the others of an operation spins for 300,000 rounds, which take milliseconds. If another program uses one of the
# cores, that happens at every operation: benchmarks/threads.py.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
