"""Muon: momentum whose step, per weight, is replaced by the nearest orthogonal matrix.

Sources: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks",
https://kellerjordan.github.io/posts/muon; for the length of the step, Liu et al. 2025, "Muon is Scalable for LLM
Training", arXiv:2502.16982.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim.sgd import sgd

from utils.optim.matrices import MatrixOptimizer, State, adam_directions, descend, is_weight

# Of the polynomial a X + b (X Xᵀ) X + c (X Xᵀ)² X, which moves all singular values to between about 0.7 and 1.2.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


class Muon(MatrixOptimizer):
    """x ← x − lr · 0.2 √max(m, n) · O, where the m × n matrix O has the singular vectors of the Nesterov momentum.

    A weight is viewed as a matrix, first side × all others: out × (in · kernel) for a convolution, in × (out · kernel)
    for a transposed one. With this factor (Liu et al.) the elements of a step are as large as Adam's usually are, so
    one learning rate serves both: biases, the parameters of normalization layers and the last weight, which is the
    output layer's, follow Adam. Each rank computes some of the matrices O, and receives the others.
    """

    def __init__(
        self, named_parameters: Iterable[tuple[str, torch.nn.Parameter]], momentum: float, **settings: Any
    ) -> None:
        named = dict(named_parameters)
        weights = [name for name, parameter in named.items() if is_weight(name, parameter)][:-1]
        others = [parameter for name, parameter in named.items() if name not in weights]
        super().__init__([named[name] for name in weights], others, momentum=momentum, **settings)

    def new_state(self, parameter: torch.nn.Parameter, matrix: bool) -> State:
        return {"momentum_buffer": torch.zeros_like(parameter)} if matrix else super().new_state(parameter, matrix)

    def update(
        self, group: Mapping[str, Any], parameters: list[torch.nn.Parameter], states: list[State], skip: torch.Tensor
    ) -> None:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if not group["matrices"]:
            descend(group, parameters, adam_directions(gradients, states, group["betas"], group["eps"], skip), skip)
            return
        # torch's fused kernel, from 0 with learning rate −1, gives the direction; after found_inf, 0.
        directions = [torch.empty_like(parameter) for parameter in parameters]
        torch._foreach_zero_(directions)
        buffers: list[torch.Tensor | None] = [state["momentum_buffer"] for state in states]
        sgd(
            directions,
            gradients,
            buffers,
            fused=True,
            found_inf=skip,
            weight_decay=0.0,
            momentum=group["momentum"],
            lr=-1.0,
            dampening=0.0,
            nesterov=group["momentum"] > 0,
            maximize=False,
        )
        torch._foreach_add_([state["step"] for state in states], 1 - skip, alpha=1)  # without alpha the host waits
        descend(group, parameters, self._orthogonalized(directions), skip)

    def _orthogonalized(self, directions: list[torch.Tensor]) -> list[torch.Tensor]:
        matrices = [direction.flatten(1) for direction in directions]
        owners = self.ranks.owners([min(matrix.shape) * matrix.numel() for matrix in matrices])
        results = []
        for matrix, owner in zip(matrices, owners, strict=True):
            dtype = torch.bfloat16 if matrix.is_cuda else matrix.dtype
            mine = owner == self.ranks.rank
            results.append(newton_schulz(matrix, dtype) if mine else torch.empty_like(matrix, dtype=dtype))
        self.ranks.broadcast(results, owners)
        lengths = [0.2 * max(matrix.shape) ** 0.5 for matrix in matrices]
        scaled = [result.to(matrix.dtype) for result, matrix in zip(results, matrices, strict=True)]
        torch._foreach_mul_(scaled, lengths)
        return scaled


def newton_schulz(matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A matrix with the same singular vectors, and singular values near 1."""
    a, b, c = COEFFICIENTS
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT
    x = (wide / wide.norm().clamp(min=1e-7)).to(dtype)  # singular values at most 1
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x if wide is matrix else x.mT).contiguous()
