"""A TCP proxy that mistreats what passes through it, by a seeded plan: one fault for each connection.

cut       both ends are closed in the middle of a message, after so many bytes one way
blackhole bytes one way vanish from so many bytes on; the connection stays open
delay     pieces one way are held back, longer than a client waits for an attempt
replay    everything the client sent is sent once more, on a connection of its own, after the first has ended:
          the same calls again, late and behind newer ones
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

_PIECE = 4096
_DELAYS = 3
_REPLY_SHARE = 400
"""Writes are so many times larger than their replies, about."""


@dataclass(frozen=True)
class Fault:
    """What happens to one connection."""

    kind: str
    upward: bool
    """Whether it befalls what the client sends, or what it receives."""
    after_bytes: int
    seconds: float


class FaultyProxy:
    """Listens on a free port. Between :meth:`begin_faults` and :meth:`end_faults` every connection meets a fault."""

    def __init__(self, seed: int, *, most_bytes: int = 800_000, delay_seconds: float = 0.5) -> None:
        self.counts: Counter[str] = Counter()
        """Faults that took effect, by kind and direction."""
        self._faulty = False
        self._random = random.Random(seed)
        self._most_bytes, self._delay = most_bytes, delay_seconds
        self._target: tuple[str, int] | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy")
        self._thread.start()
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
        except asyncio.CancelledError:
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    def _next_fault(self) -> Fault | None:
        if not self._faulty:
            return None
        upward = self._random.random() < 0.5
        return Fault(
            kind=self._random.choice(["cut", "blackhole", "delay", "replay"]),
            upward=upward,
            after_bytes=self._random.randrange(self._most_bytes if upward else self._most_bytes // _REPLY_SHARE),
            seconds=self._delay * self._random.uniform(0.5, 2),
        )

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._target is None:
            return
        fault = self._next_fault()
        up_reader, up_writer = await asyncio.open_connection(*self._target)
        sent: list[bytes] | None = [] if fault is not None and fault.kind == "replay" else None
        ways = [
            asyncio.create_task(self._pipe(reader, up_writer, fault if fault and fault.upward else None, sent)),
            asyncio.create_task(self._pipe(up_reader, writer, fault if fault and not fault.upward else None, None)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            up_writer.close()
        writer.close()
        if sent:
            self.counts["replay"] += 1
            await self._replay(b"".join(sent))

    async def _pipe(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, fault: Fault | None, sent: list[bytes] | None
    ) -> None:
        passed, delays = 0, 0
        while piece := await reader.read(_PIECE):
            if sent is not None:
                sent.append(piece)
            passed += len(piece)
            if fault is not None and passed > fault.after_bytes:
                way = "up" if fault.upward else "down"
                if fault.kind == "cut":
                    self.counts[f"cut {way}"] += 1
                    keep = max(0, len(piece) - (passed - fault.after_bytes))
                    writer.write(piece[:keep])
                    await writer.drain()
                    return
                if fault.kind == "blackhole":
                    self.counts[f"blackhole {way}"] += 1
                    continue
                if fault.kind == "delay":
                    self.counts[f"delay {way}"] += 1
                    await asyncio.sleep(fault.seconds)
                    delays += 1
                    if delays == _DELAYS:
                        return
                if fault.kind == "replay":
                    return  # ends the connection, so that the replay comes behind what was answered on it
            writer.write(piece)
            await writer.drain()

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
