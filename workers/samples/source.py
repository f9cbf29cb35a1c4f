"""What a source of files shows to those that put its rows in order."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self

import numpy as np

from geartrain.workers.samples.batches import SampleBatch


class SampleRows(Protocol):
    """Some samples in memory."""

    @property
    def num_rows(self) -> int:
        """So many."""

    def slice(self, first: int, count: int) -> Self:
        """At most ``count`` of them from ``first`` on. Copies nothing."""

    def shuffled(self, random: np.random.Generator) -> Self:
        """All of them in another order, which depends on them and ``random`` alone."""

    def joined(self, others: Sequence[Self]) -> Self:
        """These, then those of ``others``."""

    def batch(self, cursors: Mapping[int, tuple[int, int]]) -> SampleBatch:
        """As tensors."""


class SampleSource(Protocol):
    """Rows in parts that are read as a whole: row groups of Parquet, blocks of lines of CSV."""

    @property
    def part_rows(self) -> Sequence[int]:
        """Rows of each part."""

    @property
    def identity(self) -> Any:
        """What tells these data from others, as JSON can hold it; the same wherever the files are mounted."""

    def read(self, part: int) -> SampleRows:
        """The rows of a part. Raises SourceError."""


def fingerprint(*parts: Any) -> str:
    """A short name of what is equal for equal parts (JSON)."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
