"""Compares runs: the config keys that differ, and the results, also of runs that are not finished.

python -m utils.run.compare runs/demo/2ranks/00 runs/demo/2ranks/00-2
python -m utils.run.compare runs --sort best --csv runs.csv    # all runs below runs
"""

import csv
import json
import math
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import IO, Any

from utils import config as configs
from utils.cli import Parser
from utils.config import Config
from utils.errors import UserError, one_line_errors, os_errors_for_users
from utils.files import atomic_write
from utils.progress import format_duration
from utils.run import tags
from utils.run.directory import RunDirectory

NOTHING = "-"
# Sections and keys that define the validation loss.
OF_THE_LOSS = ("val_path", "dataset", "data_size", "Nsamples_val", "loss", "loss_options", "lambda_rho", "channels")
RUN, FINAL, BEST = "run", "final validation loss", "best validation loss"
ORDERS = {"final": FINAL, "best": BEST}
# Names and values whose text in a table differs from that in a CSV file.
LABELS = {FINAL: "final loss", BEST: "best loss", "seconds": "time"}
FORMATS: dict[str, Callable[[Any], str]] = {
    FINAL: "{:.6f}".format,
    BEST: "{:.6f}".format,
    "samples/s": "{:.1f}".format,
    "seconds": format_duration,
}

Row = dict[str, Any]  # of one run, by name; None for values that are not known


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """The runs among the directories and below them, each once; UserError for a directory without any."""
    runs: dict[Path, None] = {}
    for path in paths:
        config = RunDirectory(path).config
        folders = [RunDirectory(file.parent) for file in sorted(path.rglob(config.name))]
        below = [run.path for run in folders if run.provenance.exists()]
        below = [run for run in below if run.parent not in below]  # a run's own folders hold none
        if not config.is_file() and not below:
            raise UserError(
                f"{path} is not a run's directory and has none in it: there is no {config.name}; give one such as "
                "runs/demo/2ranks/00, or runs"
            )
        runs |= dict.fromkeys([path] if config.is_file() else below)
    return list(runs)


def compare(runs: Sequence[Path], order: str) -> list[Row]:
    """A row for each run, the best one first: config keys that differ, then results."""
    named = [*chain(*(configs.read_file(str(RunDirectory(run).config)).items() for run in runs))]  # one in each file
    values = [{"config": name, **configs.flatten(Config()), **configs.flatten(keys)} for name, keys in named]
    keys = [key for key in dict.fromkeys(chain(*values)) if key != "local_batch_size"]
    cells = {key: [config.get(key, NOTHING) for config in values] for key in keys}
    shown = {key: [x if isinstance(x, str) else json.dumps(x, default=str) for x in row] for key, row in cells.items()}
    differing = [key for key, cells in shown.items() if len(set(cells)) > 1]
    rows: list[Row] = []
    for number, (run, config) in enumerate(zip(runs, values, strict=True)):
        config_cells = {key: shown[key][number] for key in differing}
        rows.append({RUN: str(run), **config_cells, **_results(RunDirectory(run), config)})
    key = ORDERS.get(order)
    return rows if key is None else sorted(rows, key=lambda row: math.inf if row[key] is None else row[key])


def table(rows: Sequence[Row], width: int) -> list[str]:
    """A line for each run, of the columns that fit into the width, and lines about the other columns."""
    columns = {}
    for name in rows[0]:
        cells = [NOTHING if row[name] is None else FORMATS.get(name, str)(row[name]) for row in rows]
        columns[name] = [LABELS.get(name, name), *cells]
    differing = [name for name, (_, first, *rest) in columns.items() if not rest or {*rest} != {first}]
    lines, omitted, shown = [""] * (len(rows) + 1), [], dict.fromkeys((RUN, FINAL, BEST, *differing))
    for name in shown:
        longest = max(map(len, columns[name]))
        longer = [f"{line}{cell:{longest}}  " for line, cell in zip(lines, columns[name], strict=True)]
        if name == RUN or len(longer[0]) - 2 <= width:
            lines = longer
        else:
            omitted.append(columns[name][0])
    lines = [line.rstrip() for line in lines]
    if equal := [" ".join(cells[:2]) for name, cells in columns.items() if name not in shown]:
        lines.append(f"equal: {', '.join(equal)}")
    return [*lines, f"not shown: {', '.join(omitted)}; --csv has all columns"] if omitted else lines


def write_csv(rows: Sequence[Row], file: IO[str]) -> None:
    writer = csv.DictWriter(file, [*rows[0]], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def _results(run: RunDirectory, config: Mapping[str, Any]) -> Row:
    summary, provenance, records = run.read_record(run.summary), run.read_provenance(), run.read_metrics()
    losses = [(record[tags.VALID_LOSS], record["step"]) for record in records if tags.VALID_LOSS in record]
    speeds = [record[tags.ITERATIONS_PER_SECOND] for record in records if tags.ITERATIONS_PER_SECOND in record]
    commit = provenance.get("git_commit")
    best, best_step = min(losses, default=(None, None))
    return {
        "state": "finished" if summary else "no summary",
        "steps": records[-1]["step"] if records else None,
        FINAL: losses[-1][0] if losses else None,
        BEST: best,
        "best step": best_step,
        "samples/s": speeds[-1] * config["global_batch_size"] if speeds else None,
        "seconds": max((record["seconds"] for record in records), default=None),
        "ranks": provenance.get("world_size"),
        "device": provenance.get("device"),
        "torch": provenance.get("versions", {}).get("torch"),
        "commit": commit and commit[:12] + ("-dirty" if commit.endswith("-dirty") else ""),
    }


def main(argv: Sequence[str] | None = None) -> None:
    with one_line_errors():
        parser = Parser(__doc__)
        parser.prog = "python -m utils.run.compare"
        parser.add_argument("runs", nargs="+", metavar="DIR", help="directory of a run, or one above runs", type=Path)
        text = "by this loss (%(default)s); none: as given"
        parser.add_argument("--sort", choices=(*ORDERS, "none"), default="final", help=text)
        parser.add_argument("--csv", metavar="FILE", nargs="?", const="-", help="write CSV; without FILE to stdout")
        options = parser.parse_args(argv)
        rows = compare(find_runs(options.runs), options.sort)
        if differing := [key for key in rows[0] if key.partition(".")[0] in OF_THE_LOSS]:
            reason = f"because of different {', '.join(differing)}"
            sys.stderr.write(f"warning: these losses cannot be compared, {reason}\n")
        if options.csv is None:
            print("\n".join(table(rows, shutil.get_terminal_size((10**6, 0)).columns)))
        elif options.csv == "-":
            write_csv(rows, sys.stdout)
        else:
            path = Path(options.csv)
            with os_errors_for_users(f"cannot write {path}"), atomic_write([path]) as (new,), new.open("w") as file:
                write_csv(rows, file)


if __name__ == "__main__":
    main()
