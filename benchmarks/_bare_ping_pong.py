"""The rival "bare C": a ping-pong of the same bytes between processes over the same carrier; nothing is done with them.

``bare/ping_pong.cpp`` says what its processes do. It is compiled when first asked for, into ``.cache`` of the checkout.
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
"""What a call has beside its ids and rows; count it on both sides of a fair comparison."""

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
    """Seconds of each call, a list for each client.

    Args:
        carrier: "shared_memory" (with futexes) or "tcp" (blocking sockets).
        request_bytes: of a call, 8 or more, its header included.
        reply_bytes: the same of the answer.
        calls: of each client.
        clients: processes that call; one process serves them all.
        caller_spin_microseconds: in shared memory, how long a caller looks for its answer before it sleeps.
        server_spin_microseconds: the same of the server and its next request.

    Raises:
        ConfigError: an argument is out of its range, or there is no C++ compiler.
        subprocess.CalledProcessError: the compiler or a process of the ping-pong failed; what it said is on stderr.
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
    """Calls a second that the server answered while all clients of :func:`compile_and_run` called."""
    return sum(map(len, seconds)) / max(map(sum, seconds))


def _program() -> Path:
    """The compiled ping-pong; compiled first, where the cache has none of this source."""
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
