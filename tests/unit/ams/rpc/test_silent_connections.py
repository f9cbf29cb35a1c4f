"""Who connects and makes no call is told from who has called, whenever that is; to look takes little time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from geartrain.ams.rpc.server import silent_connections
from geartrain.ams.rpc.server.silent_connections import SilentConnections

PEER = "ipv4:10.0.0.1:5000"


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> SilentConnections:
    monkeypatch.setattr(silent_connections, "_POLL_SECONDS", 0.0)
    monkeypatch.setattr(silent_connections, "_LOOK_SHARE", float("inf"))
    monkeypatch.setattr(silent_connections, "_GONE_SECONDS", 3600.0)
    return SilentConnections()


def sees(monkeypatch: pytest.MonkeyPatch, look: Callable[[int], set[str]]) -> None:
    monkeypatch.setattr(silent_connections, "_connected", look)


@pytest.mark.parametrize("is_there", [False, True])
def test_who_calls_while_it_is_looked_is_no_stranger(
    theirs: SilentConnections, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    def look(_: int) -> set[str]:
        theirs.called(PEER)
        return {PEER} if is_there else set()

    sees(monkeypatch, lambda _: {PEER} if is_there else set())
    theirs.begun()
    sees(monkeypatch, look)
    theirs.begun()
    sees(monkeypatch, lambda _: {PEER})
    theirs.begun()
    sees(monkeypatch, lambda _: set())
    theirs.begun()
    assert not theirs._gone and not theirs._seen
    theirs.begun()
    assert not theirs._called


def test_no_handshake_waits_while_another_looks(theirs: SilentConnections, monkeypatch: pytest.MonkeyPatch) -> None:
    is_looking, goes_on, looks = threading.Event(), threading.Event(), []

    def look(_: int) -> set[str]:
        looks.append(1)
        is_looking.set()
        assert goes_on.wait(20)
        return set()

    sees(monkeypatch, look)
    others = [threading.Thread(target=theirs.begun, daemon=True) for _ in range(8)]
    others[0].start()
    assert is_looking.wait(20)
    for other in others[1:]:
        other.start()
    for other in others[1:]:
        other.join(20)
        assert not other.is_alive()
    goes_on.set()
    others[0].join(20)
    assert len(looks) == 1


def test_where_much_is_connected_it_is_looked_less_often(
    theirs: SilentConnections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(silent_connections, "_LOOK_SHARE", 1e-6)
    looks = []
    sees(monkeypatch, lambda _: looks.append(time.sleep(0.01)) or set())
    for _ in range(3):
        theirs.begun()
    assert len(looks) == 1
