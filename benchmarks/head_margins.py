"""What margins that see more than the angle cost: a step of the class head against that with ArcFace, D=128, batch 256,
full softmax, fp32, 2 threads, rows embedded and pulled.

A step is: pull, loss, feature gradient, row gradients, update with momentum. All heads share one table and take turns;
figures are medians. Those that change other logits than the target's (CurricularFace, FilteredMargin) leave the
compiled pass.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

import geartrain as gt

DIM, BATCH, THREADS, CLASSES = 128, 256, 2, 50_000
MARGINS: list[Any] = [
    gt.AdaFace(scale=64),
    gt.MagFace(scale=64),
    gt.ElasticArcFace(scale=64),
    gt.ScheduledMargin((0, gt.ArcFace(scale=16, margin=0.0)), (1000, gt.ArcFace(scale=64, margin=0.5))),
    gt.CurricularFace(scale=64),
    gt.FilteredMargin(gt.ArcFace(scale=64), above=0.4),
]


def results(full: bool = False) -> Iterator[dict[str, Any]]:
    """The cases of ``geartrain bench head_margins``; ``full`` takes five times as many rounds."""
    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        with gt.local() as cluster:
            yield from _cases(cluster, rounds=35 if full else 7)
    finally:
        torch.set_num_threads(threads)


def _cases(cluster: gt.Cluster, rounds: int) -> Iterator[dict[str, Any]]:
    margins = [gt.ArcFace(scale=64), *MARGINS]
    heads = [
        gt.ClassHead(
            cluster,
            "classes",
            num_classes=CLASSES,
            dim=DIM,
            select=gt.FullSoftmax(),
            margin=margin,
            optimizer=gt.SparseMomentum(lr=0.1),
            reuse=bool(number),
            rows_cache_bytes=1 << 30,
        )
        for number, margin in enumerate(margins)
    ]
    optimizers = [gt.RowOptimizer(head) for head in heads]
    seconds: list[list[float]] = [[] for _ in heads]
    for step in range(-1, rounds):
        generator = torch.Generator().manual_seed(step + 1)
        features = torch.randn(BATCH, DIM, generator=generator)
        labels = torch.randint(CLASSES, (BATCH,), generator=generator)
        for turn in range(len(heads)):
            number = (step + turn) % len(heads)
            head, optimizer, taken = heads[number], optimizers[number], seconds[number]
            inputs = features.clone().requires_grad_()
            started = time.perf_counter()
            head(inputs, labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step >= 0:
                taken.append(time.perf_counter() - started)
    arcface, *others = (statistics.median(taken) for taken in seconds)
    for margin, ours in zip(MARGINS, others, strict=True):
        yield {
            "case": f"step with {type(margin).__name__}, {CLASSES:,} classes, D={DIM}, batch {BATCH}",
            "ours": round(ours * 1000, 1),
            "rival": "ArcFace",
            "theirs": round(arcface * 1000, 1),
            "unit": "ms",
            "ratio": round(arcface / ours, 2),
            "target": None,
        }
