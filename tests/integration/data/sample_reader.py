"""A process that reads its part of a job's samples and writes down what it commits; it may kill itself on the way."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import geartrain as gt


def read(address: str, data: Path, log: Path, worker: str, workers: int, die_at: int, moment: str) -> None:
    """``moment``: die_at batches are committed, then it dies "before" the next commit, or "after" it; "" never."""
    samples = gt.ParquetSamples(data, columns=["id"], batch_size=64, seed=5, window_rows=100)
    with (
        gt.connect(address) as cluster,
        log.open("a", buffering=1) as lines,
        samples.shared(cluster, "job", worker=worker, epochs=2, num_workers=workers, num_streams=16) as batches,
    ):
        for number, batch in enumerate(batches):
            lines.write(json.dumps({"read": batch["id"].tolist()}) + "\n")
            if (number, moment) == (die_at, "before"):
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                batches.commit(batch)
            except gt.errors.StaleClient:  # the machine let it wait for longer than its lease: nothing was committed
                continue
            if (number, moment) == (die_at, "after"):
                os.kill(os.getpid(), signal.SIGKILL)
            lines.write(json.dumps({"committed": batch.num_samples}) + "\n")
