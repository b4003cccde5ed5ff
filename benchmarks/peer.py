"""The SC21 tutorial's network and training loop at its fastest, from a clone of it, as a step: see --peer of step.py.

That is autocast to float16 with a gradient scaler, fused Adam, and a scripted loss. Its train.py assigns the scripted
network to a name that it does not use, so the network is not scripted. It selects a fuser that PyTorch no longer has;
the default one takes its place. It reads the loss in each step.
"""

from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
from torch import nn

from utils.data.loaders import Batch
from utils.errors import UserError


def tutorial(directory: Path) -> ModuleType:
    """The tutorial's networks/UNet.py; UserError if the directory is not a clone of the tutorial."""
    loader = SourceFileLoader("sc21_unet", str(directory / "networks/UNet.py"))
    module = ModuleType(loader.name)
    try:
        loader.exec_module(module)
        _ = module.UNet, module.loss_func_opt_final
    except (OSError, SyntaxError, ImportError, AttributeError) as error:
        raise UserError(f"--peer {directory} is not a clone of the SC21 tutorial: {error}") from None
    return module


class Step:
    """The tutorial's step, with the initial weights of `network`, a U-Net of this project."""

    compiled = False

    def __init__(self, directory: Path, network: nn.Module, device: torch.device) -> None:
        module, channels = tutorial(directory), network.get_parameter("last.bias").numel()
        settings = SimpleNamespace(full_scale=hasattr(network, "down6"), N_out_channels=channels)
        self.network, self._device = module.UNet(settings).to(device), device
        with torch.no_grad():
            for theirs, ours in zip(self.network.parameters(), network.parameters(), strict=True):
                theirs.copy_(ours)
        self._loss, self._lambda_rho = module.loss_func_opt_final, torch.zeros(1, channels, 1, 1, 1, device=device)
        self._optimizer = torch.optim.Adam(self.network.parameters(), fused=True)
        self._scaler = torch.amp.GradScaler(device.type)

    def __call__(self, batch: Batch, lr: float) -> torch.Tensor:
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        loss = self._differentiate(batch)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        return loss

    def _differentiate(self, batch: Batch) -> torch.Tensor:
        self._optimizer.zero_grad()
        with torch.autocast(self._device.type, torch.float16):
            loss: torch.Tensor = self._loss(self.network(batch.inputs), batch.targets, self._lambda_rho)
            loss.item()
        self._scaler.scale(loss).backward()
        return loss.detach()

    def warm_up(self, batch: Batch) -> None:
        self._differentiate(batch)

    @property
    def gradient_norm(self) -> torch.Tensor:
        """Norm of the last step's gradients, which the optimizer has divided by the scale."""
        return torch.nn.utils.get_total_norm(x.grad for x in self.network.parameters() if x.grad is not None)
