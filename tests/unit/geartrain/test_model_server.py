"""Start and end of the server of models."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("starlette")

from geartrain.ams.values.config import ClusterConfig, ServeConfig
from geartrain.launch.serving import server as module
from geartrain.launch.serving import workers
from geartrain.serving.http.ports import listening_socket


def test_a_server_that_cannot_start_closes_its_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    def start_threads(**_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(module, "Batcher", start_threads)
    listener = listening_socket("127.0.0.1:0", "serve")
    with pytest.raises(RuntimeError, match="new thread"):
        module.ModelServer(ClusterConfig(), listener)
    assert listener.fileno() == -1


def test_http_and_grpc_end_within_one_grace() -> None:
    both_end = threading.Barrier(2)  # neither returns before the other was told, too
    ended: list[object] = []

    def stop(grace_seconds: float) -> None:
        both_end.wait(timeout=10)
        ended.append(grace_seconds)

    server: Any = object.__new__(module.ModelServer)
    server.grpc = server._server = SimpleNamespace(stop=stop)
    server.service = SimpleNamespace(close=lambda: ended.append("models"))
    server.stop(5.0)
    assert ended == [5.0, 5.0, "models"]


def test_workers_that_cannot_start_free_their_port(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = []

    def start_process(_: int, config: ClusterConfig, __: object) -> None:
        addresses.append(config.serve.listen)
        raise OSError("too many processes")

    monkeypatch.setattr(workers, "_Worker", start_process)
    with pytest.raises(OSError, match="too many processes") as caught:
        workers.Workers(ClusterConfig(serve=ServeConfig(listen="127.0.0.1:0", workers=2)))
    listening_socket(addresses[0], "serve").close()
    assert caught.tb is not None  # it holds the service, so that no garbage collection has closed the port
