"""The class head with KNN softmax 10 % against full softmax, D=128, batch 256, fp32, 2 threads, rows embedded.

A head step is: select and pull, loss, feature gradient, row gradients, update with momentum. A whole step adds the
glyph backbone, forward and backward, with its optimizer. Full softmax and KNN softmax alternate over the same rows and
figures are medians; the paper's ratios of whole steps at these sizes are 1.2, 1.5 and 3.5.

Rows lie in clusters (see ``_clustered.py``), and 32 neighbours of each class are looked for within its cluster: the
exact graph of a million rows would take longer than the bench (``geartrain bench graph``), and the time of a step does
not depend on which classes the graph names.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from _clustered import clustered_rows, clusters_of
from _common import result, threads

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.factory import local
from geartrain.ams.graph.building.neighbours import NeighbourTable
from geartrain.ams.programs.selection import FullSoftmax
from geartrain.ams.values.optimizers.registry import SparseMomentum
from geartrain.bridge.head.class_head import ClassHead
from geartrain.bridge.head.loss.margins.angular import ArcFace
from geartrain.bridge.head.selection.knn_selection import Graph, KNNSelection, KNNSoftmax
from geartrain.bridge.rows.optimizer import RowOptimizer
from geartrain.launch.bench import Result
from geartrain.workers.models.backbones import build_backbone
from geartrain.workers.recipes.recipe import Recipe

GLYPH_SIZE = Recipe().look.size
DIM = 128
BATCH = 256
THREADS = 2
SELECT = KNNSoftmax(active=0.1, k=32, rebuild="epoch", near=1.0)
SIZES: dict[int, float | None] = {100_000: None, 400_000: None, 1_000_000: 4.0}
"""Classes -> the ratio of head steps that we promise."""

Step = Callable[[int, torch.Tensor], None]
Rows = npt.NDArray[np.float32]


def results(full: bool = False) -> Iterator[Result]:
    """Yield the cases of ``geartrain bench head_selections``; ``full`` takes five times as many rounds."""
    with threads(THREADS):
        for num_classes, target in SIZES.items():
            yield from _of_size(num_classes, target, rounds=15 if full else 3)


def _of_size(num_classes: int, target: float | None, *, rounds: int) -> Iterator[Result]:
    rows = clustered_rows(num_classes, DIM)
    graph = graph_within_clusters(rows, SELECT.k)
    with local() as cluster:
        heads = _heads(cluster, rows, graph)
        del rows, graph
        knn, everything = _medians((_head_step(heads[0]), _head_step(heads[1])), num_classes, rounds)
        whole = _medians((_whole_step(heads[0]), _whole_step(heads[1])), num_classes, rounds)
    case = f"KNN 10 %, {num_classes:,} classes, D={DIM}, batch {BATCH}"
    yield result(f"head step of {case}", knn * 1e3, "full softmax", everything * 1e3, "ms", target=target)
    ours, theirs = (1e3 * seconds for seconds in whole)
    yield result(f"whole step of {case}, with the glyph backbone", ours, "full softmax", theirs, "ms")


def graph_within_clusters(rows: Rows, k: int) -> NeighbourTable:
    """The k nearest rows of each row within its cluster; a cluster of fewer rows is made up by others.

    O(C · 50 · D), so that a million rows take seconds; exact for clusters of more than k rows.
    """
    num_classes = len(rows)
    clusters = clusters_of(num_classes)
    order = np.argsort(clusters, kind="stable")
    ends = np.flatnonzero(np.diff(clusters[order], append=-1)) + 1
    neighbours = np.empty((num_classes, k), np.int32)
    start = 0
    for end in ends.tolist():
        low = max(0, min(start, end - k - 1))
        bucket = order[low : max(end, low + k + 1)]
        members = rows[order[start:end]]
        cosines = members @ rows[bucket].T
        cosines[np.arange(len(members)), np.arange(start, end) - low] = -2.0  # a class is not its own neighbour
        neighbours[order[start:end]] = bucket[np.argsort(-cosines, axis=1, kind="stable")[:, :k]]
        start = end
    return NeighbourTable(np.arange(num_classes + 1, dtype=np.int64) * k, neighbours.reshape(-1), k)


def _heads(cluster: Cluster, rows: Rows, graph: NeighbourTable) -> tuple[ClassHead, ClassHead]:
    """(KNN softmax, full softmax) over one table with all rows written."""
    optimizer = SparseMomentum(lr=0.1, momentum=0.9)
    settings: dict[str, Any] = {
        "num_classes": len(rows),
        "dim": DIM,
        "optimizer": optimizer,
        "margin": ArcFace(scale=64),
    }
    knn = ClassHead(cluster, "bench", select=SELECT, **settings)
    for start in range(0, len(rows), 50_000):
        knn.table.assign(np.arange(start, min(start + 50_000, len(rows))), rows[start : start + 50_000])
    assert isinstance(knn.select, KNNSelection)
    knn.select.graph = Graph(graph, version=1, step=0)
    return knn, ClassHead(cluster, "bench", select=FullSoftmax(), reuse=True, **settings)


def _head_step(head: ClassHead) -> Step:
    rows = RowOptimizer(head)

    def step(number: int, labels: torch.Tensor) -> None:
        features = torch.randn(BATCH, DIM, generator=torch.Generator().manual_seed(number), requires_grad=True)
        head(features, labels).backward()
        rows.step()
        rows.zero_grad()

    return step


def _whole_step(head: ClassHead) -> Step:
    """With the quickstart's network in front, on images of noise."""
    settings = {"channels": 1, "image_size": GLYPH_SIZE, "dim": DIM, "width": Recipe().width}
    network = build_backbone("stroke_net", settings)
    network.train()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9, nesterov=True)
    rows = RowOptimizer(head)

    def step(number: int, labels: torch.Tensor) -> None:
        images = torch.rand(BATCH, 1, GLYPH_SIZE, GLYPH_SIZE, generator=torch.Generator().manual_seed(number))
        loss = head(network(images), labels)
        optimizer.zero_grad()
        rows.zero_grad()
        loss.backward()
        optimizer.step()
        rows.step()

    return step


def _medians(steps: tuple[Step, Step], num_classes: int, rounds: int) -> tuple[float, float]:
    """Seconds of each, in turn."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):
        labels = torch.randint(num_classes, (BATCH,), generator=torch.Generator().manual_seed(number))
        for step, taken in zip(steps, seconds, strict=True):
            started = time.perf_counter()
            step(number, labels)
            if number:  # the first warms up
                taken.append(time.perf_counter() - started)
    return statistics.median(seconds[0]), statistics.median(seconds[1])
