"""Futures of pulls and pushes: sent by who makes the call, brought by one thread, however many there are."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.rows.row_futures import RowFuture
from geartrain.ams.observe import failpoints
from geartrain.ams.values.errors import InvalidIds, NonFinite, Unavailable
from geartrain.ams.values.optimizers.registry import SGD
from tests.integration.conftest import ServedCluster, carriers_of, connect_data_plane
from tests.integration.rows.one_table import IDS, ONES, Served, connected

FEW, FEW_ONES = IDS[:10], ONES[:10]
MANY = 1_000


class Held(NamedTuple):
    push: Future[Any]
    let_go: Callable[[], Any]


@pytest.fixture(params=[True, False], ids=["same host", "TCP"])
def both(served: Served, request: pytest.FixtureRequest) -> Iterator[tuple[Cluster, ServedCluster]]:
    there = served(2)
    with connected(there, shared_memory=request.param) as ours:
        for carrier in carriers_of(ours):
            connect_data_plane(carrier)
        ours.table("t").pull(IDS)  # it knows the connections now
        yield ours, there


@pytest.fixture
def ours(both: tuple[Cluster, ServedCluster]) -> Cluster:
    return both[0]


@pytest.fixture
def held(ours: Cluster, tmp_path: Path) -> Iterator[Held]:
    """A push that its shards do not begin, nor answer anything else, until they are let go; that brings its reply."""
    free = tmp_path / "free"
    with failpoints.armed(f"shard.apply.before=pause({free})"):
        pushed = ours.table("t").push_async(FEW, FEW_ONES)

        def let_go() -> Any:
            free.touch()
            return pushed.result(20)

        yield Held(pushed, let_go)
        free.touch()


def threads() -> list[str]:
    return [
        item.name for item in threading.enumerate() if item.name.startswith(("geartrain-replies", "geartrain-client"))
    ]


def test_any_number_of_calls_may_be_under_way_and_one_thread_brings_them(ours: Cluster, held: Held) -> None:
    table = ours.table("t")
    pulls = [table.pull_async(FEW[n % 10 :]) for n in range(MANY)]
    assert all(isinstance(pull, RowFuture) and not pull.done() for pull in pulls)
    assert threads() == ["geartrain-replies"]
    held.let_go()
    assert all((pull.result(20) == -1).all() for pull in pulls)
    assert threads() == ["geartrain-replies"]


def test_each_of_many_pushes_is_applied_once(ours: Cluster) -> None:
    table = ours.table("t")
    pushes = [table.push_async(FEW, FEW_ONES) for _ in range(MANY)]
    assert sum(push.result(20).created for push in as_completed(pushes)) == len(FEW)
    np.testing.assert_array_equal(table.pull(FEW), -float(MANY))
    assert threads() == ["geartrain-replies"]


def test_a_push_without_rows_reaches_nobody_and_is_done(ours: Cluster) -> None:
    table = ours.table("t")
    assert table.push_async(IDS[:0], ONES[:0]).result(20) == table.push(IDS[:0], ONES[:0])
    assert table.push_async(FEW, FEW_ONES).result(20).duplicate is False


def test_a_push_whose_future_nobody_keeps_is_applied(ours: Cluster) -> None:
    table = ours.table("t")
    table.push_async(FEW, FEW_ONES)
    while not table.present(FEW).all():
        pass
    ours.close()
    assert threads() == []


def test_calls_in_line_can_be_cancelled_and_those_that_were_sent_cannot(ours: Cluster, held: Held) -> None:
    table = ours.table("t")
    pulls = [table.pull_async(FEW) for _ in range(20)]
    assert held.push.running() and not held.push.cancel()
    assert pulls[-1].cancel() and pulls[-1].cancelled()
    held.let_go()
    assert all((pull.result(20) == -1).all() for pull in pulls[:-1])
    with pytest.raises(CancelledError):
        pulls[-1].result(20)


def test_a_callback_may_wait_for_other_calls(ours: Cluster, held: Held) -> None:
    table, found = ours.table("t"), []
    is_found = threading.Event()

    def pull_again(first: Future[Any]) -> None:
        pushes = [table.push_async(FEW, FEW_ONES) for _ in range(100)]  # more than may be unacknowledged
        found.extend([first.result(), pushes[-1].result(20), table.pull_async(FEW).result(20)])
        is_found.set()

    table.pull_async(FEW).add_done_callback(pull_again)
    held.let_go()
    assert is_found.wait(20)
    assert (found[0] == -1).all() and (found[2] <= -2).all()


def test_what_is_wrong_with_a_call_is_the_error_of_its_future(ours: Cluster) -> None:
    table = ours.table("t")
    with pytest.raises(InvalidIds):
        table.pull_async(np.array([-1])).result(20)
    with pytest.raises(NonFinite):
        table.push_async(FEW, FEW_ONES * np.nan).result(20)
    assert isinstance(table.pull_async(7).exception(20), Exception)
    assert isinstance(table.push_async(FEW, FEW_ONES[:, :1]).exception(20), Exception)
    assert not table.present(FEW).any()


def test_calls_whose_connections_are_lost_are_made_again_and_count_once(ours: Cluster, held: Held) -> None:
    table = ours.table("t")
    calls: list[Future[Any]] = [table.push_async(FEW, FEW_ONES) for _ in range(20)]
    calls += [table.pull_async(FEW) for _ in range(20)]
    for carrier in carriers_of(ours):
        connection = carrier.data_plane.connection
        assert connection is not None
        connection.close()
    held.let_go()
    for call in calls:
        call.result(20)
    np.testing.assert_array_equal(table.pull(FEW), -21.0)


def test_closing_waits_for_the_calls_under_way(both: tuple[Cluster, ServedCluster], held: Held) -> None:
    ours, there = both
    table = ours.table("t")
    calls = [table.push_async(FEW, FEW_ONES) for _ in range(20)]
    closing = threading.Thread(target=ours.close)
    closing.start()
    held.let_go()
    closing.join(20)
    assert all(call.done() and call.exception() is None for call in calls)
    with pytest.raises(Unavailable, match="this cluster is closed"):
        table.push_async(FEW, FEW_ONES)
    with connected(there) as another:
        np.testing.assert_array_equal(another.table("t").pull(FEW), -21.0)


PROGRAM = """
import sys, numpy as np, geartrain as gt
cluster = gt.connect(sys.argv[1])
table = cluster.table("t")
while cluster._calls.rows.is_sent_at_once(0) is False:
    table.pull(np.arange(100))
futures = [table.push_async(np.arange(10), np.ones((10, 32), np.float32)) for _ in range(50)]
assert futures[0].result() is not None
"""


def test_a_program_that_ends_without_closing_ends_and_its_calls_are_made(both: tuple[Cluster, ServedCluster]) -> None:
    ours, there = both
    ended = subprocess.run([sys.executable, "-c", PROGRAM, there.address], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
    np.testing.assert_array_equal(ours.table("t").pull(FEW), -50.0)


def test_large_pushes_that_wait_for_a_small_one_do_not_hold_up_its_end(ours: Cluster) -> None:
    large_ids = np.arange(2000)
    table = ours.create_table("large", dim=256, optimizer=SGD(1.0), num_rows=2000)
    small, gradients = ours.table("t"), np.ones((2000, 256), np.float32)
    table.push(large_ids, gradients)
    told: list[Future[Any]] = []
    pushes: list[Future[Any]] = []
    for _ in range(3):
        pushes += [table.push_async(large_ids, gradients) for _ in range(4)]
        one = small.push_async(FEW, FEW_ONES)
        one.add_done_callback(told.append)
        pushes += [one, *(table.push_async(large_ids, gradients) for _ in range(100))]
    for push in pushes:
        assert not push.result(60).duplicate
    assert table.versions() == (1 + 312,) * 2
