"""Prediction of a hashed table's bytes on a shard, by the sizes in csrc/index and csrc/store.

Tested against filled tables. The copies of a freeze are not included.
"""

from __future__ import annotations

from dataclasses import dataclass

from geartrain.ams.values.admission.filters import BLOCK_BYTES
from geartrain.ams.values.admission.rules import MinCount
from geartrain.ams.values.placement import NUM_BUCKETS
from geartrain.ams.values.specs import TableSpec

MAX_IDS = 2**32 - 1
"""Most ids of a shard."""
_LINE_BYTES, _FIRST_LINES = 64, 64
_ID_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class PlannedRows:
    """Bytes of a table on one shard, by purpose."""

    rows: int
    slots: int
    counters: int
    """Counters of updates or steps, where the optimizer or 16-bit rounding needs them."""
    lives: int
    """Lives of rows, with a rule of expiry or ``max_bytes``."""
    index: int
    """Ids of the rows, and the lines of the index."""
    growth: int
    """Lines of the index before its last growth, kept until half as many ids have been added as there were lines."""
    admission: int
    """Counters of ids without a row."""
    peak: int
    """Peak on the way to so many rows: at the end, or while the index last grew."""

    @property
    def total(self) -> int:
        """Bytes once all rows are there."""
        kept = self.rows + self.slots + self.counters + self.lives
        return kept + self.index + self.growth + self.admission


def planned_rows(spec: TableSpec, num_rows: int, num_shards: int = 1) -> PlannedRows:
    """Return the bytes on the fullest of ``num_shards`` shards for a hashed table of ``num_rows`` rows in all."""
    buckets = -(-NUM_BUCKETS // num_shards)
    here = -(-num_rows * buckets // NUM_BUCKETS)
    lines, before = _FIRST_LINES, 0
    while here > _max_ids(lines):
        lines, before = lines * 7 // 5, lines
    growing = here - _max_ids(before) < before // 2
    filtered = spec.admission.num_blocks * BLOCK_BYTES if isinstance(spec.admission, MinCount) else 0
    parts = {
        "rows": spec.row_bytes,
        "slots": spec.slot_bytes,
        "counters": spec.step_bytes,
        "lives": spec.life_bytes,
    }
    of_rows = {name: here * size for name, size in parts.items()}
    index, admission = here * _ID_BYTES + lines * _LINE_BYTES, filtered * buckets // NUM_BUCKETS
    a_row = sum(parts.values()) + _ID_BYTES
    # As the last growth ends: the rows that there are then, and the lines before beside those now.
    grown = min(here, _max_ids(before) + before // 2) * a_row + (lines + before) * _LINE_BYTES + admission
    total = sum(of_rows.values()) + index + admission
    left = before * _LINE_BYTES if growing else 0
    return PlannedRows(**of_rows, index=index, growth=left, admission=admission, peak=max(total + left, grown))


def _max_ids(lines: int) -> int:
    return lines * 13 // 4
