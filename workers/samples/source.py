"""Interface of a source of files for the code that orders its rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from geartrain.workers.samples.rows import Rows


class SampleSource(Protocol):
    """Rows in parts: row groups of Parquet, blocks of lines of CSV."""

    @property
    def part_rows(self) -> Sequence[int]:
        """Rows of each part."""

    @property
    def identity(self) -> Any:
        """Identity of the data as JSON values; the same wherever the files are mounted."""

    def read(self, part: int) -> Rows:
        """Return the rows of a part. Raises SourceError."""


def fingerprint(*parts: Any) -> str:
    """Return a short hash of JSON values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
