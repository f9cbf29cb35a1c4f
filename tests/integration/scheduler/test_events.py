"""The log of events over real processes: what is killed and comes back, what clients do, who follows it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from geartrain.ams.client.factory import connect
from geartrain.ams.observe.event_log import FILE
from geartrain.ams.rpc.client.dial import dial
from geartrain.ams.values.config import ClientConfig
from geartrain.ams.values.errors import InvalidArgument, SnapshotFailed
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.scheduler_messages import ClusterEvent, JobReport, ReportEvent
from tests.support.command_line import typed
from tests.support.role_process import RoleProcess

PATIENT = ClientConfig(
    attempt_timeout_seconds=10, recovery_timeout_seconds=60, connect_timeout_seconds=60, refused_timeout_seconds=60
)


def events_of(address: str, since: int = 0) -> list[dict[str, Any]]:
    said = typed("events", "--json", f"--since={since}", f"--scheduler={address}")
    assert said.returncode == 0, said.stderr
    return [json.loads(line) for line in said.stdout.splitlines()]


@contextmanager
def following(address: str) -> Iterator[Iterator[dict[str, Any]]]:
    """Events as another process prints them, from the first on."""
    command = [sys.executable, "-m", "geartrain", "events", "--follow", "--json", "--since=0", f"--scheduler={address}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield map(json.loads, process.stdout)
        finally:
            process.kill()


def until(events: Iterator[dict[str, Any]], kind: str) -> dict[str, Any]:
    return next(event for event in events if event["kind"] == kind)


def test_events_of_a_killed_shard_and_of_a_killed_scheduler_come_in_order_and_stay(tmp_path: Path) -> None:
    def scheduler(listen: str) -> RoleProcess:
        return RoleProcess("scheduler", f"--data={tmp_path}", f"--listen={listen}", "--lease-seconds=2")

    def server(address: str) -> RoleProcess:
        return RoleProcess("server", f"--scheduler={address}", "--shard=0", "--heartbeat-seconds=0.2", "--wait")

    with scheduler("127.0.0.1:0") as first:
        address = first.address
        with following(address) as events, server(address) as old:
            joined = until(events, "joined")
            old.process.kill()
            lost = until(events, "lost")
            with server(address):
                back = until(events, "back")
                first.process.kill()
                first.process.wait()
                before = (tmp_path / FILE).read_bytes()
                (tmp_path / FILE).write_bytes(before + before[:20])  # torn
                with scheduler(address):
                    again = until(events, "scheduler")
                    kept = events_of(address)
    assert [event["shard"] for event in (joined, lost, back)] == [0, 0, 0]
    assert joined["time"] < lost["time"] < back["time"] < again["time"]
    assert lost["seconds"] >= 2.0
    assert lost["incarnation"] == joined["incarnation"] != back["incarnation"]
    assert [event["kind"] for event in kept] == ["scheduler", "joined", "lost", "back", "scheduler"]
    assert [event["number"] for event in kept] == [1, 2, 3, 4, 5]
    assert kept[:4] == [json.loads(line) for line in before.splitlines()]


def test_snapshots_and_restores_that_clients_do_are_noted_and_failed_ones_too(tmp_path: Path) -> None:
    with RoleProcess("scheduler", "--listen=127.0.0.1:0") as scheduler:
        address = scheduler.address
        with RoleProcess("server", f"--scheduler={address}"):
            with connect(address, config=PATIENT, stream="clicks/rank0") as cluster:
                table = cluster.create_table("t", dim=2, optimizer=SGD(1.0))
                table.push(np.arange(3), np.ones((3, 2), np.float32))
                path = cluster.snapshot(tmp_path, step=5).result()
                cluster.restore(path, replace=True)
                file = tmp_path / "no \udcff utf-8"  # a name that no message can carry as it is
                file.write_text("")
                with pytest.raises(SnapshotFailed):
                    cluster.snapshot(file, step=6)
                with pytest.raises(InvalidArgument):
                    cluster.snapshot(tmp_path, step=7, tables=[])
            found = [event for event in events_of(address) if event["kind"] not in ("scheduler", "joined", "schema")]
    assert [(event["kind"], event["job"], event["step"]) for event in found] == [
        ("snapshot", "clicks", 5),
        ("restore", "clicks", 5),
        ("snapshot_failed", "clicks", 6),
    ]
    assert found[0]["snapshot"] == found[1]["snapshot"] == str(path)
    assert 0 < found[0]["hold_seconds"] <= found[0]["seconds"]
    assert found[2]["reason"] == "SnapshotFailed"


def test_a_deed_succeeds_whether_or_not_the_scheduler_can_hear_of_it(tmp_path: Path) -> None:
    with (
        RoleProcess("scheduler", "--listen=127.0.0.1:0") as scheduler,
        RoleProcess("server", f"--scheduler={scheduler.address}"),
        connect(scheduler.address, config=PATIENT) as cluster,
    ):
        cluster.create_table("t", dim=2, optimizer=SGD(1.0))
        pending = cluster.snapshot(tmp_path)
        scheduler.process.kill()
        assert pending.result().exists()  # type: ignore[union-attr]


def test_clients_tell_only_what_clients_do() -> None:
    with RoleProcess("scheduler", "--listen=127.0.0.1:0") as scheduler:
        carrier, _ = dial(scheduler.address, ClientConfig())
        for event in (
            ClusterEvent(kind="lost", text="shard 0 is lost", shard=0),
            ClusterEvent(kind="snapshot", text="x" * 1_001),
            ClusterEvent(kind="snapshot", text="x", job="a//b"),
        ):
            with pytest.raises(InvalidArgument):
                carrier.call(ReportEvent(event=event, key=1), 10)
        carrier.call(ReportEvent(event=ClusterEvent(kind="snapshot", text="whole", job="a"), key=2), 10)
        carrier.call(ReportEvent(event=ClusterEvent(kind="snapshot", text="whole", job="a"), key=2), 10)
        carrier.close()
        assert [event["kind"] for event in events_of(scheduler.address)] == ["scheduler", "snapshot"]


def test_top_prints_shards_jobs_and_events_once_where_there_is_no_terminal() -> None:
    with (
        RoleProcess("scheduler", "--listen=127.0.0.1:0") as scheduler,
        RoleProcess("server", f"--scheduler={scheduler.address}"),
        connect(scheduler.address, config=PATIENT, stream="clicks/rank0") as cluster,
    ):
        watch = cluster.report_job("clicks", lambda: JobReport(step=1_234, last_step=5_000, loss=0.25))
        said = typed("top", f"--scheduler={scheduler.address}").stdout
        assert watch is not None
        watch.done()
        kept = json.loads(typed("status", "--json", f"--scheduler={scheduler.address}").stdout)["jobs"]
    for part in ("1 of 1 shards up", "clicks: training, step 1,234 of 5,000", "0.2500", "shard 0 joined"):
        assert part in said, said
    assert [(job["job"], job["state"], job["step"]) for job in kept] == [("clicks", "ended", 1_234)]


def test_prometheus_is_told_of_jobs_and_snapshots(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    from tests.support.scrapes import scrape

    with (
        RoleProcess("scheduler", "--listen=127.0.0.1:0", "--metrics=127.0.0.1:0") as scheduler,
        RoleProcess("server", f"--scheduler={scheduler.address}", "--heartbeat-seconds=0.1"),
        connect(scheduler.address, config=PATIENT, stream="clicks/rank0") as cluster,
    ):
        cluster.report_job("clicks", lambda: JobReport(step=1_234, snapshot_every_seconds=60))
        cluster.create_table("t", dim=2, optimizer=SGD(1.0))
        cluster.snapshot(tmp_path, step=5).result()
        while not (  # a heartbeat tells a clock
            (told := scrape(scheduler.facts["metrics"])).values("geartrain_events_total", kind="snapshot")
            and told.values("geartrain_clock_offset_seconds")
        ):
            pass
    assert told.value("geartrain_job_last_step", job="clicks") == 1_234
    assert told.value("geartrain_snapshot_interval_seconds", job="clicks") == 60
    assert told.value("geartrain_snapshot_last_success_timestamp_seconds", job="clicks") > 1.7e9
    assert told.value("geartrain_shard_up", shard=0) == 1
    assert abs(told.value("geartrain_clock_offset_seconds", role="server")) < 60
