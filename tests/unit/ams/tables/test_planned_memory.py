"""What rows take as it was planned, beside tables that are filled, and beside what the process then holds."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import psutil
import pytest

import geartrain as gt
from geartrain.ams.tables.planned_memory import planned_rows
from geartrain.ams.tables.row_table import RowTable
from geartrain.ams.values.placement import NUM_BUCKETS
from geartrain.ams.values.shard_messages import BatchFacts
from geartrain.ams.values.specs import TableSpec

CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "sgd": (1_400_000, {"dim": 16, "optimizer": gt.SGD(0.1)}),
    "adagrad, as its index has grown": (1_350_000, {"dim": 16, "optimizer": gt.Adagrad(0.1)}),
    "adam, which counts updates": (700_000, {"dim": 8, "optimizer": gt.Adam(0.1)}),
    "bfloat16": (
        1_100_000,
        {"dim": 32, "optimizer": gt.Momentum(0.1), "dtype": "bfloat16", "slot_dtype": "bfloat16"},
    ),
    "seen": (900_000, {"dim": 16, "optimizer": gt.Adagrad(0.1), "expiry": gt.Unseen(steps=10)}),
    "admitted the second time": (
        600_000,
        {"dim": 24, "optimizer": gt.SGD(0.1), "admission": gt.MinCount(2, max_bytes=16 << 20)},
    ),
}
_BATCH = 1 << 14


def measured(case: str) -> dict[str, int]:
    """Bytes as a shard tells them, now and at most, and as the system does."""
    num_rows, settings = CASES[case]
    spec = TableSpec(name="t", **settings)
    table = RowTable(spec, np.arange(NUM_BUCKETS))
    gradients = np.ones((_BATCH, spec.dim), np.float32)
    before, most = psutil.Process().memory_info().rss, 0
    for begin in range(0, num_rows, _BATCH):
        ids = np.arange(begin, min(begin + _BATCH, num_rows)) * 2_654_435_761
        for _ in range(2 if spec.admission else 1):
            seen = np.ones(len(ids), np.uint32) if spec.counts_occurrences else None
            table.push(ids, gradients[: len(ids)], batch=BatchFacts(step=1, unix_seconds=1.0, occurrences=seen))
        most = max(most, table.memory_bytes)
    assert table.num_present == num_rows
    return {"told": table.memory_bytes, "most": most, "resident": psutil.Process().memory_info().rss - before}


@pytest.mark.exact_memory
@pytest.mark.parametrize("case", CASES)
def test_a_table_takes_what_was_planned(case: str) -> None:
    num_rows, settings = CASES[case]
    planned = planned_rows(TableSpec(name="t", **settings), num_rows)
    done = subprocess.run([sys.executable, __file__, case], stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["told"] == pytest.approx(planned.total, rel=0.03), planned
    assert found["most"] == pytest.approx(planned.peak, rel=0.05), planned
    assert found["resident"] == pytest.approx(planned.total, rel=0.1), planned


def test_the_fullest_shard_has_the_most_buckets() -> None:
    spec = TableSpec(name="t", dim=4, optimizer=gt.SGD(0.1))
    assert planned_rows(spec, 4_096_000, 3000).rows == 2 * planned_rows(spec, 4_096_000, 4096).rows


if __name__ == "__main__":
    print(json.dumps(measured(sys.argv[1])))
