"""Samples that one thread reads from a Parquet file of 24 columns (23 of integers, a click), against pyarrow alone.

``gt.ParquetSamples`` checks every column and gives tensors; pyarrow reads the same batches, and copies each column to a
tensor. Samples a second of the process's CPU time, in turns.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from _common import result, threads

import geartrain as gt
from geartrain.launch.bench import Result

COUNT, COLUMNS, BATCH = 1_000_000, 24, 5_000


def results(full: bool = False) -> Iterator[Result]:
    """The one case, the median of 3 turns; ``full``: of 9."""
    random = np.random.default_rng(0)
    columns = {f"field{number}": random.integers(10**6, size=COUNT) for number in range(COLUMNS - 1)}
    columns["click"] = random.integers(2, size=COUNT).astype(np.float32)
    with tempfile.TemporaryDirectory() as folder, threads(1):
        path = Path(folder, "samples.parquet")
        pq.write_table(pa.table(columns), path, row_group_size=100_000)
        readers = (
            (lambda: sum(batch.num_samples for batch in gt.ParquetSamples(path, batch_size=BATCH))),
            lambda: by_pyarrow(path),
        )
        turns = [[rate(reader) for reader in readers] for _ in range(9 if full else 3)]
    ours, theirs = (1e-6 * float(np.median(rates)) for rates in zip(*turns, strict=True))
    yield result(
        f"samples a CPU second, {COLUMNS} columns, batch {BATCH:,}", ours, "pyarrow", theirs, "M/s", more_is_better=True
    )


def by_pyarrow(path: Path) -> int:
    """Read all samples, each column of a batch as a tensor; return their number."""
    count = 0
    for batch in pq.ParquetFile(path).iter_batches(batch_size=BATCH, use_threads=False):
        tensors = [torch.from_numpy(column.to_numpy(zero_copy_only=False).copy()) for column in batch.columns]
        count += len(tensors[0])
    return count


def rate(reader: Callable[[], int]) -> float:
    """Return the samples a second of CPU time of this process."""
    begin = time.process_time()
    return reader() / (time.process_time() - begin)
