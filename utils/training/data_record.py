"""The data files of a run in provenance.json, so that a resumed run notices other data under the same name."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from utils.config import Config
from utils.data import get_loader
from utils.data.plan import SPLITS
from utils.data.volumes import split_settings
from utils.files import MIB

DIGEST = "sha256_of_samples"
HEAD, BLOCK, BLOCKS = MIB, 2**16, 64  # bytes: 5 MiB of a file of any size; a channel of nine is sampled 7 times


def data_record(config: Config) -> dict[str, dict[str, Any]]:
    """Path, size, modification time and digest of each file of a volume, by its config key.

    Published data sets have checksums of their own. Not every loader reads all files; those that are missing are
    skipped.
    """
    return {name: _describe(path) for name, path in _data_files(config) if path.is_file()}


def data_changes(before: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A line for each file whose content differs from the earlier record; it may have been moved or touched."""
    lines = []
    for name, record in now.items():
        earlier = before.get(name, record)
        if earlier[DIGEST] != record[DIGEST]:
            sizes = earlier["bytes"], record["bytes"]
            change = "other content" if sizes[0] == sizes[1] else f"{sizes[1]} bytes instead of {sizes[0]}"
            where = "" if earlier["path"] == record["path"] else f" of {earlier['path']}"
            lines.append(f"{name} {record['path']} differs from the data of the run that resumes: {change}{where}")
    return lines


def _data_files(config: Config) -> Iterator[tuple[str, Path]]:
    reads = get_loader(config.data_loader_config).reads
    if reads not in ("hdf5", "npy"):
        return
    for values in (split_settings(config, split) for split in SPLITS):
        npy_keys = values.npy_keys if reads == "npy" or config.data_loader_config == "auto" else ()
        for key in (values.key, *npy_keys):
            paths = config.paths(key)
            for number, path in enumerate(paths):
                yield key if len(paths) == 1 else f"{key}[{number}]", Path(path)


def _describe(path: Path) -> dict[str, Any]:
    """The digest is of the size, the first MiB, which holds the header, and blocks at equal distances up to the end."""
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        digest = hashlib.sha256(f"{status.st_size} ".encode())
        digest.update(file.read(HEAD))
        for number in range(1, BLOCKS + 1):
            file.seek(max(HEAD, number * (status.st_size - BLOCK) // BLOCKS))
            digest.update(file.read(BLOCK))
    modified = time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(status.st_mtime))
    return {"path": str(path.resolve()), "bytes": status.st_size, "modified": modified, DIGEST: digest.hexdigest()}
