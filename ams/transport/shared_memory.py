"""Memory that a client and a shard of one machine share, so that rows need not travel through messages between them.

The client makes segments (files in memory: memfd) and offers them; the shard opens them by way of ``/proc``, which
works for processes of one user that see each other, hence never across machines or from one container to another.
Whoever cannot share uses messages. The offer goes on beside the calls, so that none ever waits for it.

Nothing can be left behind: a segment has no name in any file system, and the shard lets go of it when the client's
descriptor is closed, by whatever end of the client. Nothing can be cut off: segments are sealed against any change of
their size. And nothing can be mixed up: a segment carries one call at a time. One whose call had no reply is never used
again, for the shard may still be at work in it; and a call that arrives twice is refused, for it may be late, when
another has the segment.
"""

from __future__ import annotations

import fcntl
import logging
import math
import mmap
import os
import re
import secrets
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from geartrain.ams.config import MIB
from geartrain.ams.errors import ProtocolError, ShardUnavailable
from geartrain.ams.specs import Ids
from geartrain.ams.words import counted

logger = logging.getLogger(__name__)

MIN_SHARED_BYTES = 64 << 10
"""Smaller payloads travel in messages, which costs no more."""
MOST_POOL_BYTES = 256 * MIB
"""Of the segments of one client for one shard; what exceeds them travels in messages."""
MOST_OPENED = 1024
"""Segments that a shard holds."""
IDLE_SECONDS = 60.0
"""A segment that was free for so long is let go."""
PAUSE_SECONDS = 60.0
"""After a refusal, or where memory ran out, none is offered for so long."""
_MOST_OFFERS = 4
_ALIGNMENT = 64
_NAME = re.compile(r"geartrain-[0-9a-f]{32}")
_SEALS = ("F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL")

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
    """A piece of memory that the client made. Its descriptor closes with it, and the shard then lets go of it, too."""

    def __init__(self, num_bytes: int) -> None:
        """Take the memory at once, so that no later use of it can fail. Raises OSError."""
        self.name = f"geartrain-{secrets.token_hex(16)}"
        self.descriptor = os.memfd_create(self.name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._finalizer = weakref.finalize(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, num_bytes)
        os.posix_fallocate(self.descriptor, 0, num_bytes)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _all_seals())
        self.memory = _mapped(self.descriptor)
        self.num_uses = 0
        """Calls that it was taken for."""
        self.freed_at = 0.0

    def close(self) -> None:
        """Let go of it at once, rather than when nobody refers to it any more: the shard may, too. Idempotent."""
        self._finalizer()
        self.memory = np.empty(0, np.uint8)

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return not self._finalizer.alive


class SegmentPool:
    """The segments of a client for one shard. Thread-safe.

    Costs up to :data:`MOST_POOL_BYTES`, and no more than the payloads that were under way at once, rounded up by a
    quarter.
    """

    def __init__(self, offer: Callable[[Segment], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        """``offer`` begins to tell the shard of a segment and does not wait; the answer comes to :meth:`accept` or
        :meth:`refuse`, and in any case :meth:`end_offer` is called."""
        self._offer = offer
        self._clock = clock
        self._lock = threading.Lock()
        self._free: list[Segment] = []
        self._alive: weakref.WeakSet[Segment] = weakref.WeakSet()
        self._num_offers = 0
        self._off_until = -math.inf if hasattr(os, "memfd_create") else math.inf

    def take(self, num_bytes: int) -> Segment | None:
        """Return a free segment of at least so many bytes for one call; None: there is none yet, or none is worth it.

        Give it back when the reply is there. If none came, close it.
        """
        if num_bytes < MIN_SHARED_BYTES:
            return None
        with self._lock:
            fitting = [segment for segment in self._free if len(segment.memory) >= num_bytes]
            if fitting:
                smallest = min(fitting, key=lambda segment: len(segment.memory))
                self._free.remove(smallest)
                smallest.num_uses += 1
                return smallest
            size = _rounded_up(num_bytes)
            if self._is_off or self._num_offers >= _MOST_OFFERS or not self._make_room(size):
                return None
            self._num_offers += 1
            try:
                segment = Segment(size)
            except OSError as exc:
                self._num_offers -= 1
                self._turn_off(f"no shared memory of {size} bytes is to be had: {exc}")
                return None
            self._alive.add(segment)
        self._offer(segment)
        return None

    def give_back(self, segment: Segment) -> None:
        """Take back a segment whose call was answered."""
        with self._lock:
            now = self._clock()
            self._free = [one for one in self._free if now - one.freed_at < IDLE_SECONDS]
            if not self._is_off:
                segment.freed_at = now
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
            self._num_offers -= 1

    def close(self) -> None:
        """Let go of all segments; those in use end with their calls. Idempotent."""
        with self._lock:
            self._off_until = math.inf
            self._free.clear()

    @property
    def num_segments(self) -> int:
        """Segments that the client has, in use or not."""
        with self._lock:
            return len(self._open)

    @property
    def _open(self) -> list[Segment]:
        return [segment for segment in self._alive if not segment.is_closed]

    def _make_room(self, num_bytes: int) -> bool:
        """Let go of free segments, which are all too small, for one of ``num_bytes``; say whether there is room."""
        self._free.sort(key=lambda segment: len(segment.memory))
        while sum(len(one.memory) for one in self._open) + num_bytes > MOST_POOL_BYTES:
            if not self._free:
                return False
            del self._free[0]
        return True

    @property
    def _is_off(self) -> bool:
        return self._clock() < self._off_until

    def _turn_off(self, reason: str) -> None:
        logger.debug("rows travel in messages: %s", reason)
        self._off_until = max(self._off_until, self._clock() + PAUSE_SECONDS)
        self._free.clear()


def _rounded_up(num_bytes: int) -> int:
    """A size that calls of nearly the same size fit in, too."""
    step = max(MIB, 1 << (num_bytes.bit_length() - 3))
    return -(-num_bytes // step) * step


@dataclass
class _Opened:
    memory: Memory
    link: str
    """Path of the client's descriptor."""
    target: str
    """What that path leads to as long as the descriptor is open."""
    last_use: int = 0

    @property
    def is_open(self) -> bool:
        """Whether the client still has it."""
        return _target(self.link) == self.target


class OpenedSegments:
    """The segments that a shard has opened. Thread-safe."""

    def __init__(self) -> None:
        self._opened: dict[str, _Opened] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._opened)

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
        with self._lock:
            if name in self._opened:
                return None  # the answer to an earlier offer was lost
            if len(self._opened) >= MOST_OPENED:
                return f"this shard holds {counted(len(self._opened), 'segment')} already, the most it takes"
            try:
                memory = _opened(link, target)
            except (OSError, ValueError) as exc:
                return f"segment {name} cannot be opened: {exc}"
            self._opened[name] = _Opened(memory, link, target)
        return None

    def claim(self, name: str, use: int) -> Memory:
        """Return the memory of a segment for one call.

        Raises ShardUnavailable if the segment was not offered, or is closed by now, or a call with this number or a
        later one has used it: that call, or the next, may be at work in it.
        """
        with self._lock:
            opened = self._opened.get(name)
            if opened is None:
                raise ShardUnavailable(f"the shared memory {name[:80]!r} is not open here; try again without it")
            if use <= opened.last_use:
                raise ShardUnavailable(
                    f"use {use} of the shared memory {name[:80]!r} comes after use {opened.last_use}: the call arrived "
                    "twice, or too late; try again with other memory"
                )
            opened.last_use = use
            return opened.memory

    def forget_closed(self) -> None:
        """Let go of the segments that their clients have closed. Costs a system call for each that is left."""
        with self._lock:
            self._opened = {name: opened for name, opened in self._opened.items() if opened.is_open}


def _opened(link: str, target: str) -> Memory:
    """Map what ``link`` leads to. Raises OSError or ValueError if it is not the sealed segment ``target``."""
    descriptor = os.open(link, os.O_RDWR | os.O_CLOEXEC)
    try:
        if _target(f"/proc/self/fd/{descriptor}") != target:
            raise ValueError("it was closed a moment ago")
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _all_seals() != _all_seals():
            raise ValueError(f"it is not sealed ({', '.join(_SEALS)})")
        return _mapped(descriptor)
    finally:
        os.close(descriptor)


def _mapped(descriptor: int) -> Memory:
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
    return np.frombuffer(mmap.mmap(descriptor, 0, flags=flags), np.uint8)


def _all_seals() -> int:
    return sum(getattr(fcntl, seal) for seal in _SEALS)


def _target(link: str) -> str | None:
    try:
        return str(Path(link).readlink())
    except OSError:
        return None
