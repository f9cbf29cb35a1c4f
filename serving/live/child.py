"""Child processes with torch, for a service without it."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from geartrain.ams.values.errors import ConfigError

NICE = 5
"""Niceness of all work but answers."""
_POLL_SECONDS = 0.2


def run_child(what: str, *arguments: str, is_ending: Callable[[], bool]) -> None:
    """Run ``python -m ARGUMENTS`` until it exits or ``is_ending``. Raises ConfigError: ``what`` was not made, with the
    process's last line.
    """
    with tempfile.TemporaryFile() as said:
        command = [sys.executable, "-P", "-m", *arguments]
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said)
        try:
            while child.poll() is None:
                if is_ending():
                    raise ConfigError(f"{what} was not made: the service ends")
                with suppress(subprocess.TimeoutExpired):
                    child.wait(_POLL_SECONDS)
        finally:
            child.kill()
            child.wait()
        if child.returncode:
            said.seek(0)
            lines = said.read().decode(errors="replace").strip().splitlines()
            raise ConfigError(f"{what} was not made: {lines[-1] if lines else f'exit code {child.returncode}'}")


class ExportProcess:
    """A process with torch that exports one snapshot after another, as loading torch and the exporter takes most of the
    time of the first. It exits when none comes for a while. Used from one thread."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None

    def export(self, snapshot: str, out: str, *, is_ending: Callable[[], bool]) -> None:
        """Export the ``snapshot`` to the folder ``out``. Raises ConfigError with the reason if that fails."""
        what, may_be_over = f"the model of {snapshot} was not made", self._child is not None
        answer = self._request([snapshot, out], is_ending)
        if answer is None and may_be_over and not is_ending():
            answer = self._request([snapshot, out], is_ending)
        if answer is None:
            raise ConfigError(f"{what}: {'the service ends' if is_ending() else 'its process died, the log says why'}")
        if answer:
            raise ConfigError(f"{what}: {answer}")

    def _request(self, question: list[str], is_ending: Callable[[], bool]) -> str | None:
        """Return the error; None: the process has exited, or the service is ending."""
        if self._child is None:
            command, pipe = [sys.executable, "-P", "-m", "geartrain.workers.live.exporter"], subprocess.PIPE
            self._child = subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True)  # no Ctrl-C
        child, line = self._child, b""
        assert child.stdin is not None and child.stdout is not None
        with suppress(BrokenPipeError):
            child.stdin.write(json.dumps(question).encode() + b"\n")
            child.stdin.flush()
            while not is_ending():
                if select.select([child.stdout], [], [], _POLL_SECONDS)[0]:
                    line = child.stdout.readline()
                    break
        if not line:
            self.close()
            return None
        with suppress(OSError):  # answers have priority, once there is a version
            for thread in Path(f"/proc/{child.pid}/task").iterdir():
                os.setpriority(os.PRIO_PROCESS, int(thread.name), NICE)
        return str(json.loads(line))

    def close(self) -> None:
        """Stop the process."""
        if self._child is not None:
            self._child.kill()
            with suppress(BrokenPipeError):
                self._child.communicate()
            self._child = None
