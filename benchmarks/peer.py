"""The SC21 tutorial's network and training loop, from a clone of it, as a step: see --peer of step.py and record.py.

At its fastest, that is autocast to float16 with a gradient scaler, fused Adam, and a scripted loss. Its train.py
assigns the scripted network to a name that it does not use, so the network is not scripted. It selects a fuser that
PyTorch no longer has; the default one takes its place. It reads the loss in each step.

On a CPU it is the loop without options, in float32, which else differs from the tutorial's in this: it does not move
data to a GPU, and its network has a quarter of the channels and, as with `full_scale: False`, five scales.
"""

import itertools
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
from torch import nn

from utils.config import Config
from utils.data.loaders import Batch
from utils.errors import UserError

NETWORK = "networks/UNet.py", "UNet", "loss_func_opt_final"  # its file and names


def load(directory: Path, file: str, *names: str) -> ModuleType:
    """A module of the tutorial with these names; UserError if the directory is not a clone of the tutorial."""
    loader = SourceFileLoader(f"sc21_{Path(file).stem}", str(directory / file))
    module = ModuleType(loader.name)
    try:
        loader.exec_module(module)
        _ = [getattr(module, name) for name in names]
    except (OSError, SyntaxError, ImportError, AttributeError) as error:
        raise UserError(f"--peer {directory} is not a clone of the SC21 tutorial: {error}") from None
    return module


def batches(directory: Path, config: Config) -> Iterator[Batch]:
    """Epoch after epoch of the tutorial's loader, with the volume in memory; the first is loaded before it returns."""
    keys = ("box_size", "data_size", "Nsamples", "Nsamples_val", "local_batch_size")
    settings = {key: getattr(config, key) for key in keys}
    settings |= {key: config.paths(key)[0] for key in ("train_path", "val_path")}  # it reads one file
    settings |= {"data_loader_config": "inmem", "num_data_workers": 1, "use_cache": None}
    settings |= {"distributed": False, "enable_benchy": False}
    module = load(directory, "utils/data_loader.py", "get_data_loader_distributed")
    loader, _ = module.get_data_loader_distributed(SimpleNamespace(**settings), 0)
    return (Batch(*pair) for _ in itertools.count() for pair in loader)


class Step:
    """The tutorial's step, with the initial weights and the channels of `network`, a U-Net of this project."""

    compiled = False

    def __init__(self, directory: Path, network: nn.Module, device: torch.device, plain: bool = False) -> None:
        """plain: without options, in float32."""
        module, channels = load(directory, *NETWORK), network.get_parameter("last.bias").numel()
        settings = SimpleNamespace(full_scale=hasattr(network, "down6"), N_out_channels=channels)
        self.network, self._device, self._plain = module.UNet(settings).to(device), device, plain
        for theirs, ours in zip(self.network.parameters(), network.parameters(), strict=True):
            theirs.data = ours.detach().clone(memory_format=torch.contiguous_format)  # perhaps of fewer channels
        self._loss = module.loss_func if plain else module.loss_func_opt_final
        self._lambda_rho = 0.0 if plain else torch.zeros(1, channels, 1, 1, 1, device=device)
        self.optimizer = torch.optim.Adam(self.network.parameters(), fused=None if plain else True)
        self._scaler = torch.amp.GradScaler(device.type, enabled=not plain)

    def __call__(self, batch: Batch, lr: float) -> torch.Tensor:
        self.optimizer.param_groups[0]["lr"] = lr
        loss = self._differentiate(batch)
        self._scaler.step(self.optimizer)
        self._scaler.update()
        return loss

    def _differentiate(self, batch: Batch) -> torch.Tensor:
        self.optimizer.zero_grad()
        with torch.autocast(self._device.type, torch.float16, enabled=not self._plain):
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
