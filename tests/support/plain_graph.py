"""A graph of nearest rows in the plainest numpy, in the place of the builder."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from geartrain.ams.graph.building.neighbours import NeighbourTable
from geartrain.bridge.head.selection import graph_build
from geartrain.bridge.head.selection.served_graph import PulledRows


def plain_build(
    rows: PulledRows, k: int, progress: Callable[[int, int], None] | None, cancelled: Callable[[], bool]
) -> NeighbourTable:
    """Every cosine, sorted; in two reads."""
    half = rows.num_rows // 2
    rows_CD = np.concatenate([rows.read(0, half), rows.read(half, rows.num_rows)]).astype(np.float64)
    if progress is not None:
        progress(half, rows.num_rows)
    assert not cancelled()
    rows_CD /= np.linalg.norm(rows_CD, axis=1, keepdims=True)
    cosines_CC = rows_CD @ rows_CD.T
    np.fill_diagonal(cosines_CC, -np.inf)
    kept = min(k, rows.num_rows - 1)
    order_CK = np.argsort(-cosines_CC, axis=1, kind="stable")[:, :kept]
    if progress is not None:
        progress(rows.num_rows, rows.num_rows)
    offsets = np.arange(rows.num_rows + 1, dtype=np.int64) * kept
    return NeighbourTable(offsets, order_CK.astype(np.int32).reshape(-1), k)


def use_plain_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Build graphs by :func:`plain_build`."""
    monkeypatch.setattr(graph_build, "build_graph", plain_build)


def table_of(lists: Sequence[Sequence[int]], k: int) -> NeighbourTable:
    """The table of these lists, made for ``k``: that of class 0 first."""
    offsets = np.zeros(len(lists) + 1, np.int64)
    np.cumsum([len(ids) for ids in lists], out=offsets[1:])
    return NeighbourTable(offsets, np.array([class_id for ids in lists for class_id in ids], np.int32), k)
