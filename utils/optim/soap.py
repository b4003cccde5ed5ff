"""SOAP (Vyas et al. 2024, arXiv:2409.11321, algorithm 3): Adam in the eigenbasis of Shampoo's preconditioner."""

import contextlib
import importlib.util
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from utils.config.sections import OptimizerConfig
from utils.distributed.devices import tf32_products
from utils.optim.adam_by_weight import AdamByWeight, Gradients, Group, LearningRate, Parameters, State, adam_directions

# The decomposition of a small matrix keeps a few multiprocessors busy: this many run at a time on a GPU.
STREAMS = 8
LONGEST_SIDE = 512  # with a learned basis
Bases = dict[int, torch.Tensor]  # orthonormal matrices, whose columns are the basis, by the number of a weight's side


def learned_sides(sides: Sequence[int], options: OptimizerConfig) -> list[int]:
    """The numbers of the sides whose basis follows the gradients: none of a large weight."""
    is_small = math.prod(sides) <= options.max_precondition_size
    return [number for number, size in enumerate(sides) if is_small and 1 < size <= LONGEST_SIDE]


def has_kernel(weight: torch.Tensor) -> bool:
    """True if the kernel of cells.py can update the weight, if none of its bases is learned."""
    if not weight.is_cuda or importlib.util.find_spec("triton") is None:
        return False
    from utils.optim import cells

    return cells.fits(weight)


def cosine_basis(kernel: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """The discrete cosine transform (type II) along each axis of a kernel, [cells, cells], on the device of `like`."""
    basis = torch.ones(1, 1, dtype=torch.float64)
    for size in kernel:
        number = torch.arange(size, dtype=torch.float64)
        axis = torch.cos(math.pi / size * (number[:, None] + 0.5) * number)
        basis = torch.kron(basis, axis / axis.norm(dim=0))
    return basis.to(like)


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
    """Adam whose moments are kept in an orthonormal basis B_i for sides i of a weight.

    For small weights it is learned: S_i, the mean (with decay β₂) of G Gᵀ over the gradients, unfolded along side i,
    has approximately the eigenvectors B_i. After every `precondition_frequency` updates a step of power iteration
    follows it, B_i ← QR(S_i B_i), and the first moment is rotated to the new basis. In between, the gradient is rotated
    to the basis and Adam's direction back. The first update only starts S_i and, by an exact decomposition, B_i. Large
    convolutions have one basis, along the cells of the kernel: the discrete cosine transform. Biases and the parameters
    of normalization layers follow Adam. Weight decay is decoupled and applies to weights only.

    The bases are renewed outside of CUDA graphs; a skipped update has no renewal. Only the first one waits for the
    device. On a GPU, products are in TF32 if the process allows it, and renewals in float32. There, the kernel of
    cells.py updates large convolutions.
    """

    def __init__(self, options: OptimizerConfig, parameters: Parameters, lr: LearningRate) -> None:
        super().__init__(options, parameters, lr)
        self._frequency = options.precondition_frequency
        weights = self.param_groups[0]["params"]
        self._sides = {weight: weight.flatten(2).shape if weight.ndim > 2 else weight.shape for weight in weights}
        self._learned = {weight: learned_sides(sides, options) for weight, sides in self._sides.items()}
        kernels = {weight.shape[2:]: weight for weight in weights if weight.shape[2:].numel() > 1}
        self._fixed = {kernel: {2: cosine_basis(kernel, like=weight)} for kernel, weight in kernels.items()}
        self._by_kernel = {weight for weight in weights if not self._learned[weight] and has_kernel(weight)}
        self._skipped = torch.zeros((), device=next(iter(parameters.values())).device)  # 1 if the last update was
        self._streams: list[torch.cuda.Stream] = []
        self.is_replicated = False  # True if all ranks update the same weights with equal gradients

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        super().step()
        # What cannot be recorded in a CUDA graph is done after each of its replays.
        if not is_recorded():
            self.renew()

    def _update(self, group: Group, gradients: Gradients, found_inf: torch.Tensor | None) -> None:
        counts = [state["step"] for state in self._states([*gradients])]
        skip = torch.zeros_like(counts[0]) if found_inf is None else found_inf
        idle = torch.maximum(skip, (counts[0] == 0).to(skip.dtype))  # the first update only starts the statistics
        if group["is_weights"]:
            self._skipped.copy_(skip)
        by_kernel = [parameter for parameter in gradients if parameter in self._by_kernel]
        if others := {parameter: gradients[parameter] for parameter in gradients if parameter not in self._by_kernel}:
            self._update_by_products(group, others, skip, idle)
        if by_kernel:
            from utils.optim import cells

            for parameter in by_kernel:
                basis = self._bases(parameter)[2]
                cells.descend(parameter, gradients[parameter], self.state[parameter], basis, group, idle)
        torch._foreach_add_(counts, 1 - skip, alpha=1)  # without alpha the host waits for the device

    def _update_by_products(self, group: Group, given: Gradients, skip: torch.Tensor, idle: torch.Tensor) -> None:
        """The update by products of matrices, and that of the statistics; the counts are those of earlier updates."""
        parameters, states, bases = [*given], self._states([*given]), [*map(self._bases, given)]
        pairs = zip(given.values(), states, strict=True)
        gradients = [gradient.reshape(state["exp_avg"].shape).contiguous() for gradient, state in pairs]
        counts = torch._foreach_sub([state["step"] for state in states], 1)
        torch._foreach_clamp_min_(counts, 0)  # a parameter may get its first gradient later than others
        moments = [{**state, "step": count} for state, count in zip(states, counts, strict=True)]
        directions = adam_directions(list(map(rotate, gradients, bases)), moments, group, idle, group["lr"])
        steps = [
            rotate(direction, {number: basis.mT for number, basis in of_weight.items()}).view(parameter.shape)
            for parameter, direction, of_weight in zip(parameters, directions, bases, strict=True)
        ]
        if group["weight_decay"]:
            decay = (idle == 0) * (group["lr"] * group["weight_decay"])
            torch._foreach_sub_(parameters, torch._foreach_mul(parameters, decay))
        torch._foreach_sub_(parameters, steps)
        old, products = list[torch.Tensor](), list[torch.Tensor]()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            for number, matrix in self._matrices(parameter, "statistics").items():
                old.append(matrix)
                products.append(outer_product(gradient, number))
        if old:
            for before, after in zip(old, torch._foreach_lerp(old, products, 1 - group["betas"][1]), strict=True):
                _replace(before, after, skip)

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
            # In TF32, the vectors of small eigenvalues would be others after each renewal.
            with tf32_products(False):
                self._renew_bases(first=steps == 0)

    def _renew_bases(self, first: bool) -> None:
        weights = self._weights()
        if not self._streams and weights[0][0].is_cuda:
            self._streams = [torch.cuda.Stream() for _ in range(STREAMS)]
        renewed: list[dict[int, tuple[torch.Tensor, torch.Tensor]]] = []
        with _side_by_side(self._streams) as beside:
            for weight, _ in weights:
                bases = self._matrices(weight, "basis")
                renewed.append({})
                for number, statistics in self._matrices(weight, "statistics").items():
                    with torch.cuda.stream(next(beside)):
                        renewed[-1][number] = eigenbasis(statistics) if first else next_basis(statistics, bases[number])
        if self.is_replicated:
            _broadcast([tensor for of_weight in renewed for pair in of_weight.values() for tensor in pair])
        for (_, state), of_weight in zip(weights, renewed, strict=True):
            _change_bases(state, of_weight, self._skipped)

    def load_state_dict(self, state_dict: Any) -> None:
        """ValueError if the saved run had other bases."""
        super().load_state_dict(state_dict)
        for weight, state in self._weights():
            new = self.new_state(weight)
            shapes, saved = ({name: value.shape for name, value in values.items()} for values in (new, state))
            if shapes != saved:
                raise ValueError(
                    "its SOAP learned other bases, or has another optimizer.max_precondition_size; --init_from reads it"
                )
            # Moments have the weight's memory format, which may be another one than the saved run's.
            state.update({name: value.copy_(state[name]) for name, value in new.items()})

    def new_state(self, parameter: torch.Tensor) -> State:
        state = super().new_state(parameter)
        if parameter in self._sides:
            state |= {name: state[name].reshape(self._sides[parameter]) for name in ("exp_avg", "exp_avg_sq")}
        if parameter not in self._by_kernel:  # whose moments have the weight's order in memory
            state = {name: value.contiguous() for name, value in state.items()}
        for number in self._learned.get(parameter, ()):
            size = self._sides[parameter][number]
            state |= {f"{name}_{number}": parameter.new_zeros(size, size) for name in ("statistics", "basis")}
        return state

    def _weights(self) -> list[tuple[torch.Tensor, State]]:
        """All weights that have been updated, with their states."""
        return [(weight, self.state[weight]) for weight in self._sides if self.state.get(weight)]

    def _matrices(self, parameter: torch.Tensor, name: str) -> Bases:
        """The parameter's matrices of this name by the number of their side."""
        return {number: self.state[parameter][f"{name}_{number}"] for number in self._learned.get(parameter, ())}

    def _bases(self, parameter: torch.Tensor) -> Bases:
        """All bases of a weight; that of its kernel is the last."""
        learned = self._matrices(parameter, "basis")
        return learned if 2 in learned else learned | self._fixed.get(parameter.shape[2:], {})


def _broadcast(tensors: Sequence[torch.Tensor]) -> None:
    """Gives all ranks the tensors of rank 0 at once: a decomposition need not have the same bits everywhere."""
    if tensors:
        flat = torch.cat([tensor.flatten().to(tensors[0].dtype) for tensor in tensors])
        dist.broadcast(flat, src=0)
        for tensor, values in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(values.view_as(tensor))


def rotate(x: torch.Tensor, bases: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """Multiplies a contiguous x along each side i in `bases` by the transpose of bases[i]."""
    for number, basis in bases.items():
        if number == x.dim() - 1:
            x = x @ basis
        else:  # the sides after it are columns, and those before it a batch
            x = (basis.mT @ x.flatten(number + 1)).view_as(x) if number == 0 else basis.mT @ x
    return x


def outer_product(x: torch.Tensor, number: int) -> torch.Tensor:
    """G Gᵀ of x, unfolded to a matrix G whose rows are along the side `number`."""
    rows = x.movedim(number, 0).flatten(1)
    return rows @ rows.mT


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
