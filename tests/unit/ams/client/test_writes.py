"""Numbers of writes that are never sent."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import geartrain as gt
from geartrain.ams.client import writes
from geartrain.ams.client.rows.table_plan import TablePlan
from geartrain.ams.client.writes import MessageWrite, Write, WriteStream
from geartrain.ams.values.config import ClientConfig
from geartrain.ams.values.errors import InvalidArgument, Unavailable
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.shard_messages import WRITE_WINDOW
from geartrain.ams.values.specs import TableSpec

PLAN = TablePlan(TableSpec(name="t", dim=1, optimizer=SGD(1.0)), 0, None)


def prepared(stream: WriteStream) -> Write:
    return MessageWrite(stream, [], lambda *_: [], PLAN)


def test_a_prepared_write_that_nobody_holds_keeps_no_other_waiting() -> None:
    stream = WriteStream(3, "me", 1)
    for _ in range(10):
        prepared(stream)
    assert stream.oldest() == 11


def test_who_holds_writes_unsent_hears_which_one_the_next_waits_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writes, "_WARN_SECONDS", 0.01)
    stream = WriteStream(2, "me", 1)
    held = [prepared(stream), prepared(stream)]
    with ThreadPoolExecutor(1) as pool:
        third = pool.submit(prepared, stream)
        while "write 3 waits for write 1" not in caplog.text:
            threading.Event().wait(0.005)
        assert not third.done()
        held[0].abandon()
        third.result()


def test_who_waits_to_begin_ends_when_the_cluster_is_closed() -> None:
    config = ClientConfig(max_in_flight_writes=1)
    with gt.local(config=config) as cluster, ThreadPoolExecutor(1) as pool:
        table = cluster.create_table("t", dim=1, optimizer=gt.SGD(1.0))
        held = table.prepare_push(np.arange(3), np.ones((3, 1), np.float32))
        another = pool.submit(table.push, np.arange(3), np.ones((3, 1), np.float32))
        while not table._stream._unnumbered._waiting:
            assert not another.done()
        cluster.close()
        with pytest.raises(Unavailable, match="this cluster is closed"):
            another.result(20)
        assert not held.is_sent


def test_a_cluster_closes_though_pushes_wait_in_the_background(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writes, "_WARN_SECONDS", 0.2)
    with gt.local(config=ClientConfig(max_in_flight_writes=2)) as cluster:
        table = cluster.create_table("t", dim=1, optimizer=gt.SGD(1.0))
        held = table.prepare_push(np.arange(3), np.ones((3, 1), np.float32))
        later = [table.push_async(np.arange(3), np.ones((3, 1), np.float32)) for _ in range(200)]
    errors = [future.exception(20) for future in later]
    assert all(error is None or isinstance(error, Unavailable) for error in errors)
    assert any(errors) and not held.is_sent
    assert caplog.text.count("waits for write") < 100  # once for each that waited, not for those behind them


def test_who_holds_several_writes_does_not_wait_for_itself() -> None:
    """One step of many modules prepares the writes of all of them before it sends the first."""
    stream, begun = WriteStream(2, "s", 1), list[int]()
    for count in (3, 1, WRITE_WINDOW - 4):
        stream.reserve(begun, count, is_held=True)
    assert begun == list(range(1, WRITE_WINDOW + 1))
    with ThreadPoolExecutor(1) as pool:
        another = pool.submit(stream.reserve, [], 1)
        while not stream._waiting:
            assert not another.done()
        for sequence in begun[:-1]:
            stream.finish(sequence)
        another.result(20)
    assert stream.oldest() == WRITE_WINDOW


def test_a_write_of_more_tables_than_shards_remember_is_refused_before_any_is_numbered() -> None:
    stream, begun = WriteStream(2, "s", 1), list[int]()
    with pytest.raises(InvalidArgument, match=r"1,025 tables .* at most 1,024 .* several groups"):
        stream.reserve(begun, WRITE_WINDOW + 1, is_held=True)
    assert not begun and stream.oldest() == 1


def test_a_number_may_end_while_its_own_thread_has_the_lock() -> None:
    """The garbage collector ends the number of a write that was dropped, between any two instructions."""
    stream = WriteStream(2, "s", 1)
    held: list[Write | None] = [prepared(stream), prepared(stream)]
    with ThreadPoolExecutor() as executor:
        waiting = executor.submit(prepared, stream)
        while not stream._waiting:
            assert not waiting.done()
        with stream._lock:
            held[0] = None
        waiting.result(20)
    assert stream.oldest() == 2
    del held


def test_numbers_may_end_while_the_oldest_is_looked_for() -> None:
    """The garbage collector may run wherever something is made that it looks after, a tuple for one."""

    class Cycle:
        def __init__(self, stream: WriteStream, sequence: int) -> None:
            self.end, self.itself = (stream, sequence), self

        def __del__(self) -> None:
            stream, sequence = self.end
            stream.finish(sequence)

    stream, before = WriteStream(10_000, "s", 1), gc.get_threshold()
    try:
        for number in range(100):
            gc.disable()
            begun: list[int] = []
            stream.reserve(begun, 40)
            dropped = [Cycle(stream, sequence) for sequence in begun]
            del dropped
            gc.set_threshold(gc.get_count()[0] + number % 5)  # it runs at one of the next objects that are made
            gc.enable()
            stream.oldest()
    finally:
        gc.set_threshold(*before)
        gc.enable()
    gc.collect()
    assert stream.oldest() == 4_001


def test_a_write_that_is_interrupted_as_it_is_numbered_keeps_no_other_waiting() -> None:
    class Interrupted(WriteStream):
        def reserve(self, begun: list[int], count: int = 1, *, is_held: bool = False) -> None:
            super().reserve(begun, count, is_held=is_held)
            raise KeyboardInterrupt

    stream = Interrupted(2, "s", 1)
    for _ in range(5):
        try:
            prepared(stream)
        except KeyboardInterrupt:
            continue
        pytest.fail("it was not interrupted")
    assert stream.oldest() == 6
