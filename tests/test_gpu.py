"""What a CUDA device alone can show: `pytest -m gpu`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import train
from utils.data.native import NativeLoader
from utils.data.plan import SamplePlan
from utils.data.volumes import open_volume

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

TOP = Path(__file__).parent.parent
VECTORS = (((1, 2, 3),), ((1, 2, 3),))


def test_batches_on_the_device_are_those_on_the_host_bit_for_bit(tmp_path, volume_file) -> None:
    """Also while kernels that use a batch still run when the next ones are copied."""
    volume = open_volume(volume_file(tmp_path / "box.h5"), (4, 5))
    plan = SamplePlan(48, 16, 8, seed=1)
    loaders = [
        NativeLoader(volume, plan, batch_size=4, vectors=VECTORS, device=torch.device(name)) for name in ("cpu", "cuda")
    ]
    busy = torch.randn(2048, 2048, device="cuda")
    kept = []
    for epoch in range(2):
        for inputs, targets in loaders[1].epoch(epoch):
            for _ in range(20):
                busy = busy @ busy / 2048
            kept.append((inputs.clone(), targets.clone()))  # queued behind the products
    expected = [(inputs.clone(), targets.clone()) for epoch in range(2) for inputs, targets in loaders[0].epoch(epoch)]
    for pair, other in zip(kept, expected, strict=True):
        for device, host in zip(pair, other, strict=True):
            assert torch.equal(device.cpu(), host)
    for loader in loaders:
        loader.close()


@pytest.mark.parametrize("switches", [[], ["--enable_amp"], ["--enable_amp", "--set=precision=float16"]])
def test_training_on_the_device_follows_the_one_on_the_host(tmp_path, volume_file, monkeypatch, switches) -> None:
    monkeypatch.chdir(TOP)
    settings = {
        "train_path": volume_file(tmp_path / "train.h5", seed=1),
        "val_path": volume_file(tmp_path / "val.h5", seed=2),
        "report_baselines": "false",
    }
    losses = {}
    for device in ("cpu", "cuda"):
        expdir = tmp_path / device
        flags = [f"--set={key}={value}" for key, value in {**settings, "device": device, "expdir": expdir}.items()]
        train.main(["--config=test", *flags, *(switches if device == "cuda" else [])])
        records = (expdir / "test/1GPU/00/metrics.jsonl").read_text().splitlines()
        losses[device] = [value["Loss/valid"] for value in map(json.loads, records) if "Loss/valid" in value]
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=0.02)
