"""Log of the rows that a client's writes touch, for readers that reuse rows read before."""

from __future__ import annotations

import threading
import weakref
from collections import deque

from geartrain.ams.values.specs import Ids


class WriteLog:
    """Row writes of one client, numbered as they begin. Thread-safe.

    Cost: none without readers; else 8 bytes an id of a write, until all readers have forgotten it.
    """

    def __init__(self) -> None:
        self.readers: list[weakref.ref[WriteReader]] = []
        """Readers, which receive every write."""
        self._lock = threading.Lock()
        self._next = 0
        self._open: dict[int, tuple[str, Ids]] = {}
        """Writes in progress: table and ids."""

    def reader(self) -> WriteReader:
        """Return a reader of every write that begins from now on; it is kept while the caller holds it.

        It also knows writes in progress that began while there was a reader.
        """
        made = WriteReader(self)
        with self._lock:
            made.entries.extend((number, *touches) for number, touches in self._open.copy().items())
            self.readers.append(weakref.ref(made))
        return made

    def start(self, table: str, ids: Ids) -> int | None:
        """Record a write that is about to touch rows. Returns its number; None if there is no reader."""
        if not self.readers:
            return None
        ids = ids.copy()  # the caller's array is reused before readers have forgotten it
        with self._lock:
            number = self._next
            self._open[number] = (table, ids)
            self._next += 1
            alive = [(ref, reader) for ref in self.readers if (reader := ref()) is not None]
            for _, reader in alive:
                reader.entries.append((number, table, ids))
            self.readers = [ref for ref, _ in alive]
        return number

    def finish(self, number: int) -> None:
        """Record that a write was applied or abandoned. Does not block: the garbage collector calls it."""
        self._open.pop(number, None)

    def mark(self, reader: WriteReader) -> int:
        """Return the number below which all writes are over: rows that the reader pulls from now on contain them."""
        with self._lock:
            mark = self._all_over_below()
            reader.marks.append(mark)
            return mark

    def _all_over_below(self) -> int:
        return min(list(self._open), default=self._next)

    def forget(self, reader: WriteReader, mark: int) -> None:
        """Drop a mark of a reader, and writes that all its other rows contain."""
        with self._lock:
            reader.marks.remove(mark)
            first = min(reader.marks, default=self._all_over_below())
            while reader.entries and reader.entries[0][0] < first:
                reader.entries.popleft()

    def copy_of(self, reader: WriteReader) -> list[tuple[int, str, Ids]]:
        """Return the writes recorded for a reader."""
        with self._lock:
            return list(reader.entries)


class WriteReader:
    """Reader of the write log: the rows touched since it read some. Thread-safe."""

    def __init__(self, log: WriteLog) -> None:
        self._log = log
        self.entries: deque[tuple[int, str, Ids]] = deque()
        """Number, table and ids of writes, in order. Owned by the log."""
        self.marks: list[int] = []
        """Marks of rows that may still be asked about. Owned by the log."""

    def mark(self) -> int:
        """Return a mark, to be taken before rows are read and passed to :meth:`touched`."""
        return self._log.mark(self)

    def touched(self, mark: int, *, missing: int = 0) -> dict[str, list[Ids]]:
        """Return the ids of writes, by table, that rows read after ``mark`` may lack; without the last ``missing``
        writes of each table.
        """
        by_table: dict[str, list[Ids]] = {}
        for number, table, ids in self._log.copy_of(self):
            if number >= mark:
                by_table.setdefault(table, []).append(ids)
        return {table: each[: len(each) - missing] for table, each in by_table.items() if len(each) > missing}

    def forget(self, mark: int) -> None:
        """Drop a mark: rows read after it will not be asked about again."""
        self._log.forget(self, mark)
