"""Evaluates one predicted volume, from a network or from a file, against the true fields."""

import logging
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from analysis.evaluation.base import LOG_DENSITY, Compared, converted
from analysis.evaluation.comparison import complete_fields, volume_statistics
from analysis.evaluation.results import Results
from analysis.evaluation.statistics import PhaseDiagram
from analysis.inference.layouts import DEVIATION, INPUT, OUTPUT
from analysis.inference.sliding_window import SlidingWindowPredictor
from analysis.lyman_alpha.forest import FluxStatistics, KnownFlux
from analysis.lyman_alpha.setup import FluxOptions, FluxSetup, GasFit
from analysis.slabs import ReadPlanes, SlabFields, Slabs
from utils.config import Config
from utils.config.channels import DARK_MATTER, GAS, QUANTITIES, SIDES, Side, density_place
from utils.distributed.world import World
from utils.errors import UserError
from utils.files import sample_digest
from utils.log import warn_once
from utils.progress import Progress
from utils.volumes.attributes import differences_of, file_channels, resolve_channels
from utils.volumes.cross_check import DENSITIES, OFFSET, START_BYTES, CrossCheck, cross_check
from utils.volumes.hdf5 import FieldReader, Volume, open_field, open_file, reading
from utils.volumes.values import check_sample

log = logging.getLogger(__name__)

MODERATE, HOT = 0.5, 5.0  # log10 of density / mean and of K: limits of the gas that follows a power law
NOT_PERIODIC = "the volume is not periodic, but spectra, divergence and flux assume it: they are inaccurate near faces"


def evaluate_fields(
    config: Config,
    volume: Volume | FieldReader,
    fields: SlabFields,
    slabs: Slabs,
    metadata: Mapping[str, Any],
    options: FluxOptions | None = None,
    known: KnownFlux | None = None,
    deviation: ReadPlanes | None = None,
) -> Results:
    """Compares a predicted volume with the target; every rank calls it and returns the same results.

    The flux is included if all that it needs is known. `options` None: the config's; `known`: of earlier evaluations.
    """
    options = options or FluxOptions(flux=config.evaluation.flux, sightlines=config.evaluation.sightlines)
    setup = FluxSetup.of(volume, config, options)
    if setup and options.fitted_on:
        setup = replace(setup, fit=fit_gas(options.fitted_on, config, slabs.world))
    slabs.world.pulse.enter("evaluation")
    compared = Compared(*config.volume_channels, volume.cell, fields, slabs, deviation)
    results = volume_statistics(compared, metadata)
    return replace(results, flux=FluxStatistics(setup, slabs, known).results(fields)) if setup else results


def read_cells(path: str, field: Any, *cells: slice) -> np.ndarray:
    """Some cells of a field [C, X, Y, Z] of the volume in this file."""
    with reading(path):
        return np.asarray(field[cells])


def config_of_files(inputs: str, prediction: str) -> Config:
    """The defaults, with the channels that the files state, else those of published data with as many channels."""
    predicted, channels = FieldReader(prediction, OUTPUT, None), dict[Side, list[dict[str, Any]]]()
    readers: dict[Side, list[FieldReader]] = {"inputs": [FieldReader(inputs, INPUT, None)]}
    readers["targets"] = [predicted, FieldReader(inputs, OUTPUT, None)]
    for side, fields in readers.items():
        stated, count = {field.path: field.channels(side) for field in fields}, fields[0].values.shape[0]
        # Earlier predicted files state the transforms of both sides as attributes of the file.
        given = file_channels(side, count, predicted.attributes, None) or []
        known = resolve_channels(side, count, given, stated)
        if any(stated.values()) or count in QUANTITIES[side]:
            channels[side] = [asdict(channel) for channel in known]
    return Config.model_validate({"channels": channels})


class VolumeFields:
    """The open fields of one volume: inputs, true targets and, if it is stored in a file, the prediction."""

    def __init__(self, path: str, prediction: str | None, config: Config) -> None:
        """Opens both files; UserError if their shapes or channels differ, or if samples of their values have faults."""
        self.config, self._whose = config, prediction or "the network"
        self.inputs = self._open("inputs", path, config.dataset_names[0])
        self.target = self._open("targets", path, config.dataset_names[1])
        self.prediction = self._open("targets", prediction, OUTPUT) if prediction else None
        self.deviation = None
        if prediction:
            with reading(prediction), open_file(prediction) as file:
                has_deviation = DEVIATION in file
            self.deviation = self._open("targets", prediction, DEVIATION) if has_deviation else None
        self._all = [self.inputs, self.target, *filter(None, (self.prediction, self.deviation))]
        shape = self.inputs.shape
        for output in self._all[1:]:
            if output.shape != shape:
                raise UserError(f"{OUTPUT} of {output.path} has {output.shape} cells, but {INPUT} of {path} {shape}")
        if self.prediction:
            stated = []
            for field in (self.prediction, self.inputs):
                phases = {key: str(value) for key, value in field.attributes.items() if key in ("seed", "paired")}
                stated.append({**field.simulation, **phases})
            if differences := differences_of(*stated):
                fault = f"{prediction} is a prediction of another box than {path}: {differences}"
                raise UserError(f"{fault}; give the files of one box")
            source = Path(str(self.prediction.attributes.get("input", path)))
            if source.name != Path(path).name or (source.exists() and not source.samefile(path)):
                log.warning("%s was predicted from %s, not from %s", prediction, source, path)
            elif self.prediction.attributes.get("input_digest", "") not in ("", sample_digest(self.inputs.file)):
                log.warning("%s has changed since %s was predicted from it; predict it again", path, prediction)
        # Nothing is known about the run that made a stored prediction: it may have allowed physical values.
        for field in self._all:
            check_sample(field.path, field.name, field.values, config.allow_physical_values or prediction is not None)

    def _open(self, side: Side, path: str, name: str) -> FieldReader:
        return open_field(path, name, side, self.config.volume_channels[SIDES.index(side)], self._whose)

    @property
    def periodic(self) -> bool:
        """False if one of the files says that it is not."""
        return all(field.periodic for field in self._all)

    def evaluate(
        self, predictor: SlidingWindowPredictor | None, metadata: Mapping[str, Any], world: World, options: FluxOptions
    ) -> Results:
        """Evaluates the predictor's volume, or the stored one without a predictor; every rank calls it."""
        slabs, metadata = Slabs(self.inputs.shape, world), {**metadata, "warnings": self._cross_check(world)}
        if predictor is None:
            assert self.prediction is not None
            predicted = slabs.reader(self.prediction.planes)
        else:
            count, pulse = predictor.window_count(), world.pulse
            with Progress("predicting", count, "windows") as bar, pulse.using(show=bar.advance):
                predicted = slabs.stored(predictor.predict_planes(slabs))
        fields = SlabFields(slabs.reader(self.inputs.planes), predicted, slabs.reader(self.target.planes))
        deviation = slabs.reader(self.deviation.planes) if self.deviation else None
        return evaluate_fields(self.config, self.inputs, fields, slabs, metadata, options, deviation=deviation)

    def _cross_check(self, world: World) -> list[str]:
        """Logs the cross-check; returns its warnings, also that a stored prediction seems to be of another box."""
        if self.config.allow_physical_values:
            return []
        gases, known = filter(None, (self.target, self.prediction)), self.config.volume_channels
        found = [cross_check(self.inputs, [self.inputs.values, gas.values], known, world, START_BYTES) for gas in gases]
        of_other_box = [line for line in found[-1].warnings if DENSITIES in line or OFFSET in line]
        predicted = [f"the prediction of {line}" for line in of_other_box] if self.prediction else []
        CrossCheck(found[0].volume, found[0].values, warnings := [*found[0].warnings, *predicted]).log()
        return warnings

    def close(self) -> None:
        for field in self._all:
            field.close()


def open_fitted(path: str, config: Config, evaluated: FieldReader | None = None) -> VolumeFields:
    """The volume of `--fitted_on`; UserError if it cannot be used, a warning if it does not suit the evaluated one."""
    try:
        source = VolumeFields(path, None, config)
    except UserError as error:
        raise UserError(f"fitted_on: {error}") from None
    if source.inputs.cell is None:
        raise UserError(f"fitted_on: {path} does not state box_size_mpc_h")
    if density_place(config.volume_channels[0], DARK_MATTER) is None:
        raise UserError(f"fitted_on: the inputs lack {DARK_MATTER}density in physical units; do not give it")
    if evaluated and Path(path).samefile(evaluated.path):
        warn_once(f"fitted_on: {path} is the evaluated volume, whose own gas the baselines then know")
    elif evaluated and (differences := differences_of(source.inputs.simulation, evaluated.simulation)):
        warn_once(f"fitted_on: {path} does not suit {evaluated.path}: {differences}")
    return source


def fit_gas(path: str, config: Config, world: World) -> GasFit:
    """Measures the relations of gas to dark matter in a volume; every rank calls it."""
    with world.raise_together():
        source = open_fitted(path, config)
    slabs = Slabs(source.inputs.shape, world)
    inputs, target = (slabs.reader(field.planes) for field in (source.inputs, source.target))

    sources, targets = config.volume_channels
    dark, gas = density_place(sources, DARK_MATTER), density_place(targets, GAS)
    assert dark is not None  # see open_fitted
    assert gas is not None  # see FluxSetup

    def copied(channels: slice, planes: slice) -> Tensor:
        values = target(slice(None), planes)
        values[gas] = converted(inputs(slice(dark, dark + 1), planes)[0], sources[dark], targets[gas])
        return values[channels]

    with closing(source):
        fields = SlabFields(inputs, copied, target)
        compared = Compared(sources, targets, source.inputs.cell, fields, slabs)
        spectrum, diagram = complete_fields(compared)["spectra"][LOG_DENSITY], PhaseDiagram.compute(compared)
    assert diagram is not None  # see FluxSetup
    edges = diagram.density_edges, diagram.temperature_edges
    density, kelvin = np.meshgrid(*((ends[1:] + ends[:-1]) / 2 for ends in edges), indexing="ij")
    used = (np.abs(density) < MODERATE) & (kelvin < HOT)
    slope, level = np.polyfit(density[used], kelvin[used], 1, w=np.sqrt(diagram.target[used]))
    return GasFit(float(10**level), float(1 + slope), spectrum.k, spectrum.cross / spectrum.predicted)
