"""Until when a shard holds the moments of snapshots whose owners say nothing."""

from __future__ import annotations

from collections.abc import Callable


class FreezeLeases:
    """A deadline for each freeze. Whoever took one may be gone, and every write would copy rows aside for it.

    Used by the thread that holds the shard's turn only.
    """

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds = seconds
        self._clock = clock
        self._deadlines: dict[str, float] = {}

    def renew(self, snapshot_id: str) -> None:
        """Hold it for a whole lease from now."""
        self._deadlines[snapshot_id] = self._clock() + self._seconds

    def end(self, snapshot_id: str) -> None:
        """Forget it. Idempotent."""
        self._deadlines.pop(snapshot_id, None)

    def next_deadline(self) -> float | None:
        """The earliest, on the clock; None: nothing is held."""
        return min(self._deadlines.values(), default=None)

    def expired(self) -> list[str]:
        """Those whose owner was silent for a whole lease."""
        now = self._clock()
        return [snapshot_id for snapshot_id, deadline in self._deadlines.items() if deadline <= now]
