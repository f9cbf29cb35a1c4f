"""Which snapshots and exports a table can tell what was written since, by their ids."""

from __future__ import annotations

from collections.abc import Callable

MOST_MOMENTS = 8
"""Of a table on a shard. Each costs a bit for each row."""


class KnownMoments:
    """Moments of a table by the id of what was kept of them.

    Several may be asked for in turn: a chain of snapshots and those of several exports. Beyond :data:`MOST_MOMENTS`
    the oldest one that something newer was added to is forgotten, or else the oldest.
    """

    def __init__(self, forget: Callable[[int], None], knows: Callable[[int], bool]) -> None:
        """``forget`` lets go of a moment of the rows by its number, unless it is not known; where memory is short, of
        older ones, too. ``knows`` says whether one is known.
        """
        self._forget = forget
        self._knows = knows
        self._numbers: dict[str, int] = {}
        """The oldest first."""
        self._added_to: set[str] = set()
        """Those that another one, which was kept, adds to."""

    def number_of(self, kept_id: str) -> int | None:
        """The number of a moment; None: nobody knows what was written since."""
        number = self._numbers.get(kept_id)
        return None if number is None or not self._knows(number) else number

    def note(self, kept_id: str, number: int, *, parent_id: str = "") -> None:
        """All rows of the moment ``number`` but those that ``parent_id`` has are kept as ``kept_id``."""
        if not self._numbers:
            self._forget(0)  # when the table was made, of which nothing is kept
        self._numbers[kept_id] = number
        if parent_id in self._numbers:
            self._added_to.add(parent_id)
        while len(self._numbers) > MOST_MOMENTS:
            oldest = next((known for known in self._numbers if known in self._added_to), next(iter(self._numbers)))
            self._forget(self._numbers.pop(oldest))
            self._added_to.discard(oldest)

    def forget_all(self) -> None:
        """The table gets other rows, or nobody will ask."""
        for number in (0, *self._numbers.values()):
            self._forget(number)
        self._numbers.clear()
        self._added_to.clear()

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._numbers)
