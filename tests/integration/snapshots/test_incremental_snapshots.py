"""Snapshots that add to one another: whatever happened in between, what is restored is the table, to the bit."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.factory import local
from geartrain.ams.observe.failpoints import armed
from geartrain.ams.server.freeze.freezes import Freezes
from geartrain.ams.storage.durable import disk
from geartrain.ams.storage.snapshot.compaction import compact
from geartrain.ams.storage.snapshot.folder import latest, list_snapshots, open_snapshot, prune
from geartrain.ams.storage.snapshot.manifest import ROWS
from geartrain.ams.tables.moments import MAX_MOMENTS
from geartrain.ams.values import errors
from geartrain.ams.values.optimizers.registry import SparseMomentum
from tests.integration.conftest import over_few_carriers

Contents = dict[str, dict[int, tuple[bytes, bytes]]]
NUM_ROWS = 500


def make(cluster: Cluster, name: str) -> None:
    cluster.create_table(
        name, dim=3, optimizer=SparseMomentum(lr=0.1, momentum=0.9), num_rows=NUM_ROWS if name == "dense" else None
    )


def write(cluster: Cluster, seed: int, *names: str, count: int = 20) -> None:
    random = np.random.default_rng(seed)
    for name in names or ("dense", "hashed"):
        ids = random.choice(NUM_ROWS, count, replace=False)
        cluster.table(name).push(ids, random.standard_normal((count, 3)).astype(np.float32))


def contents(cluster: Cluster, root: Path) -> Contents:
    """Rows and slots of every table, as a whole snapshot in a root of its own shows them."""
    path = cluster.snapshot(root / "asides", f"{len(list_snapshots(root / 'asides'))}").result(60)
    snapshot = open_snapshot(path)
    found: Contents = {str(spec["name"]): {} for spec in snapshot.manifest.tables}
    for entry in snapshot.manifest.files:
        if entry.kind == ROWS:
            arrays = snapshot.read(entry)
            for i, row, slot in zip(arrays["ids"], arrays["rows"], arrays["slots"], strict=True):
                assert int(i) not in found[str(entry.table)]
                found[str(entry.table)][int(i)] = (row.tobytes(), slot.tobytes())
    return found


def restored(root: Path, path: Path, num_shards: int) -> Contents:
    with local(num_shards) as other:
        other.restore(path)
        return contents(other, root)


def num_rows(path: Path) -> int:
    return sum(entry.num_rows for entry in open_snapshot(path).manifest.files)


@over_few_carriers
def test_a_chain_is_restored_on_any_number_of_shards(cluster: Cluster, tmp_path: Path) -> None:
    for name in ("dense", "hashed"):
        make(cluster, name)
    write(cluster, 0, count=300)
    paths = [cluster.snapshot(tmp_path, "s0").result(60)]
    for step in (1, 2, 3):
        write(cluster, step)
        parent: Any = paths[-1] if step % 2 else paths[-1].name
        paths.append(cluster.snapshot(tmp_path, f"s{step}", step=step, parent=parent).result(60))
    assert [num_rows(path) for path in paths] == [600, 40, 40, 40]
    assert [snapshot.name for snapshot in latest(tmp_path).chain()] == ["s3", "s2", "s1", "s0"]
    live = contents(cluster, tmp_path)
    for num_shards in (1, 3):
        assert restored(tmp_path, paths[-1], num_shards) == live
    cluster.restore(paths[-1], replace=True)
    assert contents(cluster, tmp_path / "again") == live
    cluster.restore(paths[-1], replace=True)
    write(cluster, 4)
    following = cluster.snapshot(tmp_path, "s4", step=4, parent="s3").result(60)
    assert num_rows(following) == 40, "a table knows what was written since it was restored"
    assert restored(tmp_path, following, 2) == contents(cluster, tmp_path)


def test_an_increment_is_not_much_larger_than_the_rows_it_holds(tmp_path: Path) -> None:
    with local(2) as cluster:
        table = cluster.create_table("t", dim=64, optimizer=SparseMomentum(lr=0.1), num_rows=5_000)
        table.push(np.arange(5_000), np.ones((5_000, 64), np.float32))
        cluster.snapshot(tmp_path, "a").result(60)
        table.push(np.arange(0, 5_000, 50), np.ones((100, 64), np.float32))
        path = cluster.snapshot(tmp_path, "b", parent="a").result(60)
    assert num_rows(path) == 100
    size = sum(entry.bytes for entry in open_snapshot(path).manifest.files if entry.kind == ROWS)
    assert size <= 1.3 * 100 * (8 + 2 * 64 * 4)


def test_an_increment_on_a_snapshot_long_past_is_whole(tmp_path: Path) -> None:
    with local(1) as cluster:
        make(cluster, "dense")
        for name in ("a", *map(str, range(MAX_MOMENTS))):
            write(cluster, 1, "dense")
            cluster.snapshot(tmp_path, name).result(60)
        write(cluster, 2, "dense")
        whole = cluster.snapshot(tmp_path, "b", parent="a").result(60)
        assert open_snapshot(whole).manifest.parent is None, "it rests on nothing, and says so"
        assert restored(tmp_path, whole, 2) == contents(cluster, tmp_path)
        following = cluster.snapshot(tmp_path, "c", parent="5").result(60)
        assert open_snapshot(following).manifest.parent is not None
        with pytest.raises(errors.SnapshotNotFound, match="nowhere"):
            cluster.snapshot(tmp_path, "e", parent="nowhere")
        with pytest.raises(errors.InvalidArgument, match=r"parent is .*elsewhere.*must be a snapshot in"):
            cluster.snapshot(tmp_path, "e", parent=tmp_path / "elsewhere" / "a")


def test_a_shard_that_was_not_told_of_the_parent_writes_all_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with local(2) as cluster:
        for name in ("dense", "hashed"):
            make(cluster, name)
        write(cluster, 0, count=300)
        with monkeypatch.context() as patched:
            whole = Freezes.thaw

            def end(freezes: Freezes, snapshot_id: str, *, kept: bool) -> None:
                if freezes._shard == 0:
                    whole(freezes, snapshot_id, kept=kept)

            patched.setattr(Freezes, "thaw", end)
            cluster.snapshot(tmp_path, "a").result(60)
        write(cluster, 1)
        path = cluster.snapshot(tmp_path, "b", parent="a").result(60)
        assert open_snapshot(path).manifest.deltas == {"dense": [0], "hashed": [0]}
        live = contents(cluster, tmp_path)
        for num_shards in (1, 3):
            assert restored(tmp_path, path, num_shards) == live
        assert restored(tmp_path, compact(tmp_path, "b"), 3) == live


def test_nothing_is_added_to_a_chain_that_is_broken(tmp_path: Path) -> None:
    with local(2) as cluster:
        make(cluster, "dense")
        for name, parent in (("a", None), ("b", "a")):
            write(cluster, 1, "dense")
            cluster.snapshot(tmp_path, name, parent=parent).result(60)
        shutil.rmtree(tmp_path / "a")
        write(cluster, 2, "dense")
        with pytest.raises(errors.SnapshotDamaged, match="adds to snapshot 'a'"):
            cluster.snapshot(tmp_path, "c", parent="b").result(60)
        live = contents(cluster, tmp_path)
        assert restored(tmp_path, cluster.snapshot(tmp_path, "c").result(60), 1) == live
        assert sorted(path.name for path in tmp_path.glob("[!.]*")) == ["asides", "b", "c"]


def test_nothing_is_added_to_a_parent_that_was_pruned_meanwhile(tmp_path: Path) -> None:
    with local(2) as cluster:
        make(cluster, "dense")
        write(cluster, 1, "dense")
        cluster.snapshot(tmp_path, "a").result(60)
        write(cluster, 2, "dense")
        with armed(f"block.write.before=pause({tmp_path / 'go'})"):
            pending = cluster.snapshot(tmp_path, "b", parent="a")
            live = contents_in_place(cluster)
            (tmp_path / "a").rename(tmp_path / ".gone")  # at once: it may be looked at now
            (tmp_path / "go").touch()
            with pytest.raises(errors.SnapshotNotFound, match="a is not the folder of a snapshot"):
                pending.result(60)
        assert not list_snapshots(tmp_path)
        cluster.restore(cluster.snapshot(tmp_path, "c").result(60), replace=True)
        assert contents_in_place(cluster) == live


def contents_in_place(cluster: Cluster) -> list[list[float]]:
    rows: list[list[float]] = cluster.table("dense").pull(np.arange(100)).tolist()
    return rows


@over_few_carriers
def test_what_was_compacted_carries_the_chain_on(cluster: Cluster, tmp_path: Path) -> None:
    for name in ("dense", "hashed"):
        make(cluster, name)
    write(cluster, 0, count=300)
    cluster.snapshot(tmp_path, "a", values={"cursor": 0}).result(60)
    for step, parent in ((1, "a"), (2, "b1")):
        write(cluster, step)
        cluster.snapshot(
            tmp_path, f"b{step}", step=step, parent=parent, values={"cursor": step}, files={"x": b"12"}
        ).result(60)
    path = compact(tmp_path, "b2")
    whole = open_snapshot(path)
    assert (whole.name, whole.manifest.parent, whole.manifest.step) == ("b2-whole", None, 2)
    assert whole.manifest.job == {"cursor": 2}
    write(cluster, 3)
    following = cluster.snapshot(tmp_path, "c", step=3, parent="b2-whole").result(60)
    assert num_rows(following) == 40
    assert prune(tmp_path, 1) == ["b2", "b1", "a"]
    assert restored(tmp_path, following, 3) == contents(cluster, tmp_path)
    with pytest.raises(errors.InvalidArgument, match=r"'b2-whole' .* is whole already"):
        compact(tmp_path, "b2-whole")


OPERATION = st.one_of(
    st.tuples(st.sampled_from(["write", "remove"]), st.sampled_from(["dense", "hashed"]), st.integers(0, 99)),
    st.tuples(st.sampled_from(["whole", "increment", "increment", "failed"]), st.just(""), st.integers(0, 3)),
    st.tuples(st.just("compact"), st.just(""), st.just(0)),
    st.tuples(st.just("recreate"), st.sampled_from(["dense", "hashed"]), st.just(0)),
    st.tuples(st.just("move"), st.just(""), st.integers(1, 4)),
)


@settings(deadline=None, max_examples=25)
@given(st.lists(OPERATION, max_size=12), st.integers(1, 4))
def test_what_a_chain_restores_is_the_live_table(operations: list[tuple[str, str, int]], num_shards: int) -> None:
    root = Path(tempfile.mkdtemp())
    cluster = local(2)
    try:
        for name in ("dense", "hashed"):
            make(cluster, name)
            write(cluster, 0, name, count=100)
        chains = root / "chains"
        chains.mkdir()

        def take(parent: int | None, name: str | None = None) -> Path:
            names = [listed.name for listed in list_snapshots(chains)]
            older = None if parent is None or not names else names[min(parent, len(names) - 1)]
            return cluster.snapshot(chains, name or f"s{len(names)}", step=len(names), parent=older).result(60)

        for operation, table, number in [*operations, ("write", "dense", 7), ("move", "", num_shards)]:
            match operation:
                case "write":
                    write(cluster, number, table)
                case "remove":
                    cluster.table(table).remove(np.random.default_rng(number).choice(NUM_ROWS, 60, replace=False))
                case "whole":
                    take(None)
                case "increment":
                    take(number)
                case "failed":
                    with pytest.MonkeyPatch.context() as patch:
                        patch.setattr(disk, "write", _full)
                        with pytest.raises(errors.SnapshotFailed):
                            take(number)
                    write(cluster, number + 200)
                case "compact":
                    newest = next(iter(list_snapshots(chains)), None)
                    if newest and newest.snapshot and newest.snapshot.manifest.parent:
                        compact(chains, newest.name, new_name=f"s{len(list_snapshots(chains))}")
                case "recreate":
                    cluster.drop_table(table)
                    make(cluster, table)
                    write(cluster, 300, table)
                case "move":  # the job goes on from here on another number of shards
                    path = take(0)
                    other = local(number)
                    other.restore(path)
                    aside = Path(tempfile.mkdtemp(dir=root))
                    live, there = contents(cluster, aside), contents(other, aside)
                    cluster.close()
                    other.close()
                    assert there == live
                    cluster = local(number)
                    cluster.restore(path)
    finally:
        cluster.close()
        shutil.rmtree(root)


def _full(*_: Any) -> None:
    raise OSError(28, "No space left on device")
