"""What the rows of a hashed table will take on a shard, by the sizes that csrc/index and csrc/store have.

Tested against tables that are filled. Not in it: what a snapshot copies aside of rows that are written meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass

from geartrain.ams.values.admission.filters import BLOCK_BYTES
from geartrain.ams.values.admission.rules import MinCount
from geartrain.ams.values.placement import NUM_BUCKETS
from geartrain.ams.values.specs import TableSpec

MOST_IDS = 2**32 - 1
"""Of a shard."""
_LINE_BYTES, _FIRST_LINES = 64, 64
_ID_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class PlannedRows:
    """Bytes of the rows of one shard."""

    rows: int
    slots: int
    counters: int
    """Of updates or steps, where the optimizer or the rounding of 16 bits wants them."""
    lives: int
    """When a row was last seen, and how often: with a rule by which rows go, or ``max_bytes``."""
    index: int
    """The id of each row, and the lines in which ids are found."""
    growth: int
    """Lines of before the last growth, until half as many ids have come since as there were lines."""
    admission: int
    """Counters of ids that have no row."""
    peak: int
    """The most there ever was at once on the way to so many rows: at the end, or while the index last grew."""

    @property
    def total(self) -> int:
        """With so many rows there."""
        kept = self.rows + self.slots + self.counters + self.lives
        return kept + self.index + self.growth + self.admission


def planned_rows(spec: TableSpec, num_rows: int, num_shards: int = 1) -> PlannedRows:
    """Bytes on the fullest of ``num_shards`` shards, once a hashed table has ``num_rows`` rows on all of them."""
    buckets = -(-NUM_BUCKETS // num_shards)
    here = -(-num_rows * buckets // NUM_BUCKETS)
    lines, before = _FIRST_LINES, 0
    while here > _most_ids(lines):
        lines, before = lines * 7 // 5, lines
    growing = here - _most_ids(before) < before // 2
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
    grown = min(here, _most_ids(before) + before // 2) * a_row + (lines + before) * _LINE_BYTES + admission
    total = sum(of_rows.values()) + index + admission
    left = before * _LINE_BYTES if growing else 0
    return PlannedRows(**of_rows, index=index, growth=left, admission=admission, peak=max(total + left, grown))


def _most_ids(lines: int) -> int:
    return lines * 13 // 4
