"""How fast batches are delivered: every loader, what one writes first, and the bounds; and what starting costs.

python -m benchmarks.loaders                       crops of 64³ from a 512³ file (5 GB and its twins, made once: data/)
python -m benchmarks.loaders --box 128 --trials 1  a quick look
python -m benchmarks.loaders --step                beside it whole training steps, with each loader and with none

Throughput is measured in interleaved trials of one process; starting in a fresh process for each loader, with its
files out of the page cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import train
from benchmarks.common import interleaved, save, summary, this_machine
from networks import build_loss
from utils import config as configs
from utils.convert_to_npy import convert
from utils.data import Loader, symmetry
from utils.data.files.hdf5 import Volume, open_volume
from utils.data.files.npy import NpyVolume, open_npy_volume
from utils.data.files.page_cache import drop_from_page_cache, map_cached_pages, warm_page_cache
from utils.data.files.shared_memory import share_volume
from utils.data.loaders import dali
from utils.data.loaders.dali import DaliLoader
from utils.data.loaders.gpu_resident import GpuResidentLoader, load_resident
from utils.data.loaders.prefetcher import Batch
from utils.data.loaders.synthetic import SyntheticLoader
from utils.data.loaders.threaded import ThreadedCropLoader
from utils.data.plan import EpochPlan, SamplePlan
from utils.errors import UserError
from utils.steps import Step
from utils.steps.eager import EagerStep

CHANNELS = (4, 5)
VECTORS = (((1, 2, 3),), ((1, 2, 3),))
# What may lie ready when a measurement begins: our loaders keep three batches, the DataLoader two a worker and more.
UNTIMED_BATCHES = 6
# After its turn the DataLoader's processes fill their queues again: nothing is timed meanwhile.
SETTLE_SECONDS = 2.0
EPOCHS = 3  # of a start: the first, and two later ones
ORIGINAL = "the original's DALI operators"
READER = "DALI's reader alone"
LOADERS = ("lowmem", "inmem", "dali-lowmem", "resident")


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


# --- the files -----------------------------------------------------------------------------------------------------


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


def twins_of(path: Path) -> NpyVolume:
    """The file's `.npy` twins, made if they are missing."""
    paths = tuple(str(path.with_name(f"{path.stem}_{suffix}.npy")) for suffix in ("data", "label"))
    if not all(Path(name).exists() for name in paths):
        convert(path, overwrite=True)
    volume = open_volume(path, CHANNELS)
    return open_npy_volume((paths[0], paths[1]), ("data", "label"), str(path), CHANNELS, volume.box, volume)


# --- the loaders ---------------------------------------------------------------------------------------------------


class Sources:
    """Builds loaders of one file; a copy of the volume in memory is made once."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.path, self._options, self.world = options.data, options, this_machine()
        self._memory: Volume | None = None
        self._resident: Volume | None = None

    def plan(self) -> SamplePlan:
        box = open_volume(self.path, CHANNELS).box
        return SamplePlan(self._options.batch * self._options.epoch_batches, box, self._options.crop)

    def build(self, name: str) -> Loader:
        common: dict[str, Any] = {
            "plan": self.plan(),
            "batch_size": self._options.batch,
            "vectors": VECTORS,
            "device": self.world.device,
            "threads": self._options.workers,
        }
        if name == "dali-lowmem":
            twins = twins_of(self.path)
            warm_page_cache(twins.paths, self.world)
            map_cached_pages(twins.paths, twins.arrays)
            return DaliLoader(twins, **common)
        volume = open_volume(self.path, CHANNELS)
        if name == "lowmem":
            warm_page_cache(volume.files, self.world)
            map_cached_pages(volume.files, (volume.inputs, volume.targets))
            return ThreadedCropLoader(volume, **common)
        if name == "resident" and self.world.device.type == "cuda":
            self._resident = self._resident or load_resident(volume, self.world, torch.float32)
            return GpuResidentLoader(self._resident, **common)
        self._memory = self._memory or share_volume(volume, self.world)
        return (GpuResidentLoader if name == "resident" else ThreadedCropLoader)(self._memory, **common)

    def files(self, name: str) -> tuple[str, ...]:
        return twins_of(self.path).paths if name == "dali-lowmem" else (str(self.path),)


def available() -> list[str]:
    """The loaders that this machine has the packages for; says which one is left out."""
    names = list(LOADERS)
    try:
        dali.check_installed()
    except UserError as error:
        sys.stderr.write(f"{error}; it is left out\n")
        names.remove("dali-lowmem")
    return names


def endless(loader: Loader) -> Generator[Any, None, None]:
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


def endless_dali(
    twins: NpyVolume,
    plan: SamplePlan,
    batch: int,
    threads: int,
    device: torch.device,
    operators: Callable[[Any, Any, list[Any]], list[Any]],
    fed: Mapping[str, np.ndarray],
) -> Generator[Any, None, None]:
    """A DALI pipeline of the reader and other operators on the same crops; `fed` has a row for each sample in turn."""
    fn, types, pipeline_class = dali.import_dali()
    device_id = (device.index or 0) if device.type == "cuda" else None
    pipeline = pipeline_class(batch, threads, device_id, prefetch_queue_depth=dali.QUEUE)
    with pipeline:
        origin = fn.external_source(name="origin", dtype=types.INT32, ndim=1)
        crops = [
            fn.readers.numpy(files=[path], roi_start=origin, roi_shape=[plan.crop] * 3, roi_axes=[0, 1, 2])
            for path in twins.paths
        ]
        pipeline.set_outputs(*operators(fn, types, crops if device_id is None else [crop.gpu() for crop in crops]))
    pipeline.build()
    inputs = {"origin": plan.epoch(0).origins.astype(np.int32), **fed}
    number = 0

    def feed() -> None:
        nonlocal number
        for name, rows in inputs.items():
            pipeline.feed_input(name, rows[np.arange(number, number + batch) % len(rows)])
        number += batch

    for _ in range(dali.QUEUE):
        feed()
    pipeline.schedule_run()
    while True:
        yield pipeline.outputs()
        feed()
        pipeline.schedule_run()


def reader_alone(fn: Any, types: Any, crops: list[Any]) -> list[Any]:
    """Crops as they lie in the file, on the device."""
    return crops


def original_operators(fn: Any, types: Any, crops: list[Any]) -> list[Any]:
    """What the original trains with: turn by one of 24 rotations, with interpolation; mirror; channels first."""
    angle = fn.external_source(name="angle", dtype=types.FLOAT, ndim=0)
    axis = fn.external_source(name="axis", dtype=types.FLOAT, ndim=1)
    coins = fn.random.coin_flip(shape=[3])
    turned = [fn.rotate(crop, angle=angle, axis=axis) for crop in crops]
    mirrored = [fn.flip(crop, depthwise=coins[0], horizontal=coins[1], vertical=coins[2]) for crop in turned]
    return [fn.transpose(crop, perm=[3, 0, 1, 2]) for crop in mirrored]


def rotations(count: int) -> dict[str, np.ndarray]:
    """Axis and angle in degrees of `count` of the cube's 24 rotations, at random."""
    from scipy.spatial.transform import Rotation

    proper = [matrix for matrix in symmetry.matrices() if np.linalg.det(matrix) > 0]
    drawn = np.random.default_rng(0).integers(0, len(proper), count)
    vectors = Rotation.from_matrix(np.array(proper)[drawn]).as_rotvec()
    angles = np.linalg.norm(vectors, axis=1)
    axes = np.where(angles[:, None] > 0, vectors / np.maximum(angles, 1e-9)[:, None], [[0, 0, 1]])
    return {"angle": np.degrees(angles).astype(np.float32), "axis": axes.astype(np.float32)}


# --- measuring -----------------------------------------------------------------------------------------------------


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def delivered(
    batches: Iterator[Any], count: int, size: int, device: torch.device, settle: float, untimed: int = UNTIMED_BATCHES
) -> float:
    """Samples/s over `count` batches, after those that may lie ready."""
    time.sleep(settle)
    for _ in range(untimed):
        next(batches)
    wait(device)
    started = time.perf_counter()
    for _ in range(count):
        next(batches)
    wait(device)
    return count * size / (time.perf_counter() - started)


def copied(samples: int, crop: int, source: torch.device, target: torch.device) -> float:
    """Samples/s of copying ready batches: the bound."""
    to_device = source.type != target.type
    # A generator of its own: the device's may be out of order after a CUDA graph that could not be recorded.
    generator = torch.Generator(source).manual_seed(0)
    batch = torch.rand(samples, sum(CHANNELS), crop, crop, crop, device=source, generator=generator)
    batch = batch.pin_memory() if to_device else batch
    copy = torch.empty(batch.shape, device=target)
    copy.copy_(batch)
    wait(target)
    started = time.perf_counter()
    for _ in range(10):
        copy.copy_(batch, non_blocking=True)
    wait(target)
    return 10 * samples / (time.perf_counter() - started)


def resident_bytes() -> int:
    """Bytes of this process's own memory and of shared memory it uses; mapped files are the page cache's."""
    text = Path("/proc/self/status").read_text()
    fields = dict(line.split(":", 1) for line in text.splitlines())
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


def start(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One loader from nothing: its files out of the page cache, three epochs, what they took."""
    sources = Sources(options)
    device = sources.world.device
    for path in sources.files(name):
        drop_from_page_cache(path)
    before = resident_bytes()
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    started = time.perf_counter()
    loader = sources.build(name)
    wait(device)
    seconds = [time.perf_counter() - started]
    for epoch in range(EPOCHS):
        started = time.perf_counter()
        for _ in loader.epoch(epoch):
            pass
        wait(device)
        seconds.append(time.perf_counter() - started)
    result = {
        "start seconds": seconds[0],
        "first epoch seconds": seconds[1],
        "later epoch seconds": min(seconds[2:]),
        "first epoch / later": seconds[1] / min(seconds[2:]),
        "host bytes": resident_bytes() - before,
    }
    if device.type == "cuda":
        result["device bytes"] = free - torch.cuda.mem_get_info(device)[0]
    loader.close()
    return result


def start_in_own_process(name: str, options: argparse.Namespace) -> dict[str, Any]:
    flags = [f"--{key}={getattr(options, key)}" for key in ("box", "crop", "batch", "workers", "epoch_batches", "data")]
    command = [sys.executable, "-m", "benchmarks.loaders", "--start", name, *flags]
    answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(answer.stdout.splitlines()[-1])


def throughput(options: argparse.Namespace) -> dict[str, Any]:
    """Samples/s of every way to get batches, in interleaved trials."""
    sources = Sources(options)
    device, plan = sources.world.device, sources.plan()
    plain = f"plain DataLoader, {options.workers} processes"
    loaders = {name: sources.build(name) for name in available()}
    ways: dict[str, Generator[Any, None, None]] = {}
    if options.plain:
        ways[plain] = endless_plain(str(options.data), plan, options.batch, options.workers)
    if "dali-lowmem" in loaders:
        twins = twins_of(options.data)
        ways |= {
            ORIGINAL: endless_dali(
                twins, plan, options.batch, options.workers, device, original_operators, rotations(plan.samples)
            ),
            READER: endless_dali(twins, plan, options.batch, options.workers, device, reader_alone, {}),
        }
    ways |= {name: endless(loader) for name, loader in loaders.items()}
    measures: dict[str, Callable[[], float]] = {
        name: lambda batches=batches: delivered(  # type: ignore[misc]
            batches,
            options.batches,
            options.batch,
            device,
            options.settle,
            max(UNTIMED_BATCHES, 2 * options.workers + 2),
        )
        for name, batches in ways.items()
    }
    host = torch.device("cpu")
    measures["memory copy (bound)"] = lambda: copied(options.batch, options.crop, host, host)
    if device.type == "cuda":
        measures["copy to the device (bound)"] = lambda: copied(options.batch, options.crop, host, device)
        measures["copy on the device (bound)"] = lambda: copied(options.batch, options.crop, device, device)
    results = {name: summary(values) for name, values in interleaved(measures, options.trials).items()}
    for batches in ways.values():
        batches.close()
    for loader in loaders.values():
        loader.close()
    bound = "copy on the device (bound)" if device.type == "cuda" else "memory copy (bound)"
    for result in results.values():
        result["GB/s"] = result["median"] * sample_bytes(options) / 1e9
        if options.plain:
            result["ratio to plain"] = result["median"] / results[plain]["median"]
        if ORIGINAL in results:
            result["ratio to the original's operators"] = result["median"] / results[ORIGINAL]["median"]
        result["share of bound"] = result["median"] / results[bound]["median"]
    return results


def sample_bytes(options: argparse.Namespace) -> int:
    return 4 * sum(CHANNELS) * options.crop**3


def training(options: argparse.Namespace) -> dict[str, Any]:
    """Samples/s of whole training steps on each loader's batches, and on one batch again and again."""
    sources = Sources(options)
    device = sources.world.device
    name = options.step
    config = configs.load("config/UNet.yaml", name, {"data_size": options.crop, "local_batch_size": options.batch})
    network, loss = train.build_model(config), build_loss(config.loss, lambda_rho=config.lambda_rho)
    train.set_backends(config, device)
    step = train.build_step(config, sources.world, network, loss, EagerStep)
    fixed = SyntheticLoader(
        samples=options.batch * options.epoch_batches,
        crop=options.crop,
        channels=CHANNELS,
        batch_size=options.batch,
        drop_last=True,
        device=device,
    )
    loaders: dict[str, Loader] = {"synthetic": fixed, **{name: sources.build(name) for name in available()}}
    ways = {name: trained(step, endless(loader)) for name, loader in loaders.items()}
    measures: dict[str, Callable[[], float]] = {
        name: lambda steps=steps: delivered(steps, options.batches, options.batch, device, 0.0)  # type: ignore[misc]
        for name, steps in ways.items()
    }
    results = {name: summary(values) for name, values in interleaved(measures, options.trials).items()}
    for steps in ways.values():
        steps.close()
    for loader in loaders.values():
        loader.close()
    for result in results.values():
        result["share of synthetic"] = result["median"] / results["synthetic"]["median"]
    if device.type == "cuda":
        seconds = gather_seconds(sources, options)
        share = seconds * results["synthetic"]["median"] / options.batch
        results["gather kernel"] = {"seconds a batch": seconds, "share of a step": share}
    return results


def trained(step: Step, batches: Generator[Batch, None, None]) -> Generator[None, None, None]:
    for inputs, targets in batches:
        step(inputs, targets, 1e-4)
        yield


def gather_seconds(sources: Sources, options: argparse.Namespace) -> float:
    """The resident loader's time a batch with nothing else on the device: its kernels and their launches."""
    with closing(sources.build("resident")) as loader:
        return options.batch / delivered(endless(loader), options.batches, options.batch, sources.world.device, 0.0)


# --- telling -------------------------------------------------------------------------------------------------------


def draw(results: dict[str, Any], starts: dict[str, Any], path: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained", width_ratios=(2, 1))
    names = list(results)[::-1]
    medians = [results[name]["median"] for name in names]
    errors = [
        [median - results[name]["min"] for name, median in zip(names, medians, strict=True)],
        [results[name]["max"] - median for name, median in zip(names, medians, strict=True)],
    ]
    ours = [name in LOADERS for name in names]
    left.barh(names, medians, xerr=errors, color=["tab:blue" if own else "0.65" for own in ours], capsize=3)
    for place, (name, median) in enumerate(zip(names, medians, strict=True)):
        left.text(results[name]["max"], place, f"  {median:.0f}", va="center")
    left.set(xlabel="samples/s (median, range)", title=title, xlim=(0, 1.15 * max(r["max"] for r in results.values())))
    names = list(starts)[::-1]
    for offset, key, color in ((0.27, "start seconds", "0.65"), (0, "first epoch seconds", "tab:blue")):
        right.barh(np.arange(len(names)) + offset, [starts[name][key] for name in names], 0.27, color=color, label=key)
    right.barh(
        np.arange(len(names)) - 0.27,
        [starts[name]["later epoch seconds"] for name in names],
        0.27,
        color="tab:cyan",
        label="later epoch seconds",
    )
    right.set(yticks=range(len(names)), yticklabels=names, xlabel="seconds", title="from a cold page cache")
    right.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--box", type=int, default=512)
    parser.add_argument("--crop", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--workers", type=int, default=2, help="threads, or processes of the plain DataLoader")
    parser.add_argument("--batches", type=int, default=30, help="timed batches a trial")
    parser.add_argument("--epoch_batches", type=int, default=64, help="batches an epoch")
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--starts", type=int, default=3, help="starts of each loader; the median is told")
    parser.add_argument("--plain", action=argparse.BooleanOptionalAction, default=True, help="the DataLoader, too")
    parser.add_argument("--settle", type=float, default=SETTLE_SECONDS, help=argparse.SUPPRESS)
    parser.add_argument("--data", type=Path, help="HDF5 file (default: data/benchmark_<box>.h5, made if missing)")
    parser.add_argument("--step", metavar="CONFIG", nargs="?", const="bs64_opt", help="measure training steps, too")
    parser.add_argument("--start", choices=LOADERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.data = options.data or Path(f"data/benchmark_{options.box}.h5")
    if options.start:
        print(json.dumps(start(options.start, options)))
        return
    make_file(options.data, options.box)
    if "dali-lowmem" in available():
        twins_of(options.data)
    rounds = [{name: start_in_own_process(name, options) for name in available()} for _ in range(options.starts)]
    starts = {
        name: {key: statistics.median(each[name][key] for each in rounds) for key in rounds[0][name]}
        | {"trials": [each[name] for each in rounds]}
        for name in rounds[0]
    }
    results = throughput(options)
    for name, result in results.items():
        print(
            f"{name:<32} {result['median']:8.1f} samples/s ({result['min']:.1f} to {result['max']:.1f}), "
            f"{result['GB/s']:.2f} GB/s, {result['ratio to plain']:.1f}× plain, {result['share of bound']:.2f} of bound"
        )
    for name, told in starts.items():
        print(
            f"{name:<32} start {told['start seconds']:.1f} s, first epoch {told['first epoch seconds']:.2f} s, "
            f"later {told['later epoch seconds']:.2f} s ({told['first epoch / later']:.2f}×), "
            f"memory {told['host bytes'] / 2**30:.2f} GiB"
            + (f", device {told['device bytes'] / 2**30:.2f} GiB" if "device bytes" in told else "")
        )
    settings = {key: value for key, value in vars(options).items() if key not in ("data", "start", "settle", "step")}
    report: dict[str, Any] = {"settings": settings, "unit": "samples/s", "results": results, "starts": starts}
    if options.step:
        report["training"] = training(options)
        for name, result in report["training"].items():
            print(f"{name:<32} {json.dumps({k: v for k, v in result.items() if k != 'trials'})}")
    device = "" if sources_device() == "cpu" else "_gpu"
    saved = save(f"loaders{device}", report)
    box = open_volume(options.data, CHANNELS).box
    draw(results, starts, saved.with_suffix(".png"), f"{options.crop}³ crops of {box}³, batch {options.batch}")
    print(f"written: {saved}, {saved.with_suffix('.png')}")


def sources_device() -> str:
    return this_machine().device.type


if __name__ == "__main__":
    main()
