"""Rows that travel part by part: what arrives is what one collective over the whole would bring."""

from __future__ import annotations

import torch

from geartrain.bridge.collectives.communicator import Communicator
from geartrain.bridge.collectives.part_exchange import GatheredParts, PartSizes, SummedParts
from tests.support.rank_processes import on_ranks

SIZES = [[2, 1, 0, 1], [0, 0, 0, 0], [1, 3, 2, 0]]


def rows_of(rank: int) -> torch.Tensor:
    return torch.arange(sum(SIZES[rank]) * 3.0).reshape(-1, 3) + 100 * rank


@on_ranks(3)
def test_parts_of_ranks_of_any_size_make_the_whole(rank: int, ranks: int) -> None:
    link = Communicator()
    joint = torch.cat([rows_of(other) for other in range(ranks)])
    mine = torch.split(rows_of(rank), SIZES[rank])
    for overlap in (True, False):
        sizes = PartSizes(SIZES, rank)
        gathered = GatheredParts(link, sizes, overlap=overlap)
        for part, rows in enumerate(mine):
            gathered.start(part, rows)
        assert torch.equal(gathered.whole(), joint)
        summed = SummedParts(link, sizes, joint * (rank + 1), [3, 2, 1, 0], overlap=overlap)
        taken = [summed.collect(part) for part in ((2, 3, 1, 0) if rank else (3, 2, 1, 0))]
        order = (2, 3, 1, 0) if rank else (3, 2, 1, 0)
        for part, rows in zip(order, taken, strict=True):
            assert torch.equal(rows, mine[part] * 6), part
