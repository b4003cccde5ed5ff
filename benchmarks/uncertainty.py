"""Standard deviations of predictions: which method describes the errors of the demo's networks at z = 3 best.

python -m benchmarks.uncertainty

Trains the networks of the study `forest` at z = 3, calibrates each method on their validation box, and compares them on
boxes of other seeds, redshifts and cells, for each network and for the mean of all. `constant` is a standard deviation
per channel, `density` one per bin of predicted density, `spread` that of `predict.py --uncertainty`. A log likelihood
is the mean over cells and channels in nats, of Gaussian and of Laplace errors, whose tails are wide.
"""

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributions import Laplace, Normal

from analysis.evaluation.statistics import COVERED
from analysis.inference.trained_network import InferenceOptions, TrainedNetwork
from analysis.inference.uncertainty import fit, predict_part
from benchmarks import common, study
from benchmarks.boxes import Boxes, spreads

SEEDS, SPREAD, ONE = "other seeds", "spread", {"held_out": {"grid": 96, "seeds": [21]}}
VOLUMES: dict[str, dict[str, Any]] = {SEEDS: {"held_out": {"grid": 96, "seeds": [21, 22]}}}
VOLUMES |= {f"z = {redshift:g}": {"redshift": redshift, **ONE} for redshift in (2.0, 4.0)}
VOLUMES |= {f"cells of {cell} Mpc/h": {"cell": cell, **ONE} for cell in (0.1, 0.25)}
BINS = 20  # of the predicted density, with equal numbers of cells
ENDS = {"all": (0.0, math.inf), "below 0.3": (0.0, 0.3), "0.3 to 3": (0.3, 3.0), "above 3": (3.0, math.inf)}  # / mean
QUANTITIES = {"density": slice(1), "velocity": slice(1, 4), "temperature": slice(4, 5)}  # their channels
LABELS = "68 %", "95 %", "slope"  # shares of errors within σ and 1.96 σ; slope of log rms error over log rms σ


def predicted(networks: Sequence[Path], file: str, runs: Path) -> list[torch.Tensor]:
    """Means and variances of predictions of 8 reflections, and the target, [C, x, y, z]: every second cell per axis."""
    path = runs / "uncertainty" / f"{'_'.join(path.parents[1].name for path in networks)}_{Path(file).stem}.pt"
    if not path.exists():
        world, options = common.this_machine(), InferenceOptions(symmetries=8)
        trained = [TrainedNetwork.load(network, world.device) for network in networks]
        path.parent.mkdir(parents=True, exist_ok=True)
        with common.logged(f"predicting {path.stem}"):
            torch.save([values.cpu() for values in predict_part(trained, file, options, world)], path)
    return [values[:, ::2, ::2, ::2].contiguous() for values in torch.load(path, weights_only=True)]


def deviations(known: Sequence[torch.Tensor], means: torch.Tensor, variances: torch.Tensor) -> dict[str, torch.Tensor]:
    """The standard deviations of each method, fitted to the errors on one box."""
    squares, density = (known[0] - known[2]).square(), known[0][0]
    edges = density.quantile(torch.linspace(0, 1, BINS + 1)[1:-1])
    bins, places = torch.bucketize(density, edges), torch.bucketize(means[0], edges)

    def by_density(values: torch.Tensor) -> torch.Tensor:
        return torch.stack([values[:, bins == number].mean(dim=1) for number in range(BINS)], dim=1)[:, places]

    factors, floors = (part.float().view(-1, 1, 1, 1) for part in fit(squares.flatten(1), known[1].flatten(1)))
    spread = factors * variances + floors
    methods = {"constant": squares.mean(dim=(1, 2, 3), keepdim=True).expand_as(means)}
    methods |= {"density": by_density(squares), SPREAD: spread}
    methods["spread and density"] = spread * by_density(squares / (factors * known[1] + floors))
    return {name: values.sqrt() for name, values in methods.items()}


def likelihoods(deviation: torch.Tensor, errors: torch.Tensor) -> dict[str, float]:
    laplace = Laplace(0.0, deviation / 2**0.5)  # of the same standard deviation
    values = {"Gaussian": Normal(0.0, deviation).log_prob(errors), "Laplace": laplace.log_prob(errors)}
    parts = {"": slice(None)} | {f", {quantity}": channels for quantity, channels in QUANTITIES.items()}
    return {f"{name}{part}": float(values[name][parts[part]].mean()) for name, part in itertools.product(values, parts)}


def coverages(density: torch.Tensor, deviation: torch.Tensor, errors: torch.Tensor) -> dict[str, float]:
    """Shares of errors within σ and 1.96 σ, and the slope of log rms error over log rms σ, by density and channel."""
    result: dict[str, float] = {}
    for (name, (low, high)), (quantity, channels) in itertools.product(ENDS.items(), QUANTITIES.items()):
        cells = (density >= low) & (density < high)
        sigma, sizes = deviation[channels, cells].flatten(), errors[channels, cells].abs().flatten()
        by_sigma = sigma.argsort().tensor_split(BINS)
        x, y = ([float(part[place].square().mean().log()) for place in by_sigma] for part in (sigma, sizes))
        shares = [float((sizes <= limit * sigma).float().mean()) for limit in COVERED]
        values = zip(LABELS, (*shares, statistics.linear_regression(x, y).slope), strict=True)
        result |= {f"{name}, {quantity}, {label}": value for label, value in values}
    return result


def report(result: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """The likelihoods of all methods, and the coverage of SPREAD by density in two tables."""

    def row(names: Sequence[str], values: Iterable[Mapping[str, Any]]) -> list[str]:
        return [*names, *(common.plus_minus(value, ".2f") for value in values)]

    columns = list(itertools.product(("Gaussian", "Laplace"), next(iter(result.values()))))
    scores = [row([name], (methods[method][score] for score, method in columns)) for name, methods in result.items()]
    keys = [f"{quantity}, {label}" for label in LABELS for quantity in QUANTITIES]
    covered: tuple[list[list[str]], list[list[str]]] = [], []
    for name, ends in itertools.product(result, ENDS):
        place = name != SEEDS and ends != next(iter(ENDS))  # the second table is for readers of the documentation
        covered[place].append(row([name, ends], (result[name][SPREAD][f"{ends}, {key}"] for key in keys)))
    tables = [common.table(["boxes", *map(", ".join, columns)], scores)]
    tables += [common.table(["boxes", "predicted density", *keys], rows, left=2) for rows in covered]
    return "\n\n".join(tables)


def main(argv: Sequence[str] | None = None) -> None:
    options = common.Parser(__doc__, seeds=3, runs=common.RUNS).parse_in_repository(argv)
    runs, forest = options.runs, study.STUDIES["forest"]
    training, simulated = study.trained("forest", options.seeds, runs, 1), Boxes(forest.simulation, VOLUMES, runs)
    checkpoints = [run.checkpoint for run in training]
    density = TrainedNetwork.load(checkpoints[0], common.this_machine().device).channels[1][0]
    values: dict[str, dict[str, list[dict[str, float]]]] = {}
    for networks in (*([checkpoint] for checkpoint in checkpoints), checkpoints):
        known = predicted(networks, str(training[0].config.val_path), runs)
        for name in VOLUMES if len(networks) == 1 else [SEEDS]:
            by_method = values.setdefault(name if len(networks) == 1 else f"{name}, mean of the networks", {})
            for file in simulated.files(name, "held_out"):
                means, variances, target = predicted(networks, file, runs)
                errors, predicted_density = means - target, density.to_physical(means[0])
                for method, deviation in deviations(known, means, variances).items():
                    measured = likelihoods(deviation, errors)
                    measured |= coverages(predicted_density, deviation, errors) if method == SPREAD else {}
                    by_method.setdefault(method, []).append(measured)
    result = {name: {method: spreads(part) for method, part in parts.items()} for name, parts in values.items()}
    common.publish("uncertainty", options, {"boxes": result}, report(result))


if __name__ == "__main__":
    common.run(main)
