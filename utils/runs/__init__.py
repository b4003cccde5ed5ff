"""The files of a run: directory, log, metrics, provenance, summary."""
