"""Profiler, benchmark, and what is known of a run before it starts."""
