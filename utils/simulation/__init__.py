"""The particle-mesh simulator that makes demonstration data."""
