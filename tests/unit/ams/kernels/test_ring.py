"""Calls through shared memory: what is answered, and what is left when either side dies, lies or gives up."""

from __future__ import annotations

import _thread
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from geartrain.ams.kernels import _core
from tests.support import frame_codec
from tests.support.ring_talk import ask, begin, expected, flipped, pull, push

SOON = 10.0
"""Seconds in which what must happen has happened, however busy the machine."""


class Shard:
    """A toy handler behind a server."""

    def __init__(self, **limits: Any) -> None:
        self.handler = _core.ToyHandler()
        self.server = _core.DataServer(self.handler, **limits)

    def connect(self, **limits: Any) -> _core.RingConnection:
        return _core.connect_ring(*self.server.offer(), SOON, **limits)


@pytest.fixture
def make() -> Iterator[Callable[..., Shard]]:
    made: list[Shard] = []

    def one(**limits: Any) -> Shard:
        made.append(Shard(**limits))
        return made[-1]

    yield one
    for shard in made:
        shard.handler.release()
        shard.handler.answer_later()
        shard.server.close()


@pytest.fixture
def shard(make: Callable[..., Shard]) -> Shard:
    return make()


def until(condition: Callable[[], bool], other: _core.RingConnection) -> None:
    """Call the shard until ``condition`` holds: between calls it looks at its sockets."""
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline
        ask(other, pull("rows", [1]))


def test_rows_are_read_and_written(shard: Shard) -> None:
    ours = shard.connect()
    (reply,) = ask(ours, pull("rows", [3, 4], with_present=True))
    assert (reply["rows"], reply["present"]) == (expected([3, 4]), b"\0\1")
    (pushed,) = ask(ours, push("rows", [1, 2, 3]))
    assert (pushed["created"], pushed["duplicate"]) == (3, False)
    (assigned,) = ask(ours, push("rows", [1], kind="assign"))
    assert assigned["created"] == 1
    assert (shard.handler.num_writes, shard.handler.sum_written) == (2, 16.0)
    assert ours.num_mailboxes == shard.server.num_mailboxes == 1


def test_every_operation_of_a_frame_has_its_own_outcome(shard: Shard) -> None:
    ours = shard.connect()
    asked = [pull("rows", [7]), pull("gone", [1]), push("rows", [1, 2]), pull("rows", [-1]), push("rows", [-1])]
    replies = ask(ours, *asked, pull("rows", [8]))
    assert replies[0]["rows"] == expected([7]) and replies[5]["rows"] == expected([8])
    assert (replies[1]["error"], replies[1]["message"]) == ("TableNotFound", "there is no table 'gone'")
    assert replies[2]["created"] == 2
    assert replies[3]["error"] == "InvalidIds"
    assert (replies[4]["error"], replies[4]["retry_after_seconds"]) == ("Busy", 0.25)


def test_nothing_is_acknowledged_by_a_shard_that_may_be_anothers(shard: Shard) -> None:
    ours = shard.connect()
    shard.handler.lose_lease()
    assert {reply["error"] for reply in ask(ours, pull("rows", [1]), push("rows", [1]))} == {"ShardUnavailable"}


def test_a_secret_opens_one_connection_in_time(make: Callable[..., Shard]) -> None:
    shard = make(most_connections=2)
    name, secret = shard.server.offer()
    ours = _core.connect_ring(name, secret, SOON)
    for wrong in (secret, bytes(32)):
        with pytest.raises(RuntimeError, match="refuses the connection"):
            _core.connect_ring(name, wrong, SOON)
    with pytest.raises(RuntimeError, match="no place and secret"):
        _core.connect_ring(name, b"short", SOON)
    other = shard.connect()
    with pytest.raises(RuntimeError, match="2 connections are taken already"):
        shard.server.offer()
    late = make(greeting_seconds=0)
    with pytest.raises(RuntimeError, match="refuses the connection"):
        late.connect()
    for one in (ours, other):
        ask(one, pull("rows", [1]))


def test_who_says_nothing_is_let_go_of(make: Callable[..., Shard]) -> None:
    shard = make(greeting_seconds=0.05)
    name, _ = shard.server.offer()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.connect("\0" + name)
        silent.settimeout(SOON)
        assert silent.recv(1) == b""


def test_a_write_that_waits_is_answered_when_it_is_done(shard: Shard) -> None:
    ours = shard.connect()
    call, number = begin(ours, [push("later", [1, 2]), pull("rows", [5])])
    assert shard.handler.await_held(SOON)
    assert ask(ours, pull("rows", [1]))[0]["rows"] == expected([1])  # nobody waits for it
    assert shard.handler.answer_later() == 1
    assert call.wait(SOON)
    done, read = frame_codec.parsed_reply(call.reply(), number, [0, 16])
    assert done["created"] == 2 and read["rows"] == expected([5])


def test_a_caller_whose_time_is_nearly_over_is_told_to_ask_again(shard: Shard) -> None:
    ours = shard.connect()
    call, number = begin(ours, [push("later", [1]), pull("rows", [5])], 0.2)
    assert call.wait(SOON)
    pending, read = frame_codec.parsed_reply(call.reply(), number, [0, 16])
    assert pending["error"] == "StepPending" and read["rows"] == expected([5])
    del call
    ask(ours, pull("rows", [6]))
    shard.handler.answer_later()  # too late, into a mailbox that may be another call's
    assert ask(ours, pull("rows", [7]))[0]["rows"] == expected([7])


def test_a_call_that_is_given_up_leaves_its_mailbox_to_the_shard(shard: Shard) -> None:
    ours, other = shard.connect(), shard.connect()
    both = [ours.begin(64, 64), ours.begin(64, 64)]
    del both  # two mailboxes
    held, _ = begin(ours, [pull("held", [1])])
    assert shard.handler.await_held(SOON)
    assert not held.wait(0.05)
    queued, _ = begin(ours, [push("rows", [1])])
    assert not queued.wait(0.0)
    del held, queued
    assert ours.num_mailboxes == 0
    shard.handler.release()
    assert ask(ours, pull("rows", [2]))[0]["rows"] == expected([2])
    until(lambda: shard.server.num_mailboxes == ours.num_mailboxes + other.num_mailboxes, other)
    assert shard.handler.num_writes == 0  # nobody waited for it


def test_many_calls_side_by_side_do_not_mix(shard: Shard) -> None:
    ours = shard.connect(spin_seconds=0.0)

    def work(thread: int) -> None:
        random = np.random.default_rng(thread)
        for _ in range(150):
            ids = random.integers(0, 15_000, random.integers(0, 400))
            dim = int(random.integers(1, 20))
            read, written = ask(ours, pull("rows", ids, dim), push("rows", ids, dim))
            assert read["rows"] == expected(ids, dim) and written["created"] == len(ids)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert shard.handler.num_writes == 600
    assert 1 <= ours.num_mailboxes == shard.server.num_mailboxes <= 16


def test_the_shard_holds_no_more_mailboxes_than_it_may(make: Callable[..., Shard]) -> None:
    shard = make(most_mailboxes=2)
    ours, other = shard.connect(), shard.connect()
    calls = [ours.begin(64, 64), other.begin(64, 64)]
    with pytest.raises(_core.ConnectionFull, match="takes no more"):
        ours.begin(64, 64)
    del calls[1]
    other.close()
    watcher = make().connect()
    until(lambda: shard.server.num_mailboxes == 1, watcher)
    assert ask(ours, pull("rows", [1]))[0]["rows"] == expected([1])


def test_mailboxes_are_bounded_and_large_ones_make_room(make: Callable[..., Shard]) -> None:
    shard = make()
    ours = shard.connect(most_pool_bytes=(7 << 20) + (100 << 10), most_mailboxes=3)
    with pytest.raises(_core.ConnectionFull, match="no memory is left"):
        ours.begin(7 << 20, 7 << 20)
    with pytest.raises(_core.ConnectionFull, match="too large"):
        ours.begin(8 << 20, 64)
    calls = [ours.begin(64, 64) for _ in range(3)]
    with pytest.raises(_core.ConnectionFull):
        ours.begin(64, 64)
    del calls
    assert ours.num_mailboxes == 3
    large = ours.begin(7 << 20, 64)  # the free ones go
    assert ours.num_mailboxes == 1
    del large
    assert ask(ours, pull("rows", [1]))[0]["rows"] == expected([1])


def test_idle_mailboxes_are_let_go_of(shard: Shard) -> None:
    ours = shard.connect(idle_seconds=0.0)
    for _ in range(3):
        ask(ours, pull("rows", [1]))
    assert ours.num_mailboxes == 1
    other = shard.connect()
    until(lambda: shard.server.num_mailboxes == 2, other)


@pytest.mark.parametrize(("at", "says"), [(80, "an operation's checksum"), (192, "an operation's checksum")])
def test_an_operation_that_was_damaged_is_refused(shard: Shard, at: int, says: str) -> None:
    ours = shard.connect()
    frame = flipped(frame_codec.request(1, 0, [pull("rows", [1]), push("rows", [1])]), at)
    call = ours.begin(len(frame), 4096)
    call.room(len(frame))[:] = np.frombuffer(frame, np.uint8)
    call.send()
    assert call.wait(SOON)
    (reply,) = frame_codec.parsed_reply(call.reply(), 1, [0])
    assert reply["error"] == "ProtocolError" and says in reply["message"]
    assert all("checksum" in one["message"] for one in _core.parse_reply_frame(call.reply(), 1, [(16, 0), (0, 0)]))
    assert shard.handler.num_writes == 0


def test_a_reply_without_room_is_refused(shard: Shard) -> None:
    ours = shard.connect()
    frame = frame_codec.request(1, 0, [pull("rows", range(100), 1000)])
    call = ours.begin(len(frame), 4096)
    call.room(len(frame))[:] = np.frombuffer(frame, np.uint8)
    call.send()
    assert call.wait(SOON)
    (reply,) = frame_codec.parsed_reply(call.reply(), 1, [0])
    assert reply["error"] == "ProtocolError" and "the reply takes 400128 bytes; there is room for" in reply["message"]


@pytest.mark.parametrize("at", range(0, 64, 5))
def test_a_damaged_header_ends_the_connection_and_no_other(shard: Shard, at: int) -> None:
    ours, other = shard.connect(), shard.connect()
    frame = flipped(frame_codec.request(1, 0, [push("rows", [1])]), at)
    call = ours.begin(len(frame), 4096)
    call.room(len(frame))[:] = np.frombuffer(frame, np.uint8)
    call.send()
    with pytest.raises(_core.ConnectionLost):
        call.wait(SOON)
    assert ours.is_lost and not other.is_lost
    assert ask(other, pull("rows", [1]))[0]["rows"] == expected([1])
    assert shard.handler.num_writes == 0


def test_calls_under_way_end_with_the_server(shard: Shard) -> None:
    ours = shard.connect()
    call, _ = begin(ours, [push("later", [1])])
    assert shard.handler.await_held(SOON)
    shard.server.close()
    with pytest.raises(_core.ConnectionLost):
        call.wait(SOON)
    with pytest.raises(_core.ConnectionLost):
        ours.begin(64, 64)
    with pytest.raises(RuntimeError, match="ending"):
        shard.server.offer()


def test_calls_under_way_end_with_the_connection(shard: Shard) -> None:
    ours, other = shard.connect(), shard.connect()
    call, _ = begin(ours, [pull("held", [1])])
    assert shard.handler.await_held(SOON)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(call.wait, SOON)
        ours.close()
        with pytest.raises(_core.ConnectionLost):
            waiting.result(SOON)
    shard.handler.release()
    until(lambda: shard.server.num_connections == 1, other)
    until(lambda: shard.server.num_mailboxes == other.num_mailboxes, other)


def test_ctrl_c_ends_the_wait_for_a_reply(shard: Shard) -> None:
    ours = shard.connect()
    call, _ = begin(ours, [pull("held", [1])])
    assert shard.handler.await_held(SOON)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Timer(0.05, _thread.interrupt_main).start()
        with pytest.raises(KeyboardInterrupt):
            call.wait(SOON)
    finally:
        signal.signal(signal.SIGINT, before)
    del call
    shard.handler.release()
    assert ask(ours, pull("rows", [1]))[0]["rows"] == expected([1])


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
from tests.support.ring_talk import ask, begin, pull, push

ours = _core.connect_ring(sys.argv[1], bytes.fromhex(sys.argv[2]), 10.0)
ask(ours, pull("rows", [1]))
step = sys.argv[3]
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
    name, secret = shard.server.offer()
    with process(CLIENT, name, secret.hex(), step) as child:
        assert said(child) == "there"
        if step in ("at work", "waiting"):
            assert shard.handler.await_held(SOON)
    shard.handler.release()
    until(lambda: shard.server.num_connections == 1, other)
    shard.handler.answer_later()
    until(lambda: shard.server.num_mailboxes == other.num_mailboxes, other)


SERVER = """
import sys
from geartrain.ams.kernels import _core

handler = _core.ToyHandler()
server = _core.DataServer(handler)
name, secret = server.offer()
print(name, secret.hex(), flush=True)
while sys.stdin.readline():
    print(handler.await_held(10.0), flush=True)
"""


@pytest.mark.parametrize("step", ["connected", "begun", "at work", "waiting"])
def test_a_shard_that_is_killed_ends_the_calls_to_it(step: str) -> None:
    with process(SERVER) as child:
        name, secret = said(child).split()
        ours = _core.connect_ring(name, bytes.fromhex(secret), SOON)
        ask(ours, pull("rows", [1]))
        call: Any = None
        if step == "begun":
            call = ours.begin(64, 64)
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
                    call.send()
                call.wait(SOON)
        assert time.monotonic() - began < SOON / 2
        assert ours.is_lost


def test_a_shard_that_is_stopped_is_waited_for_as_long_as_the_caller_wants() -> None:
    with process(SERVER) as child:
        name, secret = said(child).split()
        ours = _core.connect_ring(name, bytes.fromhex(secret), SOON)
        ask(ours, pull("rows", [1]))
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        call, _ = begin(ours, [pull("rows", [1])])
        assert not call.wait(0.1)
        del call
        assert not ours.is_lost and ours.num_mailboxes == 0
        child.send_signal(signal.SIGCONT)
        assert ask(ours, pull("rows", [2]))[0]["rows"] == expected([2])


FORK = """
import os, signal, sys
from geartrain.ams.kernels import _core
from tests.support.ring_talk import ask, begin, expected, pull

ours = _core.connect_ring(sys.argv[1], bytes.fromhex(sys.argv[2]), 10.0)
ask(ours, pull("rows", [1]))
handler = _core.ToyHandler()
mine = _core.DataServer(handler)
child = os.fork()
if child == 0:
    assert ours.is_lost and ours.num_mailboxes == 0
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
    name, secret = shard.server.offer()
    with process(FORK, name, secret.hex()) as child:
        assert {said(child), said(child)} == {"child", "parent"}
        assert shard.server.num_connections == 2
        child.kill()
        child.wait(SOON)
        until(lambda: shard.server.num_connections == 1, other)  # though the child lives


SMALL = """
import resource, sys
from geartrain.ams.kernels import _core
from tests.support.ring_talk import ask, expected, pull

ours = _core.connect_ring(sys.argv[1], bytes.fromhex(sys.argv[2]), 10.0)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    ours.begin(2 << 20, 64)
except _core.ConnectionFull as exc:
    assert "no memory can be had" in str(exc)
    print("full")
assert ask(ours, pull("rows", [2]))[0]["rows"] == expected([2])
print("whole", flush=True)
"""


def test_memory_that_cannot_be_had_costs_nothing(shard: Shard) -> None:
    name, secret = shard.server.offer()
    done = subprocess.run([sys.executable, "-c", SMALL, name, secret.hex()], capture_output=True, text=True, timeout=60)
    assert done.stdout == "full\nwhole\n", done.stderr
