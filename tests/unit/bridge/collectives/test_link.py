"""What ranks say to each other: pending collectives, what is counted, and a rank that is gone."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from geartrain.ams.values.errors import RankLost
from geartrain.bridge.collectives.link import RankLink
from tests.support.rank_processes import run_ranks

SIZES = [3, 0, 2]


def rows_of(rank: int) -> torch.Tensor:
    return torch.arange(SIZES[rank] * 4.0).reshape(-1, 4) + 100 * rank


def begin_and_take(rank: int, ranks: int, folder: Path) -> None:
    del folder
    link = RankLink()
    joint = torch.cat([rows_of(other) for other in range(ranks)])
    gathered = link.start_gather(rows_of(rank), SIZES)
    summed = link.start_sum_to_owners(joint * (rank + 1), SIZES)
    assert torch.equal(summed.result(), rows_of(rank) * 6)
    assert torch.equal(gathered.result(), joint)
    assert gathered.result() is gathered.result()
    assert dict(link.traffic.calls) == {"all-gather": 1, "reduce-scatter": 1}
    assert dict(link.traffic.bytes) == {"all-gather": 3 * 3 * 4 * 4, "reduce-scatter": 3 * 3 * 4 * 4}
    link.traffic.clear()
    assert not link.traffic.calls


def send_and_fill(rank: int, ranks: int, folder: Path) -> None:
    """Each to the next: two messages that arrive in their order, of 0 and of 2 dimensions."""
    del folder
    link = RankLink()
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    rooms = torch.empty(()), torch.empty(2, 3, dtype=torch.int64)
    pending = link.start_transfers(
        [(torch.tensor(rank / 2), after), (torch.full((2, 3), rank), after)], [(room, before) for room in rooms]
    )
    pending.result()
    assert rooms[0] == before / 2
    assert torch.equal(rooms[1], torch.full((2, 3), before))
    link.start_transfers([], []).result()
    assert dict(link.traffic.bytes) == {"send": 4 + 48, "receive": 4 + 48}


def stay_silent(rank: int, ranks: int, folder: Path) -> None:
    """A rank that lives on elsewhere: the others wait as long as their group says."""
    del folder
    group = dist.new_group(list(range(ranks)), timeout=datetime.timedelta(seconds=1))
    link = RankLink(group).apart()
    if rank == 0:
        with pytest.raises(RankLost, match="did not take part in an all-gather within the time limit"):
            link.gather(torch.ones(1, 1), [1] * ranks)
    dist.barrier()


def test_a_group_apart_has_the_time_limit_of_the_group_that_it_is_of(tmp_path: Path) -> None:
    run_ranks(stay_silent, 2, tmp_path)


def leave_early(rank: int, ranks: int, folder: Path) -> None:
    del folder
    link = RankLink()
    if rank == 1:
        return
    with pytest.raises(RankLost, match="a rank died, or did not take part in an all-gather"):
        link.gather(torch.ones(1, 1), [1] * ranks)


def test_collectives_that_were_begun_end_in_any_order_and_are_counted(tmp_path: Path) -> None:
    run_ranks(begin_and_take, 3, tmp_path)


def test_what_one_rank_sends_to_another_arrives_in_order_and_is_counted(tmp_path: Path) -> None:
    run_ranks(send_and_fill, 3, tmp_path)


def test_a_rank_that_is_gone_is_a_typed_error_on_the_others(tmp_path: Path) -> None:
    run_ranks(leave_early, 2, tmp_path)


def test_one_rank_says_nothing() -> None:
    link, rows = RankLink(), torch.ones(2, 3)
    assert link.start_gather(rows, [2]).result() is rows
    assert link.start_sum_to_owners(rows, [2]).result() is rows
    assert not link.traffic.calls
