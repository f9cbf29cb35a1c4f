"""A field of long histories, pooled beside the rows (``where="hosted"``), against the same with its rows pulled.

256 samples of 1,000 ids each, of 1 M items, even or by Zipf's law; two shards in other processes, by TCP over loopback
(which has no limit of a network's: there bytes are time). A step is look up, backward, Adagrad. Bytes are what the
sockets of this process sent and received, as the kernel counts them.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from _calls import WAYS
from _common import median_seconds, result
from _up import running_cluster
from torch import Tensor

import geartrain as gt
from geartrain.ams.client.cluster import Cluster
from geartrain.launch.bench import Result

BATCH, LENGTH, ITEMS, SHARDS = 256, 1000, 1_000_000, 2
DIMS = (16, 64)
ROUNDS = 2
RIVAL = "rows pulled"
BYTES_TARGET = 3.0
_BYTES_ACKED, _BYTES_RECEIVED = 120, 128
"""Where ``struct tcp_info`` of Linux has them."""


def results(full: bool = False) -> Iterator[Result]:
    """Yield the cases of hosted fields of ``geartrain bench sparse``; ``full`` takes three times as many turns."""
    with running_cluster(SHARDS) as up, ExitStack() as ends:
        cluster = ends.enter_context(gt.connect(up["scheduler"], config=WAYS["TCP"]))
        for dim in DIMS:
            sides = [_step(cluster, dim, where) for where in ("hosted", "pull")]
            for keys, draw in {"even keys": _even(), "Zipf keys": _zipf()}.items():
                bytes_of = [_bytes_of(side, draw) for side in sides]
                seconds = median_seconds(sides, draw, rounds=ROUNDS * (3 if full else 1), calls=4, uncounted=1)
                case = f"{BATCH} histories of {LENGTH:,} ids, D={dim}, {keys}, {SHARDS} shards by TCP"
                millis = [1e3 * duration for duration in seconds]
                megabytes = [item / 1e6 for item in bytes_of]
                yield result(f"{case}: step", millis[0], RIVAL, millis[1], "ms", target=1.0)
                yield result(f"{case}: bytes", megabytes[0], RIVAL, megabytes[1], "MB", target=BYTES_TARGET)


def _even() -> Callable[[], Tensor]:
    random = np.random.default_rng(0)
    return lambda: torch.from_numpy(random.integers(0, ITEMS, (BATCH, LENGTH)))


def _zipf() -> Callable[[], Tensor]:
    random = np.random.default_rng(0)
    shares = np.cumsum(1.0 / np.arange(1, ITEMS + 1))
    shares /= shares[-1]
    return lambda: torch.from_numpy(np.minimum(np.searchsorted(shares, random.random((BATCH, LENGTH))), ITEMS - 1))


def _step(cluster: Cluster, dim: int, where: Literal["pull", "hosted"]) -> Callable[[Tensor], None]:
    field = gt.Field("history", dim, pooling="mean", where=where)
    fields = gt.EmbeddingGroup(cluster, f"{where}-{dim}", [field], optimizer=gt.Adagrad(0.05))
    table = fields.table("history")
    for start in range(0, ITEMS, 100_000):  # so that none is created during a timing
        table.push(np.arange(start, start + 100_000), np.full((100_000, dim), 1e-3, np.float32))
    rows, upstream = gt.RowOptimizer(fields), torch.randn(BATCH, dim)

    def step(ids: Tensor) -> None:
        (fields({"history": ids})["history"] * upstream).sum().backward()
        rows.step()
        rows.zero_grad()

    return step


def _bytes_of(step: Callable[[Tensor], None], draw: Callable[[], Tensor]) -> int:
    step(draw())
    before = _moved()
    step(draw())
    return _moved() - before


def _moved() -> int:
    """Bytes that the TCP connections of this process have sent and received."""
    total = 0
    for link in Path("/proc/self/fd").iterdir():
        if not os.path.realpath(link).rpartition("/")[2].startswith("socket:"):
            continue
        with socket.socket(fileno=os.dup(int(link.name))) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                total += sum(struct.unpack_from("=Q", info, at)[0] for at in (_BYTES_ACKED, _BYTES_RECEIVED))
    return total
