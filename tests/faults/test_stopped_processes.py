"""Processes that are stopped (SIGSTOP) past their lease, and come back."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.cluster_status import cluster_status
from geartrain.ams.client.factory import connect, local
from geartrain.ams.scheduler.scheduler import Scheduler
from geartrain.ams.scheduler.service import SchedulerServer
from geartrain.ams.server.role import ShardServer
from geartrain.ams.values import errors
from geartrain.ams.values.config import ClientConfig, SchedulerConfig, ServerConfig
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.scheduler_messages import HeartbeatResult
from geartrain.ams.values.shard_messages import CallContext, Push
from geartrain.ams.values.specs import Constant
from tests.support.message_rows import MessageShard
from tests.support.role_process import RoleProcess

DEADLINE_SECONDS = 30.0
WRITER = str(Path(__file__).with_name("named_writer.py"))
LEASE_SECONDS = 1.0
IDS = np.arange(64)
ONES = np.full((64, 2), -1, np.float32)
PATIENT = ClientConfig(attempt_timeout_seconds=10, recovery_timeout_seconds=30)


def poll(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"not within {DEADLINE_SECONDS:g} s: {what}"
        time.sleep(0.02)


@pytest.fixture
def scheduler() -> Iterator[str]:
    server = SchedulerServer(SchedulerConfig(listen="127.0.0.1:0", num_shards=1, lease_seconds=LEASE_SECONDS))
    yield server.start()
    server.stop(0)


def server_process(scheduler: str) -> RoleProcess:
    return RoleProcess("server", f"--scheduler={scheduler}", "--shard=0", GEARTRAIN_SERVER__HEARTBEAT_SECONDS="0.1")


def stop_until_lost(process: subprocess.Popen[str], scheduler: str) -> None:
    process.send_signal(signal.SIGSTOP)
    poll(lambda: cluster_status(scheduler).shards[0].state == "lost", "the stopped shard counts as lost")


def test_a_stopped_server_whose_shard_was_taken_answers_nothing_and_ends(
    scheduler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(server_process(scheduler))
        process, address = server.process, server.address
        ours = stack.enter_context(connect(scheduler, config=PATIENT))
        table = ours.create_table("t", dim=2, optimizer=SGD(1.0), num_rows=64, initializer=Constant(0))
        for _ in range(5):
            table.push(IDS, ONES)
        old = ours.status().shards[0].incarnation
        stop_until_lost(process, scheduler)
        successor = ShardServer(ServerConfig(scheduler=scheduler, shard=0, heartbeat_seconds=0.1))
        successor.start()
        stack.callback(successor.stop, 0)
        refused, whole = threading.Event(), Scheduler.heartbeat

        def heartbeat(self: Scheduler, shard: int, incarnation: int, *told: Any, **more: Any) -> HeartbeatResult:
            if incarnation == old:  # answered only after the request below
                refused.wait(DEADLINE_SECONDS)
            return whole(self, shard, incarnation, *told, **more)

        monkeypatch.setattr(Scheduler, "heartbeat", heartbeat)
        zombie = MessageShard(address)
        stack.callback(zombie.close)
        context = CallContext(stream="s", incarnation=1, sequence=1, shard_incarnation=old)
        late = zombie.write(context, Push(table="t", ids=IDS, gradients=ONES), DEADLINE_SECONDS)
        process.send_signal(signal.SIGCONT)
        with pytest.raises(errors.ShardUnavailable, match=r"was stopped for .* s, and its lease of 1 s ran out"):
            late.result(DEADLINE_SECONDS)
        refused.set()
        _, log = process.communicate(timeout=DEADLINE_SECONDS)
        assert process.returncode == 1
        assert "error: the server stopped serving by itself: shard 0 was taken over by another process" in log
        with pytest.raises(errors.ShardRestarted):
            table.push(IDS, ONES)
        # From the successor's first table on, what is acknowledged is what there is.
        with connect(scheduler, config=PATIENT) as anew:
            anew.drop_table("t")
            table = anew.create_table("t", dim=2, optimizer=SGD(1.0), num_rows=64, initializer=Constant(0))
            for _ in range(7):
                table.push(IDS, ONES)
            np.testing.assert_array_equal(table.pull(IDS), np.full((64, 2), 7, np.float32))


def test_a_stopped_server_whose_shard_nobody_took_goes_on_with_every_row(scheduler: str) -> None:
    with server_process(scheduler) as server, connect(scheduler, config=PATIENT) as ours:
        process = server.process
        table = ours.create_table("t", dim=2, optimizer=SGD(1.0), num_rows=64, initializer=Constant(0))
        table.push(IDS, ONES)
        stop_until_lost(process, scheduler)
        pushed = table.push_async(IDS, ONES)
        process.send_signal(signal.SIGCONT)
        pushed.result(DEADLINE_SECONDS)
        np.testing.assert_array_equal(table.pull(IDS), np.full((64, 2), 2, np.float32))


def test_a_server_stopped_for_a_moment_is_waited_for_when_a_table_is_made_or_dropped() -> None:
    with ExitStack() as stack:
        scheduler = SchedulerServer(SchedulerConfig(listen="127.0.0.1:0", num_shards=1, lease_seconds=60))
        address = scheduler.start()
        stack.callback(scheduler.stop, 0)
        process = stack.enter_context(server_process(address)).process
        ours = stack.enter_context(connect(address, config=PATIENT))
        aside = stack.enter_context(ThreadPoolExecutor())
        for change in (lambda: ours.create_table("t", dim=2, optimizer=SGD(1.0)), lambda: ours.drop_table("t")):
            process.send_signal(signal.SIGSTOP)
            changed = aside.submit(change)
            with pytest.raises(TimeoutError):
                changed.result(0.5)
            process.send_signal(signal.SIGCONT)
            changed.result(DEADLINE_SECONDS)
        assert ours.status().tables == ()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Two shards, and a table of 64 zeros that workers know as ``t``."""
    with ExitStack() as stack:
        scheduler = SchedulerServer(SchedulerConfig(listen="127.0.0.1:0", num_shards=2))
        address = scheduler.start()
        stack.callback(scheduler.stop, 0)
        for shard in range(2):
            server = ShardServer(ServerConfig(scheduler=address, shard=shard))
            server.start()
            stack.callback(server.stop, 0)
        cluster = stack.enter_context(connect(address, config=PATIENT))
        cluster.create_table("t", dim=1, optimizer=SGD(1.0), num_rows=64, initializer=Constant(0))
        cluster.address = address  # type: ignore[attr-defined]
        yield cluster


@contextmanager
def writer(cluster: Cluster, incarnation: int, first: int, last: int, *flags: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, WRITER, cluster.address, str(incarnation), str(first), str(last), *flags],  # type: ignore[attr-defined]
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def read_until(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    while (read := process.stdout.readline()) != f"{line}\n":
        assert read, f"ended before it said {line}"


def test_a_worker_that_was_stopped_while_its_job_was_taken_over_changes_nothing(cluster: Cluster) -> None:
    table = cluster.table("t")
    with writer(cluster, 1, 1, 1_000_000) as old:
        read_until(old, "10")
        old.send_signal(signal.SIGSTOP)
        cluster.fence("job", 2)
        before = table.pull(IDS)
        old.send_signal(signal.SIGCONT)
        told, _ = old.communicate(timeout=DEADLINE_SECONDS)
    last = told.splitlines()[-1]
    assert last.startswith("StaleClient incarnation 1 of stream 'job/rank0/process/1' was superseded"), last
    assert "stop this one" in last
    np.testing.assert_array_equal(table.pull(IDS), before)
    with pytest.raises(errors.StaleClient):
        connect(cluster.address, config=PATIENT, stream="job/rank0", incarnation=1)  # type: ignore[attr-defined]


def test_a_numbered_write_needs_a_name_and_stays_in_the_window() -> None:
    with local() as nameless, local(stream="job") as named:
        for cluster in (nameless, named):
            cluster.create_table("t", dim=1, optimizer=SGD(1.0))
        with pytest.raises(errors.InvalidArgument, match="stream='job/rank0'"):
            nameless.table("t").push(IDS, ONES[:, :1], sequence=1)
        table = named.table("t")
        assert not table.push(IDS, ONES[:, :1], sequence=1).duplicate
        assert table.push(IDS, ONES[:, :1], sequence=1).duplicate
        with pytest.raises(errors.InvalidArgument, match=r"outside \[1, 1025\)"):
            table.push(IDS, ONES[:, :1], sequence=1025)
        named.acknowledge(1025)
        assert not table.push(IDS, ONES[:, :1], sequence=1025).duplicate
        with pytest.raises(errors.InvalidArgument, match=r"cluster\.acknowledge"):
            table.push(IDS, ONES[:, :1], sequence=1)
