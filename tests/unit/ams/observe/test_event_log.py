"""The scheduler's log of events: bounded, numbered, and there after a restart whatever the disk did."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from geartrain.ams.observe import event_log
from geartrain.ams.observe.event_log import FILE, OLDER, EventLog
from geartrain.ams.values.scheduler_messages import ClusterEvent

NOW = 1_700_000_000.25


def noted(log: EventLog, *kinds: str) -> None:
    for kind in kinds:
        log.append(ClusterEvent(kind=kind, text=f"it was {kind}", shard=0, tables=("a", "b"), step=7))


def numbers(log: EventLog, since: int = 0) -> list[int]:
    return [event.number for event in log.since(since).events]


def test_a_log_goes_on_where_it_was_when_it_is_opened_again(tmp_path: Path) -> None:
    before = EventLog(tmp_path, clock=lambda: NOW)
    noted(before, "lost", "back")
    before.close()
    after = EventLog(tmp_path, clock=lambda: NOW + 1)
    assert after.since(0).events == before.since(0).events
    noted(after, "lost")
    assert (numbers(after, 1), after.since(1).last) == ([2, 3], 3)
    assert after.counts == {"lost": 1}
    first = json.loads((tmp_path / FILE).read_bytes().splitlines()[0])
    assert first == {
        "number": 1,
        "time": "2023-11-14T22:13:20.250Z",
        "kind": "lost",
        "text": "it was lost",
        "shard": 0,
        "tables": ["a", "b"],
        "step": 7,
    }


def test_what_a_client_tells_again_after_a_restart_is_noted_once(tmp_path: Path) -> None:
    told = ClusterEvent(kind="snapshot", text="whole")
    before = EventLog(tmp_path)
    assert before.append(told, key=7) is not None
    before.close()  # and the client heard no answer
    after = EventLog(tmp_path)
    assert after.append(told, key=7) is None
    assert after.append(told, key=8) is not None
    assert numbers(after) == [1, 2]


def test_a_torn_last_line_is_dropped_and_lines_that_are_no_events_are_passed_over(tmp_path: Path) -> None:
    first = EventLog(tmp_path)
    noted(first, "lost", "back", "lost")
    first.close()
    path = tmp_path / FILE
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"\xff{}\n[]\n" + lines[1] + lines[2][:-9])
    log = EventLog(tmp_path)
    assert numbers(log) == [1, 2]
    noted(log, "left")
    log.close()
    assert [event.kind for event in EventLog(tmp_path).since(0).events] == ["lost", "back", "left"]


def test_a_log_is_bounded_in_memory_and_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "MAX_KEPT", 20)
    log = EventLog(tmp_path, file_bytes=1_000)
    noted(log, *["lost"] * 50)
    log.close()
    assert numbers(log) == list(range(31, 51))
    assert sorted(path.name for path in tmp_path.iterdir()) == [OLDER, FILE]
    assert all(path.stat().st_size <= 1_000 for path in tmp_path.iterdir())
    assert numbers(EventLog(tmp_path))[-1] == 50


def test_a_disk_that_fails_costs_no_event_once_it_works_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(times: int) -> None:
        while caplog.text.count("keeping them in memory") < times:
            pass

    log = EventLog(tmp_path / "gone")
    noted(log, "lost", "back")
    assert numbers(log) == [1, 2]
    fails(1)
    (tmp_path / "gone").mkdir()
    noted(log, "lost")
    path = tmp_path / "gone" / FILE
    while not path.exists() or path.read_bytes().count(b"\n") < 3:
        pass

    half = os.pipe()
    monkeypatch.setattr(log, "_file", os.fdopen(half[1], "wb", buffering=0))  # what cannot be asked for its size
    noted(log, "back")
    fails(2)
    os.close(half[0])
    noted(log, "left")
    log.close()
    assert numbers(EventLog(tmp_path / "gone")) == [1, 2, 3, 4, 5]
    assert caplog.text.count("keeping them in memory") == 2


def test_nobody_waits_for_a_disk_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "_LAST_SECONDS", 0.1)
    log = EventLog(tmp_path)
    finished, works = threading.Event(), threading.Event()
    monkeypatch.setattr(event_log, "_whole_lines", lambda _: works.wait())

    def work() -> None:
        noted(log, *["lost"] * 5)
        assert log.newest("lost") is not None and numbers(log) == [1, 2, 3, 4, 5]
        log.close()
        finished.set()

    threading.Thread(target=work, daemon=True).start()
    try:
        assert finished.wait(20)
    finally:
        works.set()


def test_an_event_that_is_told_twice_is_noted_once() -> None:
    log = EventLog()
    event = ClusterEvent(kind="snapshot", text="whole")
    assert log.append(event, key=5) is not None
    assert log.append(event, key=5) is None
    assert log.append(event) is not None
    assert log.append(event) is not None
    assert numbers(log) == [1, 2, 3]


def test_a_reader_gets_all_in_pages() -> None:
    log = EventLog()
    noted(log, *["lost"] * 1_500)
    page = log.since(0)
    assert (len(page.events), page.last) == (1_000, 1_500)
    assert numbers(log, page.events[-1].number) == list(range(1_001, 1_501))
    assert numbers(log, 99_999) == []
