"""Rows over gRPC: pull and push of 10,000 rows of 128 floats, from another process, against a bare grpcio handler.

The rival takes and returns the same number of bytes and does nothing with them, so a ratio of 1 would mean that
finding, copying and updating rows is free. Redis (MGET / MSET of the same rows) is shown too where it is installed.
"""

from __future__ import annotations

import itertools
import json
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np

from geartrain.ams.cluster import connect
from geartrain.ams.config import MAX_MESSAGE_BYTES
from geartrain.ams.specs import SparseMomentum
from geartrain.ams.transport.grpc_client import channel_options

NUM_IDS = 10_000
DIM = 128
NUM_ROWS = 1_000_000
ROUNDS = 60
IDS_BYTES = NUM_IDS * 8
ROWS_BYTES = NUM_IDS * DIM * 4

_BARE_SERVER = f"""
import sys
from concurrent.futures import ThreadPoolExecutor
import grpc
reply = bytes({ROWS_BYTES})
handlers = {{
    "Pull": grpc.unary_unary_rpc_method_handler(lambda request, context: reply),
    "Push": grpc.unary_unary_rpc_method_handler(lambda request, context: b""),
}}
server = grpc.server(ThreadPoolExecutor(4), options={channel_options(MAX_MESSAGE_BYTES)!r})
server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare", handlers),))
print(server.add_insecure_port("127.0.0.1:0"), flush=True)
server.start()
sys.stdin.read()
"""


def measure_grpc_pull() -> list[dict[str, Any]]:
    """Pull of 10,000 random rows of a 1M-row dense table, alternating with the bare handler."""
    with _bare_channel() as channel, _our_table() as table:
        bare = channel.unary_unary("/bare/Pull")
        request = bytes(IDS_BYTES)
        out = np.empty((NUM_IDS, DIM), np.float32)
        ids = _batches_of_ids()
        ours, theirs = _alternate(lambda: table.pull_into(next(ids), out), lambda: bare(request))
    return [_result("gRPC pull", ours, "bare grpcio handler", theirs), *_redis("MGET", ours)]


def measure_grpc_push() -> list[dict[str, Any]]:
    """SparseMomentum push of 10,000 random rows of a 1M-row dense table, alternating with the bare handler."""
    with _bare_channel() as channel, _our_table() as table:
        bare = channel.unary_unary("/bare/Push")
        request = bytes(IDS_BYTES + ROWS_BYTES)
        gradients = np.random.default_rng(1).normal(size=(NUM_IDS, DIM)).astype(np.float32)
        ids = _batches_of_ids()
        ours, theirs = _alternate(lambda: table.push(next(ids), gradients), lambda: bare(request))
    return [_result("gRPC push", ours, "bare grpcio handler", theirs), *_redis("MSET", ours)]


def _result(case: str, ours: float, rival: str, theirs: float, target: float | None = 0.7) -> dict[str, Any]:
    return {
        "case": f"{case}, {NUM_IDS:,} rows, D={DIM} fp32",
        "ours": round(ours * 1e3, 3),
        "rival": rival,
        "theirs": round(theirs * 1e3, 3),
        "unit": "ms",
        "ratio": round(theirs / ours, 3),
        "target": target,
    }


def _alternate(ours: Callable[[], object], theirs: Callable[[], object]) -> tuple[float, float]:
    times: tuple[list[float], list[float]] = ([], [])
    for round_number in range(ROUNDS + 3):
        for call, seconds in zip((ours, theirs), times, strict=True):
            start = time.perf_counter()
            call()
            if round_number >= 3:
                seconds.append(time.perf_counter() - start)
    return statistics.median(times[0]), statistics.median(times[1])


def _batches_of_ids() -> Iterator[np.ndarray[Any, np.dtype[np.int64]]]:
    rng = np.random.default_rng(0)
    return itertools.cycle([rng.choice(NUM_ROWS, NUM_IDS, replace=False).astype(np.int64) for _ in range(16)])


@contextmanager
def _bare_channel() -> Iterator[grpc.Channel]:
    with subprocess.Popen(
        [sys.executable, "-c", _BARE_SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None and server.stdin is not None
        address = f"127.0.0.1:{int(server.stdout.readline())}"
        with grpc.insecure_channel(address, options=channel_options(MAX_MESSAGE_BYTES)) as channel:
            yield channel
        server.stdin.close()


@contextmanager
def _our_table() -> Iterator[Any]:
    command = [sys.executable, "-m", "geartrain", "up", "--shards=1", "--scheduler-listen=127.0.0.1:0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as up:
        assert up.stdout is not None
        try:
            ready = json.loads(up.stdout.readline())
            with connect(ready["scheduler"]) as cluster:
                table = cluster.create_table("bench", dim=DIM, optimizer=SparseMomentum(lr=0.1), num_rows=NUM_ROWS)
                for start in range(0, NUM_ROWS, 50_000):
                    table.assign(np.arange(start, start + 50_000), np.ones((50_000, DIM), np.float32))
                yield table
        finally:
            up.terminate()


def _redis(command: str, ours: float) -> list[dict[str, Any]]:
    """Time MGET or MSET of the same rows; empty where Redis or its client is not installed."""
    try:
        import redis
    except ImportError:
        return []
    if shutil.which("redis-server") is None:
        return []
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/redis.sock"
        options = ["--port", "0", "--unixsocket", path, "--save", "", "--dir", folder]
        with subprocess.Popen(["redis-server", *options], stdout=subprocess.DEVNULL) as server:
            try:
                _await_socket(path)
                client = redis.Redis(unix_socket_path=path)
                row = bytes(DIM * 4)
                rows = {i.to_bytes(8, "little"): row for i in range(NUM_IDS)}
                client.mset(rows)
                keys = list(rows)
                call: Callable[[], object] = (
                    (lambda: client.mget(keys)) if command == "MGET" else (lambda: client.mset(rows))
                )
                theirs, _ = _alternate(call, lambda: None)
            finally:
                server.terminate()
    case = "gRPC pull" if command == "MGET" else "gRPC push"
    return [_result(case, ours, f"Redis {command} (unix socket)", theirs, target=None)]


def _await_socket(path: str) -> None:
    deadline = time.monotonic() + 10
    while True:
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(path) == 0:
                return
        if time.monotonic() > deadline:
            raise TimeoutError(f"redis-server does not listen on {path}")
        time.sleep(0.02)


def results(full: bool = False) -> Iterator[dict[str, Any]]:  # noqa: ARG001
    """The gRPC cases of ``geartrain bench rows``."""
    yield from measure_grpc_pull()
    yield from measure_grpc_push()
