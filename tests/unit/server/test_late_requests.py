"""Requests that arrive when what they were about is long over change nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from geartrain.ams.errors import SnapshotFailed, TableExists
from geartrain.ams.messages import (
    CallContext,
    CreateTable,
    DropTable,
    Freeze,
    Pull,
    Push,
    Request,
    Restore,
    Thaw,
    WriteFrozen,
    Written,
)
from geartrain.ams.server.shard import Shard
from geartrain.ams.specs import SGD, Constant, TableSpec
from geartrain.ams.storage.snapshot_folder import new_staging
from geartrain.ams.storage.snapshot_manifest import FileEntry

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
