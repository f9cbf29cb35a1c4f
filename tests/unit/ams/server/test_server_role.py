"""End of the role of a server."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from geartrain.ams.server.role import ShardServer


def test_all_shards_end_within_one_grace() -> None:
    all_end = threading.Barrier(3)  # none returns before the others were told, too
    graces = []

    def close(grace_seconds: float) -> None:
        all_end.wait(timeout=10)
        graces.append(grace_seconds)

    role: Any = object.__new__(ShardServer)
    role._started, role._stopping, role._ended = False, threading.Event(), threading.Event()
    role._held = [SimpleNamespace(shard=None, close=close) for _ in range(3)]
    role._scheduler = SimpleNamespace(close=lambda: None)
    role.stop(5.0)
    assert graces == [5.0] * 3 and role.wait(0)
