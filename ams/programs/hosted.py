"""Hosted models: computations that run on the shards, beside the rows, so that inputs travel instead of rows.

A model is arrays in, arrays out, with a step and a seed; it keeps no state between calls, so that a call may be sent
again, to a shard that was restarted too. ``ams`` defines the protocol and knows no model: whoever starts a shard (the
role launcher, ``gt.local``) injects them by name. A shard has one thread of work: while a model computes, its other
requests wait, its heartbeats do not.

Shapes: N rows of one chunk, D = ``TableSpec.dim``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from geartrain.ams.values.shard_messages import Arrays, BatchFacts, HostedInputs
from geartrain.ams.values.specs import Ids, TableSpec

T = TypeVar("T")
R = TypeVar("R")

Float32 = npt.NDArray[np.float32]

HELD_BYTES = 32 << 20
"""Gradients of an update of up to this many bytes are held at once; more are made chunk by chunk."""


def chunk_bounds(num_rows: int, chunk_rows: int) -> list[tuple[int, int]]:
    """(start, stop) of consecutive chunks that cover ``num_rows``."""
    return [(start, min(start + chunk_rows, num_rows)) for start in range(0, num_rows, chunk_rows)]


class HostedRows(Protocol):
    """The rows of one table that a shard owns, as a model sees them while it computes: they do not change meanwhile."""

    @property
    def spec(self) -> TableSpec:
        """What the table is."""

    @property
    def num_owned(self) -> int:
        """Ids of a dense table that this shard owns. Raises InvalidArgument for a hashed table."""

    def owned_ids(self, start: int, stop: int) -> Ids:
        """Owned ids number ``start`` … ``stop`` − 1, rising, int64; the table is dense."""

    def owns(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """Whether this shard owns each of ``ids`` [N], bool [N]."""

    def read(self, ids: Ids) -> Float32:
        """The rows [N, D] of owned ``ids`` [N] as a float32 copy; those never written have their initial value."""

    def side_by_side(self, function: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Results of ``function(item)`` in order, on the threads that the shard may use."""


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """The row gradients of one update, made chunk by chunk; the host decides how often, and applies them."""

    chunks: Sequence[Any]
    """What names a chunk; any order, disjoint rows."""
    ids: Callable[[Any], Ids]
    """Ids [N] of a chunk, distinct."""
    make: Callable[[Any], Float32]
    """Gradients [N, D] of a chunk: the same each time while its rows do not change. Called on several threads."""
    num_rows: int
    """Rows of all chunks."""
    largest: float
    """No gradient exceeds this in magnitude, whatever the rows are; infinity: no such bound is known."""
    batch: BatchFacts | None = None
    """What the table asks of the batch, for the rows of all chunks in order: they are then held at once, however many.
    """


class HostedModel(Protocol):
    """A computation beside the rows. Thread-safe; one object serves all shards of a process."""

    def compute(self, rows: HostedRows, operation: str, inputs: Sequence[HostedInputs]) -> Arrays:
        """Arrays made from the rows and the inputs; changes nothing.

        Raises InvalidArgument, InvalidIds or InvalidRows for inputs that do not fit the table.
        """

    def gradients(self, rows: HostedRows, inputs: Sequence[HostedInputs]) -> Gradients:
        """The gradients of an update, summed over the inputs, each times its ``weight``. Raises as :meth:`compute`,
        and NonFinite."""


HostedModels = Mapping[str, HostedModel]
"""Models by the name that requests give."""
