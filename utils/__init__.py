"""Everything a training run is assembled from; `networks` is the only part kept apart."""
