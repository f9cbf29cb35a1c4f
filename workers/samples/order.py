"""Order of the rows of a data stream, as a function of (seed, epoch, stream).

The parts of a source are concatenated, in each epoch in another order by the seed; these N samples are cut into streams
of equal length (to within one). So every stream has rows, however few the parts, and parts that cross a cut are read by
both sides. Within a stream, windows of ``window_rows`` rows are shuffled. A position is found without reading what
comes before it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from geartrain.ams.values.errors import InvalidArgument


class Piece(NamedTuple):
    """Rows of one part."""

    part: int
    first: int
    end: int


class Window(NamedTuple):
    """Rows that are read together."""

    pieces: tuple[Piece, ...]
    random: np.random.Generator | None
    """Generator that shuffles them; None: in order."""
    skip: int
    """Number of shuffled rows that were read before."""


class EpochOrder:
    """Rows of every stream in every epoch. A function of the arguments alone."""

    def __init__(
        self, part_rows: Sequence[int], *, seed: int | None, num_streams: int, window_rows: int, unit_rows: int = 1
    ) -> None:
        """``seed`` None: without shuffling, and streams one after another are the rows in the source's order. All
        streams but the last have a multiple of ``unit_rows``.
        """
        self._part_rows = np.asarray(part_rows, np.int64)
        self._seed, self._window_rows, self._unit_rows = seed, window_rows, unit_rows
        self.num_streams = num_streams
        self.num_rows = int(self._part_rows.sum())
        self._epoch = -1
        self._parts: list[int] = []
        self._ends: list[int] = []

    def stream_rows(self, stream: int) -> int:
        """Return the rows of a stream in each epoch."""
        return self._start(stream + 1) - self._start(stream)

    def _start(self, stream: int) -> int:
        units = -(-self.num_rows // self._unit_rows)
        return min(self.num_rows, units * stream // self.num_streams * self._unit_rows)

    def windows(self, epoch: int, stream: int, position: int) -> Iterator[Window]:
        """Yield the rest of a stream from ``position`` on. Raises InvalidArgument for a position beyond its end."""
        start, end = self._start(stream), self._start(stream + 1)
        if not 0 <= position <= end - start:
            raise InvalidArgument(
                f"position {position} of stream {stream} is beyond its {end - start} samples: the cursor was made for "
                "other data. Bring the old ones back, or choose another job name"
            )
        at = start + position
        while at < end:
            if self._seed is None:
                pieces = self._pieces(epoch, at, min(end, at + self._window_rows))[:1]
                yield Window(pieces, None, 0)
                at += pieces[0].end - pieces[0].first
                continue
            number, skip = divmod(at - start, self._window_rows)
            first = start + number * self._window_rows
            last = min(first + self._window_rows, end)
            yield Window(self._pieces(epoch, first, last), _generator(self._seed, epoch, stream, number), skip)
            at = last

    def _pieces(self, epoch: int, first: int, end: int) -> tuple[Piece, ...]:
        """Return the rows from ``first`` to ``end`` of the epoch."""
        if epoch != self._epoch:
            order: npt.NDArray[np.int64] = np.arange(len(self._part_rows))
            if self._seed is not None:
                order = _generator(self._seed, epoch).permutation(len(order))
            self._parts, self._ends = order.tolist(), np.cumsum(self._part_rows[order]).tolist()
            self._epoch = epoch
        found: list[Piece] = []
        place = bisect_right(self._ends, first)
        while first < end:
            part, part_end = self._parts[place], self._ends[place]
            part_start = part_end - int(self._part_rows[part])
            until = min(part_end, end)
            if until > first:
                found.append(Piece(part, first - part_start, until - part_start))
            first, place = until, place + 1
        return tuple(found)


def _generator(seed: int, *numbers: int) -> np.random.Generator:
    return np.random.default_rng([seed, *numbers])
