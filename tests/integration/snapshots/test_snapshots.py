"""Snapshots of a whole cluster: what comes back is what was there, on any number of shards."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.factory import connect, local
from geartrain.ams.client.shard_calls import ShardCalls
from geartrain.ams.server.freeze import freezes
from geartrain.ams.storage.snapshot.folder import latest, list_snapshots
from geartrain.ams.values import errors
from geartrain.ams.values.config import ClientConfig
from geartrain.ams.values.optimizers.registry import SGD, SparseMomentum
from geartrain.ams.values.shard_messages import CreateTable, DropTable, Restore, SyncGroup, Thaw
from geartrain.ams.values.specs import Constant, TableSpec
from tests.integration.conftest import over_few_carriers

IDS = np.arange(0, 5_000, 3)


def train(cluster: Cluster, steps: range, *, names: tuple[str, ...] = ("dense", "hashed")) -> None:
    for name in names:
        for step in steps:
            random = np.random.default_rng(step)
            ids = random.choice(IDS, 400, replace=False)
            cluster.table(name).push(ids, random.standard_normal((400, 6)).astype(np.float32), lr=0.1 / (step + 1))


def make_tables(cluster: Cluster) -> None:
    momentum = SparseMomentum(lr=0.1, momentum=0.9)
    cluster.create_table("dense", dim=6, optimizer=momentum, num_rows=5_000, seed=3)
    cluster.create_table("hashed", dim=6, optimizer=momentum, dtype="float16", slot_dtype="bfloat16")


def rows(cluster: Cluster) -> dict[str, Any]:
    return {name: cluster.table(name).pull(IDS) for name in ("dense", "hashed")}


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name in one:
        np.testing.assert_array_equal(one[name], other[name])


@over_few_carriers
def test_training_goes_on_from_a_snapshot_as_if_nothing_had_happened(cluster: Cluster, tmp_path: Path) -> None:
    make_tables(cluster)
    train(cluster, range(3))
    at_moment = rows(cluster)
    pending = cluster.snapshot(tmp_path, step=3, values={"cursor": [1, 2]}, files={"backbone": b"weights"})
    train(cluster, range(3, 6))  # beside the writing
    assert pending.result(60) == tmp_path / "step-000000003" == pending.path
    at_end = rows(cluster)

    for num_shards in (1, 3, 4):
        with local(num_shards) as other:
            snapshot = other.restore(pending.path)
            assert snapshot.manifest.step == 3
            assert snapshot.manifest.job == {"cursor": [1, 2]}
            assert snapshot.job_files() == {"backbone": b"weights"}
            assert_same(rows(other), at_moment)
            train(other, range(3, 6))
            assert_same(rows(other), at_end)


@over_few_carriers
def test_the_table_version_goes_on_after_a_restore(cluster: Cluster, tmp_path: Path) -> None:
    table = cluster.create_table("t", dim=2, optimizer=SGD(1.0), num_rows=50)
    everything, ones = np.arange(50), np.ones((50, 2), np.float32)
    for _ in range(3):
        table.push(everything, ones)
    path = cluster.snapshot(tmp_path, "a").result(60)
    for num_shards in (1, 4):
        with local(num_shards) as other:
            other.restore(path)
            assert other.table("t").version() == 3
            other.table("t").push(everything, ones)
            again = other.snapshot(tmp_path, f"b{num_shards}-{cluster.num_shards}", parent="a").result(60)
            with local(2) as last:
                last.restore(again)
                assert last.table("t").version() == 4


def test_a_script_that_runs_again_snapshots_the_same_step_under_another_name(tmp_path: Path) -> None:
    for name in ("step-000000007", "step-000000007-2", "step-000000007-3"):
        with local() as cluster:
            cluster.create_table("t", dim=2, optimizer=SGD(1.0))
            assert cluster.snapshot(tmp_path, step=7).result(60).name == name
    assert latest(tmp_path).name == name


@over_few_carriers
def test_only_the_named_tables_are_written_and_restored(cluster: Cluster, tmp_path: Path) -> None:
    make_tables(cluster)
    train(cluster, range(2))
    before = rows(cluster)
    with pytest.raises(errors.TableNotFound, match=r"no table 'other'; tables of this cluster: 'dense', 'hashed'"):
        cluster.snapshot(tmp_path, "x", tables=["dense", "other"])
    with pytest.raises(errors.InvalidArgument, match=r"tables is 'dense'; it must be a list"):
        cluster.snapshot(tmp_path, "x", tables="dense")
    assert not list(tmp_path.iterdir())
    one = cluster.snapshot(tmp_path, "one", tables=["hashed"]).result(60)
    both = cluster.snapshot(tmp_path, "both").result(60)
    assert not list(one.glob("rows-dense-*"))
    with local(3) as other:
        assert [spec["name"] for spec in other.restore(one).manifest.tables] == ["hashed"]
        assert [table.name for table in other.status().tables] == ["hashed"]
        with pytest.raises(errors.TableNotFound, match=r"no table 'dense'; tables of this snapshot: 'hashed'"):
            other.restore(one, tables=["dense"])
        other.restore(both, tables=["dense"])
        assert_same(rows(other), before)


def test_rows_of_a_table_that_was_made_anew_get_no_other_specification(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with local(2) as cluster:
        cluster.create_table("t", dim=2, num_rows=4, optimizer=SGD(1.0)).push([0], np.ones((1, 2), np.float32))
        on_all_shards = ShardCalls.on_all_shards

        def answered(*args: Any, **keywords: Any) -> Any:
            outcomes = on_all_shards(*args, **keywords)
            monkeypatch.undo()
            cluster.drop_table("t")
            cluster.create_table("t", dim=3, num_rows=4, optimizer=SGD(1.0))
            return outcomes

        monkeypatch.setattr(ShardCalls, "on_all_shards", answered)
        with pytest.raises(errors.SnapshotFailed, match="recreated"):
            cluster.snapshot(tmp_path, "a")
        assert not list_snapshots(tmp_path)


@over_few_carriers
def test_snapshots_of_different_tables_do_not_end_one_another(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tables(cluster)
    train(cluster, range(2))
    before, may_write, whole = rows(cluster), threading.Event(), freezes.write_block

    def waiting(*args: Any, **keywords: Any) -> Any:
        may_write.wait(60)
        return whole(*args, **keywords)

    monkeypatch.setattr(freezes, "write_block", waiting)
    pending = [cluster.snapshot(tmp_path, name, tables=[name]) for name in ("dense", "hashed")]
    ended = cluster.snapshot(tmp_path, "ended", tables=["hashed"])
    last = cluster.snapshot(tmp_path, "last", tables=["hashed"])
    train(cluster, range(2, 4))
    may_write.set()
    for superseded in (pending[1], ended):
        with pytest.raises(errors.SnapshotFailed, match=r"another one of the same tables|superseded"):
            superseded.result(60)
    pending[0].result(60)
    last.result(60)
    with local(2) as other:
        for name in ("dense", "last"):
            other.restore(tmp_path / name)
        assert_same(rows(other), before)


def test_who_restored_a_table_goes_on_with_it_and_others_open_it_again(
    served: Callable[..., Any], tmp_path: Path
) -> None:
    address = served(2).address
    with connect(address) as ours, connect(address) as theirs:
        table = ours.create_table("t", dim=2, optimizer=SGD(1.0), num_rows=50, initializer=Constant(0))
        other = theirs.table("t")
        everything, ones = np.arange(50), np.ones((50, 2), np.float32)
        table.push(everything, ones)
        path = ours.snapshot(tmp_path).result(60)
        other.push(everything, ones)
        half = table.prepare_push(everything, ones)
        ours.restore(path, replace=True)
        for late in (half.send, lambda: other.push(everything, ones), lambda: other.pull(everything)):
            with pytest.raises(errors.TableNotFound, match="was dropped, and another was made or restored"):
                late()
        table.push(everything, ones)
        np.testing.assert_array_equal(table.pull(everything), np.full((50, 2), -2, np.float32))
        assert table.version() == theirs.table("t").version() == 2
        ours.drop_table("t")
        ours.create_table("t", dim=2, optimizer=SGD(1.0), num_rows=50, initializer=Constant(0))
        with pytest.raises(errors.TableNotFound, match="was dropped, and another was made or restored"):
            table.pull(everything)


def test_a_table_of_other_settings_that_was_restored_is_none_that_was_open(cluster: Cluster, tmp_path: Path) -> None:
    cluster.create_table("t", dim=2, optimizer=SGD(1.0), num_rows=50)
    path = cluster.snapshot(tmp_path).result(60)
    cluster.drop_table("t")
    other = cluster.create_table("t", dim=2, optimizer=SGD(1.0), num_rows=60, initializer=Constant(0))
    cluster.restore(path, replace=True)
    with pytest.raises(errors.TableNotFound, match="or make its head, dense module or slow gear anew"):
        other.push(np.arange(50), np.ones((50, 2), np.float32))
    assert not cluster.table("t").present(np.arange(50)).any()


@over_few_carriers
def test_what_is_late_does_not_touch_the_next_table_of_a_name(cluster: Cluster, tmp_path: Path) -> None:
    def made() -> TableSpec:
        return cluster.create_table("t", dim=2, optimizer=SGD(1.0), num_rows=50, initializer=Constant(0)).spec

    first = made()
    cluster.table("t").push(np.arange(50), np.ones((50, 2), np.float32))
    path = cluster.snapshot(tmp_path).result(60)
    cluster.drop_table("t")
    made()
    calls = cluster._calls
    for late in (
        Restore(folder=str(path), tables=("t",), incarnations=(first.incarnation,)),
        DropTable(table="t", incarnation=first.incarnation),
    ):
        calls.on_all_shards(late)
    assert all(isinstance(shard, errors.TableExists) for shard in calls.on_all_shards(CreateTable(spec=first)))
    assert not cluster.table("t").present(np.arange(50)).any()


@over_few_carriers
def test_a_damaged_snapshot_costs_no_live_row(cluster: Cluster, tmp_path: Path) -> None:
    make_tables(cluster)
    train(cluster, range(2))
    path = cluster.snapshot(tmp_path, "a").result(60)
    train(cluster, range(2, 3))
    live = rows(cluster)
    block = sorted(path.glob("rows-hashed-*"))[-1]
    whole = block.read_bytes()
    block.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    for tables in (None, ["dense"]):
        with pytest.raises(errors.SnapshotDamaged, match=block.name):
            cluster.restore(path, tables=tables, replace=True)
    assert_same(rows(cluster), live)


def test_giving_up_does_not_wait_for_a_shard_that_is_gone(served: Callable[..., Any], tmp_path: Path) -> None:
    running = served(2)
    config = ClientConfig(attempt_timeout_seconds=5.0, recovery_timeout_seconds=1.0)
    with connect(running.address, config=config) as cluster:
        cluster.create_table("t", dim=2, optimizer=SGD(1.0)).push(IDS, np.ones((len(IDS), 2), np.float32))
        told: list[float] = []
        whole = ShardCalls.deliver

        def counted(calls: ShardCalls, requests: Any, *args: Any, **keywords: Any) -> Any:
            if isinstance(requests[0][1], Thaw):
                told.append(keywords["recovery_seconds"])
            return whole(calls, requests, *args, **keywords)

        running.servers[1].stop(0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ShardCalls, "deliver", counted)
            with pytest.raises(errors.ShardUnavailable, match="shard 1"):
                cluster.snapshot(tmp_path, "a")
        assert told == [0]
        assert not list(tmp_path.iterdir())


def test_a_write_that_the_snapshot_holds_is_not_applied_again(tmp_path: Path) -> None:
    ids, ones = np.arange(100), np.ones((100, 2), np.float32)
    for num_shards in (2, 3):  # the number that wrote it, and another
        with local(2, stream="job/rank0") as cluster:
            table = cluster.create_table("t", dim=2, optimizer=SGD(1.0), initializer=Constant(0))
            table.push(ids, ones, sequence=7)
            path = cluster.snapshot(tmp_path, f"a{num_shards}").result(60)
            table.push(ids, ones, sequence=8)
        with local(num_shards, stream="job/rank0") as other:
            other.restore(path)
            for step, expected in ((7, -1.0), (8, -2.0), (8, -2.0)):  # a worker that repeats what it may have sent
                other.table("t").push(ids, ones, sequence=step)
                assert (other.table("t").pull(ids) == expected).all()


@over_few_carriers
def test_ranks_go_on_at_the_step_of_the_snapshot(cluster: Cluster, tmp_path: Path) -> None:
    table = cluster.create_table("t", dim=2, optimizer=SGD(1.0), initializer=Constant(0))

    def step(sequence: int, job: str = "job") -> None:
        group = SyncGroup(job=job, world_size=1, rank=0, sequence=sequence, sample_count=1)
        table.push(IDS, np.ones((len(IDS), 2), np.float32), group=group)

    for sequence in (1, 2, 3):
        step(sequence)
    path = cluster.snapshot(tmp_path, "a").result(60)
    step(4)
    for _ in range(2):
        cluster.restore(path, replace=True)
        with pytest.raises(errors.StepMismatch, match=r"at step 5 .* its group at 4"):
            step(5)
        step(3)  # a retry of what the rows hold
        assert (table.pull(IDS) == -3).all()
        step(4)
        step(1, job="another run")  # which numbers from where it likes
        assert (table.pull(IDS) == -5).all()
