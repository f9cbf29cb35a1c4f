"""Settings of a live table that are altered: on all shards, while others push, and for good."""

from __future__ import annotations

import logging
import re
import shlex
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import geartrain as gt
from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.snapshots.follower import TableFollower
from geartrain.ams.scheduler.broadcast import broadcast
from geartrain.ams.server.shard import Shard
from geartrain.ams.storage.snapshot.compaction import compact
from geartrain.ams.storage.snapshot.folder import open_snapshot
from geartrain.ams.storage.snapshot.manifest import ROWS
from geartrain.ams.values import errors
from geartrain.ams.values.shard_messages import AlterTable, CallContext, CreateTable, Describe, WriteFrozen
from geartrain.ams.values.specs import Constant, TableSpec, Uniform
from tests.faults.children import Child, serve
from tests.integration.conftest import QUICK, ServedCluster
from tests.support.command_line import invoke

DIM = 4
IDS = np.arange(3_000)
ONES = np.ones((len(IDS), DIM), np.float32)


def test_the_remedy_of_a_full_table_lets_the_refused_push_through(served: Callable[..., ServedCluster]) -> None:
    address = served(2).address
    with gt.connect(address, config=QUICK) as cluster:
        table = cluster.create_table(
            "my rows", dim=DIM, optimizer=gt.SGD(1.0), initializer=Constant(0.0), max_bytes=50_000
        )
        with pytest.raises(errors.TableFull, match="geartrain table alter") as refused:
            table.push(IDS, ONES)
        command = re.search(r"geartrain (table alter '[^']+' --max-bytes \d+)", str(refused.value))
        assert command is not None
        done = invoke(*shlex.split(command[1]), "--scheduler", address)
        assert (done.exit_code, "max_bytes is" in done.stdout) == (0, True)
        assert table.push(IDS, ONES).created == len(IDS)
        np.testing.assert_array_equal(table.pull(IDS), -ONES)


def test_another_client_learns_of_an_alteration_once_by_its_next_call(served: Callable[..., ServedCluster]) -> None:
    address = served(2).address
    with gt.connect(address, config=QUICK) as ours, gt.connect(address, config=QUICK) as other:
        ours.create_table("t", dim=DIM, optimizer=gt.SGD(1.0), initializer=Constant(0.0))
        theirs = other.table("t")
        wired = theirs.with_wire("bfloat16")
        theirs.push(IDS, ONES)
        looks = 0
        refresh = other._calls._refresh

        def counted() -> Any:
            nonlocal looks
            looks += 1
            return refresh()

        other._calls._refresh = counted
        ours.alter_table("t", optimizer=gt.SGD(0.5), expiry=gt.Unseen(steps=10), admission=gt.MinCount(2))
        theirs.push(IDS, ONES, step=1)
        assert looks in (1, 2)  # each shard may be the first to say so
        seen = looks
        for step in range(2, 5):
            theirs.push(IDS, ONES, step=step)
        assert looks == seen
        for table in (theirs, wired):
            assert (table.spec.expiry, table.spec.optimizer) == (gt.Unseen(steps=10), gt.SGD(0.5))
            assert table.spec.counts_occurrences
        np.testing.assert_array_equal(theirs.pull(IDS), -ONES - 4 * 0.5 * ONES)
        theirs.push([10_000], ONES[:1], occurrences=[1], step=5)
        theirs.push([10_001], ONES[:1], occurrences=[2], step=6)
        assert theirs.present([10_000, 10_001]).tolist() == [False, True]


def test_an_alteration_while_a_client_learns_of_another_keeps_no_push_waiting(
    served: Callable[..., ServedCluster],
) -> None:
    address = served(2).address
    waits_for_nobody = QUICK.model_copy(update={"recovery_timeout_seconds": 0.0})
    with gt.connect(address, config=QUICK) as ours, gt.connect(address, config=waits_for_nobody) as other:
        ours.create_table("t", dim=DIM, optimizer=gt.SGD(1.0), initializer=Constant(0.0))
        theirs, more = other.table("t"), [2_000_001, 2_000_002, 2_000_003]
        refresh = other._calls._refresh

        def altered_behind() -> Any:
            view = refresh()
            if more:
                ours.alter_table("t", max_bytes=more.pop())
            return view

        other._calls._refresh = altered_behind
        ours.alter_table("t", max_bytes=2_000_000)
        theirs.push(IDS, ONES)
        assert not more
        # And where one thread has learned of the first before another comes to know that its call was of the past.
        ours.alter_table("t", max_bytes=3_000_000)
        settle = other._calls._finish

        def learned_beside(*arguments: Any) -> Any:
            if not more:
                other._calls._refresh_cluster(0)
                more.append(3_000_001)
            return settle(*arguments)

        other._calls._finish = learned_beside
        theirs.push(IDS, ONES)
        np.testing.assert_array_equal(ours.table("t").pull(IDS), -2 * ONES)


def test_numbers_of_an_optimizer_are_those_of_torch_before_and_after(cluster: Cluster) -> None:
    """Against torch.optim.Adagrad in float64, whose param_group changes at the same step."""
    table = cluster.create_table("t", dim=DIM, optimizer=gt.Adagrad(0.1), num_rows=50, initializer=Constant(0.0))
    ids = np.arange(50)
    rows = torch.zeros(50, DIM, dtype=torch.float64, requires_grad=True)
    twin = torch.optim.Adagrad([rows], lr=0.1)
    generator = torch.Generator().manual_seed(0)
    for step in range(6):
        if step == 3:
            table = cluster.alter_table("t", optimizer=gt.Adagrad(0.02, eps=0.5))
            twin.param_groups[0].update(lr=0.02, eps=0.5)
        gradients = torch.randn(50, DIM, generator=generator)
        table.push(ids, gradients.numpy())
        rows.grad = gradients.double()
        twin.step()
    torch.testing.assert_close(torch.from_numpy(table.pull(ids)).double(), rows.detach(), rtol=1e-5, atol=1e-6)


def test_rows_that_are_not_there_have_the_altered_initial_values(cluster: Cluster) -> None:
    with gt.local(num_shards=1) as fresh:
        expected = fresh.create_table("t", dim=DIM, optimizer=gt.SGD(1.0), initializer=Uniform(5, 6), seed=3).pull(IDS)
    table = cluster.create_table("t", dim=DIM, optimizer=gt.SGD(1.0), seed=3)
    table.push(IDS[:100], ONES[:100])
    written = table.pull(IDS[:100])
    cluster.alter_table("t", initializer=Uniform(5, 6))
    np.testing.assert_array_equal(table.pull(IDS[:100]), written)
    np.testing.assert_array_equal(table.pull(IDS)[100:], expected[100:])
    table.push(IDS[100:200], ONES[100:200])
    np.testing.assert_array_equal(table.pull(IDS[100:200]), expected[100:200] - 1)


def test_what_a_table_is_cannot_be_altered_and_the_error_says_so(cluster: Cluster) -> None:
    cluster.create_table("t", dim=DIM, optimizer=gt.SGD(1.0), num_rows=100)
    for fixed in ({"dim": 5}, {"dtype": "float16"}, {"seed": 1}, {"num_rows": 200}):
        with pytest.raises(errors.InvalidArgument, match=f"{next(iter(fixed))} of table 't' cannot be altered"):
            cluster.alter_table("t", **fixed)  # type: ignore[arg-type]
    with pytest.raises(errors.SpecMismatch, match=r"its optimizer is SGD.*not Adam"):
        cluster.alter_table("t", optimizer=gt.Adam(0.1))
    with pytest.raises(errors.InvalidArgument, match="rows of dense ids have their places"):
        cluster.alter_table("t", max_bytes=10_000)
    with pytest.raises(errors.TableNotFound, match="'u'"):
        cluster.alter_table("u", max_bytes=10_000)
    assert cluster.table("t").spec.optimizer == gt.SGD(1.0)


def test_settings_that_a_shard_refuses_change_nothing_on_any(cluster: Cluster) -> None:
    table = cluster.create_table("t", dim=DIM, optimizer=gt.SGD(1.0), initializer=Constant(0.0), max_bytes=1_000_000)
    with pytest.raises(errors.InvalidArgument, match="holds no row"):
        cluster.alter_table("t", max_bytes=50, optimizer=gt.SGD(7.0))
    table.push(IDS, ONES)
    np.testing.assert_array_equal(table.pull(IDS), -ONES)
    assert (cluster.table("t").spec.max_bytes, table.spec.optimizer) == (1_000_000, gt.SGD(1.0))


def test_rows_that_were_not_watched_count_as_seen_when_the_clock_begins(cluster: Cluster) -> None:
    table = cluster.create_table("t", dim=DIM, optimizer=gt.SGD(1.0), initializer=Constant(0.0))
    table.push(IDS, ONES)
    cluster.alter_table("t", expiry=gt.Unseen(steps=100, every=10))
    for step in range(100_000, 100_090, 10):  # the job is far on: none of them was unseen for so long
        table.push(IDS[:100], ONES[:100], step=step)
    assert table.present(IDS).all()
    for step in range(100_090, 100_300, 10):
        table.push(IDS[:100], ONES[:100], step=step)
    table.expire()  # what shards did not do yet between two requests
    np.testing.assert_array_equal(table.present(IDS), IDS < 100)


def test_a_smaller_limit_takes_rows_at_once_and_a_larger_one_none(cluster: Cluster) -> None:
    table = cluster.create_table("t", dim=DIM, optimizer=gt.Adagrad(0.1))
    table.push(IDS, ONES)
    cluster.alter_table("t", max_bytes=10_000_000)
    assert table.present(IDS).all()
    table.push(IDS[:50], ONES[:50])
    cluster.alter_table("t", max_bytes=40_000)
    present = table.present(IDS)
    assert 50 <= present.sum() < 1_000
    assert present[:50].all()  # which are pushed more often than others since somebody counts
    state = cluster.status().tables[0]
    assert (state.rows, state.evicted) == (present.sum(), len(IDS) - present.sum())
    cluster.alter_table("t", max_bytes=None)
    table.push(IDS, ONES)
    assert table.present(IDS).all()


def test_a_table_that_is_there_keeps_its_settings_and_that_is_said(
    tmp_path: Path, cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    asked: dict[str, Any] = {"dim": DIM, "optimizer": gt.SGD(1.0), "initializer": Constant(0.0)}
    table = cluster.create_table("t", **asked, max_bytes=1_000_000)
    table.push(IDS, ONES)
    cluster.snapshot(tmp_path, "before").result()
    cluster.alter_table("t", max_bytes=2_000_000, admission=gt.MinCount(3))
    with caplog.at_level(logging.WARNING):
        again = cluster.create_table("t", **asked, max_bytes=1_000_000, reuse=True)
    assert "keeps its settings: admission is MinCount(" in caplog.text
    assert "max_bytes is 2000000, not 1000000. cluster.alter_table('t', ...)" in caplog.text
    assert again.spec.max_bytes == 2_000_000
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        cluster.restore(tmp_path / "before", replace=True)
    assert "max_bytes is 2000000, not 1000000" in caplog.text
    np.testing.assert_array_equal(table.pull(IDS), -ONES)
    table.push([5_000], ONES[:1])
    assert not table.present([5_000]).any()
    cluster.drop_table("t")
    cluster.restore(tmp_path / "before")
    assert cluster.table("t").spec.max_bytes == 1_000_000


@pytest.mark.parametrize("is_compacted", [False, True])
def test_snapshots_that_add_to_earlier_ones_are_restored_across_an_alteration(
    tmp_path: Path, is_compacted: bool
) -> None:
    with gt.local(num_shards=2) as cluster:
        table = cluster.create_table("t", dim=DIM, optimizer=gt.SGD(1.0), initializer=Constant(0.0))
        table.push(IDS, ONES)
        cluster.snapshot(tmp_path, "whole").result()
        cluster.alter_table("t", expiry=gt.Unseen(steps=50, every=10), max_bytes=1_000_000)
        table.push(IDS[:10], ONES[:10], step=70_000)
        cluster.snapshot(tmp_path, "more", parent=tmp_path / "whole").result()
        files = open_snapshot(tmp_path / "more").manifest.files
        assert sum(entry.num_rows for entry in files if entry.kind == ROWS) == 10
    with gt.local(num_shards=3) as cluster:
        cluster.restore(compact(tmp_path, "more") if is_compacted else tmp_path / "more")
        table = cluster.table("t")
        assert (table.spec.expiry, table.spec.max_bytes) == (gt.Unseen(steps=50, every=10), 1_000_000)
        table.push(IDS[:10], ONES[:10], step=70_020)
        assert table.expire(dry_run=True).expired == 0
        np.testing.assert_array_equal(table.pull(IDS)[:, 0], np.where(IDS < 10, -3.0, -1.0))


@pytest.mark.parametrize("rule", [gt.Unseen(steps=50, every=10), gt.Unseen(seconds=500.0)])
def test_a_restored_table_is_scanned_as_its_altered_rule_says(tmp_path: Path, rule: gt.Unseen) -> None:
    with gt.local(num_shards=2) as cluster:
        table = cluster.create_table(
            "t", dim=DIM, optimizer=gt.SGD(1.0), initializer=Constant(0.0), expiry=gt.Unseen(steps=50, every=100_000)
        )
        table.push(IDS, ONES, step=1, unix_seconds=1e9)
        cluster.snapshot(tmp_path, "s").result()
        cluster.alter_table("t", expiry=rule)
        cluster.restore(tmp_path / "s", replace=True)
        for step in range(2, 100):
            table.push(IDS[:2_000], ONES[:2_000], step=step, unix_seconds=1e9 + 10 * step)
        assert cluster.status().tables[0].rows == 2_000


@pytest.mark.parametrize("name", ["before", "after"])
def test_rows_that_were_not_watched_count_as_seen_when_the_clock_begins_after_a_restore(
    tmp_path: Path, name: str
) -> None:
    with gt.local(num_shards=2) as cluster:
        table = cluster.create_table("t", dim=DIM, optimizer=gt.SGD(1.0), initializer=Constant(0.0))
        table.push(IDS, ONES)
        cluster.alter_table("t", expiry=gt.Unseen(steps=50, every=10))
        cluster.snapshot(tmp_path, "before").result()
        table.push(IDS[:10], ONES[:10], step=100_000)  # the clock begins
        cluster.snapshot(tmp_path, "after", parent=tmp_path / "before").result()
    with gt.local(num_shards=3) as cluster:
        cluster.restore(tmp_path / name)
        table = cluster.table("t")
        for step in range(100_000, 100_040):
            table.push(IDS[:2_000], ONES[:2_000], step=step)
        assert table.expire(dry_run=True).expired == 0
        assert cluster.status().tables[0].rows == len(IDS)
        table.push(IDS[:2_000], ONES[:2_000], step=100_060)
        table.expire()
        assert cluster.status().tables[0].rows == 2_000


def test_a_follower_goes_on_across_an_alteration(tmp_path: Path) -> None:
    with gt.local(num_shards=2) as cluster:
        table = cluster.create_table("t", dim=DIM, optimizer=gt.SGD(1.0), initializer=Constant(0.0))
        table.push(IDS, ONES)
        cluster.export("t", tmp_path).result()
        follower = TableFollower(tmp_path)
        cluster.alter_table("t", initializer=Constant(9.0), max_bytes=10_000_000)
        table.push(IDS[:10], ONES[:10])
        cluster.export("t", tmp_path).result()
        assert follower.refresh() == 2
        np.testing.assert_array_equal(follower.pull(np.arange(4_000)), table.pull(np.arange(4_000)))
        assert follower.pull([3_500])[0, 0] == 9.0


def test_what_rows_keep_does_not_change_under_a_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with gt.local(num_shards=2) as cluster:
        table = cluster.create_table("t", dim=DIM, optimizer=gt.SGD(1.0), initializer=Constant(0.0))
        table.push(IDS, ONES)
        calls = cluster._calls
        deliver, begun = calls.deliver, []

        def held(asked: Any, *arguments: Any, **others: Any) -> Any:
            if type(asked[0][1]).__name__ == "WriteFrozen" and not begun:
                begun.append(True)
                with pytest.raises(errors.Busy, match="is in a snapshot or export that is being written"):
                    cluster.alter_table("t", expiry=gt.Unseen(steps=50))
                cluster.alter_table("t", optimizer=gt.SGD(0.5))
            return deliver(asked, *arguments, **others)

        monkeypatch.setattr(calls, "deliver", held)
        cluster.snapshot(tmp_path, "s").result()
        assert begun
        assert cluster.alter_table("t", expiry=gt.Unseen(steps=50)).spec.optimizer == gt.SGD(0.5)
        cluster.restore(tmp_path / "s", replace=True)
        np.testing.assert_array_equal(table.pull(IDS), -ONES)


@pytest.mark.parametrize("is_written_first", [False, True])
def test_no_snapshot_mixes_settings_of_an_alteration_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_written_first: bool
) -> None:
    with gt.local(num_shards=2) as cluster:
        table = cluster.create_table("t", dim=DIM, optimizer=gt.SGD(1.0), initializer=Constant(0.0))
        table.push(IDS, ONES)
        deliver, reached_all, begun = cluster._calls.deliver, threading.Event(), []

        def write_after(asked: Any, *arguments: Any, **others: Any) -> Any:
            if isinstance(asked[0][1], WriteFrozen) and not is_written_first:
                assert reached_all.wait(30)
            return deliver(asked, *arguments, **others)

        def one_after_the_other(open_carrier: Any, shards: Any, request: Any, **others: Any) -> bool:
            if not isinstance(request, AlterTable) or request.dry_run or begun:
                return broadcast(open_carrier, shards, request, **others)
            broadcast(open_carrier, shards[1:], request)
            begun.append(cluster.snapshot(tmp_path, "mixed"))
            if is_written_first:
                with pytest.raises(errors.SnapshotFailed, match="was altered on some shards alone"):
                    begun[0].result()
            return broadcast(open_carrier, shards[:1], request)

        monkeypatch.setattr(cluster._calls, "deliver", write_after)
        monkeypatch.setattr("geartrain.ams.scheduler.scheduler.broadcast", one_after_the_other)
        cluster.alter_table("t", admission=gt.MinCount(300))
        reached_all.set()
        with pytest.raises(errors.SnapshotFailed, match=r"take (it|the snapshot) again"):
            begun[0].result()
        assert {spec.admission for spec in specs_on_shards(cluster)} == {gt.MinCount(300)}
        cluster.snapshot(tmp_path, "whole").result()
        cluster.drop_table("t")
        cluster.restore(tmp_path / "whole")
        assert {spec.admission for spec in specs_on_shards(cluster)} == {gt.MinCount(300)}
        np.testing.assert_array_equal(cluster.table("t").pull(IDS), -ONES)


def test_a_snapshot_has_the_settings_that_its_shards_froze(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with gt.local(num_shards=2) as cluster:
        cluster.create_table("t", dim=DIM, optimizer=gt.SGD(1.0)).push(IDS, ONES)
        describe = cluster._scheduler.describe
        views: list[Any] = []

        def altered_at_once(*arguments: Any) -> Any:
            views.append(describe(*arguments))
            tables = tuple(replace(spec, admission=gt.MinCount(300)) for spec in views[-1].tables)
            return replace(views[-1], tables=tables)  # as while an alteration is stored that a shard refuses then

        monkeypatch.setattr(cluster._scheduler, "describe", altered_at_once)
        cluster.snapshot(tmp_path, "s").result()
        assert views
        (spec,) = open_snapshot(tmp_path / "s").manifest.tables
        assert spec["admission"] is None


def test_an_earlier_alteration_that_comes_late_does_nothing() -> None:
    shard = Shard(0, np.arange(4096), incarnation=1)
    try:
        spec = TableSpec(name="t", dim=DIM, optimizer=gt.SGD(1.0))

        def ask(request: Any) -> Any:
            return shard.submit(CallContext(), request).result(10)

        ask(CreateTable(spec=spec))
        later = TableSpec(name="t", dim=DIM, optimizer=gt.SGD(3.0), altered=3)
        assert not ask(AlterTable(spec=later)).duplicate
        assert ask(AlterTable(spec=later)).duplicate
        assert ask(AlterTable(spec=TableSpec(name="t", dim=DIM, optimizer=gt.SGD(2.0), altered=2))).duplicate
        assert (shard.specs[0].optimizer, shard.cluster_version) == (gt.SGD(3.0), 3)
        with pytest.raises(errors.SpecMismatch, match="dim is 4, not 5"):
            ask(AlterTable(spec=TableSpec(name="t", dim=5, optimizer=gt.SGD(2.0), altered=4)))
    finally:
        shard.close()


def push_until_told(pipe: Connection, address: str) -> None:
    """A client of its own that waits for no shard: pushes ones to all rows until it is told to stop; says how often."""
    with gt.connect(address, config=QUICK.model_copy(update={"recovery_timeout_seconds": 0.0})) as cluster:
        table, step = cluster.table("t"), 0
        while not pipe.poll():
            step += 1
            table.push(IDS, ONES, step=1_000 + step)
            pipe.send(step)
        table.pull(IDS)
        pipe.send(table.spec)
        pipe.recv()


@pytest.fixture
def processes() -> Iterator[Callable[..., Child]]:
    made: list[Child] = []

    def start(*arguments: Any) -> Child:
        made.append(Child(*arguments))
        return made[-1]

    yield start
    for child in reversed(made):
        child.end()


def test_processes_push_on_while_a_table_is_altered_and_a_restarted_shard_has_it(
    tmp_path: Path, processes: Callable[..., Child]
) -> None:
    def role(name: str, **settings: Any) -> tuple[Child, str]:
        child = processes(serve, name, {"listen": "127.0.0.1:0", **settings})
        return child, child.receive()

    _, address = role("scheduler", num_shards=2, lease_seconds=2)
    servers = [role("server", scheduler=address, shard=shard, heartbeat_seconds=0.1)[0] for shard in range(2)]
    with gt.connect(address, config=QUICK) as cluster:
        table = cluster.create_table(
            "t", dim=DIM, optimizer=gt.SGD(1.0), initializer=Constant(0.0), max_bytes=1_000_000
        )
        table.push(IDS, ONES)
        pusher = processes(push_until_told, address)
        assert pusher.receive() == 1
        for number in range(30):
            cluster.alter_table("t", max_bytes=2_000_000 + number, expiry=gt.Unseen(steps=10**6))
            assert pusher.receive() > 1  # it goes on
        pusher.pipe.send("stop")
        steps = 0
        while not isinstance(said := pusher.receive(), TableSpec):
            steps = said
        assert (said.max_bytes, said.expiry) == (2_000_029, gt.Unseen(steps=10**6))
        np.testing.assert_array_equal(table.pull(IDS), -(1 + steps) * ONES)  # none is lost, none applied twice
        cluster.snapshot(tmp_path, "s").result()
        servers[1].end()
        with pytest.raises((errors.ShardUnavailable, errors.ClusterNotReady)):
            cluster.alter_table("t", max_bytes=3_000_000)
    role("server", scheduler=address, shard=1, heartbeat_seconds=0.1)
    with gt.connect(address, config=QUICK) as cluster:
        cluster.restore(tmp_path / "s", replace=True)
        assert cluster.alter_table("t", max_bytes=3_000_000).spec.max_bytes == 3_000_000
        table = cluster.table("t")
        np.testing.assert_array_equal(table.pull(IDS), -(1 + steps) * ONES)
        assert table.spec.expiry == gt.Unseen(steps=10**6)
        assert {spec.max_bytes for spec in (table.spec, *specs_on_shards(cluster))} == {3_000_000}


def specs_on_shards(cluster: Cluster) -> list[TableSpec]:
    replies = cluster._calls.read([(shard, Describe()) for shard in range(cluster.num_shards)])
    return [state.spec for reply in replies for state in reply.tables]  # type: ignore[union-attr]
