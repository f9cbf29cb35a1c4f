"""When rows were last seen and how often, and which of them go where a table has no room for all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geartrain.ams.tables.row_table import RowTable, TableClock
from geartrain.ams.tables.stored_rows import StoredRows
from geartrain.ams.values.errors import InvalidArgument, TableFull
from geartrain.ams.values.expiry.rules import SmallerThan, Unseen
from geartrain.ams.values.optimizers.registry import SGD, Adagrad
from geartrain.ams.values.shard_messages import BatchFacts
from geartrain.ams.values.specs import TableSpec

DIM = 2
ALL_BUCKETS = np.arange(4096)
MAX_BYTES = 20_000


def make_table(buckets: Any = ALL_BUCKETS, **spec: Any) -> RowTable:
    given_spec = {"name": "t", "dim": DIM, "optimizer": SGD(0.5), "max_bytes": MAX_BYTES, **spec}
    return RowTable(TableSpec(**given_spec), buckets)


def push(
    table: RowTable, ids: Any, *, counts: Any = None, step: int | None = None, seconds: float | None = None
) -> int:
    ids = np.asarray(ids, np.int64)
    occurrences = None if counts is None else np.asarray(counts, np.uint32)
    batch = BatchFacts(occurrences=occurrences, step=step, unix_seconds=seconds)
    return table.push(ids, np.ones((len(ids), DIM), np.float32), batch=batch)


def lives_of(table: RowTable) -> dict[int, tuple[int, int, int]]:
    found: dict[int, tuple[int, int, int]] = {}
    position = 0
    while position >= 0:
        ids, lives, position = table.read_lives(position, 7)
        assert lives is not None
        found.update(zip(ids.tolist(), (tuple(life) for life in lives.tolist()), strict=True))
    return found


def test_a_row_knows_when_it_was_seen_and_how_often() -> None:
    table = make_table()
    push(table, [1, 2], counts=[3, 1], step=5, seconds=1e9)
    push(table, [2, 3], step=7, seconds=1e9 + 5)
    push(table, [1], counts=[2**32 - 1], step=6)  # a slower worker
    push(table, [4])
    table.assign(np.array([5]), np.zeros((1, DIM), np.float32))
    late = 10**9 + 5
    assert table.clock == (7, late)
    assert lives_of(table) == {
        1: (7, late, 2**32 - 1),
        2: (7, late, 2),
        3: (7, late, 1),
        4: (7, late, 1),
        5: (7, late, 0),
    }
    table.remove(np.array([1]))
    push(table, [1], step=1)
    assert lives_of(table)[1] == (7, late, 1), "what was known of a row goes with it"
    push(table, [2], step=9, seconds=1e9)
    assert lives_of(table)[2] == (9, late, 3)


def test_a_table_knows_how_far_one_push_moved_its_clock() -> None:
    table = make_table()
    push(table, [1], step=1_000, seconds=5e8)
    assert table.pop_clock_jump() == (0, 0), "nothing is older by that"
    table = make_table()
    table.assign(np.array([2]), np.zeros((1, DIM), np.float32))
    for step, seconds in ((5, 1e9), (7, 1e9 + 50), (6, 1e9 + 20), (8, 1e9 + 60)):
        push(table, [1], step=step, seconds=seconds)
    assert table.pop_clock_jump() == (5, 10**9)
    assert table.pop_clock_jump() == (0, 0)
    table.advance_clock(TableClock(100, 10**9 + 60))  # of a snapshot: no push moved it
    push(table, [1], step=103)
    assert table.pop_clock_jump() == (3, 0)


def test_a_table_that_does_not_ask_keeps_nothing_of_it() -> None:
    plain, asks = make_table(max_bytes=None), make_table(max_bytes=None, expiry=SmallerThan(0.1))
    for table in (plain, asks):
        push(table, np.arange(1000), step=3)
        assert table.read_lives(0, 10)[1] is None
        assert table.clock.step == 3
    assert plain.memory_bytes == asks.memory_bytes
    unseen = make_table(max_bytes=None, expiry=Unseen(steps=3))
    push(unseen, np.arange(1000))
    assert unseen.memory_bytes == plain.memory_bytes + 16 * 1000


class Model:
    """What a table of ``most`` rows keeps, as a dictionary of (count, step, seconds) by id."""

    def __init__(self) -> None:
        self.rows: dict[int, tuple[int, int, int]] = {}

    def leavers(self, kept: set[int], number: int) -> set[int]:
        order = sorted((life, i) for i, life in self.rows.items() if i not in kept)
        return {i for _, i in order[:number]}


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32), st.sampled_from([50, 200, 1000]))
def test_those_go_that_were_seen_least_and_longest_ago(seed: int, spread: int) -> None:
    random = np.random.default_rng(seed)
    table, model = make_table(), Model()
    for step in range(40):
        ids = np.unique(random.geometric(1 / spread, 30)) + (step * 10 if step % 3 else 0)
        counts = random.integers(1, 4, len(ids))
        before = set(model.rows)
        push(table, ids, counts=counts, step=step // 2, seconds=step)
        now = lives_of(table)
        gone = before - set(now)
        assert gone == model.leavers(set(ids.tolist()), len(gone)), "others should have gone"
        assert set(ids.tolist()) <= set(now), "a row of the push itself was evicted"
        for i in gone:
            del model.rows[i]
        for i, count in zip(ids.tolist(), counts.tolist(), strict=True):
            count_before = model.rows.get(i, (0, 0, 0))[0]
            model.rows[i] = count_before + count, step // 2, step
        assert now == {i: (at_step, seconds, count) for i, (count, at_step, seconds) in model.rows.items()}
        assert table.memory_bytes <= MAX_BYTES


@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_table_never_takes_more_than_its_share(num_shards: int) -> None:
    share = np.arange(0, 4096, num_shards)
    everything = np.arange(2**18)
    from geartrain.ams.values.placement import bucket_of

    mine = everything[np.isin(bucket_of(everything, dense=False), share)]
    table = make_table(share, dim=16, optimizer=Adagrad(0.1), max_bytes=6 << 20)
    random = np.random.default_rng(1)
    most = table._store.max_rows
    for step in range(150):
        ids = np.unique(random.choice(mine, 800))
        table.push(ids, np.ones((len(ids), 16), np.float32), batch=BatchFacts(step=step))
        assert table.memory_bytes <= (6 << 20) * len(share) // 4096
    assert table.num_evicted > most
    assert table.num_present > 0.9 * most
    assert most * (16 * 8 + 16) > 0.55 * (6 << 20) * len(share) / 4096, "most of the room is for rows"


def test_a_push_that_has_no_room_is_refused_and_nothing_goes() -> None:
    table = make_table()
    most = table._store.max_rows
    push(table, np.arange(most))
    before = lives_of(table)
    with pytest.raises(
        TableFull, match=rf"has {most} new rows and 1 existing ones; .*, 20000 bytes, has room for {most} rows"
    ):
        push(table, [0, *range(most, 2 * most)])
    with pytest.raises(TableFull):
        table.assign(np.arange(most, 2 * most + 1), np.zeros((most + 1, DIM), np.float32))
    assert lives_of(table) == before
    assert push(table, np.arange(most, 2 * most)) == most
    assert table.num_evicted == most
    with pytest.raises(InvalidArgument, match="max_bytes of table 't' is 100"):
        make_table(max_bytes=100)
    with pytest.raises(InvalidArgument, match="dense ids have their places"):
        make_table(num_rows=10)


def test_rows_that_a_freeze_holds_are_read_though_they_were_evicted() -> None:
    table = make_table()
    most = table._store.max_rows
    push(table, np.arange(most), step=4)
    before = lives_of(table)
    table.freeze()
    push(table, np.arange(most, most + 50), step=5)
    push(table, [0], step=9)
    parts = []
    while len((part := table.read_frozen(11)).ids):
        parts.append({name: array.copy() for name, array in part.arrays().items()})
    table.thaw(kept=True)
    found = {
        int(i): (int(item), int(two), int(three))
        for part in parts
        for i, item, two, three in zip(
            part["ids"], part["seen_steps"], part["seen_seconds"], part["counts"], strict=True
        )
    }
    assert found == before
    assert len(lives_of(table)) <= most


@pytest.mark.parametrize("block", [17, 10_000])
def test_a_restored_table_keeps_those_that_were_seen_most(block: int) -> None:
    table, smaller = make_table(), make_table(max_bytes=MAX_BYTES // 2)
    random = np.random.default_rng(2)
    push(table, np.arange(table._store.max_rows), counts=random.integers(1, 99, table._store.max_rows), step=3)
    table.freeze()
    while len((part := table.read_frozen(block)).ids):
        smaller.restore(*StoredRows.of(part.arrays()))
    table.thaw(kept=True)
    lives = lives_of(table)
    order = sorted(lives, key=lambda i: (lives[i][2], lives[i][0], lives[i][1], i))
    assert lives_of(smaller) == {i: lives[i] for i in order[-smaller._store.max_rows :]}
    assert smaller.memory_bytes <= MAX_BYTES // 2


def test_rows_that_come_and_go_during_a_freeze_take_each_others_memory() -> None:
    table = make_table()
    most = table._store.max_rows
    push(table, np.arange(most), step=1)
    table.freeze()
    for step in range(2, 12):
        push(table, np.arange(most) + step * most, step=step)
    kept = np.concatenate([table.read_frozen(most).ids, table.read_frozen(most).ids])
    assert sorted(kept.tolist()) == list(range(most))
    assert table.memory_bytes <= 3 * MAX_BYTES  # with the rows that were kept aside, and their index
    table.thaw(kept=True)
    aside = most * (table.spec.row_bytes + table.spec.slot_bytes + table.spec.step_bytes + table.spec.life_bytes)
    assert table.memory_bytes <= MAX_BYTES + aside + 100_000  # memory for the next freeze
