"""Names of hosts that cannot be resolved at first: calls of ours do not wait until gRPC asks again."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from geartrain.ams.rpc.carrier import ConnectionRefused
from geartrain.ams.rpc.channel import channel_options
from geartrain.ams.rpc.client import data_plane
from geartrain.ams.rpc.client.data_plane import DataPlane
from geartrain.ams.rpc.credentials import Credentials
from geartrain.ams.values.shard_messages import DataPlaneOffer

NO_SUCH_NAME = 3


class Resolver:
    """Answers questions for names over UDP: that there is no such one until it knows, then 127.0.0.1."""

    def __init__(self) -> None:
        self.knows = False
        self.refusals = 0
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._answer, daemon=True).start()

    def _answer(self) -> None:
        while True:
            try:
                question, asker = self._socket.recvfrom(512)
            except OSError:
                return
            end = question.index(0, 12) + 5  # of the name, its type and class; what follows are options
            is_of_address = question[end - 4 : end - 2] == b"\0\1"  # not of IPv6
            code, answers = (0, int(is_of_address)) if self.knows else (NO_SUCH_NAME, 0)
            self.refusals += not self.knows
            head = question[:2] + bytes([0x81, 0x80 | code, 0, 1, 0, answers, 0, 0, 0, 0])
            address = b"\xc0\x0c\0\1\0\1\0\0\0\0\0\4\x7f\0\0\1" if answers else b""
            self._socket.sendto(head + question[12:end] + address, asker)

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def resolver() -> Iterator[Resolver]:
    made = Resolver()
    yield made
    made.close()


@contextmanager
def echoing() -> Iterator[int]:
    """The port of a server whose method returns what it is given."""
    from concurrent.futures import ThreadPoolExecutor

    server = grpc.server(ThreadPoolExecutor(2))
    same = grpc.unary_unary_rpc_method_handler(lambda data, _: data)
    each = grpc.unary_stream_rpc_method_handler(lambda data, _: iter([data]))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", {"Same": same, "Each": each}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield port
    server.stop(0)


WAYS: dict[str, Callable[[Any], bytes]] = {
    "a call": lambda channel: channel.unary_unary("/test/Same")(b"x", timeout=5),
    "one in the background": lambda channel: channel.unary_unary("/test/Same").future(b"x", timeout=5).result(),
    "a stream": lambda channel: next(iter(channel.unary_stream("/test/Each")(b"x", timeout=5))),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_name_that_is_known_at_last_is_called_within_two_seconds(resolver: Resolver, way: str) -> None:
    """gRPC itself asks at 0, 1, 2.6, 5.2, 9.3 and 16 seconds, and at last every two minutes."""
    with echoing() as port:
        target = f"dns://127.0.0.1:{resolver.port}/shard-0.test:{port}"
        with Credentials.mine("shard-0.test:1").channel(target, channel_options(1 << 20)) as channel:
            begun = time.monotonic()
            while time.monotonic() - begun < 5.5:
                with pytest.raises(grpc.RpcError):
                    WAYS[way](channel)
                time.sleep(0.1)
            assert resolver.refusals < 60  # not for every call
            resolver.knows, begun = True, time.monotonic()
            while True:
                try:
                    assert WAYS[way](channel) == b"x"
                    break
                except grpc.RpcError:
                    assert time.monotonic() - begun < 2.0
                    time.sleep(0.05)


def test_the_port_for_rows_of_a_name_that_fails_to_resolve_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    offer = DataPlaneOffer(port=9, secret=bytes(32), socket="", uses_tls=False, reason="")
    plane = DataPlane("no-such-host.invalid:7000", lambda _: offer, shares_memory=False)
    with pytest.raises(ConnectionRefused, match="the name of the host cannot be resolved"):  # a caller repeats it
        plane.connect()
    made = object()
    monkeypatch.setattr(data_plane, "connect_tcp", lambda *_, **__: made)
    assert plane._made(1.0) is made
