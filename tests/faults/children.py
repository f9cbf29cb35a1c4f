"""Roles and jobs as real processes, forked from a server that has imported everything: they start in milliseconds.

Each can be armed with failpoints, killed, stopped and started again. A child ends when the process that started it is
gone. No port is fixed: one that is started again takes the port it had, as under ``geartrain up``.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from geartrain.ams.observe import failpoints
from geartrain.ops import Role
from tests.support.forkserver import FORKSERVER

START_TIMEOUT_SECONDS = 60.0


class Child:
    """A process of ours. End it with :meth:`end`."""

    def __init__(self, work: Callable[..., Any], *arguments: Any, armed: str = "") -> None:
        """Run ``work(pipe, *arguments)``, importable by name, with ``armed`` failpoints."""
        self.pipe, theirs = FORKSERVER.Pipe()
        self.process = FORKSERVER.Process(target=_run, args=(theirs, armed, work, *arguments), daemon=True)
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self.process.pid is not None
        return self.process.pid

    def receive(self, timeout_seconds: float = START_TIMEOUT_SECONDS) -> Any:
        """Return the next thing it says. Raises EOFError if it ends first, TimeoutError."""
        if not wait([self.pipe], timeout_seconds):
            raise TimeoutError(f"{self.process} said nothing for {timeout_seconds:g} s")
        return self.pipe.recv()

    def exit_code(self, timeout_seconds: float = START_TIMEOUT_SECONDS) -> int | None:
        """Wait for its end; negative: the signal that ended it, None: it lives on."""
        self.process.join(timeout_seconds)
        return self.process.exitcode

    def end(self) -> None:
        """Kill it. Idempotent."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _run(pipe: Connection, armed: str, work: Callable[..., Any], *arguments: Any) -> None:
    failpoints.arm_from_environment(environ={failpoints.VARIABLE: armed})
    work(pipe, *arguments)


def serve(pipe: Connection, role: str, settings: dict[str, Any]) -> None:
    """Serve a role until the other end of the pipe is closed; says the address."""
    pipe.send(Role(role, **settings).address)
    with contextlib.suppress(EOFError, OSError):
        pipe.recv()
    os._exit(0)


class Supervised:
    """A role that is armed in its first life and started again, at its port and unarmed, whenever it dies."""

    def __init__(self, role: str, settings: dict[str, Any], armed: str) -> None:
        self._role, self._settings = role, settings
        self._child = Child(serve, role, settings, armed=armed)
        self.address: str = self._child.receive()
        self._settings = {**settings, "listen": self.address}
        self.exit_codes: list[int | None] = []
        """How its earlier lives ended."""
        self._ending = False
        self._lock = threading.Lock()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def kill(self) -> None:
        """Kill the life at hand."""
        self._child.process.kill()

    def end(self) -> None:
        """Kill it for good."""
        with self._lock:
            self._ending = True
        self._child.process.kill()
        self._watcher.join()
        self._child.end()

    def _watch(self) -> None:
        while True:
            self._child.process.join()
            with self._lock:
                if self._ending:
                    return
                self.exit_codes.append(self._child.process.exitcode)
                self._child.end()
                self._child = Child(serve, self._role, self._settings)
            with contextlib.suppress(EOFError, TimeoutError):
                self._child.receive()
