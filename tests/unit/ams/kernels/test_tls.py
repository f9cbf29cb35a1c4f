"""Rows by TCP under TLS 1.3, by an offer's secret: who does not know it learns and does nothing, and harms nobody."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from geartrain.ams.kernels import _core
from geartrain.ams.rpc.server.memory import _Allocated
from tests.support import frame_codec
from tests.support.frame_calls import ask, begin, dial, expected, pull, push
from tests.support.tls_client import DATA, HANDSHAKE, KEY_UPDATE, TlsClient
from tests.support.toy_shard import SOON, Shard, until

REFUSED = pytest.raises((OSError, RuntimeError), match=r"TLS|closed the connection|reset|[Bb]roken pipe")


@pytest.fixture
def shard(make: Callable[..., Shard]) -> Shard:
    return make("tls")


def works(shard: Shard) -> bool:
    return bool(ask(shard.connect(), pull("rows", [3]))[0]["rows"] == expected([3]))


def first_words(secret: bytes) -> bytes:
    """What a client of this secret says first."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:
        port = listener.getsockname()[1]
        client = threads.submit(_core.connect_tcp, "127.0.0.1", port, secret, SOON, uses_tls=True)
        there, _ = listener.accept()
        with there:
            words = there.recv(1 << 16)
        with REFUSED:
            client.result()
    return words


def said_back(port: int, *words: bytes) -> bytes:
    """What the shard answers until it ends the connection."""
    answer = b""
    with socket.create_connection(("127.0.0.1", port)) as ours:
        ours.settimeout(SOON)
        with contextlib.suppress(ConnectionError):
            for one in words:
                ours.sendall(one)
            while more := ours.recv(1 << 16):
                answer += more
    return answer


class Relay:
    """Somebody between a client and a shard, who keeps what both say and may change it."""

    def __init__(self, port: int, change: Callable[[bytes, bool], bytes] = lambda data, _: data) -> None:
        self.seen = b""
        self._change = change
        self._stack = ExitStack()
        self._listener = self._stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self._there = self._stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        self.port = self._listener.getsockname()[1]
        self._threads = ThreadPoolExecutor(2)
        self._threads.submit(self._run)

    def _run(self) -> None:
        here = self._stack.enter_context(self._listener.accept()[0])
        self._threads.submit(self._carry, here, self._there, True)
        self._carry(self._there, here, False)

    def _carry(self, here: socket.socket, there: socket.socket, is_of_client: bool) -> None:
        with contextlib.suppress(OSError):
            while data := here.recv(1 << 16):
                self.seen += data
                there.sendall(self._change(data, is_of_client))
        for end in (here, there):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._there.shutdown(socket.SHUT_RDWR)
        self._threads.shutdown()
        self._stack.close()


def test_large_rows_are_exact_both_ways_with_keys_that_change(shard: Shard) -> None:
    ids = range(5_120)  # of 1 KiB each
    for max_records in (1, 50, 1 << 20):
        ours = shard.connect(max_records=max_records)

        def work(_: int, ours: _core.DataConnection = ours) -> None:
            for _ in range(2):
                read, written = ask(ours, pull("rows", ids, 256), push("rows", ids, 256))
                assert read["rows"] == expected(ids, 256) and written["created"] == len(ids)

        with ThreadPoolExecutor(3) as threads:
            list(threads.map(work, range(3)))


def test_keys_change_after_so_many_records(shard: Shard) -> None:
    name, secret, port = shard.server.offer()
    with Relay(port) as relay:
        ours = dial("tls", name, secret, relay.port, max_records=3)
        for _ in range(4):  # and the hello: five records
            ask(ours, pull("rows", [1]))
        assert relay.seen.count(b"\x17\3\3\0\x16") == 1  # as long as a KeyUpdate is, and no other
        until(lambda: relay.seen.count(b"\x17\3\3\0\x16") == 2, ours)


def test_requests_that_come_together_are_all_answered(shard: Shard) -> None:
    """One record may hold several, of which the socket says nothing once it was read."""
    ours = shard.connect()
    held, _ = begin(ours, [pull("held", [1])])
    assert shard.handler.await_held(SOON)
    sent = [begin(ours, [pull("rows", [number])]) for number in range(50)]
    shard.handler.release()
    assert held.wait(SOON)
    for wanted, (call, number) in enumerate(sent):
        assert call.wait(SOON)
        assert frame_codec.parsed_reply(call.reply(), number, [16])[0]["rows"] == expected([wanted])


def test_many_connections(shard: Shard) -> None:
    with ThreadPoolExecutor(8) as threads:
        ours = list(threads.map(lambda _: shard.connect(), range(100)))
        assert shard.server.num_connections == 100
        pulled = list(threads.map(lambda n: ask(ours[n], pull("rows", [n]))[0]["rows"], range(100)))
    assert pulled == [expected([n]) for n in range(100)]
    for one in ours:
        one.close()
    until(lambda: shard.server.num_connections == 1, shard.connect())


def test_a_connection_over_which_nothing_goes_keeps_no_buffers_of_tls(shard: Shard) -> None:
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = _Allocated
    ours = [shard.connect() for _ in range(40)]
    for one in ours:
        ask(one, pull("rows", [1], 256))
    before = library.mallinfo2().uordblks
    for one in ours:
        for _ in range(2):
            ask(one, pull("rows", range(60), 256))
            ask(one, push("rows", range(60), 256))
    # Its client keeps room for the reply of 60 KiB; both ends kept as much once more of what they had sent.
    assert (library.mallinfo2().uordblks - before) / len(ours) < 128 << 10


def test_a_wrong_key_ends_its_connection_alone_and_the_right_one_opens_one(shard: Shard) -> None:
    name, secret, port = shard.server.offer()
    for wrong in (secret[:31] + bytes([secret[31] ^ 1]), bytes(32), secret[::-1]):
        with REFUSED:
            dial("tls", name, wrong, port)
    ours = dial("tls", name, secret, port)  # whoever knows its name alone cannot use it up
    with REFUSED:
        dial("tls", name, secret, port)
    assert ask(ours, pull("rows", [1]))[0]["rows"] == expected([1])
    assert shard.server.num_connections == 1


def test_who_is_refused_is_named_once_a_minute(make: Callable[..., Shard]) -> None:
    words: list[str] = []
    shard = make("tls", warn=words.append)
    name, secret, port = shard.server.offer()
    for _ in range(3):
        with REFUSED:
            dial("tls", name, bytes(32), port)
        with REFUSED:
            dial("tcp", name, secret, port)
    assert works(shard)
    assert len(words) == 1 and "connections for rows refused: 1, the last from 127.0.0.1: TLS: " in words[0]


def test_the_shard_and_the_client_of_plain_text_are_refused(shard: Shard, make: Callable[..., Shard]) -> None:
    name, secret, port = shard.server.offer()
    answer = said_back(port, frame_codec.header(3, 0, 0, 32) + secret, frame_codec.request(1, 0, [pull("rows", [1])]))
    assert len(answer) <= 7 and frame_codec.header(3, 0, 0, 0)[:4] not in answer  # an alert
    with REFUSED:
        dial("tcp", *shard.server.offer())
    plain = make("tcp")
    with REFUSED:
        dial("tls", *plain.server.offer())
    assert dial("tls", name, secret, port) is not None  # what was shown in plain text opened nothing
    assert works(shard) and works(plain)


def test_what_was_recorded_opens_nothing_and_tells_nothing(shard: Shard) -> None:
    name, secret, port = shard.server.offer()
    spied: list[bytes] = []
    with Relay(port, lambda data, is_of_client: (spied.append(data) if is_of_client else None, data)[1]) as relay:
        ours = dial("tls", name, secret, relay.port)
        ids = range(1000)
        assert ask(ours, pull("rows", ids), push("rows", ids))[0]["rows"] == expected(ids)
        seen = relay.seen
    assert secret[:16] in seen  # its name
    for private in (secret[16:], expected(ids)[400:464], b"rows"):
        assert private not in seen
    said_back(port, *spied)
    assert shard.handler.num_writes == 1
    assert works(shard)


@pytest.mark.parametrize("of_client", [True, False])
def test_a_changed_byte_ends_the_connection(shard: Shard, of_client: bool) -> None:
    name, secret, port = shard.server.offer()
    armed = False

    def change(data: bytes, is_of_client: bool) -> bytes:
        if not armed or is_of_client is not of_client:
            return data
        return data[:-1] + bytes([data[-1] ^ 1])

    with Relay(port, change) as relay:
        ours = dial("tls", name, secret, relay.port)
        ask(ours, pull("rows", [1]))
        armed = True
        with pytest.raises(_core.ConnectionLost):
            ask(ours, push("rows", [1]))
    assert shard.handler.num_writes == (0 if of_client else 1)
    assert works(shard)


def test_a_request_in_one_record_with_the_hello_is_answered(shard: Shard) -> None:
    """The greeter reads it, of which the server's thread is to know."""
    with TlsClient(shard.server) as them:
        them.send(DATA, them.hello + frame_codec.request(1, 10.0, [pull("rows", [3])]))
        assert len(them.socket.recv(86, socket.MSG_WAITALL)) == 86
        assert them.socket.recv(1)


def test_who_breaks_a_message_of_tls_off_ends_its_connection_alone(shard: Shard) -> None:
    ours = shard.connect()
    with TlsClient(shard.server) as them:
        them.send(DATA, them.hello)
        them.send(DATA, frame_codec.request(1, 10.0, [push("later", [3])]))
        until(lambda: shard.handler.num_writes == 1, ours)
        them.send(HANDSHAKE, KEY_UPDATE[:4])
        ask(ours, pull("rows", [1]))
        shard.handler.answer_later()
        assert ask(ours, pull("rows", [1]))[0]["rows"] == expected([1])
        until(lambda: shard.server.num_connections == 1, ours)


def test_who_changes_keys_without_end_keeps_nobody_waiting(shard: Shard) -> None:
    ours, pulled = shard.connect(), 0
    with TlsClient(shard.server) as them, ThreadPoolExecutor(2) as threads:
        them.send(DATA, them.hello)
        assert len(them.socket.recv(86, socket.MSG_WAITALL)) == 86
        flood = b"".join(them.key_update() for _ in range(30_000))
        flood += them.record(DATA, frame_codec.request(1, 10.0, [pull("rows", [3])]))
        _held = begin(ours, [pull("held", [1])])
        assert shard.handler.await_held(SOON)
        threads.submit(them.socket.sendall, flood)
        time.sleep(0.2)  # as much comes as the system takes
        answered = threads.submit(them.socket.recv, 1)
        shard.handler.release()
        while not answered.done():
            ask(ours, pull("rows", [1]))
            pulled += 1
    assert answered.result() and pulled >= 4  # of some seven reads at the least: between messages of TLS alone


def test_half_handshakes_are_let_go_of_in_time_and_keep_nobody_away(make: Callable[..., Shard]) -> None:
    shard = make("tls", greeting_seconds=60.0)
    words = [first_words(shard.server.offer()[1]) for _ in range(2)]
    with ExitStack() as stack:
        for number in range(200):
            stalled = stack.enter_context(socket.create_connection(("127.0.0.1", shard.server.offer()[2])))
            stalled.sendall(words[number % 2][: None if number % 3 else 100])
        assert works(shard)
        assert shard.server.num_connections <= 1
    quick = make("tls", greeting_seconds=0.1)
    hello = first_words(quick.server.offer()[1])
    for cut in (1, len(hello) // 2, len(hello)):
        said_back(quick.server.offer()[2], hello[:cut])  # until the shard ends it
    assert works(make("tls"))


def test_damaged_handshakes_harm_nobody(shard: Shard) -> None:
    chance = random.Random(5)
    _, secret, port = shard.server.offer()
    hello = first_words(secret)
    ours = shard.connect()
    for _ in range(300):
        damaged = bytearray(hello)
        for _ in range(chance.randrange(1, 4)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(damaged[: chance.randrange(1, len(damaged) + 1)])
    assert ask(ours, pull("rows", [1]))[0]["rows"] == expected([1])
    assert works(shard) and shard.server.num_connections <= 2


def test_a_shard_that_stalls_in_the_handshake_is_waited_for_as_long_as_was_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(RuntimeError, match="does not answer"):
        _core.connect_tcp("127.0.0.1", listener.getsockname()[1], bytes(32), 0.05, uses_tls=True)


CALLER = """
import ctypes, sys
from geartrain.ams.kernels import _core
try:
    _core.connect_tcp("127.0.0.1", int(sys.argv[1]), bytes(32), 20.0, uses_tls=True)
except RuntimeError as error:
    print(error)
print(ctypes.CDLL("libcrypto.so.3").ERR_peek_error())
"""


def test_who_is_told_nonsense_by_one_who_has_gone_says_so_and_leaves_no_error_to_others() -> None:
    """Those of a thread are in one queue: Python's own connections under TLS would fail for what is left there."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        command = [sys.executable, "-c", CALLER, str(listener.getsockname()[1])]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as caller:
            there, _ = listener.accept()
            with there:
                there.recv(1 << 16)
                caller.send_signal(signal.SIGSTOP)
                os.waitpid(caller.pid, os.WUNTRACED)
                there.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                there.sendall(b"\x16\3\3\0\5hello")
                time.sleep(0.1)
            time.sleep(0.1)  # what the system sends for us arrives before the caller goes on
            caller.send_signal(signal.SIGCONT)
            assert caller.communicate(timeout=60)[0] == "TLS: unexpected message\n0\n"


def test_without_openssl_the_error_names_it(tmp_path: Path) -> None:
    (tmp_path / "libssl.so.3").write_bytes(b"no library")
    script = "from geartrain.ams.kernels import _core\n_core.load_tls()"
    environ: dict[str, Any] = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=60)
    assert "ConfigError: OpenSSL 3 of the system" in done.stderr and "apt install libssl3" in done.stderr
