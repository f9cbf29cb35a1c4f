"""Reader of a cluster's event log, page by page from its scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import groupby

from geartrain.ams.values.scheduler_messages import ClusterEvent, EventPage

_NEWEST = 2**62
_NAMED = 5


class EventReader:
    """Yields each event of a cluster once. Not thread-safe."""

    def __init__(
        self,
        read: Callable[[int], EventPage],
        *,
        since: int | None = None,
        most: int = 0,
        forgot: Callable[[int, int], None] = lambda last, since: None,  # noqa: ARG005
    ) -> None:
        """``read(number)`` returns a page of the events after a number. Starts after ``since``, or with the last
        ``most``.

        ``forgot`` is called when a scheduler was restarted without its data: with the number of its last event, and of
        the last event yielded. Reading then starts at its first event.
        """
        self._read, self._since, self._most, self._forgot = read, since, most, forgot

    def new(self) -> Iterator[ClusterEvent]:
        """Yield the events since the last call, oldest first. Raises errors of ``read``; the next call resumes
        there."""
        if self._since is None:
            self._since = max(0, self._read(_NEWEST).last - self._most)
        last = None
        while True:
            page = self._read(self._since)
            if page.last < self._since:
                self._forgot(page.last, self._since)
                self._since = 0
                continue
            last = page.last if last is None else last
            for event in page.events:
                if event.number > last:
                    return
                self._since = event.number
                yield event
            if not page.events or self._since >= last:
                return


def folded(events: Iterable[ClusterEvent]) -> Iterator[ClusterEvent]:
    """Merge changes of tables that came one after another, such as 36 dropped ones, into one event in the place of the
    last: it has their number, and names the first."""
    for what, run in groupby(events, lambda event: event.text.rpartition(" ")[2] if event.kind == "schema" else None):
        same = list(run)
        if what is None or len(same) == 1:
            yield from same
            continue
        tables = tuple(table for event in same for table in event.tables)
        text = f"{len(tables)} tables {what}: {', '.join(tables[:_NAMED])}{', ...' if len(tables) > _NAMED else ''}"
        yield replace(same[-1], text=text, tables=tables)
