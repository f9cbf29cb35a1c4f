"""Either end of a shared-memory connection against one that does not keep to it: everything is spoken by hand here."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import secrets
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from geartrain.ams.kernels import _core
from geartrain.ams.observe import failpoints
from geartrain.ams.server.shard import Shard
from geartrain.ams.values.errors import ProtocolError
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.shard_messages import CallContext, CreateTable, Pull
from geartrain.ams.values.specs import Constant, TableSpec
from tests.support import frame_codec
from tests.support.frame_calls import ask, begin, dial, expected, pull, push

PAGE = 4096
WAKE, ADDED, CLOSED, REFUSED = 1, 2, 3, 4
FREE, REQUEST, REPLY = 0, 1, 3
NOTICE = struct.Struct("<IIQQQ")
CONTROL = struct.Struct("<IIQQ")
"""State, whether it is awaited, bytes of request and reply."""
SIZES = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
PUNCH_HOLE = 3
SOON = 10.0


def file_of(size: int, *, seals: int = SIZES, holes: bool = False) -> int:
    descriptor = os.memfd_create("stranger", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    if not holes:
        os.posix_fallocate(descriptor, 0, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def num_descriptors() -> int:
    """Of this process."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


class Stranger:
    """A client of the data plane, which may do what no other does."""

    def __init__(self, server: _core.DataServer) -> None:
        name, secret, _ = server.offer()
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.connect("\0" + name)
        self.socket.settimeout(SOON)
        page = file_of(PAGE)
        self.page = mmap.mmap(page, PAGE)
        socket.send_fds(self.socket, [frame_codec.header(3, 0, 0, 32) + secret], [page])
        os.close(page)
        answer, (self.sleep,), *_ = socket.recv_fds(self.socket, 64, 1)
        assert answer == frame_codec.header(3, 0, 0, 0)

    def add(self, index: int, request: int, reply: int, descriptor: int | None) -> int:
        """Offer a mailbox; what the shard says."""
        notice = NOTICE.pack(ADDED, index, request, reply, 7)
        if descriptor is None:
            self.socket.send(notice)
        else:
            socket.send_fds(self.socket, [notice], [descriptor])
        kind, found, *_, number = NOTICE.unpack(self.socket.recv(64))
        assert (found, number) == (index, 7)
        return int(kind)

    def mailbox(self, index: int = 0) -> mmap.mmap:
        descriptor = file_of(3 * PAGE)
        memory = mmap.mmap(descriptor, 3 * PAGE)
        assert self.add(index, PAGE, PAGE, descriptor) == ADDED
        os.close(descriptor)
        return memory

    def send(
        self, memory: mmap.mmap, frame: bytes, num_bytes: int | None = None, bits: int = 1, state: int = REQUEST
    ) -> None:
        memory[PAGE : PAGE + len(frame)] = frame
        memory[: CONTROL.size] = CONTROL.pack(state, 0, len(frame) if num_bytes is None else num_bytes, 0)
        self.page[:8] = struct.pack("<Q", bits)
        self.socket.send(NOTICE.pack(WAKE, 0, 0, 0, 0))

    def has_ended(self) -> bool:
        try:
            return self.socket.recv(64) == b""
        except ConnectionResetError:
            return True


@pytest.fixture
def server() -> Iterator[_core.DataServer]:
    one = _core.DataServer(_core.ToyHandler())
    yield one
    one.close()


@pytest.fixture
def other(server: _core.DataServer) -> _core.RingConnection:
    return _core.connect_ring(*server.offer()[:2], SOON)


FRAME = frame_codec.request(5, 0, [pull("rows", [3])])


def reply_in(memory: mmap.mmap, rows_bytes: Sequence[int] = (16,)) -> list[frame_codec.Described]:
    while CONTROL.unpack(memory[: CONTROL.size])[0] != REPLY:
        pass
    size = CONTROL.unpack(memory[: CONTROL.size])[3]
    return frame_codec.parsed_reply(memory[2 * PAGE : 2 * PAGE + size], 5, rows_bytes)


def test_a_call_by_hand_is_answered(server: _core.DataServer) -> None:
    ours = Stranger(server)
    memory = ours.mailbox(63)
    ours.send(memory, FRAME, bits=1 << 63)
    assert reply_in(memory)[0]["rows"] == expected([3])


@pytest.mark.parametrize(
    ("parts", "file"),
    [
        ((PAGE, PAGE), lambda: file_of(3 * PAGE, seals=fcntl.F_SEAL_GROW)),
        ((PAGE, PAGE), lambda: file_of(3 * PAGE, seals=SIZES | fcntl.F_SEAL_WRITE)),
        ((PAGE, PAGE), lambda: file_of(3 * PAGE, seals=SIZES | fcntl.F_SEAL_SEAL)),
        ((PAGE, PAGE), lambda: file_of(3 * PAGE, holes=True)),
        ((PAGE, PAGE), lambda: file_of(2 * PAGE)),
        ((PAGE, 2 * PAGE), lambda: file_of(3 * PAGE)),
        ((PAGE, PAGE), lambda: os.open("/dev/zero", os.O_RDWR)),
        ((PAGE, PAGE), lambda: None),
        ((PAGE, 0), lambda: file_of(2 * PAGE)),
        ((PAGE, 5), lambda: file_of(2 * PAGE + 5)),
        ((1 << 40, 1 << 40), lambda: file_of(3 * PAGE)),
        ((2**64 - PAGE, 3 * PAGE), lambda: file_of(3 * PAGE)),
        ((256 << 20, PAGE), lambda: file_of(3 * PAGE)),
    ],
)
def test_memory_that_is_not_as_it_must_be_is_refused(
    server: _core.DataServer, parts: tuple[int, int], file: Callable[[], int | None]
) -> None:
    ours = Stranger(server)
    descriptor = file()
    assert ours.add(0, *parts, descriptor) == REFUSED
    if descriptor is not None:
        os.close(descriptor)
    assert server.num_mailboxes == 0
    memory = ours.mailbox()
    assert ours.add(0, PAGE, PAGE, file_of(3 * PAGE)) == REFUSED  # there is one of this number
    assert ours.add(64, PAGE, PAGE, file_of(3 * PAGE)) == REFUSED
    ours.send(memory, FRAME)
    assert reply_in(memory)[0]["rows"] == expected([3])


def test_memory_cannot_be_taken_back_once_the_shard_has_it(server: _core.DataServer) -> None:
    ours = Stranger(server)
    descriptor = file_of(3 * PAGE)
    assert ours.add(0, PAGE, PAGE, descriptor) == ADDED
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(descriptor, PAGE)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.fallocate(descriptor, PUNCH_HOLE, ctypes.c_long(0), ctypes.c_long(3 * PAGE)) == -1


def test_the_page_of_the_shard_can_only_be_read(server: _core.DataServer) -> None:
    ours = Stranger(server)
    mmap.mmap(ours.sleep, PAGE, prot=mmap.PROT_READ)
    with pytest.raises(PermissionError):
        mmap.mmap(ours.sleep, PAGE)
    with pytest.raises(PermissionError):
        os.ftruncate(ours.sleep, 0)
    with pytest.raises(PermissionError):
        os.write(ours.sleep, b"x")


@pytest.mark.parametrize(
    "packet", [NOTICE.pack(9, 0, 0, 0, 0), NOTICE.pack(CLOSED, 64, 0, 0, 0), NOTICE.pack(REFUSED, 0, 0, 0, 0), b"short"]
)
def test_an_unknown_packet_ends_the_connection(
    server: _core.DataServer, other: _core.RingConnection, packet: bytes
) -> None:
    ours = Stranger(server)
    ours.mailbox()
    ours.socket.send(packet)
    assert ours.has_ended()
    assert ask(other, pull("rows", [1]))[0]["rows"] == expected([1])


@pytest.mark.parametrize("num_bytes", [0, 63, PAGE + 1, 2**32, 2**63, 2**64 - 1])
def test_a_size_beyond_the_mailbox_ends_the_connection(
    server: _core.DataServer, other: _core.RingConnection, num_bytes: int
) -> None:
    ours = Stranger(server)
    ours.send(ours.mailbox(), FRAME, num_bytes)
    assert ours.has_ended()
    assert ask(other, pull("rows", [1]))[0]["rows"] == expected([1])


@pytest.mark.parametrize("hello", [b"", b"x", FRAME, frame_codec.header(3, 0, 0, 32) + bytes(32)])
def test_who_greets_otherwise_is_sent_away(server: _core.DataServer, hello: bytes) -> None:
    name, _, _ = server.offer()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as ours:
        ours.connect("\0" + name)
        ours.settimeout(SOON)
        ours.send(hello)
        with suppress(ConnectionResetError):
            assert ours.recv(64) == b""


def test_descriptors_that_nobody_asked_for_are_closed(server: _core.DataServer, other: _core.RingConnection) -> None:
    ours = Stranger(server)
    ask(other, pull("rows", [1]))
    before = num_descriptors()
    for _ in range(5):
        socket.send_fds(ours.socket, [NOTICE.pack(CLOSED, 1, 0, 0, 0)], [ours.sleep, ours.sleep])
    assert ours.add(1, 0, PAGE, None) == REFUSED  # all of it was looked at
    assert num_descriptors() == before


def test_requests_that_are_not_there_are_passed_over(server: _core.DataServer, other: _core.RingConnection) -> None:
    ours = Stranger(server)
    memory = ours.mailbox()
    for state in (FREE, 2, REPLY, 77, 2**32 - 1):
        ours.send(memory, FRAME, bits=2**64 - 1, state=state)
        assert ask(other, pull("rows", [1]))[0]["rows"] == expected([1])
    ours.send(memory, FRAME)
    assert reply_in(memory)[0]["rows"] == expected([3])


def test_memory_that_changes_while_it_is_read_harms_nobody(
    server: _core.DataServer, other: _core.RingConnection
) -> None:
    """A thread scribbles over request, headers and sizes all the while."""
    random = np.random.default_rng(5)
    frame = frame_codec.request(5, 0, [pull("rows", range(20)), push("rows", range(40)), pull("rows", [1, 2])])
    over = threading.Event()
    for _ in range(4):
        ours = Stranger(server)
        memory = ours.mailbox()
        over.clear()

        def scribble(memory: mmap.mmap = memory) -> None:
            view = np.frombuffer(memory, np.uint8)
            while not over.is_set():
                at = PAGE + int(random.integers(64, len(frame)))
                before = view[at]
                view[at] = random.integers(256)
                view[at] = before

        thread = threading.Thread(target=scribble)
        thread.start()
        try:
            for _ in range(100):
                ours.send(memory, frame)
                ask(other, pull("rows", [1]))
        except OSError:  # sent away
            pass
        finally:
            over.set()
            thread.join()
    assert ask(other, pull("rows", [1]))[0]["rows"] == expected([1])


@pytest.fixture
def engine() -> Iterator[Shard]:
    one = Shard(0, np.arange(4096), incarnation=1)
    spec = TableSpec(name="t", dim=4, num_rows=4096, optimizer=SGD(1.0), initializer=Constant(0))
    one.submit(CallContext(), CreateTable(spec=spec)).result(SOON)
    yield one
    one.close()


def written(stream: str) -> frame_codec.Described:
    return push("t", [3], stream=stream, incarnation=1, sequence=1)


@contextmanager
def paused(place: Path) -> Iterator[Callable[[], bool]]:
    """Writes wait before they are applied until the block ends; whether one does."""
    with failpoints.armed(f"shard.apply.before=pause({place})") as passes:
        try:
            yield lambda: passes.fired.total() > 0
        finally:
            place.touch()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_ids_that_change_after_they_were_checked_are_not_read_again(engine: Shard, tmp_path: Path) -> None:
    server = _core.DataServer(_core.EngineHandler(engine.engine))
    ours = Stranger(server)
    memory = ours.mailbox()
    frame = frame_codec.request(5, 0, [written("s")])
    at = PAGE + frame.index(struct.pack("<q", 3), 200)
    with paused(tmp_path / "go") as is_paused:
        ours.send(memory, frame)
        until(is_paused)
        memory[at : at + 8] = struct.pack("<q", 2**62)
    (reply,) = reply_in(memory, [0])
    assert reply["created"] == 1
    rows = np.empty((4096, 4), np.float32)
    engine.pull(CallContext(), Pull(table="t", ids=np.arange(4096), out=rows))
    assert np.flatnonzero(rows.any(axis=1)).tolist() == [3]
    server.close()


def test_a_flood_of_packets_holds_up_nobody(engine: Shard, tmp_path: Path) -> None:
    server = _core.DataServer(_core.EngineHandler(engine.engine), host="127.0.0.1")
    flooding, near, far = Stranger(server), dial("ring", *server.offer()), dial("tcp", *server.offer())
    for item in (near, far):
        ask(item, pull("t", [1]))
    with ExitStack() as first, ExitStack() as second:
        is_paused = first.enter_context(paused(tmp_path / "first"))
        calls = [begin(near, [written("near")])]
        until(is_paused)
        flooding.socket.setblocking(False)
        sent = 0
        with suppress(BlockingIOError):
            while flooding.socket.send(NOTICE.pack(ADDED, 0, 0, 0, sent)):
                sent += 1
        calls.append(begin(far, [written("far")]))
        is_paused = second.enter_context(paused(tmp_path / "second"))
        (tmp_path / "first").touch()
        until(is_paused)
        answered = 0
        with suppress(BlockingIOError):
            while flooding.socket.recv(64):
                answered += 1
    assert answered <= 32 < sent  # before the other's request was begun
    assert all(call.wait(SOON) for call, _ in calls)
    server.close()


class Impostor:
    """A shard's end, which greets as it is told and answers nothing by itself."""

    def __init__(self, greet: Callable[[socket.socket, Impostor], None]) -> None:
        self.name = f"impostor-{secrets.token_hex(8)}"
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind("\0" + self.name)
        self.listener.listen()
        self.mailboxes: list[mmap.mmap] = []
        self.thread = threading.Thread(target=self._serve, args=(greet,))
        self.thread.start()

    def _serve(self, greet: Callable[[socket.socket, Impostor], None]) -> None:
        connected, _ = self.listener.accept()
        with connected, suppress(OSError):
            connected.settimeout(SOON)
            _, descriptors, *_ = socket.recv_fds(connected, 128, 1)
            os.close(descriptors[0])
            greet(connected, self)

    def __enter__(self) -> Impostor:
        return self

    def __exit__(self, *_: object) -> None:
        self.listener.close()
        self.thread.join()


HELLO = frame_codec.header(3, 0, 0, 0)


def greeting(hello: bytes, descriptor: Callable[[], int]) -> Callable[[socket.socket, Impostor], None]:
    return lambda connected, _: (socket.send_fds(connected, [hello], [descriptor()]), None)[1]


@pytest.mark.parametrize(
    ("greet", "says"),
    [
        (lambda connected, _: connected.close(), "refuses the connection"),
        (lambda connected, _: connected.send(HELLO), "refuses the connection"),
        (greeting(FRAME[:64], lambda: file_of(PAGE)), "another kind"),
        (greeting(HELLO, lambda: file_of(PAGE, seals=0)), "not a shard"),
        (greeting(HELLO, lambda: file_of(2 * PAGE)), "not a shard"),
        (greeting(HELLO, lambda: os.open("/dev/null", os.O_RDWR)), "not a shard"),
    ],
)
def test_who_is_no_shard_is_not_connected_to(greet: Callable[[socket.socket, Impostor], None], says: str) -> None:
    with Impostor(greet) as there, pytest.raises(RuntimeError, match=says):
        _core.connect_ring(there.name, bytes(32), SOON)


def test_a_shard_that_does_not_greet_is_not_waited_for() -> None:
    go_on = threading.Event()
    with Impostor(lambda *_: (go_on.wait(SOON), None)[1]) as there, ExitStack() as stack:
        stack.callback(go_on.set)
        with pytest.raises(RuntimeError, match="does not answer"):
            _core.connect_ring(there.name, bytes(32), 0.05)
    with pytest.raises(OSError, match="refused"):
        _core.connect_ring(there.name, bytes(32), SOON)


@pytest.mark.parametrize("size", [0, 64, 2**20, 2**64 - 1])
def test_a_reply_is_never_longer_than_its_place(size: int) -> None:
    def lie(connected: socket.socket, _: Impostor) -> None:
        socket.send_fds(connected, [HELLO], [file_of(PAGE)])
        notice, (descriptor,), *_ = socket.recv_fds(connected, 64, 1)
        memory = mmap.mmap(descriptor, 0)
        connected.send(notice)
        while CONTROL.unpack(memory[: CONTROL.size])[0] != REQUEST:
            pass
        memory[: CONTROL.size] = CONTROL.pack(REPLY, 0, 0, size)
        connected.recv(64)

    with Impostor(lie) as there:
        ours = _core.connect_ring(there.name, bytes(32), SOON)
        call = ours.begin(len(FRAME), 1000)
        call.send()
        assert call.wait(SOON)
        assert len(call.reply()) <= 64 << 10
        with pytest.raises(ProtocolError, match=r"shorter than its header|does not begin with"):
            _core.parse_reply_frame(call.reply(), 5, [(16, 0)])
        ours.close()


def test_a_mailbox_that_is_not_taken_in_time_is_not_waited_for() -> None:
    def ignore(connected: socket.socket, _: Impostor) -> None:
        socket.send_fds(connected, [HELLO], [file_of(PAGE)])
        late, descriptors, *_ = socket.recv_fds(connected, 64, 1)
        assert NOTICE.unpack(connected.recv(64))[0] == CLOSED
        connected.send(late)  # too late
        again, descriptors, *_ = socket.recv_fds(connected, 64, 1)
        assert descriptors
        connected.send(again)
        connected.recv(64)

    with Impostor(ignore) as there:
        ours = _core.connect_ring(there.name, bytes(32), SOON, answer_seconds=0.05)
        with pytest.raises(_core.ConnectionFull):
            ours.begin(64, 64)
        assert ours.begin(64, 64) is not None
        ours.close()


def test_a_shard_that_ends_is_seen_to_end_behind_an_answer_that_came_too_late() -> None:
    begun = threading.Event()

    def answer_late(connected: socket.socket, _: Impostor) -> None:
        socket.send_fds(connected, [HELLO], [file_of(PAGE)])
        first = connected.recv(64)
        connected.send(first)
        late = connected.recv(64)
        assert NOTICE.unpack(connected.recv(64))[0] == CLOSED
        connected.send(late)
        assert begun.wait(SOON)

    with Impostor(answer_late) as there, ExitStack() as stack:
        stack.callback(begun.set)
        ours = _core.connect_ring(there.name, bytes(32), SOON, answer_seconds=0.5)
        call = ours.begin(len(FRAME), 1000)
        with pytest.raises(_core.ConnectionFull):
            ours.begin(1 << 20, 64)
        call.send()
        begun.set()
        with pytest.raises(_core.ConnectionLost):
            call.wait(2.0)


def test_callers_do_not_wait_for_new_memory_one_after_the_other() -> None:
    over = threading.Event()

    def ignore(connected: socket.socket, _: Impostor) -> None:
        socket.send_fds(connected, [HELLO], [file_of(PAGE)])
        over.wait(60)

    with Impostor(ignore) as there, ExitStack() as stack:
        stack.callback(over.set)
        ours = _core.connect_ring(there.name, bytes(32), SOON, answer_seconds=0.5)

        def begin(_: int) -> None:
            with pytest.raises(_core.ConnectionFull):
                ours.begin(64, 64)

        began = time.monotonic()
        with ThreadPoolExecutor(10) as threads:
            list(threads.map(begin, range(10)))
        assert time.monotonic() - began < 4
        ours.close()


ANOTHER_USER = """
import os, socket, sys
os.setgid(65534)
os.setuid(65534)
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
    listener.bind("\\0" + sys.argv[1])
    listener.listen()
    print("listens", flush=True)
    print(listener.accept()[0].recv(4096).hex(), flush=True)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes a process of another user")
def test_another_user_who_listens_by_the_name_of_a_shard_is_told_no_secret() -> None:
    """The name of a shard of another machine is told to whoever may read it there, and free here."""
    name, secret = f"geartrain-{secrets.token_hex(16)}", secrets.token_bytes(32)
    command = [sys.executable, "-I", "-S", "-c", ANOTHER_USER, name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as them:
        assert them.stdout is not None and them.stdout.readline() == "listens\n"
        with pytest.raises(RuntimeError, match="another user"):
            _core.connect_ring(name, secret, SOON)
        assert them.stdout.readline() == "\n"
