"""Events of a cluster are read once each, whatever its scheduler still has."""

from __future__ import annotations

from geartrain.ams.observe.event_log import EventLog
from geartrain.ams.values.scheduler_messages import ClusterEvent, EventPage
from geartrain.watch.events import EventReader


class Scheduler:
    """Its log, of which a page has two events."""

    def __init__(self) -> None:
        self.log = EventLog()

    def note(self, *texts: str) -> None:
        for text in texts:
            self.log.append(ClusterEvent(kind="schema", text=text))

    def read(self, since: int) -> EventPage:
        return self.log.since(since, 2)


def new(reader: EventReader) -> list[str]:
    return [event.text for event in reader.new()]


def test_each_event_comes_once_whatever_the_size_of_a_page() -> None:
    scheduler = Scheduler()
    scheduler.note(*"abcde")
    all_of_them, some, later = (
        EventReader(scheduler.read, **begin) for begin in ({"since": 0}, {"most": 2}, {"since": 3})
    )
    assert [new(reader) for reader in (all_of_them, some, later)] == [list("abcde"), list("de"), list("de")]
    scheduler.note("f")
    assert [new(reader) for reader in (all_of_them, some, later)] == [["f"]] * 3
    assert new(all_of_them) == []


def test_those_that_come_while_it_reads_are_for_the_next_time() -> None:
    scheduler = Scheduler()
    scheduler.note(*"abc")
    reader = EventReader(scheduler.read, since=0)
    events = reader.new()
    next(events)
    scheduler.note("d")
    assert [event.text for event in events] == ["b", "c"]
    assert new(reader) == ["d"]


def test_a_scheduler_without_its_memory_is_begun_with_anew() -> None:
    scheduler, said = Scheduler(), list[tuple[int, int]]()
    scheduler.note(*"abc")
    reader = EventReader(scheduler.read, since=0, forgot=lambda last, since: said.append((last, since)))
    assert new(reader) == list("abc")
    scheduler.log = EventLog()
    scheduler.note("z")
    assert new(reader) == ["z"]
    assert said == [(1, 3)]
