"""The thread that looks for silent peers: what it holds of the calls that wait."""

from __future__ import annotations

import threading
import time
import weakref
from functools import partial
from types import SimpleNamespace

import pytest

from geartrain.ams.rpc.client import silence
from geartrain.ams.rpc.client.silence import Peer, SilenceWatch


def test_a_call_that_has_ended_is_not_held_until_the_next_look(monkeypatch: pytest.MonkeyPatch) -> None:
    class Model:
        pass

    def no_peers(_: Model) -> list[Peer]:
        return []

    look, looked, end = threading.Event(), threading.Event(), threading.Event()

    def sleep(_: float) -> None:
        if look.is_set():
            looked.set()
            end.wait(10)
        look.wait(10)

    monkeypatch.setattr(silence, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    monkeypatch.setattr(silence, "_looker", None)
    monkeypatch.setattr(silence, "_waits", {})
    model = Model()
    gone = weakref.ref(model)
    with SilenceWatch().over(partial(no_peers, model), "up to 1 s"):
        look.set()
        assert looked.wait(10)
    looker = silence._looker
    del model
    try:
        assert gone() is None
    finally:
        end.set()
        assert looker is not None
        looker.join(10)
