"""A TCP proxy that mistreats what passes through it, by a seeded plan: one fault for each connection.

cut       both ends are closed in the middle of a message, after so many bytes one way
reset     the same, but both peers are told that the connection broke, rather than that it ended
blackhole bytes one way vanish from so many bytes on, those of the other still arrive; the connection stays open
delay     pieces one way are held back, longer than a client waits for an attempt
overtake  what the client sends is held back until a later connection has been answered: old calls behind newer ones
mirror    what the client sends reaches the server on two connections at once: every call twice, side by side
replay    everything the client sent is sent once more, on a connection of its own, after the first has ended:
          the same calls again, late and behind newer ones
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

_PIECE = 4096
_DELAYS = 3
KINDS = ("cut", "reset", "blackhole", "delay", "overtake", "mirror", "replay")
_ONLY_UPWARD = ("overtake", "mirror", "replay")
_LONGEST_HOLD_SECONDS = 5.0
_ANSWERED_BYTES = 200
"""A connection that has received more than this has had a call answered: the rest is HTTP/2's own settings."""
REPLY_SHARE = 400
"""Writes are so many times larger than their replies, about, where their rows travel."""


@dataclass(frozen=True)
class Fault:
    """What happens to one connection."""

    kind: str
    upward: bool
    """Whether it befalls what the client sends, or what it receives."""
    after_bytes: int
    seconds: float


@dataclass
class _Connection:
    number: int
    """In the order in which clients opened them."""
    fault: Fault | None
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    up_reader: asyncio.StreamReader
    up_writer: asyncio.StreamWriter
    mirror: asyncio.StreamWriter | None = None
    sent: list[bytes] = field(default_factory=list)

    def ends(self, *, upward: bool) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return (self.reader, self.up_writer) if upward else (self.up_reader, self.writer)

    def reset(self) -> None:
        for writer in (self.writer, self.up_writer):
            connected: socket.socket = writer.get_extra_info("socket")
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    def close(self) -> None:
        for writer in (self.up_writer, self.writer, self.mirror):
            if writer is not None:
                writer.close()


class FaultyProxy:
    """Listens on a free port. Between :meth:`begin_faults` and :meth:`end_faults` every connection meets a fault."""

    def __init__(
        self, seed: int, *, most_bytes: int = 800_000, delay_seconds: float = 0.5, reply_share: int = REPLY_SHARE
    ) -> None:
        self.counts: Counter[str] = Counter()
        """Faults that took effect, by kind and direction."""
        self._faulty = False
        self._random = random.Random(seed)
        self._most_bytes, self._delay, self._reply_share = most_bytes, delay_seconds, reply_share
        self._target: tuple[str, int] | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy")
        self._thread.start()
        self._deck: list[tuple[str, bool]] = []
        self._number = 0
        self._last_answered = -1
        self._answered = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server = self._do(asyncio.start_server(self._accepted, "127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def forward_to(self, address: str) -> None:
        """Say where connections go; before that they are refused."""
        host, port = address.rsplit(":", 1)
        self._target = host, int(port)

    def begin_faults(self) -> None:
        """End the connections there are; every later one meets a random fault."""
        self._faulty = True
        self._do(self._end_connections())

    def end_faults(self) -> None:
        """Let later connections pass unharmed; those under way still meet their fault."""
        self._faulty = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._do(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _close(self) -> None:
        self._server.close()
        await self._end_connections()

    async def _end_connections(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._carry(reader, writer)
        except (asyncio.CancelledError, OSError):  # the server may be gone already
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    def _next_fault(self) -> Fault | None:
        if not self._faulty:
            return None
        if not self._deck:  # each fault once before any comes again
            self._deck = [(kind, way) for kind in KINDS for way in (True, False) if way or kind not in _ONLY_UPWARD]
            self._random.shuffle(self._deck)
        kind, upward = self._deck.pop()
        return Fault(
            kind=kind,
            upward=upward,
            after_bytes=self._random.randrange(self._most_bytes if upward else self._most_bytes // self._reply_share),
            seconds=self._delay * self._random.uniform(0.5, 2),
        )

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._target is None:
            return
        fault = self._next_fault()
        connection = _Connection(self._number, fault, reader, writer, *await asyncio.open_connection(*self._target))
        self._number += 1
        if fault is not None and fault.kind == "mirror":
            connection.mirror = (await asyncio.open_connection(*self._target))[1]
            self.counts["mirror"] += 1
        ways = [asyncio.create_task(self._pipe(connection, upward=upward)) for upward in (True, False)]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            connection.close()
        if fault is not None and fault.kind == "replay" and connection.sent:
            self.counts["replay"] += 1
            await self._replay(b"".join(connection.sent))

    async def _pipe(self, connection: _Connection, *, upward: bool) -> None:
        reader, writer = connection.ends(upward=upward)
        fault = connection.fault if connection.fault is not None and connection.fault.upward == upward else None
        passed, delays = 0, 0
        while piece := await reader.read(_PIECE):
            passed += len(piece)
            if upward and connection.fault is not None and connection.fault.kind == "replay":
                connection.sent.append(piece)
            if not upward and passed > _ANSWERED_BYTES:
                self._was_answered(connection.number)
            if fault is not None and passed > fault.after_bytes:
                way = "up" if upward else "down"
                is_first = passed - len(piece) <= fault.after_bytes
                if fault.kind in ("cut", "reset"):
                    self.counts[f"{fault.kind} {way}"] += 1
                    keep = max(0, len(piece) - (passed - fault.after_bytes))
                    writer.write(piece[:keep])
                    await writer.drain()
                    if fault.kind == "reset":
                        connection.reset()
                    return
                if fault.kind == "blackhole":
                    self.counts[f"blackhole {way}"] += is_first
                    continue
                if fault.kind == "delay":
                    self.counts[f"delay {way}"] += is_first
                    await asyncio.sleep(fault.seconds)
                    delays += 1
                    if delays == _DELAYS:
                        return
                if fault.kind == "overtake":
                    await self._let_overtake(connection, piece)
                    return
                if fault.kind == "mirror":
                    return
                if fault.kind == "replay":
                    return  # ends the connection, so that the replay comes behind what was answered on it
            writer.write(piece)
            if upward and connection.mirror is not None:
                connection.mirror.write(piece)
            await writer.drain()

    def _was_answered(self, number: int) -> None:
        if number > self._last_answered:
            self._last_answered = number
            self._answered.set()
            self._answered = asyncio.Event()

    async def _let_overtake(self, connection: _Connection, piece: bytes) -> None:
        """Hold what the client sends until a later connection has been answered; then let it through, then end."""
        held = [piece]

        async def gather() -> None:
            while more := await connection.reader.read(_PIECE):
                held.append(more)

        gathering = asyncio.create_task(gather())
        try:
            async with asyncio.timeout(_LONGEST_HOLD_SECONDS):
                while self._last_answered <= connection.number:
                    await self._answered.wait()
            self.counts["overtake"] += 1
        except TimeoutError:
            pass
        finally:
            gathering.cancel()
        for piece in held:
            connection.up_writer.write(piece)
        await connection.up_writer.drain()
        await asyncio.sleep(0.05)  # time for the server to begin with them before it sees the end

    async def _replay(self, data: bytes) -> None:
        assert self._target is not None
        reader, writer = await asyncio.open_connection(*self._target)
        try:
            writer.write(data)
            await writer.drain()
            async with asyncio.timeout(0.5):
                while await reader.read(_PIECE):
                    pass
        except (TimeoutError, OSError):
            pass
        finally:
            writer.close()
