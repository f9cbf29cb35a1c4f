"""Segments of shared memory: only their owner can offer them, and no call finds another's bytes in one."""

from __future__ import annotations

import gc
import os
import secrets
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geartrain.ams.errors import ProtocolError, ShardUnavailable
from geartrain.ams.specs import DTYPES
from geartrain.ams.transport import shared_memory
from geartrain.ams.transport.shared_memory import (
    OpenedSegments,
    Segment,
    SegmentPool,
    arrays_in,
    bytes_needed,
)

MIB = 1 << 20


def offered(opened: OpenedSegments, segment: Segment) -> str | None:
    return opened.open(segment.name, os.getpid(), segment.descriptor)


class Shard:
    """Accepts what is offered when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pool = SegmentPool(self.take_note, clock=lambda: self.now)
        self.offers: list[Segment] = []

    def take_note(self, segment: Segment) -> None:
        self.offers.append(segment)

    def accept(self) -> None:
        while self.offers:
            self.pool.accept(self.offers.pop())
            self.pool.end_offer()

    def segment(self, num_bytes: int) -> Segment:
        """A segment in use."""
        found = self.pool.take(num_bytes)
        if found is None:
            self.accept()
            found = self.pool.take(num_bytes)
        assert found is not None
        return found


def test_what_one_side_writes_the_other_reads() -> None:
    opened, segment = OpenedSegments(), Segment(MIB)
    assert offered(opened, segment) is None
    theirs = opened.claim(segment.name, 1)
    segment.memory[:] = 7
    assert len(theirs) == MIB and (theirs == 7).all()
    theirs[5] = 9
    assert segment.memory[5] == 9


def test_an_offer_that_is_repeated_changes_nothing() -> None:
    opened, segment = OpenedSegments(), Segment(MIB)
    assert offered(opened, segment) is None
    opened.claim(segment.name, 3)
    assert offered(opened, segment) is None
    assert len(opened) == 1
    with pytest.raises(ShardUnavailable, match="after use 3"):
        opened.claim(segment.name, 3)


def test_the_size_of_a_segment_cannot_change() -> None:
    segment = Segment(MIB)
    for size in (0, 2 * MIB):
        with pytest.raises(PermissionError):
            os.ftruncate(segment.descriptor, size)


def test_what_is_not_the_callers_segment_is_not_opened() -> None:
    opened, segment = OpenedSegments(), Segment(MIB)
    guessed = f"geartrain-{secrets.token_hex(16)}"
    here, descriptor = os.getpid(), segment.descriptor
    for name, process, number, why in (
        (guessed, here, descriptor, "has no segment"),
        (segment.name, here, 0, "has no segment"),
        (segment.name, 2**31 - 1, descriptor, "cannot be seen"),
        ("geartrain-", here, descriptor, "not the name of a segment"),
        ("../../etc/passwd", here, descriptor, "not the name of a segment"),
        (segment.name + "0", here, descriptor, "not the name of a segment"),
    ):
        reason = opened.open(name, process, number)
        assert reason is not None and why in reason
    assert len(opened) == 0


def test_memory_that_could_shrink_is_not_opened() -> None:
    name = f"geartrain-{secrets.token_hex(16)}"
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, MIB)
        reason = OpenedSegments().open(name, os.getpid(), descriptor)
    finally:
        os.close(descriptor)
    assert reason is not None and "not sealed" in reason


def test_the_shard_lets_go_of_what_its_owner_closed_but_not_while_a_call_is_at_work_in_it() -> None:
    opened = OpenedSegments()
    kept, closed = Segment(MIB), Segment(MIB)
    assert offered(opened, kept) is None and offered(opened, closed) is None
    in_use = opened.claim(closed.name, 1)
    name = closed.name
    del closed
    gc.collect()
    opened.forget_closed()
    assert len(opened) == 1
    in_use[:] = 3
    assert (in_use == 3).all()
    with pytest.raises(ShardUnavailable, match="not open here"):
        opened.claim(name, 2)
    opened.claim(kept.name, 1)


def test_a_call_that_arrives_twice_or_late_is_refused() -> None:
    opened, segment = OpenedSegments(), Segment(MIB)
    offered(opened, segment)
    opened.claim(segment.name, 2)
    for use in (0, 1, 2):
        with pytest.raises(ShardUnavailable, match="arrived twice, or too late"):
            opened.claim(segment.name, use)
    opened.claim(segment.name, 3)


def test_a_shard_holds_so_many_segments_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "MOST_OPENED", 2)
    opened = OpenedSegments()
    segments = [Segment(MIB) for _ in range(3)]
    reasons = [offered(opened, segment) for segment in segments]
    assert reasons[:2] == [None, None]
    assert reasons[2] is not None and "2 segments already" in reasons[2]


@settings(max_examples=100, deadline=None)
@given(num_ids=st.integers(0, 50), dim=st.integers(1, 9), dtype=st.sampled_from(list(DTYPES.values())))
def test_the_arrays_of_a_call_lie_beside_each_other(num_ids: int, dim: int, dtype: np.dtype) -> None:
    memory = np.zeros(bytes_needed(num_ids, dim, dtype), np.uint8)
    arrays = arrays_in(memory, num_ids, dim, dtype)
    assert (arrays.ids.shape, arrays.rows.shape, arrays.present.shape) == ((num_ids,), (num_ids, dim), (num_ids,))
    assert arrays.rows.dtype == dtype
    for array in (arrays.ids, arrays.rows, arrays.present):
        array.reshape(-1).view(np.uint8)[:] += 1
    assert memory.max(initial=0) <= 1, "they overlap"
    assert memory.sum() == num_ids * (8 + dim * dtype.itemsize + 1)


@pytest.mark.parametrize("num_ids", [2, 2**63, 2**64 - 1])
def test_a_call_that_does_not_fit_is_refused(num_ids: int) -> None:
    memory = np.zeros(bytes_needed(1, 4, np.dtype(np.float32)), np.uint8)
    with pytest.raises(ProtocolError, match=f"{num_ids} ids"):
        arrays_in(memory, num_ids, 4, np.dtype(np.float32))


def test_nobody_waits_for_an_offer() -> None:
    shard = Shard()
    assert shard.pool.take(MIB) is None
    assert len(shard.offers) == 1
    shard.accept()
    assert shard.pool.take(MIB) is not None


def test_small_calls_do_not_use_shared_memory() -> None:
    shard = Shard()
    assert shard.pool.take(shared_memory.MIN_SHARED_BYTES - 1) is None
    assert not shard.offers


def test_a_segment_in_use_is_nobody_elses_and_each_use_has_a_higher_number() -> None:
    shard = Shard()
    first, second = shard.segment(MIB), shard.segment(MIB)
    assert first is not second
    shard.pool.give_back(first)
    assert first.num_uses == 1
    assert shard.pool.take(MIB) is first
    assert first.num_uses == 2


def test_a_segment_whose_call_had_no_reply_is_never_used_again() -> None:
    shard = Shard()
    lost = shard.segment(MIB)
    name = lost.name
    del lost
    assert shard.pool.num_segments == 0
    assert shard.segment(MIB).name != name


def test_calls_of_nearly_one_size_share_segments() -> None:
    shard = Shard()
    for size in (5_210_000, 5_120_000, 5_230_000):
        shard.pool.give_back(shard.segment(size))
    assert shard.pool.num_segments == 1


def test_memory_is_bounded_and_small_segments_make_room_for_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "MOST_POOL_BYTES", 4 * MIB)
    shard = Shard()
    small = [shard.segment(MIB) for _ in range(4)]
    assert shard.pool.take(MIB) is None and not shard.offers
    for segment in small:
        shard.pool.give_back(segment)
    del small, segment
    large = shard.segment(3 * MIB)
    assert len(large.memory) == 3 * MIB
    assert shard.pool.num_segments == 2


def test_what_was_long_idle_is_let_go() -> None:
    shard = Shard()
    idle, other = shard.segment(MIB), shard.segment(MIB)
    shard.pool.give_back(idle)
    del idle
    shard.now = shared_memory.IDLE_SECONDS
    shard.pool.give_back(other)
    assert shard.pool.num_segments == 1
    assert shard.pool.take(MIB) is other


def test_offers_under_way_are_few() -> None:
    shard = Shard()
    assert [shard.pool.take(MIB) for _ in range(20)] == [None] * 20
    assert len(shard.offers) == 4


def test_after_a_refusal_nothing_is_offered_for_a_while() -> None:
    shard = Shard()
    shard.pool.take(MIB)
    shard.pool.refuse("they are on two machines")
    shard.pool.end_offer()
    shard.offers.clear()
    assert shard.pool.take(MIB) is None and not shard.offers
    assert shard.pool.num_segments == 0
    shard.now = shared_memory.PAUSE_SECONDS
    assert shard.pool.take(MIB) is None and len(shard.offers) == 1


def test_a_pool_that_was_closed_keeps_nothing() -> None:
    shard = Shard()
    in_use, free = shard.segment(MIB), shard.segment(MIB)
    shard.pool.give_back(free)
    del free
    shard.pool.close()
    shard.pool.give_back(in_use)
    del in_use
    assert shard.pool.num_segments == 0
    assert shard.pool.take(MIB) is None


def test_without_memory_to_share_rows_travel_in_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    shard = Shard()
    before = len(list(Path("/proc/self/fd").iterdir()))
    monkeypatch.setattr(os, "posix_fallocate", full)
    assert shard.pool.take(MIB) is None and not shard.offers
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    monkeypatch.undo()
    assert shard.pool.take(MIB) is None and not shard.offers
    shard.now = shared_memory.PAUSE_SECONDS
    assert shard.segment(MIB).num_uses == 1
