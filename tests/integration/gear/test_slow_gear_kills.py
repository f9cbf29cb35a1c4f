"""Two shards, two slow gears and two fast gears as processes of their own; one slow gear is killed in the middle."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import geartrain as gt
from geartrain.ams.client.cluster_status import slow_gear_status
from geartrain.ams.values.gear_messages import GearAccount
from geartrain.cli.cluster.status import lost_gradients
from tests.faults.children import Child, serve
from tests.integration.gear.gear_cluster import CLIENT
from tests.integration.gear.gear_processes import DIM, IDS, LR, STOPS, Nursery, fast_gear, slow_gear
from tests.redis_child import running_redis

STEPS, LEASE_SECONDS = 60, 1.0


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


def heard(pipe: Connection) -> Any:
    assert pipe.poll(60)
    said = pipe.recv()
    if isinstance(said, BaseException):
        raise said
    return said


def ended(pipe: Connection) -> tuple[list[int], GearAccount]:
    """What a fast gear has delivered of each id when it has made its steps, and its account then."""
    while isinstance(said := heard(pipe), int):
        pass
    delivered, account = said
    assert account.adds_up and account.received == sum(delivered)
    return delivered, account


class Run:
    """A cluster with two slow and two fast gears."""

    def __init__(
        self, stack: ExitStack, nursery: Nursery, stores: Sequence[str] = ("memory", "memory"), num_fast: int = 2
    ) -> None:
        self.nursery = nursery
        scheduler = Child(
            serve,
            "scheduler",
            {"listen": "127.0.0.1:0", "num_shards": 2, "stream_lease_seconds": LEASE_SECONDS},
        )
        stack.callback(scheduler.end)
        self.address = scheduler.receive()
        for _ in range(2):
            server = Child(serve, "server", {"scheduler": self.address})
            stack.callback(server.end)
            server.receive()
        self.slow = []
        self.stores, self.addresses = stores, list[str]()
        for store in stores:
            pid, pipe = nursery.start(slow_gear, self.address, store)
            self.addresses.append(heard(pipe))
            self.slow.append(pid)
        self.fast = [nursery.start(fast_gear, self.address, number, STEPS)[1] for number in range(num_fast)]

    def train(self, number: int) -> tuple[list[GearAccount], np.ndarray, list[list[str]]]:
        """End a slow gear in mid-run by a signal.

        Returns the fast gears' accounts, what they delivered of each id, and what they logged.
        """
        for pipe in self.fast:
            while heard(pipe) != 10:
                pass
        self.nursery.end(self.slow[0], number)
        if self.stores[0] != "memory":
            listen = "127.0.0.1:0" if self.stores[0].startswith("lmdb") else self.addresses[0]
            heard(self.nursery.start(slow_gear, self.address, self.stores[0], listen)[1])
        self.go_on()
        self.go_on()
        delivered = sum(np.array(ended(pipe)[0]) for pipe in self.fast)
        ends = self.flushed()
        return [account for account, _ in ends], delivered, [warnings for _, warnings in ends]

    def go_on(self) -> None:
        """Let the fast gears pass the next step at which they wait."""
        for pipe in self.fast:
            pipe.send("go on")

    def flushed(self) -> list[tuple[GearAccount, list[str]]]:
        """Let the fast gears flush and end; return the account and the log of each."""
        for pipe in self.fast:
            pipe.send("flush")
        ends = [heard(pipe) for pipe in self.fast]
        for pipe in self.fast:
            pipe.send("end")
        return ends

    def applied(self) -> np.ndarray:
        """How many gradients of each id are in the weights: it is the negative of its column over the learning rate."""
        with gt.connect(self.address, config=CLIENT) as cluster:
            weights = cluster.table("image").pull(np.arange(1)).reshape(-1)[: DIM * IDS].reshape(DIM, IDS)
        counts = -weights / LR
        assert (counts == counts[0]).all() and (counts == counts.round()).all()
        return counts[0].astype(np.int64)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "told to end"])
def test_what_a_slow_gear_held_is_counted(nursery: Nursery, number: signal.Signals) -> None:
    with ExitStack() as stack:
        run = Run(stack, nursery)
        accounts, delivered, warnings = run.train(number)
        applied = run.applied()
        gears, _ = slow_gear_status(run.address, config=CLIENT)
    total = sum(accounts, GearAccount())
    assert total.adds_up and total.received == delivered.sum() and total.waiting == total.due == 0
    assert lost_gradients(gears) == total.lost  # as geartrain status shows it
    assert (applied <= delivered).all()
    assert delivered.sum() - total.lost <= applied.sum()
    assert total.applied + total.lost == delivered.sum()
    if number == signal.SIGTERM:
        assert total.lost == 0 and (applied == delivered).all()
    for account, lines in zip(accounts, warnings, strict=True):
        assert sum(int(line.split("gone: ")[1].split()[0]) for line in lines if "gone: " in line) == account.lost


@pytest.mark.parametrize("kind", ["lmdb", "redis"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "told to end"])
def test_gradients_in_a_store_outlive_a_slow_gear(
    nursery: Nursery, number: signal.Signals, kind: str, tmp_path: Path
) -> None:
    stores = [f"lmdb:{tmp_path}/{gear}" for gear in range(2)]
    with ExitStack() as stack:
        if kind == "redis":
            stores = [stack.enter_context(running_redis()).url] * 2
        run = Run(stack, nursery, stores)
        accounts, delivered, _ = run.train(number)
        applied = run.applied()
        gears, _ = slow_gear_status(run.address, config=CLIENT)
    total = sum(accounts, GearAccount())
    assert total.lost == lost_gradients(gears) == 0
    assert total.applied == total.received == delivered.sum()
    assert (applied == delivered).all()


def test_a_restore_drops_the_gradients_that_a_store_has_of_before(nursery: Nursery, tmp_path: Path) -> None:
    with ExitStack() as stack:
        store = f"lmdb:{tmp_path}/gear"
        run = Run(stack, nursery, [store], num_fast=0)
        cluster = stack.enter_context(gt.connect(run.address, config=CLIENT, stream="job/fast"))
        image = gt.SlowGear(cluster, "image", dim=DIM, gradients_per_id=3, expire_seconds=0.0)
        rows = gt.RowOptimizer(image)

        def step(ids: range) -> None:
            image(torch.tensor(ids)).sum().backward()
            rows.step()

        step(range(IDS))
        taken = cluster.snapshot(tmp_path / "snapshots").result()
        step(range(IDS))
        cluster.restore(taken, replace=True)
        step(range(8))
        assert image.account().waiting == 8  # the first two of each id are gone
        nursery.end(run.slow[0])
        heard(nursery.start(slow_gear, run.address, store)[1])
        assert run.applied().tolist() == [1] * 8 + [0] * (IDS - 8)


def test_one_that_only_seemed_dead_goes_on_and_doubles_nothing(nursery: Nursery) -> None:
    with ExitStack() as stack:
        run = Run(stack, nursery)
        for pipe in run.fast:
            while heard(pipe) != 10:
                pass
        nursery.signal(run.slow[0], signal.SIGSTOP)
        run.go_on()
        for pipe in run.fast:
            while heard(pipe) != STOPS[1] - 1:
                pass
        nursery.signal(run.slow[0], signal.SIGCONT)
        run.go_on()
        delivered = sum(np.array(ended(pipe)[0]) for pipe in run.fast)
        total = sum((account for account, _ in run.flushed()), GearAccount())
        applied = run.applied()
    assert total.adds_up and total.received == delivered.sum() and total.waiting == total.due == 0
    assert (applied <= delivered).all() and delivered.sum() - total.lost <= applied.sum()
