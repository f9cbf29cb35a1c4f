"""Data as a fixed number of logical streams, so that a cursor is valid for any number of workers.

Sample i of N always belongs to the same stream; a stream's order in an epoch is a function of (seed, epoch, stream).
Workers read whole streams (:class:`StreamReader`), or all of them in turn as one sequence that ranks cut into equal
parts (:class:`JointOrder`). A cursor has each stream's epoch and number of consumed samples, or, of all in turn, the
number of consumed samples.

Memory: 8 · N bytes for the assignment and 8 · N for the orders of one epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from itertools import islice
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from geartrain.ams.values.errors import ConfigError, InvalidArgument
from geartrain.ams.values.text import counted

NUM_STREAMS = 64
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Position(NamedTuple):
    """Place in one stream: ``epoch`` passes are complete, and ``consumed`` samples of the present one."""

    epoch: int = 0
    consumed: int = 0


def stream_sizes(num_samples: int, num_streams: int = NUM_STREAMS) -> list[int]:
    """Return the samples of each stream; they differ by at most one."""
    return [len(range(stream, num_samples, num_streams)) for stream in range(num_streams)]


class StreamOrder:
    """Samples of each of N streams, in order. A function of the arguments alone."""

    def __init__(self, num_samples: int, seed: int, num_streams: int = NUM_STREAMS) -> None:
        if num_samples < 1 or num_streams < 1:
            raise ConfigError(f"{num_samples} samples cannot be split into {num_streams} streams; both must be >= 1")
        self.num_samples = num_samples
        self.num_streams = num_streams
        self.seed = seed

    @cached_property
    def _assigned(self) -> Tensor:
        # Neighbours in a dataset are often alike (sorted by class), and must not be in one stream.
        return torch.randperm(self.num_samples, generator=_generator(self.seed, -1, 0))

    def indices(self, epoch: int, stream: int) -> Tensor:
        """Return indices of the stream's samples in the order of that epoch: int64 [size of the stream]."""
        mine = self._assigned[stream :: self.num_streams]
        return mine[torch.randperm(len(mine), generator=_generator(self.seed, epoch, stream))]


class JointOrder:
    """All streams in turn, one sample each, as one endless sequence of batches; ranks take equal parts of a batch.

    The sequence does not depend on the number of ranks, so a job can resume with another number exactly. A batch may
    cross from one epoch into the next.
    """

    def __init__(self, num_samples: int, batch_size: int, seed: int, num_streams: int = NUM_STREAMS) -> None:
        self._streams = StreamOrder(num_samples, seed, num_streams)
        self._batch_size = batch_size
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.int64)

    def indices(self, step: int) -> Tensor:
        """Return indices [B] of the samples of ``step``, from 0."""
        position, end = step * self._batch_size, (step + 1) * self._batch_size
        num_samples = self._streams.num_samples
        parts = []
        while position < end:
            epoch, start = divmod(position, num_samples)
            stop = min(num_samples, start + end - position)
            parts.append(self._sequence(epoch)[start:stop])
            position += stop - start
        return torch.cat(parts)

    def epoch(self, step: int) -> int:
        """Return the epoch of the first sample of ``step``."""
        return step * self._batch_size // self._streams.num_samples

    def cursor(self, step: int) -> dict[str, int]:
        """Return the samples consumed by ``step`` steps, and the data; the place in each stream follows from them."""
        streams, consumed = self._streams, step * self._batch_size
        data = {"num_samples": streams.num_samples, "seed": streams.seed, "num_streams": streams.num_streams}
        return {**data, "consumed": consumed}

    def require(self, cursor: Mapping[str, int], step: int) -> None:
        """Raise ConfigError unless ``cursor`` is that of these data after ``step`` steps."""
        own = self.cursor(step)
        if {**cursor, "consumed": own["consumed"]} != own:
            raise ConfigError(
                f"the cursor was made for {_data(cursor)}, not for {_data(own)}: the data changed since. Bring the old "
                "ones back, or start a new run"
            )
        if cursor != own:
            raise ConfigError(
                f"the cursor has consumed {cursor.get('consumed')} samples, {counted(step, 'step')} of "
                f"{self._batch_size} consume {own['consumed']}: rows, backbone and data do not belong together"
            )

    def _sequence(self, epoch: int) -> Tensor:
        if epoch != self._epoch:
            order = torch.empty(self._streams.num_samples, dtype=torch.int64)
            for stream in range(self._streams.num_streams):
                order[stream :: self._streams.num_streams] = self._streams.indices(epoch, stream)
            self._order, self._epoch = order, epoch
        return self._order


def _data(cursor: Mapping[str, int]) -> str:
    samples, seed, streams = (cursor.get(key) for key in ("num_samples", "seed", "num_streams"))
    return f"{samples} samples, seed {seed} and {streams} streams"


class Indexable(Protocol[T_co]):
    """A map-style dataset."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, index: int, /) -> T_co:
        """Return one sample."""


OpenStream = Callable[[int, int, int], Iterable[T]]
"""``(stream, num_streams, epoch)`` -> the samples of that stream, always the same ones in the same order."""


class StreamReader(Generic[T]):
    """Reads some streams of a dataset, one sample of each in turn, and tracks the consumed samples.

    A sample counts as consumed when the next one is requested, or at :meth:`done`: a sample that was handed out to a
    process that then died is read again. Not thread-safe. Reads one epoch, then ends; the next iteration reads the next
    one.
    """

    def __init__(
        self,
        data: Indexable[T] | OpenStream[T],
        positions: Mapping[int, tuple[int, int]],
        *,
        seed: int = 0,
        num_streams: int = NUM_STREAMS,
    ) -> None:
        """``positions`` are the streams to read, by number, with the start in each: (epoch, samples consumed).

        ``data`` is a map-style dataset, shuffled here, or a function that opens one stream of iterable data. With a
        function, consumed samples are read and dropped when a stream is opened in its middle.
        """
        self._data = data
        self._num_streams = num_streams
        self._positions: dict[int, Position] = {}
        self._turns: dict[int, Iterator[T]] = {}
        """Streams of the present iteration, each with its remaining samples."""
        self.add(positions)
        self._order = None if callable(data) else StreamOrder(len(data), seed, num_streams)
        self._handed_out: int | None = None
        """Stream of the sample that the caller holds."""

    @property
    def positions(self) -> dict[int, Position]:
        """Consumed part of each stream."""
        return dict(self._positions)

    def done(self) -> None:
        """Mark the sample handed out last as consumed."""
        if self._handed_out is not None:
            at = self._positions[self._handed_out]
            self._positions[self._handed_out] = Position(at.epoch, at.consumed + 1)
            self._handed_out = None

    def drop(self, streams: Iterable[int]) -> None:
        """Stop reading these streams: their lease has ended."""
        for stream in streams:
            self._positions.pop(stream, None)
            self._turns.pop(stream, None)  # it may come back at another position
            if self._handed_out == stream:
                self._handed_out = None

    def add(self, positions: Mapping[int, tuple[int, int]]) -> None:
        """Read these streams, too, from the next iteration on; one that is read already moves to the new position."""
        for stream, (epoch, consumed) in positions.items():
            if not (0 <= stream < self._num_streams and epoch >= 0 and consumed >= 0):
                raise InvalidArgument(
                    f"stream {stream} at epoch {epoch}, {consumed} consumed: there are streams 0 … "
                    f"{self._num_streams - 1}, and neither number is below 0"
                )
        added = {stream: Position(*at) for stream, at in positions.items()}
        self.drop([stream for stream, at in added.items() if self._positions.get(stream, at) != at])
        self._positions = dict(sorted({**self._positions, **added}.items()))

    def __iter__(self) -> Iterator[T]:
        """Yield the rest of the lowest epoch of any stream."""
        self._handed_out = None  # of an abandoned iteration: it is read again
        epoch = min((at.epoch for at in self._positions.values()), default=0)
        turns = {stream: self._open(stream) for stream, at in self._positions.items() if at.epoch == epoch}
        self._turns = turns
        while turns:
            for stream, samples in list(turns.items()):
                if stream not in turns:
                    continue  # dropped since
                try:
                    sample = next(samples)
                except StopIteration:
                    self._positions[stream] = Position(epoch + 1)
                    del turns[stream]
                    continue
                self._handed_out = stream
                yield sample
                self.done()

    def _open(self, stream: int) -> Iterator[T]:
        at = self._positions[stream]
        if self._order is not None:
            data: Any = self._data
            indices = self._order.indices(at.epoch, stream)[at.consumed :]
            return (data[int(index)] for index in indices)
        opened: Any = self._data
        return islice(iter(opened(stream, self._num_streams, at.epoch)), at.consumed, None)


def _generator(seed: int, epoch: int, stream: int) -> torch.Generator:
    mixed = np.random.SeedSequence([seed, epoch + 1, stream]).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(mixed[0]) >> 1)
