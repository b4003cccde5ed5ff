"""Hopper's kernels of strided convolutions against torch's float64: interpreted, on a GPU, and compiled."""

from typing import Any

import fused_cases
import pytest
import torch
from devices import half_precision
from fused_cases import CHANNELS_LAST, assert_close, assert_like_torch, batch, planned, trained, values, with_loss
from torch import nn
from torch.nn import functional as F
from triton_compile import compile_launches
from triton_interpreter import replace_launch, use_small_blocks

from networks.layers import Down, Last, Up
from networks.ops import HOPPER, padded, plan
from networks.ops.hopper import tiles
from networks.ops.hopper.strided import convolve, convolve_transposed, weight_gradient
from networks.ops.launch import WARPS, Launch, collected

# Samples, channels of the small and of the large grid, and the side of the small one; blocks have 16 channels.
SHAPES: list[Any] = [(1, 16, 16, 4), (5, 16, 32, 1), (3, 16, 16, 2)]
LARGE = [(3, 32, 16, 2), (3, 48, 16, 1), (3, 32, 32, 4), (1, 16, 16, 8), (1, 16, 16, 16)]
SHAPES += [pytest.param(shape, marks=pytest.mark.slow) for shape in LARGE]
# Layers of the U-Net at batch size 64, with a cell per side less than 64: name, Cs, Cl, D.
SLOW = [("down2", 128, 64, 16), ("down3", 256, 128, 8), ("up4", 1024, 256, 4)]
SLOW += [("down4", 512, 256, 4), ("up5", 1024, 512, 2), ("down6", 512, 512, 1)]
LAYERS = [("up2", 256, 64, 16), *(pytest.param(*layer, marks=pytest.mark.slow) for layer in SLOW)]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch, interpreter: list[str]) -> list[str]:
    """The kernels run in the interpreter for multiples of 16 channels, also in float32; the names of those launched."""
    use_small_blocks(monkeypatch)
    return interpreter


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_pass_equals_torch_and_itself(small_blocks: list[str], shape: tuple[int, int, int, int]) -> None:
    """With partial tiles, split sums, pairs of planes, padded grids, bias, activation and concatenation."""
    samples, small, large, side = shape
    s, x = values(samples, small, *[side] * 3, seed=0), values(samples, large, *[2 * side] * 3, seed=1)
    w, skip = values(small, large, 4, 4, 4, seed=2) / 8, padded.padded(values(*x.shape, seed=3))
    down_bias, up_bias = values(small, seed=4), values(large, seed=5)
    exact = w.double().requires_grad_()
    convolved = F.conv3d(x.double(), exact, None, 2, 1)
    (exact_gradient,) = torch.autograd.grad(convolved, exact, s.double(), retain_graph=True)
    activated = F.leaky_relu(convolved.detach() + down_bias.double().view(-1, 1, 1, 1), 0.01)
    transposed = F.conv_transpose3d(s.double(), exact.detach(), None, 2, 1)
    joined = torch.cat([F.relu(transposed + up_bias.double().view(-1, 1, 1, 1)), skip.double()], dim=1)
    expected = [activated, transposed, joined, exact_gradient]
    got, again = (
        (
            convolve(padded.padded(x), w, down_bias, 0.01),
            convolve_transposed(s, w),
            convolve_transposed(s, w, up_bias, 0.0, skip, pads=True),
            weight_gradient(s, x),
        )
        for _ in range(2)
    )
    assert {*small_blocks} >= STRIDED
    for ours, repeated, theirs in zip(got, again, expected, strict=True):
        assert_close(ours, theirs)
        assert torch.equal(ours, repeated)
    assert padded.is_padded(got[2])
    assert torch.equal(padded.with_pads(got[2]), padded.with_pads(padded.padded(got[2].clone())))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns of NaN
def test_a_nan_reaches_the_same_values_as_in_torch(small_blocks: list[str]) -> None:
    """So no value is read across a face of the grid, and ReLU passes NaN on."""
    s, x, w = values(2, 16, 2, 2, 2), values(2, 16, 4, 4, 4, seed=1), values(16, 16, 4, 4, 4, seed=2)
    s[1, 3, 1, 1, 1] = x[1, 0, 3, 3, 3] = x[0, 0, 0, 0, 0] = torch.nan
    zero = torch.zeros(16)
    for got, expected in (
        (convolve_transposed(s, w, zero, 0.0), F.relu(F.conv_transpose3d(s, w, None, 2, 1))),
        (convolve(x, w, zero, 0.01), F.conv3d(x, w, None, 2, 1)),
    ):
        assert got.isnan().any()
        assert torch.equal(got.isnan(), expected.isnan())


EDGES = {"rows_to_blocks", "blocks_to_padded_rows", "block_weight_gradient"}
STRIDED = {"strided_convolution", "transposed_convolution", "strided_weight_gradient"}
KINDS = [(Down, 4, EDGES), (Last, 5, EDGES), (Down, 0, STRIDED), (Up, 0, STRIDED)]  # with few channels, or 0


@half_precision("small_blocks")
@pytest.mark.parametrize(("kind", "few", "kernels"), KINDS)
def test_layers_under_autocast(request: Any, place: str, dtype: torch.dtype, kind: Any, few: int, kernels: Any) -> None:
    """Outputs and gradients have the errors of half precision, and the same bits in a second run."""
    launched, device = request.getfixturevalue(place), torch.device("cuda" if place == "on_device" else "cpu")
    if reason := plan.not_hopper(device):
        pytest.skip(reason)
    torch.manual_seed(0)
    width, side = (32, 4) if place == "small_blocks" else (128, 16)
    channels = (few or width, width) if kind is Down else (width, few or width)
    layer = kind(*channels, 0).to(device, memory_format=CHANNELS_LAST)
    nn.init.constant_(layer.bias, 0.0 if kind is Last else 4.0)  # rounding moves no activation across zero
    x = values(2, channels[0], *[side] * 3).to(dtype).float().to(device)
    skip = values(2, 3, *[2 * side] * 3, seed=5).to(dtype).to(device)
    got = assert_like_torch(layer, dtype, x, *([skip] if kind is Up else []))
    assert kernels <= {*launched}
    assert got[0].dtype == (torch.float32 if (dtype, kind) == (torch.bfloat16, Last) else dtype)
    assert got[2].dtype == torch.float32


def test_the_kernels_of_a_step_are_known_without_data(small_blocks: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them, for the same types, block shapes and constants, from tensors without data."""
    made = []

    def note(kernel: Any, programs: int, *arguments: Any, num_warps: int = WARPS, **constants: Any) -> None:
        options = {**constants, "num_warps": num_warps, "enable_fp_fusion": False}
        made.append(Launch(kernel, arguments, options).signature())
        launch(kernel, programs, *arguments, num_warps=num_warps, **constants)

    module, parts = with_loss(width=16, scales=2), batch(size=4)
    with torch.device("meta"):
        empty = planned(with_loss("meta", width=16, scales=2), "auto", 4, torch.float16)
    with collected() as launches:
        empty(*(torch.empty_like(part, device="meta") for part in parts)).backward()
    launch = replace_launch(monkeypatch, note)
    trained(planned(module, "auto", 4, torch.float16), parts, torch.float16)
    assert {planned_launch.signature() for planned_launch in launches} == set(made)


def test_float32_fields_of_64_channels_are_cast_for_the_kernels() -> None:
    """tl.dot refuses factors of different dtypes."""
    pytest.importorskip("triton")
    with torch.device("meta"), collected() as made:
        layer = Down(64, 64, 0)
        layer.operation, layer.dtype = HOPPER, torch.bfloat16
        layer(torch.empty(2, 64, 16, 16, 16))
    assert {view.base.dtype for view in made[0].arguments[:3]} == {torch.bfloat16}


@pytest.mark.parametrize("options", [{}, {"conditioned": True}], ids=["plain", "conditioned"])
def test_a_network_trains_as_with_torch(small_blocks: list[str], monkeypatch: Any, options: dict[str, Any]) -> None:
    """With bias, activation and concatenation in the convolutions' kernels, and grids that have pads."""
    network = {"width": 16, "scales": 2, **options}
    module, parts = planned(with_loss(**network), "auto", 8, torch.float16), batch(size=8)
    parts += [fused_cases.CONDITIONS] if options else []
    got = trained(module, parts, torch.float16)
    assert STRIDED | {"blocks_to_padded_rows"} <= {*small_blocks}
    assert small_blocks.count("bias_activation_forward") == (4 if options else 1)
    fused_cases.assert_trains_like(got, with_loss(**network), parts, torch.float16)


@pytest.mark.parametrize(("name", "small", "large", "side"), LAYERS)
def test_compiled_kernels_fit_into_a_multiprocessor(monkeypatch, tmp_path, name, small, large, side: int) -> None:
    compiled = compile_launches(monkeypatch, tmp_path)
    meta = {"device": "meta", "dtype": torch.bfloat16}
    shapes = (64, small, *[side] * 3), (64, large, *[2 * side] * 3), (small, large, 4, 4, 4)
    s, x, w = (torch.empty(shape, **meta).contiguous(memory_format=CHANNELS_LAST) for shape in shapes)
    convolve(x, w, torch.empty(small, device="meta"), 0.01)
    convolve_transposed(s, w, torch.empty(large, device="meta"), 0.0, x, name == "up2")
    weight_gradient(s, x)
    assert {name for name, *_ in compiled} >= STRIDED
    for name, programs, _, result in compiled:
        assert result.shared <= tiles.SHARED_MEMORY, name
        assert programs >= 32, name
