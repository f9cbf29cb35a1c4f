"""Which rows a stream has: each row of an epoch in one stream, wherever reading begins."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geartrain.ams.values.errors import InvalidArgument
from geartrain.workers.samples.order import EpochOrder


def rows_of(order: EpochOrder, starts: list[int], epoch: int, stream: int, position: int) -> list[int]:
    rows: list[int] = []
    for window in order.windows(epoch, stream, position):
        own = [starts[part] + row for part, first, end in window.pieces for row in range(first, end)]
        mixed = own if window.random is None else [own[place] for place in window.random.permutation(len(own))]
        rows += mixed[window.skip :]
    return rows


@given(
    parts=st.lists(st.integers(0, 9), max_size=8),
    seed=st.none() | st.integers(0, 3),
    num_streams=st.integers(1, 7),
    window=st.integers(1, 12),
    epoch=st.integers(0, 2),
    skip=st.integers(0, 20),
)
def test_every_row_is_in_one_stream_and_a_position_skips_so_many(
    parts: list[int], seed: int | None, num_streams: int, window: int, epoch: int, skip: int
) -> None:
    starts = [sum(parts[:place]) for place in range(len(parts))]
    order = EpochOrder(parts, seed=seed, num_streams=num_streams, window_rows=window)
    streams = [rows_of(order, starts, epoch, stream, 0) for stream in range(num_streams)]
    assert [len(rows) for rows in streams] == [order.stream_rows(stream) for stream in range(num_streams)]
    assert max(map(len, streams)) - min(map(len, streams)) <= 1
    together = [row for rows in streams for row in rows]
    assert sorted(together) == list(range(sum(parts)))
    if seed is None:
        assert together == sorted(together)
    for stream, rows in enumerate(streams):
        begin = min(skip, len(rows))
        assert rows_of(order, starts, epoch, stream, begin) == rows[begin:]


def test_a_position_beyond_the_end_is_of_other_data() -> None:
    order = EpochOrder([10], seed=None, num_streams=2, window_rows=4)
    with pytest.raises(InvalidArgument, match=r"position 6 of stream 1 is beyond its 5 samples.*other data"):
        next(order.windows(0, 1, 6))


def test_no_more_than_a_window_is_read_at_once_where_nothing_is_mixed() -> None:
    order = EpochOrder([10, 3], seed=None, num_streams=1, window_rows=4)
    found = [window.pieces for window in order.windows(0, 0, 1)]
    assert found == [((0, 1, 5),), ((0, 5, 9),), ((0, 9, 10),), ((1, 0, 3),)]
