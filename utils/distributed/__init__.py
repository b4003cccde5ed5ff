"""Join ranks, watch them and answer signals."""
