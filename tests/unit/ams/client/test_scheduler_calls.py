"""Changes of tables while the scheduler does not reach a shard yet: tried again while a shard is waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.factory import local
from geartrain.ams.values.config import ClientConfig
from geartrain.ams.values.errors import ShardUnavailable
from geartrain.ams.values.optimizers.registry import SGD

CHANGES: dict[str, Callable[[Cluster], object]] = {
    "CreateClusterTable": lambda cluster: cluster.create_table("new", dim=4, optimizer=SGD(lr=1.0)),
    "DropClusterTable": lambda cluster: cluster.drop_table("old"),
}


def unreached(monkeypatch: pytest.MonkeyPatch, cluster: Cluster, name: str, times: float) -> list[str]:
    """Let so many calls of a name fail, as if a name could not be resolved; returns those that were made."""
    carrier: Any = cluster._scheduler.carrier
    call, made = carrier.call, []

    def asked(request: Any, timeout_seconds: float | None) -> Any:
        if type(request).__name__ == name:
            made.append(name)
            if len(made) <= times:
                raise ShardUnavailable(
                    "shard 0 does not answer a request about the table: the name of the host cannot be resolved"
                )
        return call(request, timeout_seconds)

    monkeypatch.setattr(carrier, "call", asked)
    return made


@pytest.mark.parametrize("name", CHANGES)
def test_a_shard_that_the_scheduler_cannot_reach_at_first_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    with local(2) as cluster:
        cluster.create_table("old", dim=4, optimizer=SGD(lr=1.0))
        made = unreached(monkeypatch, cluster, name, times=2)
        CHANGES[name](cluster)
        assert len(made) == 3


def test_one_that_stays_out_of_reach_is_named_once_the_recovery_timeout_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with local(2, config=ClientConfig(recovery_timeout_seconds=0.0)) as cluster:
        made = unreached(monkeypatch, cluster, "CreateClusterTable", times=float("inf"))
        with pytest.raises(ShardUnavailable, match="shard 0 does not answer a request"):
            CHANGES["CreateClusterTable"](cluster)
        assert len(made) == 1
