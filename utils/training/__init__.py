"""The training loop, its state and checkpoints."""
