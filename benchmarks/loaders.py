"""Throughput of the loaders against a plain DataLoader and upper bounds, and their start from a cold page cache.

python -m benchmarks.loaders                       crops of 64³ from a 512³ file (5 GB and .npy copies, made in data/)
python -m benchmarks.loaders --box 128 --trials 1  a quick look

Throughput is measured in interleaved trials in one process; each start in a new process.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks import common
from utils import config as configs
from utils.cli import positive
from utils.config import Config
from utils.data import LOADERS, DataSplits, get_loader, symmetry
from utils.data.convert_to_npy import convert
from utils.data.loaders import dali
from utils.data.loaders.base import sample_plan
from utils.data.plan import EpochPlan
from utils.errors import UserError, one_line_errors

FIELDS = {"Nbody": 4, "Hydro": 5}  # channels
# Batches that may be ready when a measurement begins: our loaders keep three, the DataLoader two per worker and more.
UNTIMED_BATCHES = 6
# After its turn the DataLoader's processes fill their queues again: nothing is timed meanwhile.
SETTLE_SECONDS = 2.0
EPOCHS = 3  # per start: the first, and two later ones
SECONDS = ("start seconds", "first epoch seconds", "later epoch seconds")

# --- volumes of random values ----------------------------------------------------------------------------------------


def make_file(path: Path, box: int) -> None:
    """Creates an HDF5 file if it is missing. Random values: compressible pages would make every loader look faster."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    partial = path.with_suffix(".partial")
    with h5py.File(partial, "w") as file:
        for name, channels in FIELDS.items():
            dataset = file.create_dataset(name, (channels, box, box, box), "f4")
            for channel in range(channels):
                dataset[channel] = 2 * generator.random((box, box, box), np.float32) - 1
    partial.rename(path)


def npy_paths(path: Path) -> dict[str, Path]:
    """The file's .npy copies by kind."""
    return {kind: path.with_name(f"{path.stem}_{kind}.npy") for kind in ("data", "label")}


def make_npy(*paths: Path) -> None:
    """Creates the .npy copies of files if they are missing."""
    for path in paths:
        if not all(copy.exists() for copy in npy_paths(path).values()):
            convert(path, overwrite=True)


def volume_keys(train: Path, valid: Path) -> dict[str, Any]:
    """The config's keys for these files."""
    keys: dict[str, Any] = {"box_size": []}
    for split, path in (("train", train), ("val", valid)):
        with h5py.File(path) as file:
            keys["box_size"].append(file["Nbody"].shape[-1])
        keys[f"{split}_path"] = str(path)
        keys |= {f"{split}_path_npy_{kind}": str(copy) for kind, copy in npy_paths(path).items()}
    return keys


# --- loaders ---------------------------------------------------------------------------------------------------------


def available(device: torch.device) -> list[str]:
    """The crop loaders that this machine has the packages for; without a GPU, `resident` is `inmem`."""
    names = []
    for name, spec in LOADERS.items():
        if spec.reads not in ("hdf5", "npy") or name == "auto" or (name == "resident" and device.type != "cuda"):
            continue
        try:
            if name == "dali-lowmem":
                dali.import_dali()
            names.append(name)
        except UserError as error:
            sys.stderr.write(f"{name} is skipped: {error}\n")
    return names


def loader_config(options: argparse.Namespace, name: str) -> Config:
    """The config of one loader."""
    keys = {
        **volume_keys(options.data, options.valid_data),
        "data_loader_config": name,
        "data_size": options.crop,
        "local_batch_size": options.batch,
        "Nsamples": options.batch * options.epoch_batches,
        "Nsamples_val": options.batch,
        "num_data_workers": options.workers,
        "symmetries": "full",
    }
    return configs.load(common.YAML, "base", keys).for_world(1)


def build_loader(options: argparse.Namespace, name: str) -> DataSplits:
    return get_loader(name).build(loader_config(options, name), common.this_machine())


def train_plan(options: argparse.Namespace) -> EpochPlan:
    """The plan of the first epoch."""
    with h5py.File(options.data) as file:
        boxes = [file["Nbody"].shape[1:]]
    return sample_plan(loader_config(options, "lowmem"), "train", boxes).epoch(0)


class PlainDataset(Dataset):
    """A straightforward data set: h5py's read_direct, numpy's transpose and flip."""

    def __init__(self, path: Path, plan: EpochPlan, crop: int, vectors: tuple[Any, Any]) -> None:
        self._path, self._plan, self._crop, self._vectors = path, plan, crop, vectors
        self._file: Any = None

    def __len__(self) -> int:
        return len(self._plan)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        if self._file is None:  # opened in the worker: HDF5 handles do not survive a fork
            self._file = h5py.File(self._path, "r")
        x, y, z = (slice(int(start), int(start) + self._crop) for start in self._plan.origins[index])
        rotation = int(self._plan.symmetries[index])
        fields = []
        for (name, channels), vectors in zip(FIELDS.items(), self._vectors, strict=True):
            crop = np.empty((channels, *(self._crop,) * 3), dtype=np.float32)
            self._file[name].read_direct(crop, np.s_[:, x, y, z])
            fields.append(torch.from_numpy(symmetry.apply(crop, rotation, vectors)))
        return tuple(fields)


def endless_plain(options: argparse.Namespace) -> Generator[Any, None, None]:
    """Batches of a PyTorch DataLoader."""
    vectors = loader_config(options, "lowmem").vector_channels
    dataset = PlainDataset(options.data, train_plan(options), options.crop, (vectors.inputs, vectors.targets))
    workers = options.workers
    loader = DataLoader(dataset, options.batch, num_workers=workers, persistent_workers=workers > 0)
    while True:
        yield from loader


def endless_tutorial(options: argparse.Namespace, device: torch.device) -> Generator[Any, None, None]:
    """Batches of the tutorial's DALI operators: rotation with interpolation, mirroring, transposition."""
    fn, types, pipeline_class = dali.import_dali()
    device_id = (device.index or 0) if device.type == "cuda" else None
    pipeline = pipeline_class(options.batch, options.workers, device_id, prefetch_queue_depth=dali.QUEUE)
    with pipeline:
        origin = fn.external_source(name="origin", dtype=types.INT32, ndim=1)
        angle = fn.external_source(name="angle", dtype=types.FLOAT, ndim=0)
        axis = fn.external_source(name="axis", dtype=types.FLOAT, ndim=1)
        coins = fn.random.coin_flip(shape=[3])
        outputs = []
        for path in npy_paths(options.data).values():
            shape = [options.crop] * 3
            crop = fn.readers.numpy(files=[str(path)], roi_start=origin, roi_shape=shape, roi_axes=[0, 1, 2])
            crop = fn.rotate(crop if device_id is None else crop.gpu(), angle=angle, axis=axis)
            crop = fn.flip(crop, depthwise=coins[0], horizontal=coins[1], vertical=coins[2])
            outputs.append(fn.transpose(crop, perm=[3, 0, 1, 2]))
        pipeline.set_outputs(*outputs)
    pipeline.build()
    plan = train_plan(options)
    inputs = {"origin": plan.origins.astype(np.int32), **rotations(len(plan))}
    for number in range(sys.maxsize):
        rows = np.arange(number * options.batch, (number + 1) * options.batch) % len(plan)
        for name, values in inputs.items():
            pipeline.feed_input(name, values[rows])
        if number >= dali.QUEUE - 1:
            pipeline.schedule_run()
            yield pipeline.outputs()


def rotations(count: int) -> dict[str, np.ndarray]:
    """Axis and angle in degrees of `count` of the cube's 24 rotations, drawn at random."""
    from scipy.spatial.transform import Rotation

    vectors = Rotation.create_group("O")[np.random.default_rng(0).integers(0, 24, count)].as_rotvec()
    angles = np.linalg.norm(vectors, axis=1, keepdims=True)
    axes = np.where(angles > 0, vectors / np.maximum(angles, 1e-9), [[0, 0, 1]])
    return {"angle": np.degrees(angles[:, 0]).astype(np.float32), "axis": axes.astype(np.float32)}


# --- measurements ----------------------------------------------------------------------------------------------------


def delivered(batches: Iterator[Any], options: argparse.Namespace, device: torch.device, untimed: int) -> float:
    """Samples/s, after `untimed` batches that may have been ready."""
    time.sleep(options.settle)
    for _ in range(untimed):
        next(batches)
    return options.batches * options.batch / common.seconds_of(lambda: next(batches), device, options.batches)


def copied(options: argparse.Namespace, source: torch.device, target: torch.device) -> float:
    """Samples/s of copying ready batches: an upper bound."""
    # A separate generator: the device's own is unusable after a CUDA graph that could not be recorded.
    generator = torch.Generator(source).manual_seed(0)
    shape = (options.batch, sum(FIELDS.values()), *(options.crop,) * 3)
    batch = torch.rand(shape, device=source, generator=generator)
    batch = batch.pin_memory() if source.type != target.type else batch
    copy = torch.empty(shape, device=target)
    copy.copy_(batch)
    return 10 * options.batch / common.seconds_of(lambda: copy.copy_(batch, non_blocking=True), target, 10)


def throughput(options: argparse.Namespace, with_plain: bool = True) -> dict[str, Any]:
    """Samples/s of every loader and bound, in interleaved trials."""
    device, host = common.this_machine().device, torch.device("cpu")
    untimed = max(UNTIMED_BATCHES, 2 * options.workers + 2)
    with contextlib.ExitStack() as stack:
        ways: dict[str, Generator[Any, None, None]] = {}
        names = available(device)
        if with_plain:
            ways[f"plain DataLoader, {options.workers} processes"] = endless_plain(options)
        if "dali-lowmem" in names:
            make_npy(options.data, options.valid_data)
            ways["the original's DALI operators"] = endless_tutorial(options, device)
        for name in names:
            ways[name] = common.endless(stack.enter_context(build_loader(options, name)).train)
        measures: dict[str, Callable[[], float]] = {}
        for name, way in ways.items():
            stack.callback(way.close)
            measures[name] = functools.partial(delivered, way, options, device, untimed)
        bounds = {"memory copy (bound)": (host, host)}
        if device.type == "cuda":
            bounds |= {"copy to the device (bound)": (host, device), "copy on the device (bound)": (device, device)}
        measures |= {name: functools.partial(copied, options, *pair) for name, pair in bounds.items()}
        rates = common.interleaved(measures, options.trials)
    results: dict[str, Any] = {name: common.summary(values) for name, values in rates.items()}
    for result in results.values():
        result["GB/s"] = result["median"] * 4 * sum(FIELDS.values()) * options.crop**3 / 1e9
        result["share of bound"] = result["median"] / results[list(bounds)[-1]]["median"]
    return results


def gather_seconds(options: argparse.Namespace) -> float:
    """The resident loader's seconds per batch with nothing else on the device: its kernels and their launches."""
    with build_loader(options, "resident") as loaders, closing(common.endless(loaders.train)) as batches:
        return options.batch / delivered(batches, options, common.this_machine().device, UNTIMED_BATCHES)


def drop_from_page_cache(path: Path) -> None:
    """Drops a file from the page cache; pages that a process has mapped stay. Linux only."""
    with open(path, "rb", buffering=0) as file:
        os.fsync(file.fileno())  # pages not yet written cannot be dropped
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def start(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Starts one loader with its files out of the page cache, and runs three epochs."""
    device = common.this_machine().device
    npy = get_loader(name).reads == "npy"
    for path in (options.data, options.valid_data):
        for file in npy_paths(path).values() if npy else [path]:
            drop_from_page_cache(Path(file))
    started = time.perf_counter()
    with build_loader(options, name) as loaders:
        common.synchronize(device)
        seconds = [time.perf_counter() - started]
        for epoch in range(EPOCHS):
            started = time.perf_counter()
            for _ in loaders.train.epoch(epoch):
                pass
            common.synchronize(device)
            seconds.append(time.perf_counter() - started)
    measured = (seconds[0], seconds[1], min(seconds[2:]))
    return {**dict(zip(SECONDS, measured, strict=True)), "first epoch / later": measured[1] / measured[2]}


def start_in_process(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Runs `start` in a new process, because pages that this one has mapped would stay in the page cache."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(start, name, options).result()


# --- the report ------------------------------------------------------------------------------------------------------


def draw(results: dict[str, Any], starts: dict[str, Any], path: Path, title: str) -> None:
    """Throughput with its range, and the seconds of start and epochs."""
    seconds = {
        key: [common.spread([trial[key] for trial in each["trials"]]) for each in starts.values()] for key in SECONDS
    }
    with common.plot(path, (12, 4.4), 2) as panels:
        left, right = panels[0]
        common.bars(left, list(results), {"": list(results.values())}, xlabel="samples/s (median, range)", title=title)
        common.bars(right, list(starts), seconds, xlabel="seconds", title="from a cold page cache")


def run(options: argparse.Namespace) -> None:
    """Measures, prints, saves and draws."""
    device = common.this_machine().device
    names = available(device)
    if "dali-lowmem" in names:
        make_npy(options.data, options.valid_data)
    rounds = [{name: start_in_process(name, options) for name in names} for _ in range(options.starts)]
    starts = {}
    for name in names:
        trials = [each[name] for each in rounds]
        starts[name] = {**{key: statistics.median(one[key] for one in trials) for key in trials[0]}, "trials": trials}
    results = throughput(options)
    keys = (*SECONDS, "first epoch / later")
    rates = [(name, common.ranged(each), f"{each['share of bound']:.2f}") for name, each in results.items()]
    cold = [(name, *(f"{each[key]:.2f}" for key in keys)) for name, each in starts.items()]
    heads = ("loader", "samples/s", "share of the bound")
    text = f"{common.table(heads, rates)}\n\n{common.table(('loader', *keys), cold)}"
    report = {"settings": common.settings(options), "unit": "samples/s", "results": results, "starts": starts}
    name, title = "loaders" if device.type == "cpu" else "loaders_gpu", f"{options.crop}³ crops, batch {options.batch}"
    common.publish(name, report, options.output, text, lambda path: draw(results, starts, path, title))


def main() -> None:
    parser = common.Parser(__doc__)
    parser.add_integers(box=512, crop=64, batch=16, trials=5)
    parser.add_argument("--workers", type=positive, default=2, help="threads, or processes of the plain DataLoader")
    parser.add_argument("--batches", type=positive, default=30, help="timed batches per trial")
    parser.add_argument("--epoch_batches", type=positive, default=64, help="batches per epoch")
    parser.add_argument("--starts", type=positive, default=3, help="starts of each loader; the median is reported")
    parser.add_argument("--data", type=Path, help="HDF5 file (data/benchmark_<box>.h5, created if missing)")
    with one_line_errors():
        options = parser.parse_args()
        options.settle = SETTLE_SECONDS
        options.data = options.data or Path(f"data/benchmark_{options.box}.h5")
        options.valid_data = Path(f"data/benchmark_{max(128, options.crop)}.h5")
        make_file(options.data, options.box)
        make_file(options.valid_data, max(128, options.crop))
        run(options)


if __name__ == "__main__":
    main()
