"""Powers round equally at all places of a tensor, and code whose pieces must not change its bits uses no others."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from analysis.lyman_alpha.flux import Universe, fgpa_relation, optical_depth, power_law
from networks.film import EMBEDDING
from networks.unet import UNet
from utils.powers import power

EXPONENTS = (2 / 3, -2 / 3, -1 / 3, 1.503, 0.225)
PIECES = (1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 63, 100, 256)
ROUNDED_BY_PLACE = {"pow", "float_power", "exp2", "sigmoid", "log_sigmoid", "silu"}
PRODUCTS_AND_ROOTS = (-2, -1, -0.5, 0.5, 1, 2, 3)  # the exponents for which torch.pow computes these


class SameBitsAtAllPlaces(TorchDispatchMode):
    """Refuses operations of torch that round a value according to its place in the tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__.removeprefix("_foreach_").rstrip("_")
        exponent = args[1] if name == "pow" else None
        is_exact = isinstance(exponent, int | float) and exponent in PRODUCTS_AND_ROOTS
        assert name not in ROUNDED_BY_PLACE or is_exact, f"{func} rounds by place; see utils.powers"
        return func(*args, **(kwargs or {}))


def values(dtype: torch.dtype = torch.float32) -> Tensor:
    """1,728 values around 1, like densities."""
    return torch.randn(1728, generator=torch.Generator().manual_seed(0), dtype=torch.float64).mul(2).exp().to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("exponent", EXPONENTS)
def test_value_of_a_power_does_not_depend_on_its_place(exponent: float, dtype: torch.dtype) -> None:
    """torch.pow gave tiles of different sizes different bits: it rounds the end of a tensor differently."""
    x = values(dtype)
    whole, planes = power(x, exponent), x.view(12, 12, 12)
    for count in PIECES:
        assert torch.equal(torch.cat([power(piece, exponent) for piece in x.split(count)]), whole)
    for axis in range(3):  # pieces that are not contiguous
        pieces = [power(piece, exponent) for piece in planes.movedim(axis, 0).split(5, dim=1)]
        assert torch.equal(torch.cat(pieces, 1).movedim(0, axis).flatten(), whole)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_powers_are_those_of_torch_within_rounding(dtype: torch.dtype, error: float) -> None:
    for exponent in EXPONENTS:
        torch.testing.assert_close(
            power(values(dtype), exponent).double(), values(dtype).double() ** exponent, rtol=error, atol=0
        )
        edges = torch.tensor([0.0, 1.0, math.inf, math.nan, -1.0], dtype=dtype)
        torch.testing.assert_close(power(edges, exponent), edges**exponent, rtol=0, atol=0, equal_nan=True)
    x = values(dtype)
    power(x, 2 / 3)
    assert torch.equal(x, values(dtype)), "it changes its argument"


@pytest.mark.parametrize("function", [lambda x: x ** (2 / 3), lambda x: x**4, lambda x: 2**x, torch.exp2, nn.SiLU()])
def test_functions_that_round_by_place_are_refused(function: Callable[[Tensor], Tensor]) -> None:
    with SameBitsAtAllPlaces(), pytest.raises(AssertionError, match="rounds by place"):
        function(values())


@pytest.mark.parametrize("exponent", PRODUCTS_AND_ROOTS)
def test_exponents_that_torch_computes_by_products_and_roots(exponent: float) -> None:
    x = values()
    expected = {-2: 1 / (x * x), -1: 1 / x, -0.5: x.rsqrt(), 0.5: x.sqrt(), 1: x, 2: x * x, 3: x * x * x}[exponent]
    with SameBitsAtAllPlaces():
        assert torch.equal(x**exponent, expected)


def test_simulation_uses_no_function_that_rounds_by_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fits of the rates have powers of the same temperatures in every simulation, which are never divided."""
    pytest.importorskip("colossus", reason="colossus, which simulations need, is not installed")
    from simulation import hydro, simulate

    gas = simulate.PrimordialGas(simulate.make_cosmology("planck18"))
    monkeypatch.setattr(simulate, "PrimordialGas", lambda cosmology: gas)
    monkeypatch.setattr(hydro, "in_order", lambda work, tiles, threads: map(work, tiles))  # modes are those of a thread
    with SameBitsAtAllPlaces():
        simulate.simulate_fields(simulate.SimulationOptions(grid=8, n_steps=2, threads=1))


def test_optical_depth_uses_no_function_that_rounds_by_place() -> None:
    density = values().view(27, 64)
    with SameBitsAtAllPlaces():
        temperature = power_law(density, *fgpa_relation(3.0))
        optical_depth(density, 100 * density, temperature, Universe(3.0, 0.675, 0.31, 0.69, 0.0487), 0.5)


def test_predictions_use_no_function_that_rounds_by_place() -> None:
    """The exception is SiLU of the conditions, whose rows are whole vectors of every CPU."""
    with SameBitsAtAllPlaces(), torch.no_grad():
        UNet(4, 5, width=2, scales=3)(torch.randn(2, 4, 16, 16, 16))
    rows = values().view(-1, EMBEDDING)
    assert torch.equal(torch.stack([nn.functional.silu(row) for row in rows]), nn.functional.silu(rows))
    assert EMBEDDING % 32 == 0, "two vectors of AVX-512"
