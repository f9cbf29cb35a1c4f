"""Which ranks work on which part of a model."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import geartrain as gt
from geartrain.ams.values.errors import InvalidArgument, SpecMismatch
from geartrain.bridge.collectives.communicator import time_limit
from tests.support.rank_processes import on_ranks

BAD = [
    (5, "must be a list of lists of ranks"),
    ("01", "must be a list of lists of ranks"),
    ([0, 1], "must be a list of lists of ranks"),
    ([[0, 1, 2]], "two or more"),
    ([[0, 1, 2], []], "each with a rank"),
    ([[0, 1], [True, 2]], "stages name True"),
    ([[0, 1], [1, 2]], r"rank 1 is there twice"),
    ([[0], [1]], r"no stage has rank 2"),
    ([[0, 1], [2, 3]], r"there are 3 ranks, and none is 3"),
]


@on_ranks(3)
def test_a_mesh_has_the_ranks_that_it_is_given_and_refuses_what_does_not_fit(rank: int, ranks: int) -> None:
    every = gt.mesh()
    assert (every.rank, every.world_size, every.stages, every.own_stage) == (rank, ranks, (), None)
    assert every.stage is every.whole
    assert every.whole.device_mesh.size() == ranks
    staged = gt.mesh(stages=[[2, 0], [1]])
    assert (staged.rank, staged.world_size, staged.stages) == (rank, ranks, ((2, 0), (1,)))
    assert staged.own_stage == int(rank == 1)
    assert staged.stage.ranks == staged.stages[int(rank == 1)]
    assert staged.stage.link.exchange([rank]) == [[rank] for rank in sorted(staged.stage.ranks)]
    for stages, message in BAD:
        with pytest.raises(InvalidArgument, match=message):
            gt.mesh(stages=stages)  # type: ignore[arg-type]
    mine: Any = [[0, 1], [2]] if rank else [[0], [1, 2]]
    with pytest.raises(SpecMismatch, match=r"stages is \[\[0\], \[1, 2\]\] on rank 0, \[\[0, 1\], \[2\]\] on rank 1"):
        gt.mesh(stages=mine)


@on_ranks(2)
def test_stages_wait_for_a_rank_as_long_as_the_job_does(rank: int, ranks: int, folder: Path) -> None:
    dist.destroy_process_group()
    limit, meeting = timedelta(seconds=77), f"file://{folder}/again"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks, timeout=limit)
    stage = gt.mesh(stages=[[0], [1]]).stage
    assert time_limit(stage.process_group) == limit


def test_one_process_is_a_mesh_of_one() -> None:
    alone = gt.mesh()
    assert (alone.rank, alone.world_size, alone.stages) == (0, 1, ())
    assert repr(alone) == "mesh(rank 0 of 1)"
    with pytest.raises(InvalidArgument, match="not initialised"):
        _ = alone.whole.device_mesh
    with pytest.raises(InvalidArgument, match=r"there are 1 ranks, and none is 1"):
        gt.mesh(stages=[[0], [1]])
