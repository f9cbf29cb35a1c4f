"""Imprinting: class centers from the mean features of their images (Qi, Brown and Lowe 2018), a strong start.

Legend: N images of a batch, D width, S classes.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn
from torch import Tensor, nn

from geartrain.ams.programs.class_lifecycle import LiveClasses
from geartrain.ams.values.errors import InvalidArgument, NonFinite
from geartrain.ams.values.specs import Ids
from geartrain.ams.values.text import quoted
from geartrain.bridge.collectives.communicator import Communicator
from geartrain.bridge.head.backends.backend import RowBackend
from geartrain.bridge.head.imprinting.backbone import moved, run
from geartrain.bridge.head.imprinting.class_sums import ClassSums
from geartrain.bridge.head.imprinting.mean_centers import CenterMaker
from geartrain.bridge.head.loss.checks import check_features, checked_labels
from geartrain.bridge.head.loss.sample_weights import checked_weight
from geartrain.bridge.head.loss.sub_centers import whole_rows
from geartrain.bridge.rows.tables import TORCH_DTYPES, ReadableTable

_BAR_AFTER_SECONDS = 2.0
_BYTES_AT_ONCE = 32 << 20
"""Bytes of sums made into rows and assigned at once; fixed, since ranks may differ in ``memory_bytes``."""

T = TypeVar("T")
Loader = Iterable[Sequence[Any]]
"""Batches (images, labels) or (images, labels, weights); for a backbone with several inputs, images are a tuple of
tensors, or a dict by argument name."""


@torch.no_grad()
def imprint_rows(
    backend: RowBackend,
    loader: Loader,
    backbone: nn.Module,
    memory_bytes: int,
    progress: Callable[[int], None] | None,
) -> int:
    """Imprint as ``ClassHead.imprint``."""
    table, ranks, live_classes, dim = backend.table, backend.peers, backend.live_classes, backend.settings.dim
    num_classes = live_classes.num_classes
    imprinted = 0
    with (
        in_eval_mode(backbone),
        _reporting(progress) as report,
        ClassSums(num_classes, dim, memory_bytes) as sums,
    ):
        what = f"the classes of table {table.spec.name!r} were not imprinted"
        lengths = _together(ranks, lambda: _read_all(sums, loader, backbone, backend, report), what)
        lengths = lengths if ranks is None else ranks.sum(lengths)
        all_sums = (sums_SD for _, sums_SD in _sums_by_ids(sums, ranks, num_classes, dim, what))
        maker = CenterMaker.of(
            backend, all_sums, float(lengths), live_classes.num_live_classes, lambda ids: _are_met(sums, ids, ranks)
        )
        for ids, sums_SD in _sums_by_ids(sums, ranks, num_classes, dim, what):
            write = functools.partial(_assign, table, ids, sums_SD, maker)
            if ranks is None:
                imprinted += write(writes=True)
            else:
                imprinted += ranks.first_then_others(
                    functools.partial(write, writes=True), functools.partial(write, writes=False)
                )
    backend.imprinted = maker.imprinted
    return imprinted


def _sums_by_ids(
    sums: ClassSums, ranks: Communicator | None, num_classes: int, dim: int, what: str
) -> Iterator[tuple[Ids, Tensor]]:
    """Yield ids [S] of classes with images, ascending, and their sums [S, D] over all ranks, part by part."""
    classes_at_once = max(1, _BYTES_AT_ONCE // (4 * dim))
    for first in range(0, num_classes, classes_at_once):
        some = np.arange(first, min(num_classes, first + classes_at_once), dtype=np.int64)
        ids = some[_are_met(sums, some, ranks)]
        if not len(ids):
            continue
        sums_SD = _together(ranks, functools.partial(sums.of, ids), f"from class {first} on {what}")
        yield ids, sums_SD if ranks is None else ranks.sum(sums_SD)


def _are_met(sums: ClassSums, ids: Ids, ranks: Communicator | None) -> npt.NDArray[np.bool_]:
    """Return which of the classes have images on any rank, as a mask."""
    met = sums.met(ids)
    return met if ranks is None else ranks.sum(torch.from_numpy(met.astype(np.int32))).numpy() > 0


def _together(ranks: Communicator | None, action: Callable[[], T], what: str) -> T:
    return action() if ranks is None else ranks.run_together(action, what)


def _read_all(
    sums: ClassSums, loader: Loader, backbone: nn.Module, backend: RowBackend, report: Callable[[int], None]
) -> Tensor:
    """Add all features to the sums; return the sum of their lengths (0-dim, float64)."""
    images_read, lengths = 0, torch.zeros((), dtype=torch.float64, device="cpu")
    ignored = backend.settings.config.ignore_index
    for features_ND, labels_N, weight_N in features_of(
        loader, backbone, backend.settings.dim, backend.live_classes, ignored
    ):
        bad_N = ~torch.isfinite(features_ND).all(1)
        if bool(bad_N.any()):
            raise NonFinite(
                f"a feature of class {int(labels_N[bad_N][0])} holds NaN or infinity; check the backbone and its "
                "input. No class was changed"
            )
        weighted_ND = features_ND * weight_N.unsqueeze(1)
        sums.add(weighted_ND, labels_N.numpy())
        lengths += torch.linalg.vector_norm(weighted_ND, dim=1).double().sum()
        images_read += len(labels_N)
        report(images_read)
    return lengths


@torch.no_grad()
def feature_sums(loader: Loader, backbone: nn.Module, num_classes: int, dim: int, ignore_index: int | None) -> Tensor:
    """Return sums [C, D + 1] of the features of each of ``num_classes`` classes, and of their lengths.

    ``backbone`` runs as in :func:`imprint_rows`.
    """
    sums = torch.zeros(num_classes, dim + 1, dtype=torch.float32, device="cpu")
    with in_eval_mode(backbone):
        batches = features_of(loader, backbone, dim, LiveClasses(num_classes), ignore_index)
        for features_ND, labels_N, weight_N in batches:
            with_lengths = torch.cat([features_ND, torch.linalg.vector_norm(features_ND, dim=1, keepdim=True)], 1)
            sums.index_add_(0, labels_N, with_lengths * weight_N.unsqueeze(1))
    return sums


def features_of(
    loader: Loader, backbone: nn.Module, dim: int, live_classes: LiveClasses, ignore_index: int | None
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield features [N, D] float32, labels [N] and weights [N] float32 of the samples that count, on the host, batch
    by batch: as in a step, samples whose label is ``ignore_index`` or whose weight is 0 are left out.

    Raises InvalidRows, InvalidIds, and InvalidArgument for weights and for a batch of another form.
    """
    parameter = next(backbone.parameters(), None)
    for batch in loader:
        images, labels, weight = _parts_of(batch)
        inputs = tuple(images) if isinstance(images, list) else images
        features = run(backbone, inputs if parameter is None else moved(inputs, parameter.device))
        check_features(features, dim)
        ids = checked_labels(labels, len(features), live_classes.num_classes, ignore_index)
        weight_N = (
            torch.ones(len(ids), dtype=torch.float32, device="cpu")
            if weight is None
            else checked_weight(weight, len(ids)).float()
        )
        counts_N = (
            torch.ones(len(ids), dtype=torch.bool, device="cpu")
            if ignore_index is None
            else labels.cpu() != ignore_index
        )
        live_classes.require(ids[counts_N.numpy()], "label")
        counts_N &= weight_N > 0
        yield (
            features.to("cpu", torch.float32)[counts_N],
            torch.from_numpy(ids)[counts_N],
            weight_N[counts_N],
        )


def _parts_of(batch: object) -> tuple[Any, Tensor, Tensor | None]:
    """Return images, labels and weights of a batch. Raises InvalidArgument."""
    if (
        isinstance(batch, tuple | list)
        and len(batch) in (2, 3)
        and (hasattr(batch[0], "to") or isinstance(batch[0], Mapping | tuple | list))
    ):
        return batch[0], batch[1], batch[2] if len(batch) == 3 else None
    if isinstance(batch, Mapping):
        found = f"a {type(batch).__name__} with keys {quoted(list(batch))}"
    elif isinstance(batch, tuple | list):
        found = f"a {type(batch).__name__} of {', '.join(type(part).__name__ for part in batch)}"
    else:
        found = f"a {type(batch).__name__}"
    raise InvalidArgument(
        f"a batch of the loader is {found}; it must be (images, labels) or (images, labels, weights), where images are "
        "what the backbone takes: a tensor, a tuple of tensors or a dict of them. Convert your batches, as in "
        "((batch['image'], batch['label']) for batch in loader)"
    )


def _assign(table: ReadableTable, ids: Ids, sums_SD: Tensor, maker: CenterMaker, *, writes: bool) -> int:
    """Assign the rows of classes that have a direction; return how many there are."""
    lengths_S = torch.linalg.vector_norm(sums_SD, dim=1)
    if not bool(torch.isfinite(lengths_S).all()):
        bad = int(ids[int((~torch.isfinite(lengths_S)).nonzero()[0])])
        raise NonFinite(f"the sum of the features of class {bad} is beyond float32; check the backbone and its input")
    rows_SD, seen_S = maker.rows(sums_SD)
    if writes and len(rows_SD):
        seen_ids = ids[seen_S.numpy()]
        table.assign(seen_ids, whole_rows(table.spec, seen_ids, rows_SD.to(TORCH_DTYPES[table.spec.dtype])))
    return len(rows_SD)


@contextmanager
def in_eval_mode(backbone: nn.Module) -> Iterator[None]:
    """Run the backbone in eval() and restore the modes of its modules afterwards."""
    modes = [(module, module.training) for module in backbone.modules()]
    backbone.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def _reporting(progress: Callable[[int], None] | None) -> Iterator[Callable[[int], None]]:
    """Yield the caller's function, or a bar on stderr that appears once the work has taken two seconds."""
    if progress is not None:
        yield progress
        return
    started = time.monotonic()
    columns = SpinnerColumn(), TextColumn("imprinting: {task.completed} images")
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
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
