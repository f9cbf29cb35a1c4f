"""Who connects to a shard's data plane is greeted whatever the shard does, and waits where no descriptor is left."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from geartrain.ams.kernels import _core
from tests.support.frame_calls import ask, begin, dial, expected, pull

SOON = 10.0


@pytest.fixture
def handler() -> Iterator[_core.ToyHandler]:
    one = _core.ToyHandler()
    yield one
    one.release()


@pytest.mark.parametrize("way", ["ring", "tcp", "tls"])
def test_a_shard_that_is_at_work_greets_who_comes(handler: _core.ToyHandler, way: str) -> None:
    server = _core.DataServer(handler, host="127.0.0.1", uses_tls=way == "tls")
    held, _ = begin(dial(way, *server.offer()), [pull("held", [1])])
    assert handler.await_held(SOON)
    late = dial(way, *server.offer())
    assert server.num_connections == 2
    handler.release()
    assert held.wait(SOON)
    assert ask(late, pull("rows", [3]))[0]["rows"] == expected([3])
    server.close()


def test_strangers_who_say_nothing_keep_nobody_from_connecting_by_tcp(handler: _core.ToyHandler) -> None:
    server = _core.DataServer(handler, host="127.0.0.1", greeting_seconds=60.0)
    _, _, port = server.offer()
    with ExitStack() as stack:
        stack.callback(server.close)
        for _ in range(200):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        assert ask(dial("tcp", *server.offer()), pull("rows", [3]))[0]["rows"] == expected([3])


CROWDED = """
import resource, sys, time
from geartrain.ams.kernels import _core
from tests.support.frame_calls import ask, dial, pull

way = sys.argv[1]
warn = lambda words: print(words, flush=True)
server = _core.DataServer(_core.ToyHandler(), host="127.0.0.1", uses_tls=way == "tls", warn=warn)
ours = dial(way, *server.offer())
ask(ours, pull("rows", [1]))
name, secret, port = server.offer()
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # there are more already
print(name, secret.hex(), server.offer()[1].hex(), port, flush=True)
for line in sys.stdin:
    if line == "more\\n":
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    else:
        began = time.process_time()
        time.sleep(0.5)
        print(time.process_time() - began < 0.1, len(ask(ours, pull("rows", [1]))), flush=True)
"""


@pytest.mark.parametrize("way", ["ring", "tcp", "tls"])
def test_a_shard_without_descriptors_waits_for_some_and_serves_who_is_there(way: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CROWDED, way], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        name, lost, secret, port = child.stdout.readline().split()
        try:
            with pytest.raises(RuntimeError, match="does not answer"):
                if way == "ring":
                    _core.connect_ring(name, bytes.fromhex(lost), 0.2)
                else:
                    _core.connect_tcp("127.0.0.1", int(port), bytes.fromhex(lost), 0.2, uses_tls=way == "tls")
            words = child.stdout.readline()
            assert "Too many open files" in words and "raise that (ulimit -n)" in words
            print("work", file=child.stdin, flush=True)
            assert child.stdout.readline() == "True 1\n"  # without a word more
            print("more", file=child.stdin, flush=True)
            ours = dial(way, name, bytes.fromhex(secret), int(port))
            assert ask(ours, pull("rows", [2]))[0]["rows"] == expected([2])
        finally:
            child.kill()
