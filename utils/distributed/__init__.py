"""Launchers, ranks and their collectives, the watchdog, and stop signals."""
