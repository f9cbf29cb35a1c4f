"""Memory that a client and a shard of one machine share, so that rows need not travel through messages between them.

The client makes segments (files in memory: memfd) and offers them; the shard opens them by way of ``/proc``, which
works for processes of one user that see each other, hence never across machines or from one container to another.
Whoever cannot share uses messages. The answer to an offer is not waited for.

Nothing is left behind: a segment has no name in any file system, and the shard lets go of it when the client's
descriptor is closed, by whatever end of the client. Nothing is cut off: segments are sealed against any change of their
size, and have all their memory from the first. The shard seals them against giving any of it back, too: a page that is
not there comes into being at the expense of whoever touches it next. And nothing is mixed up: a segment carries one
call at a time. One whose call had no answer is never used again, for the shard may still be at work in it; a call that
arrives twice is refused, for it may be late, when another has the segment; and a forked child has none of its parent's.
"""

from __future__ import annotations

import fcntl
import logging
import math
import mmap
import os
import re
import resource
import secrets
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from geartrain.ams.values.config import MIB
from geartrain.ams.values.errors import MemoryNotShared, ProtocolError
from geartrain.ams.values.specs import Ids
from geartrain.ams.values.text import counted

logger = logging.getLogger(__name__)

MIN_SHARED_BYTES = 64 << 10
"""Smaller payloads travel in messages, which costs no more."""
MOST_POOL_BYTES = 256 * MIB
"""Of the segments of one client for one shard; what exceeds them travels in messages. No segment is larger."""
MOST_POOL_SEGMENTS = 16
MOST_HELD = 1024
"""Segments that a shard process holds; a quarter of the descriptors that it may have, if that is less."""
IDLE_SECONDS = 60.0
"""A segment that was free for so long is let go with the next call."""
PAUSE_SECONDS = 600.0
"""After a refusal, or where memory ran out, none is offered for so long."""
_MOST_OFFERS = 4
_LOST_SECONDS = 30.0
"""When the last offer is so long ago, none is under way."""
_ALIGNMENT = 64
_NAME = re.compile(r"geartrain-[0-9a-f]{32}")
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW if hasattr(fcntl, "F_SEAL_GROW") else 0
"""Set by the client."""
_SEAL_FUTURE_WRITE = 0x10
"""``F_SEAL_FUTURE_WRITE`` of Linux 5.1: no new mapping can be written to, nor can memory be given back (fallocate)."""
_BLOCK_BYTES = 512
"""Unit of ``st_blocks``."""

Memory = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class SharedArrays:
    """What one call carries, in place: ids [N], rows or gradients [N, D], and which rows are present [N]."""

    ids: Ids
    rows: npt.NDArray[Any]
    present: npt.NDArray[np.bool_]


def bytes_needed(num_ids: int, dim: int, dtype: np.dtype[Any]) -> int:
    """Return the size of a call with ``num_ids`` rows in shared memory."""
    return _offsets(num_ids, dim, dtype)[1] + num_ids


def arrays_in(memory: Memory, num_ids: int, dim: int, dtype: np.dtype[Any]) -> SharedArrays:
    """Return the arrays of a call with ``num_ids`` rows. Raises ProtocolError if ``memory`` is too small for it."""
    size = bytes_needed(num_ids, dim, dtype)
    if size > len(memory):
        raise ProtocolError(
            f"{num_ids} ids and rows of dim {dim} ({dtype.name}) take {size} bytes, the shared memory has {len(memory)}"
        )
    rows_start, present_start = _offsets(num_ids, dim, dtype)
    rows_end = rows_start + num_ids * dim * dtype.itemsize
    return SharedArrays(
        ids=memory[: num_ids * 8].view(np.int64),
        rows=memory[rows_start:rows_end].view(dtype).reshape(num_ids, dim),
        present=memory[present_start : present_start + num_ids].view(np.bool_),
    )


def _offsets(num_ids: int, dim: int, dtype: np.dtype[Any]) -> tuple[int, int]:
    """Where rows and presence begin."""
    rows_start = _aligned(num_ids * 8)
    return rows_start, _aligned(rows_start + num_ids * dim * dtype.itemsize)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class Segment:
    """A piece of memory that the client made."""

    def __init__(self, num_bytes: int) -> None:
        """Take the memory at once, so that no later use of it can fail. Raises OSError."""
        self.name = f"geartrain-{secrets.token_hex(16)}"
        self.descriptor = os.memfd_create(self.name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._finalizer = weakref.finalize(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, num_bytes)
        os.posix_fallocate(self.descriptor, 0, num_bytes)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)
        self.memory = _mapped(self.descriptor)
        self.num_uses = 0
        """Calls that it was taken for."""
        self.freed_at = 0.0

    def close(self) -> None:
        """Let go of it, upon which the shard does, too. Idempotent."""
        self._finalizer()
        self.memory = np.empty(0, np.uint8)

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return not self._finalizer.alive


def _in_background(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="geartrain-offer", daemon=True).start()


class SegmentPool:
    """The segments of a client for one shard. Thread-safe.

    Costs up to :data:`MOST_POOL_BYTES`; about the payloads that were under way at once, in segments of at least 1 MiB
    that are up to a quarter too large.
    """

    def __init__(
        self,
        offer: Callable[[Segment], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        begin: Callable[[Callable[[], None]], None] = _in_background,
    ) -> None:
        """``offer`` begins to tell the shard of a segment and does not wait; the answer comes to :meth:`accept` or
        :meth:`refuse`, and in any case :meth:`end_offer` is called, unless ``offer`` raises.

        ``begin`` has segments made and offered: by default on a thread, for no call is to wait for that, and Ctrl-C,
        which may break off anything on the main thread, is not to leave the connection in disorder.
        """
        self._offer = offer
        self._begin = begin
        self._clock = clock
        self._lock = threading.Lock()
        self._free: list[Segment] = []
        self._made: weakref.WeakSet[Segment] = weakref.WeakSet()
        """Free, in use and on offer."""
        self._num_offers = 0
        self._offered_at = -math.inf
        self._being_made = 0
        """Bytes of segments that are not in ``_made`` yet."""
        self._off_until = -math.inf if hasattr(os, "memfd_create") else math.inf
        _POOLS.add(self)

    def take(self, num_bytes: int) -> Segment | None:
        """Return a free segment of at least so many bytes for one call; None: there is none yet, or none is worth it.

        Give it back when the answer is there. If none came, close it.
        """
        with self._lock:
            self._drop_idle()
            if num_bytes < MIN_SHARED_BYTES:
                return None
            fitting = [segment for segment in self._free if len(segment.memory) >= num_bytes]
            if fitting:
                # Of the smallest the last one freed: it is in the caches, and the others can become idle.
                best = min(fitting, key=lambda segment: (len(segment.memory), -segment.freed_at))
                self._free.remove(best)
                best.num_uses += 1
                return best
            size = _rounded_up(num_bytes)
            if self._clock() - self._offered_at > _LOST_SECONDS:
                self._num_offers = self._being_made = 0  # what is left was broken off
            if self.is_off or self._num_offers >= _MOST_OFFERS or not self._make_room(size):
                return None
            self._num_offers += 1
            self._being_made += size
            self._offered_at = self._clock()
        try:
            self._begin(partial(self._make, size))
        except RuntimeError as exc:  # no thread is to be had
            with self._lock:
                self._num_offers, self._being_made = max(0, self._num_offers - 1), max(0, self._being_made - size)
                self._turn_off(str(exc))
        return None

    def give_back(self, segment: Segment) -> None:
        """Take back a segment whose call was answered."""
        with self._lock:
            self._drop_idle()
            if self.is_off:
                segment.close()
            else:
                segment.freed_at = self._clock()
                self._free.append(segment)

    def accept(self, segment: Segment) -> None:
        """The shard has opened an offered segment."""
        self.give_back(segment)

    def refuse(self, reason: str) -> None:
        """The shard cannot share memory with this process: for a while nothing is offered any more."""
        with self._lock:
            self._turn_off(reason)

    def end_offer(self) -> None:
        """An offer was answered, or got lost."""
        with self._lock:
            self._num_offers = max(0, self._num_offers - 1)

    def forget(self) -> None:
        """Let go of all free segments: the shard does not have them any more."""
        with self._lock:
            self._drop_free()

    def close(self) -> None:
        """Let go of all segments; those in use end with their calls. Idempotent."""
        with self._lock:
            self._off_until = math.inf
            self._drop_free()

    def begin_anew(self) -> None:
        """In a forked child: leave all segments to the parent, which works in the same memory."""
        self._lock = threading.Lock()
        for segment in list(self._made):
            segment.close()
        self._free.clear()
        self._num_offers = self._being_made = 0

    @property
    def num_segments(self) -> int:
        """Segments that the client has, in use or not."""
        with self._lock:
            return len(self._open)

    def _make(self, num_bytes: int) -> None:
        """Make a segment and offer it; what prevents that turns sharing off for a while."""
        segment: Segment | None = None
        try:
            try:
                segment = Segment(num_bytes)
            finally:
                with self._lock:
                    self._being_made = max(0, self._being_made - num_bytes)
                    if segment is not None:
                        self._made.add(segment)
            self._offer(segment)
        except BaseException as exc:
            if segment is not None:
                segment.close()
            self.end_offer()
            if not isinstance(exc, Exception):
                raise
            self.refuse(f"a segment of {num_bytes} bytes cannot be made or offered: {exc}")

    @property
    def _open(self) -> list[Segment]:
        return [segment for segment in self._made if not segment.is_closed]

    def _make_room(self, num_bytes: int) -> bool:
        """Let go of free segments, which are all too small, for one of ``num_bytes``; say whether there is room."""
        self._free.sort(key=lambda segment: len(segment.memory), reverse=True)
        while True:
            made = self._open
            size = sum(len(segment.memory) for segment in made) + self._being_made + num_bytes
            if size <= MOST_POOL_BYTES and len(made) < MOST_POOL_SEGMENTS:
                return True
            if not self._free:
                return False
            self._free.pop().close()

    def _drop_idle(self) -> None:
        oldest = self._clock() - IDLE_SECONDS
        for segment in [one for one in self._free if one.freed_at <= oldest]:
            self._free.remove(segment)
            segment.close()

    def _drop_free(self) -> None:
        for segment in self._free:
            segment.close()
        self._free.clear()

    @property
    def is_off(self) -> bool:
        """Whether nothing can be shared with the shard, for now."""
        return self._clock() < self._off_until

    def _turn_off(self, reason: str) -> None:
        logger.debug("rows travel in messages: %s", reason)
        self._off_until = max(self._off_until, self._clock() + PAUSE_SECONDS)
        self._drop_free()


_POOLS: weakref.WeakSet[SegmentPool] = weakref.WeakSet()


def _begin_anew_in_child() -> None:
    for pool in list(_POOLS):
        pool.begin_anew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew_in_child)


def _rounded_up(num_bytes: int) -> int:
    """A size that calls of nearly the same size fit in, too."""
    step = max(MIB, 1 << (num_bytes.bit_length() - 3))
    return -(-num_bytes // step) * step


@dataclass
class _Held:
    """A client's segment, as the shard has it."""

    memory: Memory
    link: str
    """Path of the client's descriptor."""
    target: str
    """What that path leads to as long as the descriptor is open."""
    last_use: int = 0

    @property
    def is_wanted(self) -> bool:
        """Whether the client still has it."""
        return _target(self.link) == self.target


class HeldSegments:
    """The segments of clients that the shards of a process have opened. Thread-safe."""

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._held)

    def open(self, name: str, process: int, descriptor: int) -> str | None:
        """Open the segment ``name`` that ``process`` has as ``descriptor``. Return None, or why that cannot be.

        The name is a secret of its owner's, so that whoever knows it is the owner, and on this machine.
        """
        if not _NAME.fullmatch(name):
            return f"{name[:80]!r} is not the name of a segment"
        link = f"/proc/{process}/fd/{descriptor}"
        target = _target(link)
        if target is None or not target.startswith(f"/memfd:{name}"):
            return f"process {process} cannot be seen from here, or has no segment {name}"
        self.forget_closed()
        with self._lock:
            if name in self._held:
                return None  # the answer to an earlier offer was lost
            most = _most_held()
            if len(self._held) >= most:
                return f"{counted(most, 'segment')} are held already, the most that this process takes"
            try:
                self._held[name] = _Held(_map_theirs(link, target), link, target)
            except (OSError, ValueError) as exc:
                return f"segment {name} cannot be opened: {exc}"
        return None

    def claim(self, name: str, use: int) -> Memory:
        """Return the memory of a segment for one call.

        Raises MemoryNotShared if the segment was not offered, or is closed by now, or a call with this number or a
        later one has used it: that call, or the next, may be at work in it.
        """
        with self._lock:
            held = self._held.get(name)
            if held is None:
                raise MemoryNotShared(
                    f"the shared memory {name[:80]!r} is not open here; send the bytes in the message"
                )
            if use <= held.last_use:
                raise MemoryNotShared(
                    f"use {use} of the shared memory {name[:80]!r} comes after use {held.last_use}: the call arrived "
                    "twice, or too late"
                )
            held.last_use = use
            return held.memory

    def forget_closed(self) -> None:
        """Let go of the segments that their clients have closed. Costs a system call for each that is left."""
        with self._lock:
            self._held = {name: held for name, held in self._held.items() if held.is_wanted}


def _most_held() -> int:
    # A mapping of Python's has a descriptor of its own.
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_HELD if limit == resource.RLIM_INFINITY else min(MOST_HELD, limit // 4)


def _map_theirs(link: str, target: str) -> Memory:
    """Map the segment ``target`` that ``link`` leads to. Raises OSError, or ValueError if it is not that, whole."""
    descriptor = os.open(link, os.O_RDWR | os.O_CLOEXEC)
    try:
        if _target(f"/proc/self/fd/{descriptor}") != target:
            raise ValueError("it was closed a moment ago")
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise ValueError("it is not sealed (F_SEAL_SHRINK, F_SEAL_GROW)")
        size = os.fstat(descriptor).st_size
        if not 0 < size <= MOST_POOL_BYTES:
            raise ValueError(f"it has {size} bytes; it may have 1 to {MOST_POOL_BYTES}")
        if os.fstatvfs(descriptor).f_bsize != resource.getpagesize():
            raise ValueError("it is not of ordinary pages")
        memory = _mapped(descriptor)
        # Both have it mapped now. A hole that the client punched later would be filled at the shard's expense.
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
        if os.fstat(descriptor).st_blocks * _BLOCK_BYTES < size:
            raise ValueError("it has holes: its memory was not taken (fallocate)")
        return memory
    finally:
        os.close(descriptor)


def _mapped(descriptor: int) -> Memory:
    return np.frombuffer(mmap.mmap(descriptor, 0), np.uint8)


def _target(link: str) -> str | None:
    with suppress(OSError):
        return str(Path(link).readlink())
    return None
