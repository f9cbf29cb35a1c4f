"""Run by test_memory_report in a process of its own: what a step adds to its resident size, in bytes of each part."""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import geartrain as gt


def main(case: dict[str, Any]) -> None:
    torch.set_num_threads(2)
    classes, dim, dtype = case["num_classes"], case["dim"], case["dtype"]
    with gt.local(case["num_shards"]) as cluster:
        # Libraries, threads and their stacks belong to any program, not to a step: a small head loads them.
        small = gt.ClassHead(cluster, "small", num_classes=64, dim=8, select=gt.FullSoftmax(), dtype=dtype)
        _step(small, gt.RowOptimizer(small), 2, 0)
        head = gt.ClassHead(
            cluster, "head", num_classes=classes, dim=dim, select=gt.PartialFC(case["sample_rate"]), dtype=dtype
        )
        for start in range(0, classes, 8192):  # every row exists, and its momentum was touched
            ids = np.arange(start, min(classes, start + 8192))
            head.table.push(ids, np.ones((len(ids), dim), np.float32))  # type: ignore[attr-defined]
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        before, rows = _status_bytes("VmRSS"), gt.RowOptimizer(head)
        Path("/proc/self/clear_refs").write_text("5")
        for step in range(2):
            _step(head, rows, case["batch_size"], step)
        added = _status_bytes("VmHWM") - before
        table = next(table for table in cluster.status().tables if table.name == "head")
        print(json.dumps({"table_bytes": table.memory_bytes, "step_bytes": added}))


def _step(head: gt.ClassHead, rows: gt.RowOptimizer, batch: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(batch, head.dim, generator=generator, requires_grad=True)
    head(features, torch.randint(head.num_classes, (batch,), generator=generator)).backward()
    rows.step()


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
