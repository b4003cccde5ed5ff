"""Integrity checks find flipped bits and devices that compute wrong, name the rank, and change no bit of a run."""

import contextlib
import copy
import itertools
import logging
import math
import random
import re
import socket
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from processes import run_ranks
from small_steps import batch, flat_parameters, make_step, small_network
from torch import nn
from trainings import ALONE, YAML, assert_equal, directory, last, train_on

import train
from utils.config import Config
from utils.distributed.world import World
from utils.errors import EXIT_CORRUPTION, CorruptionError
from utils.run.checkpoint import saved_steps
from utils.steps.eager import EagerStep
from utils.training.integrity import (
    CHUNK,
    FACTOR,
    Integrity,
    differences,
    digest,
    disagreeing,
    measure,
    measured,
    minority,
)

FAULTY, STEP, EVERY = 1, 6, 4  # the rank, the step that it flips a bit in, and the steps between two checks


def flip(tensor: torch.Tensor) -> None:
    """Flips a bit of one element, in place. It is not the lowest one: an update may round that of a gradient away."""
    tensor.detach().view(torch.int32)[(0,) * tensor.dim()] ^= 1 << 20


class CountingStep(EagerStep):
    """Flips a bit of `flipped` after a step."""

    steps = 0

    def flipped(self):
        return torch.zeros(1)

    @property
    def flips(self) -> bool:
        return self.steps == STEP and dist.get_rank() == FAULTY

    def __call__(self, *arguments):
        self.steps += 1
        loss = super().__call__(*arguments)
        if self.flips:
            flip(self.flipped())
        return loss


class WeightFlips(CountingStep):
    def flipped(self):
        return self._parameters[0]


class MomentFlips(CountingStep):
    def flipped(self):
        return self.optimizer.state[self._parameters[-1]]["exp_avg_sq"]


class GradientFlips(CountingStep):
    """After the exchange, before the update."""

    def _clip(self):
        if self.flips:
            flip(self._parameters[0].grad)
        return super()._clip()


class StaleLine(CountingStep):
    """In the exchange of the second check all ranks get 16 values of the mean gradient of the step before."""

    ranks: tuple[int, ...] = (0, 1, 2)

    def _accumulate(self, batch):
        loss, gradient = super()._accumulate(batch), self._parameters[2].grad.view(-1)
        mean = gradient[32:48].clone()
        if self.steps == 2 * EVERY and dist.get_rank() in self.ranks:
            gradient[32:48] = self.stale
        self.stale = mean
        return loss


class StaleLineOfOneRank(StaleLine):
    ranks = (FAULTY,)


class ComputesWrong(EagerStep):
    """Finite gradients that are slightly wrong in every step. All ranks update with the same mean."""

    def __init__(self, model, *arguments):
        super().__init__(model, *arguments)
        if dist.get_rank() == FAULTY:
            model.network.register_forward_hook(lambda module, inputs, outputs: outputs * 1.0001)


def flags_of(expdir: Path, data_flags: list[str], *more: str) -> list[str]:
    return [*data_flags, "--config=test", f"--set=expdir={expdir}", f"--set=integrity.every={EVERY}", *more]


def errors_of(world: World, flags: list[str], step_classes: tuple[type[EagerStep], ...]) -> tuple[str, ...]:
    lines = []
    for kind in step_classes:
        with pytest.raises(CorruptionError) as error:
            train_on(world, [*flags, f"--run_num={kind.__name__}"], kind)
        lines.append(str(error.value))
    return tuple(lines)


@pytest.mark.parametrize("ranks", [2, 3])
def test_checks_find_flipped_bits_and_replays_wrong_results(ranks: int, tmp_path: Path, data_flags: list[str]) -> None:
    """Two ranks cannot say which of them is wrong; of three, it is the one in the minority."""
    flags = flags_of(tmp_path, data_flags, "--set=global_batch_size=6", "--set=Nsamples=60", "--set=log_interval=2")
    steps = WeightFlips, MomentFlips, GradientFlips, ComputesWrong
    (lines,) = {*run_ranks(errors_of, ranks, flags, steps)}  # the same on every rank
    host = socket.gethostname()
    named = f"one of the ranks 0 ({host}), 1 ({host})" if ranks == 2 else f"rank 1 ({host})"
    flipped = f"integrity check of step 8: wrong weights or optimizer state on {named}; "
    assert [line.startswith(flipped) for line in lines] == [True, True, True, False], lines
    assert lines[3].startswith(f"integrity check of step {EVERY}: wrong results of a micro-batch on {named}"), lines
    assert not [*tmp_path.glob("**/checkpoints/step_*")]


@pytest.mark.parametrize("options", [["--set=ddp=manual"], ["--set=accumulation_steps=2"]], ids=str)
def test_a_wrong_exchange_is_found_though_all_ranks_share_it(options: Any, tmp_path: Path, data_flags: Any) -> None:
    """A run with stale values ended with wrong weights and exit code 0."""
    steps = StaleLine, StaleLineOfOneRank
    (lines,) = {*run_ranks(errors_of, 2, flags_of(tmp_path, data_flags, *options), steps)}
    host = socket.gethostname()
    wrong = r"integrity check of step 8: wrong mean gradient of [\w.]+\.weight after the exchange on "
    for line, ranks in zip(lines, (f"the ranks 0 ({host}), 1 ({host})", f"rank 1 ({host})"), strict=True):
        assert re.match(wrong + re.escape(f"{ranks}; test the network"), line), line
        assert "; checkpoints after step 4 may be wrong and are renamed" in line


def train_measured(world: World, **options: Any) -> tuple[bool, float]:
    """True if steps whose exchange is measured end with the same bits as others; the largest difference."""
    ends, largest = [], 0.0
    for is_measured in (False, True):
        step = make_step("adam", world=world, network=small_network("batch"), bucket_cap_mb=0.005, **options)
        for number in range(4):
            sums = torch.zeros(len(step.trained), 4, dtype=torch.float64)
            step.exchange = measured(step.trained.values(), sums) if is_measured else contextlib.nullcontext()
            step(batch(number * world.size + world.rank), 0.01)
            largest = max(largest, float(differences(world.gather(sums)).max()))
        ends.append(flat_parameters(step))
    return torch.equal(*ends), largest


def train_measured_in_all_ways(world: World) -> list[tuple[bool, float]]:
    options = [{"ddp": ddp, "accumulation_steps": parts} for ddp in ("torch", "manual") for parts in (1, 2)]
    return [train_measured(world, **more) for more in options]


def test_measuring_an_exchange_changes_no_bit() -> None:
    """On three ranks the factor 1/3 is rounded: a hook that divides would change bits."""
    for results in run_ranks(train_measured_in_all_ways, 3):
        assert [same for same, _ in results] == [True] * 4
        assert all(0 < largest < FACTOR / 4 for _, largest in results)


def test_the_sums_of_an_exchange_change_with_each_kind_of_fault() -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(3, 2 * CHUNK + 100, generator=generator)

    def largest(mean: torch.Tensor) -> float:
        sums = torch.zeros(3, 1, 4, dtype=torch.float64)
        for row, gradient in zip(sums[:, 0], gradients, strict=True):
            measure(row[:2], mean, gradient)
            measure(row[2:], mean, mean)
        return float(differences(sums).max())

    mean = gradients.mean(0)
    assert largest(mean) < FACTOR / 4
    for place in (0, 4096, CHUNK - 16, 2 * CHUNK):
        line = slice(place, place + 32)
        for values in (mean[line].roll(16), gradients[0, line], torch.zeros(32), 1.1 * mean[line]):
            wrong = mean.clone()
            wrong[line] = values
            assert largest(wrong) > 2 * FACTOR
    for value in (math.nan, math.inf):  # such an update is skipped
        mean[7] = value
        assert largest(mean) == 0
    gradients.zero_()
    assert largest(gradients[0]) == 0


def test_no_checkpoint_has_weights_on_which_the_ranks_differ(tmp_path: Path, data_flags: list[str]) -> None:
    """A save compares first, also between two checks."""
    saves = ["--set=checkpoint.every_steps=1", "--set=integrity.every=1000"]
    ((line,), _) = run_ranks(errors_of, 2, flags_of(tmp_path, data_flags, *saves), (WeightFlips,))
    assert line.startswith(f"integrity check of step {STEP}: ")
    assert last(directory(tmp_path, 2, "WeightFlips")).state.step == STEP - 1


@pytest.mark.parametrize(
    "options",
    [
        ["--set=ddp=manual"],
        ["--set=optimizer.name=soap", "--set=optimizer.precondition_frequency=2", "--set=ema_decay=0.9"],
    ],
    ids=["manual", "soap and average"],
)
def test_checks_change_no_bit_of_a_run(options: list[str], tmp_path: Path, data_flags: list[str]) -> None:
    ends = []
    for every in (0, 3):
        flags = flags_of(tmp_path / str(every), data_flags, *options, "--set=accumulation_steps=2")
        run_ranks(train_on, 2, [*flags, f"--set=integrity.every={every}"])
        ends.append(last(directory(tmp_path / str(every), 2)))
    assert_equal(ends[0].weights["network"], ends[1].weights["network"])
    for part in ("optimizer", "scaler", "random"):
        assert_equal(ends[0].training[part], ends[1].training[part])
    assert [end.state.checked for end in ends] == [0, 15]


def test_the_last_checkpoint_before_a_good_replay_is_kept(tmp_path: Path, data_flags: list[str]) -> None:
    """In addition to the last two: checks after steps 7 and 14, a checkpoint after each of the 16 steps."""
    options = ["--set=checkpoint.every_steps=1", "--set=checkpoint.keep_last=2", "--set=integrity.every=7"]
    train_on(ALONE, flags_of(tmp_path, data_flags, *options))
    kept = {int(path.name[5:]) for path in (directory(tmp_path) / "checkpoints").glob("step_*")}
    assert kept - {last(directory(tmp_path)).state.best_step} | {16} == {14, 15, 16}


class ComputesWrongAfterTheFirstCheck(EagerStep):
    replays = 0

    def recompute(self, *arguments):
        self.replays += 1
        return super().recompute(*arguments) * (1 + 1e-6 * (self.replays == 6))  # two per check, and two before


def test_a_restart_after_wrong_replays_resumes_before_them(tmp_path: Path, data_flags: list[str], capfd: Any) -> None:
    """A fixed bug: torchrun's restart resumed from a checkpoint that the line named as wrong. Also on one rank."""
    flags = flags_of(tmp_path, data_flags, "--set=checkpoint.every_steps=1")
    with pytest.raises(SystemExit) as end:
        train.main([f"--yaml_config={YAML}", *flags], ComputesWrongAfterTheFirstCheck)
    assert end.value.code == EXIT_CORRUPTION == 77
    line = r"^error: integrity check of step 8: wrong results of a micro-batch on rank 0 \(.* after step 4 may be wrong"
    assert re.search(rf"{line} and are renamed to doubtful_step_…; the same", capfd.readouterr().err, re.MULTILINE)
    run = directory(tmp_path)
    assert saved_steps(run / "checkpoints") == [4]
    assert (run / "checkpoints" / "doubtful_step_00000007").is_dir()
    train_on(ALONE, flags)
    assert f"Resuming from {run}/checkpoints/step_00000004, after step 4\n" in (run / "out.log").read_text()


@pytest.mark.parametrize(("ranks", "parts"), [(256, 1), (2, 256)])
def test_the_limit_covers_sums_of_many_equal_gradients(ranks: int, parts: int) -> None:
    """Of ranks or of micro-batches: their rounding errors do not cancel each other."""
    gradient, row = torch.randn(1000, generator=torch.Generator().manual_seed(0)), torch.zeros(4, dtype=torch.float64)
    total, count = torch.zeros(1000), ranks * parts
    for _ in range(parts):
        measure(row[:2], gradient, gradient / parts)
    for _ in range(count):
        total += gradient / count
    measure(row[2:], total, total)
    difference = float(differences(row.expand(ranks, 1, 4), parts).max())
    assert 1 / (ranks + parts) < difference < FACTOR / 4


class Noise(nn.Module):
    """Counts its calls, and adds noise from the source of this name."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source, self.calls, self.lock = source, 0, threading.Lock() if source == "lock" else None
        self.own = torch.Generator().manual_seed(1), np.random.default_rng(1), random.Random(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = x * (1 + self.calls / 10 * (self.source == "calls"))
        if self.source in ("python", "own python"):
            return x + (random if self.source == "python" else self.own[2]).random()
        if self.source in ("numpy", "own numpy"):
            return x + (np.random if self.source == "numpy" else self.own[1]).normal()
        return x + torch.rand((), generator=self.own[0]) if self.source == "own torch" else x


REPLAYED = [nn.Identity(), nn.Dropout(), nn.BatchNorm3d(4), *map(Noise, ("", "python", "numpy"))]
OTHERS = [nn.SyncBatchNorm(4), *map(Noise, ("calls", "own python", "own numpy", "own torch", "lock"))]


@pytest.mark.parametrize("layer", [*REPLAYED, *OTHERS], ids=lambda layer: getattr(layer, "source", str(layer)))
def test_hidden_state_of_networks_gives_no_false_alarm_and_is_not_changed(layer: Any, monkeypatch: Any) -> None:
    """Fixed: good devices ended with exit code 77, checks changed later calls, and dropout and batch norms had none."""
    monkeypatch.setattr(nn.SyncBatchNorm, "forward", nn.BatchNorm3d.forward)  # it needs a GPU
    monkeypatch.setattr(nn.SyncBatchNorm, "_check_input_dim", lambda *_: None)
    step = make_step(network=nn.Sequential(layer, nn.Conv3d(4, 5, 1)))

    def state() -> list[Any]:
        numbers = torch.get_rng_state(), [*random.getstate()], np.random.get_state()[1].tolist()  # noqa: NPY002
        return [[*layer.buffers()], getattr(layer, "calls", 0), *numbers]

    before = copy.deepcopy(state())
    assert Integrity(Config(), step, ALONE)._repeats(batch(), 0) == (layer in REPLAYED)
    if layer in REPLAYED:
        assert_equal(step.recompute(batch()), step.recompute(batch()))
    assert_equal(before, state())


def test_one_rank_does_not_claim_to_compare_weights(caplog: Any) -> None:
    """A fixed bug: the log promised a comparison with other ranks."""
    caplog.set_level(logging.INFO)
    for layer, says in ((nn.Identity(), "replays bit for bit"), (Noise("own torch"), "no replays, because two ")):
        step = make_step(network=nn.Sequential(nn.Conv3d(4, 5, 1), layer))
        Integrity(Config(integrity={"every": 4}), step, ALONE).prepare(batch())
        assert f": no other rank to compare; {says}" in caplog.messages.pop()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8])
def test_a_digest_depends_on_each_bit_and_on_the_order(dtype: torch.dtype) -> None:
    tensors = [torch.arange(6, dtype=torch.uint8).to(dtype), torch.ones(2, 3, dtype=dtype).T]
    before = digest(tensors)
    assert before == digest([tensor.clone() for tensor in tensors])
    assert before != digest(tensors[::-1])
    for tensor in tensors:
        integers = tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
        for bit in range(8 * tensor.element_size() - (dtype != torch.uint8)):
            integers[1] ^= 1 << bit
            assert digest(tensors) != before
            integers[1] ^= 1 << bit


def test_a_digest_changes_if_values_are_swapped_or_flips_cancel() -> None:
    """A fixed bug: it was a plain sum, so that a checkpoint with such weights was saved."""
    for shape in ((24,), (6, 4), (2, 3, 4)):
        words = torch.arange(24, dtype=torch.int32)
        before = digest([words.view(shape)])
        assert digest([words.flip(0).view(shape)]) != before
        for first, second in itertools.combinations(range(24), 2):
            swapped, flipped = words.clone(), words.clone()
            swapped[[first, second]] = words[[second, first]]
            flipped[first], flipped[second] = words[first] + 64, words[second] - 64
            assert digest([swapped.view(shape)]) != before
            assert digest([flipped.view(shape)]) != before


def test_suspects() -> None:
    assert minority([5, 5, 5]) == []
    assert minority([5, 6]) == [0, 1]
    assert minority([5, 5, 6]) == [2]
    assert minority([5, 5, 6, 6]) == [0, 1, 2, 3]

    def of(results: list[tuple[float, float]]) -> list[int]:
        return disagreeing(torch.tensor(results)[..., None], torch.equal)

    assert of([(1, 1)]) == []
    assert of([(1, 2)]) == [0]
    # Rank r has its own batch's result, r, and that of the rank before it.
    assert of([(0, 2), (1, 0), (2, 1)]) == []
    assert of([(0, 2), (1.5, 0.5), (2, 1)]) == [1]
    assert of([(0, 1), (1, 0.5)]) == [0, 1]
    assert of([(0, 3), (1, 0), (2, 1.5), (3, 2)]) == [1, 2]  # once: it may be either
