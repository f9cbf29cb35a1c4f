"""Log of a cluster's events: the newest in memory, and in a file that outlives the process.

The file has one JSON object a line; when it is full it is rotated, and one older file is kept. A last line cut by a
crash is dropped. A thread of its own writes, so that no caller, such as a heartbeat, waits for the disk. While the disk
fails or hangs events stay in memory, and are written when it works again.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
import time
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import IO, Any

from geartrain.ams.values.scheduler_messages import ClusterEvent, EventPage

logger = logging.getLogger(__name__)

FILE, OLDER = "events.jsonl", "events.1.jsonl"
FILE_BYTES = 4 << 20
MAX_KEPT = 10_000
_MAX_READ = 1_000
_KEYS_KEPT = 1_000
_KEY = "key"
"""Field of a line: the dedup key of an event that a client sent, and may send again to a restarted scheduler."""
_LONGEST_TEXT = 1_000
_MAX_TABLES = 100
_LAST_SECONDS = 2.0
"""Longest wait for unwritten events when a log is closed, for a disk may hang."""
_DEFAULTS = {field.name: field.default for field in fields(ClusterEvent)}


def as_json(event: ClusterEvent) -> dict[str, Any]:
    """Return the non-empty fields of an event, with its time as text (UTC)."""
    told = {name: value for name, value in asdict(event).items() if value != _DEFAULTS[name]}
    moment = datetime.fromtimestamp(told.pop("unix_seconds", 0.0), UTC)
    number = told.pop("number", 0)
    return {"number": number, "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"), **told}


def _from_json(line: bytes) -> tuple[ClusterEvent, int] | None:
    """Return the event of a line and its key; None if it is no event."""
    try:
        told = json.loads(line)
        key = int(told.pop(_KEY, 0))
        moment = datetime.fromisoformat(told.pop("time")).timestamp()
        known: dict[str, Any] = {name: value for name, value in told.items() if name in _DEFAULTS}
        return ClusterEvent(**{**known, "tables": tuple(known.get("tables", ())), "unix_seconds": moment}), key
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


class EventLog:
    """Numbered events, of which the newest :data:`MAX_KEPT` stay in memory. Thread-safe."""

    def __init__(
        self, folder: str | Path | None = None, *, file_bytes: int = FILE_BYTES, clock: Callable[[], float] = time.time
    ) -> None:
        """Continue the log in ``folder`` (None: begin an empty one in memory)."""
        self._folder = None if folder is None else Path(folder)
        self._file_bytes = file_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._has_news = threading.Condition(self._lock)
        self._file: IO[bytes] | None = None
        """The open file, used by the writing thread alone."""
        self._is_failing = self._is_closed = False
        self._keys: dict[int, int] = {}
        """Keys of the newest events that have one, by the number of the event."""
        self._kept: deque[ClusterEvent] = deque(maxlen=MAX_KEPT)
        self.counts: Counter[str] = Counter()
        """Number of events of each kind in this process."""
        if self._folder is not None:
            for path in (self._folder / OLDER, self._folder / FILE):
                for event, key in _events_in(path):
                    self._kept.append(event)
                    self._store_key(event.number, key)
        self._last = self._kept[-1].number if self._kept else 0
        self._writer: threading.Thread | None = None
        if self._folder is not None:
            self._writer = threading.Thread(
                target=self._run, args=(self._folder, self._last), name="geartrain-event-log", daemon=True
            )
            self._writer.start()

    def append(self, event: ClusterEvent, *, key: int = 0) -> ClusterEvent | None:
        """Append an event with its number and time, and return it; None if one of this ``key`` (0: none) is there."""
        with self._lock:
            if key and key in self._keys.values():
                return None
            self._last += 1
            self._store_key(self._last, key)
            now, text, tables = self._clock(), event.text[:_LONGEST_TEXT], event.tables[:_MAX_TABLES]
            event = replace(event, number=self._last, unix_seconds=now, text=text, tables=tables)
            self._kept.append(event)
            self.counts[event.kind] += 1
            self._has_news.notify()
            return event

    def _store_key(self, number: int, key: int) -> None:
        if key:
            self._keys[number] = key
            if len(self._keys) > _KEYS_KEPT:
                del self._keys[next(iter(self._keys))]

    def since(self, number: int, most: int = _MAX_READ) -> EventPage:
        """Return at most ``most`` events after event ``number``, the oldest first."""
        with self._lock:
            first = bisect_right(self._kept, number, key=lambda event: event.number)
            return EventPage(events=tuple(islice(self._kept, first, first + most)), last=self._last)

    def newest(self, kind: str) -> ClusterEvent | None:
        """Return the last event of a kind that is in memory."""
        with self._lock:
            return next((event for event in reversed(self._kept) if event.kind == kind), None)

    def close(self) -> None:
        """Write the remaining events, waiting for the disk two seconds at most, and stop. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._has_news.notify()
        if self._writer is not None:
            self._writer.join(_LAST_SECONDS)

    def _run(self, folder: Path, written: int) -> None:
        """Write the events after event ``written``; retry a failed write with the next event."""
        seen, is_closed = written, False
        while not is_closed:
            with self._lock:
                while self._last == seen and not self._is_closed:
                    self._has_news.wait()
                seen, is_closed = self._last, self._is_closed
            for event in self.since(written, MAX_KEPT).events:
                key = self._keys.get(event.number)
                line = as_json(event) | ({_KEY: key} if key else {})
                if not self._write(folder, json.dumps(line, ensure_ascii=False).encode(errors="replace") + b"\n"):
                    break
                written = event.number
        self._close_file()

    def _write(self, folder: Path, line: bytes) -> bool:
        path = folder / FILE
        try:
            if self._file is not None and self._file.tell() + len(line) > self._file_bytes:
                self._close_file()
                path.replace(folder / OLDER)
            if self._file is None:
                _whole_lines(path)  # or the line would be part of one that is torn
                self._file = path.open("ab", buffering=0)
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._is_failing = False
        except OSError as exc:
            if not self._is_failing:
                logger.warning("cannot write events to %s, keeping them in memory: %s", path, exc.strerror)
            self._is_failing = True
            self._close_file()
        return not self._is_failing

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _whole_lines(path: Path) -> bytes:
    """Return the content of the file, after a torn last line is cut off. Raises OSError."""
    if not path.exists():
        return b""
    with path.open("r+b") as file:
        data = file.read()
        whole = data.rfind(b"\n") + 1
        file.truncate(whole)
    return data[:whole]


def _events_in(path: Path) -> Iterator[tuple[ClusterEvent, int]]:
    """Yield the events of a file with their keys; skip lines that are none."""
    try:
        lines = _whole_lines(path).splitlines()
    except OSError as exc:
        logger.warning("cannot read the events in %s: %s", path, exc.strerror)
        return
    found = [event for line in lines if (event := _from_json(line)) is not None]
    if len(found) < len(lines):
        logger.warning("%s: skipped %d lines that are no events", path, len(lines) - len(found))
    yield from found
