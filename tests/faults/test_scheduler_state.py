"""A scheduler that is killed in the middle of its work, and whose files are damaged."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np

from geartrain.ams.client.cluster_status import cluster_status
from geartrain.ams.client.factory import connect
from geartrain.ams.server.role import ShardServer
from geartrain.ams.values import errors
from geartrain.ams.values.config import ClientConfig, ServerConfig
from geartrain.ams.values.optimizers.registry import SGD
from tests.support.role_process import RoleProcess

CONFIG = ClientConfig(
    attempt_timeout_seconds=10, recovery_timeout_seconds=30, connect_timeout_seconds=30, refused_timeout_seconds=30
)


def test_what_a_killed_scheduler_acknowledged_is_there_when_it_is_started_again(tmp_path: Path) -> None:
    made: list[str] = []
    enough = threading.Event()
    with RoleProcess("scheduler", f"--data={tmp_path}", "--listen=127.0.0.1:0") as scheduler:
        address = scheduler.address
        server = ShardServer(ServerConfig(scheduler=address, heartbeat_seconds=0.05))
        server.start()
        cluster = connect(address, config=CONFIG)

        def make_tables() -> None:
            try:
                for number in range(10_000):
                    cluster.create_table(f"t{number}", dim=1, optimizer=SGD(1.0))
                    made.append(f"t{number}")
                    if number == 20:
                        enough.set()
            except errors.SchedulerUnavailable:
                pass

        maker = threading.Thread(target=make_tables)
        maker.start()
        assert enough.wait(30)
        scheduler.process.kill()
        maker.join(30)
        before = cluster.num_shards
    with RoleProcess("scheduler", f"--data={tmp_path}", f"--listen={address}"):
        table = connect(address, config=CONFIG).table(made[-1])
        table.push(np.arange(3), np.ones((3, 1), np.float32))
        with connect(address, config=CONFIG) as anew:
            assert anew.num_shards == before
            interrupted = f"t{len(made)}"  # may be there, whole, if only its reply was lost
            anew.drop_table(interrupted)
            anew.create_table(interrupted, dim=7, optimizer=SGD(1.0)).pull(np.arange(3))
    cluster.close()
    server.stop(0)
    # Its shard is gone: nobody else can tell it.
    with RoleProcess("scheduler", f"--data={tmp_path}", f"--listen={address}"):
        assert {table.name for table in cluster_status(address).tables} >= {*made, interrupted}
