"""Processes that have torch, for a service that has none."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress

from geartrain.ams.values.errors import ConfigError

NICE = 5
"""Of all that is not an answer."""
_LOOK_SECONDS = 0.2


def run_child(what: str, *arguments: str, is_ending: Callable[[], bool]) -> None:
    """Run ``python -m ARGUMENTS`` to its end, or until nobody waits for it. Raises ConfigError: ``what`` was not made,
    and the last line that it said.
    """
    with tempfile.TemporaryFile() as said:
        command = [sys.executable, "-P", "-m", *arguments]
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said)
        try:
            while child.poll() is None:
                if is_ending():
                    raise ConfigError(f"{what} was not made: the service ends")
                with suppress(subprocess.TimeoutExpired):
                    child.wait(_LOOK_SECONDS)
        finally:
            child.kill()
            child.wait()
        if child.returncode:
            said.seek(0)
            lines = said.read().decode(errors="replace").strip().splitlines()
            raise ConfigError(f"{what} was not made: {lines[-1] if lines else f'exit code {child.returncode}'}")
