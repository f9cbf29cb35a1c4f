"""Requests that arrive when what they were about is long over change nothing."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from geartrain.ams.observe.failpoints import armed
from geartrain.ams.server.shard import Shard
from geartrain.ams.storage.snapshot.folder import Snapshot, Staging, new_staging, open_snapshot
from geartrain.ams.storage.snapshot.manifest import FileEntry, Parent
from geartrain.ams.values.errors import (
    InvalidArgument,
    SnapshotFailed,
    SpecMismatch,
    StaleClient,
    TableExists,
    TableNotFound,
)
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.placement import even_placement
from geartrain.ams.values.shard_messages import (
    CallContext,
    CreateTable,
    DropTable,
    Fence,
    Freeze,
    Pull,
    Push,
    Request,
    Restore,
    Thaw,
    WriteFrozen,
    Written,
)
from geartrain.ams.values.specs import Constant, TableSpec

SPEC = TableSpec(name="t", dim=2, optimizer=SGD(1.0), num_rows=8, initializer=Constant(0))
IDS = np.arange(8)


@pytest.fixture
def shard() -> Iterator[Shard]:
    shard = Shard(0, np.arange(4096), incarnation=1)
    ask(shard, CreateTable(spec=SPEC))
    yield shard
    shard.close()


def ask(shard: Shard, request: Request, sequence: int = 0) -> Any:
    context = CallContext(stream="s", sequence=sequence) if sequence else CallContext()
    return shard.submit(context, request).result(timeout=10)


def push(shard: Shard, sequence: int) -> None:
    ask(shard, Push(table="t", ids=IDS, gradients=-np.ones((8, 2), np.float32)), sequence)


def rows(shard: Shard) -> Any:
    out = np.empty((8, 2), np.float32)
    ask(shard, Pull(table="t", ids=IDS, out=out))
    return out


def test_a_late_freeze_of_an_ended_snapshot_neither_holds_nor_ends_anything(shard: Shard) -> None:
    ask(shard, Freeze(snapshot_id="first"))
    ask(shard, Thaw(snapshot_id="first", kept=True))
    ask(shard, Freeze(snapshot_id="second"))
    with pytest.raises(SnapshotFailed, match="snapshot first was given up, completed or superseded"):
        ask(shard, Freeze(snapshot_id="first"))
    assert ask(shard, Freeze(snapshot_id="second")).duplicate


def test_a_superseded_snapshot_cannot_come_to_hold_a_later_moment(shard: Shard) -> None:
    ask(shard, Freeze(snapshot_id="first"))
    ask(shard, Freeze(snapshot_id="second"))
    push(shard, 1)
    with pytest.raises(SnapshotFailed, match="superseded"):
        ask(shard, Freeze(snapshot_id="first"))


def test_a_freeze_that_arrives_behind_its_end_holds_nothing(shard: Shard) -> None:
    ask(shard, Thaw(snapshot_id="given-up", kept=False))
    with pytest.raises(SnapshotFailed, match="given up"):
        ask(shard, Freeze(snapshot_id="given-up"))


def test_a_dropped_table_is_held_by_no_snapshot(shard: Shard, tmp_path: Path) -> None:
    ask(shard, Freeze(snapshot_id="first"))
    ask(shard, DropTable(table="t"))
    ask(shard, CreateTable(spec=SPEC))
    for late in (Freeze(snapshot_id="first"), WriteFrozen(snapshot_id="first", folder=str(tmp_path))):
        with pytest.raises(SnapshotFailed, match="superseded"):
            ask(shard, late)
    ask(shard, Freeze(snapshot_id="second"))


def test_a_restore_that_arrives_twice_does_not_undo_what_was_pushed_meanwhile(shard: Shard, tmp_path: Path) -> None:
    push(shard, 1)
    staging = new_staging(tmp_path, "a")
    ask(shard, Freeze(snapshot_id=staging.id))
    written = ask(shard, WriteFrozen(snapshot_id=staging.id, folder=staging.path))
    assert isinstance(written, Written)
    path = staging.commit(
        step=0,
        created=0.0,
        num_shards=1,
        bucket_shards=even_placement(1),
        tables=[SPEC.to_dict()],
        files=[FileEntry.model_validate_json(text) for text in written.files],
    )
    ask(shard, DropTable(table="t"))
    ask(shard, CreateTable(spec=SPEC))
    restore = Restore(folder=str(path), tables=("t",))
    assert ask(shard, restore).created == 8
    assert ask(shard, restore).created == 8  # its reply was lost; nobody has written yet
    push(shard, 2)
    with pytest.raises(TableExists, match="'t' has been written to since it was made"):
        ask(shard, restore)
    assert (rows(shard) == 2).all()


def committed(shard: Shard, root: Path, name: str, *, parent: Snapshot | None = None) -> Snapshot:
    staging = new_staging(root, name)
    ask(shard, Freeze(snapshot_id=staging.id, parent_id="" if parent is None else parent.manifest.moment_id))
    return finished(shard, staging, parent)


def finished(shard: Shard, staging: Staging, parent: Snapshot | None = None) -> Snapshot:
    written = ask(shard, WriteFrozen(snapshot_id=staging.id, folder=staging.path))
    assert isinstance(written, Written)
    path = staging.commit(
        step=0,
        created=0.0,
        num_shards=1,
        bucket_shards=even_placement(1),
        tables=[SPEC.to_dict()],
        files=[FileEntry.model_validate_json(text) for text in written.files],
        parent=None if parent is None else Parent(name=parent.name, id=parent.manifest.id),
        deltas={table: [0] for table in written.deltas},
    )
    ask(shard, Thaw(snapshot_id=staging.id, kept=True))
    return open_snapshot(path)


def make_anew(shard: Shard) -> None:
    ask(shard, DropTable(table="t"))
    ask(shard, CreateTable(spec=SPEC))


def test_a_late_restore_of_another_snapshot_does_not_mix_two_moments(shard: Shard, tmp_path: Path) -> None:
    one = committed(shard, tmp_path, "one")
    push(shard, 1)
    two = committed(shard, tmp_path, "two")
    make_anew(shard)
    ask(shard, Restore(folder=str(one.path), tables=("t",)))
    with pytest.raises(TableExists, match=r"restored from .*one"):
        ask(shard, Restore(folder=str(two.path), tables=("t",)))
    assert (rows(shard) == 0).all()


def test_a_restore_whose_table_was_dropped_meanwhile_leaves_no_marks(shard: Shard, tmp_path: Path) -> None:
    push(shard, 1)
    snapshot = committed(shard, tmp_path, "one")
    make_anew(shard)
    hold = tmp_path / "go"
    with armed(f"restore.block.after=pause({hold})"):
        late = shard.submit(CallContext(), Restore(folder=str(snapshot.path), tables=("t",)))
        make_anew(shard)
        hold.touch()
        with pytest.raises(TableNotFound, match="dropped while it was restored"):
            late.result(timeout=10)
    assert (rows(shard) == 0).all()


def test_a_snapshot_of_a_table_before_it_was_restored_is_no_parent(shard: Shard, tmp_path: Path) -> None:
    push(shard, 1)
    source = committed(shard, tmp_path, "source")
    make_anew(shard)
    empty = committed(shard, tmp_path, "empty")  # somebody's, between the making of the table and its rows
    ask(shard, Restore(folder=str(source.path), tables=("t",)))
    child = committed(shard, tmp_path, "child", parent=empty)
    make_anew(shard)
    assert ask(shard, Restore(folder=str(child.path), tables=("t",))).created == 8
    assert (rows(shard) == 1).all()


def test_a_moment_before_the_restore_of_a_table_ends_with_it(shard: Shard, tmp_path: Path) -> None:
    push(shard, 1)
    source = committed(shard, tmp_path, "source")
    make_anew(shard)
    staging = new_staging(tmp_path, "empty")
    ask(shard, Freeze(snapshot_id=staging.id))
    ask(shard, Restore(folder=str(source.path), tables=("t",)))
    with pytest.raises(SnapshotFailed, match="holds no freeze"):
        finished(shard, staging)


def test_half_a_restored_table_is_no_moment(shard: Shard, tmp_path: Path) -> None:
    push(shard, 1)
    source = committed(shard, tmp_path, "source")
    make_anew(shard)
    hold = tmp_path / "go"
    with armed(f"restore.block.before=pause({hold})") as passes:
        restoring = shard.submit(CallContext(), Restore(folder=str(source.path), tables=("t",)))
        while not passes.fired["restore.block.before"]:
            assert not restoring.done()
        with pytest.raises(SnapshotFailed, match="'t' is being restored"):
            ask(shard, Freeze(snapshot_id="half"))
        hold.touch()
        restoring.result(timeout=10)
    ask(shard, Freeze(snapshot_id="whole"))


def test_a_restore_that_is_refused_leaves_no_table_half_restored(shard: Shard, tmp_path: Path) -> None:
    other = TableSpec(name="other", dim=2, optimizer=SGD(1.0), num_rows=8, initializer=Constant(0))
    ask(shard, CreateTable(spec=other))
    push(shard, 1)
    source = committed(shard, tmp_path, "source")
    with pytest.raises(SpecMismatch, match="'other'"):  # it is not in the snapshot
        ask(shard, Restore(folder=str(source.path), tables=("other",)))
    ask(shard, Freeze(snapshot_id="next"))


@pytest.mark.parametrize(("tables", "incarnations"), [(("t",), (0, 0)), (("t", "t"), (0,)), ((), (7,))])
def test_a_restore_of_other_tables_than_it_numbers_is_refused(
    shard: Shard, tables: tuple[str, ...], incarnations: tuple[int, ...]
) -> None:
    with pytest.raises(InvalidArgument, match=f"{len(tables)} tables to restore have {len(incarnations)} incarnations"):
        ask(shard, Restore(folder="/none", tables=tables, incarnations=incarnations))


def test_what_a_superseded_process_left_to_do_is_refused(shard: Shard, tmp_path: Path) -> None:
    old = CallContext(stream="job/rank0", incarnation=1)
    snapshot = committed(shard, tmp_path, "one")
    staging = new_staging(tmp_path, "two")
    ask(shard, Freeze(snapshot_id=staging.id))
    ask(shard, Fence(job="job", incarnation=2))
    for request in (
        Restore(folder=str(snapshot.path), tables=("t",)),
        WriteFrozen(snapshot_id=staging.id, folder=staging.path),
    ):
        with pytest.raises(StaleClient, match="superseded by incarnation 2"):
            shard.submit(old, request).result(timeout=10)


def test_a_freeze_of_a_dropped_table_keeps_none_of_its_memory(shard: Shard) -> None:
    held = []
    for number in range(3):  # each time the process that took it died, and its job went back
        ask(shard, Freeze(snapshot_id=f"lost-{number}"))
        held.append(weakref.ref(shard._tables.find("t").rows))
        make_anew(shard)
    gc.collect()
    assert [ref() is not None for ref in held] == [False] * 3


def test_a_number_of_a_dropped_table_is_refused_and_not_taken_for_applied(shard: Shard) -> None:
    push(shard, 1)
    make_anew(shard)
    with pytest.raises(StaleClient, match=r"sequence 1 .* a table that was dropped since; number writes"):
        push(shard, 1)
    assert (rows(shard) == 0).all()
    push(shard, 2)
    assert (rows(shard) == 1).all()
