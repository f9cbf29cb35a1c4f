"""Deduplication within a plain batch: samples with equal values of some columns share a node, which is computed once.

The idea is that of RecD ("End-to-end deduplicated recommendation data", 2022).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.specs import Ids
from geartrain.ams.values.text import quoted
from geartrain.bridge.embedding.levels import Nodes
from geartrain.workers.samples.batches import SampleBatch, Values
from geartrain.workers.samples.rows import tensors_of_column

Groups = Mapping[str, Sequence[str]]
"""Columns of each level."""
Mask = npt.NDArray[np.bool_]
_Codes = npt.NDArray[np.uint64]


def finisher(dedup: bool | Groups) -> Callable[[SampleBatch], SampleBatch]:
    """Return the function that adds levels to a batch: ``dedup``'s own, or for True one for every column of lists.

    For False it changes nothing. Raises InvalidArgument.
    """
    if isinstance(dedup, bool | np.bool_):
        return partial(deduplicated, groups=None) if dedup else unchanged
    if not isinstance(dedup, Mapping):
        raise InvalidArgument(f"dedup is {quoted(dedup)}; it must be True, or map levels to columns")
    seen: dict[str, str] = {}
    for level, columns in dedup.items():
        if isinstance(columns, str) or not columns:
            raise InvalidArgument(f"dedup has {quoted(columns)} for level {level!r}; give a list of columns")
        for column in columns:
            if column in seen:
                raise InvalidArgument(
                    f"dedup has column {column!r} in levels {seen[column]!r} and {level!r}; leave it in one of them"
                )
            seen[column] = level
    return partial(deduplicated, groups=dedup)


def unchanged(batch: SampleBatch) -> SampleBatch:
    """Return the batch itself."""
    return batch


def deduplicated(batch: SampleBatch, groups: Groups | None) -> SampleBatch:
    """Return the batch with a level for each group; None: for each column of lists.

    Raises InvalidArgument for a column that is not there.
    """
    if groups is None:
        groups = {name: [name] for name, values in batch.items() if isinstance(values, tuple)}
    columns = dict(batch)
    level_of: dict[str, str] = dict(batch.level_of)
    nodes: dict[str, Nodes] = dict(batch.nodes)
    for level, names in groups.items():
        for name in names:
            if name not in batch:
                raise InvalidArgument(f"dedup names column {name!r}, which is not read; {', '.join(batch)} are")
        kept, index = _grouped([batch[name] for name in names], batch.num_samples)
        rows = torch.from_numpy(kept)
        columns.update((name, _taken(batch[name], rows)) for name in names)
        nodes[level] = Nodes(torch.from_numpy(index), len(kept))
        level_of.update(dict.fromkeys(names, level))
    return SampleBatch(columns, batch.num_samples, batch.cursors, level_of, nodes)


def _grouped(columns: Sequence[Values], num_rows: int) -> tuple[Ids, Ids]:
    """Return a row of each node, in order, and the node of each row."""
    codes = np.zeros(num_rows, np.uint64)
    for values in columns:
        codes = _mixed(codes + _row_codes(values))
    _, first, inverse = np.unique(codes, return_index=True, return_inverse=True)
    same = np.ones(num_rows, np.bool_)
    for values in columns:
        same &= _equal_rows(values, first[inverse])
    others = np.flatnonzero(~same)  # of equal codes and other values: by chance, or by intent
    inverse[others] = len(first) + np.arange(len(others))
    rows = np.concatenate([first, others])
    order = np.argsort(rows, kind="stable")
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    return rows[order].astype(np.int64), number[inverse].astype(np.int64)


def _mixed(codes: _Codes) -> _Codes:
    """Mix the bits with splitmix64's last steps."""
    codes = (codes ^ (codes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    codes = (codes ^ (codes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return codes ^ (codes >> np.uint64(31))


def _bits(values: Tensor) -> _Codes:
    array = values.numpy()
    if array.dtype == np.float32:
        return array.view(np.uint32).astype(np.uint64)
    return array.astype(np.uint64) if array.dtype == np.bool_ else array.view(np.uint64)


def _row_codes(values: Values) -> _Codes:
    if isinstance(values, tuple):
        bits, offsets = _bits(values[0]), values[1].numpy()
        lengths = np.diff(offsets)
        places = np.arange(len(bits)) - np.repeat(offsets[:-1], lengths)
        codes = _mixed(bits + _mixed(places.astype(np.uint64) + np.uint64(1)))
        sums: _Codes = np.concatenate([np.zeros(1, np.uint64), np.cumsum(codes, dtype=np.uint64)])
        return np.asarray(sums[offsets[1:]] - sums[offsets[:-1]] + _mixed(lengths.astype(np.uint64)))
    bits = _bits(values)
    if bits.ndim == 1:
        return _mixed(bits + np.uint64(1))
    places = np.arange(1, bits.shape[1] + 1, dtype=np.uint64)
    by_row: _Codes = _mixed(bits + _mixed(places)).sum(axis=1, dtype=np.uint64)
    return by_row


def _equal_rows(values: Values, others: Ids) -> Mask:
    """Return, for each row, whether it has the values of the row in ``others``."""
    if not isinstance(values, tuple):
        bits = _bits(values)
        equal: Mask = np.asarray(bits == bits[others])
        return equal if equal.ndim == 1 else np.asarray(equal.all(axis=1))
    bits, offsets = _bits(values[0]), values[1].numpy()
    lengths = np.diff(offsets)
    same: Mask = lengths == lengths[others]
    rows = np.flatnonzero(same & (others != np.arange(len(others))))
    counts = lengths[rows]
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    mine, theirs = (bits[np.repeat(offsets[which], counts) + within] for which in (rows, others[rows]))
    same[np.repeat(rows, counts)[mine != theirs]] = False
    return same


def changes(column: Any) -> Mask:
    """Return, for each row [N] of an Arrow column, whether its value differs from the row before; True for the first.

    Lists differ by length or by any value, floats by any bit.
    """
    values = tensors_of_column(column)
    changed: Mask = ~_equal_rows(values, np.maximum(np.arange(len(column)) - 1, 0))
    changed[:1] = True
    return changed


def _taken(values: Values, rows: Tensor) -> Values:
    if not isinstance(values, tuple):
        return values[rows]
    items, offsets = values
    lengths = offsets.diff()[rows]
    ends = lengths.cumsum(0)
    within = torch.arange(len(items) if not len(ends) else int(ends[-1])) - (ends - lengths).repeat_interleave(lengths)
    places = offsets[:-1][rows].repeat_interleave(lengths) + within
    return items[places], torch.cat([ends.new_zeros(1), ends])
