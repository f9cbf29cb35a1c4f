"""Ctrl-C in the middle of calls: the cluster can be used afterwards, and what was interrupted is the caller's again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
from tests.integration.rows.one_table import DIM, IDS, NUM_ROWS, ONES, Served, connected

CLIENT = Path(__file__).with_name("interrupted_client.py")


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_client_that_is_interrupted_again_and_again_goes_on(served: Served, shared_memory: bool) -> None:
    config = ClientConfig(shared_memory=shared_memory)
    done = subprocess.run(
        [sys.executable, str(CLIENT), served(2).address, config.model_dump_json(), "1"],
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert re.fullmatch(r"lost \[\] wrong \[\] late 0 acknowledged \d+\n", done.stdout), (done.stdout, done.stderr)
    assert done.returncode != 0 and done.stderr.rstrip().endswith("KeyboardInterrupt"), done.stderr


class Held:
    """Shards at work, so that requests wait for their turns until they are let go."""

    def __init__(self, shards: list[Shard]) -> None:
        self._turns = [shard.engine.turn for shard in shards]
        for turn in self._turns:
            turn.acquire()

    def go_on(self) -> None:
        while self._turns:
            self._turns.pop().release()

    @contextmanager
    def interrupted(self, cluster: Cluster) -> Iterator[None]:
        """Ctrl-C, once a request waits for every shard that is asked at once."""
        num_asked = cluster.num_shards if cluster._calls.remote else 1

        def work() -> None:
            deadline = time.monotonic() + 20
            while sum(turn.num_waiting for turn in self._turns) < num_asked:
                assert time.monotonic() < deadline
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=work)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            yield
        thread.join()


@pytest.fixture(autouse=True)
def shards(monkeypatch: pytest.MonkeyPatch) -> list[Shard]:
    """All shards of this process that are made from here on."""
    made: list[Shard] = []
    whole = Shard.__init__

    def noted(self: Shard, *arguments: Any, **keywords: Any) -> None:
        whole(self, *arguments, **keywords)
        made.append(self)

    monkeypatch.setattr(Shard, "__init__", noted)
    return made


@pytest.fixture
def hold(shards: list[Shard]) -> Iterator[Callable[[], Held]]:
    """Hold all shards."""
    made: list[Held] = []

    def begin() -> Held:
        made.append(Held(shards))
        return made[-1]

    yield begin
    for held in made:
        held.go_on()


@pytest.fixture
def table(cluster: Cluster) -> Table:
    return cluster.create_table("t", dim=DIM, optimizer=SGD(1.0), num_rows=NUM_ROWS, initializer=Constant(0))


def test_an_interrupted_pull_leaves_the_array_alone(cluster: Cluster, table: Table, hold: Callable[[], Held]) -> None:
    out = np.zeros((NUM_ROWS, DIM), np.float32)
    held = hold()
    with held.interrupted(cluster):
        table.pull_into(IDS, out)
    out[:] = 777
    held.go_on()
    assert (table.pull(IDS) == 0).all()
    cluster.close()  # nothing is under way any more
    assert (out == 777).all()


def test_an_interrupted_push_does_not_read_what_the_array_holds_later(
    cluster: Cluster, table: Table, hold: Callable[[], Held]
) -> None:
    gradients = ONES.copy()
    held = hold()
    with held.interrupted(cluster):
        table.push(IDS, gradients)
    gradients[:] = 1000
    held.go_on()
    assert set(np.unique(table.pull(IDS)).tolist()) <= {0.0, -1.0}


def test_an_interrupted_write_can_be_sent_again_and_counts_once(
    cluster: Cluster, table: Table, hold: Callable[[], Held]
) -> None:
    write = table.prepare_push(IDS, ONES)
    held = hold()
    with held.interrupted(cluster):
        write.send()
    held.go_on()
    write.send()
    assert (table.pull(IDS) == -1).all()


def test_what_waits_for_a_dead_shard_in_vain_is_not_sent_again(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = served(1)
    attempts, ended = 0, threading.Event()
    whole = ShardCalls.finish_all

    def settle_all(self: ShardCalls, *arguments: object) -> object:
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
        monkeypatch.setattr(ShardCalls, "finish_all", settle_all)
        with pytest.raises(KeyboardInterrupt):
            table.version()  # a write needs leave to read its arrays, which has ended
        assert ended.wait(10)  # the client would wait 20 s for the shard
        assert attempts <= 3
