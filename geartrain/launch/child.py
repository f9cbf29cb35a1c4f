"""Child process of the launcher, with its ready line, log lines and end.

Its stdin is a pipe that only this process holds, and the role ends when it closes: children never outlive a killed
parent. It runs in a session of its own, so that Ctrl-C reaches the parent alone, which stops the others in order.
"""

from __future__ import annotations

import collections
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

TAIL_LINES = 20
WRONG_USAGE = 2
"""Exit code for arguments, input or configuration that cannot be right."""
ERROR_PREFIX = "error: "
"""Start of the stderr line with which a command fails."""


class Child:
    """A role process: its ready line becomes ``facts``, its log lines are passed on with its name before them."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        *,
        on_line: Callable[[str], None],
        on_ready: Callable[[Child], None],
        on_exit: Callable[[Child], None],
    ) -> None:
        """Start ``python -m geartrain ARGUMENTS``.

        Args:
            name: prefix of its log lines.
            arguments: the role and its flags.
            environ: the whole environment.
            on_line: called with each log line.
            on_ready: called once the role serves, with ``facts`` set.
            on_exit: called once the process has exited and its last line was passed on.

        The callbacks run on a thread of the child.
        """
        self.name = name
        self.arguments = tuple(arguments)
        self.facts: dict[str, Any] | None = None
        """Content of its ready line; None before that."""
        self.tail: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)
        """Last log lines."""
        self._last_words: str | None = None
        self._on_line = on_line
        self._on_ready = on_ready
        self._on_exit = on_exit
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "geartrain", *arguments, "--end-with-parent"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(environ),
            start_new_session=True,
            encoding="utf-8",
            errors="replace",
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_text(self) -> str:
        """Exit of the process, in words."""
        code = self._process.returncode
        if code is None:
            return "still running"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    @property
    def complaint(self) -> str | None:
        """Error about its settings or arguments with which it exited; None if it exited otherwise."""
        last = self.tail[-1] if self.tail else ""
        if self._process.returncode != WRONG_USAGE or not last.startswith(ERROR_PREFIX):
            return None
        return last.removeprefix(ERROR_PREFIX)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._process.terminate()

    def kill(self) -> None:
        """Kill the process, unless it has exited."""
        self._process.kill()

    def stop(self, grace_seconds: float) -> bool:
        """Wait for the exit, and kill the process after ``grace_seconds``; return whether that was needed."""
        try:
            self._process.wait(grace_seconds)
            killed = False
        except subprocess.TimeoutExpired:
            self._process.kill()
            killed = True
        self._reader.join()
        return killed

    def _read(self) -> None:
        """Read its ready line, and pass on the other lines, until it exits."""
        process = self._process
        assert process.stdout is not None and process.stdin is not None
        for line in process.stdout:
            self._print_last_lines()
            if self.facts is None and (facts := _ready_facts(line)) is not None:
                self.facts = facts
                self._on_ready(self)
                continue
            self.tail.append(line.rstrip("\n"))
            if line.startswith(ERROR_PREFIX):  # the starter of this child reports its complaint
                self._last_words = line
            else:
                self._print_line(line)
        process.wait()
        process.stdin.close()
        process.stdout.close()
        if self.complaint is None:
            self._print_last_lines()
        self._on_exit(self)

    def _print_last_lines(self) -> None:
        if self._last_words is not None:
            self._print_line(self._last_words)
            self._last_words = None

    def _print_line(self, line: str) -> None:
        self._on_line(f"{self.name} | {line.rstrip()}")


def _ready_facts(line: str) -> dict[str, Any] | None:
    try:
        facts = json.loads(line)
    except json.JSONDecodeError:
        return None
    return facts if isinstance(facts, dict) and "ready" in facts else None
