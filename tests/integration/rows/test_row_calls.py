"""Pulls and writes of rows are one call of compiled code; what that leaves undone is asked again, and counts once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.shard_calls import ShardCalls
from geartrain.ams.values.errors import ShardUnavailable
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.specs import Constant
from geartrain.launch.hosting import local
from tests.integration.conftest import carriers_of, connect_data_plane
from tests.integration.rows.one_table import IDS, NUM_ROWS, ONES, Served, connected


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many calls each attempt beyond the first had."""
    counts: list[int] = []
    whole = ShardCalls.again

    def asked_again(self: ShardCalls, left: Sequence[Any], *arguments: Any) -> Any:
        counts.append(len(left))
        return whole(self, left, *arguments)

    monkeypatch.setattr(ShardCalls, "again", asked_again)
    return counts


def use(cluster: Cluster) -> None:
    table = cluster.table("t")
    out, twice = np.empty_like(ONES), np.concatenate([IDS, IDS[::-1]])
    before = table.pull(IDS)
    table.push(IDS, ONES)
    table.prepare_push(IDS[:7], ONES[:7]).send()
    table.pull_into(IDS, out)
    assert (before - out == 1 + (IDS < 7)[:, None]).all()
    np.testing.assert_array_equal(table.pull(twice), np.concatenate([out, out[::-1]]))
    table.assign(IDS, before)
    assert table.present(twice).all() and (table.pull_async(IDS).result() == before).all()


@pytest.mark.parametrize("num_shards", [1, 3])
def test_nothing_is_asked_twice_where_shards_are_of_this_process(num_shards: int, again: list[int]) -> None:
    with local(num_shards) as cluster:
        cluster.create_table("t", dim=ONES.shape[1], optimizer=SGD(1.0), num_rows=NUM_ROWS, initializer=Constant(0))
        again.clear()
        use(cluster)
    assert again == []


def test_nothing_is_asked_twice_once_there_are_connections(served: Served, again: list[int]) -> None:
    with connected(served(2)) as ours:
        for carrier in carriers_of(ours):
            connect_data_plane(carrier)
        again.clear()
        use(ours)
    assert again == []


def test_only_the_shard_whose_connection_is_lost_is_asked_again(served: Served, again: list[int]) -> None:
    with connected(served(2)) as ours:
        for carrier in carriers_of(ours):
            connect_data_plane(carrier)
        use(ours)
        again.clear()
        connection = carriers_of(ours)[1].data_plane.connection
        assert connection is not None
        connection.close()
        use(ours)
    assert again and set(again) == {1}


def test_a_connection_that_others_made_anew_is_used(served: Served, again: list[int]) -> None:
    with connected(served(1)) as ours:
        (carrier,) = carriers_of(ours)
        connect_data_plane(carrier)
        use(ours)
        connection = carrier.data_plane.connection
        assert connection is not None
        connection.close()
        connect_data_plane(carrier)
        use(ours)
        assert again
        again.clear()
        use(ours)
    assert again == []


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Released by each attempt of compiled code at one shard that begins after the first."""
    begun, whole = threading.Semaphore(0), ShardCalls.again

    def asked_again(self: ShardCalls, left: Any, attempt: Any, *arguments: Any) -> Any:
        def once_more(*given: Any) -> Any:
            begun.release()
            return attempt(*given)

        return whole(self, left, once_more, *arguments)

    monkeypatch.setattr(ShardCalls, "again", asked_again)
    return begun


def hurry(cluster: Cluster) -> None:
    """Have attempts last for half a second."""
    cluster._calls.config = cluster._calls.config.model_copy(update={"attempt_timeout_seconds": 0.5})
    for carrier in carriers_of(cluster):
        connect_data_plane(carrier)


def test_what_is_asked_again_goes_over_the_connection_and_counts_once(
    served: Served, attempts: threading.Semaphore
) -> None:
    cluster = served(2)
    with connected(cluster) as ours, ThreadPoolExecutor(2) as threads:
        table = ours.table("t")
        hurry(ours)
        twice = np.concatenate([IDS, IDS[::-1]])
        shard = cluster.servers[1]._held[0].shard
        assert shard is not None
        with shard.engine.turn:  # the shard is at work
            calls = [threads.submit(table.push, IDS, ONES), threads.submit(table.pull, twice)]
            for _ in range(4):
                assert attempts.acquire(timeout=20)
        rows = calls[1].result(20)
        assert set(np.unique(rows).tolist()) <= {0.0, -1.0}
        np.testing.assert_array_equal(rows[:NUM_ROWS], rows[: NUM_ROWS - 1 : -1])
        calls[0].result(20)
        assert (table.pull(twice) == -1).all()


def test_ctrl_c_ends_what_is_asked_again(served: Served, attempts: threading.Semaphore) -> None:
    cluster = served(2)
    with connected(cluster) as ours:
        table, out = ours.table("t"), np.zeros_like(ONES)
        hurry(ours)
        shard = cluster.servers[1]._held[0].shard
        assert shard is not None

        def interrupt() -> None:
            assert attempts.acquire(timeout=20)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        with shard.engine.turn:
            thread.start()
            with pytest.raises(KeyboardInterrupt):
                table.pull_into(IDS, out)
        thread.join()
        out[:] = 777
        assert (table.pull(IDS) == 0).all() and (out == 777).all()


def test_a_write_that_is_sent_again_reaches_the_shards_that_have_not_answered(served: Served) -> None:
    cluster = served(2)
    with connected(cluster) as ours:
        table = ours.table("t")
        hurry(ours)
        patient = ours._calls.config
        ours._calls.config = patient.model_copy(update={"recovery_timeout_seconds": 0.0})
        write, shard = table.prepare_push(IDS, ONES), cluster.servers[1]._held[0].shard
        assert shard is not None
        with shard.engine.turn, pytest.raises(ShardUnavailable, match="no reply in time"):
            write.send()
        assert write.is_on_a_shard and not write.is_sent
        ours._calls.config = patient
        assert write.send().created == NUM_ROWS
        assert (table.pull(IDS) == -1).all()
