"""Strangers: malformed handshakes, frames and calls against every role of a cluster under certificates, as processes.

An honest client pulls and asks beside them, and looks at every row that it is given. Attackers take turns through
:data:`KINDS`, at their lowest priority. ``python -m tests.faults.strangers --attacks 1_000_000`` makes as many against
one cluster and prints what was counted; the campaign's ``strangers`` makes fewer with each seed. To measure what they
take from the honest client on a busy machine, give all but the attackers the right of way: ``chrt -r 5 python ...``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import socket
import ssl
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message_factory import GetMessageClass

import geartrain as gt
from geartrain.ams.kernels import _core
from geartrain.ams.pb.v1 import gear_pb2, graph_pb2, scheduler_pb2, shard_pb2
from geartrain.ams.rpc.channel import HANDSHAKE_SECONDS
from geartrain.ams.rpc.server.access import CALLERS
from geartrain.ams.rpc.server.rights import OPENS_ROWS
from geartrain.ams.values.config import CERTIFIED_ROLES, CLIENT, identify, split_address
from geartrain.launch.certificates import create_authority, issue
from tests.faults.children import Child
from tests.integration.rows.test_malformed_requests import damaged
from tests.support import frame_calls, frame_codec
from tests.support.forkserver import FORKSERVER
from tests.support.role_process import RoleProcess
from tests.support.tls_client import DATA, HANDSHAKE, TlsClient
from tests.unit.ams.kernels.test_tls import first_words
from tests.unit.ams.server.test_frames_of_strangers import LARGE, TABLES, lie

HONEST, HONEST_ROWS, HONEST_DIM = "honest", 10_000, 16
RATE, WINDOW_SECONDS, WINDOWS = 100.0, 1.0, 8
"""Attacks a second while it is measured what they take from the honest client; a window with them, one without."""
MAX_MORE_BYTES, MAX_MORE_FILES = 64 << 20, 16
"""That a role may have at the end, beside what it had after the first half."""
_SECONDS = 30.0
_PAUSE_SECONDS = 0.01
"""Of the honest client between two calls, while nobody measures it."""
_STALE_SECONDS, _PER_OFFER = 2.0, 200
_FILES = {
    "scheduler": scheduler_pb2.DESCRIPTOR.services_by_name["Scheduler"],
    "server": shard_pb2.DESCRIPTOR.services_by_name["Shard"],
    "graph": graph_pb2.DESCRIPTOR.services_by_name["Graph"],
    "slowgear": gear_pb2.DESCRIPTOR.services_by_name["Gear"],
}
_H2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


class Attacker:
    """What one attacker has: addresses by role, certificates, chance."""

    def __init__(self, addresses: dict[str, str], folder: Path, seed: int) -> None:
        self.chance = random.Random(seed)
        self._addresses, self._folder = addresses, folder
        self._texts = ["", "plain", "dense", "image", "t", "sgd", "x" * 300, "\0", f"{folder}/x", "../x", "uniform"]
        self._channels = {role: [self._channel(role, own) for own in ("client", "server")] for role in _FILES}
        self._open_rows = self._channels["server"][0].unary_unary(OPENS_ROWS)
        _, secret, self._data_port = self.offer()
        self._hello, self._hello_at, self._hellos = first_words(secret), time.monotonic(), 0
        self._frames: _core.DataConnection | None = None
        self._number = seed
        self._threads = ThreadPoolExecutor(4)

    def offer(self) -> tuple[str, bytes, int]:
        """How to connect for rows, as :class:`TlsClient` asks for it."""
        reply = shard_pb2.OpenDataPlaneReply.FromString(self._open_rows(b"", timeout=_SECONDS))
        return reply.socket, reply.secret, reply.port

    def garbage_for_rows(self) -> None:
        """Bytes on the port for rows."""
        self._say(("127.0.0.1", self._data_port), self.chance.randbytes(self.chance.choice([1, 5, 60, 3000])))

    def hellos_for_rows(self) -> None:
        """A ClientHello that names a good secret, damaged."""
        self._hellos += 1
        if self._hellos % _PER_OFFER == 0 or time.monotonic() - self._hello_at > _STALE_SECONDS:
            self._hello, self._hello_at = first_words(self.offer()[1]), time.monotonic()
        self._say(("127.0.0.1", self._data_port), damaged(self._hello, self.chance))

    def records_for_rows(self) -> None:
        """After a good handshake: records, changes of keys, hellos and headers of frames that are damaged."""
        chance = self.chance
        with TlsClient(self) as them:  # type: ignore[arg-type]
            hello = frame_codec.header(3, 0, 0, 32) + chance.randbytes(32)
            frame = frame_codec.request(1, 1.0, [frame_calls.pull("plain", [1], 8)])
            match chance.randrange(5):
                case 0:
                    data = damaged(them.record(DATA, them.hello), chance)
                case 1:
                    data = them.record(HANDSHAKE, chance.randbytes(chance.randint(1, 60)))
                case 2:
                    data = them.record(DATA, damaged(hello, chance))
                case 3:
                    data = them.record(DATA, them.hello + damaged(frame[:64], chance) + frame[64:])
                case _:
                    data = them.record(DATA, them.hello) + damaged(them.key_update() + them.key_update(), chance)
            with contextlib.suppress(OSError):
                them.socket.sendall(data)
                them.socket.shutdown(socket.SHUT_WR)
                _read_to_the_end(them.socket)

    def frames(self) -> None:
        """Frames over an open connection: lies, and operations that are damaged, most with a good checksum."""
        chance = self.chance
        if self._frames is None or self._frames.is_lost:
            self._frames = frame_calls.dial("tls", *self.offer())
        self._number += 1
        one = lie(chance, self._number % 1000)
        number = next(frame_calls.NUMBERS)
        frame = bytearray(frame_codec.request(number, 0.01, [one]))
        if chance.random() < 0.7:
            for _ in range(chance.randint(1, 3)):
                frame[chance.randrange(64, len(frame))] = chance.randrange(256)
            if chance.random() < 0.8:
                end = 64 + len(frame_codec.operation(number, one))
                sum_ = frame_codec.checksum(number, bytes(frame[64:184] + frame[192:end]))
                frame[184:192] = sum_.to_bytes(8, "little")
        try:
            call = self._frames.begin(len(frame), frame_calls.rows_bytes(one) + len(frame) + 4096)
            call.room(len(frame))[:] = np.frombuffer(frame, np.uint8)
            call.send()
            call.wait(_SECONDS)
        except (OSError, RuntimeError):  # the connection has ended, for what was sent or for the reply
            self._frames.close()

    def garbage_for_calls(self) -> None:
        """Bytes and damaged ClientHellos on a port of gRPC."""
        data = self.chance.randbytes(self.chance.choice([1, 24, 500]))
        if self.chance.random() < 0.7:
            incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            with contextlib.suppress(ssl.SSLWantReadError):
                self._context().wrap_bio(incoming, outgoing).do_handshake()
            data = damaged(outgoing.read(), self.chance)
        self._say(self._any(), data if self.chance.random() < 0.8 else _H2_PREFACE + data)

    def certificates(self) -> None:
        """Handshakes of gRPC with no certificate, or one that is not believed."""
        own = self.chance.choice([None, self._folder / "foreign" / "client.pem", self._folder / "old" / "client.pem"])
        self._say(self._any(), _H2_PREFACE, self._context(own))

    def http2(self) -> None:
        """What follows a good handshake, damaged: frames of HTTP/2 and headers of a call."""
        chance = self.chance
        role, service = chance.choice(list(_FILES.items()))
        method = chance.choice(service.methods)
        told = {
            ":method": "POST",
            ":scheme": "https",
            ":path": f"/{service.full_name}/{method.name}",
            "te": "trailers",
            "content-type": "application/grpc",
            "grpc-timeout": "1S",
        }
        head = b"".join(b"\0" + _text(name) + _text(value) for name, value in told.items())
        message = self._message(method)
        data = b"\0" + len(message).to_bytes(4, "big") + message
        frames = _frame(4, 0, 0, b"") + _frame(1, 4, 1, head) + _frame(0, 1, 1, data)
        if chance.random() < 0.3:
            kind, flags, stream = chance.randrange(12), chance.randrange(256), chance.choice([0, 1, 2, 3, 2**31 - 1])
            frames = _frame(4, 0, 0, b"") + _frame(kind, flags, stream, chance.randbytes(chance.randrange(40))) * 5
        self._say(
            split_address(self._addresses[role]),
            _H2_PREFACE + damaged(frames, chance),
            self._context(self._folder / "client.pem"),
        )

    def protobuf(self) -> None:
        """A call of any RPC whose message is random, and mostly damaged."""
        role, service = self.chance.choice(list(_FILES.items()))
        method = self.chance.choice(service.methods)
        path = f"/{service.full_name}/{method.name}"
        data = self._message(method)
        if self.chance.random() < 0.7:
            data = damaged(data, self.chance)
        way = self._channels[role]["server" in CALLERS[path] and CLIENT not in CALLERS[path]]
        call = way.unary_stream(path)(data, timeout=0.5)  # type: ignore[call-overload]
        self._threads.submit(_ended, call).result(_SECONDS)

    def _message(self, method: MethodDescriptor) -> bytes:
        found = self._filled(GetMessageClass(method.input_type)(), 3)
        return bytes(found.SerializeToString())

    def _filled(self, message: Any, depth: int) -> Any:
        for item in message.DESCRIPTOR.fields:
            if self.chance.random() < 0.4:
                continue
            is_list = item.is_repeated if hasattr(item, "is_repeated") else item.label == FieldDescriptor.LABEL_REPEATED
            of_message = item.type == FieldDescriptor.TYPE_MESSAGE
            if of_message and item.message_type.GetOptions().map_entry:
                continue
            for _ in range(self.chance.randint(1, 3) if is_list else 1):
                if of_message:
                    if depth:
                        into = getattr(message, item.name)
                        self._filled(into.add() if is_list else into, depth - 1)
                        if not is_list:
                            into.SetInParent()
                    continue
                with contextlib.suppress(ValueError, TypeError):  # beyond the field's range
                    value = self._value(item)
                    getattr(message, item.name).append(value) if is_list else setattr(message, item.name, value)
        return message

    def _value(self, item: FieldDescriptor) -> Any:
        chance = self.chance
        match item.cpp_type:
            case FieldDescriptor.CPPTYPE_STRING:
                if item.type == FieldDescriptor.TYPE_BYTES:
                    return chance.randbytes(8 * chance.randrange(9))
                return chance.choice(self._texts)
            case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
                return chance.choice([0.0, 0.1, -1.0, 1e300, float("nan"), float("inf")])
            case FieldDescriptor.CPPTYPE_BOOL:
                return chance.random() < 0.5
            case FieldDescriptor.CPPTYPE_ENUM:
                return chance.randrange(4)
            case _:
                return chance.choice([0, 1, 2, 4, 8, *LARGE])

    def _any(self) -> tuple[str, int]:
        return split_address(self.chance.choice(list(self._addresses.values())))

    def _say(self, to: tuple[str, int], data: bytes, context: ssl.SSLContext | None = None) -> None:
        """Connect, say it, and read until the role has let go."""
        with ExitStack() as stack:
            ours = stack.enter_context(socket.create_connection(to, _SECONDS))
            try:
                if context is not None:
                    ours = stack.enter_context(context.wrap_socket(ours))
                ours.sendall(data)
                ours.shutdown(socket.SHUT_WR)
                _read_to_the_end(ours)
            except TimeoutError:
                raise
            except OSError:
                pass

    def _context(self, own: Path | None = None) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        if own is not None:
            context.load_cert_chain(own)
        return context

    def _channel(self, role: str, own: str) -> grpc.Channel:
        folder = self._folder / "seventh" if own == "server" else self._folder
        pem = (folder / f"{own}.pem").read_bytes()
        credentials = grpc.ssl_channel_credentials((self._folder / "ca.pem").read_bytes(), pem, pem)
        name = ("grpc.ssl_target_name_override", f"{role}.test.geartrain")
        return grpc.secure_channel(self._addresses[role], credentials, [name, ("grpc.use_local_subchannel_pool", 1)])


KINDS: dict[str, tuple[Callable[[Attacker], None], int]] = {
    "handshakes of rows: garbage": (Attacker.garbage_for_rows, 60),
    "handshakes of rows: ClientHello": (Attacker.hellos_for_rows, 60),
    "records and headers after one": (Attacker.records_for_rows, 8),
    "frames": (Attacker.frames, 200),
    "handshakes of gRPC: garbage, ClientHello": (Attacker.garbage_for_calls, 30),
    "handshakes of gRPC: certificates": (Attacker.certificates, 6),
    "HTTP/2 after one": (Attacker.http2, 6),
    "messages of every RPC": (Attacker.protobuf, 40),
}
"""What it is, and how many in a row."""


def _text(text: str) -> bytes:
    return bytes([len(text)]) + text.encode()  # HPACK: no Huffman, below 127 bytes


def _frame(kind: int, flags: int, stream: int, data: bytes) -> bytes:
    return len(data).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + data


def _ended(call: Any) -> None:
    with contextlib.suppress(grpc.RpcError):
        for _ in call:
            pass


def _read_to_the_end(ours: socket.socket) -> None:
    while ours.recv(1 << 16):
        pass


def attack(
    pipe: Any,
    attacker_of: Callable[[dict[str, str], Path, int], Any],
    kinds: list[tuple[Callable[[Any], None], int]],
    addresses: dict[str, str],
    folder: str,
    seed: int,
    go: Any,
    rate: Any,
    counts: Any,
) -> None:
    """An attacker: while ``go`` is set, attacks of each kind in turn, ``rate`` a second (0: as many as it can)."""
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))  # also where the others have the right of way
    os.nice(19)
    attacker = attacker_of(addresses, Path(folder), seed)
    pipe.send("ready")
    while True:
        for number, (kind, times) in enumerate(kinds):
            for _ in range(times):
                go.wait()
                began = time.monotonic()
                kind(attacker)
                counts[number] += 1
                if rate.value:
                    time.sleep(max(0.0, 1 / rate.value - (time.monotonic() - began)))


def work_honestly(pipe: Any, addresses: dict[str, str], folder: str, calls: Any, pause: Any) -> None:
    """A client of rows by TCP and of gRPC, to whom nothing must happen."""
    identify(folder)
    # Strangers may hold the scheduler up for a moment, which calls repeat.
    with gt.connect(addresses["scheduler"], config=gt.ClientConfig(shared_memory=False)) as cluster:
        for spec in TABLES.values():
            more = {"num_rows": spec.num_rows, "admission": spec.admission, "expiry": spec.expiry}
            cluster.create_table(spec.name, dim=spec.dim, optimizer=spec.optimizer, **more)
        table = cluster.create_table(HONEST, dim=HONEST_DIM, optimizer=gt.SGD(1.0), num_rows=HONEST_ROWS)
        ids, draw = np.arange(HONEST_ROWS), np.random.default_rng(1)
        rows = np.repeat(ids[:, None], HONEST_DIM, 1).astype(np.float32)
        table.assign(ids, rows)
        pipe.send("ready")
        while True:
            some = draw.choice(HONEST_ROWS, 100, replace=False)
            np.testing.assert_array_equal(table.pull(some), rows[some])
            calls.value += 1
            if calls.value % 16 == 0:
                assert cluster.status().ready
            time.sleep(pause.value)


@dataclass
class Outcome:
    """What was counted and measured."""

    counts: dict[str, int] = field(default_factory=dict)
    honest: list[tuple[float, float]] = field(default_factory=list)
    """(Attacks a second, calls of the honest client beside them, of those without): at RATE, and as many as can be."""
    honest_calls: int = 0
    memory: dict[str, list[int]] = field(default_factory=dict)
    """Resident MiB by role: now and then from the first attack on, then at rest."""
    files: dict[str, list[int]] = field(default_factory=dict)
    """Open files, likewise."""
    seconds: float = 0.0

    def __str__(self) -> str:
        lines = [f"{count:>9,} {kind}" for kind, count in self.counts.items()]
        lines.append(f"{sum(self.counts.values()):>9,} in {self.seconds:,.0f} s; honest calls: {self.honest_calls:,}")
        lines += [f"honest client: {share:.2f} x beside {rate:,.0f} attacks a second" for rate, share in self.honest]
        for role in self.memory:
            lines.append(f"{role}: MiB {self.memory[role]}, files {self.files[role]}")
        return "\n".join(lines)


Attacked = tuple[dict[str, str], dict[str, int], list[subprocess.Popen[str]]]
"""Addresses by role, pids by role, processes."""


@contextlib.contextmanager
def _roles(folder: Path) -> Iterator[Attacked]:
    """One process of each role: addresses and pids."""
    create_authority(folder, "test")
    for role in CERTIFIED_ROLES:
        issue(folder, folder, [role])
    issue(folder, folder / "seventh", ["server"], [7])
    issue(folder, folder / "old", [CLIENT], days=-1 / 86_400)
    create_authority(folder / "foreign", "test")
    issue(folder / "foreign", folder / "foreign", [CLIENT])
    settings = {
        "GEARTRAIN_SECURITY__FOLDER": str(folder),
        "GEARTRAIN_SERVER__SNAPSHOT_ROOTS": f'["{folder}"]',
        "GEARTRAIN_GRAPH__SNAPSHOT_ROOTS": f'["{folder}"]',
    }
    log = folder / "log"
    with ExitStack() as stack:
        up = ["up", "--shards=1", "--graph", "--scheduler-listen=127.0.0.1:0", "--graph-listen=127.0.0.1:0"]
        roles = stack.enter_context(RoleProcess(*up, "--no-restart", "--json", errors=log, **settings))
        gear = ["slowgear", f"--scheduler={roles.facts['scheduler']}", "--name=image", "--dim=4", "--optimizer=sgd:0.1"]
        gear += [f"--{what}=tests.integration.gear.gear_part:{name}" for what, name in _PART]
        image = stack.enter_context(RoleProcess(*gear, errors=log, **settings))
        addresses = {"scheduler": roles.facts["scheduler"], "server": roles.facts["shards"][0]}
        addresses |= {"graph": roles.facts["graph"], "slowgear": image.facts["address"]}
        yield addresses, {**roles.facts["pids"], "slowgear": image.facts["pid"]}, [roles.process, image.process]


_PART = (("module", "build"), ("samples", "samples"))


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Who is attacked by whom, beside whom; all importable by name."""

    roles: Callable[[Path], contextlib.AbstractContextManager[Attacked]]
    honest: Callable[[Any, dict[str, str], str, Any, Any], None]
    """A client's process: (pipe, addresses, folder, how many calls it has made, its pause between two)."""
    attacker: Callable[[dict[str, str], Path, int], Any]
    kinds: dict[str, tuple[Callable[[Any], None], int]]
    rest_seconds: float = HANDSHAKE_SECONDS + 1
    """Until what attackers left behind has been let go of."""


CLUSTER = Scene(roles=_roles, honest=work_honestly, attacker=Attacker, kinds=KINDS)


def run_strangers(
    seed: int,
    folder: Path,
    outcome: Outcome,
    *,
    scene: Scene = CLUSTER,
    attacks: int = 20_000,
    attackers: int = 1,
    windows: int = WINDOWS,
    seconds: float = float("inf"),
) -> None:
    """Make so many attacks, for so many seconds at most, and compare the honest client's calls in so many windows of
    time with as many others. Raises AssertionError: a role died, or the honest client met an error or a wrong row.
    """
    began = time.monotonic()
    with ExitStack() as stack:
        addresses, pids, processes = stack.enter_context(scene.roles(folder))
        go, rate, pause = FORKSERVER.Event(), FORKSERVER.Value("d", 0.0), FORKSERVER.Value("d", 0.0)
        calls = FORKSERVER.Value("q", 0)
        counts = [FORKSERVER.Array("q", len(scene.kinds)) for _ in range(attackers)]
        honest = Child(scene.honest, addresses, str(folder), calls, pause)
        stack.callback(honest.end)
        honest.receive()
        children = [honest]
        for number, own in enumerate(counts):
            by = (scene.attacker, list(scene.kinds.values()))
            child = Child(attack, *by, addresses, str(folder), seed * 100 + number, go, rate, own)
            stack.callback(child.end)
            child.receive()
            children.append(child)

        def done() -> int:
            for process in processes:
                assert process.poll() is None, f"a role ended: {(folder / 'log').read_text()[-4000:]}"
            assert all(child.process.is_alive() for child in children), "the honest client or an attacker has failed"
            return sum(sum(own) for own in counts)

        def window(attacked: bool) -> tuple[float, float]:
            (go.set if attacked else go.clear)()
            before, start = (calls.value, done()), time.monotonic()
            time.sleep(WINDOW_SECONDS)
            seconds = time.monotonic() - start
            return (calls.value - before[0]) / seconds, (done() - before[1]) / seconds

        def compare() -> tuple[float, float]:
            window(attacked=False)
            pairs = [(window(attacked=False), window(attacked=True)) for _ in range(windows)]
            rest, attacked = (statistics.median(calls for calls, _ in side) for side in zip(*pairs, strict=True))
            return statistics.median(made for _, (_, made) in pairs), attacked / rest

        def note() -> None:
            outcome.counts = {kind: sum(own[number] for own in counts) for number, kind in enumerate(scene.kinds)}
            outcome.honest_calls, outcome.seconds = calls.value, time.monotonic() - began
            for role, pid in pids.items():
                status = Path(f"/proc/{pid}/status").read_text()
                kib = int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])
                outcome.memory.setdefault(role, []).append(kib >> 10)
                outcome.files.setdefault(role, []).append(len(list(Path(f"/proc/{pid}/fd").iterdir())))
            print(outcome, file=sys.stderr, flush=True)

        for rate.value in (RATE / attackers, 0.0):
            outcome.honest += [compare()] if windows else []
        go.set()
        pause.value = _PAUSE_SECONDS
        look_at = 0
        while (made := done()) < attacks and time.monotonic() - began < seconds:
            if made >= look_at:
                note()
                look_at = made + attacks // 16
            time.sleep(WINDOW_SECONDS)
        go.clear()
        time.sleep(scene.rest_seconds)
        done()
        note()


def require_flat(outcome: Outcome) -> None:
    """Raises AssertionError: a role has more memory or open files at the end than after the first half."""
    for role, mib in outcome.memory.items():
        middle = len(mib) // 2 + 1
        assert mib[-1] - max(mib[:middle]) < MAX_MORE_BYTES >> 20, f"{role} grows: {mib} MiB"
        files = outcome.files[role]
        assert files[-1] - max(files[:middle]) < MAX_MORE_FILES, f"{role} keeps files open: {files}"


def strangers(seed: int, folder: Path) -> int:
    """One seed of the campaign."""
    outcome = Outcome()
    run_strangers(seed, folder, outcome)
    print(outcome)
    require_flat(outcome)
    return sum(outcome.counts.values())


if __name__ == "__main__":
    import tempfile

    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--attacks", type=int, default=1_000_000)
    parser.add_argument("--attackers", type=int, default=1, help="processes")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="at most")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    said = Outcome()
    limits = {"attacks": given.attacks, "attackers": given.attackers, "seconds": 60 * given.minutes}
    with tempfile.TemporaryDirectory() as at:
        run_strangers(given.seed, Path(at) / "run", said, **limits)
    print(said)
