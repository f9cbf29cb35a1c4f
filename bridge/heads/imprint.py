"""Imprinting: class centers from the mean features of their images (Qi, Brown and Lowe 2018), a strong start.

Legend: N images of a batch, D width, P classes of a part.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from rich.progress import Progress, SpinnerColumn, TextColumn
from torch import Tensor, nn

from geartrain.ams.errors import InvalidArgument, NonFinite
from geartrain.bridge.heads.batch import NORM_FLOOR, normalise_
from geartrain.bridge.heads.checks import check_features, check_labels
from geartrain.bridge.heads.living import LivingClasses
from geartrain.bridge.heads.rank_link import RankLink
from geartrain.bridge.heads.ranks import Ranks
from geartrain.bridge.heads.tables import TORCH_DTYPES, ReadableTable, as_numpy

_BAR_AFTER_SECONDS = 2.0
_ROWS_PER_ASSIGN = 65_536

Loader = Iterable[tuple[Tensor, Tensor]]


@torch.no_grad()
def imprint_rows(
    table: ReadableTable,
    ranks: Ranks | RankLink | None,
    loader: Loader,
    backbone: nn.Module,
    memory_bytes: int,
    progress: Callable[[int], None] | None,
    living: LivingClasses,
) -> int:
    """See ``ClassHead.imprint``."""
    num_classes, dim = living.num_classes, table.spec.dim
    part_classes = max(1, min(num_classes, memory_bytes // (4 * dim)))
    imprinted = 0
    with _in_eval_mode(backbone), _reporting(progress) as report:
        images_read = 0
        for first in range(0, num_classes, part_classes):
            sums_PD = torch.zeros(min(part_classes, num_classes - first), dim)
            failure: Exception | None = None  # of any kind: the other ranks wait for this one
            try:
                if part_classes < num_classes and isinstance(loader, Iterator):
                    raise InvalidArgument(
                        f"loader can be read only once, and the sums of {num_classes:,} classes of dim {dim} take "
                        f"{4 * dim * num_classes:,} bytes; pass a DataLoader or a list, or memory_bytes of as much "
                        f"(it is {memory_bytes:,})"
                    )
                for features_ND, labels_N in _features(loader, backbone, dim, living):
                    inside = (labels_N >= first) & (labels_N < first + len(sums_PD))
                    sums_PD.index_add_(0, labels_N[inside] - first, features_ND[inside])
                    images_read += len(labels_N)
                    report(images_read)
            except Exception as exc:
                if ranks is None:
                    raise
                failure = exc
            if ranks is not None:
                ranks.fail_together(failure, f"the classes of table {table.spec.name!r} were not imprinted")
                sums_PD = ranks.sum(sums_PD)
            write = functools.partial(_assign, table, sums_PD, first)
            if ranks is None:
                imprinted += write(writes=True)
            else:
                imprinted += ranks.first_then_others(
                    functools.partial(write, writes=True), functools.partial(write, writes=False)
                )
    return imprinted


@torch.no_grad()
def feature_sums(loader: Loader, backbone: nn.Module, num_classes: int, dim: int) -> Tensor:
    """Sum [C, D] of the features of each of ``num_classes`` classes; ``backbone`` runs as in :func:`imprint_rows`."""
    sums_CD = torch.zeros(num_classes, dim)
    with _in_eval_mode(backbone):
        for features_ND, labels_N in _features(loader, backbone, dim, LivingClasses(num_classes)):
            sums_CD.index_add_(0, labels_N, features_ND)
    return sums_CD


def _features(loader: Loader, backbone: nn.Module, dim: int, living: LivingClasses) -> Iterator[tuple[Tensor, Tensor]]:
    """Features [N, D] float32 and labels [N], on the host, batch after batch."""
    parameter = next(backbone.parameters(), None)
    for images, labels in loader:
        features = backbone(images if parameter is None else images.to(parameter.device))
        check_features(features, dim)
        checked = living.require(check_labels(labels, len(features), living.num_classes), "label")
        yield features.to("cpu", torch.float32), torch.from_numpy(checked)


def _assign(table: ReadableTable, sums_PD: Tensor, first: int, *, writes: bool) -> int:
    """Assign the classes that have a direction, part by part; return how many they are."""
    lengths_P = torch.linalg.vector_norm(sums_PD, dim=1)
    if not bool(torch.isfinite(lengths_P).all()):
        bad = first + int((~torch.isfinite(lengths_P)).nonzero()[0])
        raise NonFinite(f"the mean feature of class {bad} holds NaN or infinity; check the backbone and its input")
    seen_S = (lengths_P > NORM_FLOOR).nonzero().squeeze(1)
    for part in seen_S.split(_ROWS_PER_ASSIGN) if writes and len(seen_S) else ():
        rows_SD = sums_PD[part]
        normalise_(rows_SD)
        ids = (part + first).numpy().astype(np.int64, copy=False)
        table.assign(ids, as_numpy(rows_SD.to(TORCH_DTYPES[table.spec.dtype])))
    return len(seen_S)


@contextmanager
def _in_eval_mode(backbone: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in backbone.modules()]
    backbone.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def _reporting(progress: Callable[[int], None] | None) -> Iterator[Callable[[int], None]]:
    """The caller's function, or a bar that appears once the work has taken two seconds."""
    if progress is not None:
        yield progress
        return
    started = time.monotonic()
    bar = Progress(SpinnerColumn(), TextColumn("imprinting: {task.completed} images"), transient=True)
    task = bar.add_task("imprint", total=None)
    shown = False

    def report(images: int) -> None:
        nonlocal shown
        if not shown and time.monotonic() - started > _BAR_AFTER_SECONDS:
            bar.start()
            shown = True
        bar.update(task, completed=images)

    try:
        yield report
    finally:
        if shown:
            bar.stop()
