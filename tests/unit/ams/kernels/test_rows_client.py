"""One call to all shards: every row comes from and goes to its shard, and what is not done is said shard by shard."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geartrain.ams.kernels import _core, ops
from geartrain.ams.values.errors import Busy, NonFinite, TableNotFound
from geartrain.ams.values.shard_messages import SyncGroup
from tests.specification import ops as reference

SOON = 10.0
NUM_SHARDS = 3
DIM = 5
PLACEMENT = (np.arange(ops.NUM_BUCKETS) * 7 % NUM_SHARDS).astype(np.uint16)
CONTEXT = ("s", 1, 1, 1, 0)
many_ids = st.lists(st.integers(0, 40) | st.integers(0, 2**40), max_size=80).map(lambda ids: np.array(ids, np.int64))


class Shards:
    """Toy shards behind connections, and a client of them."""

    def __init__(self) -> None:
        self.handlers = [_core.ToyHandler() for _ in range(NUM_SHARDS)]
        self.servers = [_core.DataServer(handler) for handler in self.handlers]
        offers = [server.offer()[:2] for server in self.servers]
        self.connections = [_core.connect_ring(*offer, SOON) for offer in offers]
        self.client = _core.RowsClient(PLACEMENT, NUM_SHARDS)
        for shard, connection in enumerate(self.connections):
            self.client.set_endpoint(shard, 0, None, connection)

    def pull(self, ids: np.ndarray, name: str = "rows", seconds: float = SOON, **options: Any) -> tuple[Any, ...]:
        out, present = np.full((len(ids), DIM), -1, np.float32), np.full(len(ids), 7, np.uint8)
        facts, watch = facts_of(name), options.get("watch")
        undone = self.client.pull(facts, 0, ids, out, 0, present, options.get("required_sync"), seconds, watch)
        return out, present, undone

    def prepare(self, ids: np.ndarray, rows: np.ndarray, name: str = "rows", **settings: Any) -> _core.PreparedWrite:
        return prepared(self.client, ids, rows, name, **settings)

    def written(self) -> list[float]:
        return [handler.sum_written for handler in self.handlers]

    def close(self) -> None:
        for handler, server in zip(self.handlers, self.servers, strict=True):
            handler.release()
            handler.answer_later()
            server.close()


def facts_of(name: str, *, is_dense: bool = True) -> _core.TableFacts:
    return _core.TableFacts(name, DIM, 0, is_dense, 0)


def prepared(
    client: _core.RowsClient,
    ids: np.ndarray,
    rows: np.ndarray,
    name: str = "rows",
    is_dense: bool = True,
    **settings: Any,
) -> _core.PreparedWrite:
    defaults: dict[str, Any] = {"is_assign": False, "check": 2, "lr": None, "scale": 1.0, "scalars": {}, "group": None}
    bits, code = ops.as_bits(rows)
    rest = defaults | {"step_goes_on": False, "every_shard": False} | settings
    return _core.PreparedWrite(client, facts_of(name, is_dense=is_dense), ids, bits, code, **rest)


@pytest.fixture
def shards() -> Iterator[Shards]:
    made = Shards()
    yield made
    made.close()


@pytest.fixture(scope="module")
def common() -> Iterator[Shards]:
    made = Shards()
    yield made
    made.close()


def expected(ids: np.ndarray) -> np.ndarray:
    return (ids[:, None] * 1000 + np.arange(DIM)).astype(np.float32)


@settings(max_examples=100, deadline=None)
@given(ids=many_ids)
def test_each_row_lands_at_its_id_however_often_that_occurs(common: Shards, ids: np.ndarray) -> None:
    out, present, undone = common.pull(ids)
    assert undone is None
    np.testing.assert_array_equal(out, expected(ids))
    np.testing.assert_array_equal(present, ids % 2 == 0)


@settings(max_examples=100, deadline=None)
@given(
    ids=many_ids,
    dtype=st.sampled_from([np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]),
    is_dense=st.booleans(),
    every_shard=st.booleans(),
)
def test_a_push_is_merged_and_cut_as_the_reference_says(
    ids: np.ndarray, dtype: np.dtype[Any], is_dense: bool, every_shard: bool
) -> None:
    rows = np.random.default_rng(len(ids)).standard_normal((len(ids), DIM)).astype(dtype)
    client = _core.RowsClient(PLACEMENT, NUM_SHARDS)
    write = prepared(client, ids, rows, is_dense=is_dense, every_shard=every_shard)
    distinct, _, sums = reference.merge_duplicates(ids, rows)
    if len(distinct) == len(ids):
        sums = rows
    order, counts = ops.route(distinct, PLACEMENT, dense=is_dense, num_shards=NUM_SHARDS)
    parts = [part for part in np.split(order, np.cumsum(counts)[:-1]) if every_shard or len(part)]
    assert write.num_parts == len(parts)
    for index, places in enumerate(parts):
        _, part_ids, bits, code, *_ = write.part(index)
        np.testing.assert_array_equal(part_ids, distinct[places])
        assert sums is not None
        expected_bits, expected_code = ops.as_bits(np.ascontiguousarray(sums[places]))
        np.testing.assert_array_equal(bits, expected_bits)
        assert code == expected_code or not len(ids)


def test_writes_of_several_tables_are_one_request_to_each_shard(shards: Shards) -> None:
    ids = np.random.default_rng(0).permutation(300)
    rows = np.random.default_rng(1).integers(-9, 9, (300, DIM)).astype(np.float32)
    writes = [(shards.prepare(ids, rows * factor), CONTEXT, ()) for factor in (1, 10, 100)]
    missing = (shards.prepare(ids, rows, "missing"), CONTEXT, ())
    replies = shards.client.write([*writes, missing], SOON, None)
    assert replies[:3] == [(300, False)] * 3
    assert [type(error) for error in replies[3]] == [TableNotFound] * NUM_SHARDS
    of_shard = PLACEMENT[ids]
    assert shards.written() == [111 * rows[of_shard == shard].sum() for shard in range(NUM_SHARDS)]
    assert [connection.num_mailboxes for connection in shards.connections] == [1] * NUM_SHARDS


@pytest.mark.parametrize("lost", [None, 1])
def test_rows_come_with_the_push_that_they_follow(shards: Shards, lost: int | None) -> None:
    ids = np.arange(4 * NUM_SHARDS)
    if lost is not None:
        shards.client.set_endpoint(lost, 0, None, None)
    first, second = np.full(7, -1, np.float32), np.full(len(ids) * DIM - 7, -1, np.float32)
    write = shards.prepare(ids, np.ones((len(ids), DIM), np.float32))
    out = _core.ScatteredRows((first, second), DIM)
    reply, writes = shards.client.write_and_pull(write, CONTEXT, out, SOON, None)
    rows = np.concatenate([first, second]).reshape(-1, DIM)
    came = PLACEMENT[ids] != (NUM_SHARDS if lost is None else lost)
    np.testing.assert_array_equal(rows[came], expected(ids)[came])
    assert (rows[~came] == -1).all()
    if lost is None:
        assert (reply, writes) == ((len(ids), False), (1,) * NUM_SHARDS)
    else:
        assert (reply[lost], writes) == (None, None) and came.sum() == sum(item[0] for item in reply if item)
    assert [connection.num_mailboxes for connection in shards.connections] == [
        int(n != lost) for n in range(NUM_SHARDS)
    ]


def test_rows_of_a_push_that_is_refused_do_not_come(shards: Shards) -> None:
    rows = np.full((NUM_SHARDS, DIM), -1, np.float32)
    write = shards.prepare(np.arange(NUM_SHARDS), np.ones_like(rows), "none")
    out = _core.ScatteredRows((rows.reshape(-1),), DIM)
    reply, writes = shards.client.write_and_pull(write, CONTEXT, out, SOON, None)
    assert [type(error) for error in reply] == [TableNotFound] * NUM_SHARDS and writes is None
    assert (rows == -1).all()


def test_what_is_not_done_is_said_shard_by_shard(shards: Shards) -> None:
    ids = np.arange(3 * NUM_SHARDS)
    shards.client.set_endpoint(0, 0, None, None)
    shards.servers[1].close()
    rows = np.ones((len(ids), DIM), np.float32)
    shards.prepare(ids, rows)
    (reply,) = shards.client.write([(shards.prepare(ids, rows), CONTEXT, ())], SOON, None)
    assert reply[0] is None and reply[2] == (3, False), "no way to the first, the third has answered"
    assert reply[1] is None, "nor to the second any more"
    out, _, undone = shards.pull(ids)
    assert [shard for shard, _ in undone] == [0, 1]
    third = PLACEMENT[ids] == 2
    np.testing.assert_array_equal(out[third], expected(ids)[third])
    (busy,) = shards.client.write([(shards.prepare(np.array([-2]), rows[:1]), CONTEXT, ())], SOON, None)
    assert isinstance(busy[0], Busy) and busy[0].retry_after_seconds == 0.25


def test_one_shard_alone_can_be_asked_again(shards: Shards) -> None:
    ids = np.concatenate([np.arange(30), np.arange(30)[::-1]])
    is_second = PLACEMENT[ids] == 1
    out, present = np.full((60, DIM), -1, np.float32), np.full(60, 7, np.uint8)
    assert shards.client.pull(facts_of("rows"), 0, ids, out, 0, present, None, SOON, None, (1,)) is None
    np.testing.assert_array_equal(out, np.where(is_second[:, None], expected(ids), -1))
    np.testing.assert_array_equal(present, np.where(is_second, ids % 2 == 0, 7))
    write = shards.prepare(ids[:30], np.ones((30, DIM), np.float32))
    assert write.shards == [0, 1, 2]
    assert shards.client.write([(write, CONTEXT, (1,))], SOON, None) == [(10, False)]
    assert shards.written() == [0, 10 * DIM, 0]


def test_a_shard_that_does_not_reply_in_time_is_one_of_several(shards: Shards) -> None:
    seen: list[list[int]] = []
    ids = np.arange(60)
    rows = np.ones((60, DIM), np.float32)
    shards.handlers[0].release()
    shards.handlers[2].release()
    writes = [(shards.prepare(ids, rows, "held"), CONTEXT, ())]
    (reply,) = shards.client.write(writes, 0.35, seen.append)
    assert reply[0] == reply[2] == (20, False) and reply[1] is False
    assert seen and all(1 in waiting for waiting in seen)


@pytest.mark.parametrize("is_write", [False, True])
def test_ctrl_c_ends_the_wait_and_the_arrays_are_the_callers_again(shards: Shards, is_write: bool) -> None:
    ids, out = np.arange(30), np.zeros((30, DIM), np.float32)
    write = shards.prepare(ids, out, "held")

    def interrupt() -> None:
        assert all(handler.await_held(SOON) for handler in shards.handlers)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        if is_write:
            shards.client.write([(write, CONTEXT, ())], SOON, None)
        else:
            shards.client.pull(facts_of("held"), 0, ids, out, 0, None, None, SOON, None)
    thread.join()
    out[:] = 777
    for handler in shards.handlers:
        handler.release()
    assert shards.pull(ids)[2] is None
    assert (out == 777).all()


def test_a_group_and_its_numbers_travel(shards: Shards) -> None:
    group = SyncGroup(job="j", world_size=2, rank=1, sequence=3, sample_count=8)
    write = shards.prepare(np.arange(3), np.ones((3, DIM), np.float32), group=group, every_shard=True, lr=0.1)
    assert write.num_parts == NUM_SHARDS
    assert shards.client.write([(write, CONTEXT, ())], SOON, None) == [(3, False)]


@pytest.mark.parametrize(
    ("ids", "rows", "settings", "words"),
    [
        ([5, 6, 7], [[1, 1], [np.nan, 1], [1, np.inf]], {}, r"2 of 3 .* first is row 1 \(id 6\); nothing was sent"),
        ([5, 6, 5], [[3e38, 1], [1, 1], [3e38, 1]], {}, r"1 of 2 .* first is row 0 \(id 5\); nothing was sent"),
        (
            [5, 6],
            [[3e38, 1], [1, 1]],
            {"scale": -2.0, "check": 1},
            r"scale -2.0 times the largest gradient .* is infinite",
        ),
    ],
)
def test_numbers_that_are_not_finite_are_found_before_anything_is_sent(
    ids: list[int], rows: list[list[float]], settings: dict[str, Any], words: str
) -> None:
    client = _core.RowsClient(PLACEMENT, NUM_SHARDS)
    wide = np.tile(np.array(rows, np.float32), (1, 3))[:, :DIM]
    with pytest.raises(NonFinite, match=words):
        prepared(client, np.array(ids), np.ascontiguousarray(wide), **settings)


def test_a_part_keeps_the_memory_that_it_lies_in() -> None:
    client = _core.RowsClient(np.zeros(ops.NUM_BUCKETS, np.uint16), 1)
    _, ids, rows, *_ = prepared(client, np.array([3, 1, 3]), np.ones((3, DIM), np.float32)).part(0)
    assert ids.tolist() == [3, 1] and rows[:, 0].tolist() == [2, 1]
