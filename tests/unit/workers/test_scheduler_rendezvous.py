"""The state that torchrun's agents share by the scheduler, and the store of their ranks."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous.api import RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousSettings,
    RendezvousTimeout,
    _NodeDesc,
    _RendezvousState,
)

from geartrain.ams.client.jobs.rendezvous import RendezvousValues
from geartrain.ams.scheduler.rendezvous import Rendezvous
from geartrain.ams.values.config import ClientConfig
from geartrain.ams.values.scheduler_messages import ReadRendezvous
from geartrain.bridge.collectives import scheduler_store
from geartrain.bridge.collectives.scheduler_store import SchedulerStore
from geartrain.workers import scheduler_rendezvous
from geartrain.workers.scheduler_rendezvous import SharedState

NOW = datetime.now(UTC)
HERE, THERE = _NodeDesc("10.0.0.2", 11, 0), _NodeDesc("10.0.0.3", 12, 0)
SETTINGS = RendezvousSettings("job", 1, 2, RendezvousTimeout(), timedelta(hours=1), 3)


class Values(RendezvousValues):
    """Without a connection."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self.rendezvous = rendezvous
        self._config, self._job = ClientConfig(), "job"

    def _asked(self, request: Any) -> Any:
        if isinstance(request, ReadRendezvous):
            return self.rendezvous.read(request.job, request.keys)
        return self.rendezvous.write(request)


def agent(values: RendezvousValues) -> SharedState:
    shared = SharedState(values, SETTINGS)
    shared._cache_duration = 0
    return shared


def test_an_agent_reads_what_another_wrote_and_no_two_write_over_each_other() -> None:
    values = Values(Rendezvous())
    here, there = agent(values), agent(values)
    assert here.sync() is there.sync() is None
    assert here.state.round != there.state.round  # by which keys of earlier rounds are others
    state = here.state
    state.participants, state.last_heartbeats = {HERE: 0, THERE: 1}, {HERE: NOW, THERE: NOW}
    state.wait_list, state.redundancy_list = {THERE}, {HERE}
    state.deadline, state.complete = NOW, True
    for shared in (here, there):
        shared.mark_dirty()
    assert here.sync() is True
    assert there.sync() is False
    assert vars(there.state) == vars(state)


def test_a_scheduler_that_was_restarted_is_told_again() -> None:
    values = Values(Rendezvous())
    here, newcomer = agent(values), agent(values)
    here.state.participants, here.state.last_heartbeats = {HERE: 0}, {HERE: NOW}
    here.mark_dirty()
    assert here.sync()
    values.rendezvous = Rendezvous()
    here.sync()
    newcomer.sync()
    assert newcomer.state.participants == here.state.participants == {HERE: 0}


def test_a_torchrun_that_ended_does_not_keep_the_next_one_of_its_id_from_meeting() -> None:
    values = Values(Rendezvous())
    ended, late, again = agent(values), agent(values), agent(values)
    late.sync()
    ended.mark_dirty()
    ended.sync()
    late.sync()
    ended.state.closed = True
    ended.mark_dirty()
    ended.sync()
    late.sync()
    assert late.state.closed  # it has seen it open: it ends, too
    for _ in range(2):
        again.sync()
        assert not again.state.closed
    again.mark_dirty()
    assert again.sync() is True


@pytest.mark.parametrize("wrong", [b"\x80\x04N.", b"[]", b"{}", b'{"round": "x"}', b"null"])
def test_what_is_no_state_is_refused(wrong: bytes) -> None:
    with pytest.raises(RendezvousStateError):
        scheduler_rendezvous._decoded(wrong)
    assert vars(scheduler_rendezvous._decoded(scheduler_rendezvous._encoded(_RendezvousState())))


def test_torchs_store_is_kept_by_the_scheduler() -> None:
    own = SchedulerStore(Values(Rendezvous()))
    store = dist.PrefixStore("ranks", own)
    store.set("key", "value")
    assert store.get("key") == b"value" and own.get("ranks/key") == b"value"
    assert [store.add("count", more) for more in (2, 3)] == [2, 5]
    assert store.check(["key", "count"]) and not store.check(["key", "none"])
    assert store.compare_set("key", "other", "new") == b"value"
    assert store.compare_set("key", "value", "new") == b"new"
    assert store.compare_set("none", "", "first") == b"first"
    assert store.compare_set("never", "x", "y") == b"x"
    assert store.multi_get(["key", "count"]) == [b"new", b"5"]
    assert store.delete_key("key") and not store.delete_key("key")
    store.wait(["count"], timedelta(seconds=1))
    with pytest.raises(dist.DistStoreError, match="no value of ranks/key"):
        store.wait(["key"], timedelta(milliseconds=20))


def test_ranks_that_were_started_again_find_the_store_of_their_start_whatever_variables_they_inherited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Children of a forkserver have the variables of its first start, and those that torch gives to each start."""
    rendezvous = Rendezvous()
    joined: list[str] = []

    def of(_: str, job: str) -> Values:
        values = Values(rendezvous)
        values._job, values.close = job, lambda: None  # type: ignore[method-assign]
        return values

    monkeypatch.setattr(scheduler_store, "RendezvousValues", of)
    monkeypatch.setattr(scheduler_store, "_store", None)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, store, **__: joined.append(store.values._job))
    monkeypatch.setenv(scheduler_store.VARIABLE, "10.0.0.1:7000/ads/3")
    for number, port in enumerate((29501, 29502)):
        SchedulerStore(of("", "ads/3")).set(scheduler_store.ranks_key(port), f"start {number}")
        for name, value in {"MASTER_PORT": port, "RANK": 0, "WORLD_SIZE": 2}.items():
            monkeypatch.setenv(name, str(value))
        scheduler_store.init_process_group("gloo")
    assert joined == ["ads/3/start 0", "ads/3/start 1"]
