"""Loops of a job that the scheduler restores: what they hear, and what of others stays as it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import geartrain as gt
from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.snapshots.snapshot import PendingSnapshot
from geartrain.ams.client.table import Table
from geartrain.workers.samples import leased

pa = pytest.importorskip("pyarrow", reason="needs pip install 'geartrain[data]'")
pq = pytest.importorskip("pyarrow.parquet", reason="needs pip install 'geartrain[data]'")

COUNT = 600


class Roles:
    """A scheduler and a shard, which can be lost."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.root, self._stack = folder / "snapshots", stack
        settings = {"listen": "127.0.0.1:0", "num_shards": 1, "data": str(folder / "state"), "lease_seconds": 30.0}
        settings["stream_lease_seconds"] = 6.0
        self.address = stack.enter_context(gt.ops.Role("scheduler", **settings)).address
        self.listen = "127.0.0.1:0"
        self.start_shard()
        pq.write_table(pa.table({"id": np.arange(COUNT)}), folder / "samples.parquet")
        self.samples = gt.ParquetSamples(folder / "samples.parquet", columns=["id"], batch_size=50)

    def start_shard(self) -> None:
        self.shard = gt.ops.Role("server", scheduler=self.address, listen=self.listen, heartbeat_seconds=0.05)
        self.listen = self.shard.address
        self._stack.callback(self.shard.close)

    def lose_shard(self) -> None:
        self.shard.close()
        self.start_shard()

    def order(self, *tables: str, root: str = "") -> gt.RestoreOrder:
        return gt.RestoreOrder(root=root or str(self.root), tables=tables, every_seconds=300.0)


@pytest.fixture
def roles(tmp_path: Path) -> Iterator[Roles]:
    with ExitStack() as stack:
        yield Roles(tmp_path, stack)


def counts(cluster: Cluster, name: str) -> Table:
    return cluster.create_table(name, dim=1, num_rows=COUNT, optimizer=gt.SGD(1.0), initializer=gt.Constant(0.0))


def count(table: Table, ids: torch.Tensor) -> None:
    table.push(np.asarray(ids), -np.ones((len(ids), 1), np.float32))


def test_a_step_that_fails_is_raised_and_is_in_the_rows_once_all_the_same(roles: Roles) -> None:
    with gt.connect(roles.address) as cluster, gt.connect(roles.address) as others:
        table, other = counts(cluster, "t"), counts(others, "other")
        count(other, torch.arange(COUNT))

        def fail(ids: torch.Tensor) -> None:
            count(table, ids)
            raise ZeroDivisionError

        with roles.samples.shared(cluster, "job", worker="w", epochs=1, restore=roles.order("t")) as batches:
            first, second = next(batches), next(batches)
            with pytest.raises(gt.errors.InvalidArgument, match=r"train on a batch in apply\(batch, step\)"):
                batches.commit(first)
            assert batches.apply(first, lambda: count(table, first["id"]))
            with pytest.raises(ZeroDivisionError):
                batches.apply(second, lambda: fail(second["id"]))
            assert not batches.apply(second, lambda: fail(second["id"]))  # is read again
            for batch in batches:
                batches.apply(batch, lambda ids=batch["id"]: count(table, ids))
        assert np.all(table.pull(np.arange(COUNT)) == 1)
        assert np.all(other.pull(np.arange(COUNT)) == 1)  # is not of the job


def test_a_push_to_a_table_that_is_dropped_for_a_restore_is_repeated(roles: Roles) -> None:
    with gt.connect(roles.address) as cluster:
        table = counts(cluster, "t")

        def refused(ids: torch.Tensor) -> None:
            count(table, ids)
            raise gt.errors.StaleClient("write 1 was applied to a table that was dropped since")

        with roles.samples.shared(cluster, "job", worker="w", epochs=1, restore=roles.order("t")) as batches:
            first = next(batches)
            assert not batches.apply(first, lambda: refused(first["id"]))
            for batch in batches:
                batches.apply(batch, lambda ids=batch["id"]: count(table, ids))
        assert np.all(table.pull(np.arange(COUNT)) == 1)


def test_a_first_snapshot_that_an_alteration_ends_is_taken_again(roles: Roles, monkeypatch: pytest.MonkeyPatch) -> None:
    taken, snapshot = list[object](), Cluster.snapshot

    def ended(self: Cluster, *arguments: Any, **named: Any) -> PendingSnapshot:
        taken.append(self)
        if len(taken) == 1:
            raise gt.errors.SnapshotSuperseded("it was given up")
        return snapshot(self, *arguments, **named)

    monkeypatch.setattr(Cluster, "snapshot", ended)
    with gt.connect(roles.address) as cluster:
        counts(cluster, "t")
        with roles.samples.shared(cluster, "job", worker="w", epochs=1, restore=roles.order("t")) as batches:
            next(batches)
    assert len(taken) == 2


def test_a_superseded_worker_is_told_and_gets_no_samples_any_more(roles: Roles) -> None:
    with gt.connect(roles.address, stream="w") as before:
        table, order = counts(before, "t"), roles.order("t")
        with (
            pytest.raises(gt.errors.StaleClient),
            roles.samples.shared(before, "job", worker="a", restore=order) as old,
        ):
            batch = next(old)
            with gt.connect(roles.address, stream="w") as cluster:
                cluster.fence("w", cluster.write_stream.incarnation, forget=False)
                with pytest.raises(gt.errors.StaleClient, match="was superseded by"):
                    old.apply(batch, lambda: count(table, batch["id"]))
                with roles.samples.shared(cluster, "job", worker="b", epochs=1, restore=order) as batches:
                    table = cluster.table("t")
                    for batch in batches:
                        batches.apply(batch, lambda ids=batch["id"]: count(table, ids))
                assert np.all(table.pull(np.arange(COUNT)) == 1)
            next(old)


def test_embeddings_and_an_attached_module_go_on_when_a_shard_is_lost(roles: Roles) -> None:
    with gt.connect(roles.address) as cluster:
        fields = gt.EmbeddingGroup(cluster, "ctr", [gt.Field("id", dim=4)], optimizer=gt.SGD(0.1))
        linear = torch.nn.Linear(4, 1)
        dense = gt.attach(linear, cluster, name="dense", optimizer=gt.SGD(0.1))
        rows = gt.RowOptimizer(fields)
        tables = tuple(cluster.table_incarnations())

        def train(batch: dict[str, torch.Tensor]) -> None:
            rows.zero_grad()
            dense.zero_grad()
            dense.refresh()
            linear(fields(batch)["id"]).sum().backward()
            rows.step()
            dense.step()

        done, lost = 0, 0
        with roles.samples.shared(cluster, "job", worker="w", epochs=1, restore=roles.order(*tables)) as batches:
            for number, batch in enumerate(batches):
                if number == 5:
                    roles.lose_shard()
                is_done = batches.apply(batch, lambda batch=batch: train(batch))
                done, lost = done + is_done, lost + (not is_done)
        assert (done, lost) == (5 + COUNT // 50, 1)


def test_a_job_without_a_first_snapshot_hears_why(roles: Roles, tmp_path: Path) -> None:
    with gt.connect(roles.address) as cluster:
        batches = roles.samples.shared(cluster, "job", worker="w", restore=roles.order("missing"))
        with pytest.raises(gt.errors.TableNotFound, match="missing"):
            next(batches)
        (tmp_path / "file").write_text("")
        counts(cluster, "t")
        order = roles.order("t", root=str(tmp_path / "file"))
        batches = roles.samples.shared(cluster, "job", worker="w", restore=order)
        with pytest.raises(gt.errors.SnapshotError):
            next(batches)


def test_apply_is_for_jobs_that_are_restored_and_an_embedded_cluster_restores_none(roles: Roles) -> None:
    with gt.local() as cluster:
        batches = roles.samples.shared(cluster, "job", worker="w")
        with pytest.raises(gt.errors.InvalidArgument, match=r"give shared\(..., restore=gt.RestoreOrder\(...\)\)"):
            batches.apply(next(batches), lambda: None)
        with pytest.raises(gt.errors.InvalidArgument, match="start it with --data FOLDER"):
            next(roles.samples.shared(cluster, "other", worker="w", restore=roles.order("t")))


def test_a_job_that_went_back_unnoticed_reads_again_what_its_rows_lack(roles: Roles) -> None:
    with gt.connect(roles.address) as cluster, gt.connect(roles.address) as others:
        table, order = counts(cluster, "t"), roles.order("t")
        shared = {"epochs": 1, "restore": order, "num_streams": 4, "num_workers": 2}
        ours = roles.samples.shared(cluster, "job", worker="ours", **shared)
        theirs = roles.samples.shared(others, "job", worker="theirs", **shared)
        first = next(ours)
        next(theirs)
        assert ours.apply(first, lambda: count(table, first["id"]))
        theirs.close()
        ours._renew({})  # hears that there is more to lease
        lost = others.streams("job", worker="lost", num_streams=4, data=ours._streams._lease.data, restore=order)
        lost.lease()
        lost.release(lost=True)
        while True:
            try:
                lost.lease()
                break
            except gt.errors.Busy:
                pass
        lost.release()
        for batch in ours:
            ours.apply(batch, lambda ids=batch["id"]: count(table, ids))
        ours.close()
        assert np.all(table.pull(np.arange(COUNT)) == 1)


def test_snapshots_that_are_away_for_a_moment_are_not_given_up(
    roles: Roles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(leased, "_SAID_SECONDS", 0.0)
    with gt.connect(roles.address) as cluster:
        table = counts(cluster, "t")
        with roles.samples.shared(cluster, "job", worker="w", epochs=1, restore=roles.order("t")) as batches:
            batch = next(batches)
            assert batches.apply(batch, lambda: count(table, batch["id"]))
            roles.root.rename(tmp_path / "away")
            roles.lose_shard()
            batch = next(batches)
            assert not batches.apply(batch, lambda: count(table, batch["id"]))
            assert batches.next_batch() is None  # it waits for them
            assert "goes back to its newest snapshot" in caplog.text and "the scheduler's log says" in caplog.text
            (tmp_path / "away").rename(roles.root)
            for batch in batches:
                batches.apply(batch, lambda ids=batch["id"]: count(table, ids))
        assert np.all(table.pull(np.arange(COUNT)) == 1)


def test_a_worker_that_comes_when_all_is_done_has_nothing_to_do(roles: Roles) -> None:
    with gt.connect(roles.address) as cluster, gt.connect(roles.address) as late:
        table = counts(cluster, "t")
        with roles.samples.shared(cluster, "job", worker="w", epochs=1, restore=roles.order("t")) as batches:
            for batch in batches:
                batches.apply(batch, lambda ids=batch["id"]: count(table, ids))
        cluster.drop_table("t")  # what has become of the job is elsewhere
        with roles.samples.shared(late, "job", worker="v", epochs=1, restore=roles.order("t")) as batches:
            assert not list(batches)
