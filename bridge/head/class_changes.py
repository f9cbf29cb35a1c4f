"""Adding and retiring classes during training: write their rows, then switch all ranks to the same set.

Nothing changes before every rank has confirmed equal arguments and that it can proceed.
Legend: N classes of a call, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from geartrain.ams.programs.class_lifecycle import LiveClasses
from geartrain.ams.values.arguments import integer
from geartrain.ams.values.errors import InvalidArgument, InvalidIds, InvalidRows, NonFinite, SpecMismatch
from geartrain.ams.values.specs import Ids
from geartrain.bridge.collectives.communicator import Communicator
from geartrain.bridge.head.backends.backend import Imprinted, RowBackend
from geartrain.bridge.head.backends.row_stream import block_rows_for
from geartrain.bridge.head.imprinting.imprint import Loader, feature_sums
from geartrain.bridge.head.imprinting.mean_centers import CenterMaker
from geartrain.bridge.head.loss.checks import checked_class_ids, checked_labels
from geartrain.bridge.head.loss.margins.margin import NORM_FLOOR
from geartrain.bridge.head.loss.sub_centers import initial_rows, whole_rows
from geartrain.bridge.rows.tables import TORCH_DTYPES, as_numpy

T = TypeVar("T")


def add_classes(
    backend: RowBackend,
    dim: int,
    num: int,
    rows: Tensor | None,
    examples: Loader | None,
    backbone: nn.Module | None,
    sub_centers: int = 1,
) -> Ids:
    """Add classes as ``ClassHead.add_classes``, of features of width ``dim``; return the new ids."""
    table = backend.table

    def prepare() -> tuple[Ids, Tensor | None]:
        _require_ready(backend)
        ids = backend.live_classes.free_ids(integer("num", num, 1))
        if examples is not None:
            if backbone is None or rows is not None:
                raise InvalidArgument("examples need a backbone=, which makes features of them, and no rows=")
            return ids, feature_sums(examples, backbone, num, dim, backend.settings.config.ignore_index)
        shapes: list[tuple[int, ...]] = [(num, dim)] if sub_centers == 1 else [(num, dim), (num, sub_centers, dim)]
        return ids, None if rows is None else _checked_rows(rows, shapes, TORCH_DTYPES[table.spec.dtype])

    def summary(prepared: tuple[Ids, Tensor | None]) -> list[int]:
        values = prepared[1]
        kind = 0 if values is None else 2 if examples is not None else 1
        digest = 0 if kind != 1 or values is None else _digest(as_numpy(values).tobytes())
        return [num, kind, digest, backend.live_classes.fingerprint]

    ids, values = _agreed(backend.peers, prepare, summary, f"the classes to add to {table.spec.name!r}")
    imprinted = backend.imprinted
    if examples is not None and values is not None:
        values, imprinted = _centers(backend, values if backend.peers is None else backend.peers.sum(values))

    def write(part: slice) -> None:
        spec = table.spec
        rows = initial_rows(spec, ids[part]) if values is None else whole_rows(spec, ids[part], values[part])
        table.assign(ids[part], rows)

    _write(backend, len(ids), write)
    backend.imprinted = imprinted
    _follow(backend, backend.live_classes.with_added(ids), ids)
    return ids


def retire_classes(backend: RowBackend, ids: Tensor) -> None:
    """Retire classes as ``ClassHead.retire_classes``."""
    table = backend.table

    def prepare() -> tuple[Ids, LiveClasses]:
        _require_ready(backend)
        return wanted_and_rest(backend.live_classes, ids)

    def summary(prepared: tuple[Ids, LiveClasses]) -> list[int]:
        return [len(prepared[0]), _digest(prepared[0].tobytes()), backend.live_classes.fingerprint]

    wanted, live_classes = _agreed(backend.peers, prepare, summary, f"the classes to retire of {table.spec.name!r}")

    def write(part: slice) -> None:
        rows = np.empty((len(wanted[part]), table.spec.dim), table.spec.numpy_dtype)
        table.pull_into(wanted[part], rows)
        table.assign(wanted[part], rows)  # sets their momentum to zero

    _write(backend, len(wanted), write)
    _follow(backend, live_classes, np.empty(0, np.int64))


def _follow(backend: RowBackend, live_classes: LiveClasses, added: Ids) -> None:
    backend.live_classes = live_classes
    backend.update.generation += 1
    backend.select.follow(live_classes, added)


def wanted_and_rest(live_classes: LiveClasses, ids: Tensor) -> tuple[Ids, LiveClasses]:
    """Return checked ids [N], ascending, and the classes that remain. Raises InvalidIds, InvalidArgument."""
    if not isinstance(ids, Tensor) or ids.ndim != 1:
        raise InvalidIds(f"ids are {ids!r:.80}; they must be a torch.int64 tensor [N]")
    given = checked_labels(ids, len(ids), live_classes.num_classes)
    live_classes.require(checked_class_ids(given, live_classes.num_classes, "class id"), "class id")
    wanted, counts = np.unique(given, return_counts=True)
    if len(wanted) != len(given):
        raise InvalidIds(f"class {int(wanted[counts > 1][0])} is there {int(counts.max())} times; name each class once")
    return wanted, live_classes.without(wanted)


def _require_ready(backend: RowBackend) -> None:
    if backend.update.is_pending:
        raise InvalidArgument(
            "row gradients wait for RowOptimizer.step(); call it, or zero_grad(), before the classes change"
        )


def _checked_rows(rows: Tensor, shapes: list[tuple[int, ...]], dtype: torch.dtype) -> Tensor:
    if not isinstance(rows, Tensor) or tuple(rows.shape) not in shapes or not rows.is_floating_point():
        found = f"{rows.dtype} {list(rows.shape)}" if isinstance(rows, Tensor) else type(rows).__name__
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        raise InvalidRows(f"rows are {found}; they must be a floating-point tensor {wanted}, one row a class")
    stored = rows.detach().to("cpu", dtype).reshape(len(rows), -1).contiguous()
    if len(wrong := torch.nonzero(~torch.isfinite(stored).all(dim=1))):
        raise NonFinite(
            f"row {int(wrong[0])} of the new classes holds NaN, infinity or values beyond {dtype}; give finite rows"
        )
    return stored


def _centers(backend: RowBackend, sums: Tensor) -> tuple[Tensor, Imprinted | None]:
    """Return rows of new classes from the :func:`feature_sums` of all ranks, and the head's record of imprinting."""
    sums_ND, of_examples = sums[:, :-1], float(sums[:, -1].sum())
    lengths_N = torch.linalg.vector_norm(sums_ND, dim=1)
    if not bool(torch.isfinite(lengths_N).all()):
        raise NonFinite("the mean feature of a new class holds NaN or infinity; check the backbone and its input")
    if len(wrong := torch.nonzero(lengths_N <= NORM_FLOOR)):
        raise InvalidArgument(f"new class {int(wrong[0])} of {len(sums_ND)} has no example; give one at least of each")
    num_live_classes = backend.live_classes.num_live_classes + len(sums_ND)
    maker = CenterMaker.of(backend, [sums_ND], of_examples, num_live_classes, lambda ids: np.zeros(len(ids), np.bool_))
    rows, seen_N = maker.rows(sums_ND)
    if len(wrong := torch.nonzero(~seen_N)):
        raise InvalidArgument(
            f"the examples of new class {int(wrong[0])} of {len(sums_ND)} have nothing but what the features of all "
            "classes share; give others, or rows="
        )
    return rows.to(TORCH_DTYPES[backend.table.spec.dtype]), maker.imprinted


def _write(backend: RowBackend, num: int, write: Callable[[slice], None]) -> None:
    """Write rows block by block: rank 0 writes rows in a cluster, every rank the rows that it holds."""
    step = block_rows_for(backend.table.spec.row_bytes)

    def all_blocks() -> None:
        for start in range(0, num, step):
            write(slice(start, start + step))

    if backend.peers is None:
        all_blocks()
    else:
        backend.peers.write_together(all_blocks, f"rows of table {backend.table.spec.name!r} were not written")


def _agreed(peers: Communicator | None, prepare: Callable[[], T], summary: Callable[[T], list[int]], what: str) -> T:
    """Return the result of ``prepare`` once it succeeded on every rank with equal summaries. Costs two exchanges."""
    if peers is None:
        return prepare()
    prepared = peers.run_together(prepare, f"{what} could not go on")
    digests = [of_rank for (of_rank,) in peers.exchange([_digest(np.array(summary(prepared), np.int64).tobytes())])]
    if len(set(digests)) > 1:
        raise SpecMismatch(f"the ranks disagree on {what}; give the same on every rank, in the same order")
    return prepared


def _digest(data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data) >> 1
