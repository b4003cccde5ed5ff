"""What the server of tests/processes.py imports before it forks; modules alone, no torch operation."""

from __future__ import annotations

import contextlib

with contextlib.suppress(ImportError):
    pass
