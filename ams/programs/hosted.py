"""Hosted models: computations that run on the shards, beside the rows, so that inputs travel instead of rows.

A model is arrays in, arrays out, with a step and a seed; it keeps no state between calls, so that a call may be
retried, even at a restarted shard. ``ams`` defines the protocol and knows no model: the code that starts a shard (the
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
"""Most bytes of an update's gradients that are held at once; more are made chunk by chunk."""


def chunk_bounds(num_rows: int, chunk_rows: int) -> list[tuple[int, int]]:
    """Return (start, stop) of consecutive chunks that cover ``num_rows``."""
    return [(start, min(start + chunk_rows, num_rows)) for start in range(0, num_rows, chunk_rows)]


class HostedRows(Protocol):
    """Rows of a table on a shard, as input of a model: they do not change during a computation."""

    @property
    def spec(self) -> TableSpec:
        """Spec of the table."""

    @property
    def num_owned(self) -> int:
        """Number of ids of a dense table on this shard. Raises InvalidArgument for a hashed table."""

    def owned_ids(self, start: int, stop: int) -> Ids:
        """Return owned ids number ``start`` … ``stop`` − 1, ascending, int64; the table is dense."""

    def owns(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """Return whether this shard owns each of ``ids`` [N], bool [N]."""

    def read(self, ids: Ids) -> Float32:
        """Return the rows [N, D] of owned ``ids`` [N] as a float32 copy; unwritten rows have their initial value."""

    def side_by_side(self, function: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Return the results of ``function(item)`` in order, computed on the threads that the shard may use."""


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """Row gradients of one update, made chunk by chunk; the host applies them, and decides how often they are made."""

    chunks: Sequence[Any]
    """Chunks in any form, in any order, with disjoint rows."""
    ids: Callable[[Any], Ids]
    """Function from a chunk to its ids [N], distinct."""
    make: Callable[[Any], Float32]
    """Function from a chunk to its gradients [N, D], which follow from its rows. Called on several threads."""
    num_rows: int
    """Number of rows of all chunks."""
    largest: float
    """Bound of the gradients' magnitude, for any rows; infinity: unknown."""
    batch: BatchFacts | None = None
    """Facts of the batch that the table asks for, for the rows of all chunks in order: all are then held at once."""


class HostedModel(Protocol):
    """Computation beside the rows. Thread-safe; one object serves all shards of a process."""

    def compute(self, rows: HostedRows, operation: str, inputs: Sequence[HostedInputs]) -> Arrays:
        """Return arrays made from the rows and the inputs; change nothing.

        Raises InvalidArgument, InvalidIds or InvalidRows for inputs that do not fit the table.
        """

    def gradients(self, rows: HostedRows, inputs: Sequence[HostedInputs]) -> Gradients:
        """Return the gradients of an update, summed over the inputs, each times its ``weight``. Raises as
        :meth:`compute`, and NonFinite."""


HostedModels = Mapping[str, HostedModel]
"""Hosted models by their name in requests."""
