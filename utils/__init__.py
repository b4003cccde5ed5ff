"""Everything a training run is assembled from; `networks` is the only part kept apart."""

__version__ = "0.1.0"  # also in pyproject.toml and CITATION.cff
