"""Each strided convolution of the U-Net alone, in each pass, by Triton kernels and by cuDNN.

python -m benchmarks.layers            at full size, on a GPU; also the first part of make bench-gpu CALL=1

Medians of repeated calls on half-precision operands: cuDNN's after its search, with the cast of weight gradients to
float32, and `down1` and `last` as dense convolutions over 2³ blocks. Copies that make blocks or pads are not included.
% are of the rate of matrix products, cold (before anything else) and warm (at the end). Errors are relative.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import common
from networks.ops import HOPPER, padded, plan
from networks.ops.blocks import cells_weight, has_few_channels, space_to_depth
from networks.ops.hopper.tiles import BLOCK
from networks.ops.precision import DENSE, UP
from networks.unet import UNet
from utils.errors import UserError

COLD, WARM, CUDNN, OWN = "matmul TFLOP/s at the start", "matmul TFLOP/s at the end", "cuDNN", "own"
MATMUL_SIDES = {"cuda": 8192, "cpu": 1024}  # of matrices whose product fills the device and takes milliseconds
DOWN = [2] * 3, [1] * 3, [1] * 3, False, [0] * 3, 1  # as in networks/ops/precision.py
Call = Callable[[], torch.Tensor]
convolution, backward = torch.ops.aten.convolution, torch.ops.aten.convolution_backward


def half(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32  # CPUs may emulate bfloat16


def matmul_rate(device: torch.device, dtype: torch.dtype | None = None) -> float:
    """Median TFLOP/s of repeated products of two square matrices of normal numbers; zeros would need less power."""
    size, generator = MATMUL_SIDES[device.type], torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(size, size, device=device, generator=generator) for _ in range(2))
    left, right = left.to(dtype or half(device)), right.to(dtype or half(device))
    product = torch.empty_like(left)
    return 2e-12 * size**3 / statistics.median(common.repeat(lambda: torch.mm(left, right, out=product), device, 0.5))


# s [N, Cs, D, D, D], l [N, Cl, 2D, 2D, 2D] and w [Cs, Cl, 4, 4, 4] as coarse, fine and weights in hopper/common.py.


def own_calls(s: torch.Tensor, l: torch.Tensor, w: torch.Tensor) -> list[Call]:  # noqa: E741
    """Triton kernels for convolution, transposed convolution and weight gradient."""
    from networks.ops.hopper import edges, strided

    if has_few_channels(w):
        rows, b = padded.padded(s), space_to_depth(l)
        calls: list[Call] = [lambda: edges.blocks_to_rows(b, w), lambda: edges.rows_to_cells(rows, w, s.dtype)]
        return [*calls, lambda: edges.weight_gradient(rows, b)]
    large = padded.padded(l) if w.shape[1] == BLOCK else l  # as in a step
    calls = [lambda: strided.convolve(large, w), lambda: strided.convolve_transposed(s, w)]
    return [*calls, lambda: strided.weight_gradient(s, large)]


def library_calls(s: torch.Tensor, l: torch.Tensor, w: torch.Tensor) -> list[tuple[Call, Call]]:  # noqa: E741
    """cuDNN's, and what PyTorch computes without blocks, for the same."""
    weights, inputs = [False, True, False], [True, False, False]
    plain: list[Call] = [lambda: convolution(l, w, None, *DOWN), lambda: convolution(s, w, None, *UP)]
    plain += [lambda: backward(s, l, w, None, *DOWN, weights)[1].float()]
    if not has_few_channels(w):
        return list(zip(plain, plain, strict=True))
    b, dense = space_to_depth(l), cells_weight(w).to(memory_format=torch.channels_last_3d)
    cudnn: list[Call] = [lambda: backward(b, s, dense, None, *DENSE, inputs)[0]]
    cudnn += [lambda: convolution(s, dense, None, *DENSE)]
    cudnn += [lambda: backward(b, s, dense, None, *DENSE, weights)[1].float()]
    return list(zip(cudnn, plain, strict=True))


def measure(name: str, layer: Any, batch: int, side: int, choice: plan.Choice) -> list[dict[str, Any]]:
    """A row for each pass of a layer; `side`: D of the small grid."""
    device, (small, large) = layer.weight.device, layer.weight.shape[:2]
    s, l, w = (  # noqa: E741
        torch.randn(shape, device=device).to(half(device), memory_format=torch.channels_last_3d)
        for shape in ((batch, small, *[side] * 3), (batch, large, *[2 * side] * 3), (small, large, 4, 4, 4))
    )
    is_down, kinds, rows = name.startswith("down"), ["forward", "input gradient", "weight gradient"], []
    own: Sequence[Call | None] = own_calls(s, l, w) if choice.operation == HOPPER else [None] * 3
    if not is_down:  # the convolution is the input gradient, and the transposed one the forward pass
        kinds[:2] = kinds[1::-1]
    for kind, kernel, (cudnn, plain) in zip(kinds, own, library_calls(s, l, w), strict=True):
        row = {"layer": name, "pass": kind, "GFLOP": 2e-9 * 64 * s.numel() * large}
        row[f"{CUDNN} ms"] = 1e3 * statistics.median(common.repeat(cudnn, device, 0.1))
        if kernel is None:
            row["skipped"] = choice.reason
        else:
            row[f"{OWN} ms"] = 1e3 * statistics.median(common.repeat(kernel, device, 0.1))
            expected, actual = plain().float(), kernel().float()
            row["error"] = float((actual - expected).norm() / expected.norm())
        rows.append(row)
    return rows


def markdown(result: Mapping[str, Any]) -> str:
    """A line per layer and pass; where cuDNN is faster, and why Triton kernels did not run."""
    rates = {"cold": result[COLD], **({"warm": result[WARM]} if WARM in result else {})}
    heads = ["layer", "pass", "GFLOP"]
    heads += [f"{backend} {text}" for backend in (CUDNN, OWN) for text in ("ms", *(f"% {name}" for name in rates))]
    rows, notes = [], list[str]()
    for row in result["layers"]:
        cells: list[str] = [row["layer"], row["pass"], f"{row['GFLOP']:.1f}"]
        times = {backend: row.get(f"{backend} ms", float("nan")) for backend in (CUDNN, OWN)}
        for taken in times.values():
            cells += [f"{taken:.3f}", *(f"{100 * row['GFLOP'] / taken / rate:.1f}" for rate in rates.values())]
        rows.append([*cells, f"{row['error']:.1e}" if "error" in row else "skipped"])
        if times[OWN] > 1.02 * times[CUDNN]:
            notes.append(f"- cuDNN is faster: {row['layer']}, {row['pass']}")
        elif "skipped" in row:
            notes.append(f"- Triton kernels are skipped: {row['skipped']}")
    return "\n".join([common.table([*heads, "error"], rows, left=2), "", *dict.fromkeys(notes)])


def main(argv: Sequence[str] | None = None) -> None:
    parser = common.Parser(__doc__, batch=64, crop=64, width=64, output=Path("runs/layers"))
    options, device = parser.parse_args(argv), common.this_machine().device
    if options.crop % 2:
        raise UserError(f"--crop {options.crop} is odd; a U-Net halves it")
    result: dict[str, Any] = {COLD: matmul_rate(device), "layers": []}
    torch.backends.cudnn.benchmark = True
    scales = min(6, (options.crop & -options.crop).bit_length() - 1)
    network = UNet(width=options.width, scales=scales).to(device)
    choices = plan.make(network, plan.Setting("auto", options.crop, half(device), device))
    for name, layer in network.named_children():
        side = options.crop >> (1 if name == "last" else int(name[-1]))
        result["layers"] += measure(name, layer, options.batch, side, choices[name])
        common.save("layers", options, result, markdown(result))
    result[WARM] = matmul_rate(device)
    common.publish("layers", options, result, markdown(result))


if __name__ == "__main__":
    common.run(main)
