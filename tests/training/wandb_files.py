"""Reads the files that wandb writes offline: LevelDB's log format, each record a message of wandb's protocol."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, NamedTuple

HEADER, BLOCK, FRAME = 7, 2**15, 7  # bytes: of the file, of a block, and of the frame of each part of a record
FULL, LAST = 1, 4  # kinds of parts; 2 and 3: first and middle ones


class OfflineRun(NamedTuple):
    """The content of a .wandb file: the run, its rows of scalars, and the values at its end."""

    id: str
    name: str
    project: str
    group: str
    config: dict[str, Any]
    rows: list[dict[str, Any]]
    summary: dict[str, Any]
    exit_code: int | None
    kinds: set[str]


def messages(path: Path) -> list[Any]:
    from wandb.proto.wandb_internal_pb2 import Record

    content, found, parts, at = path.read_bytes(), [], b"", HEADER
    while at + FRAME <= len(content):
        if BLOCK - at % BLOCK < FRAME:
            at += BLOCK - at % BLOCK  # the end of a block, too short for a frame
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        parts += content[at + FRAME : at + FRAME + length]
        at += FRAME + length
        if kind in (FULL, LAST):
            found.append(Record.FromString(parts))
            parts = b""
    return found


def read_offline_run(directory: Path) -> OfflineRun:
    """The run in a directory such as wandb/offline-run-20260101_120000-0123456789abcdef."""
    (path,) = directory.glob("*.wandb")
    records = messages(path)
    run = next(record.run for record in records if record.HasField("run"))
    rows = [values(record.history.item) for record in records if record.HasField("history")]
    summary: dict[str, Any] = {}
    for record in records:
        summary |= values(record.summary.update)
    exits = [record.exit.exit_code for record in records if record.HasField("exit")]
    kinds = {record.WhichOneof("record_type") for record in records}
    config = values(run.config.update)
    return OfflineRun(
        run.run_id, run.display_name, run.project, run.run_group, config, rows, summary, *(exits or [None]), kinds
    )


def values(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
