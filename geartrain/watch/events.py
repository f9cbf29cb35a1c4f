"""The events of a cluster, page after page, as its scheduler has them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import groupby

from geartrain.ams.values.scheduler_messages import ClusterEvent, EventPage

_NEWEST = 2**62
_NAMED = 5


class EventReader:
    """Gives each event once. Not thread-safe."""

    def __init__(
        self,
        read: Callable[[int], EventPage],
        *,
        since: int | None = None,
        most: int = 0,
        forgot: Callable[[int, int], None] = lambda last, since: None,  # noqa: ARG005
    ) -> None:
        """``read`` asks for those behind a number. It begins behind number ``since``, or with the last ``most``.

        ``forgot`` hears of a scheduler that was restarted without its memory: the number of its last event, and that
        of the last one that was given. It is begun with anew.
        """
        self._read, self._since, self._most, self._forgot = read, since, most, forgot

    def new(self) -> Iterator[ClusterEvent]:
        """Those that there are by now, the oldest first. Raises what ``read`` does; the next call goes on there."""
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
    """The events, but of changes of tables that came one after another, as 36 that were dropped, the last in the place
    of all: it tells how many, and names the first."""
    for what, run in groupby(events, lambda event: event.text.rpartition(" ")[2] if event.kind == "schema" else None):
        same = list(run)
        if what is None or len(same) == 1:
            yield from same
            continue
        tables = tuple(table for event in same for table in event.tables)
        text = f"{len(tables)} tables {what}: {', '.join(tables[:_NAMED])}{', ...' if len(tables) > _NAMED else ''}"
        yield replace(same[-1], text=text, tables=tables)
