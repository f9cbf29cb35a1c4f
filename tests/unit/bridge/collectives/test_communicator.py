"""What ranks say to each other: pending collectives, what is counted, and a rank that is gone."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from geartrain.ams.values.errors import RankLost
from geartrain.bridge.collectives.communicator import Communicator
from tests.support.rank_processes import on_ranks

SIZES = [3, 0, 2]


def rows_of(rank: int) -> torch.Tensor:
    return torch.arange(SIZES[rank] * 4.0).reshape(-1, 4) + 100 * rank


@on_ranks(3)
def test_collectives_that_were_begun_end_in_any_order_and_are_counted(rank: int, ranks: int) -> None:
    link = Communicator()
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


@on_ranks(3)
def test_what_one_rank_sends_to_another_arrives_in_order_and_is_counted(rank: int, ranks: int) -> None:
    """Each to the next: two messages that arrive in their order, of 0 and of 2 dimensions."""
    link = Communicator()
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


@on_ranks(2)
def test_values_of_any_dtype_come_from_the_first_rank(rank: int) -> None:
    """gloo knows some dtypes only, and not those of 16-bit integers and of float8."""
    link = Communicator()
    for dtype in (torch.bool, torch.int16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.float64):
        first = torch.tensor([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]).to(dtype)
        shared = first.clone() if rank == 0 else torch.zeros(3, 2).to(dtype)
        own = link.deal(shared, [1, 2])
        assert torch.equal(own.float(), (first[:1] if rank == 0 else first[1:]).float())
        link.broadcast_from_first(shared)
        assert torch.equal(shared.float(), first.float())


@on_ranks(2)
def test_a_rank_whose_batches_end_before_the_others_is_lost_to_them_and_they_say_the_remedy(
    rank: int, ranks: int
) -> None:
    link = Communicator(dist.new_group(list(range(ranks)), timeout=datetime.timedelta(seconds=5)))
    for _ in range(3 - rank):  # of batches
        if (rank, link.traffic.calls["all-reduce"]) == (0, 2):
            with pytest.raises(RankLost, match=r"fewer batches than the others: give all ranks as many \("):
                link.sum(torch.ones(2))
        else:
            link.sum(torch.ones(2))


@on_ranks(2)
def test_a_group_apart_has_the_time_limit_of_the_group_that_it_is_of(rank: int, ranks: int) -> None:
    """A rank that lives on elsewhere: the others wait as long as their group says."""
    group = dist.new_group(list(range(ranks)), timeout=datetime.timedelta(seconds=1))
    link = Communicator(group).apart()
    if rank == 0:
        with pytest.raises(RankLost, match="did not take part in an all-gather within the time limit"):
            link.gather(torch.ones(1, 1), [1] * ranks)
    dist.barrier()


def collectives_of(link: Communicator) -> dict[str, Callable[[], Any]]:
    """One call of each that three ranks make, by what its error is to name."""
    ones, sizes = torch.ones(3, 4), [1, 1, 1]
    after, before = (link.rank + 1) % 3, (link.rank - 1) % 3
    transfers = [(torch.ones(2), after)], [(torch.empty(2), before)]
    return {
        r"barrier \(rows restored\)": lambda: link.barrier("rows restored"),
        "an all-gather": lambda: link.gather(ones[:1], sizes),
        "an all-gather of numbers": lambda: link.exchange([1]),
        "an all-gather of bytes": lambda: link.gather_bytes(b"abc"),
        "an all-reduce": lambda: link.sum(ones),
        "an all-reduce that was begun": lambda: link.start_sum(ones).result(),
        "a reduce-scatter": lambda: link.sum_to_owners(ones, sizes),
        "an all-to-all": lambda: link.all_to_all(ones, sizes, sizes),
        "an exchange between two ranks": lambda: link.start_transfers(*transfers).result(),
        "a broadcast": lambda: link.share(7),  # one of many: rank 0 hears only in the next that nobody takes it
    }


@on_ranks(3)
def test_a_rank_that_dies_in_any_collective_is_lost_to_the_others_who_name_it(rank: int, ranks: int) -> None:
    """Each has a group of its own; rank 0 dies while the others wait in the first of them."""
    links = [Communicator(dist.new_group(list(range(ranks)))) for _ in collectives_of(Communicator())]
    if rank == 0:
        time.sleep(0.5)
        os._exit(0)  # as a process that is killed: it closes nothing
    for place, link in enumerate(links):
        name, call = list(collectives_of(link).items())[place]
        named = name.partition(" of ")[0].partition(" that ")[0]
        with pytest.raises(RankLost, match=rf"{named}.*process group, ranks \[0, 1, 2\], as rank {rank} met"):
            for _ in range(3):
                call()
    os._exit(0)  # the group is not whole


def test_one_rank_says_nothing() -> None:
    link, rows = Communicator(), torch.ones(2, 3)
    assert link.start_gather(rows, [2]).result() is rows
    assert link.start_sum_to_owners(rows, [2]).result() is rows
    assert not link.traffic.calls
