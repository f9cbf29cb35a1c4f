"""The class head over 1M classes (D = 128, batch 128, fp32, 2 threads, embedded) against partial FC as published.

A step is: pull or sample, loss, feature gradient, row gradients, update with momentum. Ours and the rival take turns of
four steps, the last three of which count, and figures are medians. Memory is what one step adds to the peak resident
size of a fresh process, row copies included; its rival is the budget of 96 MiB.

The rival's rows are in its own process, as those of ``rows="ranks"`` are; pulled ones are in an embedded shard.

"bf16 compute" is our step under bfloat16 autocast against the same fp32 rival, on a CPU that has AMX: on others the
head computes in float32 all the same.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from _common import median_seconds, result, threads
from _published_partial_fc import PublishedPartialFC

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.factory import local
from geartrain.ams.kernels.ops import has_bfloat16_class_pass
from geartrain.ams.programs.selection import FullSoftmax, PartialFC
from geartrain.ams.values.optimizers.registry import SparseMomentum
from geartrain.bridge.head.class_head import ClassHead
from geartrain.bridge.head.loss.margins.angular import ArcFace
from geartrain.bridge.rows.optimizer import RowOptimizer
from geartrain.launch.bench import Result

NUM_CLASSES = 1_000_000
DIM = 128
BATCH = 128
THREADS = 2
MEMORY_BUDGET_MIB = 96.0
RIVAL = "partial FC as published"
_FILL_ROWS = 50_000

Select = FullSoftmax | PartialFC
Step = Callable[[torch.Tensor, torch.Tensor], object]


def results(full: bool = False) -> Iterator[Result]:
    """Yield the cases of ``geartrain bench head``; ``full`` takes five times as many rounds."""
    with threads(THREADS):
        for select, rate, rounds, target in ((PartialFC(0.1), 0.1, 4, 5.0), (FullSoftmax(), 1.0, 1, 4.0)):
            for place in ("pull", "ranks"):
                ours, theirs = _medians(select, rate, rounds * (5 if full else 1), place=place)
                yield result(f"{_case(select)}, rows={place!r}", ours * 1e3, RIVAL, theirs * 1e3, "ms", target=target)
        if has_bfloat16_class_pass():
            for select, rate, rounds in ((PartialFC(0.1), 0.1, 4), (FullSoftmax(), 1.0, 1)):
                ours, theirs = _medians(select, rate, rounds * (5 if full else 1), bfloat16=True)
                yield result(f"{_case(select)}, bf16 compute", ours * 1e3, RIVAL, theirs * 1e3, "ms", target=8.0)
        for select in (PartialFC(0.1), FullSoftmax()):
            command = [sys.executable, __file__, "full" if isinstance(select, FullSoftmax) else "partial"]
            mebibytes = float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
            case = f"extra resident memory of a {_case(select)}"
            yield result(case, mebibytes, "budget", MEMORY_BUDGET_MIB, "MiB", target=1.0)


def _case(select: Select) -> str:
    name = "full softmax" if isinstance(select, FullSoftmax) else f"partial FC {select.sample_rate}"
    return f"step of {name}, {NUM_CLASSES:,} classes, D={DIM}, batch {BATCH}"


def _medians(
    select: Select, rate: float, rounds: int, *, place: str = "pull", bfloat16: bool = False
) -> tuple[float, float]:
    rival = PublishedPartialFC(NUM_CLASSES, DIM, rate)
    with local() as cluster:
        ours = _our_step(None if place == "ranks" else cluster, select)
        numbers = itertools.count()

        def side(step: Step) -> Callable[[tuple[torch.Tensor, torch.Tensor]], object]:
            return lambda sample: step(*sample)

        mine, other = median_seconds(
            [side(_autocast(ours) if bfloat16 else ours), side(rival.step)],
            lambda: _batch(next(numbers)),
            rounds=rounds,
            calls=4,
            uncounted=1,
        )
    return mine, other


def _autocast(step: Step) -> Step:
    """The step with its large products in bfloat16."""

    def cast(features: torch.Tensor, labels: torch.Tensor) -> object:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return step(features, labels)

    return cast


def _batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    features = torch.randn(BATCH, DIM, generator=generator, requires_grad=True)
    return features, torch.randint(NUM_CLASSES, (BATCH,), generator=generator)


def _our_step(cluster: Cluster | None, select: Select) -> Step:
    """A head with every row written, as after some training, and its whole step; no cluster: the rows are here."""
    head = ClassHead(
        cluster,
        "bench",
        num_classes=NUM_CLASSES,
        dim=DIM,
        select=select,
        margin=ArcFace(scale=64),
        optimizer=SparseMomentum(lr=0.1, momentum=0.9),
        rows="ranks" if cluster is None else "pull",
    )
    rows = RowOptimizer(head)
    random = np.random.default_rng(0)
    for start in range(0, NUM_CLASSES, _FILL_ROWS):
        ids = np.arange(start, min(start + _FILL_ROWS, NUM_CLASSES))
        head.table.assign(ids, random.standard_normal((len(ids), DIM), np.float32) * np.float32(0.01))

    def step(features: torch.Tensor, labels: torch.Tensor) -> object:
        loss = head(features, labels)
        loss.backward()
        rows.step()
        rows.zero_grad()
        return loss

    return step


def _measure_memory(select: Select) -> float:
    """MiB that three steps add to the resident size of this process at its highest."""
    torch.set_num_threads(THREADS)
    with local() as cluster:
        step = _our_step(cluster, select)
        # Threads, their stacks and the BLAS library's own buffers belong to any program, not to a step.
        (torch.randn(512, 512) @ torch.randn(512, 512)).exp().sum()
        _return_freed_memory()
        before = _status_kib("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        for number in range(3):
            step(*_batch(number))
        return (_status_kib("VmHWM") - before) / 1024


def _return_freed_memory() -> None:
    """Give what filling the table left in the allocator back to the system, lest a step reuse it unseen."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _status_kib(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {key}")


if __name__ == "__main__":
    print(_measure_memory(FullSoftmax() if sys.argv[1] == "full" else PartialFC(0.1)))
