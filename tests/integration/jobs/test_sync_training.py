"""Two ranks in sync mode equal one worker with the joint batch, up to rounding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import geartrain as gt
from geartrain.ams.values.errors import NonFinite, RankMissing, StepPartlyApplied
from geartrain.ams.values.shard_messages import SyncGroup
from tests.integration.jobs import sync_script
from tests.support.rank_processes import run_ranks


def test_two_ranks_equal_one_worker_with_the_joint_batch(served: Callable[..., Any], tmp_path: Path) -> None:
    run_ranks(sync_script.as_rank, 2, tmp_path, served(2).address, str(tmp_path / "two.npz"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    sync_script.main(served(2).address, str(tmp_path / "one.npz"))
    torch.set_num_threads(threads)
    two, one = (np.load(tmp_path / f"{name}.npz") for name in ("two", "one"))
    for field in (f"{select}/{what}" for select in sync_script.SELECTIONS for what in ("losses", "rows", "dense")):
        np.testing.assert_allclose(two[field], one[field], rtol=2e-4, atol=2e-5, err_msg=field)
    for select in sync_script.SELECTIONS:
        assert np.abs(one[f"{select}/rows"]).max() > 0.3  # it did train: initial rows stay near 0.1


def group(rank: int, world_size: int, sequence: int = 1) -> SyncGroup:
    return SyncGroup(job="j", world_size=world_size, rank=rank, sequence=sequence, sample_count=1)


def test_a_step_that_one_shard_refuses_and_another_applies_is_told_to_all_ranks(served: Callable[..., Any]) -> None:
    with gt.connect(served(2).address) as cluster:
        table = cluster.create_table(
            "t", dim=1, optimizer=gt.SGD(1.0), num_rows=2, dtype="float16", initializer=gt.Constant(0)
        )
        overflows = np.array([[1.0], [70_000.0]], np.float32)  # beyond float16, which only the shard of row 1 can see
        writes = [table.prepare_push([0, 1], overflows, group=group(rank, 2)) for rank in (0, 1)]
        for sent in [cluster._calls.background(write.send) for write in writes]:
            with pytest.raises(
                StepPartlyApplied, match=r"step 1 of job 'j' .* by 1 of 2 shards and refused by"
            ) as told:
                sent.result(60)
            assert isinstance(told.value.__cause__, NonFinite)
        assert table.pull([0, 1]).tolist() == [[-1.0], [0.0]]
        # Ranks that try another step 1 all the same would mix both: they are told again.
        others = [table.prepare_push([0, 1], np.full((2, 1), 2, np.float32), group=group(rank, 2)) for rank in (0, 1)]
        for sent in [cluster._calls.background(write.send) for write in others]:
            with pytest.raises(StepPartlyApplied, match="with other gradients of rank"):
                sent.result(60)


def test_a_rank_that_dies_between_two_shards_leaves_no_silent_half_step(served: Callable[..., Any]) -> None:
    with gt.connect(served(2, sync_timeout_seconds=1.0).address) as cluster:
        table = cluster.create_table("t", dim=1, optimizer=gt.SGD(1.0), num_rows=2, initializer=gt.Constant(0))
        ones = np.ones((2, 1), np.float32)
        dies, survives = (table.prepare_push([0, 1], ones, group=group(rank, 2)) for rank in (0, 1))
        dies._pending = [[0]]
        reached = cluster._calls.background(dies.send)
        with pytest.raises(StepPartlyApplied, match="did not push step 1") as told:
            survives.send()
        assert isinstance(told.value.__cause__, RankMissing)
        reached.result(60)
        # One that comes back with the same part completes the step, if the others send theirs once more.
        back = table.prepare_push([0, 1], ones, group=group(0, 2))
        for sent in [cluster._calls.background(write.send) for write in (back, survives)]:
            sent.result(60)
        assert table.pull([0, 1]).tolist() == [[-1.0], [-1.0]]
