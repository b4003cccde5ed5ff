"""Networks and losses of users, and the checks of what they compute, by one call before training."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from utils.config import Config
from utils.data.loaders.base import meta_batch
from utils.data.task import task_of
from utils.errors import UserError
from utils.lookup import build_user_class, one_line


def is_checked(config: Config) -> bool:
    """True for a network whose outputs no test of this project checks, and so may have any fault."""
    return config.network.name not in ("unet", "mnist_cnn", "lenet", "reuters_cnn", "cifar_cnn")


def build(config: Config, offered: Mapping[str, Any], options: Mapping[str, Any]) -> nn.Module:
    """The user's network of the config; UserError if it cannot be built or trained. Arguments as in lookup.py."""
    name = config.network.name
    network = build_user_class("network.name", name, nn.Module, offered, options)
    if any(map(is_lazy, network.parameters())):
        check_output(config, network, torch.device("cpu"))  # the first call gives lazy layers their shapes
    for parameter_name, parameter in network.named_parameters():
        if parameter.is_complex():
            raise UserError(
                f"network {name}: parameter {parameter_name} is complex, which optimizers do not support; store its "
                "real and imaginary parts as [..., 2], and use torch.view_as_complex in forward"
            )
    if not any(parameter.requires_grad for parameter in network.parameters()):
        raise UserError(f"network {name} has no parameter to train; make layers attributes, and do not freeze all")
    return network


@torch.enable_grad()
def check_output(config: Config, network: nn.Module, device: torch.device) -> None:
    """UserError unless the output for zeros has the targets' shape and a gradient; the call may draw random numbers."""
    name, batch = config.network.name, meta_batch(config, 1)
    given, target = list(batch.inputs.shape), [1, *task_of(config).output]
    was_training = network.training
    with one_line(f"network {name} fails on an input {given} (target {target})"):
        outputs = network.eval()(*(torch.zeros_like(part, device=device) for part in batch.network_inputs))
    network.train(was_training)
    shape = list(outputs.shape) if isinstance(outputs, torch.Tensor) else type(outputs).__name__
    if shape != target:
        raise UserError(f"network {name}: output {shape}, target {target}; correct the network")
    if not outputs.requires_grad:
        raise UserError(f"network {name}: the output has no gradient; compute it without detach, no_grad or NumPy")


def check_measures(config: Config, loss: nn.Module, metrics: Mapping[str, Any], device: torch.device) -> None:
    """Calls a user's loss and metrics once, on zeros, on this device; UserError unless they return scalars."""
    outputs = torch.zeros(1, *task_of(config).output, device=device, requires_grad=True)
    targets = torch.zeros_like(meta_batch(config, 1).targets, device=device)
    if "." in config.loss:
        with one_line(f"loss {config.loss} fails on outputs {list(outputs.shape)}"):
            value = loss(outputs, targets)
        if not isinstance(value, torch.Tensor) or value.shape or not value.requires_grad:
            raise UserError(f"loss {config.loss} returns no scalar that depends on the network's outputs; correct it")
        if any(True for _ in loss.parameters()):
            raise UserError(f"loss {config.loss} has parameters, which no optimizer trains; move them to the network")
    for name in (name for name in config.metrics if "." in name):
        with one_line(f"metric {name} fails on outputs {list(outputs.shape)}"), torch.no_grad():
            if isinstance(metrics[name], nn.Module):
                metrics[name].to(device).eval()
            value = metrics[name](outputs.detach(), targets)
        if not isinstance(value, torch.Tensor) or value.shape:
            raise UserError(f"metric {name} returns no scalar tensor; correct it")
