"""Optimizers, learning-rate schedules and the average of the weights."""
