"""Fixtures of the benchmarks' tests: quick processes instead of those that studies start, and a small tutorial."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import h5py
import processes
import pytest

from benchmarks import common

UNET = """
import torch
from torch import nn

def loss_func(output, target, lambda_rho):
    assert lambda_rho == 0
    return nn.functional.l1_loss(output, target)

@torch.jit.script
def loss_func_opt_final(output, target, lambda_rho):
    return torch.mean(torch.abs(output - target) + lambda_rho * torch.abs(torch.exp(output) - torch.exp(target)))

class UNet(nn.Module):
    def __init__(self, params):
        super().__init__()
        assert not params.full_scale
        self.down = nn.ModuleList(nn.Conv3d(a, b, 4, 2, 1) for a, b in ((4, 64), (64, 128), (128, 256)))
        ends = ((256, 128), (256, 64), (128, params.N_out_channels))
        self.up = nn.ModuleList(nn.ConvTranspose3d(a, b, 4, 2, 1) for a, b in ends)

    def forward(self, x):
        skips = []
        for layer in self.down:
            skips.append(x := nn.functional.leaky_relu(layer(x)))
        skips.pop()
        for layer in self.up[:-1]:
            x = torch.cat([torch.relu(layer(x)), skips.pop()], 1)
        return torch.tanh(self.up[-1](x))
"""
LOADER = """
import h5py
import torch

def get_data_loader_distributed(params, world_rank, device=0):
    assert (params.data_loader_config, params.distributed, params.use_cache) == ("inmem", False, None)
    with h5py.File(params.train_path) as file:
        pair = [torch.as_tensor(file[name][:, :8, :8, :8]) for name in ("Nbody", "Hydro")]
    batch = [part.expand(params.local_batch_size, *part.shape) for part in pair]
    return [batch] * (params.Nsamples // params.local_batch_size), None
"""
SCHEDULE = """
def lr_schedule(optimizer, iternum, global_bs, base_bs, scaling, start_lr, tot_steps):
    assert iternum <= tot_steps
    optimizer.param_groups[0]["lr"] = start_lr
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The SC21 tutorial with fewer layers and samples, and the same names."""
    for name, text in {"networks/UNet": UNET, "utils/data_loader": LOADER, "utils/__init__": SCHEDULE}.items():
        path = tmp_path / "clone" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "clone"


@pytest.fixture
def run_forked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Replaces `failure_of`: runs a real command on one rank, but forked, so that it need not import torch."""

    def failure_of(command: Sequence[str], log: Path, limit: float | None = None) -> str:
        assert command[0] == sys.executable
        done = processes.run(command[1:], tmp_path / "output")
        return common.failure_reason(done.returncode, done.stdout + done.stderr)

    monkeypatch.setattr(common, "failure_of", failure_of)
    monkeypatch.chdir(tmp_path)  # studies change the directory
    return failure_of


@pytest.fixture
def run_or_draw(run_forked: Callable[..., str], volume_file: Callable[..., Path], monkeypatch: Any) -> Any:
    """As `run_forked`, but a simulation writes random values with the attributes of a simulated box."""
    pytest.importorskip("colossus", reason="colossus, which simulations need, is not installed")
    from simulation import simulate

    def failure_of(command: Sequence[str], *rest: Any, **options: Any) -> str:
        if "simulation" not in command:
            return run_forked(command, *rest, **options)
        options = simulate.parse(command[3:])
        Path(options.output).parent.mkdir(exist_ok=True, parents=True)
        path = volume_file(options.output, options.grid, seed=options.seed + round(100 * options.redshift))
        with h5py.File(path, "r+") as file:
            file.attrs.update(simulate.file_attributes(options))
        return ""

    monkeypatch.setattr(common, "failure_of", failure_of)
    return failure_of
