"""Cost of ``security.folder``: calls, connections and large pulls under TLS against plain text, tokens, rights.

Three clusters of one shard take turns: without certificates, under them, and under tokens, too. A target says "at most
10 µs more", "at most 1 ms", "at least 0.45 of the speed" or "unchanged". A call by gRPC is one message of Python's stub
with the ids and a message with the rows, as programs in other languages make it; all others come through the client.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from _calls import draws, fill
from _common import median_seconds, result
from _up import running_cluster

import geartrain as gt
from geartrain.ams.client.table import Table
from geartrain.ams.kernels import _core
from geartrain.ams.pb.v1 import shard_pb2
from geartrain.ams.rpc.channel import channel_options
from geartrain.ams.rpc.credentials import Credentials
from geartrain.ams.rpc.services import SHARD
from geartrain.ams.values.config import CERTIFIED_ROLES, FOLDER_VARIABLE, NO_FOLDER, identify, split_address
from geartrain.ams.values.rpc import Ping
from geartrain.ams.values.shard_messages import OpenDataPlane, Pull
from geartrain.launch.bench import Result
from geartrain.launch.certificates import create_authority, issue
from geartrain.launch.tokens import create_token

NUM_IDS, DIM, NUM_ROWS = 100, 16, 100_000
LARGE_IDS, LARGE_DIM, LARGE_ROWS = 10_000, 128, 50_000
ROUNDS = 7
MANY_ROUNDS, MANY = 5, {"calls": 80, "uncounted": 8}
FEW = {"calls": 12, "uncounted": 2}
MORE_MICROSECONDS, HANDSHAKE_MILLISECONDS, RIGHTS_NANOSECONDS = 10.0, 1.0, 100.0
OF_PLAIN, UNCHANGED = 0.45, 0.95
SOURCES = Path(__file__).resolve().parents[1] / "ams/kernels/csrc"
SECONDS = 30.0
ALL = ("*=read,write,create,admin",)


class Side:
    """A cluster and this process's connections to it, under one folder of certificates or none."""

    def __init__(self, ends: ExitStack, folder: str, token: str | None = None) -> None:
        up = ends.enter_context(running_cluster(settings={FOLDER_VARIABLE: folder}))
        identify(folder, token=token)
        self.tables: dict[str, Table] = {}
        for way, shares in (("TCP", False), ("same host", True)):
            cluster = ends.enter_context(gt.connect(up["scheduler"], config=gt.ClientConfig(shared_memory=shares)))
            for name, dim, rows in (("small", DIM, NUM_ROWS), ("large", LARGE_DIM, LARGE_ROWS)):
                table = cluster.create_table(name, dim=dim, optimizer=gt.SGD(lr=0.1), num_rows=rows, reuse=True)
                if way == "TCP":
                    fill(table)
                table.pull([0])
                self.tables[f"{name}, {way}"] = table
        self._address = up["shards"][0]
        self._credentials = Credentials.mine(self._address)
        channel = ends.enter_context(self._open())
        self._pull = channel.unary_unary(SHARD[Pull].path)
        self._offer = channel.unary_unary(SHARD[OpenDataPlane].path)
        self._opened: list[Any] = []
        ends.callback(self.close_opened)

    def pull_message(self, ids: Any) -> None:
        """A pull by gRPC."""
        self._pull(shard_pb2.PullRequest(table="small", ids=ids.tobytes()).SerializeToString(), timeout=SECONDS)

    def offered(self) -> Any:
        """What the shard says to who wants a connection for rows."""
        return shard_pb2.OpenDataPlaneReply.FromString(self._offer(b"", timeout=SECONDS))

    def connect_rows(self, offer: Any) -> None:
        """Both handshakes of a connection for rows."""
        host, _ = split_address(self._address)
        self._opened.append(_core.connect_tcp(host, offer.port, offer.secret, SECONDS, uses_tls=offer.uses_tls))

    def connect_calls(self, _: Any) -> None:
        """A connection of gRPC and its first call."""
        channel = self._open()
        self._opened.append(channel)
        channel.unary_unary(SHARD[Ping].path)(b"", timeout=SECONDS)

    def close_opened(self) -> None:
        """Close what was opened to see how long it takes."""
        while self._opened:
            self._opened.pop().close()

    def _open(self) -> Any:
        return self._credentials.channel(self._address, channel_options(1 << 20), SHARD.role)


def results(full: bool = False) -> Iterator[Result]:
    """Yield the cases of ``geartrain bench security``; ``full`` takes five times as many turns."""
    rounds = ROUNDS * (5 if full else 1)
    with ExitStack() as ends:
        at = Path(ends.enter_context(tempfile.TemporaryDirectory()))
        ends.callback(identify, None)
        tls, with_tokens = at / "tls", at / "tokens"
        for folder in (tls, with_tokens):
            create_authority(folder, "bench")
            for role in CERTIFIED_ROLES:
                issue(folder, folder, [role])
        token, _ = create_token(with_tokens, "bench", ALL, days=1)
        plain, under_tls = Side(ends, NO_FOLDER), Side(ends, str(tls))
        under_token = Side(ends, str(with_tokens), str(token))
        sides = [plain, under_tls, under_token]
        yield from _small(sides, rounds)
        yield from _connections([plain, under_tls], rounds)
        yield from _large([plain, under_tls], rounds)
    if shutil.which(os.environ.get("CXX", "g++")):
        yield result(
            "rights of an operation on rows", _rights_nanoseconds(), "budget", RIGHTS_NANOSECONDS, "ns", target=1.0
        )


def _small(sides: list[Side], rounds: int) -> Iterator[Result]:
    draw = draws(NUM_ROWS, NUM_IDS)
    for way, small, target in (
        ("TCP", [side.tables["small, TCP"].pull for side in sides], MORE_MICROSECONDS),
        ("gRPC", [side.pull_message for side in sides], None),
    ):
        micros = [1e6 * seconds for seconds in median_seconds(small, draw, rounds=MANY_ROUNDS * rounds, **MANY)]
        case = f"pull of {NUM_IDS} rows, D={DIM}, {way}, p50"
        aim = None if target is None else micros[0] / (micros[0] + target)
        yield result(f"{case}, TLS", micros[1], "plain", micros[0], "µs", target=aim)
        yield result(f"{case}, TLS and token", micros[2], "TLS", micros[1], "µs")


def _connections(sides: list[Side], rounds: int) -> Iterator[Result]:
    def draw() -> list[Any]:
        for side in sides:
            side.close_opened()
        return [side.offered() for side in sides]

    rows = [lambda offers, number=number: sides[number].connect_rows(offers[number]) for number in range(len(sides))]
    plain, tls = (1e3 * seconds for seconds in median_seconds(rows, draw, rounds=rounds, **FEW))
    case = "a connection for rows, greeted"
    yield result(f"{case}, TLS", tls, "budget", HANDSHAKE_MILLISECONDS, "ms", target=1.0)
    yield result(f"{case}, TLS", tls, "plain", plain, "ms")
    plain, tls = (
        1e3 * seconds for seconds in median_seconds([side.connect_calls for side in sides], draw, rounds=rounds, **FEW)
    )
    yield result("a connection of gRPC and its first call, TLS", tls, "plain", plain, "ms")


def _large(sides: list[Side], rounds: int) -> Iterator[Result]:
    out = np.empty((LARGE_IDS, LARGE_DIM), np.float32)
    for way, target in (("TCP", OF_PLAIN), ("same host", UNCHANGED)):
        pulls = [_pull_into(side.tables[f"large, {way}"], out) for side in sides]
        plain, tls = (1e3 * s for s in median_seconds(pulls, draws(LARGE_ROWS, LARGE_IDS), rounds=rounds, **FEW))
        case = f"pull of {out.nbytes / 1e6:.0f} MB, {way}, under security.folder"
        yield result(case, tls, "plain", plain, "ms", target=target)


def _pull_into(table: Table, out: Any) -> Callable[[Any], object]:
    return lambda ids: table.pull_into(ids, out)


def _rights_nanoseconds() -> float:
    with tempfile.TemporaryDirectory() as at:
        program = f"{at}/rights"
        sources = [str(Path(__file__).with_name("bare") / "rights.cpp"), str(SOURCES / "calls/grant.cpp")]
        compiler = os.environ.get("CXX", "g++")
        subprocess.run([compiler, "-O2", "-std=c++20", f"-I{SOURCES}", *sources, "-o", program], check=True)
        lines = subprocess.run([program], check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    return median(float(granted) - float(plain) for plain, granted in map(str.split, lines))
