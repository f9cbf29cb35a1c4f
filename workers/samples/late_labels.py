"""Labels that arrive after their samples: impressions wait for their click, by the times of both."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from geartrain.ams.observe.metrics import Metric, register_source
from geartrain.ams.values.arguments import integer, real_number
from geartrain.ams.values.errors import ColumnMismatch, InvalidArgument, SourceDamaged, SourceError
from geartrain.ams.values.specs import Ids
from geartrain.workers.data.streams import Position
from geartrain.workers.samples.batches import SampleBatch, joined
from geartrain.workers.samples.reader import StreamBatches

_NEVER = float("-inf")


@dataclass(frozen=True, kw_only=True)
class LateLabels:
    """Two kinds of rows make one sample: an impression with ``click`` 0, and later its click, a row with ``click`` 1.

    An impression is returned once a row of its stream is more than ``window_seconds`` newer, with ``click`` 1 if a
    click with its id came after it by then. A click needs no other columns. Impressions keep the order of their stream;
    waiting ones are read again after a restart, so that none is lost or returned twice.
    """

    window_seconds: float
    """Time to wait for a click, by the times in the rows."""
    id: str = "impression"
    """Column that joins them, of single values."""
    time: str = "time"
    """Column of the times, in seconds."""
    click: str = "click"
    max_waiting: int = 1_000_000
    """Most waiting impressions of a stream: beyond that the oldest is returned as it is."""

    def __post_init__(self) -> None:
        """Raise InvalidArgument that names the value."""
        if not 0 < real_number("window_seconds", self.window_seconds) < math.inf:
            raise InvalidArgument(f"window_seconds is {self.window_seconds}; it must be above 0, and finite")
        integer("max_waiting", self.max_waiting, 1)


class _Waiting:
    """Waiting impressions of one stream, oldest first."""

    def __init__(self) -> None:
        self.parts: deque[SampleBatch] = deque()
        self.first = 0
        """Number of the oldest among all that came."""
        self.places: npt.NDArray[np.int64] = np.empty(0, np.int64)
        """Position of each in the stream."""
        self.times: npt.NDArray[np.float64] = np.empty(0)
        self.clicked: npt.NDArray[np.bool_] = np.empty(0, np.bool_)
        self.number_of: dict[int, int] = {}
        """Number of the newest impression with an id."""
        self.newest = _NEVER
        """Latest time of all rows so far."""


class LabelledBatches:
    """Reads the streams of another reader, and returns impressions with their labels."""

    def __init__(
        self,
        reader: StreamBatches,
        labels: LateLabels,
        *,
        batch_size: int,
        finish: Callable[[SampleBatch], SampleBatch] = lambda batch: batch,
    ) -> None:
        self._reader, self._labels, self._batch_size, self._finish = reader, labels, batch_size, finish
        self._waiting: dict[int, _Waiting] = {}
        self._epoch = 0
        self._given: dict[int, Position] = {}
        self.late_clicks = self.forced = 0
        """Clicks without a waiting impression; impressions returned before their time."""
        register_source(self)

    def metrics(self) -> Iterator[Metric]:
        """Yield the number of waiting impressions, and the counts of rows outside the window."""
        waiting = sum(len(of.times) for of in self._waiting.copy().values())
        yield Metric("stream_waiting_impressions", "gauge", "Impressions that wait for a click.", (), [((), waiting)])
        what = "Clicks that found no impression waiting."
        yield Metric("stream_late_clicks_total", "counter", what, (), [((), self.late_clicks)])
        what = "Impressions emitted before their time, as too many waited."
        yield Metric("stream_forced_impressions_total", "counter", what, (), [((), self.forced)])

    @property
    def positions(self) -> dict[int, Position]:
        """Position of the oldest waiting impression of each stream."""
        return {stream: self._position(stream, at) for stream, at in self._reader.positions.items()}

    def _position(self, stream: int, read: Position) -> Position:
        waiting = self._waiting[stream]
        return Position(self._epoch, int(waiting.places[0])) if len(waiting.places) else read

    @property
    def has_more(self) -> bool:
        return self._reader.has_more or any(len(waiting.times) for waiting in self._waiting.values())

    def is_done(self, epoch: int, cursors: Callable[[], Mapping[int, tuple[int, int]]]) -> bool:
        return not any(len(of.times) for of in self._waiting.values()) and self._reader.is_done(epoch, cursors)

    def add(self, positions: Mapping[int, tuple[int, int]]) -> None:
        self._waiting.update({stream: _Waiting() for stream in positions})
        self._reader.add(positions)

    def drop(self, streams: Iterable[int]) -> None:
        streams = list(streams)
        self._reader.drop(streams)
        for stream in streams:
            self._waiting.pop(stream, None)

    def close(self) -> None:
        self._reader.close()
        self._waiting.clear()

    def next_batch(self, epoch: int) -> SampleBatch | None:
        """Return the next batch. If no rows come now, ready impressions make a batch, full or not; at the end of the
        streams all waiting ones do.
        """
        if epoch != self._epoch:  # nothing waits by now, and times start anew
            self._epoch, self._waiting = epoch, {stream: _Waiting() for stream in self._waiting}
        while sum((ready := self._ready()).values()) < self._batch_size:
            before = self.positions
            if (batch := self._reader.next_batch(epoch)) is None:
                if not self._reader.has_more:
                    self._end()
                    ready = self._ready()
                break
            try:
                self._take(batch)
            except SourceError:
                self.add(before)  # a retry reads again from the oldest waiting impression
                raise
        return self._batch(ready)

    def _end(self) -> None:
        """Record that no further click comes."""
        for waiting in self._waiting.values():
            waiting.newest = float("inf")

    def _take(self, batch: SampleBatch) -> None:
        """Add impressions of a batch, and match its clicks."""
        labels = self._labels
        for name in (labels.id, labels.time, labels.click):
            if not isinstance(batch.get(name), Tensor) or batch[name].ndim != 1:  # type: ignore[union-attr]
                raise ColumnMismatch(
                    f"labels that come late need a column {name!r} of single values; the samples have "
                    f"{', '.join(map(repr, batch))}"
                )
        assert batch.places is not None
        for stream in np.unique(batch.places[0]).tolist():
            rows = np.flatnonzero(batch.places[0] == stream)
            self._accept_rows(self._waiting[stream], batch, rows, batch.places[1][rows])

    def _accept_rows(
        self, waiting: _Waiting, batch: SampleBatch, rows: npt.NDArray[np.int64], places: npt.NDArray[np.int64]
    ) -> None:
        ids, times, clicks = (
            np.asarray(batch[name])[rows] for name in (self._labels.id, self._labels.time, self._labels.click)
        )
        if len(bad := np.flatnonzero(~np.isfinite(times.astype(np.float64)))):
            raise SourceDamaged(
                f"{self._labels.time!r} is {times[bad[0]]} at position {places[bad[0]]} of a stream: labels that "
                "come late need finite times"
            )
        newest = np.maximum.accumulate(np.append(waiting.newest, times.astype(np.float64)))
        number = waiting.first + len(waiting.times)
        is_click = clicks > 0
        shown = np.flatnonzero(~is_click)
        waiting.parts.append(batch.take(torch.from_numpy(rows[shown])))
        waiting.places = np.append(waiting.places, places[shown])
        waiting.times = np.append(waiting.times, times[shown].astype(np.float64))
        waiting.clicked = np.append(waiting.clicked, np.zeros(len(shown), np.bool_))
        numbers, begun = list(zip(ids[shown].tolist(), range(number, number + len(shown)), strict=True)), 0
        for clicks_before, row in enumerate(np.flatnonzero(is_click).tolist()):
            before = row - clicks_before
            waiting.number_of.update(numbers[begun:before])
            begun = before
            at = waiting.number_of.get(int(ids[row]), -1) - waiting.first
            if at >= 0 and max(newest[row], times[row]) <= waiting.times[at] + self._labels.window_seconds:
                waiting.clicked[at] = True
            else:
                self.late_clicks += 1
        waiting.number_of.update(numbers[begun:])
        waiting.newest = float(newest[-1])

    def _ready(self) -> dict[int, int]:
        """Return the number of impressions of each stream that are ready."""
        found: dict[int, int] = {}
        for stream, waiting in self._waiting.items():
            is_open = waiting.newest <= waiting.times + self._labels.window_seconds
            found[stream] = int(is_open.argmax()) if is_open.any() else len(is_open)
            found[stream] = max(found[stream], len(is_open) - self._labels.max_waiting)
        return found

    def _batch(self, ready: Mapping[int, int]) -> SampleBatch | None:
        parts: list[SampleBatch] = []
        cursors: dict[int, Any] = {}
        streams: list[Ids] = []
        places: list[Ids] = []
        missing, read = self._batch_size, self._reader.positions
        for stream, count in ready.items():
            if count and missing:
                given = min(count, missing)
                streams.append(np.full(given, stream))
                places.append(self._waiting[stream].places[:given])
                parts.append(self._given_of(self._waiting[stream], given))
                missing -= given
                cursors[stream] = self._position(stream, read[stream])
        if not parts:
            return None
        batch = joined(parts, cursors)
        batch.places = np.concatenate(streams), np.concatenate(places)
        return self._finish(batch)

    def _given_of(self, waiting: _Waiting, count: int) -> SampleBatch:
        """Remove and return the ``count`` oldest."""
        parts: list[SampleBatch] = []
        missing = count
        while missing:
            part = waiting.parts.popleft()
            if part.num_samples > missing:
                waiting.parts.appendleft(part.take(torch.arange(missing, part.num_samples)))
                part = part.take(torch.arange(missing))
            parts.append(part)
            missing -= part.num_samples
        given = joined(parts, {})
        self.forced += int((waiting.newest <= waiting.times[:count] + self._labels.window_seconds).sum())
        clicks = given[self._labels.click]
        assert isinstance(clicks, Tensor)
        given[self._labels.click] = torch.from_numpy(waiting.clicked[:count]).to(clicks.dtype)
        for number, id_ in enumerate(np.asarray(given[self._labels.id]).tolist(), waiting.first):
            if waiting.number_of.get(id_) == number:
                del waiting.number_of[id_]
        waiting.first += count
        waiting.places, waiting.times = waiting.places[count:], waiting.times[count:]
        waiting.clicked = waiting.clicked[count:]
        return given
