"""Trained networks, predictions and records of runs as Python objects, for notebooks and scripts; docs/notebook.md."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from analysis.inference.prediction_file import BLOCK_WINDOWS
from analysis.inference.trained_network import InferenceOptions, TrainedNetwork, build_predictor
from utils.config.channels import DENSITY_UNIT, SIDES, Channels, check_physical_units
from utils.distributed.devices import choose_device
from utils.distributed.launch import Launch
from utils.distributed.world import World
from utils.errors import UserError
from utils.run.directory import RunDirectory
from utils.volumes.attributes import DENSITY_FLOOR, FLOOR
from utils.volumes.hdf5 import ArrayReader, FieldReader


def load(checkpoint: str | Path, device: str = "auto", calibrated: bool = True) -> TrainedNetwork:
    """The network of a run (its best checkpoint), of a checkpoint's directory or of a weights.pt.

    `calibrated`: filter and multiply the gas density as the checkpoint states, like predict.py.
    """
    return TrainedNetwork.load(checkpoint, choose_device(device, 0), calibrated=calibrated)


def predict(
    network: TrainedNetwork,
    source: str | Path | Mapping[str, np.ndarray] | np.ndarray,
    cells: Sequence[slice] = (slice(None),) * 3,
    physical: bool = True,
    attributes: Mapping[str, Any] | None = None,
    **options: Any,
) -> dict[str, np.ndarray]:
    """The prediction in `cells` of a box, by the name of the channel, arrays [x, y, z] float32.

    source: an HDF5 file; or physical fields [X, Y, Z] by the names of the network's inputs, in their units; or channel
    values [C, X, Y, Z]. attributes: of arrays, those that a file would have (redshift, box_size_mpc_h, …).
    physical: in the channel's unit; False: channel values. options: window, overlap, batch_size, precision, symmetries
    and not_periodic of predict.py, which gives a whole box the same bits.
    """
    targets = network.channels[1]
    if any(axis.step not in (None, 1) for axis in cells):
        raise UserError("cells have a step; take it from the result: gas[name][::2]")
    if physical:
        check_physical_units(targets, "give physical=False")
    device = next(network.network.parameters()).device
    with closing(_reader(network, source, attributes or {})) as reader:
        predictor = build_predictor(network, reader, InferenceOptions(**options), World(Launch("notebook"), device))
        ranges = [range(side)[axis] for axis, side in zip(cells, reader.shape, strict=True)]
        values = np.empty((len(targets), *map(len, ranges)), np.float32)
        for block in predictor.grid.split_blocks(BLOCK_WINDOWS * predictor.grid.x.window, 1, predictor.most_cells(1)):
            pairs = [*zip(block, ranges, strict=True)]
            x, y, z = (slice(max(part.start, ends.start), min(part.stop, ends.stop)) for part, ends in pairs)
            if all(axis.start < axis.stop for axis in (x, y, z)):
                places = zip((x, y, z), ranges, strict=True)
                inside = (slice(axis.start - ends.start, axis.stop - ends.start) for axis, ends in places)
                place = slice(None), *inside
                values[place] = predictor.predict_box((x, y, z)).predicted.cpu().numpy()
    named = zip(targets, values, strict=True)
    return {channel.name: channel.to_physical(part) if physical else part for channel, part in named}


def _reader(network: TrainedNetwork, source: Any, attributes: Mapping[str, Any]) -> FieldReader:
    inputs = network.channels[0]
    if isinstance(source, str | Path):
        return network.open_field(str(source), "inputs")
    if isinstance(source, Mapping):
        if missing := [channel.name for channel in inputs if channel.name not in source]:
            raise UserError(f"the arrays lack {', '.join(missing)}; give each input of the network by its name")
        check_physical_units(inputs, "give channel values [C, X, Y, Z]")
        floor = float(network.known.simulation.get(FLOOR, DENSITY_FLOOR))
        fields = []
        for channel in inputs:
            field = np.asarray(source[channel.name], np.float32)
            field = np.maximum(field, np.float32(floor)) if channel.unit == DENSITY_UNIT else field
            fields.append(channel.from_physical(field))
        if len({field.shape for field in fields}) > 1:
            raise UserError(f"the arrays have different shapes: {', '.join(str(field.shape) for field in fields)}")
        source = np.stack(fields)
    return ArrayReader(np.asarray(source), len(inputs), attributes)


def fields(path: str | Path, dataset: str, channels: Channels) -> dict[str, np.ndarray]:
    """Physical values [X, Y, Z] of `channels` by name; transforms that the file states precede those of `channels`."""
    with closing(FieldReader(str(path), dataset, len(channels))) as reader:
        values, names = reader.box(*(slice(None),) * 3), [channel.name for channel in channels]
        stated = [*filter(None, map(reader.channels, SIDES))]
    channels = next((found for found in stated if [channel.name for channel in found] == names), channels)
    return {channel.name: channel.to_physical(part) for channel, part in zip(channels, values, strict=True)}


def metrics(run: str | Path) -> Any:
    """The scalars of a run's metrics.jsonl as a pandas.DataFrame, one row per step."""
    import pandas  # optional

    records = RunDirectory(Path(run)).read_metrics()
    return pandas.DataFrame(records).groupby("step").last() if records else pandas.DataFrame()


def evaluation(path: str | Path) -> dict[str, np.ndarray]:
    """The arrays of an evaluation by name, as "spectra/density/k": of evaluate.py's directory, or a run's last one."""
    run, file = RunDirectory(Path(path)), Path(path) / "evaluation.npz"
    if steps := run.evaluated_steps():
        file = run.evaluation(steps[-1])
    if not file.is_file():
        raise UserError(f"{path} has no evaluation; give the directory of a run with some, or one of evaluate.py")
    with np.load(file, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files if name != "text"}
