"""Judging a predicted volume by physics: `statistics` and `spectra` measure, `figures` and `page` show.

`results` holds what was measured, and keeps it in a file.
"""
