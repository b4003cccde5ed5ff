"""A loss with the spectrum of the density alone, for the study `gas_power`.

python train.py --config=demo --set loss=benchmarks.density_spectrum.DensitySpectrumLoss
"""

import torch
from torch.nn import functional as F

from networks.losses import L1Loss, at_least_float32


class DensitySpectrumLoss(L1Loss):
    """L1, plus in training mean ||F(output)| - |F(target)|| of channel 0, F being the orthonormal Fourier transform."""

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = super().forward(outputs, targets)
        if not self.training:
            return loss
        densities = (at_least_float32(fields[:, 0]) for fields in (outputs, targets))
        return loss + F.l1_loss(*(torch.fft.rfftn(density, dim=(1, 2, 3), norm="ortho").abs() for density in densities))
