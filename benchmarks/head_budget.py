"""Most classes whose training step fits 4 GiB: D=512, batch 128, rows and momentum in fp16, rows embedded.

Every attempt is a process of its own under ``RLIMIT_DATA``: all its writable memory, interpreter and libraries
included. It fills every row, takes two steps and ends; the number of classes is bisected until it is known to 5 %. The
rival is partial FC as published: weights and momentum in fp32, as under automatic mixed precision. With all of it in
fp16 it is shown besides where 10 % of the classes are active; over all classes a CPU without fp16 products would take
minutes a step. Takes many minutes: only with ``--full``.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import torch
from _common import result
from _published_partial_fc import PublishedPartialFC

from geartrain.ams.client.factory import local
from geartrain.ams.programs.selection import FullSoftmax, PartialFC
from geartrain.ams.values.optimizers.registry import SparseMomentum
from geartrain.bridge.head.class_head import ClassHead
from geartrain.bridge.head.loss.config import HeadConfig
from geartrain.bridge.head.loss.margins.angular import ArcFace
from geartrain.bridge.rows.optimizer import RowOptimizer
from geartrain.launch.bench import Result

BUDGET_BYTES = 4 << 30
DIM = 512
BATCH = 128
THREADS = 2
MOST = 2_200_000
"""Rows and momentum of more classes exceed the budget by themselves."""
RESOLUTION = 0.05
ATTEMPT_SECONDS = 600
_FILL_ROWS = 50_000


def results(full: bool = False) -> Iterator[Result]:
    """Yield the cases of ``geartrain bench head_budget``; none without ``full``."""
    for rate in (0.1, 1.0) if full else ():
        ours = max_classes("ours", rate)
        name = "full softmax" if rate == 1 else f"partial FC {rate}"
        case = f"most classes in {BUDGET_BYTES >> 30} GiB, {name}, D={DIM}, fp16 with momentum"
        theirs = max_classes("float32", rate)
        yield result(case, ours, "partial FC as published, fp32", theirs, "classes", target=2.0, more_is_better=True)
        if rate < 1:
            theirs = max_classes("float16", rate)
            yield result(case, ours, "partial FC, all in fp16", theirs, "classes", more_is_better=True)


def max_classes(who: str, rate: float) -> int:
    """Bisect: the largest number of classes that was seen to train."""
    low, high = 0, MOST
    while high - low > RESOLUTION * high:
        middle = (low + high) // 2
        if _fits(who, rate, middle):
            low = middle
        else:
            high = middle
    return low


def _fits(who: str, rate: float, num_classes: int) -> bool:
    command = [sys.executable, __file__, who, str(rate), str(num_classes)]
    done = subprocess.run(command, capture_output=True, timeout=ATTEMPT_SECONDS, check=False)
    print(f"{who}, rate {rate}, {num_classes:,} classes: exit {done.returncode}", flush=True)
    return done.returncode == 0


def _batches(num_classes: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        features = torch.randn(BATCH, DIM, generator=generator)
        yield features, torch.randint(num_classes, (BATCH,), generator=generator)


def _train_ours(rate: float, num_classes: int) -> None:
    with local() as cluster:
        head = ClassHead(
            cluster,
            "bench",
            num_classes=num_classes,
            dim=DIM,
            select=FullSoftmax() if rate == 1 else PartialFC(rate),
            margin=ArcFace(scale=64),
            optimizer=SparseMomentum(lr=0.1, momentum=0.9),
            config=HeadConfig(dtype="float16", slot_dtype="float16"),
        )
        block = _block().numpy()
        for start in range(0, num_classes, _FILL_ROWS):
            stop = min(start + _FILL_ROWS, num_classes)
            head.table.assign(np.arange(start, stop), block[: stop - start])
        rows = RowOptimizer(head)
        for features, labels in _batches(num_classes):
            head(features.requires_grad_(), labels).backward()
            rows.step()
            rows.zero_grad()


def _train_rival(rate: float, num_classes: int, dtype: torch.dtype) -> None:
    rival = PublishedPartialFC(1, DIM, 1.0)
    rival.weight = torch.empty(num_classes, DIM, dtype=dtype)
    for start in range(0, num_classes, _FILL_ROWS):
        part = rival.weight[start : start + _FILL_ROWS]
        part.copy_(_block()[: len(part)])
    rival.velocity = torch.zeros(num_classes, DIM, dtype=dtype)
    rival.velocity.fill_(0.0)  # pages that were never written are no memory yet
    rival.num_sampled = int(num_classes * rate)
    for features, labels in _batches(num_classes):
        rival.step(features.to(dtype).requires_grad_(), labels)


def _block() -> torch.Tensor:
    return (torch.randn(_FILL_ROWS, DIM, generator=torch.Generator().manual_seed(0)) * 0.01).half()


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_DATA, (BUDGET_BYTES, BUDGET_BYTES))
    torch.set_num_threads(THREADS)
    who, rate, num_classes = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    if who == "ours":
        _train_ours(rate, num_classes)
    else:
        _train_rival(rate, num_classes, getattr(torch, who))
