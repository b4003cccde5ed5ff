"""Tests that need a CUDA device: `pytest -m gpu`."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import TOP
from reference_samples import VECTORS, cubes, cut, loader_of, write_signed_zeros
from trainings import assert_same_training, last, metrics

import train
from networks.ops import plan
from utils.data.loaders import Loader
from utils.data.loaders.base import memory_format
from utils.data.loaders.dali import DaliLoader
from utils.data.loaders.gpu_resident import GpuResidentLoader, TritonGather, device_plan, load_resident
from utils.data.loaders.threaded import ThreadedCropLoader
from utils.data.plan import EpochPlan, SamplePlan
from utils.distributed.signals import Signals
from utils.run.writer import are_finite, host_copy
from utils.steps.eager import EagerStep
from utils.steps.graph import WARMUP_STEPS, GraphStep
from utils.volumes.convert_to_npy import convert, open_npy_volume
from utils.volumes.hdf5 import DATASETS, Volume, open_volume

pytestmark = pytest.mark.gpu

RUN = "test/1GPU/00"
both_layouts = pytest.mark.parametrize("channels_last", [False, True])


@pytest.fixture
def flags(tmp_path: Path, volume_file, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Flags that give config 'test' its data; convolutions are deterministic."""
    monkeypatch.chdir(TOP)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    train_path, val_path = (volume_file(tmp_path / f"{name}.h5", seed=seed) for seed, name in enumerate("ab", 1))
    settings = {"train_path": train_path, "val_path": val_path, "cudnn_benchmark": "false"}
    settings |= {"report_baselines": "false", "report_pictures": "false"}
    yield ["--config=test", *(f"--set={key}={value}" for key, value in settings.items())]
    torch.use_deterministic_algorithms(False)


def recorded(run: Path, *names: str) -> list[float]:
    """The values of these curves, in the order of their steps."""
    return [record[name] for record in metrics(run) for name in names if name in record]


COMPILED = ["--enable_amp", "--enable_jit", "--set=channels_last=true"]


@pytest.mark.parametrize("switches", [[], ["--enable_amp"], ["--enable_amp", "--set=precision=float16"], COMPILED])
def test_training_on_the_device_agrees_with_training_on_the_host(tmp_path, flags, switches) -> None:
    train.main([*flags, "--set=device=cpu", f"--set=expdir={tmp_path}"])
    train.main([*flags, "--set=device=cuda", f"--set=expdir={tmp_path}", *switches])
    host, device = (recorded(tmp_path / run, "Loss/valid") for run in ("test/1ranks/00", RUN))
    assert device == pytest.approx(host, rel=0.02)


KERNELS = ["--enable_amp", "--set=channels_last=true", "--set=kernels=auto"]


@pytest.mark.parametrize(
    ("loader", "switches"),
    [("resident", []), ("lowmem", []), ("resident", [*KERNELS, "--set=loss=mse"]), ("lowmem", KERNELS)],
    ids=["resident", "lowmem", "kernels, mse", "kernels"],
)
def test_training_with_cuda_graphs_agrees_with_eager_training(tmp_path, flags, loader, switches) -> None:
    flags += ["--num_epochs=3", "--set=log_interval=1", f"--data_loader_config={loader}", *switches]
    for name, step in (("plain", EagerStep), ("graphs", GraphStep)):
        train.main([*flags, f"--set=expdir={tmp_path / name}"], step_class=step)
    plain, graphs = (recorded(tmp_path / name / RUN, "Loss/valid", "Step/loss") for name in ("plain", "graphs"))
    assert "CUDA graph 1 recorded" in (tmp_path / "graphs" / RUN / "out.log").read_text()
    assert len(graphs) == 4 + 24
    assert graphs == pytest.approx(plain, rel=0.02 if switches else 1e-3)


def test_a_checkpoints_copy_is_consistent_and_in_pinned_memory() -> None:
    """It includes kernels queued before it and none queued after it."""
    busy = torch.randn(4096, 4096, device="cuda")
    weights = torch.zeros(64, 64, device="cuda")
    odd = torch.zeros(2, 4, 3, 3, 3, device="cuda").to(memory_format=torch.channels_last_3d)
    for _ in range(50):
        busy = busy @ busy / 4096
    weights.fill_(1.0)
    copied = host_copy({"network": {"weights": weights, "odd": odd}, "optimizer": {"step": weights[0, 0]}})
    weights.fill_(-1.0)
    torch.cuda.synchronize()
    assert torch.equal(copied["network"]["weights"], torch.ones(64, 64))
    assert float(copied["optimizer"]["step"]) == 1
    assert all(tensor.is_pinned() for tensor in copied["network"].values())
    assert copied["network"]["odd"].stride() == odd.stride()
    assert are_finite([weights])
    weights[3, 3] = float("nan")
    assert not are_finite([weights])


def interrupted(kind: type[EagerStep], after: int, signals: Signals) -> type[EagerStep]:
    """A step of this kind; a signal arrives during the call of number `after`."""

    class InterruptedStep(kind):
        calls = 0

        def __call__(self, *arguments: Any) -> torch.Tensor:
            self.calls += 1
            if self.calls == after:
                signals.received = "SIGTERM"
            return super().__call__(*arguments)

    return InterruptedStep


DETERMINISTIC = ["--set=deterministic=true", "--set=cudnn_benchmark=true"]
# Also in what is not trained: baselines, and the sums of the evaluations.
EVALUATED = [*DETERMINISTIC, "--set=report_baselines=true", "--set=evaluation.every_epochs=2"]


@pytest.mark.parametrize(
    ("kind", "loader", "switches"),
    [
        (GraphStep, "resident", EVALUATED),
        (GraphStep, "lowmem", []),
        (EagerStep, "lowmem", DETERMINISTIC),
        (EagerStep, "resident", [*DETERMINISTIC, *KERNELS]),
        (EagerStep, "resident", ["--enable_amp", "--set=precision=float16", "--set=channels_last=true"]),
        (EagerStep, "lowmem", ["--set=optimizer.name=soap", "--set=optimizer.precondition_frequency=3"]),
    ],
)
def test_interrupted_training_on_the_device_ends_like_an_uninterrupted_one(
    tmp_path, flags, monkeypatch, kind, switches, loader
) -> None:
    """Bit for bit with eager steps, and with graphs if `deterministic` is set; a resumed run starts eagerly."""
    deterministic = "--set=deterministic=true" in switches
    if deterministic:
        monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)  # the key alone is to suffice
    flags += ["--num_epochs=3", f"--data_loader_config={loader}", *switches]
    for name, parts in (("whole", [0]), ("parts", [5, WARMUP_STEPS + 2, 0])):
        for after in parts:
            signals = Signals()
            monkeypatch.setattr(train, "StopSignals", lambda name, signals=signals: signals)
            with pytest.raises(SystemExit, match="75") if after else contextlib.nullcontext():
                train.main([*flags, f"--set=expdir={tmp_path / name}"], interrupted(kind, after, signals))
    runs = [tmp_path / name / RUN for name in ("whole", "parts")]
    whole, parts = map(last, runs)
    assert whole.state.step == parts.state.step == 24
    if deterministic:
        assert_same_training(*runs, steps=24)
    for name, value in whole.weights["network"].items():
        resumed = parts.weights["network"][name]
        if kind is EagerStep:
            assert torch.equal(value, resumed), name
        else:
            torch.testing.assert_close(value, resumed, rtol=1e-3, atol=1e-4)
    assert whole.training["scaler"] == parts.training["scaler"]


@pytest.mark.parametrize("kind", [EagerStep, GraphStep])
def test_a_run_with_own_kernels_repeats_bit_for_bit(tmp_path, flags, monkeypatch, kind) -> None:
    """Without `deterministic`, and although cuDNN may search elsewhere."""
    if reason := plan.not_hopper(torch.device("cuda")):
        pytest.skip(reason)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    flags += [*KERNELS, "--set=cudnn_benchmark=true", "--set=network.width=64", "--num_epochs=3"]
    runs = [tmp_path / name / RUN for name in ("first", "again")]
    for run in runs:
        train.main([*flags, f"--set=expdir={run.parent.parent.parent}"], step_class=kind)
    assert "Kernels: down1, down2, up2, last by hopper; loss by last" in (runs[0] / "out.log").read_text()
    assert_same_training(*runs, steps=24)


@pytest.mark.parametrize("ddp", ["torch", "manual"])
def test_two_ranks_share_a_gpu(tmp_path, ddp) -> None:
    """Gloo exchanges their gradients; NCCL would refuse to."""
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"]
    flags = ["--config=digits_bn", "--set=num_epochs=2", f"--set=ddp={ddp}", f"--set=expdir={tmp_path}"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "0"}
    result = subprocess.run([*launch, *flags], cwd=TOP, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert "ranks share a GPU, which NCCL refuses" in result.stderr
    assert recorded(tmp_path / "digits_bn" / "2GPU" / "00", "Accuracy/valid")[-1] > 0.4


def assert_same_batches(device: Loader, host: Loader, unfinished: bool = True) -> None:
    """Asserts that two epochs are the host's, bit for bit, while kernels run; `unfinished`: after part of another."""
    if unfinished:
        begun = device.epoch(5)
        next(begun)
        begun.close()
    busy, copies = torch.randn(2048, 2048, device="cuda"), []
    for epoch in range(2):
        for batch in device.epoch(epoch):
            for _ in range(20):
                busy = busy @ busy / 2048
            copies.append([part.clone() for part in batch])
    expected = [[part.clone() for part in batch] for epoch in range(2) for batch in host.epoch(epoch)]
    for parts, others in zip(copies, expected, strict=True):
        for part, expected_part in zip(parts, others, strict=True):
            assert part.stride() == expected_part.stride()
            assert torch.equal(part.cpu().view(torch.int32), expected_part.view(torch.int32))
    device.close()
    host.close()


@pytest.mark.parametrize("split", ["train", "valid"])
@both_layouts
def test_dali_batches_equal_those_of_the_host_bit_for_bit(tmp_path, volume_file, channels_last, split) -> None:
    """With DALI's GPU operators, also after an unfinished epoch; zeros of both signs are among the values."""
    pytest.importorskip("nvidia.dali", reason="NVIDIA DALI is not installed")
    path = volume_file(tmp_path / "box.h5")
    write_signed_zeros(path)
    data, label = (str(copy) for copy in convert(path))
    plan = SamplePlan(203, cubes(16), 8, seed=1, split=split)
    copies = open_npy_volume((data, label), ("data", "label"), str(path), DATASETS, None)
    host = loader_of(ThreadedCropLoader, [open_volume(path)], plan, channels_last=channels_last)
    assert_same_batches(loader_of(DaliLoader, [copies], plan, device="cuda:0", channels_last=channels_last), host)


@pytest.mark.parametrize("resident", [None, torch.float32, torch.float16], ids=str)
@both_layouts
def test_batches_on_the_device_equal_those_on_the_host(tmp_path, volume_file, channels_last, resident) -> None:
    """Of two volumes, copied to the device or cut there, also while kernels that use earlier batches still run."""
    boxes, dtype = ((16, 16, 16), (9, 20, 12)), resident or torch.float32
    volumes = [open_volume(volume_file(tmp_path / f"{box[0]}.h5", box=box)) for box in boxes]
    plan = SamplePlan(46, boxes, 9, seed=1, split="train")
    layout = {"rank": 1, "ranks": 2, "channels_last": channels_last}
    stored = [
        Volume("in memory", *(torch.from_numpy(field[...]).to(dtype).float().numpy() for field in fields))
        for fields in ((volume.inputs, volume.targets) for volume in volumes)
    ]
    host = loader_of(ThreadedCropLoader, stored, plan, **layout)
    if resident is None:
        device = loader_of(ThreadedCropLoader, volumes, plan, device="cuda", **layout)
    else:
        loaded = load_resident(volumes, torch.device("cuda"), dtype)
        device = loader_of(GpuResidentLoader, loaded, plan, device="cuda", **layout)
    assert_same_batches(device, host, unfinished=resident is not None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stored", [torch.float32, torch.float16], ids=str)
@both_layouts
def test_gather_kernel_equals_its_definition(channels_last, stored, dtype) -> None:
    """Under all 48 symmetries, for a crop of complete and partial tiles; casts round as torch's do."""
    channels, box, crop, bits = 5, 48, 37, {4: torch.int32, 2: torch.int16}[dtype.itemsize]
    field = torch.randn((channels, box, box, box)).to(stored)
    field.view(-1)[::7] = -0.0
    origins = np.random.default_rng(0).integers(0, box - crop + 1, (48, 3))
    origins[0], origins[-1] = 0, box - crop
    plan = EpochPlan(np.zeros(48, int), origins, np.arange(48))
    shape, layout = (48, channels, *(crop,) * 3), memory_format(channels_last)
    out = torch.empty(shape, dtype=dtype, device="cuda", memory_format=layout)
    kernel = TritonGather([field.cuda()], crop, VECTORS, "full", channels_last)
    kernel(torch.from_numpy(device_plan(plan, cubes(box))).cuda(), 0, 1, out)
    for index, (origin, sample) in enumerate(zip(origins, out.cpu(), strict=True)):
        expected = torch.from_numpy(cut(field.numpy(), origin, crop, index)).to(dtype)
        assert torch.equal(sample.contiguous().view(bits), expected.view(bits))


def test_gather_kernel_addresses_more_than_two_to_the_31_values() -> None:
    channels, box, crop = 5, 784, 16
    if torch.cuda.mem_get_info()[0] < 2 * channels * box**3 + 2**30:
        pytest.skip("needs 6 GB of device memory")
    field = torch.zeros((channels, box, box, box), dtype=torch.float16, device="cuda")
    corner = field[:, -crop:, -crop:, -crop:]
    corner.copy_(torch.randn(corner.shape, device="cuda"))
    assert field.numel() > 2**31
    plan = EpochPlan(np.zeros(1, int), np.full((1, 3), box - crop), np.array([29]))
    out = torch.empty((1, *corner.shape), device="cuda")
    gather = TritonGather([field], crop, VECTORS, "full", False)
    gather(torch.from_numpy(device_plan(plan, cubes(box))).cuda(), 0, 1, out)
    assert torch.equal(out[0].cpu(), torch.from_numpy(cut(corner.float().cpu().numpy(), np.zeros(3, int), crop, 29)))
