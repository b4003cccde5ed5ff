"""Launchers, ranks and their collectives, the heartbeat, stop signals, and locked files."""
