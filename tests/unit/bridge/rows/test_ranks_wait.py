"""Ranks that wait for the first one: longer than the time limit of their process group, and not for one that failed."""

from __future__ import annotations

import datetime
import threading
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from geartrain.ams.values.errors import InvalidArgument, NonFinite, SyncError
from geartrain.bridge.head.class_head import ClassHead
from geartrain.bridge.head.weights import import_class_weights
from geartrain.bridge.rows import ranks as ranks_module
from geartrain.bridge.rows.ranks import SyncRanks
from tests.support.rank_processes import on_ranks, run_ranks
from tests.support.reference import UNIT_SGD, FakeCluster

LIMIT_SECONDS = 2.0


def work_long(rank: int, folder: Path) -> None:
    ranks_module.TELL_SECONDS = 0.2
    group = dist.new_group(list(range(dist.get_world_size())), timeout=datetime.timedelta(seconds=LIMIT_SECONDS))
    ranks = SyncRanks("job", group)

    def build() -> str:
        threading.Event().wait(1.5 * LIMIT_SECONDS)
        (folder / "built").touch()
        return "built here"

    def take() -> str:
        return "built there" if (folder / "built").exists() else "too early"

    assert ranks.first_then_others(build, take) == ("built here", "built there")[min(rank, 1)]

    def fail() -> str:
        threading.Event().wait(0.5)
        raise NonFinite("row 7")

    with pytest.raises(NonFinite if rank == 0 else SyncError):
        ranks.first_then_others(fail, take)
    assert ranks.share(rank) == 0  # all of them are at the same collective again


def test_the_others_wait_longer_than_the_limit_of_their_group_and_hear_of_a_failure(tmp_path: Path) -> None:
    run_ranks(work_long, 3, tmp_path)


def import_what_one_does_not_see(rank: int, folder: Path) -> None:
    cluster = FakeCluster()
    head = ClassHead(cluster, "classes", num_classes=30, dim=6, optimizer=UNIT_SGD, sync=True)
    rows = cluster.tables["classes"].rows
    before = rows.copy()
    path = folder / ("rows.npy" if rank == 0 else "nowhere.npy")
    with pytest.raises(SyncError if rank == 0 else InvalidArgument):
        import_class_weights(head, path)
    np.testing.assert_array_equal(rows, before)
    assert import_class_weights(head, folder / "rows.npy") == [(folder / "rows.npy", 30)]
    assert rank or (rows == 1).all()


def test_weights_that_one_rank_cannot_read_are_imported_by_none(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.ones((30, 6), np.float32))
    run_ranks(import_what_one_does_not_see, 2, tmp_path)


@on_ranks(3)
def test_the_first_rank_of_a_subgroup_speaks_for_it(rank: int, ranks: int) -> None:
    group = dist.new_group([1, 2])
    if rank:
        some = SyncRanks("job", group)
        assert some.share(rank) == 1
        assert some.array_from_first(np.array([rank, 7])).tolist() == [1, 7]
    assert SyncRanks("job").world_size == ranks
