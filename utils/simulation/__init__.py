"""Particle-mesh simulations of dark matter and gas, which are the demonstration data: python -m utils.simulation."""
