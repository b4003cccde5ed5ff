"""Profiler, benchmark, estimates of memory and operations, and the preflight."""
