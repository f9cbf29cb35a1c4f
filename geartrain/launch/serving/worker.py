"""Worker process of a model service. Arguments: descriptor of its control socket, log level, worker number."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from typing import Any

from geartrain.ams.values.config import NO_FOLDER, ClusterConfig, identify
from geartrain.ams.values.errors import GeartrainError, Unavailable
from geartrain.launch import role as life
from geartrain.launch.logs import audit_to, log_to_stderr
from geartrain.launch.serving.server import ModelServer
from geartrain.launch.serving.workers import DRAIN_SECONDS, Lines
from geartrain.serving.http.ports import joined_port
from geartrain.serving.service import WorkerReply


class _Parent:
    """Control connection to the parent, which holds the port: requests in both directions."""

    def __init__(self, lines: Lines) -> None:
        self.lines = lines
        self._ids = itertools.count()
        self._waiting: dict[int, queue.SimpleQueue[list[WorkerReply]]] = {}

    def everywhere(self, wish: Mapping[str, Any]) -> list[WorkerReply]:
        """Have all workers carry out ``wish``, this one included; return each answer."""
        number = next(self._ids)
        waits = self._waiting[number] = queue.SimpleQueue()
        self.lines.send({"wish": wish, "id": number})
        return waits.get()

    def listen(self, server: ModelServer) -> None:
        """Carry out the parent's requests in order until it closes the connection; then end this process."""
        with contextlib.suppress(OSError):
            while (message := self.lines.receive()) is not None:
                if "do" in message:
                    self.lines.send({"id": message["id"], "told": server.service.apply(message["do"])})
                else:
                    self._waiting.pop(message["id"]).put(message["all"])
        for waits in list(self._waiting.values()):  # threads that wait would keep this process from exiting
            waits.put([{"error": Unavailable.__name__, "message": "the service is ending"}])
        os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """Serve until the control socket is closed, or SIGTERM comes."""
    control, level, number = sys.argv[1:]
    log_to_stderr(level)
    told_to_end = threading.Event()
    for ending in (signal.SIGTERM, signal.SIGINT):
        signal.signal(ending, lambda *_: told_to_end.set())
    parent = _Parent(Lines(socket.socket(fileno=int(control))))
    told = parent.lines.receive()
    if told is None:
        return
    config = ClusterConfig(**told["config"])
    audit_to(config.security.audit)
    cpus = sorted(os.sched_getaffinity(0))
    if mine := cpus[int(number) :: config.serve.workers]:  # its threads take turns: on several CPUs they only wait
        os.sched_setaffinity(0, mine)
    identify(config.security.folder or (NO_FOLDER if config.serve.insecure else None), "serve")
    life.raise_open_files()
    try:
        server = ModelServer(config, joined_port(config.serve.listen), told["models"])
    except GeartrainError as exc:
        parent.lines.send({"ready": False, "error": type(exc).__name__, "message": str(exc)})
        sys.exit(1)
    server.service.everywhere = parent.everywhere
    parent.lines.send({"ready": True})
    threading.Thread(target=parent.listen, args=(server,), name="parent", daemon=True).start()
    while not told_to_end.wait(1.0):
        pass
    server.stop(DRAIN_SECONDS)


if __name__ == "__main__":
    main()
