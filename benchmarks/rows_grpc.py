"""Rows from another process: pull and push of 10,000 rows of 128 floats, against a bare grpcio handler.

The rival takes and returns the same number of bytes and does nothing with them, so a ratio of 1 would mean that
finding, copying and updating rows is free. "Messages": rows are in the gRPC messages. "Bulk connections" are how they
come from another machine, over TCP beside gRPC; "shared memory" is how they come from a shard on this one. "In flight"
is the throughput of four requests at once, as a step has that works while its last push travels; "one at a time" is how
long one takes. Redis (MGET / MSET of the same rows, one at a time) is shown too where it is installed.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import grpc
import numpy as np
from _redis_server import redis_client
from _turns import median_seconds
from _up import running_cluster

from geartrain.ams.client.factory import connect
from geartrain.ams.rpc.channel import channel_options
from geartrain.ams.values.config import MAX_MESSAGE_BYTES, ClientConfig
from geartrain.ams.values.optimizers.registry import SparseMomentum
from geartrain.ams.values.specs import Ids

NUM_IDS = 10_000
DIM = 128
NUM_ROWS = 1_000_000
ROUNDS = 8
IN_FLIGHT, BURST = 4, 32
IDS_BYTES = NUM_IDS * 8
ROWS_BYTES = NUM_IDS * DIM * 4
WAYS = {
    "messages": ClientConfig(shared_memory=False, bulk_connections=False),
    "bulk connections": ClientConfig(shared_memory=False),
    "shared memory": ClientConfig(),
}
"""The sides of ours, in order, and the client that each needs."""
Side = Callable[[Ids], object]
Begin = Callable[[Ids], Any]
"""Begins a request; returns its future."""

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


def measure_grpc_pull() -> Iterator[dict[str, Any]]:
    """Pull of 10,000 random rows of a 1M-row dense table, in turns with the bare handler."""
    with _bare_channel() as channel, _our_tables() as tables:
        bare = channel.unary_unary("/bare/Pull")
        request = bytes(IDS_BYTES)
        outs = itertools.cycle([np.empty((NUM_IDS, DIM), np.float32) for _ in range(2 * IN_FLIGHT)])
        times = _one_at_a_time(
            *(lambda ids, table=table: table.pull_into(ids, next(outs)) for table in tables), lambda _: bare(request)
        )
        in_flight = _in_flight(
            *(lambda ids, table=table: table.pull_into_async(ids, next(outs)) for table in tables),
            lambda _: bare.future(request),
        )
    yield from _results("pull", in_flight, times)
    yield from _redis("MGET", times)


def measure_grpc_push() -> Iterator[dict[str, Any]]:
    """SparseMomentum push of 10,000 random rows of a 1M-row dense table, in turns with the bare handler."""
    with _bare_channel() as channel, _our_tables() as tables:
        bare = channel.unary_unary("/bare/Push")
        request = bytes(IDS_BYTES + ROWS_BYTES)
        gradients = np.random.default_rng(1).normal(size=(NUM_IDS, DIM)).astype(np.float32)
        times = _one_at_a_time(
            *(lambda ids, table=table: table.push(ids, gradients) for table in tables), lambda _: bare(request)
        )
        in_flight = _in_flight(
            *(lambda ids, table=table: table.push_async(ids, gradients) for table in tables),
            lambda _: bare.future(request),
        )
    yield from _results("push", in_flight, times)
    yield from _redis("MSET", times)


def _one_at_a_time(*sides: Side) -> list[float]:
    """Median seconds of a request of each side."""
    return median_seconds(sides, _draws(), rounds=ROUNDS)


def _in_flight(*sides: Begin) -> list[float]:
    """Seconds of each side from one answer to the next: the median of bursts of ``BURST`` requests."""
    draw = _draws()

    def burst(begin: Begin) -> Callable[[list[Ids]], None]:
        def run(samples: list[Ids]) -> None:
            under_way: deque[Any] = deque()
            for ids in samples:
                if len(under_way) == IN_FLIGHT:
                    under_way.popleft().result()
                under_way.append(begin(ids))
            for one in under_way:
                one.result()

        return run

    medians = median_seconds(
        [burst(side) for side in sides],
        lambda: [draw() for _ in range(BURST)],
        rounds=ROUNDS,
        calls=3,
        uncounted=1,
    )
    return [seconds / BURST for seconds in medians]


def _results(operation: str, in_flight: list[float], times: list[float]) -> Iterator[dict[str, Any]]:
    """A line for each way that rows take, in flight and one at a time; the rival is the last side."""
    for number, way in enumerate(WAYS):
        yield _result(f"{way} {operation} in flight", in_flight[number], in_flight[-1], target=0.7)
        yield _result(f"{way} {operation} one at a time", times[number], times[-1], target=0.7)


def _result(
    case: str, ours: float, theirs: float, *, rival: str = "bare grpcio handler", target: float | None = None
) -> dict[str, Any]:
    return {
        "case": f"{case}, {NUM_IDS:,} rows, D={DIM} fp32",
        "ours": round(ours * 1e3, 3),
        "rival": rival,
        "theirs": round(theirs * 1e3, 3),
        "unit": "ms",
        "ratio": round(theirs / ours, 3),
        "target": target,
    }


def _draws() -> Callable[[], Ids]:
    rng = np.random.default_rng(0)
    batches = itertools.cycle([rng.choice(NUM_ROWS, NUM_IDS, replace=False).astype(np.int64) for _ in range(16)])
    return lambda: next(batches)


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
def _our_tables() -> Iterator[list[Any]]:
    """One table as several clients see it, one for each of :data:`WAYS`."""
    with running_cluster() as up, ExitStack() as ends:
        clusters = [ends.enter_context(connect(up["scheduler"], config=config)) for config in WAYS.values()]
        tables = [
            cluster.create_table("bench", dim=DIM, optimizer=SparseMomentum(lr=0.1), num_rows=NUM_ROWS, reuse=True)
            for cluster in clusters
        ]
        for start in range(0, NUM_ROWS, 50_000):
            tables[0].assign(np.arange(start, start + 50_000), np.ones((50_000, DIM), np.float32))
        yield tables


def _redis(command: str, times: list[float]) -> list[dict[str, Any]]:
    """Time MGET or MSET of the same rows; empty where Redis or its client is not installed."""
    with redis_client() as client:
        if client is None:
            return []
        rows = {i.to_bytes(8, "little"): bytes(DIM * 4) for i in range(NUM_IDS)}
        keys = list(rows)
        client.mset(rows)
        call: Side = (lambda _: client.mget(keys)) if command == "MGET" else (lambda _: client.mset(rows))
        (theirs,) = median_seconds([call], _draws(), rounds=ROUNDS)
    operation = "pull" if command == "MGET" else "push"
    rival = f"Redis {command} (unix socket)"
    return [
        _result(f"{way} {operation} one at a time", ours, theirs, rival=rival)
        for way, ours in zip(WAYS, times, strict=False)
    ]


def results(full: bool = False) -> Iterator[dict[str, Any]]:  # noqa: ARG001
    """The gRPC cases of ``geartrain bench rows``."""
    yield from measure_grpc_pull()
    yield from measure_grpc_push()
