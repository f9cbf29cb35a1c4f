"""Batches of one size from the streams of a source, with cursors after each batch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

import numpy as np

from geartrain.ams.values.specs import Ids
from geartrain.workers.data.streams import Position
from geartrain.workers.samples.batches import SampleBatch
from geartrain.workers.samples.order import EpochOrder, Window
from geartrain.workers.samples.rows import Rows, SampleRows
from geartrain.workers.samples.source import SampleSource

_PARTS_KEPT = 2
"""Cached parts: neighbouring streams and windows share one."""


class StreamBatches(Protocol):
    """Reader of streams in batches."""

    @property
    def positions(self) -> Mapping[int, Position]:
        """Position of each stream after the last batch handed out."""

    def add(self, positions: Mapping[int, tuple[int, int]]) -> None:
        """Read these streams, too, from these positions."""

    def drop(self, streams: Iterable[int]) -> None:
        """Stop reading these streams."""

    def next_batch(self, epoch: int) -> SampleBatch | None:
        """Return the next samples of an epoch; None: the streams have none (now)."""

    @property
    def has_more(self) -> bool:
        """Whether there may be samples of the epoch, even if :meth:`next_batch` has just returned None."""

    def is_done(self, epoch: int, cursors: Callable[[], Mapping[int, tuple[int, int]]]) -> bool:
        """Return whether the job is at its end. ``cursors`` returns the committed cursors of all its streams."""

    def close(self) -> None:
        """Close open files and connections."""


class FileBatches:
    """Reads the streams of a source of files, one after another, so that one part at a time is in memory."""

    has_more = False

    def __init__(
        self,
        source: SampleSource,
        order: EpochOrder,
        *,
        batch_size: int,
        drop_last: bool,
        epochs: int | None = None,
        finish: Callable[[SampleBatch], SampleBatch] = lambda batch: batch,
    ) -> None:
        """``epochs`` are those of the job; None: endless. ``finish`` processes every batch at the end."""
        self._source, self._order, self._epochs, self._finish = source, order, epochs, finish
        self._batch_size, self._drop_last = batch_size, drop_last
        self._parts: OrderedDict[int, Rows] = OrderedDict()
        self._positions: dict[int, Position] = {}
        self._open: tuple[int, int, Iterator[Window]] | None = None
        """Stream being read, its epoch, and its remaining windows after :attr:`_rows`."""
        self._rows: SampleRows | None = None

    @property
    def positions(self) -> dict[int, Position]:
        """Positions; a stream that has ended epoch e is at (e + 1, 0)."""
        return dict(self._positions)

    def add(self, positions: Mapping[int, tuple[int, int]]) -> None:
        self.drop(positions)
        self._positions = dict(
            sorted({**self._positions, **{stream: Position(*at) for stream, at in positions.items()}}.items())
        )

    def drop(self, streams: Iterable[int]) -> None:
        for stream in streams:
            self._positions.pop(stream, None)
            if self._open is not None and self._open[0] == stream:
                self._open = self._rows = None

    def is_done(self, epoch: int, cursors: Callable[[], Mapping[int, tuple[int, int]]]) -> bool:
        del cursors
        return self._epochs is not None and epoch >= self._epochs

    def close(self) -> None:
        self.drop(list(self._positions))
        self._parts.clear()

    def next_batch(self, epoch: int) -> SampleBatch | None:
        """Return the next batch. None: the streams have ended the epoch; all before :attr:`positions` was then read, or
        dropped. Raises SourceDamaged; then the samples before it are read again.
        """
        before = dict(self._positions)
        try:
            return self._next_batch(epoch)
        except BaseException:
            self._positions, self._open, self._rows = before, None, None
            raise

    def _next_batch(self, epoch: int) -> SampleBatch | None:
        taken: list[SampleRows] = []
        streams: list[Ids] = []
        places: list[Ids] = []
        cursors: dict[int, tuple[int, int]] = {}
        missing = self._batch_size
        for stream, at in list(self._positions.items()):
            if at.epoch != epoch:
                continue
            end = self._order.stream_rows(stream)
            while missing and at.consumed < end:
                rows = self._take(stream, at, missing)
                taken.append(rows)
                streams.append(np.full(rows.num_rows, stream))
                places.append(np.arange(at.consumed, at.consumed + rows.num_rows))
                missing -= rows.num_rows
                at = Position(epoch, at.consumed + rows.num_rows)
            if at.consumed == end:
                at = Position(epoch + 1, 0)
            self._positions[stream] = cursors[stream] = at
            if not missing:
                break
        if not taken or (missing and self._drop_last):
            return None
        batch = taken[0].joined(taken[1:]).batch(cursors)
        batch.places = np.concatenate(streams), np.concatenate(places)
        return self._finish(batch)

    def _take(self, stream: int, at: Position, most: int) -> SampleRows:
        if self._open is None or self._open[:2] != (stream, at.epoch):
            self._open, self._rows = (stream, at.epoch, self._order.windows(at.epoch, stream, at.consumed)), None
        if self._rows is None or not self._rows.num_rows:
            self._rows = self._read(next(self._open[2]))
        taken = self._rows.slice(0, most)
        self._rows = self._rows.slice(taken.num_rows, self._rows.num_rows)
        return taken

    def _read(self, window: Window) -> SampleRows:
        pieces = [self._part(part).slice(first, end - first) for part, first, end in window.pieces]
        rows = pieces[0].joined(pieces[1:])
        return rows if window.random is None else rows.shuffled(window.random).slice(window.skip, rows.num_rows)

    def _part(self, part: int) -> Rows:
        if part not in self._parts:
            self._parts[part] = self._source.read(part)
            if len(self._parts) > _PARTS_KEPT:
                self._parts.popitem(last=False)
        self._parts.move_to_end(part)
        return self._parts[part]
