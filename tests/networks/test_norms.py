"""Each norm equals torch's, over the values that its name says, on one rank and on two."""

import copy

import pytest
import torch
from processes import run_ranks
from torch import Tensor, nn

from networks.norms import build_norm, ghost_batch
from utils.distributed.world import World

CHANNELS = 6
CELLS = [(5,), (3, 4), (2, 3, 4)]  # grids of 1, 2 and 3 dimensions
PLAIN = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
NORMS = pytest.mark.parametrize("spec", ["batch", "sync_batch", "ghost(2)", "group"])


def normal(*shape: int, seed: int = 9, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal values that every dtype represents exactly."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.bfloat16().to(dtype)


def activations(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal values whose mean and spread differ between channels."""
    scale = torch.arange(1, shape[1] + 1, dtype=torch.float64).view(1, -1, *[1] * (len(shape) - 2))
    return ((normal(*shape, seed=0) + 3) * scale).bfloat16().to(dtype)


def with_weights(norm: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The norm with random weight, bias and running statistics."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for value in [*norm.parameters(), *norm.buffers()]:
            if value.is_floating_point():
                value.uniform_(0.5, 1.5, generator=generator)
    return norm.to(dtype)


def results(norm: nn.Module, x: Tensor, upstream: Tensor | None = None) -> dict[str, Tensor]:
    """Output, gradients, and buffers after a forward and backward pass."""
    y = norm(x.requires_grad_())
    upstream = normal(*y.shape, dtype=y.dtype) if upstream is None else upstream
    names, parameters = zip(*norm.named_parameters(), strict=True)
    gradients = dict(zip(("input", *names), torch.autograd.grad(y, [x, *parameters], upstream), strict=True))
    buffers = {name: buffer.clone() for name, buffer in norm.named_buffers()}
    return {"output": y.detach(), **{f"gradient of {name}": value for name, value in gradients.items()}, **buffers}


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        difference = float((got[name].double() - value.double()).abs().max())
        assert difference <= tolerance * max(float(value.abs().max()), 1.0), name


def test_names_are_parsed_and_errors_list_the_known_ones() -> None:
    assert ghost_batch("ghost(32)") == 32
    assert isinstance(build_norm("none", CHANNELS), nn.Identity)
    for spec in ("foo", "ghost", "ghost(0)", "ghost(n)", "ghost(2"):
        with pytest.raises(ValueError, match=r"unknown norm .*known: none, batch, sync_batch, ghost\(n\) .* group"):
            build_norm(spec, 4)


@pytest.mark.parametrize("spec", ["batch", "sync_batch", "ghost(4)"])
def test_one_rank_with_one_group_gives_batch_norm_bit_for_bit(spec: str) -> None:
    """In training from the same state, and in evaluation, which uses the running statistics."""
    for cells in CELLS:
        norm, plain = build_norm(spec, CHANNELS), PLAIN[len(cells)](CHANNELS)
        started, fresh = norm.state_dict(), plain.state_dict()
        assert list(started) == list(fresh)
        assert all(torch.equal(started[name], value) for name, value in fresh.items())
        norm.load_state_dict(with_weights(plain, torch.float32).state_dict())
        x = activations(4, CHANNELS, *cells, dtype=torch.float32)
        got, expected = results(norm, x), results(plain, x)
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[name], value) for name, value in expected.items())
        smaller = x[:3]  # no multiple of the ghost batch
        assert torch.equal(norm.eval()(smaller), plain.eval()(smaller))
        assert norm.state_dict()["num_batches_tracked"] == 1


@pytest.mark.parametrize("samples", [2, 3, 6])
def test_each_ghost_batch_is_normalized_separately(samples: int) -> None:
    """One batch norm per group, all from the same state; gradients are summed, statistics averaged."""
    groups = 12 // samples
    for cells in ((), *CELLS):
        plain = with_weights(PLAIN[max(len(cells), 1)](CHANNELS))
        x, upstream = activations(12, CHANNELS, *cells), normal(12, CHANNELS, *cells)
        parts = [results(copy.deepcopy(plain), x[at::groups].detach(), upstream[at::groups]) for at in range(groups)]
        expected = {}
        for name in parts[0]:
            values = [part[name].double() for part in parts]
            if name in ("output", "gradient of input"):
                expected[name] = torch.stack(values, dim=1).flatten(0, 1)
            else:
                expected[name] = torch.stack(values).sum(0) / (1 if name.startswith("gradient") else groups)
        assert_close(results(with_weights(build_norm(f"ghost({samples})", CHANNELS)), x), expected, 1e-12)
        assert float((expected["output"] - plain(x).detach()).abs().max()) > 1e-2, "the groups must matter"


@NORMS
def test_channels_last_changes_neither_results_nor_layout(spec: str) -> None:
    for cells, form in (((3, 4), torch.channels_last), ((2, 3, 4), torch.channels_last_3d)):
        x = activations(4, CHANNELS, *cells)
        first, second = (with_weights(build_norm(spec, CHANNELS)) for _ in range(2))
        got = results(second, x.contiguous(memory_format=form))
        assert_close(got, results(first, x), 1e-12)
        if spec != "group":  # torch chooses the layout of its group norm
            assert got["output"].is_contiguous(memory_format=form)


@pytest.mark.parametrize(("channels", "groups"), [(64, 32), (48, 24), (33, 11), (37, 1)])
def test_group_norm_is_torchs_with_the_most_groups_up_to_32(channels: int, groups: int) -> None:
    for cells in CELLS:
        norm, plain = with_weights(build_norm("group", channels)), with_weights(nn.GroupNorm(groups, channels))
        x = activations(2, channels, *cells)
        assert list(norm.state_dict()) == list(plain.state_dict())
        assert_close(results(norm, x), results(plain, x), 1e-12)


@NORMS
def test_statistics_of_bfloat16_activations_are_float32(spec: str) -> None:
    """Around 100 ± 1 a bfloat16 mean has an error of up to 0.25, a variance a larger one. Results are rounded once."""
    x = (100 + activations(4, CHANNELS, 8, 8, dtype=torch.float32) / 10).bfloat16()
    norm, plain = (with_weights(build_norm(spec, CHANNELS), torch.float32) for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        got = results(norm, x)
    expected = results(plain.double(), x.double())
    assert got["output"].dtype == got["gradient of input"].dtype == torch.bfloat16
    assert all(value.dtype == torch.float32 for name, value in got.items() if "running" in name or "weight" in name)
    assert_close({"output": got["output"]}, {"output": expected["output"]}, 2**-8)
    statistics = [name for name in expected if name.startswith("running")]
    assert_close({name: got[name] for name in statistics}, {name: expected[name] for name in statistics}, 1e-5)


def sync_on_cpus(world: World) -> None:
    """One rank normalizes its batch, although torch's refuses every process group on a CPU; several ranks refuse."""
    x, norm, plain = activations(3, CHANNELS, 3, 4), build_norm("sync_batch", CHANNELS), nn.BatchNorm2d(CHANNELS)
    norm, plain = with_weights(norm), with_weights(plain)
    if world.size > 1:
        with pytest.raises(ValueError, match="expected input tensor to be on"):
            norm(x)
    else:
        got, expected = results(norm, x), results(plain, x)
        assert all(torch.equal(got[name], value) for name, value in expected.items())
    with torch.device("meta"):
        assert build_norm("sync_batch", CHANNELS)(torch.empty(3, CHANNELS, 4)).shape == (3, CHANNELS, 4)
    if world.rank == 0:  # only this rank predicts: in evaluation mode no rank waits for others
        assert torch.equal(norm.eval()(x), plain.eval()(x))


@pytest.mark.parametrize("ranks", [1, 2])
def test_on_cpus_ranks_do_not_synchronize_but_predict_and_estimate_memory(ranks: int) -> None:
    run_ranks(sync_on_cpus, ranks)
