"""No shard holds a moment for a snapshot whose owner is gone: every write would copy rows aside for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from geartrain.ams.client.factory import connect
from geartrain.ams.client.snapshots import snapshot as snapshots
from geartrain.ams.observe.failpoints import armed
from geartrain.ams.server.shard import Shard
from geartrain.ams.storage.snapshot.folder import list_snapshots, new_staging, open_snapshot
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.shard_messages import CallContext, CreateTable, Describe, Done, Freeze, Push, WriteFrozen
from geartrain.ams.values.specs import Constant, TableSpec
from tests.integration.conftest import ServedCluster

SPEC = TableSpec(name="t", dim=16, optimizer=SGD(1.0), num_rows=4096, initializer=Constant(0))
IDS, ONES = np.arange(4096), np.ones((4096, 16), np.float32)
LEASE_SECONDS = 0.05


def shards_of(served: ServedCluster) -> list[Shard]:
    return [held.shard for server in served.servers for held in server._held if held.shard is not None]


def await_thaw(shard: Shard, seconds: float = 30.0) -> None:
    """Until the shard holds nothing: by itself, since nobody calls it."""
    deadline = time.monotonic() + seconds
    while shard.held_snapshots:
        assert time.monotonic() < deadline, "the freeze is still held"
        time.sleep(0.01)


def test_ctrl_c_out_of_the_with_block_ends_the_freeze_before_it_leaves(
    served: Callable[..., ServedCluster], tmp_path: Path
) -> None:
    cluster = served(2)
    go = tmp_path / "go"
    with armed(f"block.write.before=pause({go})") as passes:
        with pytest.raises(KeyboardInterrupt), connect(cluster.address) as ours:
            ours.create_table("t", dim=16, optimizer=SGD(1.0), num_rows=4096).push(IDS, ONES)
            ours.snapshot(tmp_path / "snapshots")
            while not passes.fired["block.write.before"]:
                time.sleep(0.01)
            raise KeyboardInterrupt
        assert not any(shard.held_snapshots for shard in shards_of(cluster))
        go.touch()
    assert list_snapshots(tmp_path / "snapshots") == []


def test_ctrl_c_while_the_moment_is_taken_ends_it_everywhere(
    served: Callable[..., ServedCluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = served(2)
    with connect(cluster.address) as ours:
        ours.create_table("t", dim=16, optimizer=SGD(1.0), num_rows=4096)

        def interrupted(_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(snapshots, "all_of", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ours.snapshot(tmp_path)
        assert not any(shard.held_snapshots for shard in shards_of(cluster))


@pytest.fixture
def shard() -> Shard:
    return Shard(0, np.arange(4096), incarnation=1, freeze_lease_seconds=LEASE_SECONDS)


def test_a_freeze_that_nobody_renews_ends_by_itself_and_gives_its_memory_back(shard: Shard) -> None:
    try:
        shard.submit(CallContext(), CreateTable(spec=SPEC)).result(10)
        push = Push(table="t", ids=IDS, gradients=ONES)
        shard.submit(CallContext(stream="s", sequence=1), push).result(10)
        shard.submit(CallContext(), Freeze(snapshot_id="a")).result(10)
        await_thaw(shard)
        table = shard._tables.find("t").rows
        before = table.memory_bytes
        shard.submit(CallContext(stream="s", sequence=2), push).result(10)
        assert table.memory_bytes == before, "rows were copied aside for nobody"
    finally:
        shard.close()


def test_a_freeze_is_kept_while_it_is_written(tmp_path: Path) -> None:
    go, now = tmp_path / "go", [0.0]
    shard = Shard(0, np.arange(4096), incarnation=1, freeze_lease_seconds=1.0, clock=lambda: now[0])

    def let_pass(seconds: float) -> None:
        now[0] += seconds
        for _ in range(2):  # it looks at the clock before it takes a call
            shard.submit(CallContext(), Describe()).result(10)

    try:
        shard.submit(CallContext(), CreateTable(spec=SPEC)).result(10)
        shard.submit(CallContext(stream="s", sequence=1), Push(table="t", ids=IDS, gradients=ONES)).result(10)
        staging = new_staging(tmp_path, "a")
        shard.submit(CallContext(), Freeze(snapshot_id=staging.id)).result(10)
        with armed(f"block.write.before=pause({go})@1") as passes:
            written = shard.submit(CallContext(), WriteFrozen(snapshot_id=staging.id, folder=staging.path))
            while not passes.fired["block.write.before"]:
                time.sleep(0.01)
            for _ in range(6):
                let_pass(1.5)
            assert shard.held_snapshots, "it ended while it was written"
            go.touch()
            written.result(10)
        let_pass(1.5)
        assert not shard.held_snapshots, "it is still held"
    finally:
        go.touch()
        shard.close()


def test_copied_rows_count_as_memory_of_the_table(served: Callable[..., ServedCluster]) -> None:
    cluster = served(1)
    with connect(cluster.address) as ours:
        table = ours.create_table("t", dim=16, optimizer=SGD(1.0), num_rows=4096)
        table.push(IDS, ONES)
        before = ours.status().tables[0].memory_bytes
        assert isinstance(ours._calls.on_all_shards(Freeze(snapshot_id="a" * 32))[0], Done)
        table.push(IDS, ONES)
        assert ours.status().tables[0].memory_bytes >= before + ONES.nbytes


def test_who_takes_a_snapshot_renews_what_shards_hold_that_have_written_theirs(
    served: Callable[..., ServedCluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, go, renewals = served(2), tmp_path / "go", [0]
    renew = snapshots._Hold._renewed

    def counted(hold: snapshots._Hold) -> list[Any]:
        renewals[0] += 1
        if renewals[0] == 20:
            go.touch()
        return renew(hold)

    monkeypatch.setattr(snapshots, "_RENEW_SECONDS", 0.02)
    monkeypatch.setattr(snapshots._Hold, "_renewed", counted)
    with connect(cluster.address) as ours:
        for name in ("t", "u"):
            ours.create_table(name, dim=16, optimizer=SGD(1.0), num_rows=4096).push(IDS, ONES)
        for shard in shards_of(cluster):
            shard._freezes._lease_seconds = 0.5
            shard._writer._clock = shard._freezes._clock = lambda: 0.2 * renewals[0]  # time passes as it is renewed
        ours.snapshot(tmp_path / "s", "a").result(60)
        renewals[0] = 0
        with armed(f"block.write.before=pause({go})@2"):
            ours.snapshot(tmp_path / "s", "b", parent="a").result(60)
        newest = open_snapshot(tmp_path / "s" / "b").manifest.id
        assert all(shard._tables.find("t").rows.moments.number_of(newest) for shard in shards_of(cluster))
        ours.table("t").push(IDS[:1], ONES[:1])
        third = ours.snapshot(tmp_path / "s", "c", parent="b").result(60)
        listed = {snapshot.name: snapshot.snapshot for snapshot in list_snapshots(tmp_path / "s")}
        assert listed["c"] is not None
        assert listed["c"].path == third
        assert set(listed["c"].manifest.deltas) == {"t", "u"}, "a shard had forgotten what it wrote"
        assert not any(shard.held_snapshots for shard in shards_of(cluster))
