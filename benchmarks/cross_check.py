"""Cross-check of right and of wrong volumes: false alarms, and mistakes that are named.

python -m benchmarks.cross_check

Simulates boxes of different seeds, redshifts, cells, grids and cosmologies, some in pairs. Bounds were set on the first
half; the mistakes are made in the boxes of the second half and in zooms on their densest cell.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import common
from utils.config.channels import SIDES, Channel, known_channels
from utils.distributed.world import World
from utils.volumes.attributes import CELL
from utils.volumes.cross_check import BOUNDS, FEWEST_CELLS, CrossCheck, cross_check
from utils.volumes.hdf5 import Volume, cells_text, open_volume
from utils.volumes.values import GOLDEN

GRIDS, LARGEST, SMALL = (24, 32, 40, 48, 64), 128, 48  # cells per side; the last two boxes of each half are large
FURTHER = (256,) * 2  # cells per side of boxes after both halves
ZOOMS = *((side,) * 3 for side in (24, 32, 48, 96)), (24, 40, 28)  # their cells
LATER = 0.8  # difference of redshift
SOME_PLANES = "boxes of which few planes are read"


def simulated(number: int, half: int, runs: Path, later: float = 0) -> list[Volume]:
    """A box or a pair, with cells of 0.05 to 1.25 Mpc/h, at z = 2 to 4 or, of the same seed, `later`."""
    from simulation import simulate  # needs optional libraries

    grid = LARGEST if number % half >= half - 2 else GRIDS[number % len(GRIDS)]
    grid = FURTHER[number - 2 * half] if number >= 2 * half else grid
    cell, redshift = 0.05 * 25 ** (number * GOLDEN % 1), 2 + 2 * (number * math.sqrt(2) % 1) - later
    paths = [runs / "cross_check" / f"{number}_{redshift:.2f}.h5"]
    flags = [f"--output={paths[0]}", f"--grid={grid}", f"--box_size={cell * grid:.4g}", f"--redshift={redshift:.2f}"]
    flags += [f"--seed={1000 + number}", f"--cosmology={('planck18', 'WMAP9')[number // 2 % 2]}", "--overwrite"]
    if number % 6 == 5 and grid < LARGEST:
        flags.append("--paired")
        paths.append(paths[0].with_stem(f"{paths[0].stem}_paired"))
    if not all(path.exists() for path in paths):
        paths[0].parent.mkdir(parents=True, exist_ok=True)
        simulate.main(flags)
    return [open_volume(path) for path in paths]


def channels_of(volume: Volume) -> list[Sequence[Channel]]:
    stated = zip(volume.channels, SIDES, volume.fields, strict=True)
    return [found or known_channels(side, field.shape[0]) for found, side, field in stated]


def check(volume: Volume, world: World | None = None, limit: float = math.inf) -> CrossCheck:
    return cross_check(volume, volume.fields, channels_of(volume), world or common.this_machine(), limit)


def changed(volume: Volume, change: Callable[[np.ndarray], np.ndarray], **changes: Any) -> Volume:
    return replace(volume, inputs=change(volume.inputs), targets=change(volume.targets), **changes)


def part(volume: Volume, *cells: slice, **changes: Any) -> Volume:
    place = (slice(None), *cells)
    return changed(volume, lambda field: field[place], **changes)


def moved(volume: Volume, factor: Any, order: Sequence[int] = (0, 1, 2)) -> Volume:
    """The volume with other velocities: `factor` of the density's channel, times the components in this order."""
    places = [1 + axis for axis in order]
    return changed(volume, lambda field: np.concatenate([field[:1], factor(field[:1]) * field[places], field[4:]]))


def zoom(volume: Volume, shape: Sequence[int], center: int) -> Volume:
    """A part around a cell of a periodic box, as imported with --not_periodic and the box's --mean_density."""
    shifts = [side // 2 - place for side, place in zip(shape, np.unravel_index(center, volume.shape), strict=True)]
    rolled = changed(volume, lambda field: np.roll(field, shifts, (1, 2, 3)))
    return part(rolled, *map(slice, shape), periodic=False)


def right(volume: Volume) -> Iterator[tuple[str, Volume]]:
    """A box, the box without velocities, two of them side by side, and parts of it; zooms are around two cells."""
    side, (dark, gas) = volume.shape[0], channels_of(volume)
    yield "boxes" if GRIDS[0] <= side < LARGEST else f"boxes of {side}³ cells", volume
    if side >= GRIDS[-1]:
        yield SOME_PLANES, volume
    scalars = replace(volume, inputs=volume.inputs[:1], targets=volume.targets[[0, 4]])
    yield "without velocities", replace(scalars, channels=(dark[:1], [gas[0], gas[4]]))
    if side <= SMALL:
        yield "two boxes side by side", changed(volume, lambda field: np.tile(field, (1, 2, 1)))
    if side > GRIDS[0]:
        yield "cubic parts", part(volume, *[slice(max(24, 3 * side // 4))] * 3, periodic=False)
        yield "parts, not cubic", part(volume, slice(None), slice(2, 26), slice(side - 28, side), periodic=False)
    for shape in (shape for shape in ZOOMS if max(shape) < side):
        yield f"zooms of {cells_text(shape)} cells, densest", zoom(volume, shape, volume.inputs[0].argmax())
        yield f"zooms of {cells_text(shape)} cells, emptiest", zoom(volume, shape, volume.inputs[0].argmin())


def wrong(volume: Volume, other: Volume, later: Volume) -> Iterator[tuple[str, str, Volume]]:
    """Mistakes: a name, a part of the warning that names it, and the volume; `later` has the same seed."""
    ratio, side, scale = 1 + volume.attributes["redshift"], volume.shape[0], channels_of(volume)[0][0].scale
    targets, half = volume.targets, (side // 2,) * 3
    yield "√a units", "√a units", moved(volume, lambda _: ratio**0.5)
    yield "comoving velocities", "comoving", moved(volume, lambda _: ratio)
    yield "momentum", "momentum", moved(volume, lambda density: np.exp(scale * density))
    yield "wrong sign", "wrong sign", moved(volume, lambda _: -1)
    yield "v_x and v_z swapped", "v_x and v_z swapped", moved(volume, lambda _: 1, (2, 1, 0))
    yield "Fortran order", "Fortran", changed(volume, lambda field: field.swapaxes(1, 3))
    yield "gas transposed", "gas transposed", replace(volume, targets=targets.swapaxes(1, 3))
    yield "gas shifted by half a box", "gas shifted", replace(volume, targets=np.roll(targets, half, (1, 2, 3)))
    yield "gas shifted by one cell", "gas shifted", replace(volume, targets=np.roll(targets, 1, 1))
    yield "gas reflected", "gas reflected", replace(volume, targets=targets[:, ::-1])
    yield "gas of another seed", "another snapshot", replace(volume, targets=other.targets)
    faster = np.concatenate([targets[:1], ratio**0.5 * targets[1:4], targets[4:]])
    yield "√a units of the gas", "gas velocity in other units", replace(volume, targets=faster)
    denser = np.concatenate([targets[:1] + math.log(5) / scale, targets[1:]])
    yield "gas density with another mean", "divided by other means", replace(volume, targets=denser)
    yield "kpc/h for Mpc/h", "kpc/h", replace(volume, simulation={**volume.simulation, CELL: 1000 * (volume.cell or 1)})
    yield "gas of a later redshift", "two redshifts", replace(volume, targets=later.targets)
    if side > FEWEST_CELLS or not volume.periodic:
        cells = [slice(max(FEWEST_CELLS, side * 3 // 4))] * (1 + side % 3)
        yield "cut-out as periodic", "cut out", part(volume, *cells, periodic=True)
    gaps = np.random.default_rng(0).random(volume.shape) < 0.005  # one cell in 200
    yield "-9999 for no value", "no value", changed(volume, lambda field: np.where(gaps, np.float32(-9999), field))


def changeable(number: int, half: int, runs: Path) -> Iterator[tuple[str, list[Volume]]]:
    """Arguments of `wrong`: a box, and zooms on its densest cell."""
    other, box = number - half if number < 2 * half else number ^ 1, simulated(number, half, runs)[0]
    volumes = [box, simulated(other, half, runs)[0], simulated(number, half, runs, LATER)[0]]
    yield "wrong" if number < 2 * half else f"wrong boxes of {box.shape[0]}³", volumes
    for shape in (shape for shape in ZOOMS[:2] if max(shape) < box.shape[0]):
        yield f"wrong zooms of {shape[0]}³", [zoom(volume, shape, box.inputs[0].argmax()) for volume in volumes]


def main(argv: Sequence[str] | None = None) -> None:
    options = common.Parser(__doc__, boxes=80, further=len(FURTHER), runs=common.RUNS).parse_args(argv)
    half = options.boxes // 2
    values = defaultdict[str, list[list[float]]](lambda: [[], []])
    kinds = defaultdict[str, dict[str, list[bool]]](lambda: defaultdict(list))
    for number in range(options.boxes + options.further):
        boxes = simulated(number, half, options.runs)
        for kind, volume in itertools.chain(*map(right, boxes)):
            found = check(volume, limit=0 if kind == SOME_PLANES else math.inf)
            for name, value in found.values.items():
                values[name][number >= half].append(value)
            kinds["right"][kind].append(bool(found.warnings))
        if number >= half and GRIDS[0] != boxes[0].shape[0] < LARGEST:
            for title, volumes in changeable(number, half, options.runs):
                for kind, text, volume in wrong(*volumes):
                    kinds[title][kind].append(any(text in line.partition("?")[0] for line in check(volume).warnings))
    ranges = {name: [[*BOUNDS[name]], *([min(part), max(part)] for part in parts)] for name, parts in values.items()}
    rows = [[name, *(f"{low:.3g} – {high:.3g}" for low, high in pairs)] for name, pairs in ranges.items()]
    tables = [common.table(["statistic", "bounds", "right, first half", "right, second half"], rows)]
    result: dict[str, Any] = {"ranges": ranges}
    for name, lists in kinds.items():
        head = "named" if name != "right" else "false alarms"
        lists["all"] = list(itertools.chain(*lists.values()))
        result[name] = {kind: {"n": len(found), head: sum(found)} for kind, found in lists.items()}
        tables.append(common.table([name, "n", head], ([kind, *row.values()] for kind, row in result[name].items())))
    common.publish("cross_check", options, result, "\n\n".join(tables))


if __name__ == "__main__":
    common.run(main)
