"""Classes of several centers: each is one row of the table, its K centers one after the other (sub-center ArcFace, Deng
et al. 2020, section 3.2).

The cosine of a class is the largest of those of its centers, the first of equal ones; that center alone takes the
gradient.
Legend: N classes, K centers of each, D width of a feature, B samples.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from geartrain.ams.programs.class_head import MAX_SUB_CENTERS
from geartrain.ams.programs.selection import Selection
from geartrain.ams.tables.row_table import RowTable
from geartrain.ams.values.arguments import integer
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.placement import NUM_BUCKETS
from geartrain.ams.values.specs import MAX_DIM, Ids, TableSpec
from geartrain.ams.values.text import quoted
from geartrain.bridge.head.loss.batch import with_zeros
from geartrain.bridge.head.loss.margins.margin import NORM_FLOOR, AnyMargin
from geartrain.bridge.rows.tables import TORCH_DTYPES, ReadableTable, as_numpy

_MIN_DIM = 2
"""A feature of one number has two directions only, and its row would look like one with a bias."""


def checked_sub_centers(sub_centers: int, dim: int, select: Selection, label_smoothing: float) -> int:
    """Return K. Raises InvalidArgument for a number out of range, and for settings that support one center only."""
    centers = integer("sub_centers", sub_centers, 1, max(1, min(MAX_SUB_CENTERS, MAX_DIM // dim)))
    if centers == 1:
        return centers
    if dim < _MIN_DIM:
        raise InvalidArgument(f"dim is {dim} and sub_centers is {centers}; give features of two numbers or more")
    if not select.takes_sub_centers:
        raise InvalidArgument(
            f"select is {select!r} and sub_centers is {centers}; its graph compares whole rows, not their centers: "
            "use FullSoftmax() or PartialFC(sample_rate=...)"
        )
    if label_smoothing:
        raise InvalidArgument(
            f"label_smoothing is {label_smoothing!r} and sub_centers is {centers}; leave one of them out"
        )
    return centers


def require_margin(margin: AnyMargin | None, sub_centers: int) -> None:
    """Raise InvalidArgument without a margin: the nearest of several centers is that of the largest cosine."""
    if sub_centers > 1 and margin is None:
        raise InvalidArgument(
            f"margin is None and sub_centers is {sub_centers}; sub-centers are compared by cosines: give a margin, "
            "such as ArcFace(), or leave sub_centers out"
        )


def nearest_centers(values_SB: Tensor, centers: int) -> tuple[Tensor, Tensor]:
    """Return the largest of the values [N · K, B] for each class [N, B], and its center [N, B]: the first of equals."""
    largest = values_SB.view(len(values_SB) // centers, centers, values_SB.shape[1]).max(dim=1)
    return largest.values, largest.indices


def scores_of_classes(scores_BS: Tensor, centers: int) -> Tensor:
    """Return scores [B, N] of classes from those of their centers [B, N · K]."""
    return scores_BS if centers == 1 else scores_BS.view(len(scores_BS), scores_BS.shape[1] // centers, centers).amax(2)


def largest_cosines(unit_BD: Tensor, rows_BD: Tensor) -> Tensor:
    """Return the cosine [B] of each unit feature with the nearest center of its row [K · D]."""
    centers_BKD = rows_BD.view(len(rows_BD), rows_BD.shape[1] // unit_BD.shape[1], unit_BD.shape[1])
    unit_BKD = normalize(centers_BKD, dim=2, eps=NORM_FLOOR)
    return (unit_BKD * unit_BD.unsqueeze(1)).sum(2).amax(1)


def dominant_centers(
    table: ReadableTable, batches: Iterable[tuple[Tensor, Tensor, Tensor]], sub_centers: int
) -> Tensor:
    """Return the result of ``ClassHead.dominant_centers``; ``batches`` are those of ``features_of``."""
    num_classes = table.spec.num_rows or 0
    counts_CK = np.zeros((num_classes, sub_centers), np.float32)
    for features_ND, labels_N, weight_N in batches:
        ids, places = np.unique(labels_N.numpy(), return_inverse=True)
        rows = torch.empty(len(ids), table.spec.dim, dtype=TORCH_DTYPES[table.spec.dtype], device="cpu")
        table.pull_into(ids, as_numpy(rows))
        unit_NKD = normalize(rows.float().view(len(ids), sub_centers, features_ND.shape[1]), dim=2)[places]
        chosen_N = (unit_NKD * features_ND.unsqueeze(1)).sum(2).argmax(1)
        np.add.at(counts_CK, (labels_N.numpy(), chosen_N.numpy()), weight_N.numpy())
    return torch.from_numpy(counts_CK.argmax(1))


def checked_dominant(dominant: Tensor, num_classes: int, sub_centers: int) -> Tensor:
    """Return numbers of centers [C]. Raises InvalidArgument unless there is one for each class."""
    is_whole = isinstance(dominant, Tensor) and dominant.dtype == torch.int64 and dominant.shape == (num_classes,)
    if not is_whole or bool(((dominant < 0) | (dominant >= sub_centers)).any()):
        found = f"{dominant.dtype} {list(dominant.shape)}" if isinstance(dominant, Tensor) else quoted(dominant)
        more = f" with {int(dominant.min())} … {int(dominant.max())}" if is_whole else ""
        raise InvalidArgument(
            f"dominant is {found}{more}; it must be torch.int64 [{num_classes}] with 0 … {sub_centers - 1}, as "
            "head.dominant_centers(...) returns it"
        )
    return dominant.cpu()


def at_centers(values_NB: Tensor, chosen_NB: Tensor, centers: int) -> Tensor:
    """Return [N · K, B]: the values [N, B] at the chosen centers, zeros at the others."""
    num_rows, batch = values_NB.shape
    spread_NKB = values_NB.new_zeros(num_rows, centers, batch)
    return spread_NKB.scatter_(1, chosen_NB.unsqueeze(1), values_NB.unsqueeze(1)).view(num_rows * centers, batch)


def initial_rows(spec: TableSpec, ids: Ids) -> np.ndarray:
    """Return the initial rows of these ids, whatever was written since: an id may have been another class."""
    out = np.empty((len(ids), spec.dim), spec.numpy_dtype)
    RowTable(spec, np.arange(NUM_BUCKETS, dtype=np.int64)).pull(ids, out)
    return out


def whole_rows(spec: TableSpec, ids: Ids, centers_ND: Tensor) -> np.ndarray:
    """Return rows in the table's layout and dtype from centers [N, D]. A bias is 0. Of several centers of a class, the
    given one is the first, and the others have their initial values."""
    dim = centers_ND.shape[1]
    if spec.dim <= dim + 1:
        return as_numpy(with_zeros(centers_ND, spec.dim))
    rows = torch.empty(len(ids), spec.dim, dtype=TORCH_DTYPES[spec.dtype], device="cpu")
    as_numpy(rows)[:] = initial_rows(spec, ids)
    rows[:, :dim] = centers_ND
    return as_numpy(rows)
