"""Exactly once against a faulty network. The oracle is outside: integer gradients whose exact sum is known."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.factory import connect
from geartrain.ams.kernels import _core
from geartrain.ams.rpc.client import data_plane
from geartrain.ams.scheduler.service import SchedulerServer
from geartrain.ams.server.role import ShardServer
from geartrain.ams.server.shard import Shard
from geartrain.ams.values.config import ClientConfig, SchedulerConfig, ServerConfig
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.specs import Constant
from tests.faults import attacks
from tests.faults.mutations import attack_without
from tests.faults.proxy import KINDS, FaultyProxy
from tests.integration.conftest import carriers_of

NUM_ROWS = 4096
DIM = 16
PUSHES = int(os.environ.get("GEARTRAIN_PROXY_PUSHES", "500"))
ATTEMPT_SECONDS = 0.3
MESSAGE_BYTES = 50_000
"""Most bytes of messages before a fault: rows are not in them."""
ROW_BYTES = 1_500_000
"""Most bytes of a connection for rows before a fault."""
CONFIG = ClientConfig(
    attempt_timeout_seconds=ATTEMPT_SECONDS,
    recovery_timeout_seconds=120,
    connect_timeout_seconds=60,
    refused_timeout_seconds=60,
    part_bytes=64 << 10,
)


Carrier = Literal["shared", "tcp", "tls"]
"""Of rows."""


@contextmanager
def behind_proxies(
    num_shards: int, seed: int, most_bytes: int, carrier: Carrier
) -> Iterator[tuple[Cluster, list[FaultyProxy], list[Shard]]]:
    """A cluster whose shards are reached only through proxies; the way to the scheduler is straight.

    Connections for rows by TCP have proxies of their own, one for each shard, which come last.
    """
    with ExitStack() as stack:
        scheduler = SchedulerServer(SchedulerConfig(listen="127.0.0.1:0", num_shards=num_shards, lease_seconds=60))
        address = scheduler.start()
        stack.callback(scheduler.stop, 0)
        proxies = [
            stack.enter_context(
                FaultyProxy(
                    seed * 1000 + shard,
                    most_bytes=most_bytes,
                    delay_seconds=ATTEMPT_SECONDS,
                    reply_share=2,
                )
            )
            for shard in range(num_shards)
        ]
        proxy_ports: dict[int, int] = {}
        shards: list[Shard] = []
        for shard, proxy in enumerate(tuple(proxies)):
            server = ShardServer(ServerConfig(scheduler=address, shard=shard, advertise=proxy.address))
            server.start()
            stack.callback(server.stop, 0)
            proxy.forward_to(server.bound_addresses[0])
            held = server._held[0].shard
            assert held is not None
            shards.append(held)
            if carrier != "shared":
                plane = server._held[0].service.data_plane
                plane._uses_tls = carrier == "tls"
                port = plane.offer().port
                beside = FaultyProxy(
                    seed * 1000 + 500 + shard, most_bytes=ROW_BYTES, delay_seconds=ATTEMPT_SECONDS, reply_share=1
                )
                beside.forward_to(f"127.0.0.1:{port}")
                proxy_ports[port] = int(stack.enter_context(beside).address.rsplit(":", 1)[1])
                proxies.append(beside)
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(data_plane, "CONNECT_SECONDS", ATTEMPT_SECONDS)
        patch.setattr(
            data_plane,
            "connect_tcp",
            lambda host, port, *rest, **more: _core.connect_tcp(host, proxy_ports[port], *rest, **more),
        )
        config = CONFIG.model_copy(update={"shared_memory": carrier == "shared"})
        with connect(address) as patient:  # the table is not what meets the faults
            patient.create_table("t", dim=DIM, optimizer=SGD(1.0), num_rows=NUM_ROWS, initializer=Constant(0))
        cluster = stack.enter_context(connect(address, config=config))
        yield cluster, proxies, shards


def attack(
    seed: int, num_pushes: int, most_bytes: int = MESSAGE_BYTES, carrier: Carrier = "tcp"
) -> tuple[np.ndarray, np.ndarray, Counter[str]]:
    """Push integers from two threads through faulty proxies; return the rows, what they must be, and the faults met.

    A connection meets its fault after ``most_bytes`` at most; those of shared memory are ended, and shards stop
    answering for longer than an attempt. Every push is followed by a pull, which uses the same memory or connection.
    """
    with behind_proxies(2, seed, most_bytes, carrier) as (cluster, proxies, shards):
        table = cluster.table("t")
        expected = np.zeros((NUM_ROWS, DIM))
        lock = threading.Lock()
        failures: list[BaseException] = []
        met: Counter[str] = Counter()
        for proxy in proxies:
            proxy.begin_faults()

        def disturb(own: np.random.Generator) -> None:
            shard = int(own.integers(len(shards)))
            plane = carriers_of(cluster)[shard].data_plane
            kind = own.choice(["end", "stop", ""], p=[0.2, 0.1, 0.7])
            if plane._connection is None or plane._connection.is_lost or not kind:
                return
            met[kind] += 1
            if kind == "end":
                plane._connection.close()
                return
            is_stopped = threading.Event()

            def stop() -> None:
                with shards[shard].engine.turn:
                    is_stopped.set()
                    over.wait(1.5 * ATTEMPT_SECONDS)

            threads.append(threading.Thread(target=stop))
            threads[-1].start()
            is_stopped.wait()

        def work(worker: int) -> None:
            own = np.random.default_rng([seed, worker])
            try:
                for _ in range(num_pushes // 2):
                    ids = np.sort(own.choice(NUM_ROWS, int(own.choice([5, 200, 2500])), replace=False))
                    gradients = own.integers(-3, 4, (len(ids), DIM)).astype(np.float32)
                    if carrier == "shared":
                        disturb(own)
                    table.push(ids, gradients)
                    assert (table.pull(np.arange(NUM_ROWS)) % 1 == 0).all()
                    with lock:
                        expected[ids] -= gradients
            except BaseException as exc:
                failures.append(exc)

        over = threading.Event()
        threads: list[threading.Thread] = []
        workers = [threading.Thread(target=work, args=(worker,)) for worker in range(2)]
        for thread in workers:
            thread.start()
        for thread in workers:
            thread.join()
        over.set()
        for thread in threads:
            thread.join()
        for proxy in proxies:
            proxy.end_faults()
        assert not failures, failures
        return table.pull(np.arange(NUM_ROWS)), expected, sum((proxy.counts for proxy in proxies), met)


@pytest.mark.parametrize("carrier", ["tcp", "tls"])
def test_every_push_is_applied_once_through_a_faulty_network(carrier: Carrier) -> None:
    rows, expected, met = attack(seed=1, num_pushes=PUSHES, carrier=carrier)
    np.testing.assert_array_equal(rows, expected)
    assert {kind.split()[0] for kind in met} == set(KINDS), met
    assert {"blackhole up", "blackhole down"} <= set(met), met  # requests vanish, and only their replies do
    assert sum(met.values()) >= PUSHES / 25, met


def test_every_push_is_applied_once_where_connections_of_shared_memory_end_and_shards_stop_answering() -> None:
    for seed in range(1, 6):
        rows, expected, met = attack(seed, PUSHES // 10, carrier="shared")
        np.testing.assert_array_equal(rows, expected)
        if {"end", "stop"} <= set(met):
            return
    raise AssertionError(f"the attack met only {met}")


@pytest.mark.slow
def test_the_attack_finds_a_shard_that_forgets_what_it_applied(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        attack_without("dedup", partial(attacks.proxies, pushes=PUSHES // 4), 1, tmp_path)
