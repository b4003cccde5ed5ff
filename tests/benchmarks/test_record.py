"""The record: row 0 by a stand-in for the tutorial's program, rows by this one, and the newest row again."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import common, peer, record
from benchmarks.study import LOSS, STUDIES, Condition, Study
from networks import build_network
from utils.errors import UserError

UNET = """
import torch
from torch import nn

def down_conv(before, after):
    return nn.Sequential(nn.Conv3d(before, after, 4, stride=2, padding=1), nn.LeakyReLU())

def up_conv(before, after):
    return nn.Sequential(nn.ConvTranspose3d(before, after, 4, stride=2, padding=1), nn.ReLU())

def loss_func(output, target, lambda_rho):
    assert lambda_rho == 0
    return nn.functional.l1_loss(output, target)

def loss_func_opt_final(output, target, lambda_rho):
    raise AssertionError("that of its fastest options")

class UNet(nn.Module):
    def __init__(self, params):
        super().__init__()
        assert not params.full_scale
        self.down1, self.down2, self.up2 = down_conv(4, 64), down_conv(64, 128), up_conv(128, 64)
        self.conv_last = nn.ConvTranspose3d(64 + 64, params.N_out_channels, 4, stride=2, padding=1)

    def forward(self, x):
        skip = self.down1(x)
        return torch.tanh(self.conv_last(torch.cat([self.up2(self.down2(skip)), skip], 1)))
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
    for name, text in {"networks/UNet": UNET, "utils/data_loader": LOADER, "utils/__init__": SCHEDULE}.items():
        path = tmp_path / "clone" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "clone"


def test_the_peer_has_the_channels_and_weights_of_the_network(clone: Path) -> None:
    network, x = build_network("unet", width=4, scales=2), torch.randn(2, 4, 8, 8, 8)
    step = peer.Step(clone, network, torch.device("cpu"), plain=True)
    torch.testing.assert_close(step.network(x), network(x))


def test_rows_count_until_the_goal_and_the_newest_runs_again(
    clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_forked: Any, data_flags: list[str], capsys: Any
) -> None:
    files = dict(flag.removeprefix("--set=").split("=") for flag in data_flags)
    changes = {**files, "Nsamples": 16, "Nsamples_val": 8, "log_noise_scale": False, "symmetries": "tutorial"}
    changes |= {"report_baselines": False, "report_pictures": False, "lr_schedule.shape": "constant", "num_epochs": 3}
    # Row 0 diverges to values of -1 and 1, so that the others reach its loss at once.
    rates = {"same recipe": 10.0, "other": 1e-3}
    conditions = [Condition(name, "test", changes={**changes, "lr_schedule.start_lr": r}) for name, r in rates.items()]
    monkeypatch.setitem(STUDIES, "record", Study(conditions, seeds=2))
    monkeypatch.setattr(common, "failure_of", run_forked)
    monkeypatch.chdir(tmp_path)
    options = [f"--output={tmp_path / 'out'}", f"--runs={tmp_path / 'runs'}"]
    with pytest.raises(UserError, match="has no goal yet: give --peer"):
        record.main(options)
    record.main([*options, f"--peer={clone}"])
    written = json.loads((tmp_path / "out/record.json").read_text())
    zero, _, other = written["rows"]
    assert zero["name"] == record.PEER
    assert written["goal"] == zero["loss"]["mean"] == pytest.approx(sum(zero["loss"]["values"]) / 2)
    assert (zero["samples"]["values"], zero["reached"]) == ([48, 48], 2)
    assert other["samples"]["values"] == [0, 0]
    assert all(loss <= written["goal"] for loss in other["loss"]["values"])
    assert str(tmp_path) not in (tmp_path / "out/record.json").read_text().replace(files["train_path"], "")
    record.main([*options, "--seeds=1"])
    (again,) = json.loads((tmp_path / "out/record_again.json").read_text())["rows"]
    assert again["samples"]["values"] == other["samples"]["values"][:1]
    assert len(list((tmp_path / "runs").glob("test/1ranks/*"))) == 5
    assert "| 0 | other | 1 of 1 |" in capsys.readouterr().out


def test_a_row_is_compared_with_the_row_before_by_welchs_test() -> None:
    """t = -4.700 with 6.98 degrees of freedom. A row that does not reach the goal in all runs has no time."""
    runs = [[{"seconds": s, "samples": 1, "loss": 0.1} for s in seconds] for seconds in ([1, 2, 3, 4], [6, 8, 7, 9, 5])]
    before = record.row_of("b", runs[1], None)
    row = record.row_of("a", runs[0], before)
    assert row["p"] == pytest.approx(0.00111, rel=0.01)
    late = record.until(0.5, {"curve": [{LOSS: 0.6, "seconds": 1}]})
    assert "seconds" not in record.row_of("c", [*runs[0], late], before)
    assert record.until(0.5, {"curve": [{LOSS: 0.6, "seconds": 1}, {LOSS: 0.5, "seconds": 2, "samples": 3}]}) == {
        "seconds": 2,
        "samples": 3,
        "loss": 0.5,
    }
