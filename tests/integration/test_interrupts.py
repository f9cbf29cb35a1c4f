"""Ctrl-C in the middle of calls: the cluster can be used afterwards, and what was interrupted is the caller's again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.shard_calls import ShardCalls
from geartrain.ams.client.table import Table
from geartrain.ams.server.shard import Shard
from geartrain.ams.values.config import ClientConfig
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.specs import Constant
from tests.integration.conftest import carriers_of
from tests.integration.one_table import DIM, IDS, NUM_ROWS, ONES, Served, connected

CLIENT = Path(__file__).with_name("interrupted_client.py")
WAYS = {
    "messages": {"shared_memory": False, "bulk_connections": False},
    "parts": {"shared_memory": False, "bulk_connections": False, "part_bytes": 128 << 10},
    "bulk": {"shared_memory": False},
    "shared": {},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_client_that_is_interrupted_again_and_again_goes_on(served: Served, way: str) -> None:
    config = ClientConfig(**WAYS[way])  # type: ignore[arg-type]
    done = subprocess.run(
        [sys.executable, str(CLIENT), served(2).address, config.model_dump_json(), "1"],
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert re.fullmatch(r"lost \[\] wrong \[\] late 0 acknowledged \d+\n", done.stdout), (done.stdout, done.stderr)
    assert done.returncode != 0 and done.stderr.rstrip().endswith("KeyboardInterrupt"), done.stderr


class Held:
    """Requests of one kind that wait in the shards until they are let go."""

    def __init__(self) -> None:
        self.arrived = threading.Semaphore(0)
        self.go_on = threading.Event()

    @contextmanager
    def interrupted(self, num_shards: int) -> Iterator[None]:
        """Ctrl-C, once a request has come to every shard."""

        def work() -> None:
            for _ in range(num_shards):
                assert self.arrived.acquire(timeout=20)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=work)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            yield
        thread.join()


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Held]]:
    """Hold what a method of the shards does."""
    made: list[Held] = []

    def begin(name: str) -> Held:
        held, whole = Held(), getattr(Shard, name)
        made.append(held)

        def waiting(self: Shard, *arguments: object) -> object:
            if not held.go_on.is_set():
                held.arrived.release()
                assert held.go_on.wait(20)
            return whole(self, *arguments)

        monkeypatch.setattr(Shard, name, waiting)
        return held

    yield begin
    for held in made:
        held.go_on.set()


@pytest.fixture
def table(cluster: Cluster) -> Table:
    return cluster.create_table("t", dim=DIM, optimizer=SGD(1.0), num_rows=NUM_ROWS, initializer=Constant(0))


def test_an_interrupted_pull_leaves_the_array_alone(
    cluster: Cluster, table: Table, hold: Callable[[str], Held]
) -> None:
    out = np.zeros((NUM_ROWS, DIM), np.float32)
    held = hold("_answer")
    with held.interrupted(cluster.num_shards):
        table.pull_into(IDS, out)
    out[:] = 777
    held.go_on.set()
    assert (table.pull(IDS) == 0).all()
    cluster.close()  # nothing is under way any more
    assert (out == 777).all()


def test_an_interrupted_push_does_not_read_what_the_array_holds_later(
    cluster: Cluster, table: Table, hold: Callable[[str], Held]
) -> None:
    gradients = ONES.copy()
    held = hold("_write")
    with held.interrupted(cluster.num_shards):
        table.push(IDS, gradients)
    gradients[:] = 1000
    held.go_on.set()
    assert set(np.unique(table.pull(IDS)).tolist()) <= {0.0, -1.0}


def test_an_interrupted_write_can_be_sent_again_and_counts_once(
    cluster: Cluster, table: Table, hold: Callable[[str], Held]
) -> None:
    write = table.prepare_push(IDS, ONES)
    held = hold("_write")
    with held.interrupted(cluster.num_shards):
        write.send()
    held.go_on.set()
    write.send()
    assert (table.pull(IDS) == -1).all()


def test_what_waits_for_a_dead_shard_in_vain_is_not_sent_again(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = served(1)
    attempts, ended = 0, threading.Event()
    whole = ShardCalls._deliver

    def deliver(self: ShardCalls, *arguments: object) -> object:
        try:
            return whole(self, *arguments)  # type: ignore[arg-type]
        finally:
            ended.set()

    with connected(cluster, shared_memory=False) as ours:
        carrier = carriers_of(ours)[0]
        submit = carrier.submit

        def attempt(*arguments: object, **keywords: object) -> object:
            nonlocal attempts
            attempts += 1
            if attempts == 2:
                os.kill(os.getpid(), signal.SIGINT)
            return submit(*arguments, **keywords)  # type: ignore[arg-type]

        table = ours.table("t")
        cluster.servers[0].stop(0)
        monkeypatch.setattr(carrier, "submit", attempt)
        monkeypatch.setattr(ShardCalls, "_deliver", deliver)
        with pytest.raises(KeyboardInterrupt):
            table.version()  # a write needs leave to read its arrays, which has ended
        assert ended.wait(10)  # the client would wait 20 s for the shard
        assert attempts <= 3
