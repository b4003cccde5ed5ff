"""Operations and bytes of the optimizers at full size, counted without a GPU.

python -m benchmarks.optimizer_cost

The parameters of `base`'s network are given to each optimizer without data. Operations are those of its matrix
products: each update's, and a renewal's over `precondition_frequency`. Work that ranks share is divided among them,
and the one with the most work counts. Shares are of all operations of a rank's step, with the forward and backward pass
of --batch samples. Bytes are those of gradient norm and update (benchmarks/traffic.py), without a renewal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import common, traffic
from utils import config as configs
from utils.config import Config
from utils.config.sections import OptimizerConfig
from utils.errors import one_line_errors
from utils.optim.adam import is_weight
from utils.optim.soap import outer_product, owners, rotate, sides_with_basis, weight_sides
from utils.steps import build
from utils.steps.flops import training_flops

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adam": {"name": "adam"},
    "soap": {"name": "soap"},
    "soap, limit 2048": {"name": "soap", "max_precondition_dim": 2048},
    "soap, merge_dims none": {"name": "soap", "merge_dims": "none"},
    "soap, merge_dims rest": {"name": "soap", "merge_dims": "rest"},
    "soap, merge_dims rest, limit 2048": {"name": "soap", "merge_dims": "rest", "max_precondition_dim": 2048},
}
RANKS = (1, 4)
QR = 8 / 3  # n³ operations: a Householder decomposition, and its orthogonal factor


def operations(function: Callable[..., object], *arguments: object) -> int:
    with FlopCounterMode(display=False) as counter:
        function(*arguments)
    return counter.get_total_flops()


def soap_operations(options: OptimizerConfig, weights: Mapping[str, nn.Parameter], ranks: int) -> float:
    """Operations per update of the rank with the most work."""
    everywhere, cubes, pieces = 0.0, [], []
    for weight in weights.values():
        sides = weight_sides(weight.shape, options.merge_dims)
        flat = torch.empty(weight.numel(), device="meta")
        numbers = sides_with_basis(sides, options.max_precondition_dim)
        bases = {n: torch.empty(sides[n], sides[n], device="meta") for n in numbers}
        # The gradient to the bases and the direction back; in a renewal the first moment, and the product of the bases.
        rotation = operations(rotate, flat, sides, bases)
        everywhere += 2 * rotation
        everywhere += (rotation + sum(2 * sides[n] ** 3 for n in bases)) / options.precondition_frequency
        for n in bases:
            followed = operations(outer_product, flat, sides, n)
            cubes.append(sides[n] ** 3)
            pieces.append(followed + (2 + QR) * sides[n] ** 3 / options.precondition_frequency)
    return everywhere + busiest(pieces, owners(cubes, ranks), ranks)


def busiest(pieces: list[float] | list[int], owners: list[int], ranks: int) -> float:
    return max(sum(each for each, owner in zip(pieces, owners, strict=True) if owner == rank) for rank in range(ranks))


def measure(config: Config, choice: Mapping[str, Any], training: float) -> dict[str, Any]:
    """`training`: operations of a rank's forward and backward pass."""
    options = OptimizerConfig(**choice)
    weights = {name: each for name, each in build.network(config).named_parameters() if is_weight(name, each)}
    result: dict[str, Any] = {}
    for ranks in RANKS:
        own = soap_operations(options, weights, ranks) if options.name == "soap" else 0.0
        result[f"{ranks} ranks"] = {"operations": own, "share": own / (own + training)}
    count = traffic.count_step(config.model_copy(update={"optimizer": options}))
    return {**result, "gigabytes": count.total("optimizer") / 1e9}


def main() -> None:
    parser = common.Parser(__doc__)
    parser.add_integers(batch=64)
    with one_line_errors():
        options = parser.parse_args()
        changes = {**traffic.FASTEST, "device": "cpu", "local_batch_size": options.batch}
        config = configs.load(common.YAML, "base", changes).for_world(1)
        network = build.network(config)
        training = training_flops(network, traffic.batch_of(config).inputs) * options.batch
        found = {name: measure(config, choice, training) for name, choice in OPTIMIZERS.items()}
        heads = ["optimizer", *(f"TFLOP, {n} rank{'s' * (n > 1)} | % of the step" for n in RANKS), "GB"]
        rows = []
        for name, values in found.items():
            cells = [name]
            for ranks in RANKS:
                own = values[f"{ranks} ranks"]
                cells += [f"{own['operations'] / 1e12:.3f}", f"{100 * own['share']:.1f}"]
            rows.append([*cells, f"{values['gigabytes']:.2f}"])
        text = common.table([cell for head in heads for cell in head.split(" | ")], rows)
        parameters = sum(parameter.numel() for parameter in network.parameters())
        result = {"settings": common.settings(options), "parameters": parameters, "training": training}
        common.publish("optimizer_cost", {**result, "optimizers": found}, options.output, text)


if __name__ == "__main__":
    main()
