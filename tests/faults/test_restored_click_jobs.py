"""``geartrain worker ctr --set mode=async`` : whoever is killed, each sample is in the rows once an epoch."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.faults.children import Child, Supervised
from tests.faults.restored_click_jobs import COUNT, EPOCHS, work

pa = pytest.importorskip("pyarrow", reason="needs pip install 'geartrain[data]'")
pq = pytest.importorskip("pyarrow.parquet", reason="needs pip install 'geartrain[data]'")

_DEADLINE_SECONDS = 120.0


@pytest.mark.parametrize(
    ("role", "mode"), [("joined", "async"), ("first", "async"), ("shard", "ssp:2"), ("scheduler", "async")]
)
def test_each_sample_is_in_the_rows_once_whoever_is_killed(role: str, mode: str, tmp_path: Path) -> None:
    at = np.arange(COUNT)
    data = tmp_path / "a.parquet"
    pq.write_table(pa.table({"click": at % 2, "user": at % 9, "at": at}), data, row_group_size=200)
    with ExitStack() as stack:
        settings = {"listen": "127.0.0.1:0", "num_shards": 2, "data": str(tmp_path / "state")}
        settings |= {"lease_seconds": 30.0, "stream_lease_seconds": 2.0}
        scheduler = Supervised("scheduler", settings, "")
        stack.callback(scheduler.end)
        shards = []
        for number in range(2):
            shards.append(Supervised("server", {"scheduler": scheduler.address, "shard": number}, ""))
            stack.callback(shards[-1].end)

        def started(dies_at: int = -1, **more: Any) -> Child:
            worker = Child(work, data, scheduler.address, mode, more, dies_at)
            stack.callback(worker.end)
            return worker

        first = started(15 if role == "first" else -1)
        assert first.receive(_DEADLINE_SECONDS) == 1
        joined = started(5 if role == "joined" else -1, joins=True)
        if role in ("joined", "first"):
            assert (joined if role == "joined" else first).exit_code(_DEADLINE_SECONDS) == -9
        else:
            while joined.receive(_DEADLINE_SECONDS) < 3:
                pass
            (shards[0] if role == "shard" else scheduler).kill()
        if role == "first":
            first = started(continues=True)
        while not isinstance(counts := first.receive(_DEADLINE_SECONDS), np.ndarray):
            pass
        trained = counts > 0
        assert trained.sum() == COUNT * 4 // 5
        assert np.all(counts[trained] == EPOCHS), np.unique(counts, return_counts=True)
