"""Holders of the shards: processes, from registration on, while their heartbeats renew their leases."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

from geartrain.ams.observe.event_log import MAX_KEPT, EventLog
from geartrain.ams.scheduler.pauses import PauseDetector
from geartrain.ams.scheduler.state import Member, State
from geartrain.ams.values.errors import ClusterNotReady, InvalidArgument, ShardHeld
from geartrain.ams.values.scheduler_messages import ClusterEvent, ShardCondition, ShardEntry
from geartrain.ams.values.text import counted

_SILENT_BEATS = 3
_COUNT_SECONDS = 1.0
_BEATS_PER_SECOND = 33
"""Heartbeats per second of all shards: each costs the scheduler half a millisecond of a core, mostly gRPC's."""


class Membership:
    """Leases of the members in ``state``; changes only the times of their last heartbeats. Not thread-safe."""

    def __init__(self, state: State, num_shards: int, lease_seconds: float, clock: Callable[[], float]) -> None:
        self._state = state
        self._num_shards = num_shards
        self._lease_seconds = lease_seconds
        self._clock = clock
        self._started = clock()
        self._stops = PauseDetector(lease_seconds / 2, clock, self._forgive_silence)
        self._pools: Counter[str] = Counter()
        """Number of shards in each memory pool."""
        self._counted = -math.inf
        self._forgive_silence()  # they may live: no heartbeat could arrive without a scheduler

    def pulse(self) -> None:
        """Record that the scheduler runs."""
        self._stops.pulse()

    def notice_own_stop(self) -> None:
        """Extend all leases if the scheduler itself was paused."""
        self._stops.notice()

    def holder_at(self, address: str, shard: int | None, incarnation: int) -> int | None:
        """Return the incarnation of a possibly live process at the address of a newcomer that wants ``shard`` (None:
        any).
        """
        for number in range(self._num_shards) if shard is None else (shard,):
            member = self._state.members.get(number)
            if member is not None and member.address == address and not self.is_free(number, incarnation):
                return member.incarnation
        return None

    def choose(
        self, shard: int | None, address: str, incarnation: int, *, has_past: bool, gone: int | None = None
    ) -> int:
        """Return the shard that a process may hold: ``shard``, or if it is None a free one.

        ``has_past`` says whether it comes from an earlier scheduler; ``gone`` is an incarnation known to have ended.
        Raises ShardHeld if a live process holds it, or all of them; ClusterNotReady if that is not known yet;
        InvalidArgument if there is no such shard.
        """
        if shard is None:
            return self._free_shard(address, incarnation, gone)
        return self._claim(shard, incarnation, gone, has_past=has_past)

    @property
    def pause_seconds(self) -> float:
        """Shortest time between two heartbeats of a shard, in seconds."""
        return min(self._num_shards / _BEATS_PER_SECOND, self._lease_seconds / _SILENT_BEATS)

    def entries(self) -> list[ShardEntry]:
        """Return the present entry of every shard."""
        return [self.entry(shard) for shard in range(self._num_shards)]

    def live_in(self, memory_pool: str) -> int:
        """Return the number of possibly live shards in a memory pool, at most a second old; 0 if it has no name."""
        if self._clock() - self._counted > _COUNT_SECONDS:  # not at every heartbeat of thousands
            members = self._state.members
            self._pools = Counter(members[shard].memory_pool for shard in members if not self.is_free(shard, 0))
            self._counted = self._clock()
        return self._pools[memory_pool] if memory_pool else 0

    def entry(self, shard: int) -> ShardEntry:
        """Return the present entry of a shard."""
        member = self._state.members.get(shard)
        if member is None:
            return ShardEntry(shard=shard, address="", incarnation=0, state="missing", heartbeat_age_seconds=0.0)
        age = self._clock() - member.last_heartbeat
        return ShardEntry(
            shard=shard,
            address=member.address,
            incarnation=member.incarnation,
            state=self._condition(member, age),
            heartbeat_age_seconds=age,
        )

    def _forgive_silence(self) -> None:
        """Renew every shard's lease: no heartbeat could arrive."""
        for member in self._state.members.values():
            member.last_heartbeat = self._clock()

    def _claim(self, shard: int, incarnation: int, gone: int | None, *, has_past: bool) -> int:
        if not 0 <= shard < self._num_shards:
            raise InvalidArgument(f"shard {shard} does not exist; this cluster has shards 0 … {self._num_shards - 1}")
        # After a scheduler restart a newcomer must not get the number of a shard that still holds its rows.
        if has_past and self._is_empty_newcomer(shard):
            return shard
        if not self.is_free(shard, incarnation, gone):
            raise self._lease_held_error(f"shard {shard} is held", (shard,))
        return shard

    def _is_empty_newcomer(self, shard: int) -> bool:
        member = self._state.members.get(shard)
        if member is None or not member.newcomer:
            return False
        return all(schema.holders.get(shard) != member.incarnation for schema in self._state.schemas.values())

    def _free_shard(self, address: str, incarnation: int, gone: int | None) -> int:
        shards = range(self._num_shards)
        same = [s for s in shards if s in self._state.members and self._state.members[s].address == address]
        candidates: list[int] = [*same, *(s for s in shards if s not in self._state.members), *shards]
        for shard in candidates:
            if self.is_free(shard, incarnation, gone):
                return shard
        raise self._lease_held_error(f"this cluster has {counted(self._num_shards, 'shard')}, all held", shards)

    def _lease_held_error(self, what: str, shards: Sequence[int]) -> ShardHeld | ClusterNotReady:
        """Return the error for a newcomer if all ``shards`` are held."""
        unheard = [shard for shard in shards if not self._state.members[shard].has_heartbeat]
        if unheard:
            left = self._started + self._lease_seconds - self._clock()
            return ClusterNotReady(
                f"{what}: this scheduler was restarted, and shard {unheard[0]} may live on at "
                f"{self._state.members[unheard[0]].address}; it is free in {max(left, 0.0):.1f} s if it stays silent"
            )
        is_single = len(shards) == 1
        by = f"a live process at {self._state.members[shards[0]].address}" if is_single else "live processes"
        return ShardHeld(
            f"{what} by {by}; a dead one's shard is free {self._lease_seconds:g} s after its last sign of life "
            "('geartrain server --wait' waits for it)"
        )

    def is_free(self, shard: int, incarnation: int, gone: int | None = None) -> bool:
        """Return whether a process may have a shard without replacing a possibly live one; ``gone`` has ended."""
        member = self._state.members.get(shard)
        if member is None or member.left or member.incarnation in (incarnation, gone):
            return True
        return bool(self._clock() - member.last_heartbeat > self._lease_seconds)

    def _condition(self, member: Member, age: float) -> ShardCondition:
        if member.left or age > self._lease_seconds:
            return "lost"
        beat_seconds = max(member.heartbeat_seconds, self.pause_seconds)
        backoff = max(_SILENT_BEATS * beat_seconds, self._lease_seconds / _SILENT_BEATS)
        if age > backoff or not member.has_heartbeat:
            return "silent"
        return "leaving" if member.is_leaving else "up"


class ShardEvents:
    """Records all changes of shards in the event log. Not thread-safe."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._heard_late: set[int] = set()
        """Incarnations recorded as live although another process has their shard."""
        self.restarts: Counter[int] = Counter()
        """Replacements of a process that had ended, or seemed to, by shard."""
        self.takeovers: Counter[int] = Counter()
        """Replacements of a process that lived, by shard."""
        self._lost: set[int] = set()
        """Shards recorded as lost, or as having left."""
        for event in log.since(0, MAX_KEPT).events:
            self._remember(event)

    def update(self, entries: Sequence[ShardEntry]) -> None:
        """Record shards lost since the last call."""
        for entry in entries:
            if entry.state == "lost" and entry.shard not in self._lost:
                said = f"no heartbeat for {entry.heartbeat_age_seconds:.1f} s"
                self._record_lost(entry.shard, entry, said, seconds=entry.heartbeat_age_seconds)

    def joined(self, shard: int, member: Member, previous: Member | None, *, lived: bool) -> None:
        """Record that a process got a shard; ``lived``: the one before may live."""
        if previous is None:
            self._record("joined", shard, member, f"shard {shard} joined: it is at {member.address}")
        elif previous.incarnation == member.incarnation:
            self.record_heartbeat(shard, member, 0.0)
        elif lived:
            self._heard_late.add(previous.incarnation)
            self.takeovers[shard] += 1
            said = f"another process took shard {shard} from one at {previous.address}, which may live"
            self._record("takeover", shard, member, f"{said}: it is at {member.address} now")
        else:
            if shard not in self._lost:
                self._record_lost(shard, previous, "its process has ended")
            self.restarts[shard] += 1
            said = f"shard {shard} is up again at {member.address}, in a new process without the rows it had"
            self._record("back", shard, member, said)

    def record_heartbeat(self, shard: int, member: Member, silent_seconds: float) -> None:
        """Record a heartbeat of a shard's process."""
        if shard in self._lost:
            silent = f", silent for {silent_seconds:.1f} s" if silent_seconds else ""
            said = f"shard {shard} is heard again at {member.address}: the same process{silent}, with its rows"
            self._record("back", shard, member, said, seconds=silent_seconds)

    def record_late_heartbeat(self, shard: int, member: Member, incarnation: int) -> None:
        """Record a heartbeat of a process whose shard ``member`` has."""
        if incarnation not in self._heard_late:
            self._heard_late.add(incarnation)
            self.takeovers[shard] += 1
            said = f"a process that had shard {shard} lives, which another one at {member.address} has taken over"
            self._record("takeover", shard, member, f"{said}; it was told to stop")

    def leaves(self, shard: int, member: Member) -> None:
        """Record that a shard is shutting down, and waits for the snapshots of jobs."""
        self._record(
            "leaving", shard, member, f"shard {shard} at {member.address} is to end: jobs take a snapshot first"
        )

    def left(self, shard: int, member: Member) -> None:
        """Record that a shard ended in order."""
        self._record("left", shard, member, f"shard {shard} at {member.address} ended in good order, with its rows")

    def _record_lost(self, shard: int, who: Member | ShardEntry, why: str, seconds: float = 0.0) -> None:
        self._record("lost", shard, who, f"shard {shard} at {who.address} is lost: {why}", seconds=seconds)

    def _record(self, kind: str, shard: int, who: Member | ShardEntry, text: str, seconds: float = 0.0) -> None:
        event = ClusterEvent(kind=kind, text=text, shard=shard, incarnation=who.incarnation, seconds=seconds)
        self._log.append(event)
        self._remember(event)

    def _remember(self, event: ClusterEvent) -> None:
        if event.shard is not None and event.kind in ("lost", "left"):
            self._lost.add(event.shard)
        elif event.shard is not None and event.kind != "leaving":
            self._lost.discard(event.shard)
