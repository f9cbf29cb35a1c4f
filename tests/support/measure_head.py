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
from geartrain.bridge.placements.device_rows import DeviceRows
from geartrain.launch.hosting import local


def main(case: dict[str, Any]) -> None:
    torch.set_num_threads(2)
    rows = case.get("rows", "pull")
    with local(case["num_shards"]) as cluster:
        # Libraries, threads and their stacks belong to any program, not to a step: a small head loads them.
        small = _head(cluster, "small", {**case, "num_classes": 64, "dim": 8, "sample_rate": 1.0})
        _step(small, gt.RowOptimizer(small), 2, 0)
        head = _head(cluster, "head", case)
        _touch_every_row(head, rows)
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        before, optimizer = _status_bytes("VmRSS"), gt.RowOptimizer(head)
        Path("/proc/self/clear_refs").write_text("5")
        for step in range(2):
            _step(head, optimizer, case["batch_size"], step)
        added = _status_bytes("VmHWM") - before
        print(json.dumps({"table_bytes": _table_bytes(head, cluster), "step_bytes": added}))


def _head(cluster: Any, name: str, case: dict[str, Any]) -> gt.ClassHead:
    rows = case.get("rows", "pull")
    return gt.ClassHead(
        None if rows == "ranks" else cluster,
        name,
        num_classes=case["num_classes"],
        dim=case["dim"],
        select=gt.PartialFC(case["sample_rate"]) if case["sample_rate"] < 1 else gt.FullSoftmax(),
        margin=gt.ArcFace(scale=64),
        optimizer=gt.SparseMomentum(lr=0.1),
        rows=rows,
        config=gt.HeadConfig(dtype=case["dtype"], slot_dtype=case.get("slot_dtype", "float32")),
    )


def _touch_every_row(head: gt.ClassHead, rows: str) -> None:
    """Every row exists, and its momentum was touched."""
    if rows == "ranks":
        assert isinstance(head.table, DeviceRows)
        assert head.table.slots_LS is not None
        head.table.slots_LS.fill_(1e-3)
        return
    for start in range(0, head.num_classes, 8192):
        ids = np.arange(start, min(head.num_classes, start + 8192))
        head.table.push(ids, np.ones((len(ids), head.dim), np.float32))  # type: ignore[attr-defined]


def _table_bytes(head: gt.ClassHead, cluster: Any) -> int:
    if isinstance(head.table, DeviceRows):
        assert head.table.slots_LS is not None
        steps_L = head.table.steps_L
        return head.table.rows_LD.nbytes + head.table.slots_LS.nbytes + (0 if steps_L is None else steps_L.nbytes)
    return int(next(table for table in cluster.status().tables if table.name == "head").memory_bytes)


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
