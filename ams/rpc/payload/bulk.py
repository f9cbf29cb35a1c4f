"""Bulk connections: plain TCP beside gRPC, over which nothing but the rows of calls travels.

A call stays a gRPC message; its rows go straight from the memory of one process to that of the other, where gRPC for
Python would copy them several times and hold the interpreter lock meanwhile. The shard has a port for such
connections and a client learns it, with a secret, by a call. Who cannot connect uses messages. Nobody waits for a
connection: it is made on a thread.

Nothing is mixed up: a connection carries the rows of one call at a time, whose number (``use``) goes before them on it.
After anything but success it is closed, so that no byte of one call is ever read as another's; a shard that did not
get all rows of a write has not begun it. A forked child has none of its parent's.
"""

from __future__ import annotations

import logging
import math
import os
import resource
import secrets
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from geartrain.ams.values.errors import BulkConnectionLost
from geartrain.ams.values.text import counted

logger = logging.getLogger(__name__)

MIN_BULK_BYTES = 512 << 10
"""Smaller payloads travel in messages, which costs no more."""
MOST_POOL_CONNECTIONS = 8
"""Of one client to one shard; the rows of further calls at the same time travel in messages."""
MOST_HELD = 1024
"""Connections that a server process takes; a quarter of the descriptors that it may have, if that is less."""
PAUSE_SECONDS = 600.0
"""After a refusal none is asked for so long."""
DISTRUST_SECONDS = 30.0
"""After a call without an answer there are none for so long."""
CONNECT_SECONDS = 5.0
"""To connect and be greeted; a secret that was not used for so long is void."""
SILENCE_SECONDS = 30.0
"""A client that neither sends nor takes rows for so long is given up by the shard, whatever its call may take."""
_SLOWEST_BYTES_PER_SECOND = 1 << 20
_LOST_SECONDS = 30.0
"""When the last attempt began so long ago, none is under way."""
_MOST_GREETINGS = 64
"""At the same time: strangers may connect and say nothing."""
_SECRET_BYTES = 32
_MORE = getattr(socket, "MSG_MORE", 0)
_GREETING = b"geartrain bulk 1"
_HEAD = struct.Struct("<QQ")
"""Goes before the rows of a call: its use of the connection, and their bytes."""

_ALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 30_000}
"""What finds out in a minute that the way to the other end is gone, and keeps it open where idle ones are cut."""
_TIMEVAL = struct.Struct("ll")

Array = npt.NDArray[Any]


class BulkConnection:
    """Either end of a connection."""

    def __init__(self, number: int, connected: socket.socket) -> None:
        self.number = number
        """What the shard calls it."""
        self.num_uses = 0
        """Calls that it was taken for."""
        self._socket = connected
        self._lock = threading.Lock()
        self._is_closed = False
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _ALIVE.items():
            if hasattr(socket, name):
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        connected.settimeout(None)

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self._is_closed

    def send(self, use: int, rows: Array) -> None:
        """Send the rows of a call, C-contiguous. Raises BulkConnectionLost; the connection is closed then."""
        data = rows.reshape(-1).view(np.uint8).data
        with self._closed_unless_done("the rows could not be sent"):
            self._socket.sendall(_HEAD.pack(use, len(data)), _MORE)
            self._socket.sendall(data)

    def receive(self, use: int, rows: Array, seconds: float | None = None) -> None:
        """Fill ``rows``, C-contiguous, with those of a call.

        Raises BulkConnectionLost if they do not all come (within ``seconds``: what the network swallows has no other
        end), or others do; the connection is closed then, and what ``rows`` holds is undefined.
        """
        deadline = math.inf if seconds is None else time.monotonic() + seconds
        data = rows.reshape(-1).view(np.uint8).data
        head = bytearray(_HEAD.size)
        with self._closed_unless_done("the rows did not arrive"):
            self._fill(memoryview(head), deadline)
            found = _HEAD.unpack(head)
            if found != (use, len(data)):
                raise OSError(f"use {found[0]} with {found[1]} bytes came; use {use} with {len(data)} was due")
            self._fill(data, deadline)

    def abort(self) -> None:
        """Break off what another thread does with it, now and ever after. The connection stays open, but useless."""
        with self._lock, suppress(OSError):
            if not self._is_closed:
                self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End it. Not while another thread sends or receives, for which there is :meth:`abort`. Idempotent."""
        self.abort()
        self.leave()

    def leave(self) -> None:
        """Close this process's descriptor of it, no more. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._socket.close()

    @property
    def is_wanted(self) -> bool:
        """Whether the other end is still there, as far as can be seen. Only while no call uses the connection."""
        with self._lock:
            if self._is_closed:
                return False
            try:
                return bool(self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
            except BlockingIOError:
                return True
            except OSError:
                return False

    @property
    def is_clean(self) -> bool:
        """Whether the other end is there and has sent nothing that was not read. As :attr:`is_wanted`."""
        with self._lock:
            if self._is_closed:
                return False
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            return not poll.poll(0)

    def _fill(self, data: memoryview, deadline: float) -> None:
        while data:
            left = max(deadline - time.monotonic(), 0.001) if deadline < math.inf else 0  # 0 means for ever
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(*_seconds(left)))
            try:
                received = self._socket.recv_into(data, 0, socket.MSG_WAITALL)
            except BlockingIOError:
                raise OSError("not in time") from None
            if received == 0:
                raise OSError("the connection ended")
            data = data[received:]

    @contextmanager
    def _closed_unless_done(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            self.close()
            raise BulkConnectionLost(f"{what}: {exc}") from exc
        except BaseException:
            self.close()
            raise


def _seconds(seconds: float) -> tuple[int, int]:
    """Whole seconds and microseconds."""
    return int(seconds), int(seconds % 1 * 1e6)


def seconds_to_receive(num_bytes: int) -> float:
    """How long a shard waits for the rows of a call: no caller holds one of its threads for ever."""
    return SILENCE_SECONDS + num_bytes / _SLOWEST_BYTES_PER_SECOND


def connect(address: tuple[str, int], number: int, secret: bytes) -> BulkConnection:
    """Connect to a shard that has offered ``number`` under ``secret``. Raises OSError."""
    connected = socket.create_connection(address, CONNECT_SECONDS)
    try:
        connected.sendall(secret)
        greeting = _received(connected, len(_GREETING))
        if greeting != _GREETING:
            raise OSError(f"what listens at port {address[1]} does not take bulk connections")
        return BulkConnection(number, connected)
    except BaseException:
        connected.close()
        raise


def _received(connected: socket.socket, num_bytes: int) -> bytes:
    """Receive exactly so many bytes within CONNECT_SECONDS, or fewer if the connection ends. Raises OSError."""
    data = b""
    deadline = time.monotonic() + CONNECT_SECONDS
    while len(data) < num_bytes:
        connected.settimeout(max(0.001, deadline - time.monotonic()))
        piece = connected.recv(num_bytes - len(data))
        if not piece:
            break
        data += piece
    return data


class NotOffered(Exception):
    """The shard gives no bulk connection; says why."""


def _in_background(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="geartrain-bulk", daemon=True).start()


class BulkPool:
    """The bulk connections of a client to one shard. Thread-safe. As many as calls that were under way at once."""

    def __init__(
        self,
        make: Callable[[], BulkConnection],
        *,
        clock: Callable[[], float] = time.monotonic,
        begin: Callable[[Callable[[], None]], None] = _in_background,
    ) -> None:
        """``make`` connects; whatever it raises means that there are no bulk connections for a while.

        ``begin`` has that done: by default on a thread, for no call is to wait for it, and Ctrl-C, which may break off
        anything on the main thread, is not to leave the gRPC connection in disorder.
        """
        self._make = make
        self._begin = begin
        self._clock = clock
        self._lock = threading.Lock()
        self._free: list[BulkConnection] = []
        self._made: weakref.WeakSet[BulkConnection] = weakref.WeakSet()
        """Free and in use."""
        self._making_since = -math.inf
        self._off_until = -math.inf
        _POOLS.add(self)

    def take(self, num_bytes: int) -> BulkConnection | None:
        """Return a free connection for one call; None: there is none yet, or it is not worth it.

        Give it back when the call has succeeded; else close it.
        """
        if num_bytes < MIN_BULK_BYTES:
            return None
        with self._lock:
            while self._free:
                connection = self._free.pop()
                if connection.is_clean:  # a shard sends nothing that was not asked for
                    connection.num_uses += 1
                    return connection
                connection.close()
            now = self._clock()
            if now < self._off_until or now - self._making_since < _LOST_SECONDS:
                return None
            if self.num_connections >= MOST_POOL_CONNECTIONS:
                return None
            self._making_since = now
        try:
            self._begin(self._add)
        except RuntimeError as exc:  # no thread is to be had
            self._refused(str(exc))
        return None

    def give_back(self, connection: BulkConnection) -> None:
        """Take back a connection whose call has succeeded."""
        with self._lock:
            if self._clock() < self._off_until:
                connection.close()
            else:
                self._free.append(connection)

    def distrust(self) -> None:
        """A call had no answer, or lost its rows: the way there may let gRPC pass and nothing else.

        The other connections may be as dead as its own, and each would cost a call its time-out: so they end, and for
        a while there are none.
        """
        with self._lock:
            self._turn_off(DISTRUST_SECONDS)

    def close(self) -> None:
        """End all connections but those in use, which end with their calls. Idempotent."""
        with self._lock:
            self._turn_off(math.inf)

    def begin_anew(self) -> None:
        """In a forked child: leave all connections to the parent."""
        self._lock = threading.Lock()
        for connection in list(self._made):
            connection._lock = threading.Lock()
            connection.leave()
        self._free.clear()
        self._off_until = math.inf

    @property
    def num_connections(self) -> int:
        """Connections that the client has, in use or not."""
        return sum(not connection.is_closed for connection in self._made)

    def _add(self) -> None:
        try:
            connection = self._make()
        except Exception as exc:
            self._refused(str(exc))
            return
        with self._lock:
            self._made.add(connection)
            self._making_since = -math.inf
        self.give_back(connection)

    def _refused(self, reason: str) -> None:
        with self._lock:
            logger.debug("rows travel in messages: %s", reason)
            self._turn_off(PAUSE_SECONDS)
            self._making_since = -math.inf

    def _turn_off(self, seconds: float) -> None:
        self._off_until = max(self._off_until, self._clock() + seconds)
        for connection in self._free:
            connection.close()
        self._free.clear()


_POOLS: weakref.WeakSet[BulkPool] = weakref.WeakSet()


def _begin_anew_in_child() -> None:
    for pool in list(_POOLS):
        pool.begin_anew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew_in_child)


class _Taken:
    """A client's connection, as the shard has it."""

    def __init__(self, connection: BulkConnection) -> None:
        self.connection = connection
        self.last_use = 0
        self.is_busy = False


def _most_held() -> int:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_HELD if limit == resource.RLIM_INFINITY else min(MOST_HELD, limit // 4)


class BulkPort:
    """The port of a server process for bulk connections, and those it has taken. Thread-safe.

    Listens from the first offer on.
    """

    def __init__(self, host: str, port: int = 0, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._address = host, port
        self._clock = clock
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None
        self._is_closed = False
        self._next = 1
        self._offers: dict[bytes, tuple[int, float]] = {}
        """Number and end of each offer, by its secret."""
        self._taken: dict[int, _Taken] = {}
        self._greetings = threading.Semaphore(_MOST_GREETINGS)

    def __len__(self) -> int:
        return len(self._taken)

    def offer(self) -> tuple[int, int, bytes]:
        """Return port, number and secret of a connection that a client may make now. Raises NotOffered."""
        self.forget_closed()
        with self._lock:
            if self._is_closed:
                raise NotOffered("this server is ending")
            self._offers = {key: offer for key, offer in self._offers.items() if offer[1] > self._clock()}
            most = _most_held()
            if len(self._taken) + len(self._offers) >= most:
                raise NotOffered(f"{counted(most, 'bulk connection')} are taken already, the most of this process")
            if self._listener is None:
                self._listen()
            assert self._listener is not None
            secret, number = secrets.token_bytes(_SECRET_BYTES), self._next
            self._next += 1
            self._offers[secret] = number, self._clock() + CONNECT_SECONDS
            return self._listener.getsockname()[1], number, secret

    @contextmanager
    def claimed(self, number: int, use: int, at_end: Callable[[Callable[[], None]], bool]) -> Iterator[BulkConnection]:
        """A connection for one call; it is closed if the body fails.

        ``at_end`` is told what breaks the connection off when the caller stops waiting; False: it has already.
        Raises BulkConnectionLost if there is no such connection, another call has it, or one of this number or a later
        one has had it.
        """
        with self._lock:
            taken = self._taken.get(number)
            if taken is None or taken.connection.is_closed:
                raise BulkConnectionLost(f"bulk connection {number} is not open here; send the bytes in the message")
            if taken.is_busy or use <= taken.last_use:
                raise BulkConnectionLost(
                    f"use {use} of bulk connection {number} comes after use {taken.last_use}, or while that goes on: "
                    "the call arrived twice, or too late"
                )
            taken.is_busy, taken.last_use = True, use
        try:
            if not at_end(lambda: self._break_off(taken, use)):
                raise BulkConnectionLost("the caller stopped waiting")
            yield taken.connection
        except BaseException:
            taken.connection.close()
            raise
        finally:
            with self._lock:
                taken.is_busy = False
                if self._is_closed:
                    taken.connection.close()

    def forget_closed(self) -> None:
        """Let go of connections whose clients have closed them. Costs a system call for each that is idle."""
        with self._lock:
            idle = [taken for taken in self._taken.values() if not taken.is_busy]
            for taken in idle:
                if not taken.connection.is_wanted:
                    taken.connection.close()
                    del self._taken[taken.connection.number]

    def close(self) -> None:
        """Stop listening, and end all connections. Idempotent."""
        with self._lock:
            self._is_closed = True
            if self._listener is not None:
                with suppress(OSError):
                    self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts, which closes it
            for taken in self._taken.values():
                if taken.is_busy:
                    taken.connection.abort()
                else:
                    taken.connection.close()

    def _break_off(self, taken: _Taken, use: int) -> None:
        with self._lock:
            if taken.is_busy and taken.last_use == use:
                taken.connection.abort()

    def _listen(self) -> None:
        try:
            family = socket.getaddrinfo(*self._address, type=socket.SOCK_STREAM)[0][0]
            both = self._address[0] == "::" and socket.has_dualstack_ipv6()  # as gRPC listens
            self._listener = socket.create_server(self._address, family=family, dualstack_ipv6=both)
            threading.Thread(target=self._accept, args=(self._listener,), name="bulk", daemon=True).start()
        except (OSError, RuntimeError) as exc:
            if self._listener is not None:
                self._listener.close()
                self._listener = None
            raise NotOffered(f"cannot listen for bulk connections on {self._address}: {exc}") from exc

    def _accept(self, listener: socket.socket) -> None:
        while True:
            self._greetings.acquire()  # each ends in seconds; who comes meanwhile waits
            try:
                connected, _ = listener.accept()
            except OSError:
                self._greetings.release()
                if self._is_closed:
                    listener.close()
                    return
                time.sleep(0.1)  # no descriptor left: others may close theirs
                continue
            try:
                threading.Thread(target=self._greet, args=(connected,), name="bulk-greeting", daemon=True).start()
            except RuntimeError:  # no thread is to be had
                self._greetings.release()
                connected.close()

    def _greet(self, connected: socket.socket) -> None:
        """Take a connection, if it shows the secret of an offer."""
        try:
            secret = _received(connected, _SECRET_BYTES)
            with self._lock:
                number, end = self._offers.pop(secret, (0, -math.inf))
                if self._clock() >= end or self._is_closed:
                    raise OSError("it does not show the secret of an offer")
                connected.sendall(_GREETING)  # fits the socket's buffer, so it does not block
                connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(*_seconds(SILENCE_SECONDS)))
                self._taken[number] = _Taken(BulkConnection(number, connected))
        except OSError as exc:
            connected.close()
            logger.debug("a bulk connection did not come about: %s", exc)
        finally:
            self._greetings.release()
