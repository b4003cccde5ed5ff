"""Evaluation of predicted volumes against simulations: measurements, and the figures and tables that show them."""
