"""Which rows the writes of a client touch, for whoever goes on with rows that it has read before."""

from __future__ import annotations

import threading
import weakref
from collections import deque

from geartrain.ams.values.specs import Ids


class WriteLog:
    """The writes of rows of one client, numbered as they begin. Thread-safe.

    Cost: none while nobody reads it; else 8 bytes an id of a write, until all readers have forgotten it.
    """

    def __init__(self) -> None:
        self.readers: list[weakref.ref[WriteReader]] = []
        """Those who are told."""
        self._lock = threading.Lock()
        self._next = 0
        self._open: dict[int, tuple[str, Ids]] = {}
        """Those that have begun and are not over: table and ids."""

    def reader(self) -> WriteReader:
        """Return one who is told of every write that begins from now on, as long as somebody holds it.

        It knows of those that are not over, too, if they began while somebody read.
        """
        made = WriteReader(self)
        with self._lock:
            made.entries.extend((number, *touches) for number, touches in self._open.copy().items())
            self.readers.append(weakref.ref(made))
        return made

    def start(self, table: str, ids: Ids) -> int | None:
        """A write is about to touch rows of a table. Returns its number; None: nobody wants to know."""
        if not self.readers:
            return None
        ids = ids.copy()  # the caller's are its own again before readers have forgotten them
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
        """It was applied, or given up. Waits for nothing: the garbage collector calls it."""
        self._open.pop(number, None)

    def mark(self, reader: WriteReader) -> int:
        """The number below which all writes are over: they are in every row that the reader pulls from now on."""
        with self._lock:
            mark = self._all_over_below()
            reader.marks.append(mark)
            return mark

    def _all_over_below(self) -> int:
        return min(list(self._open), default=self._next)

    def forget(self, reader: WriteReader, mark: int) -> None:
        """A reader is done with rows of this mark, and has no use for writes that all its other rows have."""
        with self._lock:
            reader.marks.remove(mark)
            first = min(reader.marks, default=self._all_over_below())
            while reader.entries and reader.entries[0][0] < first:
                reader.entries.popleft()

    def copy_of(self, reader: WriteReader) -> list[tuple[int, str, Ids]]:
        """What a reader has been told of."""
        with self._lock:
            return list(reader.entries)


class WriteReader:
    """Knows which rows were touched since it read some. Thread-safe."""

    def __init__(self, log: WriteLog) -> None:
        self._log = log
        self.entries: deque[tuple[int, str, Ids]] = deque()
        """Number, table and ids of writes, as they began. The log's."""
        self.marks: list[int] = []
        """Those of rows that will be asked about. The log's."""

    def mark(self) -> int:
        """To be taken before rows are read: see :meth:`touched`."""
        return self._log.mark(self)

    def touched(self, mark: int, *, missing: int = 0) -> dict[str, list[Ids]]:
        """The ids of writes, by table, that rows read after ``mark`` was taken may lack; but for the last ``missing``
        writes of each table.
        """
        by_table: dict[str, list[Ids]] = {}
        for number, table, ids in self._log.copy_of(self):
            if number >= mark:
                by_table.setdefault(table, []).append(ids)
        return {table: each[: len(each) - missing] for table, each in by_table.items() if len(each) > missing}

    def forget(self, mark: int) -> None:
        """Rows read after ``mark`` was taken will not be asked about again."""
        self._log.forget(self, mark)
