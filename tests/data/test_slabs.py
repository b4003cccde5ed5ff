"""Exchanges between planes and columns, and neighboring planes, for any number of ranks."""

from __future__ import annotations

import pytest
import torch
from processes import run_ranks
from reference_samples import ALONE

from utils.data.slabs import Slabs
from utils.distributed.world import World
from utils.errors import UserError

SHAPE = (7, 6, 5)


def exchanged(world: World) -> int:
    """The number of own planes; each exchange is compared with the whole field."""
    slabs, field = Slabs(SHAPE, world), torch.rand(SHAPE, generator=torch.Generator().manual_seed(0))
    field = torch.complex(field, -field)
    own, mine = field[slabs.planes], slabs.divide(SHAPE[1])[world.rank]
    both = slabs.to_columns((own[slabs.local(piece)] for piece in slabs.pieces()), *SHAPE[1:], dtype=torch.complex64)
    assert torch.equal(both, field[:, mine])
    columns = slabs.to_columns((own.real[slabs.local(piece)] for piece in slabs.pieces()), *SHAPE[1:])
    assert torch.equal(columns, field.real[:, mine])
    assert torch.equal(slabs.to_planes(columns, SHAPE[1]), own.real)
    edges = (own.real[0], own.real[-1]) if slabs.count else (torch.zeros(SHAPE[1:]),) * 2
    before, behind = slabs.neighbors(*edges)
    if slabs.count:
        assert torch.equal(before, field.real[slabs.planes.start - 1])
        assert torch.equal(behind, field.real[slabs.planes.stop % SHAPE[0]])
    return slabs.count


@pytest.mark.parametrize("ranks", [2, 9])
def test_exchanged_planes_and_columns_are_those_of_the_whole_field(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert exchanged(ALONE) == SHAPE[0]
    monkeypatch.setattr("utils.data.files.hdf5.SLAB_VALUES", 60)  # pieces of two planes
    assert exchanged(ALONE) == SHAPE[0]
    counts = run_ranks(exchanged, ranks)
    assert sum(counts) == SHAPE[0]
    assert max(counts) - min(counts) <= 1


def unreadable(world: World) -> str:
    slabs = Slabs(SHAPE, world)

    def pieces():
        if world.rank == 1:
            raise UserError("box.h5: input/output error")
        yield torch.zeros(slabs.count, *SHAPE[1:])

    with pytest.raises(UserError) as error:
        slabs.to_columns(pieces(), *SHAPE[1:])
    return str(error.value)


def test_all_ranks_fail_if_one_cannot_read_its_planes() -> None:
    assert set(run_ranks(unreadable, 2)) == {"rank 1: box.h5: input/output error"}
