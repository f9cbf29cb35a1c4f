"""Parts of a write are applied together or not at all."""

from __future__ import annotations

import numpy as np
import pytest

from geartrain.ams.server.chunked_writes import PartBuffer, Payload
from geartrain.ams.values.errors import Busy, InvalidArgument, MessageTooLarge
from geartrain.ams.values.shard_messages import CallContext

CONTEXT = CallContext(stream="s", sequence=1, incarnation=1)
SIZE = 1024 + 2 * 8 + 2 * 16
"""Of a part, with what it takes beside its bytes."""


def payload(first: int) -> Payload:
    return np.arange(first, first + 2), np.full((2, 4), first, np.float32)


def test_parts_in_any_order_make_the_whole_write_in_order() -> None:
    parts = PartBuffer()
    assert parts.add(CONTEXT, 2, 3, payload(4)) is None
    assert parts.add(CONTEXT, 0, 3, payload(0)) is None
    assert parts.add(CONTEXT, 0, 3, payload(0)) is None  # a retried part counts once
    whole = parts.add(CONTEXT, 1, 3, payload(2))
    assert whole is not None
    assert whole[0].tolist() == [0, 1, 2, 3, 4, 5]
    assert whole[1][:, 0].tolist() == [0, 0, 2, 2, 4, 4]


def test_writes_do_not_mix() -> None:
    parts = PartBuffer()
    other = CallContext(stream="s", sequence=2, incarnation=1)
    foreign = CallContext(stream="t", sequence=1, incarnation=2)
    for context in (CONTEXT, other, foreign):
        assert parts.add(context, 0, 2, payload(0)) is None
    assert parts.add(other, 1, 2, payload(2)) is not None


def test_parts_of_an_earlier_process_or_a_fenced_one_are_forgotten() -> None:
    parts = PartBuffer(max_bytes=2 * SIZE)
    successor = CallContext(stream="s", sequence=1, incarnation=2)
    assert parts.add(CONTEXT, 0, 2, payload(0)) is None
    assert parts.add(successor, 1, 2, payload(2)) is None
    fenced = CallContext(stream="job/rank0", sequence=1, incarnation=4)
    with pytest.raises(Busy):
        parts.add(fenced, 0, 2, payload(0))
    assert parts.add(successor, 0, 2, payload(0)) is not None
    assert parts.add(fenced, 0, 2, payload(0)) is None
    parts.fence("job", 4)
    parts.fence("jo", 5)
    with pytest.raises(Busy):
        parts.add(CONTEXT, 0, 2, payload(0))
    parts.fence("job", 5)
    assert parts.add(CONTEXT, 0, 2, payload(0)) is None


@pytest.mark.parametrize(("index", "count"), [(3, 3), (0, 0), (0, 10**6)])
def test_an_impossible_part_is_refused(index: int, count: int) -> None:
    with pytest.raises(InvalidArgument, match=f"part {index} of {count}"):
        PartBuffer().add(CONTEXT, index, count, payload(0))


def test_parts_that_disagree_are_refused() -> None:
    parts = PartBuffer()
    parts.add(CONTEXT, 0, 3, payload(0))
    with pytest.raises(InvalidArgument, match="another said 3"):
        parts.add(CONTEXT, 1, 2, payload(2))


def test_memory_is_bounded_and_freed_when_the_write_is_whole_or_its_sender_silent() -> None:
    now = 0.0
    parts = PartBuffer(max_bytes=2 * SIZE, patience_seconds=100, clock=lambda: now, crowded_seconds=10)
    other = CallContext(stream="other", sequence=1)
    assert parts.add(CONTEXT, 0, 2, payload(0)) is None
    now = 10.0
    with pytest.raises(Busy, match="hold 2144 of 2144 bytes") as busy:
        parts.add(other, 0, 2, payload(0))
    assert busy.value.retry_after_seconds > 0
    now = 11.0  # another lacks room: the first one has been silent for too long
    assert parts.add(other, 0, 2, payload(0)) is None
    assert parts.add(other, 1, 2, payload(2)) is not None
    assert parts.add(CONTEXT, 1, 2, payload(2)) is None
    assert parts.add(CONTEXT, 0, 2, payload(0)) is not None


def test_a_write_that_was_let_in_can_be_completed_and_one_that_never_fits_is_refused() -> None:
    parts = PartBuffer(max_bytes=6 * SIZE)
    contexts = [CallContext(stream=f"s{number}", sequence=1) for number in range(5)]
    let_in = []
    for context in contexts:
        try:
            assert parts.add(context, 0, 2, payload(0)) is None
            let_in.append(context)
        except Busy:
            pass
    assert len(let_in) == 3
    assert all(parts.add(context, 1, 2, payload(2)) is not None for context in let_in)
    with pytest.raises(MessageTooLarge, match="at most 6432"):
        parts.add(CONTEXT, 0, 7, payload(0))


def test_no_stream_takes_the_room_of_all_others() -> None:
    parts = PartBuffer(max_bytes=20 * SIZE)
    assert parts.add(CONTEXT, 0, 2, payload(0)) is None
    with pytest.raises(Busy):
        parts.add(CallContext(stream="s", sequence=2, incarnation=1), 0, 2, payload(0))
    assert parts.add(CallContext(stream="t", sequence=1, incarnation=1), 0, 2, payload(0)) is None


def test_parts_that_are_larger_than_the_first_one_have_room_too_but_not_without_bound() -> None:
    parts = PartBuffer(max_bytes=2 * SIZE)
    assert parts.add(CONTEXT, 0, 2, (np.arange(1), np.zeros((1, 4), np.float32))) is None
    assert parts.add(CONTEXT, 1, 2, payload(2)) is not None
    assert parts.add(CONTEXT, 0, 2, (np.arange(1), np.zeros((1, 4), np.float32))) is None
    with pytest.raises(Busy, match="about equal size"):
        parts.add(CONTEXT, 1, 2, (np.arange(200), np.zeros((200, 4), np.float32)))
    assert parts.add(CONTEXT, 0, 2, payload(0)) is None  # nothing was kept


def test_late_parts_of_an_acknowledged_write_are_dropped() -> None:
    parts = PartBuffer(max_bytes=2 * SIZE)
    parts.add(CONTEXT, 0, 2, payload(0))
    later = CallContext(stream="s", sequence=2, incarnation=1, oldest_unacknowledged=2)
    assert parts.add(later, 0, 2, payload(0)) is None
    assert parts.add(later, 1, 2, payload(2)) is not None


def test_parts_without_bytes_have_a_bound_too() -> None:
    parts = PartBuffer(max_bytes=1 << 20)
    nothing = (np.empty(0, np.int64), np.empty((0, 4), np.float32))
    with pytest.raises(Busy):
        for number in range(1 << 10):
            parts.add(CallContext(stream=f"s{number}", sequence=1), 0, 2, nothing)
