"""Parts of a write are applied together or not at all."""

from __future__ import annotations

import numpy as np
import pytest

from geartrain.ams.errors import InvalidArgument, MessageTooLarge
from geartrain.ams.messages import CallContext
from geartrain.ams.server.parts import PartBuffer, Payload

CONTEXT = CallContext(stream="s", sequence=1, incarnation=1)


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
    newer = CallContext(stream="s", sequence=1, incarnation=2)
    for context in (CONTEXT, other, newer):
        assert parts.add(context, 0, 2, payload(0)) is None
    assert parts.add(other, 1, 2, payload(2)) is not None


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
    parts = PartBuffer(max_bytes=100, patience_seconds=10, clock=lambda: now)
    other = CallContext(stream="other", sequence=1)
    parts.add(CONTEXT, 0, 2, payload(0))
    parts.add(other, 0, 2, payload(0))
    with pytest.raises(MessageTooLarge, match="at most 100"):
        parts.add(CONTEXT, 1, 2, payload(2))
    now = 11.0
    assert parts.add(CONTEXT, 0, 2, payload(0)) is None
    assert parts.add(CONTEXT, 1, 2, payload(2)) is not None
    assert parts.add(other, 0, 2, payload(0)) is None


def test_late_parts_of_an_acknowledged_write_are_dropped() -> None:
    parts = PartBuffer(max_bytes=100)
    parts.add(CONTEXT, 0, 2, payload(0))
    later = CallContext(stream="s", sequence=2, incarnation=1, oldest_unacknowledged=2)
    assert parts.add(later, 0, 2, payload(0)) is None
    assert parts.add(later, 1, 2, payload(2)) is not None
