"""Segments of shared memory: only their owner can offer them, and no call finds another's bytes in one."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import queue
import secrets
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geartrain.ams.rpc.payload import shared_memory
from geartrain.ams.rpc.payload.shared_memory import (
    HeldSegments,
    Segment,
    SegmentPool,
    arrays_in,
    bytes_needed,
)
from geartrain.ams.values.errors import MemoryNotShared, ProtocolError
from geartrain.ams.values.specs import DTYPES

MIB = 1 << 20


def offered(held: HeldSegments, segment: Segment) -> str | None:
    return held.open(segment.name, os.getpid(), segment.descriptor)


class Shard:
    """Accepts what is offered when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pool = SegmentPool(self.take_note, clock=lambda: self.now, begin=lambda work: work())
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
    held, segment = HeldSegments(), Segment(MIB)
    assert offered(held, segment) is None
    theirs = held.claim(segment.name, 1)
    segment.memory[:] = 7
    assert len(theirs) == MIB and (theirs == 7).all()
    theirs[5] = 9
    assert segment.memory[5] == 9


def test_an_offer_that_is_repeated_changes_nothing() -> None:
    held, segment = HeldSegments(), Segment(MIB)
    assert offered(held, segment) is None
    held.claim(segment.name, 3)
    assert offered(held, segment) is None
    assert len(held) == 1
    with pytest.raises(MemoryNotShared, match="after use 3"):
        held.claim(segment.name, 3)


def test_the_size_of_a_segment_cannot_change() -> None:
    segment = Segment(MIB)
    for size in (0, 2 * MIB):
        with pytest.raises(PermissionError):
            os.ftruncate(segment.descriptor, size)


def test_what_is_not_the_callers_segment_is_not_opened() -> None:
    held, segment = HeldSegments(), Segment(MIB)
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
        reason = held.open(name, process, number)
        assert reason is not None and why in reason
    assert len(held) == 0


SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def memory_file(name: str, size: int, *, holes: bool = False, seals: int = SEALS) -> int:
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    if size and not holes:
        os.posix_fallocate(descriptor, 0, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"seals": 0}, "not sealed"),
        ({"seals": SEALS | fcntl.F_SEAL_SEAL}, "cannot be opened"),  # the shard could not forbid holes
        ({"holes": True}, "has holes"),
        ({"size": 0}, "has 0 bytes"),
        ({"size": shared_memory.MOST_POOL_BYTES + 4096, "holes": True}, "bytes; it may have"),
    ],
)
def test_memory_that_could_harm_the_shard_is_not_opened(wrong: dict[str, Any], why: str) -> None:
    name = f"geartrain-{secrets.token_hex(16)}"
    descriptor = memory_file(name, **{"size": MIB, **wrong})
    try:
        reason = HeldSegments().open(name, os.getpid(), descriptor)
    finally:
        os.close(descriptor)
    assert reason is not None and why in reason


def test_a_client_cannot_have_the_shard_pay_for_memory_that_it_gave_back() -> None:
    """A page of a file in memory that is not there comes into being for whoever reads or writes it."""
    held, segment = HeldSegments(), Segment(MIB)
    assert offered(held, segment) is None
    punch = ctypes.CDLL(None, use_errno=True).fallocate
    punch.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
    keep_size_and_punch_hole = 3
    assert punch(segment.descriptor, keep_size_and_punch_hole, 0, MIB) == -1
    assert ctypes.get_errno() == errno.EPERM
    with mmap.mmap(segment.descriptor, MIB, prot=mmap.PROT_READ) as again, pytest.raises(OSError):
        again.madvise(mmap.MADV_REMOVE)
    assert os.fstat(segment.descriptor).st_blocks * 512 == MIB
    segment.memory[:] = 1
    theirs = held.claim(segment.name, 1)
    theirs += 1
    assert (segment.memory == 2).all()


def test_a_descriptor_that_changes_while_it_is_opened_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    segment, other = Segment(MIB), Segment(MIB)
    link = f"/proc/{os.getpid()}/fd/{other.descriptor}"
    told, whole = f"/memfd:{segment.name} (deleted)", shared_memory._target
    monkeypatch.setattr(shared_memory, "_target", lambda path: told if path == link else whole(path))
    reason = HeldSegments().open(segment.name, os.getpid(), other.descriptor)
    assert reason is not None and "closed a moment ago" in reason


def test_the_shard_lets_go_of_what_its_owner_closed_but_not_while_a_call_is_at_work_in_it() -> None:
    held = HeldSegments()
    kept, closed = Segment(MIB), Segment(MIB)
    assert offered(held, kept) is None and offered(held, closed) is None
    in_use = held.claim(closed.name, 1)
    closed.close()
    held.forget_closed()
    assert len(held) == 1
    in_use[:] = 3
    assert (in_use == 3).all()
    with pytest.raises(MemoryNotShared, match="not open here"):
        held.claim(closed.name, 2)
    held.claim(kept.name, 1)


def test_a_call_that_arrives_twice_or_late_is_refused() -> None:
    held, segment = HeldSegments(), Segment(MIB)
    offered(held, segment)
    held.claim(segment.name, 2)
    for use in (0, 1, 2):
        with pytest.raises(MemoryNotShared, match="arrived twice, or too late"):
            held.claim(segment.name, use)
    held.claim(segment.name, 3)


def test_a_shard_holds_so_many_segments_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "MOST_HELD", 2)
    held = HeldSegments()
    segments = [Segment(MIB) for _ in range(3)]
    reasons = [offered(held, segment) for segment in segments]
    assert reasons[:2] == [None, None]
    assert reasons[2] is not None and "2 segments are held already" in reasons[2]


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
    lost.close()
    assert shard.pool.num_segments == 0
    assert shard.segment(MIB) is not lost


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
    large = shard.segment(3 * MIB)
    assert len(large.memory) == 3 * MIB
    assert shard.pool.num_segments == 2


def test_what_was_long_idle_is_let_go() -> None:
    shard = Shard()
    idle, other = shard.segment(MIB), shard.segment(MIB)
    shard.pool.give_back(idle)
    shard.now = shared_memory.IDLE_SECONDS
    shard.pool.give_back(other)
    assert shard.pool.num_segments == 1
    assert shard.pool.take(MIB) is other


def test_of_equal_segments_the_last_one_freed_is_taken_so_that_others_become_idle() -> None:
    shard = Shard()
    burst = [shard.segment(MIB) for _ in range(4)]
    for segment in burst:
        shard.now += 1
        shard.pool.give_back(segment)
    for _ in range(10):
        shard.now += 10
        assert shard.pool.take(MIB) is burst[-1]
        shard.pool.give_back(burst[-1])
    assert shard.pool.num_segments == 1


def test_idle_segments_are_let_go_by_calls_that_are_too_small_for_any() -> None:
    shard = Shard()
    shard.pool.give_back(shard.segment(MIB))
    shard.now = shared_memory.IDLE_SECONDS
    shard.pool.take(1)
    assert shard.pool.num_segments == 0


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), KeyboardInterrupt()])
def test_an_offer_that_cannot_be_made_is_not_counted(error: BaseException) -> None:
    def fail(_: Segment) -> None:
        raise error

    shard = Shard()
    shard.pool._offer = fail
    for number in range(10):
        shard.now = number * shared_memory.PAUSE_SECONDS
        if isinstance(error, Exception):
            assert shard.pool.take(MIB) is None
        else:
            with pytest.raises(KeyboardInterrupt):
                shard.pool.take(MIB)
    assert shard.pool.num_segments == 0
    shard.pool._offer = shard.take_note
    shard.now += shared_memory.PAUSE_SECONDS
    assert shard.segment(MIB) is not None


def test_offers_that_were_broken_off_do_not_count_for_ever() -> None:
    shard = Shard()
    shard.pool._begin = lambda _: None
    assert [shard.pool.take(64 * MIB) for _ in range(6)] == [None] * 6
    assert (shard.pool._num_offers, shard.pool._being_made) == (4, 256 * MIB)
    shard.pool._begin = lambda work: work()
    shard.now = shared_memory._LOST_SECONDS + 1
    assert shard.segment(64 * MIB) is not None


def test_where_no_thread_is_to_be_had_rows_travel_in_messages() -> None:
    def fail(_: object) -> None:
        raise RuntimeError("can't start new thread")

    shard = Shard()
    shard.pool._begin = fail
    assert shard.pool.take(MIB) is None
    assert (shard.pool._num_offers, shard.pool._being_made) == (0, 0)


def test_segments_are_made_and_offered_on_a_thread_of_their_own() -> None:
    told: queue.SimpleQueue[threading.Thread] = queue.SimpleQueue()
    pool = SegmentPool(lambda _: told.put(threading.current_thread()))
    assert pool.take(MIB) is None
    assert told.get(timeout=10) is not threading.main_thread()


def test_a_forked_child_has_none_of_its_parents_segments() -> None:
    shard = Shard()
    free, in_use = shard.segment(MIB), shard.segment(MIB)
    shard.pool.give_back(free)
    shard.pool.take(3 * MIB)  # on offer
    child = os.fork()
    if child == 0:
        none_left = shard.pool.num_segments == 0 and free.is_closed and in_use.is_closed
        shard.offers.clear()
        anew = shard.segment(MIB)
        os._exit(0 if none_left and anew.name not in (free.name, in_use.name) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert shard.pool.take(MIB) is free and shard.pool.num_segments == 3


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
    shard.pool.close()
    shard.pool.give_back(in_use)
    assert shard.pool.num_segments == 0
    assert shard.pool.take(MIB) is None


def num_segments_open() -> int:
    """Descriptors of segments that this process has."""
    links = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # of another thread, and closed by now
            links.append(str(link.readlink()))
    return sum(link.startswith("/memfd:geartrain-") for link in links)


def test_without_memory_to_share_rows_travel_in_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    shard = Shard()
    before = num_segments_open()
    monkeypatch.setattr(os, "posix_fallocate", full)
    assert shard.pool.take(MIB) is None and not shard.offers
    assert num_segments_open() == before
    monkeypatch.undo()
    assert shard.pool.take(MIB) is None and not shard.offers
    shard.now = shared_memory.PAUSE_SECONDS
    assert shard.segment(MIB).num_uses == 1
