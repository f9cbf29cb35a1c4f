"""Rows with slots, steps and lives, as tables keep them and snapshots hold them.

Shapes: N rows, D = ``TableSpec.dim``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from geartrain.ams.values.specs import DTYPES, Ids, TableSpec

LIFE = np.dtype([("step", np.int64), ("seconds", np.uint32), ("count", np.uint32)])
"""Life of a row, for expiry and eviction: the step and the Unix time in seconds of the last batch that had it, and the
number of occurrences. The layout of ``RowLife`` in ``csrc/rows/row_life.hpp``."""
_LIFE_ARRAYS = {"seen_steps": "step", "seen_seconds": "seconds", "counts": "count"}
"""Names of the fields of a life in the blocks of a snapshot."""


class StoredRows(NamedTuple):
    """Rows as a table keeps them. Where it counts steps they are as of their last one, ``steps``, not caught up."""

    ids: Ids
    """[N]."""
    rows: npt.NDArray[Any]
    """[N, D]."""
    slots: npt.NDArray[Any] | None
    """[N, slot_dim]: one slot after the other; None where there are none, or none is wanted."""
    steps: Ids | None
    """[N]: where untouched rows move the last step of each row, -1 for one that nothing moves; where updates are
    counted (:attr:`TableSpec.counts_updates`) their number; else None."""
    lives: npt.NDArray[Any] | None = None
    """[N] of :data:`LIFE`; None where the table keeps none (:attr:`TableSpec.keeps_lives`), or none is wanted."""

    @classmethod
    def empty(cls, spec: TableSpec, count: int, *, rows_alone: bool = False) -> StoredRows:
        """Return uninitialised memory for ``count`` rows of a table; ``rows_alone``: without slots, steps and lives."""
        return cls(
            np.empty(count, np.int64),
            np.empty((count, spec.dim), spec.numpy_dtype),
            np.empty((count, spec.slot_dim), DTYPES[spec.slot_dtype]) if spec.has_slots and not rows_alone else None,
            np.empty(count, np.int64) if spec.step_bytes and not rows_alone else None,
            np.empty(count, LIFE) if spec.keeps_lives and not rows_alone else None,
        )

    @classmethod
    def of(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> StoredRows:
        """Return the rows of the result of :meth:`arrays`."""
        lives = None
        if _LIFE_ARRAYS.keys() <= arrays.keys():
            lives = np.empty(len(arrays["ids"]), LIFE)
            for name, part in _LIFE_ARRAYS.items():
                lives[part] = arrays[name]
        return cls(arrays["ids"], arrays["rows"], arrays.get("slots"), arrays.get("steps"), lives)

    def between(self, start: int, stop: int) -> StoredRows:
        """Return the rows ``start`` … ``stop`` - 1, in the same memory."""
        return StoredRows(*(None if part is None else part[start:stop] for part in self))  # type: ignore[arg-type]

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays that are not None, by name."""
        found = {name: part for name, part in self._asdict().items() if part is not None}
        lives = found.pop("lives", None)
        return found if lives is None else found | {name: lives[part] for name, part in _LIFE_ARRAYS.items()}


def life_bytes(lives: npt.NDArray[Any] | None) -> npt.NDArray[np.uint8] | None:
    """Return lives, :data:`LIFE` [N], for compiled code: bytes [N, 16] in the same memory."""
    return None if lives is None else lives.view(np.uint8).reshape(len(lives), LIFE.itemsize)
