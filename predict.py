"""Paints gas onto a whole N-body box with a trained network.

python predict.py --checkpoint runs/demo/2GPU/00 --input data/demo_val.h5 --output gas.h5
srun -n 8 python predict.py --checkpoint /logs/bs64_opt/8GPU/00 --input nbody.h5 --output hydro.h5
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from train import build_model
from utils import config as configs
from utils.checkpoint import read_weights
from utils.config import Config
from utils.errors import UserError, value_errors_for_users


@dataclass(frozen=True)
class Trained:
    """A network as a training left it, in evaluation mode, with the config that made it."""

    network: nn.Module
    config: Config
    record: dict[str, Any]  # epoch, step and final_loss of the checkpoint


def load_trained(checkpoint: str, device: torch.device) -> Trained:
    """The network of a checkpoint: a weights.pt, its directory, or a run's (its best one); UserError if it is none."""
    content = read_weights(Path(checkpoint))
    config = configs.validate(content.get("config", {}), checkpoint)
    if config.labelled:
        raise UserError(f"{checkpoint} is of a classifier ({config.network.name}); give one trained on volumes")
    # How a layer computes is of no account here, and neither is how large a rank's batch was.
    plain = config.model_copy(
        update={
            "fused_pointwise": False,
            "network": config.network.model_copy(update={"rewritten": []}),
        }
    )
    with value_errors_for_users():
        network = build_model(plain)
    try:
        network.load_state_dict(content["network"])
    except RuntimeError as error:
        reason = " ".join(str(error).splitlines()[1:2]).strip() or str(error)
        raise UserError(f"{checkpoint} does not hold the network that its config names: {reason}") from None
    record = {key: content[key] for key in ("epoch", "step", "final_loss") if key in content}
    return Trained(network.to(device).eval(), config, record)
