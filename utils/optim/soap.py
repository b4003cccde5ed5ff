"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner, for each weight.

Source: Vyas et al. 2024, "SOAP: Improving and Stabilizing Shampoo using Adam", arXiv:2409.11321, algorithm 3. `Soap`
holds the state and its division among ranks; `_update` and `_renew_bases` are the algorithm, and the functions below
the class are its steps, in its order.
"""

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from utils.config.sections import OptimizerConfig
from utils.optim.adam_by_weight import AdamByWeight, Group, LearningRate, Parameters, State, adam_directions

# The decomposition of a small matrix keeps a few multiprocessors busy: this many run at a time on a GPU.
STREAMS = 8
LONGEST_SIDE = 512  # with a basis


def weight_sides(shape: Sequence[int]) -> tuple[int, ...]:
    """The view of a weight: [first, second, all cells of the kernel]."""
    return (*shape[:2], math.prod(shape[2:])) if shape[2:] else tuple(shape)


def sides_with_basis(sides: Sequence[int], options: OptimizerConfig) -> list[int]:
    """The numbers of the sides that have a basis: of a large convolution those of the kernel's cells only."""
    numbers = [number for number, size in enumerate(sides) if 1 < size <= LONGEST_SIDE]
    cells = [number for number in numbers if number >= 2]  # after the two of the channels
    return cells if cells and math.prod(sides) > options.max_precondition_size else numbers


def owners(costs: Sequence[float], ranks: int) -> list[int]:
    """The rank that does each piece of work: from the most expensive on, the rank with the least work so far."""
    work, owner = [0.0] * ranks, [0] * len(costs)
    for piece in sorted(range(len(costs)), key=lambda piece: -costs[piece]):
        owner[piece] = min(range(ranks), key=work.__getitem__)
        work[owner[piece]] += costs[piece]
    return owner


def is_recorded() -> bool:
    """True while the operations of this thread are recorded to a CUDA graph, and not computed."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


@contextlib.contextmanager
def _side_by_side(streams: Sequence[torch.cuda.Stream]) -> Iterator[Iterator[torch.cuda.Stream | None]]:
    """The streams in turn, for work between what the current stream does before and after it; None on a CPU."""
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    yield itertools.cycle(streams or [None])
    for stream in streams:
        torch.cuda.current_stream().wait_stream(stream)


class Soap(AdamByWeight):
    """Adam whose moments are kept in an orthonormal basis B_i for each side i of a weight.

    S_i, the mean (with decay β₂) of G Gᵀ over the gradients, unfolded along side i, has approximately the eigenvectors
    B_i: after every `precondition_frequency` updates a step of power iteration follows it, B_i ← QR(S_i B_i), and the
    first moment is rotated to the new basis. In between, the gradient is rotated to the basis and Adam's direction
    back. The first update only starts S_i and, by an exact decomposition, B_i. Biases and the parameters of
    normalization layers follow Adam. Weight decay is decoupled and applies to weights only.

    The bases are renewed outside of CUDA graphs; a skipped update has no renewal. docs/optimizers.md describes the
    division among ranks and what the host waits for. On a GPU, matrix products are in TF32 if the process allows it,
    and the statistics of several sides from bfloat16 values; else in float32.
    """

    def __init__(self, options: OptimizerConfig, parameters: Parameters, lr: LearningRate) -> None:
        super().__init__(options, parameters, lr)
        self._frequency = options.precondition_frequency
        weights = self.param_groups[0]["params"]
        self._sides = {weight: weight_sides(weight.shape) for weight in weights}
        # The rank that renews each basis, by the number of its side.
        self._owners: dict[torch.Tensor, dict[int, int]] = {
            weight: dict.fromkeys(sides_with_basis(sides, options), 0) for weight, sides in self._sides.items()
        }
        self._rank, self._ranks = 0, 1
        self._skipped = torch.zeros((), device=next(iter(parameters.values())).device)  # 1 if the last update was
        self._streams: list[torch.cuda.Stream] = []

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        super().step()
        # What cannot be recorded in a CUDA graph is done after each of its replays.
        if not is_recorded():
            self.renew()

    def _update(self, group: Group, parameters: list[torch.Tensor], found_inf: torch.Tensor | None) -> None:
        states = self._states(parameters)
        counts = [state["step"] for state in states]
        skip = torch.zeros_like(counts[0]) if found_inf is None else found_inf
        idle = torch.maximum(skip, (counts[0] == 0).to(skip.dtype))  # the first update only starts the statistics
        gradients = [
            _laid_out(parameter.grad, parameter).reshape(self._sides.get(parameter, parameter.shape))
            for parameter in parameters
            if parameter.grad is not None
        ]
        bases = [self._matrices(parameter, "basis") for parameter in parameters]
        rotated = list(map(rotate, gradients, bases))
        moments = [{**state, "step": count} for state, count in zip(states, torch._foreach_sub(counts, 1), strict=True)]
        directions = adam_directions(rotated, moments, group, idle, group["lr"])
        inverse = [{number: basis.mT for number, basis in of_weight.items()} for of_weight in bases]
        _descend(group, parameters, directions, inverse, idle)
        if group["is_weights"]:
            self._skipped.copy_(skip)
            mine = [self._matrices(parameter, "statistics", self._rank) for parameter in parameters]
            if gradients[0].is_cuda and torch.backends.cuda.matmul.allow_tf32:
                # For a single product the cast would take longer than it saves. Not by the number of this rank's
                # products: then the statistics would depend on the number of ranks.
                gradients = [
                    gradient.bfloat16() if len(of_weight) > 1 else gradient
                    for gradient, of_weight in zip(gradients, bases, strict=True)
                ]
            _update_statistics(mine, gradients, 1 - group["betas"][1], skip)
        torch._foreach_add_(counts, 1 - skip, alpha=1)  # without alpha the host waits for the device

    @torch.no_grad()
    def renew(self) -> None:
        """Renews the bases if it is time to: completes a step with what a CUDA graph cannot hold."""
        weights = self._weights()
        # In the group, where it is saved: the steps from the first update on.
        steps = self.param_groups[0].get("steps", 0)
        if steps == 0 and (not weights or int(weights[0][1]["step"]) == 0):
            return
        self.param_groups[0]["steps"] = steps + 1
        if steps % self._frequency == 0:
            self._renew_bases(first=steps == 0)

    def _renew_bases(self, first: bool) -> None:
        weights = self._weights()
        renewed: dict[torch.Tensor, dict[int, tuple[torch.Tensor, torch.Tensor]]] = {}
        if not self._streams and weights[0][0].is_cuda:
            self._streams = [torch.cuda.Stream() for _ in range(STREAMS)]
        with _side_by_side(self._streams) as beside:
            for weight, state in weights:
                renewed[weight] = {}
                for number, owner in self._owners[weight].items():
                    statistics, basis = state[f"statistics_{number}"], state[f"basis_{number}"]
                    if owner != self._rank:
                        order = torch.empty(len(basis), dtype=torch.int64, device=basis.device)
                        renewed[weight][number] = torch.empty_like(basis), order
                        continue
                    with torch.cuda.stream(next(beside)):
                        renewed[weight][number] = eigenbasis(statistics) if first else next_basis(statistics, basis)
        # After all of them are computed, which the ranks do at the same time.
        for weight, state in weights:
            for number, tensors in renewed[weight].items():
                self._broadcast(self._owners[weight][number], *tensors)
            _change_bases(state, renewed[weight], self._skipped)

    def share(self, rank: int, ranks: int) -> None:
        """Divides the bases among ranks, whose gradients are equal. Every rank calls it before the first step."""
        self._rank, self._ranks = rank, ranks
        pieces = [(weight, number) for weight, numbers in self._owners.items() for number in numbers]
        costs = [self._sides[weight][number] ** 3 for weight, number in pieces]
        for (weight, number), owner in zip(pieces, owners(costs, ranks), strict=True):
            self._owners[weight][number] = owner

    def _broadcast(self, owner: int, *tensors: torch.Tensor) -> None:
        """Overwrites the tensors with their owner's. Every rank calls it."""
        if self._ranks > 1:
            for tensor in tensors:
                dist.broadcast(tensor, src=owner)

    def load_state_dict(self, state_dict: Any) -> None:
        """ValueError if the saved run viewed the weights as other matrices."""
        super().load_state_dict(state_dict)
        for weight, state in self._weights():
            new = self.new_state(weight)
            shapes, saved = ({name: value.shape for name, value in values.items()} for values in (new, state))
            if shapes != saved:
                raise ValueError("its eigenbases are others; its config.yaml has optimizer.max_precondition_size")
            # Moments have the weight's memory format, which may be another one than the saved run's.
            state.update({name: value.copy_(state[name]) for name, value in new.items()})

    def collect_state(self) -> None:
        """Completes the state of each rank with what the others keep for it. Every rank calls it, before a save."""
        for weight, state in self._weights():
            for number, owner in self._owners[weight].items():
                self._broadcast(owner, state[f"statistics_{number}"])

    def new_state(self, parameter: torch.Tensor) -> State:
        state = super().new_state(parameter)
        if parameter in self._sides:
            state |= {name: state[name].reshape(self._sides[parameter]) for name in ("exp_avg", "exp_avg_sq")}
        for number in self._owners.get(parameter, ()):
            size = self._sides[parameter][number]
            state |= {f"{name}_{number}": parameter.new_zeros(size, size) for name in ("statistics", "basis")}
        return state

    def _weights(self) -> list[tuple[torch.Tensor, State]]:
        """All weights that have been updated, with their states."""
        return [(weight, self.state[weight]) for weight in self._sides if self.state.get(weight)]

    def _matrices(self, parameter: torch.Tensor, name: str, owner: int | None = None) -> dict[int, torch.Tensor]:
        """The parameter's matrices of this name by the number of their side; only those of `owner`, if given."""
        owners = self._owners.get(parameter, {}).items()
        return {number: self.state[parameter][f"{name}_{number}"] for number, rank in owners if owner in (None, rank)}


def rotate(x: torch.Tensor, bases: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """Multiplies x along each side i in `bases` by the transpose of bases[i]; the result has the strides of x."""
    for number, basis in bases.items():
        order, (_, *factors) = _memory_order(x), _factors(x, x, number, basis)
        product = torch.bmm(*factors)
        x = product.view([x.shape[side] for side in order]).permute([order.index(side) for side in range(x.dim())])
    return x


def _factors(target: torch.Tensor, x: torch.Tensor, number: int, basis: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Batches of matrices: `target`, and two whose product is x times the transpose of the basis along a side."""
    result, unfolded = _unfolded(target, number), _unfolded(x, number)
    before, _, after = unfolded.shape
    if after == 1:
        return result.mT.transpose(0, 1), unfolded.mT.transpose(0, 1), basis[None]
    return result, basis.mT.expand(before, -1, -1), unfolded


def _memory_order(x: torch.Tensor) -> list[int]:
    return sorted(range(x.dim()), key=x.stride, reverse=True)


def _unfolded(x: torch.Tensor, number: int) -> torch.Tensor:
    """A view of x, if it has no gaps, as [before, size, after]: the side `number` between its neighbors in memory."""
    order = _memory_order(x)
    place = order.index(number)
    return x.permute(order).reshape(math.prod(x.shape[side] for side in order[:place]), x.shape[number], -1)


def _descend(
    group: Group,
    weights: list[torch.Tensor],
    directions: list[torch.Tensor],
    bases: list[dict[int, torch.Tensor]],
    skip: torch.Tensor,
) -> None:
    """x ← x − direction − lr · λ x, for directions in the bases, with the factor lr. No bit changes if `skip` is 1."""
    if group["weight_decay"]:
        torch._foreach_sub_(weights, torch._foreach_mul(weights, (skip == 0) * (group["lr"] * group["weight_decay"])))
    plain = []
    for weight, direction, of_weight in zip(weights, directions, bases, strict=True):
        target = weight.reshape(direction.shape)
        if not of_weight or target.untyped_storage()._cdata != weight.untyped_storage()._cdata:
            plain.append((weight, _laid_out(rotate(direction, of_weight), weight)))
            continue
        *others, (number, basis) = of_weight.items()
        result, *factors = _factors(target, rotate(direction, dict(others)), number, basis)
        result.baddbmm_(*factors, alpha=-1)  # the last product also subtracts
    if plain:
        torch._foreach_sub_(*zip(*plain, strict=True))


def _laid_out(direction: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The direction in the weight's shape and strides: only with equal strides one kernel updates many tensors."""
    step = direction.reshape(weight.shape)
    return step if step.stride() == weight.stride() else torch.empty_like(weight).copy_(step)


def _update_statistics(
    statistics: list[dict[int, torch.Tensor]], gradients: list[torch.Tensor], weight: float, skip: torch.Tensor
) -> None:
    old = [matrix for matrices in statistics for matrix in matrices.values()]
    products = [
        outer_product(gradient, number)
        for matrices, gradient in zip(statistics, gradients, strict=True)
        for number in matrices
    ]
    if old:
        for before, after in zip(old, torch._foreach_lerp(old, products, weight), strict=True):
            _replace(before, after, skip)


def outer_product(x: torch.Tensor, number: int) -> torch.Tensor:
    """G Gᵀ of x, unfolded to a matrix G whose rows are along the side `number`; float32 for bfloat16."""
    unfolded = _unfolded(x, number)
    before, size, after = unfolded.shape
    if before > 1 and size > after:  # one product for each of `before` would be larger than x
        unfolded = unfolded.transpose(0, 1).reshape(1, size, -1)
    if x.dtype is torch.bfloat16:
        return torch.bmm(unfolded, unfolded.mT, out_dtype=torch.float32).sum(0)
    return torch.bmm(unfolded, unfolded.mT).sum(0)


def eigenbasis(statistics: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eigenvectors with the largest eigenvalue first, and their order: 0, 1, …"""
    _, vectors = torch.linalg.eigh(statistics.double())
    return vectors.flip(1).to(statistics.dtype).contiguous(), torch.arange(len(vectors), device=vectors.device)


def next_basis(statistics: torch.Tensor, basis: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A step of power iteration. The second result is the order of the old vectors, largest eigenvalue first."""
    product = statistics @ basis
    order = (basis * product).sum(0).argsort(descending=True)
    return torch.linalg.qr(product[:, order])[0].contiguous(), order


def _change_bases(state: State, renewed: Mapping[int, tuple[torch.Tensor, torch.Tensor]], skip: torch.Tensor) -> None:
    """Replaces the bases. The first moment is rotated; the second one, a mean of squares, is reordered."""
    turns = {number: state[f"basis_{number}"].mT @ basis for number, (basis, _) in renewed.items()}
    _replace(state["exp_avg"], rotate(state["exp_avg"], turns), skip)
    squares = state["exp_avg_sq"]
    for number, (basis, order) in renewed.items():
        squares = squares.index_select(number, order)
        _replace(state[f"basis_{number}"], basis, skip)
    _replace(state["exp_avg_sq"], squares, skip)


def _replace(old: torch.Tensor, new: torch.Tensor, skip: torch.Tensor) -> None:
    """Writes new to old, unless `skip` is 1."""
    torch.where(skip > 0, old, new, out=old)
