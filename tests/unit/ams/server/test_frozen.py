"""A freeze that was ended gives nothing: neither an empty snapshot nor rows of the next one."""

from __future__ import annotations

import threading
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from geartrain.ams.kernels._core import CompletedWrites, SyncGroups
from geartrain.ams.server.freeze import freezes
from geartrain.ams.server.freeze.dedup import held_dedup
from geartrain.ams.server.freeze.freezes import FrozenTables
from geartrain.ams.storage.snapshot import blocks
from geartrain.ams.storage.snapshot.folder import Staging, new_staging
from geartrain.ams.storage.snapshot.manifest import FileEntry
from geartrain.ams.tables.row_table import RowTable
from geartrain.ams.values.errors import SnapshotFailed
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.specs import TableSpec


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> RowTable:
    table = RowTable(TableSpec(name="t", dim=4, optimizer=SGD(1.0), num_rows=1000), np.arange(4096))
    table.assign(np.arange(1000), np.ones((1000, 4), np.float32))
    monkeypatch.setattr(freezes, "_READ_BYTES", 24 * 100)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 24 * 100)  # ten blocks
    return table


def frozen_for(staging: Staging, table: RowTable) -> FrozenTables:
    return FrozenTables(staging.id, {"t": table}, dedup=held_dedup(CompletedWrites(), SyncGroups(1.0), ()))


def test_what_was_ended_before_it_was_written_is_no_empty_snapshot(table: RowTable, tmp_path: Path) -> None:
    staging = new_staging(tmp_path, "a")
    ended = frozen_for(staging, table)
    ended.thaw(kept=False)
    with pytest.raises(SnapshotFailed, match="given up, or another one of the same tables was begun"):
        ended.write(staging.path, 0)


def test_a_writer_that_was_superseded_takes_no_rows_of_the_next(
    table: RowTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = new_staging(tmp_path, "a"), new_staging(tmp_path, "b")
    old = frozen_for(first, table)
    following: list[FrozenTables] = []
    whole = freezes.write_block

    def superseding(*args: Any, **keywords: Any) -> FileEntry:
        if not following:
            old.thaw(kept=False)
            following.append(frozen_for(second, table))
        return whole(*args, **keywords)

    monkeypatch.setattr(freezes, "write_block", superseding)
    with pytest.raises(SnapshotFailed, match="another one of the same tables"):
        old.write(first.path, 0)
    old.thaw(kept=False)  # late, and of no effect on the next
    assert sum(entry.num_rows for entry in following[0].write(second.path, 0)) == 1000


def test_a_block_is_read_while_two_are_written_and_changes_neither(
    table: RowTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staging, whole, fill = new_staging(tmp_path, "a"), freezes.write_block, FrozenTables._fill
    read, turn = 0, threading.Condition()

    def counting(*args: Any) -> int:
        nonlocal read
        num_rows = fill(*args)
        with turn:
            read += num_rows > 0
            turn.notify_all()
        return num_rows

    def late(*args: Any, index: int, arrays: dict[str, np.ndarray], **keywords: Any) -> FileEntry:
        before = {name: array.copy() for name, array in arrays.items()}
        with turn:
            assert turn.wait_for(lambda: read >= min(index + 3, 10), timeout=30)
        assert all(np.array_equal(arrays[name], array) for name, array in before.items())
        return whole(*args, index=index, arrays=arrays, **keywords)

    monkeypatch.setattr(FrozenTables, "_fill", counting)
    monkeypatch.setattr(freezes, "write_block", late)
    entries = frozen_for(staging, table).write(staging.path, 0)
    assert sum(entry.num_rows for entry in entries) == 1000


def test_writing_holds_three_blocks_in_memory(table: RowTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # blocks of their usual size
    table = RowTable(TableSpec(name="t", dim=1024, optimizer=SGD(1.0), num_rows=12_000), np.arange(4096))
    table.assign(np.arange(12_000), np.ones((12_000, 1024), np.float32))
    staging = new_staging(tmp_path, "a")
    frozen = frozen_for(staging, table)
    tracemalloc.start()
    try:
        frozen.write(staging.path, 0)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 3.5 * blocks.BLOCK_BYTES


def test_a_moment_that_the_rows_have_forgotten_costs_a_whole_snapshot(table: RowTable) -> None:
    kept = FrozenTables("a", {"t": table}, dedup=held_dedup(CompletedWrites(), SyncGroups(1.0), ()))
    kept.thaw(kept=True)
    table.assign(np.arange(3), np.zeros((3, 4), np.float32))
    number = table.moments.number_of("a")
    assert number is not None
    table._store.forget_moment(number)  # as where no memory was left to join two of them
    after = FrozenTables("b", {"t": table}, dedup=held_dedup(CompletedWrites(), SyncGroups(1.0), ()), parent_id="a")
    assert after.deltas == ()
    assert sum(len(arrays["ids"]) for arrays, _ in after._blocks(table, rows_alone=False)) == 1000
