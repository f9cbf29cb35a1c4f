"""The rival Redis: a server of its own on a unix socket, where it is installed."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

START_SECONDS = 10


@contextmanager
def redis_client() -> Iterator[Any]:
    """A client of an empty server, decoding nothing, or None: one of both is missing, and a line says which."""
    try:
        import redis
    except ImportError:
        print("Without Redis: pip install redis hiredis, and a redis-server on the PATH, make it a rival.")
        yield None
        return
    if shutil.which("redis-server") is None:
        print("Without Redis: there is no redis-server on the PATH.")
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="gt-bench-") as folder:
        path = f"{folder}/redis.sock"
        options = ["--port", "0", "--unixsocket", path, "--save", "", "--dir", folder]
        with subprocess.Popen(["redis-server", *options], stdout=subprocess.DEVNULL) as server:
            try:
                _await_socket(path)
                with redis.Redis(unix_socket_path=path) as client:
                    yield client
            finally:
                server.terminate()


def socket_of(client: Any) -> str:
    """The path of a client's server."""
    path: str = client.connection_pool.connection_kwargs["path"]
    return path


def _await_socket(path: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(path) == 0:
                return
        if time.monotonic() > deadline:
            raise TimeoutError(f"redis-server does not listen on {path}")
        time.sleep(0.02)
