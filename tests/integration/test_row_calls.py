"""Pulls and writes of rows are one call of compiled code; what that leaves undone is asked again, and counts once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.shard_calls import ShardCalls
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.shard_messages import Describe
from geartrain.ams.values.specs import Constant
from geartrain.launch.hosting import local
from tests.integration.conftest import carriers_of, connect_data_plane
from tests.integration.one_table import IDS, NUM_ROWS, ONES, Served, connected


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many calls each attempt beyond the first had."""
    counts: list[int] = []
    whole = ShardCalls.deliver

    def deliver(self: ShardCalls, calls: Sequence[Any], *arguments: Any, **keywords: Any) -> Any:
        if not isinstance(calls[0][1], Describe):
            counts.append(len(calls))
        return whole(self, calls, *arguments, **keywords)

    monkeypatch.setattr(ShardCalls, "deliver", deliver)
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
        connection = carriers_of(ours)[1].row_connection
        assert connection is not None
        connection.close()
        use(ours)
    assert again and set(again) == {1}


def test_a_connection_that_others_made_anew_is_used(served: Served, again: list[int]) -> None:
    with connected(served(1)) as ours:
        (carrier,) = carriers_of(ours)
        connect_data_plane(carrier)
        use(ours)
        connection = carrier.row_connection
        assert connection is not None
        connection.close()
        connect_data_plane(carrier)
        use(ours)
        assert again
        again.clear()
        use(ours)
    assert again == []
