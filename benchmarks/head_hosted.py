"""A class head over 1M classes on two shards of other processes: rows stay on the shards (hosted) or travel (pull), by
TCP, as between machines, or through shared memory, as on one.

The heads train the same table (D=128, fp32, momentum) with the same batches, in turn. Bytes are those of this process's
TCP connections in both directions, as Linux counts them (``TCP_INFO``). On one machine bytes cost next to nothing, so
the times compare the work; between machines they come on top: bytes / bandwidth.
"""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from _common import result, threads
from _up import running_cluster

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.factory import connect
from geartrain.ams.programs.selection import FullSoftmax, PartialFC
from geartrain.ams.values.config import ClientConfig
from geartrain.ams.values.optimizers.registry import SparseMomentum
from geartrain.ams.values.specs import Normal
from geartrain.bridge.head.class_head import ClassHead
from geartrain.bridge.head.loss.margins.angular import ArcFace
from geartrain.bridge.rows.optimizer import RowOptimizer
from geartrain.launch.bench import Result

NUM_CLASSES = 1_000_000
DIM = 128
BATCH = 128
THREADS = 2
SHARDS = 2
FEWER_BYTES = 10.0
WAYS = {
    "hosted": ("hosted", ClientConfig(shared_memory=False)),
    "by TCP": ("pull", ClientConfig(shared_memory=False)),
    "through shared memory": ("pull", ClientConfig()),
}
"""Where the rows are, and the client."""
_FILL_ROWS = 50_000
_BYTES_ACKED = struct.Struct("QQ")
_OFFSET = 120
"""Of tcpi_bytes_acked and tcpi_bytes_received in ``struct tcp_info`` (linux/tcp.h)."""


def results(full: bool = False) -> Iterator[Result]:
    """Yield the cases of ``geartrain bench head_hosted``; ``full`` takes five times as many rounds."""
    with threads(THREADS), running_cluster(SHARDS) as up, ExitStack() as ends:
        clusters = [ends.enter_context(connect(up["scheduler"], config=config)) for _, config in WAYS.values()]
        _fill(clusters[0])
        for select, rounds in ((PartialFC(0.1), 9), (FullSoftmax(), 2)):
            yield from _compare(clusters, select, rounds * (5 if full else 1))


def _fill(cluster: Cluster) -> None:
    table = cluster.create_table("bench", dim=DIM, optimizer=_optimizer(), num_rows=NUM_CLASSES)
    random = np.random.default_rng(0)
    for start in range(0, NUM_CLASSES, _FILL_ROWS):
        ids = np.arange(start, min(start + _FILL_ROWS, NUM_CLASSES))
        table.assign(ids, random.standard_normal((len(ids), DIM), np.float32) * np.float32(0.01))


def _optimizer() -> SparseMomentum:
    return SparseMomentum(lr=0.1, momentum=0.9)


def _compare(clusters: list[Cluster], select: FullSoftmax | PartialFC, rounds: int) -> Iterator[Result]:
    heads = [
        ClassHead(
            cluster,
            "bench",
            num_classes=NUM_CLASSES,
            dim=DIM,
            select=select,
            margin=ArcFace(scale=64),
            optimizer=_optimizer(),
            initializer=Normal(),
            rows=place,
            reuse=True,
        )
        for cluster, (place, _) in zip(clusters, WAYS.values(), strict=True)
    ]
    seconds: list[list[float]] = [[] for _ in WAYS]
    travelled: list[list[int]] = [[] for _ in WAYS]
    optimizers = [RowOptimizer(head) for head in heads]
    for number in range(rounds + 1):
        for head, rows, taken, count in zip(heads, optimizers, seconds, travelled, strict=True):
            generator = torch.Generator().manual_seed(number)
            features = torch.randn(BATCH, DIM, generator=generator, requires_grad=True)
            labels = torch.randint(NUM_CLASSES, (BATCH,), generator=generator)
            before, started = _tcp_bytes(), time.perf_counter()
            head(features, labels).backward()
            rows.step()
            rows.zero_grad()
            if number:  # the first warms up
                taken.append(time.perf_counter() - started)
                count.append(_tcp_bytes() - before)
    name = "full softmax" if isinstance(select, FullSoftmax) else f"partial FC {select.sample_rate}"
    case = f"{name}, {NUM_CLASSES:,} classes on {SHARDS} shards, D={DIM}, batch {BATCH}"
    hosted, pulled, _ = (statistics.median(count) / 1e6 for count in travelled)
    yield result(f"bytes of a step of {case}, hosted", hosted, "rows pulled by TCP", pulled, "MB", target=FEWER_BYTES)
    hosted, pulled, shared = (statistics.median(taken) * 1e3 for taken in seconds)
    yield result(f"step of {case}, hosted", hosted, "rows pulled by TCP", pulled, "ms")
    yield result(f"step of {case}, pulled through shared memory", shared, "rows pulled by TCP", pulled, "ms")


def _tcp_bytes() -> int:
    """Bytes sent and received so far over the TCP connections that this process has open."""
    total = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # no socket, no TCP, or closed meanwhile
            if str(descriptor.readlink()).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(descriptor.name))) as duplicate:
                    info = duplicate.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    total += sum(_BYTES_ACKED.unpack_from(info, _OFFSET))
    return total
