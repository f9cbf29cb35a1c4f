"""A worker process that writes under a stream name: ``named_writer.py SCHEDULER INCARNATION FIRST LAST [numbered]``.

Step s pushes −s to rows 0 … 63, so that the sum of all steps is known. Prints each step when it is acknowledged, and
the name of the error that ends it.
"""

from __future__ import annotations

import sys

import numpy as np

import geartrain as gt
from geartrain.ams.values.config import ClientConfig


def main(scheduler: str, incarnation: str, first: str, last: str, numbered: str = "") -> None:
    config = ClientConfig(attempt_timeout_seconds=10)
    with gt.connect(scheduler, config=config, stream="job/rank0", incarnation=int(incarnation)) as cluster:
        table = cluster.table("t")
        print("connected", flush=True)
        for step in range(int(first), int(last) + 1):
            cluster.acknowledge(max(int(first), step - 100))
            gradients = np.full((64, 1), -step, np.float32)
            try:
                table.push(np.arange(64), gradients, sequence=step if numbered else None)
            except gt.errors.GeartrainError as error:
                print(type(error).__name__, error, flush=True)
                return
            print(step, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
