"""Packs a trained network into one file that needs PyTorch and nothing of this project, and checks the file."""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.fx import GraphModule

from analysis.inference.trained_network import TrainedNetwork
from utils.config.channels import DENSITY_UNIT, Channels, check_physical_units
from utils.errors import UserError
from utils.files import atomic_write, to_json
from utils.volumes.attributes import CONDITION_UNITS, DENSITY_FLOOR, FLOOR

METADATA = "metadata.json"
FORMAT = 1  # of inputs, outputs and metadata: raise it if programs that use older files would fail or go wrong
KNOWN = ("simulation", "input_statistics", "code")  # what a file takes over from the checkpoint, if it states it
# Between file and network, relative to a channel's largest value. Rounding a density's logarithm to float32 gives 1e-6.
LARGEST_DIFFERENCE = 1e-5


class PhysicalNetwork(nn.Module):
    """[N, C, X, Y, Z] -> [N, K, X, Y, Z] in the units of `inputs` and `targets`; `network` maps their channels.

    Inputs below their number in `floors`, which is above zero, are raised to it; None: as they are.
    """

    def __init__(self, network: nn.Module, inputs: Channels, targets: Channels, floors: Sequence[float | None]) -> None:
        super().__init__()
        self.network, self.inputs, self.targets, self.floors = network, inputs, targets, floors

    def forward(self, fields: Tensor, conditions: Tensor | None = None) -> Tensor:
        inputs = zip(self.inputs, self.floors, fields.split(1, dim=1), strict=True)
        raised = [(channel, values if floor is None else values.clamp(min=floor)) for channel, floor, values in inputs]
        channels = torch.cat([channel.from_physical(values) for channel, values in raised], dim=1)
        predicted = self.network(channels) if conditions is None else self.network(channels, conditions)
        targets = zip(self.targets, predicted.split(1, dim=1), strict=True)
        return torch.cat([channel.to_physical(values) for channel, values in targets], dim=1)


@dataclass(frozen=True)
class ExportedNetwork:
    module: nn.Module  # the network, in physical units between the transforms of its channels
    inputs: Channels
    targets: Channels
    divisor: int  # X, Y and Z are multiples of it
    density_floor: float | None  # smallest density that the transform accepts
    conditions: Mapping[str, Sequence[float]]  # names and trained ranges of the scalars that the network also takes
    units: str  # "physical", or "channel": without transforms

    @classmethod
    def of(cls, trained: TrainedNetwork, units: str) -> "ExportedNetwork":
        """The network to export in `units` "physical" or "channel"; UserError if the physical values are unknown."""
        (inputs, targets), module, floor = trained.channels, trained.network, None
        if units == "physical":
            check_physical_units((*inputs, *targets), "give --units channel")
            floor = float(trained.known.simulation.get(FLOOR, DENSITY_FLOOR))  # of the training data
            floors = [floor if channel.unit == DENSITY_UNIT and channel.is_log else None for channel in inputs]
            module = PhysicalNetwork(module, inputs, targets, floors).eval()
        divisor, network = trained.config.window_multiple, trained.config.network
        conditions = {str(key): ends for key, ends in zip(network.conditions, network.condition_ranges, strict=True)}
        return cls(module, inputs, targets, divisor, floor, conditions, units)

    def describe(self, output: str) -> dict[str, Any]:
        """Inputs, outputs and usage of the file, as JSON values."""
        sizes = f"N is any number; X, Y and Z are multiples of {self.divisor}"
        floor = {} if self.density_floor is None else {"density_floor_of_mean": self.density_floor}
        argument, shape, described = "", "", {}
        if self.conditions:
            argument, shape = ", conditions", f", [N, {len(self.conditions)}]"
            units = ((name, CONDITION_UNITS.get(name, "1"), ends) for name, ends in self.conditions.items())
            ranges = [{"name": name, "unit": unit, "trained_range": [*ends]} for name, unit, ends in units]
            described = {"conditions": {"shape": shape.lstrip(", "), "dtype": "float32", "columns": ranges}}
        return {
            "format": FORMAT,
            "made_by": "export.py: a network that predicts gas from dark matter",
            "how_to_call": [
                "import torch",
                f'predict = torch.export.load("{output}").module()',
                f"gas = predict(dark_matter{argument})  # {_shape(self.inputs)}{shape} -> {_shape(self.targets)}",
            ],
            "units": self.units,
            "input": self._describe_side(self.inputs, sizes=sizes, multiple_of=self.divisor, **floor),
            **described,
            "output": self._describe_side(self.targets),
        }

    def _describe_side(self, channels: Channels, **more: Any) -> dict[str, Any]:
        key = "unit" if self.units == "physical" else "value"
        values = [channel.unit if key == "unit" else channel.formula() for channel in channels]
        described = [{"name": channel.name, key: value} for channel, value in zip(channels, values, strict=True)]
        return {"shape": _shape(channels), "dtype": "float32", **more, "channels": described}

    def write(self, target: Path, metadata: dict[str, Any]) -> str:
        """Writes the file and compares it with the network; returns a sentence. UserError, and no file, on failure."""
        self.module.requires_grad_(False)
        with atomic_write([target]) as (partial,):
            partial.write_bytes(self._pack(to_json(metadata)))
            with open(partial, "rb") as file:  # torch.export.load refuses the partial file's name
                difference = self.largest_difference(torch.export.load(file).module())
            if not difference <= LARGEST_DIFFERENCE:  # also refuses NaN
                reason = f"its max relative difference from the network is {difference:.3g}"
                raise UserError(f"{target} is not written, because {reason}; try another checkpoint")
        given = f" with conditions [N, {len(self.conditions)}]" if self.conditions else ""
        sizes = f"in {self.units} units, X, Y and Z multiples of {self.divisor}"
        written = f"wrote {target}: {_shape(self.inputs)}{given} -> {_shape(self.targets)} {sizes}"
        return f"{written}; max relative difference from the network: {difference:.2g}"

    def _pack(self, metadata: str) -> bytes:
        """A torch.export program for batches and boxes of any size, as the bytes of a .pt2 file."""
        cells = self.divisor
        # Not 1: sizes of 1 in the example would become constants.
        example = torch.ones(2, len(self.inputs), 2 * cells, 2 * cells, 2 * cells)
        sizes = {axis: cells * Dim(f"blocks_{name}", min=1) for axis, name in ((2, "x"), (3, "y"), (4, "z"))}
        batch = Dim("batch", min=1)
        conditions = [torch.ones(2, len(self.conditions))] if self.conditions else []
        dynamic = ({0: batch, **sizes}, *({0: batch} for _ in conditions))
        program = torch.export.export(self.module, (example, *conditions), dynamic_shapes=dynamic)
        # Removes assumptions that no operator here depends on: that no size is 1 (largest_difference has such sizes),
        # and that all tensors are on a CPU. The sizes above are checked separately.
        assumptions = (torch.ops.aten._assert_scalar.default, torch.ops.aten._assert_tensor_metadata.default)
        for node in list(program.graph.nodes):
            if node.target in assumptions:
                program.graph.erase_node(node)
        for part in program.graph_module.modules():  # also branches, such as those of torch.cond in one's own network
            for node in part.graph.nodes if isinstance(part, GraphModule) else ():
                # Not the stack traces, which name the author's directories.
                node.meta = {key: node.meta[key] for key in node.meta.keys() & {"val"}}
        program.graph.eliminate_dead_code()
        program.graph_module.recompile()
        program.example_inputs = None  # it would also be written
        buffer = io.BytesIO()
        torch.export.save(program, buffer, extra_files={METADATA: metadata})
        return buffer.getvalue()

    def largest_difference(self, written: Callable[..., Tensor]) -> float:
        """Largest difference between file and network, relative to a channel's largest value; NaN if either is NaN."""
        cells = self.divisor
        generator = torch.Generator().manual_seed(0)
        # Sizes that differ from the example's; one block is the smallest.
        fields = 0.3 * torch.randn(1, len(self.inputs), cells, 2 * cells, cells, generator=generator)
        if self.units == "physical":
            channels = zip(self.inputs, fields.unbind(1), strict=True)
            fields = torch.stack([channel.to_physical(values) for channel, values in channels], dim=1)
            fields[:, [channel.unit == DENSITY_UNIT for channel in self.inputs], :2] = 0  # empty cells
        arguments = [fields]
        if self.conditions:
            low, high = torch.tensor([*self.conditions.values()], dtype=torch.float32).unbind(1)
            arguments.append(low + (high - low) * torch.rand(1, len(low), generator=generator))
        with torch.inference_mode():
            exported, expected = written(*arguments), self.module(*arguments)
            axes = (0, 2, 3, 4)
            # torch's max, unlike Python's, propagates NaN.
            return float(((exported - expected).abs().amax(axes) / expected.abs().amax(axes)).max())


def without_directories(value: Any) -> Any:
    """The value with paths reduced to their last part: directories name the author and the machine."""
    if isinstance(value, dict):
        return {key: without_directories(part) for key, part in value.items()}
    if isinstance(value, list):
        return [without_directories(part) for part in value]
    return Path(value).name if isinstance(value, str) and "/" in value else value


def _shape(channels: Channels) -> str:
    return f"[N, {len(channels)}, X, Y, Z]"
