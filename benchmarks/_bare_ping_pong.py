"""The rival "bare C": a ping-pong of the same bytes between processes over the same carrier, without any work on them.

``bare/ping_pong.cpp`` describes its processes. It is compiled on first use, into ``.cache`` of the checkout.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from geartrain.ams.values.errors import ConfigError

SOURCE = Path(__file__).with_name("bare") / "ping_pong.cpp"
CACHE = Path(__file__).resolve().parents[1] / ".cache" / "benchmarks"
HEADER_BYTES = 64
"""Bytes of a call beside its ids and rows; count them on both sides of a fair comparison."""

Carrier = Literal["shared_memory", "tcp"]


def compile_and_run(
    carrier: Carrier,
    request_bytes: int,
    reply_bytes: int,
    calls: int,
    clients: int = 1,
    *,
    caller_spin_microseconds: int = 50,
    server_spin_microseconds: int = 0,
) -> list[list[float]]:
    """Return the seconds of each call, a list for each client.

    Args:
        carrier: "shared_memory" (with futexes) or "tcp" (blocking sockets).
        request_bytes: of a call, at least 8, its header included.
        reply_bytes: of an answer, likewise.
        calls: of each client.
        clients: calling processes; one process serves them all.
        caller_spin_microseconds: in shared memory, how long a caller polls for its answer before it sleeps.
        server_spin_microseconds: how long the server polls for its next request.

    Raises:
        ConfigError: an argument is out of range, or there is no C++ compiler.
        subprocess.CalledProcessError: the compiler or a process of the ping-pong failed; stderr has its message.
    """
    least = {"request_bytes": 8, "reply_bytes": 8, "calls": 1, "clients": 1}
    for (name, lowest), value in zip(least.items(), (request_bytes, reply_bytes, calls, clients), strict=True):
        if value < lowest:
            raise ConfigError(f"{name} is {value}; it must be at least {lowest}")
    if carrier not in get_args(Carrier):
        raise ConfigError(f"carrier is {carrier!r}; there are {', '.join(get_args(Carrier))}")
    words = [carrier, request_bytes, reply_bytes, calls, clients, caller_spin_microseconds, server_spin_microseconds]
    command = [str(_program()), *map(str, words)]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    seconds: defaultdict[int, list[float]] = defaultdict(list)
    for line in printed.splitlines():
        client, nanoseconds = line.split()
        seconds[int(client)].append(int(nanoseconds) / 1e9)
    return [seconds[client] for client in range(clients)]


def calls_per_second(seconds: Sequence[Sequence[float]]) -> float:
    """Return the calls a second that the server answered while all clients of :func:`compile_and_run` called."""
    return sum(map(len, seconds)) / max(map(sum, seconds))


def _program() -> Path:
    """Return the compiled ping-pong; compile it if the cache lacks it for this source."""
    source = SOURCE.read_bytes()
    program = CACHE / f"ping_pong-{hashlib.sha256(source).hexdigest()[:16]}"
    if program.exists():
        return program
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise ConfigError("the rival 'bare C' needs a C++ compiler: install g++, or name yours in CXX")
    CACHE.mkdir(parents=True, exist_ok=True)
    unfinished = program.with_suffix(f".{os.getpid()}")
    subprocess.run([compiler, "-O2", "-std=c++17", str(SOURCE), "-o", str(unfinished)], check=True)
    unfinished.replace(program)
    return program
