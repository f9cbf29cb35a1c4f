"""Shared parts of the benches of calls: connections to shards, and tables of one cluster."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
from _up import running_cluster

import geartrain as gt
from geartrain.ams.client.table import Table
from geartrain.ams.kernels import _core
from geartrain.ams.values.specs import Ids

WAYS = {"same host": gt.ClientConfig(), "TCP": gt.ClientConfig(shared_memory=False)}
"""Connections to a shard of another process, with the client's settings. TCP is over loopback here."""
SPINS = {
    "caller_spin_microseconds": round(_core.CALLER_SPIN_SECONDS * 1e6),
    "server_spin_microseconds": round(_core.SERVER_SPIN_SECONDS * 1e6),
}
"""Polling time of each side of the bare ping-pong before it sleeps: the most of Geartrain's client and shard."""


@contextmanager
def tables(*, num_rows: int, dim: int, optimizer: Any, embedded: bool = True) -> Iterator[dict[str, Table]]:
    """Yield tables with every row written: "in the process", if ``embedded``; of one other shard, :data:`WAYS`."""
    with running_cluster() as up, ExitStack() as ends:
        clusters = {way: ends.enter_context(gt.connect(up["scheduler"], config=item)) for way, item in WAYS.items()}
        if embedded:
            clusters = {"in the process": ends.enter_context(gt.local()), **clusters}
        found = {
            way: cluster.create_table("bench", dim=dim, optimizer=optimizer, num_rows=num_rows, reuse=True)
            for way, cluster in clusters.items()
        }
        for way in list(found)[: 2 if embedded else 1]:  # all of WAYS lead to one table
            fill(found[way])
        yield found


@contextmanager
def client_process(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """Yield a process that prints a line once connected, then answers each line with one; it ends with its input."""
    with client_processes([command]) as (client,):
        yield client


@contextmanager
def client_processes(
    commands: Sequence[Sequence[str]], *, settings: Mapping[str, str] | None = None
) -> Iterator[list[subprocess.Popen[str]]]:
    """Yield such processes, started in parallel; ``settings`` are variables of their environment."""
    environ = {**os.environ, **(settings or {})}
    with ExitStack() as ends:
        clients = [
            ends.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ)
            )
            for command in commands
        ]
        try:
            for client in clients:
                assert client.stdout is not None
                client.stdout.readline()
            yield clients
        finally:
            for client in clients:
                assert client.stdin is not None
                client.stdin.close()


def fill(table: Table) -> None:
    """Write every row, so that none is created during a timing."""
    num_rows, dim = table.spec.num_rows, table.spec.dim
    assert num_rows is not None
    for start in range(0, num_rows, 50_000):
        ids = np.arange(start, min(start + 50_000, num_rows))
        table.push(ids, np.ones((len(ids), dim), np.float32))


def draws(num_rows: int, num_ids: int, *, batches: int = 16) -> Callable[[], Ids]:
    """Return a function that returns distinct random ids [num_ids], cycling over ``batches`` batches."""
    random = np.random.default_rng(0)
    drawn = [random.choice(num_rows, num_ids, replace=False).astype(np.int64) for _ in range(batches)]
    endless = itertools.cycle(drawn)
    return lambda: next(endless)
