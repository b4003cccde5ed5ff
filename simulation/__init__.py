"""Particle-mesh simulations of dark matter and gas, which are the demonstration data: python -m simulation."""

import utils  # noqa: F401 # sets variables that torch reads when it is imported
