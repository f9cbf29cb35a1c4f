"""Memory of a class, and the peak of a training step: 1M classes of width 512 in float16 with float16 momentum.

The rival is what PLSC's formula (section 5) says of a card: 2,048 bytes a class, with 1 % for an index and 10 % for all
that a step needs. Measured in a process of its own, as resident memory beyond that of the libraries; ``--full`` takes
the full softmax and rows in a shard too.
"""

from __future__ import annotations

import ctypes
import gc
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

CLASSES, DIM, BATCH, STEPS = 1_000_000, 512, 128, 2
CLASS_BYTES = 2 * 2 * DIM


def results(full: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the cases of ``geartrain bench head`` about memory."""
    from _common import result  # not in the process that is measured

    unit = "bytes a class"
    for rows, rate in [("ranks", 0.1), *([("ranks", 1.0), ("pull", 0.1)] if full else [])]:
        done = subprocess.run(
            [sys.executable, __file__, rows, str(rate)], stdout=subprocess.PIPE, text=True, check=True
        )
        measured = json.loads(done.stdout)
        head = f"{CLASSES:,} x {DIM} float16 with momentum, rows={rows!r}"
        step = f"a step, batch {BATCH}, {rate:.0%} of the classes"
        yield result(f"{head}: kept", measured["kept"] / CLASSES, "2,048 + 1 %", 1.01 * CLASS_BYTES, unit, target=1.0)
        peak = measured["peak"] / CLASSES
        yield result(f"{head}: peak of {step}", peak, "1.1 x 2,048", 1.1 * CLASS_BYTES, unit, target=1.0)


def _measure(rows: str, rate: float) -> dict[str, int]:
    """Bytes resident with every row and slot written, and at most in two steps."""
    import numpy as np
    import torch

    import geartrain as gt

    with gt.local() if rows == "pull" else nullcontext() as cluster:

        def head_of(name: str, num_classes: int, dim: int) -> gt.ClassHead:
            return gt.ClassHead(
                cluster,
                name,
                num_classes=num_classes,
                dim=dim,
                select=gt.PartialFC(rate),
                margin=gt.ArcFace(scale=64),
                optimizer=gt.SparseMomentum(lr=0.1),
                rows=rows,
                config=gt.HeadConfig(dtype="float16", slot_dtype="float16"),
            )

        _train(head_of("small", 64, 8), 1)  # loads libraries and starts threads, which belong to no head
        before = _resident()
        head = head_of("head", CLASSES, DIM)
        if rows == "pull":
            for start in range(0, CLASSES, 8192):
                ids = np.arange(start, min(CLASSES, start + 8192))
                head.table.push(ids, np.ones((len(ids), DIM), np.float32))  # type: ignore[attr-defined]
        kept = _resident() - before
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        _train(head, STEPS)
        assert torch.isfinite(head.weights(torch.arange(5))).all()
        return {"kept": kept, "peak": _status_bytes("VmHWM") - before}


def _train(head: Any, steps: int) -> None:
    import torch

    import geartrain as gt

    optimizer = gt.RowOptimizer(head)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        features = torch.randn(BATCH, head.dim, generator=generator, requires_grad=True)
        head(features, torch.randint(head.num_classes, (BATCH,), generator=generator)).backward()
        optimizer.step()


def _resident() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return _status_bytes("VmRSS")


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


if __name__ == "__main__":
    print(json.dumps(_measure(sys.argv[1], float(sys.argv[2]))))
