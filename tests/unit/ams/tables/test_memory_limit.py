"""What would take the rows of a process beyond its memory limit is refused, and has changed nothing."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest

from geartrain.ams.client.factory import local
from geartrain.ams.kernels import _core, memory
from geartrain.ams.tables.row_table import RowTable
from geartrain.ams.values.errors import InvalidArgument, OutOfMemory
from geartrain.ams.values.optimizers.registry import Momentum, SparseMomentum
from geartrain.ams.values.specs import TableSpec

MIB = 1 << 20
DIM = 1024
MOMENTUM = Momentum(0.1)
ELAPSED = SparseMomentum(0.1, momentum=0.5, untouched="elapsed")

REFUSAL = r"need \d+ more bytes; .* \d+ of at most \d+ bytes .*server.memory_bytes"


def make_table(num_rows: int | None = None, optimizer: Momentum | SparseMomentum = MOMENTUM) -> RowTable:
    return RowTable(TableSpec(name="t", dim=DIM, optimizer=optimizer, num_rows=num_rows), np.arange(4096))


def rows_of(ids: np.ndarray) -> np.ndarray:
    return np.ones((len(ids), DIM), np.float32)


@contextmanager
def room_for(num_bytes: int) -> Iterator[None]:
    """So much memory beside what the tables of this process take now."""
    before = memory.memory_limit()
    memory.set_memory_limit(memory.memory_used() + num_bytes)
    try:
        yield
    finally:
        memory.set_memory_limit(before)


def state_of(table: RowTable) -> tuple[int, bytes, bytes]:
    table.freeze()
    stored = table.read_frozen(10_000)
    table.thaw(kept=False)
    assert stored.slots is not None
    return table.num_present, stored.rows.tobytes(), stored.slots.tobytes()


@pytest.mark.parametrize("num_rows", [None, 2**40])
@pytest.mark.parametrize("optimizer", [MOMENTUM, ELAPSED])
@pytest.mark.parametrize("write", [RowTable.push, RowTable.assign])
def test_a_write_beyond_the_limit_changes_nothing(
    write: Callable[..., int], optimizer: Momentum | SparseMomentum, num_rows: int | None
) -> None:
    table, old = make_table(num_rows, optimizer), np.arange(0, 2**38, 2**36)
    write(table, old, rows_of(old))
    state, new = state_of(table), np.arange(5, 2**39, 2**29)
    with room_for(3 * MIB):
        used = memory.memory_used()
        for _ in range(3):
            with pytest.raises(OutOfMemory, match=REFUSAL):
                write(table, np.concatenate([old, new]), rows_of(np.concatenate([old, new])))
            assert state_of(table) == state and memory.memory_used() == used
        assert write(table, old, rows_of(old)) == 0, "a write that needs no memory is taken"
    assert write(table, new, rows_of(new)) == len(new)


def test_what_a_freeze_keeps_counts_and_a_push_that_it_leaves_no_room_for_changes_nothing() -> None:
    table, ids = make_table(), np.arange(2000)
    table.push(ids, rows_of(ids))
    used = memory.memory_used()
    state = state_of(table)
    table.freeze()
    new = np.arange(2000, 2010)
    with room_for(4 * MIB), pytest.raises(OutOfMemory):
        table.push(np.concatenate([new, ids]), rows_of(np.arange(2010)))
    assert table.num_present == 2000
    table.thaw(kept=True)
    assert state_of(table) == state
    table.freeze()
    table.push(ids, rows_of(ids))
    assert memory.memory_used() >= used + 2000 * DIM * 8
    table.thaw(kept=True)


def test_a_table_that_is_gone_takes_no_memory() -> None:
    before = memory.memory_used()
    table, ids = make_table(), np.arange(5000)
    table.push(ids, rows_of(ids))
    rows_and_slots = 5000 * DIM * 8
    assert rows_and_slots <= memory.memory_used() - before <= rows_and_slots + 8 * MIB
    del table
    assert memory.memory_used() == before


def test_the_limit_counts_what_the_system_does() -> None:
    """Filled tables: resident memory grows by what was counted."""
    process, before = psutil.Process(), memory.memory_used()
    resident = process.memory_info().rss
    table = make_table()
    for begin in range(0, 20_000, 1000):
        ids = np.arange(begin, begin + 1000)
        table.push(ids, rows_of(ids))
    counted, grown = memory.memory_used() - before, process.memory_info().rss - resident
    assert 0.8 * counted < grown < 1.2 * counted


def test_a_limit_below_zero_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="-1"):
        memory.set_memory_limit(-1)


def test_a_shard_out_of_memory_says_so_and_goes_on() -> None:
    with local(num_shards=2) as cluster:
        assert memory.memory_limit() < memory.UNLIMITED
        table = cluster.create_table("t", dim=DIM, optimizer=MOMENTUM)
        ids = np.arange(2000)
        table.push(ids, rows_of(ids))
        with room_for(2 * MIB), pytest.raises(OutOfMemory, match=REFUSAL):
            table.push(ids + 2000, rows_of(ids))
        table.push(ids + 2000, rows_of(ids))
        assert isinstance(OutOfMemory("x"), MemoryError)


def test_a_table_that_was_refused_a_push_gives_its_memory_back_at_once_when_it_is_dropped() -> None:
    ids = np.arange(2000)
    gc.collect()
    gc.disable()
    try:
        with local(num_shards=2) as cluster:
            before = memory.memory_used()
            table = cluster.create_table("t", dim=DIM, optimizer=MOMENTUM)
            table.push(ids, rows_of(ids))
            with room_for(2 * MIB), pytest.raises(OutOfMemory):
                table.push(ids + 2000, rows_of(ids))
            cluster.drop_table("t")
            assert memory.memory_used() == before
    finally:
        gc.enable()


def test_a_restore_in_place_that_finds_no_room_says_that_the_table_is_gone(tmp_path: Path) -> None:
    with local() as cluster:
        ids = np.arange(2000)
        cluster.create_table("t", dim=DIM, optimizer=MOMENTUM).push(ids, rows_of(ids))
        taken = cluster.snapshot(tmp_path).result()
        cluster.drop_table("t")
        cluster.create_table("t", dim=DIM, optimizer=MOMENTUM)
        with (
            room_for(2 * MIB),
            pytest.raises(OutOfMemory, match=r"was to replace \(t\) are gone; make room, and restore"),
        ):
            cluster.restore(taken, replace=True)
        cluster.restore(taken)
        assert cluster.table("t").pull(ids).shape == (2000, DIM)


def test_more_rows_than_a_hashed_table_can_number_are_refused_by_name() -> None:
    with pytest.raises(OutOfMemory, match=r"at most 4294967295 rows .* has 0, .* adds 4294967296.* more shards"):
        _core.reserve_ids(2**32)
