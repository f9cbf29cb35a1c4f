"""Rows as a table keeps them, with all that belongs to each: what a snapshot holds.

Shapes: N rows, D = ``TableSpec.dim``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from geartrain.ams.values.specs import DTYPES, Ids, TableSpec

LIFE = np.dtype([("step", np.int64), ("seconds", np.uint32), ("count", np.uint32)])
"""What a table knows of a row that may have to go: when it was last seen, by the steps and seconds (since 1970) that
pushes say, and how often it was in a batch. That of ``RowLife`` in ``csrc/rows/row_life.hpp``."""
_LIFE_ARRAYS = {"seen_steps": "step", "seen_seconds": "seconds", "counts": "count"}
"""Their names in the blocks of a snapshot."""


class StoredRows(NamedTuple):
    """Rows as a table keeps them. Where it counts steps they are not caught up: ``steps`` says since when."""

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
        """Memory for ``count`` rows of a table, with whatever values; ``rows_alone``: for what lies in rows alone."""
        return cls(
            np.empty(count, np.int64),
            np.empty((count, spec.dim), spec.numpy_dtype),
            np.empty((count, spec.slot_dim), DTYPES[spec.slot_dtype]) if spec.has_slots and not rows_alone else None,
            np.empty(count, np.int64) if spec.step_bytes and not rows_alone else None,
            np.empty(count, LIFE) if spec.keeps_lives and not rows_alone else None,
        )

    @classmethod
    def of(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> StoredRows:
        """The rows that :meth:`arrays` gave."""
        lives = None
        if _LIFE_ARRAYS.keys() <= arrays.keys():
            lives = np.empty(len(arrays["ids"]), LIFE)
            for name, part in _LIFE_ARRAYS.items():
                lives[part] = arrays[name]
        return cls(arrays["ids"], arrays["rows"], arrays.get("slots"), arrays.get("steps"), lives)

    def between(self, start: int, stop: int) -> StoredRows:
        """The rows ``start`` … ``stop`` - 1, in the same memory."""
        return StoredRows(*(None if part is None else part[start:stop] for part in self))  # type: ignore[arg-type]

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The arrays that there are, by name."""
        found = {name: part for name, part in self._asdict().items() if part is not None}
        lives = found.pop("lives", None)
        return found if lives is None else found | {name: lives[part] for name, part in _LIFE_ARRAYS.items()}


def life_bytes(lives: npt.NDArray[Any] | None) -> npt.NDArray[np.uint8] | None:
    """:data:`LIFE` [N] as compiled code takes it: bytes [N, 16] in the same memory."""
    return None if lives is None else lives.view(np.uint8).reshape(len(lives), LIFE.itemsize)
