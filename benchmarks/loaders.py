"""How fast batches are delivered: this project's loaders, a plain PyTorch DataLoader, and one memory copy.

python -m benchmarks.loaders                       crops of 64³ from a 512³ file (5 GB, made once under data/)
python -m benchmarks.loaders --box 128 --trials 1  a quick look
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.common import interleaved, save, summary, this_machine
from utils.data import symmetry
from utils.data.native import NativeLoader
from utils.data.plan import EpochPlan, SamplePlan
from utils.data.shared import share_volume
from utils.data.volumes import Volume, open_volume

CHANNELS = (4, 5)
VECTORS = (((1, 2, 3),), ((1, 2, 3),))
# What may lie ready when a measurement begins: the DataLoader keeps two batches a worker.
UNTIMED_BATCHES = 6
# After its turn the DataLoader's processes fill their queues again: nothing is timed meanwhile.
SETTLE_SECONDS = 2.0


class PlainDataset(Dataset):
    """What one writes first: h5py's read_direct, numpy's transpose and flip, PyTorch's collate."""

    def __init__(self, path: str, plan: EpochPlan, crop: int) -> None:
        self._path, self._plan, self._crop = path, plan, crop
        self._file: Any = None

    def __len__(self) -> int:
        return len(self._plan)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self._file is None:  # opened in the worker: HDF5 handles do not survive a fork
            self._file = h5py.File(self._path, "r")
        x, y, z = (slice(int(start), int(start) + self._crop) for start in self._plan.origins[index])
        rotation = int(self._plan.symmetries[index])
        fields = []
        for name, channels in zip(("Nbody", "Hydro"), CHANNELS, strict=True):
            crop = np.empty((channels, *(self._crop,) * 3), dtype=np.float32)
            self._file[name].read_direct(crop, np.s_[:, x, y, z])
            fields.append(torch.from_numpy(symmetry.apply(crop, rotation, VECTORS[0])))
        return fields[0], fields[1]


def make_file(path: Path, box: int) -> None:
    """Random, non-zero values: compressible pages would flatter every loader."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    partial = path.with_suffix(".partial")
    with h5py.File(partial, "w") as file:
        for name, channels in zip(("Nbody", "Hydro"), CHANNELS, strict=True):
            dataset = file.create_dataset(name, (channels, box, box, box), "f4")
            for channel in range(channels):
                for start in range(0, box, 64):
                    count = min(64, box - start)
                    dataset[channel, start : start + count] = generator.uniform(-1, 1, (count, box, box))
    partial.rename(path)


def warm(volume: Volume) -> None:
    """Every page read once: the file is in the page cache, as it is from the second epoch on."""
    for _, _, _, values in volume.slabs():
        values.max()


def delivered(batches: Iterator[Any], count: int, size: int) -> float:
    """Samples/s over `count` batches, after those that may lie ready."""
    time.sleep(SETTLE_SECONDS)
    for _ in range(UNTIMED_BATCHES):
        next(batches)
    started = time.perf_counter()
    for _ in range(count):
        next(batches)
    return count * size / (time.perf_counter() - started)


def endless(loader: NativeLoader) -> Generator[Any, None, None]:
    epoch = 0
    while True:
        yield from loader.epoch(epoch)
        epoch += 1


def endless_plain(path: str, plan: SamplePlan, batch: int, workers: int) -> Generator[Any, None, None]:
    loader = DataLoader(
        PlainDataset(path, plan.epoch(0), plan.crop), batch, num_workers=workers, persistent_workers=workers > 0
    )
    while True:
        yield from loader


def copied(samples: int, crop: int) -> float:
    """Samples/s of copying ready batches from one place in memory to another, with all cores: the bound."""
    source = torch.rand(samples, sum(CHANNELS), crop, crop, crop)
    target = torch.empty_like(source)
    target.copy_(source)
    started = time.perf_counter()
    for _ in range(10):
        target.copy_(source)
    return 10 * samples / (time.perf_counter() - started)


def draw(results: dict[str, Any], path: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
    names = list(results)[::-1]
    medians = [results[name]["median"] for name in names]
    errors = [
        [median - results[name]["min"] for name, median in zip(names, medians, strict=True)],
        [results[name]["max"] - median for name, median in zip(names, medians, strict=True)],
    ]
    axes.barh(names, medians, xerr=errors, color="tab:blue", ecolor="0.3", capsize=3)
    for place, median in enumerate(medians):
        axes.text(median / 2, place, f"{median:.0f}", va="center", ha="center", color="white")
    axes.set(xlabel="samples/s (median, range)", title=title)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--box", type=int, default=512)
    parser.add_argument("--crop", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--workers", type=int, default=2, help="threads, or processes of the plain DataLoader")
    parser.add_argument("--batches", type=int, default=30, help="timed batches a trial")
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--data", type=Path, help="HDF5 file (default: data/benchmark_<box>.h5, made if missing)")
    options = parser.parse_args()
    path = options.data or Path(f"data/benchmark_{options.box}.h5")
    make_file(path, options.box)
    volume = open_volume(path, CHANNELS)
    warm(volume)
    plan = SamplePlan(options.batch * 64, volume.box, options.crop)

    def loader(source: Volume) -> NativeLoader:
        return NativeLoader(source, plan, batch_size=options.batch, threads=options.workers, vectors=VECTORS)

    plain = f"plain DataLoader, {options.workers} processes"
    sources: dict[str, Generator[Any, None, None]] = {
        plain: endless_plain(str(path), plan, options.batch, options.workers),
        f"lowmem, {options.workers} threads": endless(loader(volume)),
        f"inmem, {options.workers} threads": endless(loader(share_volume(volume, this_machine()))),
    }
    measures: dict[str, Callable[[], float]] = {
        name: lambda batches=batches: delivered(batches, options.batches, options.batch)  # type: ignore[misc]
        for name, batches in sources.items()
    }
    measures["memory copy (bound)"] = lambda: copied(options.batch, options.crop)
    results = {name: summary(values) for name, values in interleaved(measures, options.trials).items()}
    for batches in sources.values():
        batches.close()
    bound = results["memory copy (bound)"]["median"]
    sample_bytes = 4 * sum(CHANNELS) * options.crop**3
    for name, result in results.items():
        result["ratio to plain"] = result["median"] / results[plain]["median"]
        result["share of bound"] = result["median"] / bound
        result["GB/s"] = result["median"] * sample_bytes / 1e9
        print(
            f"{name:<32} {result['median']:8.1f} samples/s ({result['min']:.1f} to {result['max']:.1f}), "
            f"{result['GB/s']:.2f} GB/s, {result['ratio to plain']:.1f}× plain, {result['share of bound']:.2f} of bound"
        )
    settings = {key: getattr(options, key) for key in ("box", "crop", "batch", "workers", "batches", "trials")}
    saved = save("loaders", {"settings": settings, "unit": "samples/s", "results": results})
    title = f"crops of {options.crop}³ from {volume.box}³, 48 symmetries, batch {options.batch}"
    draw(results, saved.with_suffix(".png"), title)
    print(f"written: {saved}, {saved.with_suffix('.png')}")


if __name__ == "__main__":
    main()
