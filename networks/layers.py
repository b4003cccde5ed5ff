"""Layers of a U-Net: strided convolutions with what follows them, computed by the operation that a plan has chosen.

A network of your own gets the kernels by using them. See ops/plan.py for the choice, ops/reference.py for what they
compute. Parameters are those of `nn.Conv3d` and `nn.ConvTranspose3d` with kernel 4, stride 2 and padding 1.
"""

import torch
from torch import Tensor, nn

from networks.ops import TORCH, operations
from networks.ops.reference import Between, Half, Twice


class Planned:
    """The attributes that a plan sets, and those that it reads.

    halvings: of the network's input, to the finer one of the layer's two grids; None: unknown.
    norm: True if a norm follows the convolution.
    """

    operation, dtype, pads = TORCH, torch.float32, False
    has_edge_kernels = True  # Hopper's kernels for few channels compute it; see ops/hopper/edges.py

    def __init__(self, before: int, after: int, halvings: int | None = None, norm: bool = False) -> None:
        super().__init__(before, after, 4, stride=2, padding=1)  # type: ignore[call-arg] # of torch's layer
        self.halvings, self.norm = halvings, norm


class Down(Planned, nn.Conv3d):
    """[N, I, 2D, 2D, 2D] -> leaky_relu(convolution), [N, O, D, D, D], for the next layer and for a skip connection."""

    def forward(self, input: Tensor, half: Half = None, between: Between = None) -> Twice:  # type: ignore[override]
        return operations(self.operation).down(input, self, half, between)


class Up(Planned, nn.ConvTranspose3d):
    """[N, I, D, D, D] and skip [N, S, 2D, 2D, 2D] -> relu(transposed convolution) and skip, [N, O + S, 2D, 2D, 2D]."""

    has_edge_kernels = False

    def forward(  # type: ignore[override] # no output_size
        self, input: Tensor, skip: Tensor, half: Half = None, between: Between = None
    ) -> Tensor:
        return operations(self.operation).up(input, skip, self, half, between)


class Last(Planned, nn.ConvTranspose3d):
    """[N, I, D, D, D] -> tanh(transposed convolution), [N, O, 2D, 2D, 2D], float32 under bfloat16 autocast."""

    def forward(self, input: Tensor) -> Tensor:  # type: ignore[override] # no output_size
        return operations(self.operation).last(input, self)

    def l1(self, input: Tensor, targets: Tensor) -> Tensor:
        """The mean absolute error of the result."""
        return operations(self.operation).last_l1(input, self, targets)
