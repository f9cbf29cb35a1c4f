"""Calls of the data plane, through shared memory and by TCP: what is answered, and what is left when either side dies,
lies or gives up."""

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
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest

from geartrain.ams.kernels import _core
from tests.support import frame_codec
from tests.support.frame_calls import ask, begin, dial, expected, flipped, mailboxes, pull, push

SOON = 10.0
"""Seconds in which what must happen has happened, however busy the machine."""


class Shard:
    """A toy handler behind a server, and one way to it."""

    def __init__(self, way: str = "ring", **limits: Any) -> None:
        self.way = way
        self.handler = _core.ToyHandler()
        self.server = _core.DataServer(self.handler, host="127.0.0.1", **limits)

    def connect(self, **limits: Any) -> _core.DataConnection:
        return dial(self.way, *self.server.offer(), **limits)

    def connect_ring(self, **limits: Any) -> _core.RingConnection:
        name, secret, _ = self.server.offer()
        return _core.connect_ring(name, secret, SOON, **limits)

    def told(self) -> list[str]:
        """An offer, as another process is told it."""
        name, secret, port = self.server.offer()
        return [self.way, name, secret.hex(), str(port)]


@pytest.fixture
def make() -> Iterator[Callable[..., Shard]]:
    made: list[Shard] = []

    def one(way: str = "ring", **limits: Any) -> Shard:
        made.append(Shard(way, **limits))
        return made[-1]

    yield one
    for shard in made:
        shard.handler.release()
        shard.handler.answer_later()
        shard.server.close()


@pytest.fixture(params=["ring", "tcp"])
def shard(make: Callable[..., Shard], request: pytest.FixtureRequest) -> Shard:
    return make(request.param)


def until(condition: Callable[[], bool], other: _core.DataConnection) -> None:
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
    assert mailboxes(ours) == shard.server.num_mailboxes == (shard.way == "ring")


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


@pytest.mark.parametrize("way", ["ring", "tcp"])
def test_a_secret_opens_one_connection_in_time(make: Callable[..., Shard], way: str) -> None:
    shard = make(way, most_connections=2)
    name, secret, port = shard.server.offer()
    ours = dial(way, name, secret, port)
    for wrong in (secret, bytes(32)):
        with pytest.raises((RuntimeError, OSError), match=r"refuses the connection|has ended|reset|[Bb]roken pipe"):
            dial(way, name, wrong, port)
    with pytest.raises(RuntimeError, match="no place and secret"):
        dial(way, name, b"short", port)
    other = shard.connect()
    with pytest.raises(RuntimeError, match="2 connections are taken already"):
        shard.server.offer()
    late = make(way, greeting_seconds=0)
    with pytest.raises((RuntimeError, OSError), match=r"refuses the connection|has ended|reset|[Bb]roken pipe"):
        late.connect()
    for one in (ours, other):
        ask(one, pull("rows", [1]))


def test_who_says_nothing_is_let_go_of(make: Callable[..., Shard]) -> None:
    shard = make(greeting_seconds=0.05)
    name, _, port = shard.server.offer()
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as near,
        socket.create_connection(("127.0.0.1", port)) as far,
    ):
        near.connect("\0" + name)
        far.send(b"GTRF")
        for silent in (near, far):
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


def test_a_call_that_is_given_up_leaves_its_mailbox_to_the_shard(make: Callable[..., Shard]) -> None:
    shard = make()
    ours, other = shard.connect_ring(), shard.connect_ring()
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
    ours = shard.connect()

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
    assert (shard.way == "ring") <= mailboxes(ours) == shard.server.num_mailboxes <= 16


def test_the_shard_holds_no_more_mailboxes_than_it_may(make: Callable[..., Shard]) -> None:
    shard = make(most_mailboxes=2)
    ours, other = shard.connect_ring(), shard.connect_ring()
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
    ours = shard.connect_ring(most_pool_bytes=(7 << 20) + (100 << 10), most_mailboxes=3)
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


def test_idle_mailboxes_are_let_go_of(make: Callable[..., Shard]) -> None:
    shard = make()
    ours = shard.connect_ring(idle_seconds=0.0)
    for _ in range(3):
        ask(ours, pull("rows", [1]))
    assert ours.num_mailboxes == 1
    other = shard.connect_ring()
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


def test_a_reply_without_room_is_refused(make: Callable[..., Shard]) -> None:
    ours = make().connect()
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
    until(lambda: shard.server.num_mailboxes == mailboxes(other), other)


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
server = _core.DataServer(handler, host="127.0.0.1")
name, secret, port = server.offer()
print(name, secret.hex(), port, flush=True)
while sys.stdin.readline():
    print(handler.await_held(10.0), flush=True)
"""


@pytest.mark.parametrize("way", ["ring", "tcp"])
@pytest.mark.parametrize("step", ["connected", "begun", "at work", "waiting"])
def test_a_shard_that_is_killed_ends_the_calls_to_it(step: str, way: str) -> None:
    with process(SERVER) as child:
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


@pytest.mark.parametrize("way", ["ring", "tcp"])
def test_a_shard_that_is_stopped_is_waited_for_as_long_as_the_caller_wants(way: str) -> None:
    with process(SERVER) as child:
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


SMALL = """
import resource, sys
from geartrain.ams.kernels import _core
from tests.support.frame_calls import ask, expected, pull

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


def test_memory_that_cannot_be_had_costs_nothing(make: Callable[..., Shard]) -> None:
    shard = make()
    name, secret, _ = shard.server.offer()
    done = subprocess.run([sys.executable, "-c", SMALL, name, secret.hex()], capture_output=True, text=True, timeout=60)
    assert done.stdout == "full\nwhole\n", done.stderr


def test_a_call_given_up_by_tcp_leaves_the_connection_to_the_others(make: Callable[..., Shard]) -> None:
    shard = make("tcp")
    ours = shard.connect()
    held, _ = begin(ours, [pull("held", range(1000))])
    assert shard.handler.await_held(SOON)
    assert not held.wait(0.05)
    del held
    other, number = begin(ours, [pull("rows", [3])])
    shard.handler.release()
    assert other.wait(SOON)  # behind the reply that nobody wants
    assert frame_codec.parsed_reply(other.reply(), number, [16])[0]["rows"] == expected([3])


def test_calls_that_no_frame_may_hold_are_refused_by_tcp(make: Callable[..., Shard]) -> None:
    ours = make("tcp").connect(most_frame_bytes=1 << 20, most_in_flight_bytes=1 << 20)
    for sizes in ((2 << 20, 64), (64, 2 << 20)):
        with pytest.raises(_core.ConnectionFull, match="too large"):
            ours.begin(*sizes)
    call = ours.begin(64, 1 << 19)
    with pytest.raises(_core.ConnectionFull, match="in flight"):
        ours.begin(64, 1 << 19)
    del call
    assert ours.begin(64, 1 << 19) is not None


def test_large_frames_travel_both_ways_at_once_by_tcp(make: Callable[..., Shard]) -> None:
    """More than all socket buffers hold, so that who sends must read meanwhile."""
    ours = make("tcp").connect()
    ids = range(4_000)

    def work(_: int) -> None:
        for _ in range(3):
            read, written = ask(ours, pull("rows", ids, 256), push("rows", ids, 256))
            assert read["rows"] == expected(ids, 256) and written["created"] == len(ids)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))


def test_a_shard_takes_no_more_memory_for_frames_than_it_may(make: Callable[..., Shard]) -> None:
    shard = make("tcp", most_frame_bytes=1 << 20, most_bytes=200 << 10)
    ours = shard.connect()
    small = pull("rows", [1])
    for large in (push("rows", range(10_000), 8), pull("rows", range(10_000), 8)):
        (reply,) = ask(ours, large)
        assert (reply["error"], reply["retry_after_seconds"]) == ("Busy", 0.1)
        assert ask(ours, small)[0]["rows"] == expected([1])
    (reply,) = ask(ours, pull("rows", range(100), 4_000))
    assert reply["error"] == "MessageTooLarge" and "ask for fewer rows at once" in reply["message"]
    with pytest.raises(_core.ConnectionLost):
        ask(ours, push("rows", range(50_000), 8))  # nothing is read of what is too large
    assert ask(shard.connect(), small)[0]["rows"] == expected([1])


def test_a_client_that_stops_in_the_middle_of_a_frame_is_let_go_of(make: Callable[..., Shard]) -> None:
    shard = make("tcp", silence_seconds=0.1)
    _, secret, port = shard.server.offer()
    with socket.create_connection(("127.0.0.1", port)) as ours:
        ours.settimeout(SOON)
        ours.sendall(frame_codec.header(3, 0, 0, 32) + secret)
        assert ours.recv(64, socket.MSG_WAITALL) == frame_codec.header(3, 0, 0, 0)
        frame = frame_codec.request(1, 0, [push("rows", range(100))])
        for byte in frame[:200]:  # in pieces, however small
            ours.send(bytes([byte]))
        ours.sendall(frame[200:])
        head = ours.recv(64, socket.MSG_WAITALL)
        rest = ours.recv(frame_codec.HEADER.unpack(head[:56])[6], socket.MSG_WAITALL)
        assert frame_codec.parsed_reply(head + rest, 1, [0])[0]["created"] == 100
        ours.sendall(frame[:-1])
        assert ours.recv(1) == b""
    assert shard.handler.num_writes == 1


def test_a_client_that_takes_no_replies_is_not_read_on_and_let_go_of(make: Callable[..., Shard]) -> None:
    shard = make("tcp", silence_seconds=0.3)
    _, secret, port = shard.server.offer()
    with socket.create_connection(("127.0.0.1", port)) as ours:
        ours.sendall(frame_codec.header(3, 0, 0, 32) + secret)
        frame = frame_codec.request(1, 0, [pull("rows", range(4_000), 1_000)])
        with pytest.raises(OSError, match=r"reset|pipe"):  # 16 MB each
            for _ in range(10_000):
                ours.sendall(frame)
    until(lambda: shard.server.num_connections == 1, shard.connect())


@pytest.mark.parametrize("reply", ["another call's", "too long", "damaged", "cut"])
def test_a_shard_that_answers_otherwise_is_left_by_tcp(reply: str) -> None:
    good = frame_codec.reply(5, [{"created": 1}])
    data = {
        "another call's": frame_codec.reply(6, [{"created": 1}]) + good,
        "too long": frame_codec.reply(5, [{"rows": bytes(10_000)}]),
        "damaged": flipped(good, 20),
        "cut": good[:-1],
    }[reply]
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:

        def serve() -> None:
            there, _ = listener.accept()
            with there:
                there.recv(96, socket.MSG_WAITALL)
                there.sendall(frame_codec.header(3, 0, 0, 0))
                there.recv(1)
                there.sendall(data)

        serving = threads.submit(serve)
        ours = _core.connect_tcp("127.0.0.1", listener.getsockname()[1], bytes(32), SOON)
        frame = frame_codec.request(5, 0, [push("rows", [1])])
        call = ours.begin(len(frame), 2048)
        call.room(len(frame))[:] = np.frombuffer(frame, np.uint8)
        call.send()
        if reply == "another call's":  # that was given up, perhaps
            assert call.wait(SOON)
            assert frame_codec.parsed_reply(call.reply(), 5, [0])[0]["created"] == 1
        else:
            with pytest.raises(_core.ConnectionLost):
                call.wait(SOON)
        serving.result()


def test_where_no_shard_listens_by_tcp_nothing_is_connected_to() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(RuntimeError, match="does not greet"):
            _core.connect_tcp("127.0.0.1", port, bytes(32), 0.05)
    with pytest.raises(OSError, match="refused"):
        _core.connect_tcp("127.0.0.1", port, bytes(32), SOON)
    with pytest.raises(RuntimeError, match="no address of"):
        _core.connect_tcp("no.such.host.invalid", 1, bytes(32), SOON)
    with pytest.raises(OSError, match="cannot listen"):
        _core.DataServer(_core.ToyHandler(), host="192.0.2.1")


def test_a_reply_that_came_in_time_is_read_by_tcp_though_it_is_asked_for_late(make: Callable[..., Shard]) -> None:
    shard = make("tcp")
    ours, other = shard.connect(), shard.connect()
    first, _ = begin(ours, [push("rows", range(1000))])
    second, _ = begin(ours, [push("rows", [3])])
    until(lambda: shard.handler.num_writes == 2, other)
    ask(other, pull("rows", [1]))  # both are answered
    assert second.wait(0) and first.wait(0)
    third, _ = begin(ours, [pull("held", [1])])
    assert not third.wait(0)


@contextmanager
def takes_nothing() -> Iterator[_core.DataConnection]:
    """A connection by TCP to a shard that greets and is silent from then on."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:

        def serve() -> None:
            there, _ = listener.accept()
            with there:
                there.sendall(frame_codec.header(3, 0, 0, 0))
                over.wait(60)

        threads.submit(serve)
        try:
            yield _core.connect_tcp("127.0.0.1", listener.getsockname()[1], bytes(32), SOON)
        finally:
            over.set()


def test_a_shard_that_takes_no_bytes_is_waited_for_as_long_as_the_caller_wants() -> None:
    with takes_nothing() as ours:
        began = time.monotonic()
        with pytest.raises(_core.ConnectionLost):
            ours.begin(64 << 20, 64).send(0.2)
        assert time.monotonic() - began < SOON
    with takes_nothing() as ours, ThreadPoolExecutor(1) as threads:
        writing = threads.submit(ours.begin(64 << 20, 64).send)
        while not writing.running():
            pass
        ours.close()
        with pytest.raises(_core.ConnectionLost):
            writing.result(SOON)


def test_ctrl_c_ends_what_is_sent_to_a_shard_that_takes_no_bytes() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    began = time.monotonic()
    try:
        with takes_nothing() as ours:
            call = ours.begin(64 << 20, 64)
            threading.Timer(0.05, _thread.interrupt_main).start()
            with pytest.raises(KeyboardInterrupt):
                call.send()
            assert ours.is_lost  # it has half of a frame
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - began < SOON


@pytest.mark.exact_memory
def test_a_request_that_there_is_no_memory_for_takes_none_of_what_may_be_in_flight(make: Callable[..., Shard]) -> None:
    ours = make("tcp").connect(most_frame_bytes=1 << 60, most_in_flight_bytes=1 << 60)
    for _ in range(2):
        with pytest.raises(MemoryError):
            ours.begin(3 << 58, 64)


def test_a_write_that_waits_on_keeps_no_memory_of_a_caller_that_was_answered(make: Callable[..., Shard]) -> None:
    shard = make()
    ours, other = shard.connect_ring(), shard.connect_ring()
    assert ask(ours, push("later", [1]), seconds=0.1)[0]["error"] == "StepPending"
    ours.close()
    until(lambda: shard.server.num_mailboxes == mailboxes(other), other)


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


def test_strangers_by_tcp_keep_nobody_from_shared_memory(make: Callable[..., Shard]) -> None:
    shard = make("tcp", greeting_seconds=60.0)
    _, _, port = shard.server.offer()
    with ExitStack() as strangers:
        for _ in range(70):
            strangers.enter_context(socket.create_connection(("127.0.0.1", port)))
        assert ask(shard.connect_ring(), pull("rows", [1]))[0]["rows"] == expected([1])
