"""Steps of class heads."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch

import geartrain as gt
from geartrain.ams.graph.building.neighbours import NeighbourTable
from geartrain.bridge.head.selection.knn_selection import Graph
from geartrain.bridge.kernels.launch import captured as capturing
from tests.recorder.dry_ranks import dry_ranks
from tests.recorder.report import Report

_CONFIG = {item.name for item in dataclasses.fields(gt.HeadConfig)}


def _step(
    head: Any,
    report: Report,
    classes: int,
    batch: int,
    labels: str,
    autocast: str,
    *,
    clip: bool,
    captured: bool,
    seed: Any,
) -> Callable[[], None]:
    """Features are on the device; labels where ``labels`` says ("cpu" or "cuda").

    ``captured``: from the second one on steps are such as a CUDA graph would hold, each with another learning rate.
    """
    rows = gt.RowOptimizer(head)
    traces: list[list[str]] = []
    made = 0

    def step() -> None:
        nonlocal made
        if captured and made > 1:
            traces.append(list(report.trace))
            rows.param_groups[0]["lr"] *= 0.5
            rows.replay(mock.Mock())
        made += 1
        features = torch.empty(batch, head.dim, device="cuda", requires_grad=True)
        numbers = torch.from_numpy(seed.integers(0, classes, batch))
        given = numbers if labels == "cpu" else torch.empty(batch, dtype=torch.int64, device="cuda")
        report.reset()
        cast = torch.autocast("cuda", getattr(torch, autocast)) if autocast else contextlib.nullcontext()
        with capturing() if captured and made > 1 else contextlib.nullcontext():
            with cast:
                loss = head(features, given)
            (loss if loss.ndim == 0 else loss.mean()).backward()
            if clip:
                gt.clip_grad_norm_([], rows, max_norm=1.0)
            rows.step()
            rows.zero_grad()
        if traces:
            pairs = itertools.zip_longest(traces[-1], report.trace)
            report.differences = [f"{before} | {after}" for before, after in pairs if before != after]

    return step


def _margin(name: str) -> Any:
    if not name:
        return None
    made = getattr(gt, name)
    try:
        return made()
    except TypeError:
        return made(64, 1.0, 0.3, 0.2) if name == "CombinedMargin" else made(scale=64)


def _selection(share: float, neighbours: int) -> Any:
    if neighbours:
        return gt.KNNSoftmax(share, k=neighbours, rebuild=10**9, near=1.0)
    return gt.FullSoftmax() if share == 1 else gt.PartialFC(share)


def _graph(classes: int, k: int, ranks: int) -> Graph:
    """The first rank's part of a graph of any lists."""
    lists = np.random.default_rng(0).integers(0, classes, classes * k, dtype=np.int32)
    table = NeighbourTable(np.arange(classes + 1, dtype=np.int64) * k, lists, k)
    return Graph(table if ranks == 1 else table.part(0, -(-classes // ranks)), version=1, step=0)


@contextlib.contextmanager
def head(
    report: Report,
    classes: int = 5000,
    dim: int = 64,
    batch: int = 32,
    select: float = 1.0,
    labels: str = "cpu",
    autocast: str = "",
    clip: bool = False,
    captured: bool = False,
    ranks: int = 1,
    margin: str = "ArcFace",
    cluster: Any = None,
    rows: str = "ranks",
    optimizer: str = "SparseMomentum",
    neighbours: int = 0,
    **options: Any,
) -> Iterator[Callable[[], None]]:
    """A class head. ``select`` is the part of the classes that is sampled, after so many ``neighbours`` of the labels
    by a graph; ``options`` are ClassHead's and its config's."""
    config = {key: options.pop(key) for key in list(options) if key in _CONFIG}
    made = {"SparseMomentum": {"lr": 0.1, "momentum": 0.9}}.get(optimizer, {"lr": 0.1})
    with dry_ranks(ranks, report):
        with torch.device("cuda") if cluster is None else contextlib.nullcontext():
            module = gt.ClassHead(
                cluster,
                "classes",
                num_classes=classes,
                dim=dim,
                select=_selection(select, neighbours),
                margin=_margin(margin),
                rows=rows,
                optimizer=getattr(gt, optimizer)(**made),
                config=gt.HeadConfig(**config),
                **options,
            )
        if neighbours:
            module.select.graph = _graph(classes, neighbours, ranks)
        random = np.random.default_rng(0)
        yield _step(module, report, classes, batch, labels, autocast, clip=clip, captured=captured, seed=random)


@contextlib.contextmanager
def head_in_cluster(report: Report, rows: str = "pull", **options: Any) -> Iterator[Callable[[], None]]:
    """A class head whose rows are in a cluster of this process with two shards."""
    with gt.local(num_shards=2) as cluster, head(report, cluster=cluster, rows=rows, **options) as step:
        yield step
