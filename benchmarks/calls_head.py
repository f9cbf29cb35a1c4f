"""A step of a class head over 1 M classes, partial FC 0.1: rows on two shards of other processes, against embedded.

The heads have the same batches, in turn. A target of 0.77 means "at most 1.3 times the embedded step".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import torch
from _calls import WAYS, fill, result
from _turns import median_seconds
from _up import running_cluster

import geartrain as gt
from geartrain.launch.bench import Result

NUM_CLASSES, DIM, BATCH, RATE, SHARDS = 1_000_000, 128, 128, 0.1, 2
ROUNDS, STEPS, UNCOUNTED = 3, 3, 1
TARGET = round(1 / 1.3, 2)
EMBEDDED = "embedded"


def results(full: bool = False) -> Iterator[Result]:
    """The head's cases of ``geartrain bench calls``; ``full`` takes five times as many turns."""
    with running_cluster(SHARDS) as up, ExitStack() as ends:
        clusters = {way: gt.connect(up["scheduler"], config=config) for way, config in WAYS.items()}
        clusters[EMBEDDED] = gt.local()
        heads = {side: _head(ends.enter_context(cluster)) for side, cluster in clusters.items()}
        for side in (EMBEDDED, next(iter(WAYS))):
            fill(clusters[side].table("bench"))
        steps = [_step_of(head) for head in heads.values()]
        seconds = median_seconds(steps, _batch, rounds=ROUNDS * (5 if full else 1), calls=STEPS, uncounted=UNCOUNTED)
    millis = {side: 1e3 * one for side, one in zip(heads, seconds, strict=True)}
    for way in WAYS:
        case = f"head step, {NUM_CLASSES:,} classes, D={DIM}, partial FC {RATE}, batch {BATCH}, {SHARDS} shards, {way}"
        target = TARGET if way == "same host" else None
        yield result(case, millis[way], EMBEDDED, millis[EMBEDDED], "ms", target=target)


def _head(cluster: gt.Cluster) -> gt.ClassHead:
    return gt.ClassHead(
        cluster,
        "bench",
        num_classes=NUM_CLASSES,
        dim=DIM,
        select=gt.PartialFC(RATE),
        margin=gt.ArcFace(scale=64),
        optimizer=gt.SGD(lr=0.1),
        initializer=gt.Normal(),
        rows="pull",
        reuse=True,
    )


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(BATCH, DIM, requires_grad=True), torch.randint(NUM_CLASSES, (BATCH,))


def _step_of(head: gt.ClassHead) -> Callable[[tuple[torch.Tensor, torch.Tensor]], None]:
    optimizer = gt.RowOptimizer(head)

    def step(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        head(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
