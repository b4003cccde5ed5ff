"""Volumes in files and in memory."""
