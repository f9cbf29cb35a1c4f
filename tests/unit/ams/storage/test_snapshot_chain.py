"""A snapshot that adds to others is as sound as all of them, and none that is needed is removed."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from geartrain.ams.storage.snapshot.blocks import write_block
from geartrain.ams.storage.snapshot.chain import layers_of
from geartrain.ams.storage.snapshot.compaction import compact
from geartrain.ams.storage.snapshot.folder import latest, list_snapshots, new_staging, open_snapshot, prune
from geartrain.ams.storage.snapshot.manifest import MANIFEST, Parent
from geartrain.ams.values.errors import InvalidArgument, SnapshotDamaged
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.placement import even_placement
from geartrain.ams.values.specs import TableSpec

TABLE = TableSpec(name="t", dim=2, optimizer=SGD(0.1), num_rows=100).to_dict()


def take(
    root: Path,
    name: str,
    step: int,
    *,
    parent: str | None = None,
    num_shards: int = 2,
    deltas: list[int] | None = None,
    ids: tuple[int, ...] = (0, 1, 2, 3),
    tables: tuple[dict[str, object], ...] = (TABLE,),
    created: float | None = None,
) -> Path:
    """Rows of value ``step`` at ``ids``; with ``parent``, all shards or those of ``deltas`` wrote only these."""
    staging, older = new_staging(root, name), None if parent is None else open_snapshot(root / parent)
    files = []
    for shard in range(num_shards):
        mine = np.array([i for i in ids if even_placement(num_shards)[i] == shard], np.int64)
        if len(mine):
            arrays = {"ids": mine, "rows": np.full((len(mine), 2), step, np.float32)}
            files.append(
                write_block(
                    staging.path, snapshot_id=staging.id, kind="rows", table="t", shard=shard, index=0, arrays=arrays
                )
            )
    return staging.commit(
        step=step,
        created=float(step) if created is None else created,
        num_shards=num_shards,
        bucket_shards=even_placement(num_shards),
        tables=tables,
        files=files,
        parent=None if older is None else Parent(name=older.name, id=older.manifest.id),
        deltas={"t": list(range(num_shards)) if deltas is None else deltas} if older and deltas != [] else {},
    )


def names(root: Path) -> list[str]:
    return [listed.name for listed in list_snapshots(root)]


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    take(tmp_path, "a", 1)
    take(tmp_path, "b", 2, parent="a", ids=(1, 2))
    take(tmp_path, "c", 3, parent="b", ids=(2,))
    return tmp_path


def test_damage_of_any_snapshot_of_a_chain_is_named(chain: Path) -> None:
    assert open_snapshot(chain / "c").verify() == []
    told: list[tuple[int, int]] = []
    open_snapshot(chain / "c").verify(lambda done, total: told.append((done, total)))
    assert (len(told), told[-1][0]) == (5, told[-1][1])
    block = next((chain / "a").glob("rows-*"))
    whole = block.read_bytes()
    block.write_bytes(whole[:-1])
    for name in "abc":
        (found,) = open_snapshot(chain / name).verify()
        assert str(block) in str(found)
    with pytest.raises(SnapshotDamaged, match=block.name):
        latest(chain)
    take(chain, "d", 0)
    assert latest(chain, allow_fallback=True).name == "d"


@pytest.mark.parametrize("how", ["missing", "another", "no manifest", "circle"])
def test_a_parent_that_is_not_the_one_is_named(chain: Path, how: str) -> None:
    taken = open_snapshot(chain / "c")
    if how == "no manifest":
        (chain / "a" / MANIFEST).unlink()
    elif how == "circle":
        assert taken.manifest.parent is not None
        object.__setattr__(taken.manifest.parent, "id", taken.manifest.id)
        object.__setattr__(taken.manifest.parent, "name", "c")
    else:
        shutil.rmtree(chain / "a")
        if how == "another":
            take(chain, "a", 1)
    with pytest.raises(SnapshotDamaged) as raised:
        taken.chain()
    assert {
        "missing": "adds to snapshot 'a'",
        "another": "the one of that name is",
        "no manifest": str(chain / "a" / MANIFEST),
        "circle": "adds to snapshot 'c'",
    }[how] in str(raised.value)
    if how != "circle":
        assert str(raised.value) in [str(damage) for damage in taken.verify()]
        shutil.rmtree(chain / "a", ignore_errors=True)
        with pytest.raises(SnapshotDamaged):
            latest(chain)


def test_pruning_keeps_what_a_kept_one_adds_to(chain: Path) -> None:
    take(chain, "x", 0)
    take(chain, "y", 2, parent="a")
    take(chain, "z", 1, parent="c")
    assert prune(chain, 1) == ["x", "y"]
    assert names(chain) == ["z", "c", "b", "a"]
    take(chain, "d", 0)
    assert prune(chain, 1) == ["z", "c", "b", "a"], "none was left without its parent on the way"


def test_pruning_keeps_what_one_with_a_damaged_manifest_may_add_to(
    chain: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = (chain / "c" / MANIFEST).read_bytes()
    (chain / "c" / MANIFEST).write_bytes(b"{}")
    take(chain, "d", 4, created=time.time() + 60)
    take(chain, "e", 5, created=time.time() + 60)
    assert prune(chain, 1) == ["d"], "what came later is not among its parents"
    assert "2 snapshots kept beyond the number wanted: snapshot 'c' may add to them" in caplog.text
    (chain / "c" / MANIFEST).write_bytes(manifest)
    assert open_snapshot(chain / "c").verify() == []
    assert prune(chain, 1) == ["c", "b", "a"]


def test_pruning_keeps_the_whole_chain_of_the_only_sound_one(chain: Path) -> None:
    next((take(chain, "d", 4)).glob("rows-*")).write_bytes(b"")
    assert prune(chain, 1) == []
    assert open_snapshot(chain / "c").verify() == []


def test_a_manifest_says_both_parent_and_deltas_or_neither(tmp_path: Path) -> None:
    take(tmp_path, "a", 1)
    assert open_snapshot(take(tmp_path, "b", 2, parent="a", deltas=[])).manifest.parent is None
    with pytest.raises(InvalidArgument, match="shards below num_shards, 2"):
        take(tmp_path, "c", 3, parent="a", deltas=[2])
    with pytest.raises(InvalidArgument, match="one needs the other"):
        new_staging(tmp_path, "d").commit(
            step=1, created=1.0, num_shards=1, bucket_shards=even_placement(1), tables=[], files=[], deltas={"t": [0]}
        )


def test_where_a_shard_wrote_all_its_rows_nothing_older_counts(tmp_path: Path) -> None:
    take(tmp_path, "a", 1, num_shards=3)
    take(tmp_path, "b", 2, parent="a", deltas=[1], ids=(0, 1))
    newest, oldest = layers_of(open_snapshot(tmp_path / "b").chain(), "t")
    assert newest.buckets.all()
    assert oldest.buckets.tolist() == [bucket % 2 == 1 for bucket in range(4096)]
    assert open_snapshot(compact(tmp_path, "b")).manifest.num_shards == 2
    found = {}
    whole = open_snapshot(tmp_path / "b-whole")
    for entry in whole.manifest.files:
        arrays = whole.read(entry)
        found.update(zip(arrays["ids"].tolist(), arrays["rows"][:, 0].tolist(), strict=True))
    assert found == {0: 2.0, 1: 2.0, 3: 1.0}
    assert names(tmp_path) == ["b-whole", "b", "a"]


def test_a_table_that_is_not_the_parents_is_damage(tmp_path: Path) -> None:
    take(tmp_path, "a", 1, tables=(TABLE | {"num_rows": 7},))
    take(tmp_path, "b", 2, parent="a")
    with pytest.raises(SnapshotDamaged, match="does not fit"):
        layers_of(open_snapshot(tmp_path / "b").chain(), "t")


def test_what_cannot_be_compacted_leaves_nothing_and_the_chain(chain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = next((chain / "a").glob("rows-*"))
    whole = block.read_bytes()
    block.write_bytes(whole[:-1])
    with pytest.raises(SnapshotDamaged, match=block.name):
        compact(chain, "c")
    assert sorted(path.name for path in chain.iterdir()) == ["a", "b", "c"]
    block.write_bytes(whole)
    monkeypatch.setattr(
        "geartrain.ams.storage.snapshot.folder.Snapshot.verify", lambda _: [SnapshotDamaged("a worn disk")]
    )
    with pytest.raises(SnapshotDamaged, match="a worn disk"):
        compact(chain, "c")
    assert sorted(path.name for path in chain.iterdir()) == ["a", "b", "c"]


def test_one_that_is_compacted_is_newer_than_what_it_was_made_from_and_no_other(chain: Path) -> None:
    take(chain, "later", 1)
    compact(chain, "c")
    assert names(chain) == ["later", "c-whole", "c", "b", "a"]


def test_a_chain_goes_once_no_kept_snapshot_needs_it(chain: Path) -> None:
    assert prune(chain, 1) == []
    compact(chain, "c")
    assert prune(chain, 1) == ["c", "b", "a"]
    assert names(chain) == ["c-whole"]
    take(chain, "d", 4, parent="c-whole")
    assert prune(chain, 1) == []
    assert names(chain) == ["d", "c-whole"]
