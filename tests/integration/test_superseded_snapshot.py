"""A process that was stopped while it took a snapshot, and resumed beside its successor, commits nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from geartrain.ams.client.factory import connect
from geartrain.ams.client.scheduler_calls import SchedulerCalls
from geartrain.ams.client.snapshots import snapshot as snapshots
from geartrain.ams.observe.failpoints import armed
from geartrain.ams.storage.snapshot.folder import latest, list_snapshots
from geartrain.ams.values.errors import StaleClient
from geartrain.ams.values.optimizers.registry import SGD
from tests.integration.conftest import ServedCluster


@pytest.mark.parametrize("who_knows", ["the shards", "the scheduler"])
def test_a_superseded_process_commits_no_snapshot(
    served: Callable[..., ServedCluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who_knows: str
) -> None:
    address, root, go = served(2).address, tmp_path / "snapshots", tmp_path / "go"
    if who_knows == "the scheduler":
        monkeypatch.setattr(snapshots._Hold, "_renewed", lambda _: [])
    else:
        monkeypatch.setattr(SchedulerCalls, "check_caller", lambda _: None)
    with connect(address, stream="job/rank0", incarnation=1) as old:
        old.create_table("t", dim=2, num_rows=64, optimizer=SGD(1.0)).push(np.arange(64), np.ones((64, 2), np.float32))
        old.snapshot(root, "first").result(60)
        with armed(f"block.write.after=pause({go})") as passes:
            pending = old.snapshot(root, "second", step=1)
            while not passes.fired["block.write.after"]:
                assert not pending.done()
            with connect(address, stream="job/rank0", incarnation=2) as new:
                new.fence("job", 2)
                go.touch()
                with pytest.raises(StaleClient, match="superseded by"):
                    pending.result(60)
    assert [one.name for one in list_snapshots(root)] == ["first"]
    writer = latest(root).manifest.writer
    assert writer is not None
    assert (writer.stream, writer.incarnation) == ("job/rank0", 1)
