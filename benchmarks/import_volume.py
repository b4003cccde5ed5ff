"""Throughput of the importer: a snapshot in Nyx's layout, read from the page cache, to a volume on disk.

python -m benchmarks.import_volume              a box of 512³ cells (3.2 GB, and as much for the volume, in data/)
python -m benchmarks.import_volume --box 128    a quick look

A snapshot in other units than the mean needs another pass over both densities.
"""

from __future__ import annotations

import argparse
import functools
import os
from pathlib import Path

import h5py
import numpy as np

from benchmarks import common
from utils.data.files import nyx
from utils.data.files.snapshots import DARK_MATTER_DENSITY, FIELDS, GAS_DENSITY, GAS_VELOCITY
from utils.data.import_volume import import_volume, parse
from utils.errors import one_line_errors
from utils.files import copy_file

NAMES = [name for name in FIELDS if not name.startswith("dark_matter_velocity")]
SIMULATION = {"redshift": 3.0, **{f"cosmology_{name}": 0.3 for name in ("Om0", "Ode0", "Ob0")}, "cosmology_H0": 67.5}


def make_snapshot(path: Path, box: int) -> None:
    """Creates a snapshot of random values if it is missing, plane by plane."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    generator, partial = np.random.default_rng(0), path.with_suffix(".partial")
    with h5py.File(partial, "w") as file:
        for name, about in nyx.layout_attributes(NAMES, (box, box, box), 0.1, SIMULATION).items():
            if name.startswith(nyx.NATIVE):
                dataset = file.create_dataset(name, (box, box, box), "<f4")
                for x in range(box):
                    dataset[x] = _plane(name, generator.standard_normal((box, box), np.float32))
            (file.require_group(name) if name and name not in file else file[name or "/"]).attrs.update(about)
    os.replace(partial, path)


def _plane(name: str, normal: np.ndarray) -> np.ndarray:
    """Values in Nyx's units: velocities of 200 km/s, a temperature of 10⁴ K, densities with a mean of one."""
    if name.removeprefix(f"{nyx.NATIVE}/") in GAS_VELOCITY:
        return 2e7 * normal
    return np.exp(normal) * (1e4 if name.endswith("temperature") else np.float32(np.exp(-0.5)))


def measure(options: argparse.Namespace, source: Path) -> dict[str, list[float]]:
    """Seconds of imports, including the flush to disk, by units of the densities."""
    target, device = source.with_name(f"imported_{options.box}.h5"), common.this_machine().device

    def seconds(units: str) -> float:
        with h5py.File(source, "r+") as file:
            for name in (DARK_MATTER_DENSITY, GAS_DENSITY):
                file[nyx.NATIVE][name].attrs["units"] = np.bytes_(units)
        copy_file(source, os.devnull, "reading the snapshot into the page cache")
        command = parse([f"--input={source}", f"--output={target}", "--overwrite"])
        return common.seconds_of(lambda: import_volume(command), device)

    try:
        return common.interleaved(
            {unit: functools.partial(seconds, unit) for unit in ("mean", "other")}, options.trials
        )
    finally:
        target.unlink(missing_ok=True)


def main() -> None:
    with one_line_errors():
        parser = common.Parser(__doc__)
        parser.add_integers(box=512, trials=5)
        parser.add_argument("--directory", type=Path, default=Path("data"), help="for the files (%(default)s)")
        options = parser.parse_args()
        source = options.directory / f"snapshot_{options.box}.h5"
        make_snapshot(source, options.box)
        size = source.stat().st_size
        seconds = measure(options, source)
        rates = {unit: common.summary([size / 1e6 / each for each in values]) for unit, values in seconds.items()}
        result = {
            "settings": common.settings(options),
            "cores": common.cores(),
            "bytes": size,
            "seconds": {unit: common.summary(values) for unit, values in seconds.items()},
            "MB/s of the snapshot": rates,
        }
        path = common.save("import_volume", result, options.output)
        for unit, rate in rates.items():
            print(f"densities in units {unit}: {common.ranged(rate)} MB/s of {size / 1e6:,.0f} MB")
        print(f"written: {path}")


if __name__ == "__main__":
    main()
