"""Throughput of the loaders against a plain DataLoader and upper bounds, and their start from a cold page cache.

python -m benchmarks.loaders                       crops of 64³ from a 512³ file (5 GB and .npy copies, made in data/)
python -m benchmarks.loaders --box 128 --trials 1  a quick look

Throughput is measured in interleaved trials in one process; each start in a new process, --starts times per loader.
"""

import argparse
import functools
import itertools
import multiprocessing
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks import common
from utils import config as configs
from utils.config import Config
from utils.data import symmetry
from utils.data.loaders import LOADERS, DataSplits, dali, get_loader, open_volumes
from utils.data.loaders.base import sample_plan
from utils.errors import UserError
from utils.files import atomic_write
from utils.volumes.convert_to_npy import ENDINGS, convert

FIELDS = {"Nbody": 4, "Hydro": 5}  # channels
# Batches that may be ready when a measurement begins: our loaders keep three, the DataLoader two per worker and more.
UNTIMED_BATCHES = 6
STARTS = ("start seconds", "first epoch seconds", "later epoch seconds", "first epoch / later")  # of three epochs


def volume_keys(box: int, crop: int, npy: bool = False) -> dict[str, Any]:
    """The config's keys for a training volume, and a validation volume of one crop; makes missing files in data/."""
    keys: dict[str, Any] = {"box_size": [box, crop]}
    for split, side in (("train", box), ("val", crop)):
        path = Path(f"data/benchmark_{side}.h5")
        copies = {kind: path.with_name(f"{path.stem}_{kind}.npy") for kind in ("data", "label")}
        if not path.exists():
            make_volume(path, side)
        if npy and not all(copy.exists() for copy in copies.values()):
            convert(path, overwrite=True)
        keys |= {f"{split}_path": str(path), **{f"{split}_path_npy_{kind}": str(copies[kind]) for kind in copies}}
    return keys


def make_volume(path: Path, box: int) -> None:
    """Random values: compressible pages would make every loader look faster."""
    path.parent.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    with atomic_write([path]) as (partial,), h5py.File(partial, "w") as file:
        for name, channels in FIELDS.items():
            dataset = file.create_dataset(name, (channels, box, box, box), "f4")
            for channel in range(channels):
                dataset[channel] = 2 * generator.random((box, box, box), np.float32) - 1


def available(device: torch.device) -> list[str]:
    """The crop loaders that this machine has the packages for; without a GPU, `resident` is `inmem`."""
    others = ["auto"] if device.type == "cuda" else ["auto", "resident"]
    try:
        dali.import_dali()
    except UserError as error:
        others.append("dali-lowmem")
        sys.stderr.write(f"dali-lowmem is skipped: {error}\n")
    return [name for name, spec in LOADERS.items() if spec.reads in ("hdf5", "npy") and name not in others]


def config_of(options: argparse.Namespace, changes: Mapping[str, Any], npy: bool = False) -> Config:
    """The config 'base' with these changes, and with volumes, crop and batch of a benchmark's options."""
    sizes = {"data_size": options.crop, "local_batch_size": options.batch, "Nsamples_val": options.batch}
    keys = {**volume_keys(options.box, options.crop, npy), **sizes, **changes}
    return configs.load(common.YAML, "base", keys).for_world(1)


def loader_config(options: argparse.Namespace, name: str) -> Config:
    changes = {"data_loader_config": name, "num_data_workers": options.workers, "symmetries": "full"}
    changes |= {"Nsamples": options.batch * options.epoch_batches}
    return config_of(options, changes, npy=get_loader(name).reads == "npy")


def build_loader(options: argparse.Namespace, name: str) -> DataSplits:
    return get_loader(name).build(open_volumes(loader_config(options, name)), common.this_machine())


class PlainDataset(Dataset):
    """A straightforward data set: crops that h5py reads, with numpy's transpose and flip."""

    def __init__(self, options: argparse.Namespace) -> None:
        config = loader_config(options, "lowmem")
        self._path, self._side = config.train_path, options.crop
        self._plan = sample_plan(config, "train", [(options.box,) * 3]).epoch(0)
        self._vectors = config.vectors
        self._file: Any = None

    def __len__(self) -> int:
        return len(self._plan)

    def __getitem__(self, index: int) -> list[torch.Tensor]:
        self._file = self._file or h5py.File(self._path)  # in the worker: HDF5 handles do not survive a fork
        place = (slice(None), *(slice(int(start), int(start) + self._side) for start in self._plan.origins[index]))
        rotation, parts = int(self._plan.symmetries[index]), zip(FIELDS, self._vectors, strict=True)
        crops = (symmetry.apply(self._file[name][place], rotation, vectors) for name, vectors in parts)
        return [torch.from_numpy(crop) for crop in crops]


def endless_plain(options: argparse.Namespace) -> Generator[Any, None, None]:
    loader = DataLoader(PlainDataset(options), options.batch, num_workers=options.workers, persistent_workers=True)
    while True:
        yield from loader


def reading(options: argparse.Namespace) -> dict[str, Generator[Any, None, None]]:
    """Endless batches of crops as they lie in .npy files, read by the threads of `dali-lowmem` and by DALI's reader."""
    loader: Any = build_loader(options, "dali-lowmem").train
    fn, types, pipeline_def = dali.import_dali()
    origins = np.resize(loader.plan.epoch(0).origins.astype(np.int32), (options.epoch_batches, options.batch, 3))

    @pipeline_def(batch_size=options.batch, num_threads=options.workers, device_id=None)
    def read() -> tuple[Any, ...]:
        place = fn.external_source(origins, cycle=True, dtype=types.INT32)
        region = {"roi_start": place, "roi_shape": [options.crop] * 3, "roi_axes": [0, 1, 2]}
        paths = (getattr(loader.config, f"train_path_npy_{ending}") for ending in ENDINGS)
        return tuple(fn.readers.numpy(files=[path], **region) for path in paths)

    own = (batch for epoch in itertools.count() for batch in loader._read(epoch, 0))
    return {"reading: own threads": own, "reading: DALI": (pipe.run() for pipe in itertools.repeat(read()))}


def delivered(batches: Iterator[Any], options: argparse.Namespace, device: torch.device) -> float:
    """Samples/s, after batches that may have been ready."""
    # After its turn the DataLoader's processes fill their queues again: nothing is timed meanwhile.
    time.sleep(options.settle)
    for _ in range(max(UNTIMED_BATCHES, 2 * options.workers + 2)):
        next(batches)
    return options.batches * options.batch / common.seconds_of(lambda: next(batches), device, options.batches)


def copied(options: argparse.Namespace, source: torch.device, target: torch.device) -> float:
    """Samples/s of copying ready batches: an upper bound."""
    shape = options.batch, sum(FIELDS.values()), *(options.crop,) * 3
    batch = torch.rand(shape, device=source, pin_memory=source.type != target.type)
    copy = batch.to(target, copy=True)
    return 10 * options.batch / common.seconds_of(lambda: copy.copy_(batch, non_blocking=True), target, 10)


def throughput(options: argparse.Namespace, names: Sequence[str], device: torch.device) -> dict[str, Any]:
    """Samples/s of every loader and bound, in interleaved trials."""
    host = torch.device("cpu")
    with ExitStack() as stack:
        ways: dict[str, Generator[Any, None, None]] = {}
        if device.type != "cuda":  # its many processes would still work while others are timed
            ways[f"plain DataLoader, {options.workers} processes"] = endless_plain(options)
        if device.type != "cuda" and "dali-lowmem" in names:
            ways |= reading(options)
        for name in names:
            ways[name] = common.endless(stack.enter_context(build_loader(options, name)).train)
        opened = {name: stack.enter_context(closing(way)) for name, way in ways.items()}
        measures = {name: functools.partial(delivered, way, options, device) for name, way in opened.items()}
        bounds = {"memory copy (bound)": (host, host)}
        if device.type == "cuda":
            bounds |= {"copy to the device (bound)": (host, device), "copy on the device (bound)": (device, device)}
        measures |= {name: functools.partial(copied, options, *pair) for name, pair in bounds.items()}
        rates = common.interleaved(measures, options.trials)
    return {name: common.summary(values) for name, values in rates.items()}


def start(name: str, options: argparse.Namespace) -> dict[str, float]:
    """Starts one loader with its files out of the page cache, and runs three epochs. Linux only."""
    npy = get_loader(name).reads == "npy"
    for key, path in volume_keys(options.box, options.crop, npy).items():
        if "path" in key and ("npy" in key) == npy:
            with open(path, "rb", buffering=0) as file:
                os.fsync(file.fileno())  # pages not yet written cannot be dropped
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    device, started = common.this_machine().device, time.perf_counter()
    with build_loader(options, name) as loaders:
        common.synchronize(device)
        opening, seconds = time.perf_counter() - started, []
        for epoch in range(3):
            batches = loaders.train.epoch(epoch)
            seconds.append(common.seconds_of(lambda batches=batches: deque(batches, maxlen=0), device))  # type: ignore[misc]
    first, later = seconds[0], min(seconds[1:])
    return dict(zip(STARTS, (opening, first, later, first / later), strict=True))


def main(argv: Sequence[str] | None = None) -> None:
    sizes = {"box": 512, "crop": 64, "batch": 16, "trials": 5, "workers": 2, "batches": 30, "epoch_batches": 64}
    parser = common.Parser(__doc__, **sizes, settle=2.0)
    parser.add_argument("--starts", type=int, default=3, help="(%(default)s)")  # also 0
    options = parser.parse_args(argv)
    device = common.this_machine().device
    names = available(device)

    def started(name: str) -> dict[str, float]:  # in a new process: pages that this one maps stay in the page cache
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            return pool.submit(start, name, options).result()

    rounds = [{name: started(name) for name in names} for _ in range(options.starts)]
    starts = {}
    for name in names if rounds else []:
        trials = [by_name[name] for by_name in rounds]
        starts[name] = {**{key: statistics.median(trial[key] for trial in trials) for key in STARTS}, "trials": trials}
    results = throughput(options, names, device)
    text = common.table(("loader", "samples/s"), [(name, common.ranged(values)) for name, values in results.items()])
    if starts:
        cold = [(name, *(f"{values[key]:.2f}" for key in STARTS)) for name, values in starts.items()]
        text += f"\n\n{common.table(('loader', *STARTS), cold)}"
    result = {"unit": "samples/s", "results": results, "starts": starts}
    common.publish("loaders" if device.type == "cpu" else "loaders_gpu", options, result, text)


if __name__ == "__main__":
    common.run(main)
