"""Streams of data: every epoch is exact, whoever reads it and however often the readers change."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from geartrain.ams.client.factory import local
from geartrain.ams.values.errors import ConfigError, InvalidArgument
from geartrain.workers.data.streams import (
    NUM_STREAMS,
    JointOrder,
    Position,
    StreamOrder,
    StreamReader,
    stream_sizes,
)

START = {stream: Position() for stream in range(NUM_STREAMS)}


def test_every_epoch_shows_every_sample_once_in_a_new_order() -> None:
    order = JointOrder(num_samples=300, batch_size=7, seed=3)
    shown = torch.cat([order.indices(step) for step in range(90)])
    assert sorted(shown[:300].tolist()) == list(range(300))
    assert sorted(shown[300:600].tolist()) == list(range(300))
    assert shown[:300].tolist() != shown[300:600].tolist()


def test_the_batch_of_a_step_does_not_depend_on_the_steps_before() -> None:
    straight = JointOrder(num_samples=300, batch_size=70, seed=3)
    batches = [straight.indices(step) for step in range(10)]
    resumed = JointOrder(num_samples=300, batch_size=70, seed=3)
    assert torch.equal(resumed.indices(8), batches[8])
    assert torch.equal(resumed.indices(4), batches[4])
    assert not torch.equal(JointOrder(num_samples=300, batch_size=70, seed=4).indices(8), batches[8])


@given(st.integers(1, 400), st.integers(1, 50), st.integers(0, 2**31 - 1), st.integers(1, 70))
@settings(max_examples=50, deadline=None)
def test_the_joint_order_takes_from_each_stream_in_its_own_order(
    num_samples: int, batch_size: int, seed: int, num_streams: int
) -> None:
    joint = JointOrder(num_samples, batch_size, seed, num_streams)
    streams = StreamOrder(num_samples, seed, num_streams)
    step = num_samples // batch_size
    cursor = joint.cursor(step)
    consumed = Counter(torch.cat([joint.indices(s) for s in range(step)]).tolist() if step else [])
    epochs, rest = divmod(cursor["consumed"], num_samples)
    expected = Counter(
        int(index)
        for stream, part in enumerate(stream_sizes(rest, num_streams))
        for epoch in range(epochs + 1)
        for index in streams.indices(epoch, stream)[: part if epoch == epochs else None]
    )
    assert consumed == expected
    assert cursor["consumed"] == step * batch_size


def test_a_cursor_of_other_data_or_of_another_step_is_refused() -> None:
    order = JointOrder(num_samples=300, batch_size=7, seed=3)
    order.require(order.cursor(5), 5)
    with pytest.raises(ConfigError, match=r"35 samples, 6 steps of 7 consume 42.*do not belong together"):
        order.require(order.cursor(5), 6)
    with pytest.raises(ConfigError, match="made for 300 samples, seed 3 and 64 streams, not for 301"):
        JointOrder(num_samples=301, batch_size=7, seed=3).require(order.cursor(5), 5)
    with pytest.raises(ConfigError, match="made for None samples"):
        order.require({"seed": 3}, 5)


def letters(stream: int, num_streams: int, epoch: int) -> Iterator[str]:
    yield from (f"{number}/{epoch}" for number in range(stream, 150, num_streams))


@given(st.integers(0, 2**32), st.booleans())
@settings(max_examples=40, deadline=None)
def test_killed_and_regrouped_readers_consume_one_exact_epoch(seed: int, iterable: bool) -> None:
    dice = random.Random(seed)
    samples: list[str] = [f"{number}/0" for number in range(150)]
    saved, consumed = dict(START), Counter[str]()
    while any(at.epoch == 0 for at in saved.values()):
        num_workers = dice.randint(1, 5)
        for worker in range(num_workers):
            mine = {stream: saved[stream] for stream in range(worker, NUM_STREAMS, num_workers)}
            reader = StreamReader(letters if iterable else samples, mine, seed=1)
            read: Counter[str] = Counter()
            budget = dice.randint(0, 60)
            if all(at.epoch > 0 for at in mine.values()):
                continue
            for sample in reader:
                if budget == 0:
                    break  # dies with this sample in its hands
                budget -= 1
                read[sample] += 1
                reader.done()
                if dice.random() < 0.5:
                    saved.update(reader.positions)
                    consumed += read
                    read.clear()
            else:
                saved.update(reader.positions)
                consumed += read
    assert consumed == Counter(samples)


def test_a_stream_that_is_dropped_is_read_no_more_and_one_that_is_added_is() -> None:
    sizes = stream_sizes(150)
    reader = StreamReader([str(number) for number in range(150)], {0: Position(), 1: Position()})
    read = iter(reader)
    next(read)
    reader.drop([0])
    assert 0 not in reader.positions
    assert len(list(read)) == sizes[1]
    assert reader.positions == {1: Position(1)}
    reader.add({2: Position()})
    assert len(list(reader)) == sizes[2]
    assert reader.positions == {1: Position(1), 2: Position(1)}
    assert len(list(reader)) == sizes[1] + sizes[2]


@pytest.mark.parametrize("drops", [True, False])
def test_a_stream_that_comes_back_is_read_from_where_it_was_committed(drops: bool) -> None:
    samples = [str(number) for number in range(640)]
    reader = StreamReader(samples, {0: Position(), 1: Position()})
    read = iter(reader)
    committed = Counter(next(read) for _ in range(4))
    reader.done()
    positions = reader.positions
    for _ in range(3):
        next(read)  # read again by whoever reads on from what was committed
    if drops:
        reader.drop([0])  # its lease ran out, and was taken anew
    reader.add({0: positions[0]})
    list(read)
    consumed = Counter(list(reader)) + committed
    zeroth = [samples[int(index)] for index in StreamOrder(640, 0).indices(0, 0)]
    assert [consumed[sample] for sample in zeroth] == [1] * len(zeroth)


def test_a_position_may_be_in_the_middle_of_a_later_epoch() -> None:
    order = StreamOrder(1000, seed=5)
    reader = StreamReader(list(range(1000)), {7: Position(3, 10)}, seed=5)
    assert list(reader) == order.indices(3, 7)[10:].tolist()
    assert not torch.equal(order.indices(3, 7), order.indices(4, 7))
    with pytest.raises(InvalidArgument, match="stream 64 at epoch 0"):
        reader.add({64: (0, 0)})


def test_leased_streams_are_read_once_whoever_dies() -> None:
    samples = [str(number) for number in range(150)]
    consumed = Counter[str]()

    def read(worker: str, incarnation: int, most: int, *, commits: bool) -> None:
        streams = cluster.streams("job", worker=worker, num_workers=2, incarnation=incarnation)
        reader = StreamReader(samples, streams.lease().cursors, seed=4)
        read = list(islice(reader, most))
        reader.done()
        if commits:
            streams.commit(reader.positions)
            consumed.update(read)

    with local() as cluster:
        read("a", 1, 50, commits=True)
        read("a", 1, 10, commits=False)  # and dies
        read("b", 1, 150, commits=True)
        assert consumed != Counter(samples)
        read("a", 2, 150, commits=True)
    assert consumed == Counter(samples)
