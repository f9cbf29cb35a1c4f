"""Load generator for a service over kept connections: answers a second, or the time of each.

    python _asking.py HOST:PORT PATH FILE... < {"connections": 32, "seconds": 4, "rate": null}

With a ``rate`` questions leave at their times, whether or not others are answered: a service that falls behind shows in
the times, which count from when a question was due. Prints {"rate": ..., "p50": ..., "p99": ..., "failed": ...}.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any


class Connection(asyncio.Protocol):
    """Connection that sends one question after the other."""

    def __init__(self, asking: Asking) -> None:
        self.asking, self.due = asking, 0.0
        self.buffer = b""
        self.left = -1

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.asking.free(self)

    def ask(self, request: bytes, due: float) -> None:
        self.due = due
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        if self.left < 0:
            end = self.buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            head = self.buffer[:end].lower()
            at = head.index(b"content-length:") + 15
            self.left = end + 4 + int(head[at:].split(b"\r\n", 1)[0])
        if len(self.buffer) >= self.left:
            is_good = self.buffer.startswith(b"HTTP/1.1 200")
            self.buffer, self.left = b"", -1
            self.asking.answered(self, is_good)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self.asking.lost += not self.asking.is_over


class Asking:
    """Questions over several connections, for a number of seconds."""

    def __init__(self, requests: list[bytes], *, connections: int, seconds: float, rate: float | None) -> None:
        self.requests, self.connections, self.seconds, self.rate = requests, connections, seconds, rate
        self.times: list[float] = []
        self.failed = self.lost = self.number = 0
        self.is_over = False
        self.idle: deque[Connection] = deque()
        self.waiting: deque[float] = deque()

    async def run(self, host: str, port: int) -> dict[str, float]:
        loop = asyncio.get_running_loop()
        self.is_begun = False
        opened = [await loop.create_connection(lambda: Connection(self), host, port) for _ in range(self.connections)]
        begin = time.perf_counter()
        self.is_begun, self.end = True, begin + self.seconds
        if self.rate is None:
            while self.idle:
                self.next(self.idle.popleft(), time.perf_counter())
            await asyncio.sleep(self.seconds)
        else:
            due, number = begin, 0
            while due < self.end:
                now = time.perf_counter()
                while due <= now:
                    if self.idle:
                        self.next(self.idle.popleft(), due)
                    else:
                        self.waiting.append(due)
                    number += 1
                    due = begin + number / self.rate
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
        self.is_over = True
        taken = time.perf_counter() - begin
        for transport, _ in opened:
            transport.abort()
        times = sorted(self.times)
        return {
            "rate": len(times) / taken,
            "p50": times[len(times) // 2],
            "p99": times[int(len(times) * 0.99)],
            "failed": self.failed + self.lost,
        }

    def next(self, connection: Connection, due: float) -> None:
        self.number += 1
        connection.ask(self.requests[self.number % len(self.requests)], due)

    def free(self, connection: Connection) -> None:
        if self.waiting:
            self.next(connection, self.waiting.popleft())
        elif self.rate is None and self.is_begun and not self.is_over:
            self.next(connection, time.perf_counter())
        else:
            self.idle.append(connection)

    def answered(self, connection: Connection, is_good: bool) -> None:
        if self.is_over:
            return
        self.failed += not is_good
        if is_good:
            self.times.append(time.perf_counter() - connection.due)
        self.free(connection)


def main() -> None:
    """Send questions as stdin says."""
    gc.disable()
    address, path, *files = sys.argv[1:]
    host, _, port = address.rpartition(":")
    bodies = [Path(file).read_bytes() for file in files]
    kind = "application/json" if files[0].endswith(".json") else "image/png"
    head = f"POST {path} HTTP/1.1\r\nHost: {address}\r\nContent-Type: {kind}\r\nContent-Length: "
    requests = [head.encode() + f"{len(body)}\r\n\r\n".encode() + body for body in bodies]
    try:
        import uvloop

        run = uvloop.run
    except ImportError:
        run = asyncio.run
    print(json.dumps(run(Asking(requests, **json.load(sys.stdin)).run(host, int(port)))))


if __name__ == "__main__":
    main()
