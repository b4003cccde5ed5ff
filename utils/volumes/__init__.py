"""Volumes on disk: formats, attributes, checks, what is opened for a run, copies, and the importer and converter."""
