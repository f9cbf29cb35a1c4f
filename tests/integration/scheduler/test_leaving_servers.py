"""What a server that is told to end waits for, and what it says."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from geartrain.ams.client.factory import connect
from geartrain.ams.values.config import ClientConfig
from geartrain.ams.values.errors import ClusterNotReady
from geartrain.ams.values.optimizers.registry import SGD
from tests.integration.conftest import ServedCluster

IMPATIENT = ClientConfig(attempt_timeout_seconds=5, recovery_timeout_seconds=0)


def test_a_job_that_does_not_save_is_waited_for_as_long_as_was_said(
    served: Callable[..., ServedCluster], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("geartrain.ams.client.job_reporter._REPORT_SECONDS", 0.02)
    cluster = served(1, leave_timeout_seconds=4.0)
    with connect(cluster.address, stream="slow/rank0") as ours:
        ours.create_table("t", dim=1, optimizer=SGD(1.0)).push(np.arange(7), np.ones((7, 1), np.float32))
        watch = ours.report_job("slow")
        assert watch is not None and watch.leaving == ()
        ending = threading.Thread(target=cluster.servers[0].stop, args=(5.0,))
        ending.start()
        while not watch.leaving:
            assert ending.is_alive()
        assert [shard.state for shard in ours.status().shards] == ["leaving"]
        with pytest.raises(ClusterNotReady, match=r"0 \(leaving\)"):  # nobody begins on what is about to go
            connect(cluster.address, config=IMPATIENT)
        ending.join()
    assert (
        "shard 0 ends with its rows: 't' (7 rows). Not saved within 4 s: slow; what is in no snapshot is" in caplog.text
    )


@pytest.mark.parametrize("has_scheduler", [True, False])
def test_a_server_that_no_job_uses_ends_at_once_and_says_what_goes_with_it(
    served: Callable[..., ServedCluster],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    has_scheduler: bool,
) -> None:
    monkeypatch.setattr("geartrain.ams.server.leave._SCHEDULER_SECONDS", 0.0)
    cluster = served(1)
    with connect(cluster.address) as ours:
        ours.create_table("t", dim=1, optimizer=SGD(1.0)).push(np.arange(7), np.ones((7, 1), np.float32))
    if not has_scheduler:
        cluster.scheduler.stop(0)
    cluster.servers[0].stop(5.0)
    why = "What is in no snapshot" if has_scheduler else "Jobs were not asked for a snapshot (scheduler at"
    assert f"shard 0 ends with its rows: 't' (7 rows). {why}" in caplog.text


def test_a_scheduler_that_ends_with_its_servers_waits_for_them(
    served: Callable[..., ServedCluster], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("geartrain.ams.client.job_reporter._REPORT_SECONDS", 0.02)
    cluster = served(1, leave_timeout_seconds=3.0)
    with connect(cluster.address, stream="slow/rank0") as ours:
        ours.create_table("t", dim=1, optimizer=SGD(1.0)).push(np.arange(7), np.ones((7, 1), np.float32))
        watch = ours.report_job("slow")
        assert watch is not None
        ending = threading.Thread(target=cluster.servers[0].stop, args=(5.0,))
        ending.start()
        while not watch.leaving:
            assert ending.is_alive()
        cluster.scheduler.stop(5.0)
        ending.join()
    assert "Not saved within 3 s: slow" in caplog.text
