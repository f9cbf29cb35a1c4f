"""The user at the other end of a connection within this machine."""

from __future__ import annotations

import os
import socket

import pytest

from geartrain.ams.rpc.server.peer_user import user_of_peer


@pytest.mark.parametrize(
    ("family", "host", "name"),
    [
        (socket.AF_INET, "127.0.0.1", "ipv4:127.0.0.1"),
        (socket.AF_INET6, "::1", "ipv6:%5B::1%5D"),
        (socket.AF_INET6, "::ffff:127.0.0.1", "ipv4:127.0.0.1"),
    ],
)
def test_the_user_is_who_made_the_socket(family: socket.AddressFamily, host: str, name: str) -> None:
    try:
        listener = socket.create_server(
            (host.removeprefix("::ffff:"), 0), family=socket.AF_INET if "." in host else family
        )
    except OSError as exc:
        pytest.skip(f"{host}: {exc}")
    with listener, socket.socket(family) as client:
        assert user_of_peer(f"{name}:{listener.getsockname()[1]}") is None, "it only listens"
        client.connect((host, listener.getsockname()[1]))
        port = client.getsockname()[1]
        assert user_of_peer(f"{name}:{port}") == os.geteuid()
    assert user_of_peer(f"{name}:{port}") is None, "it has ended"


@pytest.mark.parametrize("peer", ["unix:/run/x", "unix:", "", "ipv4:10.0.0.1:x", "ipv4:nobody:1"])
def test_what_is_no_address_of_this_machine_is_nobodys(peer: str) -> None:
    assert user_of_peer(peer) is None
