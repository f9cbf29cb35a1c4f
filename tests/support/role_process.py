"""Commands of ``geartrain`` as processes of their own, which end with the test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self


class RoleProcess:
    """A role that has said that it is ready; a context that kills it. Its errors are kept for :meth:`communicate`."""

    def __init__(self, *arguments: str, errors: Path | None = None, **environment: str) -> None:
        """``arguments`` as typed after ``geartrain``; ``environment`` is added to that of this process. One that says
        much says it to a file, ``errors``.
        """
        self.process = subprocess.Popen(
            [sys.executable, "-m", "geartrain", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if errors is None else errors.open("a"),
            text=True,
            env={**os.environ, **environment},
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, errors.read_text() if errors else self.process.communicate()[1]
        self.facts: dict[str, Any] = json.loads(line)

    @property
    def address(self) -> str:
        """Of a scheduler, or of the first shard of a server."""
        return str(self.facts["address"] if "address" in self.facts else self.facts["addresses"][0])

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """The process does nothing while the block lasts."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()
