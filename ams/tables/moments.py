"""Moments of a table, by the id of a snapshot or export: rows written since are known."""

from __future__ import annotations

from collections.abc import Callable

MAX_MOMENTS = 8
"""Most moments of a table on a shard. Each costs a bit a row."""


class MomentIndex:
    """Moments of a table by the ids of snapshots and exports.

    There are several: a chain of snapshots and those of several exports. Beyond :data:`MAX_MOMENTS` the oldest one
    that is the parent of another is forgotten, or else the oldest.
    """

    def __init__(self, forget: Callable[[int], None], knows: Callable[[int], bool]) -> None:
        """``forget`` drops a known moment of the rows by its number, and older ones where memory is short. ``knows``
        returns whether a number is known.
        """
        self._forget = forget
        self._knows = knows
        self._numbers: dict[str, int] = {}
        """Numbers of moments by id, the oldest first."""
        self._added_to: set[str] = set()
        """Ids of moments that are the parent of another saved one."""

    def number_of(self, kept_id: str) -> int | None:
        """Return the number of a moment; None: the rows written since are unknown."""
        number = self._numbers.get(kept_id)
        return None if number is None or not self._knows(number) else number

    def record(self, kept_id: str, number: int, *, parent_id: str = "") -> None:
        """Record that ``kept_id`` has saved the moment ``number``, all rows or those that ``parent_id`` lacks."""
        if not self._numbers:
            self._forget(0)  # when the table was made, of which nothing is kept
        self._numbers[kept_id] = number
        if parent_id in self._numbers:
            self._added_to.add(parent_id)
        while len(self._numbers) > MAX_MOMENTS:
            oldest = next((known for known in self._numbers if known in self._added_to), next(iter(self._numbers)))
            self._forget(self._numbers.pop(oldest))
            self._added_to.discard(oldest)

    def forget_all(self) -> None:
        """Forget all moments, because the rows are replaced or no moment is needed any more."""
        for number in (0, *self._numbers.values()):
            self._forget(number)
        self._numbers.clear()
        self._added_to.clear()

    def __bool__(self) -> bool:
        """Return whether there are moments."""
        return bool(self._numbers)
