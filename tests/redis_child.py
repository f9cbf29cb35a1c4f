"""A real Redis server for a test: a child that listens on a socket file of its own."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


class RedisChild:
    """One server, which can be stopped and started again on the same socket. What it held is gone then."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.path = folder / "redis.sock"
        self.url = f"unix://{self.path}?db=0"
        self._folder = folder
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Return when it listens."""
        command = [
            "redis-server",
            "--port",
            "0",
            "--unixsocket",
            str(self.path),
            "--save",
            "",
            "--dir",
            str(self._folder),
        ]
        self._process = subprocess.Popen([*command, *self._options], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 20
        while True:
            with socket.socket(socket.AF_UNIX) as probe:
                if probe.connect_ex(str(self.path)) == 0:
                    return
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise TimeoutError(f"redis-server does not listen on {self.path}")
            time.sleep(0.01)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """It takes connections and bytes, and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.resume()

    def resume(self) -> None:
        """End a pause."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """Return when it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        with suppress(FileNotFoundError):
            self.path.unlink()


@contextmanager
def running_redis(*options: str) -> Iterator[RedisChild]:
    """Run a server with these options; skip the test where none is installed."""
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed (Debian: apt install redis-server)")
    pytest.importorskip("redis", reason="the package redis is not installed: pip install 'geartrain[redis]'")
    with tempfile.TemporaryDirectory(prefix="gt-redis-") as folder:  # a socket's path must be short
        child = RedisChild(Path(folder), *options)
        child.start()
        try:
            yield child
        finally:
            child.stop()
