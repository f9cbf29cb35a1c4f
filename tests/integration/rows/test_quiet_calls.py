"""A call that works for long before it answers keeps its connection: pings are no reason to close it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from geartrain.ams.client.factory import connect
from geartrain.ams.observe.failpoints import armed
from geartrain.ams.rpc.client.shard import GrpcCarrier
from geartrain.ams.storage.snapshot.folder import new_staging
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.shard_messages import CallContext, Done, Freeze, Restore, WriteFrozen, Written
from geartrain.ams.values.specs import Constant
from tests.integration.conftest import ServedCluster

PING_SECONDS = 1.0
"""gRPC sends pings no faster."""
QUIET_SECONDS = 6.5 * PING_SECONDS
"""A server that counts pings closes the connection at the fifth."""


def test_calls_longer_than_six_pings_are_answered_on_their_connections(
    served: Callable[..., ServedCluster], tmp_path: Path
) -> None:
    with connect(served(2).address) as cluster:

        def make(name: str) -> None:
            cluster.create_table(name, dim=2, num_rows=9000, optimizer=SGD(1.0), initializer=Constant(0))

        for name in ("restored", "written"):
            make(name)
            cluster.table(name).push(np.arange(9000), np.ones((9000, 2), np.float32))
        path = cluster.snapshot(tmp_path, "a").result(60)
        cluster.drop_table("restored")
        make("restored")
        staging = new_staging(tmp_path, "b")
        cluster._calls.on_all_shards(Freeze(snapshot_id=staging.id, tables=("written",)))
        one, other = (GrpcCarrier(entry.address, ping_seconds=PING_SECONDS) for entry in cluster._calls.view.shards)
        began = time.monotonic()
        nap = f"sleep({QUIET_SECONDS})@1"
        with armed(f"restore.block.before={nap};block.write.before={nap}"):
            restored = one.submit(CallContext(), Restore(folder=str(path), tables=("restored",)), 60.0)
            write = WriteFrozen(snapshot_id=staging.id, folder=staging.path)
            written = other.submit(CallContext(), write, 60.0)
            assert isinstance(restored.result(60), Done)
            assert isinstance(written.result(60), Written)
        one.close()
        other.close()
        assert time.monotonic() - began >= QUIET_SECONDS
