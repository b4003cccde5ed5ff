"""Launchers, ranks and their collectives, the watchdog, stop signals, and locked files."""
