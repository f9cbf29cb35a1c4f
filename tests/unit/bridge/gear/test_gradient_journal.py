"""A slow gear that dies at any place, and one that goes on with its journal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import geartrain as gt
from geartrain.ams.client.cluster import Cluster
from geartrain.ams.storage.features.lmdb_features import LmdbFeatures
from geartrain.ams.storage.features.memory_features import MemoryFeatures
from geartrain.ams.values.errors import StateDamaged, TableNotFound
from geartrain.ams.values.gear_messages import Delivery
from geartrain.bridge.gear.engine import DenseEngine
from geartrain.bridge.gear.factory import open_engine, open_pass
from geartrain.bridge.gear.gradient_batcher import GradientBatcher
from geartrain.bridge.gear.gradient_journal import GradientJournal

DIM, IDS = 2, 8
CONFIG = gt.SlowGearConfig(reduction="sum", clock=lambda: 0.0)


class Killed(BaseException):
    """Nothing that comes after it happens."""


class MortalStore(MemoryFeatures):
    """Ends its process before the write of a given number."""

    def __init__(self) -> None:
        super().__init__("gradients")
        self.writes_left = 10**9

    def write(self, ids: Any, values: Any) -> None:
        if not self.writes_left:
            raise Killed
        self.writes_left -= 1
        super().write(ids, values)


def build() -> nn.Module:
    module = nn.Linear(IDS, DIM, bias=False)
    nn.init.zeros_(module.weight)
    return module


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with gt.local(2, stream="gear/image/seat") as made:
        yield made


def engine_on(
    cluster: Cluster,
    store: MemoryFeatures,
    max_bytes: int = 1 << 30,
    *,
    gradients_per_id: int = 2,
    journal: GradientJournal | None = None,
) -> DenseEngine:
    dense_pass = open_pass(build, torch.eye(IDS), None, DIM, CONFIG)
    journal = journal or GradientJournal(store, max_bytes=max_bytes)
    settings: dict[str, Any] = {"optimizer": gt.SGD(1.0), "reuse": True, "mode": "sync", "journal": journal}
    return open_engine(cluster, "image", dense_pass, CONFIG, gradients_per_id=gradients_per_id, **settings)


def applied(cluster: Cluster) -> list[int]:
    weights = cluster.table("image").pull(np.arange(1)).reshape(-1)[: DIM * IDS].reshape(DIM, IDS)
    return (-weights[0]).astype(int).tolist()


def delivery(sequence: int, ids: list[int], source: str = "fast") -> Delivery:
    return Delivery(
        source=source,
        incarnation=1,
        sequence=sequence,
        ids=np.array(ids),
        gradients_KD=np.ones((len(ids), DIM), np.float32),
        versions=np.zeros(len(ids), np.int64),
        lr=None,
    )


STEPS = [delivery(number, [number % IDS, (number * 3 + 1) % IDS]) for number in range(1, 13)]
EXPECTED = np.bincount(np.concatenate([step.ids for step in STEPS]), minlength=IDS).tolist()


@pytest.mark.parametrize("writes", range(1, 40, 7))
@pytest.mark.parametrize("max_bytes", [1 << 30, 200])
def test_one_that_is_killed_at_any_write_loses_and_doubles_nothing(
    cluster: Cluster, writes: int, max_bytes: int
) -> None:
    store = MortalStore()
    engine = engine_on(cluster, store, max_bytes)
    store.writes_left = writes
    try:
        for step in STEPS:
            engine.deliver(step)
        engine.flush()
    except Killed:
        store.writes_left = 10**9
        engine = engine_on(cluster, store, max_bytes)
        for step in STEPS:  # all that may not have been answered is sent again
            engine.deliver(step)
        engine.flush()
    assert applied(cluster) == EXPECTED
    account = engine.account("fast")
    assert account.adds_up and account.applied == account.received == sum(EXPECTED)


def test_an_update_that_was_pushed_before_the_end_is_not_made_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryFeatures("gradients")
    engine = engine_on(cluster, store)
    engine.deliver(delivery(1, [0, 1]))
    monkeypatch.setattr(GradientJournal, "settled", lambda *_: (_ for _ in ()).throw(Killed()))
    with pytest.raises(Killed):
        engine.deliver(delivery(2, [0, 2]))
    monkeypatch.undo()
    again = engine_on(cluster, store)
    assert again.account("fast").due == 2
    again.flush()
    assert applied(cluster) == [2, 1, 1, 0, 0, 0, 0, 0]


def test_records_go_once_their_gradients_are_settled(cluster: Cluster) -> None:
    store = MemoryFeatures("gradients")
    engine = engine_on(cluster, store, max_bytes=2000)
    for number in range(1, 200):
        engine.deliver(delivery(number, [number % IDS]))
    assert store.counts().stored_bytes is not None and store.counts().stored_bytes < 6000
    engine.flush()
    assert sum(applied(cluster)) == 199
    assert engine_on(cluster, store).account("fast").received == 199


def test_gradients_from_before_a_restore_are_dropped(cluster: Cluster, tmp_path: Any) -> None:
    store = MemoryFeatures("gradients")
    engine = engine_on(cluster, store)
    snapshot = cluster.snapshot(str(tmp_path), step=1).result()
    engine.deliver(delivery(1, [0, 1]))
    cluster.restore(snapshot, replace=True)
    again = engine_on(cluster, store)
    assert again.account("fast").received == 0
    again.deliver(delivery(1, [3]))
    again.flush()
    assert applied(cluster) == [0, 0, 0, 1, 0, 0, 0, 0]


def test_a_damaged_head_is_named_with_the_store_to_empty(tmp_path: Path) -> None:
    store = LmdbFeatures(tmp_path, "gradients")
    GradientJournal(store, max_bytes=1 << 30).joined("gear:1")
    store.close()
    file = tmp_path / "gradients" / "features.lmdb"
    file.write_bytes(file.read_bytes().replace(b'"gear:1"', b'"gear:2"'))
    store = LmdbFeatures(tmp_path, "gradients")
    with pytest.raises(StateDamaged, match="gradient journal in store 'gradients' is damaged; empty the store"):
        GradientJournal(store, max_bytes=1 << 30)
    store.close()


def test_updates_go_on_where_numbers_were_before_the_end() -> None:
    store, deliveries = MemoryFeatures("gradients"), 1030  # shards remember 1,024 numbers
    for cluster_run in range(2):
        with gt.local(2, stream="gear/image/seat") as cluster:
            engine = engine_on(cluster, store)
            for number in range(1, deliveries if cluster_run == 0 else 3):
                engine.deliver(delivery(number, [0]))
                engine.flush()
            assert applied(cluster)[0] == (deliveries - 1 if cluster_run == 0 else 2)


def test_one_that_goes_on_with_fewer_gradients_per_id_makes_the_same_updates(cluster: Cluster) -> None:
    store = MemoryFeatures("gradients")
    engine = engine_on(cluster, store, gradients_per_id=4)
    for number, ids in enumerate(([5, 7], [5, 7], [5], [5]), 1):
        engine.deliver(delivery(number, ids))
    assert applied(cluster) == [0, 0, 0, 0, 0, 4, 0, 0]
    again = engine_on(cluster, store)
    assert (again.account().due, again.account().applied) == (2, 4)  # those of 7 had no part in the update
    again.flush()
    assert applied(cluster) == [0, 0, 0, 0, 0, 4, 0, 2]
    assert again.account().applied == again.account().received == 6


def test_what_waits_for_a_table_that_is_still_there_goes_on_in_the_next_engine(cluster: Cluster) -> None:
    store = MemoryFeatures("gradients")
    journal = GradientJournal(store, max_bytes=1 << 30)
    engine = engine_on(cluster, store, journal=journal, gradients_per_id=4)
    for number in (1, 2):
        engine.deliver(delivery(number, [5]))
    engine.drop()
    engine_on(cluster, store, journal=journal, gradients_per_id=4).deliver(delivery(3, [6]))
    killed = engine_on(cluster, store)
    assert killed.account().received == 3
    killed.flush()
    assert applied(cluster) == [0, 0, 0, 0, 0, 2, 1, 0]


def test_an_engine_that_was_dropped_makes_no_update_any_more(cluster: Cluster) -> None:
    store = MemoryFeatures("gradients")
    engine = engine_on(cluster, store)
    engine.deliver(delivery(1, [5]))
    engine.drop()
    with pytest.raises(TableNotFound, match="another engine goes on"):
        engine.flush()
    engine_on(cluster, store).flush()
    assert applied(cluster) == [0, 0, 0, 0, 0, 1, 0, 0]


def test_deliveries_that_came_during_an_update_count_as_kept() -> None:
    store, batcher = MemoryFeatures("gradients"), GradientBatcher(DIM, 1, CONFIG)
    journal = GradientJournal(store, max_bytes=300)
    journal.open(0, batcher)

    def deliver(steps: list[Delivery]) -> None:
        for step in steps:
            journal.delivered(step, 0)
            batcher.add(step, 0)

    deliver(STEPS[:4])
    batch = batcher.due()
    assert batch is not None
    journal.taken(batch, batcher)
    deliver(STEPS[4:8])
    journal.settled([])
    assert journal.is_full
