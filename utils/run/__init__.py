"""What a run leaves: its directory, where it starts, checkpoints, records and loggers, provenance."""
