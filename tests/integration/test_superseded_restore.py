"""A process that was stopped while it restored, and resumed beside its successor, touches nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from geartrain.ams import snapshot as snapshots
from geartrain.ams.cluster import Cluster, connect
from geartrain.ams.errors import StaleClient
from geartrain.ams.specs import SGD, Constant
from tests.integration.conftest import ServedCluster

IDS = np.arange(64)


def make(cluster: Cluster, root: Path) -> Path:
    """Make a table of ones and a snapshot of it."""
    table = cluster.create_table("t", dim=2, num_rows=64, optimizer=SGD(1.0), initializer=Constant(0))
    table.push(IDS, -np.ones((64, 2), np.float32))
    return Path(str(cluster.snapshot(root).result(60)))


@pytest.mark.parametrize("stopped_at", ["before the tables are dropped", "before the rows are read"])
def test_a_stopped_restore_leaves_its_successors_table(
    served: Callable[..., ServedCluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped_at: str
) -> None:
    address = served(2).address
    with (
        connect(address, stream="job/rank0", incarnation=1) as old,
        connect(address, stream="job/rank0", incarnation=2) as new,
    ):
        path = make(new, tmp_path)

        def overtaken() -> None:
            monkeypatch.undo()
            new.fence("job", 2)
            new.restore(path, replace=True)
            new.table("t").push(IDS, -np.ones((64, 2), np.float32))

        moment = "restore.create.after"
        if stopped_at == "before the rows are read":
            monkeypatch.setattr(snapshots.failpoints, "reach", lambda name: overtaken() if name == moment else None)
        else:
            verify = snapshots.Snapshot.verify
            monkeypatch.setattr(snapshots.Snapshot, "verify", lambda snapshot: (verify(snapshot), overtaken())[0])
        with pytest.raises(StaleClient, match="superseded by"):
            old.restore(path, replace=True)
        assert (new.table("t").pull(IDS) == 2).all()
        for change in (lambda: old.drop_table("t"), lambda: old.create_table("u", dim=2, optimizer=SGD(1.0))):
            with pytest.raises(StaleClient, match="superseded by"):
                change()
        assert (new.table("t").pull(IDS) == 2).all()
