"""The rival "bare C": a ping-pong of the same bytes between processes over the same carrier; nothing is done with them.

``bare/ping_pong.cpp`` says what its processes do. It is compiled when first asked for, into ``.cache`` of the checkout.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from geartrain.ams.values.errors import ConfigError

SOURCE = Path(__file__).with_name("bare") / "ping_pong.cpp"
CACHE = Path(__file__).resolve().parents[1] / ".cache" / "benchmarks"
HEADER_BYTES = 64
"""What a call has beside its ids and rows; count it on both sides of a fair comparison."""

Carrier = Literal["shared_memory", "unix", "tcp"]


class Namespaces(NamedTuple):
    """Two network namespaces with a link between them."""

    host: str
    """Address of the server's end of the link."""
    server: str
    """Name of the server's namespace, as ``ip netns exec`` takes it."""
    client: str
    """Name of the clients' namespace."""


def compile_and_run(
    carrier: Carrier,
    request_bytes: int,
    reply_bytes: int,
    calls: int,
    clients: int = 1,
    *,
    in_flight: int = 1,
    caller_spin_microseconds: int = 50,
    server_spin_microseconds: int = 0,
    between: Namespaces | None = None,
) -> list[list[float]]:
    """Seconds of each call, a list for each client; with several in flight, from one answer to the next.

    Args:
        carrier: "shared_memory" (with futexes), "unix" or "tcp" (blocking sockets).
        request_bytes: of a call, 8 or more, its header included.
        reply_bytes: the same of the answer.
        calls: of each client.
        clients: processes that call; one process serves them all.
        in_flight: requests that a client has under way; 1 in shared memory. Of requests and replies one kind must then
            fit the buffers of a socket.
        caller_spin_microseconds: in shared memory, how long a caller looks for its answer before it sleeps.
        server_spin_microseconds: the same of the server and its next request.
        between: server and clients are in these namespaces; "tcp" only, and root.

    Raises:
        ConfigError: an argument is out of its range, or there is no C++ compiler.
        subprocess.CalledProcessError: the compiler or a process of the ping-pong failed; what it said is on stderr.
    """
    numbers = {
        "calls": calls,
        "clients": clients,
        "in_flight": in_flight,
        "request_bytes": request_bytes,
        "reply_bytes": reply_bytes,
    }
    for name, value in numbers.items():
        least = 8 if name.endswith("bytes") else 1
        if value < least:
            raise ConfigError(f"{name} is {value}; it must be at least {least}")
    if carrier not in get_args(Carrier):
        raise ConfigError(f"carrier is {carrier!r}; there are {', '.join(get_args(Carrier))}")
    if carrier == "shared_memory" and in_flight > 1:
        raise ConfigError(f"in_flight is {in_flight}; in shared memory a client has one call under way")
    if carrier != "tcp" and between is not None:
        raise ConfigError(f"carrier is {carrier!r}; only 'tcp' goes between namespaces")
    words = [carrier, request_bytes, reply_bytes, calls, clients, in_flight]
    words += [caller_spin_microseconds, server_spin_microseconds]
    if between is not None:
        words += [between.host, f"/run/netns/{between.server}", f"/run/netns/{between.client}"]
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


@contextmanager
def two_namespaces() -> Iterator[Namespaces]:
    """Two network namespaces joined by a pair of virtual Ethernet devices; needs root and ``ip``.

    Raises:
        subprocess.CalledProcessError: ``ip`` may not do that here.
    """
    names = Namespaces("10.201.7.1", f"geartrain-{os.getpid()}-a", f"geartrain-{os.getpid()}-b")
    with ExitStack() as ends:
        for name in names[1:]:
            _ip(f"netns add {name}")
            ends.callback(_ip, f"netns delete {name}")
        _ip(f"link add end netns {names.server} type veth peer name end netns {names.client}")
        for name, address in ((names.server, names.host), (names.client, "10.201.7.2")):
            _ip(f"-n {name} address add {address}/24 dev end")
            _ip(f"-n {name} link set end up")
        yield names


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True)


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
