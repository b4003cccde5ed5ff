"""The training step: forward, loss, backward, gradient exchange, clipping and update behind one call."""
