"""Imprinting: class centers from the mean features of their images (Qi, Brown and Lowe 2018), a strong start.

What all means share tells no class from another, and centers that have it lie on each other: of an untrained backbone
at cosines of 0.97, which training has to part first. Where it is most of them, it is taken off.

Legend: N images of a batch, D width, S classes.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch
from rich.progress import Progress, SpinnerColumn, TextColumn
from torch import Tensor, nn

from geartrain.ams.programs.class_lifecycle import LiveClasses
from geartrain.ams.values.errors import NonFinite
from geartrain.ams.values.specs import Ids
from geartrain.bridge.collectives.communicator import Communicator
from geartrain.bridge.head.batch import NORM_FLOOR, normalise_
from geartrain.bridge.head.checks import check_features, check_labels
from geartrain.bridge.head.class_sums import ClassSums
from geartrain.bridge.head.sub_centers import whole_rows
from geartrain.bridge.rows.tables import TORCH_DTYPES, ReadableTable

_BAR_AFTER_SECONDS = 2.0
_SHARED_COSINE = 0.5
"""Means that have a larger one to each other, on average, share a direction."""
_LEAST_OWN = 1e-4
"""Part of a mean's length: what is its own is no more than rounding below it."""
_BYTES_AT_ONCE = 32 << 20
"""Of sums that are made into rows and assigned; not from ``memory_bytes``, in which ranks may differ."""

T = TypeVar("T")
Loader = Iterable[tuple[Tensor, Tensor]]


@torch.no_grad()
def imprint_rows(
    table: ReadableTable,
    ranks: Communicator | None,
    loader: Loader,
    backbone: nn.Module,
    memory_bytes: int,
    progress: Callable[[int], None] | None,
    live_classes: LiveClasses,
    dim: int,
) -> int:
    """See ``ClassHead.imprint``; features have width ``dim``."""
    num_classes = live_classes.num_classes
    imprinted = 0
    with (
        in_eval_mode(backbone),
        _reporting(progress) as report,
        ClassSums(num_classes, dim, memory_bytes) as sums,
    ):
        what = f"the classes of table {table.spec.name!r} were not imprinted"
        _together(ranks, lambda: _read_all(sums, loader, backbone, dim, live_classes, report), what)
        shared_D = _shared_direction(_sums_by_ids(sums, ranks, num_classes, dim, what), live_classes)
        for ids, sums_SD in _sums_by_ids(sums, ranks, num_classes, dim, what):
            write = functools.partial(_assign, table, ids, sums_SD, shared_D)
            if ranks is None:
                imprinted += write(writes=True)
            else:
                imprinted += ranks.first_then_others(
                    functools.partial(write, writes=True), functools.partial(write, writes=False)
                )
    return imprinted


def _sums_by_ids(
    sums: ClassSums, ranks: Communicator | None, num_classes: int, dim: int, what: str
) -> Iterator[tuple[Ids, Tensor]]:
    """Ids [S] of classes with images, rising, and their sums [S, D] over all ranks, part by part."""
    classes_at_once = max(1, _BYTES_AT_ONCE // (4 * dim))
    for first in range(0, num_classes, classes_at_once):
        met = sums.met(first, first + classes_at_once)
        if ranks is not None:
            met = ranks.sum(torch.from_numpy(met.astype(np.int32))).numpy() > 0
        ids = np.flatnonzero(met).astype(np.int64, copy=False) + first
        if not len(ids):
            continue
        sums_SD = _together(ranks, functools.partial(sums.of, ids), f"from class {first} on {what}")
        yield ids, sums_SD if ranks is None else ranks.sum(sums_SD)


def _shared_direction(parts: Iterable[tuple[Ids, Tensor]], live_classes: LiveClasses) -> Tensor | None:
    """The direction [D] of the mean of unit means, if those of most living classes lie along it; None: they do not.

    Of a few classes among others it is theirs rather than everybody's.
    """
    num, total_D = 0, torch.zeros(())
    for _, sums_SD in parts:
        units_SD = nn.functional.normalize(sums_SD.double(), eps=NORM_FLOOR)
        num, total_D = num + len(units_SD), total_D + units_SD.sum(0)
    if num < 2 or 2 * num < live_classes.num_living:
        return None
    cosine = (float(total_D @ total_D) - num) / (num * (num - 1))
    return nn.functional.normalize(total_D, dim=0) if cosine > _SHARED_COSINE else None


def _together(ranks: Communicator | None, action: Callable[[], T], what: str) -> T:
    return action() if ranks is None else ranks.run_together(action, what)


def _read_all(
    sums: ClassSums,
    loader: Loader,
    backbone: nn.Module,
    dim: int,
    live_classes: LiveClasses,
    report: Callable[[int], None],
) -> None:
    images_read = 0
    for features_ND, labels_N in features_of(loader, backbone, dim, live_classes):
        bad_N = ~torch.isfinite(features_ND).all(1)
        if bool(bad_N.any()):
            raise NonFinite(
                f"a feature of class {int(labels_N[bad_N][0])} holds NaN or infinity; check the backbone and its "
                "input. No class was changed"
            )
        sums.add(features_ND, labels_N.numpy())
        images_read += len(labels_N)
        report(images_read)


@torch.no_grad()
def feature_sums(loader: Loader, backbone: nn.Module, num_classes: int, dim: int) -> Tensor:
    """Sum [C, D] of the features of each of ``num_classes`` classes; ``backbone`` runs as in :func:`imprint_rows`."""
    sums_CD = torch.zeros(num_classes, dim)
    with in_eval_mode(backbone):
        for features_ND, labels_N in features_of(loader, backbone, dim, LiveClasses(num_classes)):
            sums_CD.index_add_(0, labels_N, features_ND)
    return sums_CD


def features_of(
    loader: Loader, backbone: nn.Module, dim: int, live_classes: LiveClasses
) -> Iterator[tuple[Tensor, Tensor]]:
    """Features [N, D] float32 and labels [N], on the host, batch after batch."""
    parameter = next(backbone.parameters(), None)
    for images, labels in loader:
        features = backbone(images if parameter is None else images.to(parameter.device))
        check_features(features, dim)
        checked = live_classes.require(check_labels(labels, len(features), live_classes.num_classes), "label")
        yield features.to("cpu", torch.float32), torch.from_numpy(checked)


def _assign(table: ReadableTable, ids: Ids, sums_SD: Tensor, shared_D: Tensor | None, *, writes: bool) -> int:
    """Assign those of the classes that have a direction; return how many they are."""
    lengths_S = torch.linalg.vector_norm(sums_SD, dim=1)
    if not bool(torch.isfinite(lengths_S).all()):
        bad = int(ids[int((~torch.isfinite(lengths_S)).nonzero()[0])])
        raise NonFinite(f"the sum of the features of class {bad} is beyond float32; check the backbone and its input")
    seen_S = lengths_S > NORM_FLOOR
    if shared_D is not None:
        wide_SD = sums_SD.double()
        sums_SD = (wide_SD - torch.outer(wide_SD @ shared_D, shared_D)).float()
        seen_S &= torch.linalg.vector_norm(sums_SD, dim=1) > _LEAST_OWN * lengths_S
    if writes and bool(seen_S.any()):
        rows_SD = sums_SD[seen_S]
        normalise_(rows_SD)
        seen_ids = ids[seen_S.numpy()]
        table.assign(seen_ids, whole_rows(table.spec, seen_ids, rows_SD.to(TORCH_DTYPES[table.spec.dtype])))
    return int(seen_S.sum())


@contextmanager
def in_eval_mode(backbone: nn.Module) -> Iterator[None]:
    """Its modules are put back in their modes afterwards."""
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
