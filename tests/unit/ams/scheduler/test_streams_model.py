"""Whatever workers and scheduler go through, each position is with one worker at a time and is committed once."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from geartrain.ams.scheduler.data_streams import StreamLeases
from geartrain.ams.storage.kv.store import MemoryStore
from geartrain.ams.values.errors import StaleClient
from geartrain.ams.values.scheduler_messages import Cursor, StreamLease

LEASE = 10.0
LENGTHS = (0, 1, 3, 4, 5)
"""Samples of each stream in an epoch."""
NAMES = st.sampled_from("abc")


@dataclass
class Reader:
    """A worker process: what it was told, and what it read."""

    incarnation: int
    lease_number: int = 0
    epoch: int = 0
    deadline: float = 0.0
    cursors: dict[int, Cursor] = field(default_factory=dict)
    read: list[tuple[int, int, int]] = field(default_factory=list)
    """(epoch, stream, position) since the last commit."""

    def take(self, lease: StreamLease) -> None:
        self.epoch, self.lease_number = lease.epoch, lease.lease_number
        self.cursors |= {stream: at for stream, at in lease.cursors.items() if stream not in self.cursors}

    def advance(self, stream: int, count: int) -> None:
        epoch, position = self.cursors[stream]
        if epoch != self.epoch:
            return  # it waits for the others
        end = min(position + count, LENGTHS[stream])
        self.read += [(epoch, stream, at) for at in range(position, end)]
        self.cursors[stream] = Cursor(epoch + 1, 0) if end == LENGTHS[stream] else Cursor(epoch, end)

    def forget(self) -> None:
        self.cursors.clear()
        self.read.clear()


class StreamMachine(RuleBasedStateMachine):
    """Workers a, b, c on five streams."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.incarnation = 0
        self.store = MemoryStore()
        self.readers: dict[str, Reader] = {}
        self.zombies: list[tuple[str, Reader]] = []
        self.committed: Counter[tuple[int, int, int]] = Counter()
        self.streams = StreamLeases(self.store, LEASE, clock=lambda: self.now)

    @rule(name=NAMES, num_workers=st.integers(1, 4))
    def lease(self, name: str, num_workers: int) -> None:
        if name not in self.readers:
            self.incarnation += 1
            self.readers[name] = Reader(self.incarnation)
        reader = self.readers[name]
        if reader.deadline < self.now:
            if reader.read:  # a commit of it may be under way
                self.zombies.append((name, replace(reader, cursors={**reader.cursors}, read=[*reader.read])))
            reader.forget()  # it may have lost them, and cannot know
        reader.take(
            self.streams.lease("job", name, reader.incarnation, num_streams=len(LENGTHS), num_workers=num_workers)
        )
        reader.deadline = self.now + LEASE

    @precondition(lambda self: self.readers)
    @rule(data=st.data(), count=st.integers(1, 5))
    def read(self, data: st.DataObject, count: int) -> None:
        reader = self.readers[data.draw(st.sampled_from(sorted(self.readers)))]
        for stream in list(reader.cursors):
            reader.advance(stream, count)

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.readers)))
        self._commit(name, self.readers[name])

    @precondition(lambda self: self.zombies)
    @rule(data=st.data())
    def a_zombie_commits(self, data: st.DataObject) -> None:
        self._commit(*data.draw(st.sampled_from(self.zombies)))

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.readers)))
        reader = self.readers.pop(name)
        try:
            self.streams.release("job", name, reader.incarnation, reader.cursors, None, reader.lease_number)
        except StaleClient:
            return
        self.committed.update(reader.read)

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def another_process_takes_its_place(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.readers)))
        self.zombies.append((name, self.readers.pop(name)))
        self.lease(name, 1)

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def the_scheduler_restarts(self) -> None:
        self.streams = StreamLeases(self.store, LEASE, clock=lambda: self.now)

    @invariant()
    def no_stream_is_with_two_workers(self) -> None:
        live = [stream for reader in self.readers.values() if reader.deadline >= self.now for stream in reader.cursors]
        assert len(live) == len(set(live))

    def teardown(self) -> None:
        """Somebody reads on to the end of the epoch that the furthest stream is in; then each epoch is exact."""
        self.now += LEASE + 1
        self.incarnation += 1
        last = Reader(self.incarnation)
        last.take(self.streams.lease("job", "last", self.incarnation, num_streams=len(LENGTHS)))
        self.now += LEASE / 2
        # One at the beginning of an epoch has ended the one before, and read nothing of this.
        end = max(cursor.epoch + (cursor.position > 0) for cursor in self.streams.cursors("job").values()) or 1
        while last.epoch < end:
            for stream in last.cursors:
                last.advance(stream, 2)
            self._commit("last", last)
        whole = Counter((e, s, p) for e in range(end) for s, n in enumerate(LENGTHS) for p in range(n))
        assert self.committed == whole

    def _commit(self, name: str, reader: Reader) -> None:
        try:
            renewal = self.streams.renew("job", name, reader.incarnation, reader.cursors, reader.lease_number)
        except StaleClient:
            reader.forget()
            return
        self.committed.update(reader.read)
        reader.read.clear()
        reader.epoch, reader.deadline = renewal.epoch, self.now + LEASE
        assert set(renewal.held) == set(reader.cursors)
        self.streams.release("job", name, reader.incarnation, {}, renewal.release)
        for stream in renewal.release:
            del reader.cursors[stream]


StreamMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestStreams = StreamMachine.TestCase
