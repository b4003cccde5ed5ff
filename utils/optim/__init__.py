"""Optimizers, learning-rate schedules and the exponential moving average of the weights."""
