"""``geartrain worker ctr`` takes as much memory for three million samples as for 300,000."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pa = pytest.importorskip("pyarrow", reason="samples from files need the extra data")
pq = pytest.importorskip("pyarrow.parquet", reason="samples from files need the extra data")
pytestmark = [pytest.mark.slow, pytest.mark.exact_memory]
ALLOWED = 1.05


def write(path: Path, count: int, group_rows: int) -> Path:
    random = np.random.default_rng(0)
    with pq.ParquetWriter(path, table(random, 1).schema) as writer:
        for first in range(0, count, group_rows):
            writer.write_table(table(random, min(group_rows, count - first)), row_group_size=group_rows)
    return path


def table(random: np.random.Generator, count: int) -> pa.Table:
    fields = {f"field_{number}": random.integers(1_000, size=count) for number in range(4)}
    cities = [f"city {number}" for number in random.integers(300, size=count)]
    return pa.table(
        {
            "click": random.integers(2, size=count),
            "user": random.integers(50_000, size=count),
            "item": random.integers(20_000, size=count),
            "city": cities,
            **fields,
        }
    )


def peak_mib(data: Path, out: Path) -> float:
    settings = ("epochs=1", "batch_size=5000", "patience=0", "snapshots.steps=1000000")
    command = [sys.executable, "-m", "geartrain", "worker", "ctr", "--data", str(data), "--out", str(out)]
    process = subprocess.Popen([*command, *(f"--set={setting}" for setting in settings)], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = status  # it was waited for here, where its usage is told
    assert status == 0
    assert json.loads((out / "report.json").read_text(encoding="utf-8"))["epochs"] >= 1
    return used.ru_maxrss / 1024


@pytest.mark.timeout(900)
def test_the_peak_of_memory_does_not_grow_with_the_samples(tmp_path: Path) -> None:
    peaks = [
        peak_mib(write(tmp_path / f"{count}.parquet", count, 50_000), tmp_path / f"run-{count}")
        for count in (300_000, 3_000_000)
    ]
    assert peaks[1] <= ALLOWED * peaks[0], peaks
