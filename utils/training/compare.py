"""Compares runs: the config keys that differ, and the results, also of runs that are not finished.

python -m utils.training.compare runs/demo/2ranks/00 runs/demo/2ranks/00-2
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from utils import config as configs
from utils.cli import Parser
from utils.config import Config
from utils.errors import UserError, one_line_errors
from utils.files import read_json
from utils.progress import format_duration
from utils.training import tags
from utils.training.loggers.base import read_records

NOTHING = "-"


def table(runs: Sequence[Path]) -> list[str]:
    """Lines with a column for each run: config keys that differ, then results."""
    values = [_flat_config(run) for run in runs]
    cells = {key: [_shown(config.get(key, NOTHING)) for config in values] for key in dict.fromkeys(chain(*values))}
    results = [_results(run, config) for run, config in zip(runs, values, strict=True)]
    rows = [["", *map(str, runs)]]
    rows += [[key, *row] for key, row in cells.items() if len(set(row)) > 1 and key != "local_batch_size"]
    rows += [[""] * (len(runs) + 1), *([name, *(config[name] for config in results)] for name in results[0])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _flat_config(run: Path) -> dict[str, Any]:
    """The config by dotted keys."""
    path = run / "config.yaml"
    if not path.is_file():
        raise UserError(f"{run} is not a run's directory, it has no config.yaml; give one such as runs/demo/2ranks/00")
    ((name, values),) = configs.read_file(str(path)).items()
    return {"config": name, **configs.flatten(Config()), **configs.flatten(values)}


def _results(run: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The results of a run, and where it ran; `NOTHING` for values that are not known."""
    paths = (run / "summary.json", run / "provenance.json")
    summary, provenance = (read_json(path) if path.exists() else {} for path in paths)
    records = read_records(run / "metrics.jsonl")
    losses = [(record[tags.VALID_LOSS], record["step"]) for record in records if tags.VALID_LOSS in record]
    speeds = [record[tags.ITERATIONS_PER_SECOND] for record in records if tags.ITERATIONS_PER_SECOND in record]
    commit = provenance.get("git_commit", NOTHING)
    state = "stopped early" if summary.get("early_stop") else "finished"
    # The clock starts again with each process.
    seconds = [record["seconds"] for record in records]
    total = sum(now for now, later in zip(seconds, [*seconds[1:], 0], strict=True) if later < now)
    return {
        "state": state if summary else "no summary",
        "steps": str(records[-1]["step"]) if records else NOTHING,
        "final validation loss": f"{losses[-1][0]:.6f}" if losses else NOTHING,
        "best validation loss": "{:.6f} after step {}".format(*min(losses)) if losses else NOTHING,
        "samples/s": f"{speeds[-1] * config['global_batch_size']:.1f}" if speeds else NOTHING,
        "time": format_duration(total) if records else NOTHING,
        "ranks": str(provenance.get("world_size", NOTHING)),
        "device": provenance.get("device", NOTHING),
        "torch": provenance.get("versions", {}).get("torch", NOTHING),
        "commit": commit[:12] + ("-dirty" if commit.endswith("-dirty") else ""),
    }


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command. Invalid input is reported in one line with exit code 2."""
    with one_line_errors():
        parser = Parser(__doc__)
        parser.add_argument("runs", nargs="+", metavar="RUN", help="directory of a run", type=Path)
        print("\n".join(table(parser.parse_args(argv).runs)))


if __name__ == "__main__":
    main()
