"""Profiler and benchmark mode."""
