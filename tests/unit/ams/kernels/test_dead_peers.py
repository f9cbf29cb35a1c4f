"""Calls of the data plane whose client or shard dies, stops or forks: what is left of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from geartrain.ams.kernels import _core
from tests.support import frame_codec
from tests.support.frame_calls import ask, begin, dial, expected, mailboxes, pull, push
from tests.support.toy_shard import SOON, Shard, until


@contextmanager
def process(script: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process that runs ``script`` and is killed at the end of the block."""
    with subprocess.Popen(
        [sys.executable, "-c", script, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            yield child
        finally:
            child.kill()


def said(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


CLIENT = """
import sys
from geartrain.ams.kernels import _core
from tests.support import frame_codec
from tests.support.frame_calls import ask, begin, dial, pull, push

way, name, secret, port, step = sys.argv[1:]
ours = dial(way, name, bytes.fromhex(secret), int(port))
ask(ours, pull("rows", [1]))
if step == "begun":
    call = ours.begin(1000, 1000)
elif step in ("at work", "waiting", "queued"):
    asked = {"at work": pull("held", [1]), "waiting": push("later", [1]), "queued": push("rows", [1])}[step]
    call, _ = begin(ours, [asked])
elif step == "answered":
    call, _ = begin(ours, [pull("rows", [2])])
    call.wait(10)
print("there", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("step", ["connected", "begun", "at work", "waiting", "queued", "answered"])
def test_a_client_that_is_killed_leaves_nothing(shard: Shard, step: str) -> None:
    other = shard.connect()
    if step == "queued":
        ahead, _ = begin(other, [pull("held", [1])])
        assert shard.handler.await_held(SOON)
        shard.handler.release()
        assert ahead.wait(SOON)
    with process(CLIENT, *shard.told(), step) as child:
        assert said(child) == "there"
        if step in ("at work", "waiting"):
            assert shard.handler.await_held(SOON)
    shard.handler.release()
    until(lambda: shard.server.num_connections == 1, other)
    shard.handler.answer_later()
    until(lambda: shard.server.num_mailboxes == mailboxes(other), other)


SERVER = """
import sys
from geartrain.ams.kernels import _core

handler = _core.ToyHandler()
server = _core.DataServer(handler, host="127.0.0.1", uses_tls=sys.argv[1] == "tls")
name, secret, port = server.offer()
print(name, secret.hex(), port, flush=True)
while sys.stdin.readline():
    print(handler.await_held(10.0), flush=True)
"""


@pytest.mark.parametrize("way", ["ring", "tcp", "tls"])
@pytest.mark.parametrize("step", ["connected", "begun", "at work", "waiting"])
def test_a_shard_that_is_killed_ends_the_calls_to_it(step: str, way: str) -> None:
    with process(SERVER, way) as child:
        name, secret, port = said(child).split()
        ours = dial(way, name, bytes.fromhex(secret), int(port))
        ask(ours, pull("rows", [1]))
        call: Any = None
        if step == "begun":
            call = ours.begin(256, 2048)
        elif step != "connected":
            call, _ = begin(ours, [pull("held", [1]) if step == "at work" else push("later", [1])])
            assert child.stdin is not None
            print(file=child.stdin, flush=True)
            assert said(child) == "True"
        child.kill()
        child.wait()
        began = time.monotonic()
        with pytest.raises(_core.ConnectionLost):
            if call is None:
                ask(ours, pull("rows", [1]))
            else:
                if step == "begun":
                    frame = frame_codec.request(1, 0, [pull("rows", [])])
                    call.room(len(frame))[:] = np.frombuffer(frame, np.uint8)
                    call.send()
                call.wait(SOON)
        assert time.monotonic() - began < SOON / 2
        assert ours.is_lost


@pytest.mark.parametrize("way", ["ring", "tcp", "tls"])
def test_a_shard_that_is_stopped_is_waited_for_as_long_as_the_caller_wants(way: str) -> None:
    with process(SERVER, way) as child:
        name, secret, port = said(child).split()
        ours = dial(way, name, bytes.fromhex(secret), int(port))
        ask(ours, pull("rows", [1]))
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        call, _ = begin(ours, [pull("rows", [1])])
        assert not call.wait(0.1)
        del call
        assert not ours.is_lost and mailboxes(ours) == 0
        child.send_signal(signal.SIGCONT)
        assert ask(ours, pull("rows", [2]))[0]["rows"] == expected([2])


FORK = """
import os, signal, sys
from geartrain.ams.kernels import _core
from tests.support.frame_calls import ask, dial, expected, mailboxes, pull

way, name, secret, port = sys.argv[1:]
ours = dial(way, name, bytes.fromhex(secret), int(port))
ask(ours, pull("rows", [1]))
handler = _core.ToyHandler()
mine = _core.DataServer(handler, host="127.0.0.1")
child = os.fork()
if child == 0:
    assert ours.is_lost and mailboxes(ours) == 0
    try:
        ours.begin(64, 64)
    except _core.ConnectionLost:
        pass
    ours.close()
    mine.close()
    del ours, mine
    os.write(1, b"child\\n")
    sys.stdin.read()  # outlives its parent
    os._exit(0)
assert ask(ours, pull("rows", [2]))[0]["rows"] == expected([2])
os.write(1, b"parent\\n")
assert sys.stdin.readline() == "end\\n"
os._exit(0)
"""


def test_a_forked_child_has_nothing_of_its_parents(shard: Shard) -> None:
    other = shard.connect()
    with process(FORK, *shard.told()) as child:
        assert {said(child), said(child)} == {"child", "parent"}
        assert shard.server.num_connections == 2
        child.kill()
        child.wait(SOON)
        until(lambda: shard.server.num_connections == 1, other)  # though the child lives


FORGOTTEN = """
import threading
from geartrain.ams.kernels import _core
from tests.support.frame_calls import begin, dial, pull

handler = _core.ToyHandler()
server = _core.DataServer(handler)
call, _ = begin(dial("ring", *server.offer()), [pull("held", [1])])
assert handler.await_held(10.0)
threading.Timer(0.1, handler.release).start()
del server
print("ended", flush=True)
"""


def test_a_server_that_nobody_closed_ends_though_its_call_waits_for_the_interpreter() -> None:
    done = subprocess.run([sys.executable, "-c", FORGOTTEN], capture_output=True, text=True, timeout=30)
    assert done.stdout == "ended\n", done.stderr
