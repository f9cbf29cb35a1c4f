"""A write of rows, cut by shard: what goes to each, and what became of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from geartrain.ams.kernels import ops
from geartrain.ams.kernels._core import PreparedWrite, TableFacts
from geartrain.ams.values.shard_messages import Assign, BatchFacts, Done, Push, Request
from geartrain.ams.values.specs import DTYPES, DTypeName, Ids, TableSpec

Call = tuple[int, Request]
Shards = Sequence[int]
Batch = tuple[npt.NDArray[np.uint32] | None, int | None, float | None, Sequence[int] | None]
"""What a push says of its batch, as :class:`BatchFacts`, but ``pulled_at`` of each shard; -1: it is not known."""
PartRequest = Callable[[Ids, npt.NDArray[Any], BatchFacts | None], Push | Assign]
"""Makes the request of a part from its ids [N], its rows [N, dim] and what it says of its batch."""
_DTYPES = tuple(DTYPES.values())

NO_CHECK, CHECK_PRODUCT, CHECK_FINITE = 0, 1, 2
"""What is looked for in the rows of a write: nothing; that the largest times ``scale`` is finite; that all are, too."""


def facts_of(spec: TableSpec, wire_dtype: DTypeName | None) -> TableFacts:
    """Return what compiled code knows of a table; ``wire_dtype``: the type its rows travel in, None: as they are."""
    code = ops.DTYPE_CODES[spec.numpy_dtype]
    wire_code = code if wire_dtype is None else ops.DTYPE_CODES[DTYPES[wire_dtype]]
    return TableFacts(spec.name, spec.dim, code, spec.num_rows is not None, wire_code, spec.counts_occurrences)


class Delivered(NamedTuple):
    """What became of the calls of one write."""

    done: Done
    """The joint reply of the shards that have answered."""
    failed: list[tuple[Call, BaseException]]
    """The calls of the others, each with its error."""


def joint(calls: Sequence[Call], outcomes: Sequence[object]) -> Delivered:
    """Sum up the outcomes of calls: a :class:`Done` or an error each."""
    created, duplicate, failed = 0, False, []
    for call, outcome in zip(calls, outcomes, strict=True):
        if isinstance(outcome, Done):
            created += outcome.created
            duplicate |= outcome.duplicate
        elif isinstance(outcome, BaseException):
            failed.append((call, outcome))
    return Delivered(Done(created=created, duplicate=duplicate), failed)


class RowParts:
    """The calls of one write of rows: its parts, cut once, and what they ask of the shards."""

    def __init__(
        self,
        prepared: PreparedWrite,
        request: PartRequest,
        shards: Shards | None = None,
    ) -> None:
        """``shards``: those that have not answered; None: nothing was sent yet."""
        self.prepared = prepared
        self._request = request
        self.shards = shards

    def __len__(self) -> int:
        return self.prepared.num_parts if self.shards is None else len(self.shards)

    def only(self, shards: Shards) -> RowParts:
        """Those that go to some shards."""
        return RowParts(self.prepared, self._request, shards)

    def calls(self) -> list[Call]:
        """The same as requests of Python, with arrays of their own."""
        calls: list[Call] = []
        for index, shard in enumerate(self.prepared.shards):
            if self.shards is None or shard in self.shards:
                _, ids, bits, code, said = self.prepared.part(index)
                batch = None if said is None else _facts(*said)
                calls.append((shard, self._request(ids, bits.view(_DTYPES[code]), batch)))
        return calls


def _facts(
    occurrences: npt.NDArray[np.uint32] | None, step: int | None, unix_seconds: float | None, pulled_at: int | None
) -> BatchFacts:
    return BatchFacts(occurrences=occurrences, step=step, unix_seconds=unix_seconds, pulled_at=pulled_at)


def row_parts(pending: RowParts | Sequence[Call]) -> RowParts:
    """Return the calls of a write of rows as what they are."""
    assert isinstance(pending, RowParts)
    return pending
