"""Synchronous writes: a shard gathers one push per rank, sums them in rank order and applies them once.

The result equals one worker with the joint batch: each rank's gradient is the mean over its samples, so the joint
mean is the sum weighted by sample counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from geartrain.ams.kernels import ops
from geartrain.ams.values.errors import InvalidArgument, RankMissing, StepMismatch
from geartrain.ams.values.shard_messages import CallContext, Push, SyncGroup, UpdateHosted, jobs_of
from geartrain.ams.values.specs import Ids

MAX_WORLD_SIZE = 65_536
MAX_GROUPS = 4096
"""Groups whose step a shard keeps: those that pushed last. A forgotten one is refused, as long as its name is known."""

RankWrite = Push | UpdateHosted
"""One rank's part of a synchronous write; it has a group."""


@dataclass
class _Group:
    world_size: int
    next_sequence: int
    deadline: float = 0.0
    stream: str = ""
    """The stream that joined last."""
    incarnation: int = 0
    """Its incarnation."""
    waiting: dict[int, tuple[CallContext, RankWrite]] = field(default_factory=dict)
    applied: dict[int, bytes] = field(default_factory=dict)
    """What each rank's part of the last step was, by rank. None after a restore."""


class GroupStep(NamedTuple):
    """The step that a group is at, as snapshots keep it."""

    table: str
    job: str
    world_size: int
    next_sequence: int


def joint_push(pushes: list[Push]) -> Push:
    """Return the push that equals those of all ranks, given in rank order: the mean weighted by sample counts."""
    groups = [push.group for push in pushes if push.group is not None]
    total = sum(group.sample_count for group in groups)
    weights = [group.sample_count / total if total else 0.0 for group in groups]
    width = max(push.gradients.shape[1] for push in pushes)
    ids: Ids = np.concatenate([push.ids for push in pushes])
    weighted: npt.NDArray[np.float32] = np.empty((len(ids), width), np.float32)
    start = 0
    for push, weight in zip(pushes, weights, strict=True):
        end = start + len(push.ids)
        np.multiply(push.gradients, np.float32(weight * push.scale), out=weighted[start:end], dtype=np.float32)
        start = end
    distinct, summed = ops.merged(ids, weighted)
    first = pushes[0]
    return replace(first, ids=distinct, gradients=summed, scale=1.0, group=None, buffer_lease=None)


class SyncGroups:
    """The sync groups of one shard. Used by the shard's own thread only."""

    def __init__(
        self, timeout_seconds: float, clock: Callable[[], float] = time.monotonic, max_groups: int = MAX_GROUPS
    ) -> None:
        self._max_groups = max_groups
        self._forgotten: dict[tuple[str, str], _Group] = {}
        """Without what was applied. Who was forgotten last comes last."""
        self._timeout_seconds = timeout_seconds
        self._clock = clock
        self._groups: dict[tuple[str, str], _Group] = {}

    def is_applied(self, push: RankWrite) -> bool:
        """Whether the group's write was applied before: this push is a rank's retry of it.

        Raises StepMismatch if the rank is not at its group's step, or pushes something else than it did,
        InvalidArgument if it cannot belong to the group.
        """
        member = _member(push)
        group = self._group(push.table, member)
        if member.sequence == group.next_sequence - 1:
            if group.applied.get(member.rank, _digest(push)) != _digest(push):
                # Another shard, which refused the step, would apply these: the table would hold half of each.
                raise StepMismatch(
                    f"step {member.sequence} of job {member.job!r} was applied to table {push.table!r} here with other "
                    f"gradients of rank {member.rank}; restart all ranks from their last snapshot"
                )
            return True
        self._require_step(push.table, member, group)
        return False

    def waiting_of_rank(self, push: RankWrite) -> CallContext | None:
        """The push of the same rank that waits here, which :meth:`join` would replace; None: there is none."""
        member = _member(push)
        waiting = self._group(push.table, member).waiting.get(member.rank)
        return None if waiting is None else waiting[0]

    def join(self, context: CallContext, push: RankWrite) -> list[tuple[CallContext, RankWrite]] | None:
        """Add one rank's push; return the pushes of all ranks in rank order once they are complete, else None."""
        member = _member(push)
        group = self._group(push.table, member)
        first = next((part for rank, part in group.waiting.items() if rank != member.rank), None)
        mine = {"lr": push.lr, **push.optimizer_scalars}
        its = mine if first is None else {"lr": first[1].lr, **first[1].optimizer_scalars}
        if mine != its:
            names = [name for name in {**mine, **its} if mine.get(name) != its.get(name)]
            raise StepMismatch(
                f"rank {member.rank} of job {member.job!r} pushes with {_named(mine, names)}, another rank with "
                f"{_named(its, names)}; all ranks of a step must agree"
            )
        if first is not None and first[1].step_goes_on != push.step_goes_on:
            ends, goes_on = "ends", "goes on with"
            this, that = (goes_on, ends) if push.step_goes_on else (ends, goes_on)
            raise StepMismatch(
                f"rank {member.rank} of job {member.job!r} {this} a step of table {push.table!r}, another {that} it; "
                "all ranks must push their active rows in the same pieces"
            )
        if not group.waiting:
            group.deadline = self._clock() + self._timeout_seconds
        group.waiting[member.rank] = (context, push)
        group.stream, group.incarnation = context.stream, context.incarnation
        if len(group.waiting) < group.world_size:
            return None
        return [group.waiting[rank] for rank in range(group.world_size)]

    def complete(self, push: RankWrite) -> None:
        """The joint write was applied: the group is at its next step."""
        group = self._group(push.table, _member(push))
        group.applied = {rank: _digest(part) for rank, (_, part) in group.waiting.items()}
        group.waiting.clear()
        group.next_sequence += 1

    def abandon(self, push: RankWrite) -> None:
        """The joint write was refused: forget its parts."""
        self._group(push.table, _member(push)).waiting.clear()

    def require_step(self, table: str, member: SyncGroup) -> None:
        """Raise StepMismatch unless exactly the writes before ``member.sequence`` are applied."""
        if (table, member.job) in self._groups:
            self._require_step(table, member, self._group(table, member))

    def fence(self, job: str, incarnation: int, *, forget: bool) -> list[CallContext]:
        """Drop the pushes of the streams of ``job`` with a lower incarnation; return them.

        With ``forget`` also forget the steps of their groups, so that the next incarnation begins at its own.
        """

        def is_past(stream: str, its: int) -> bool:
            return job in jobs_of(stream) and its < incarnation

        dropped: list[CallContext] = []
        for key, group in list(self._groups.items()):
            past = {
                rank: context
                for rank, (context, _) in group.waiting.items()
                if is_past(context.stream, context.incarnation)
            }
            for rank in past:
                del group.waiting[rank]
            dropped.extend(past.values())
            if forget and not group.waiting and is_past(group.stream, group.incarnation):
                del self._groups[key]
        for key, group in list(self._forgotten.items()):
            if forget and is_past(group.stream, group.incarnation):
                del self._forgotten[key]
        return dropped

    def steps(self) -> list[GroupStep]:
        """Return the step of every group."""
        return [
            GroupStep(table, job, group.world_size, group.next_sequence) for (table, job), group in self._groups.items()
        ]

    def restore(self, step: GroupStep) -> None:
        """Let a group go on at ``step``, unless it has begun already."""
        if (step.table, step.job) not in self._groups:
            self._forgotten.pop((step.table, step.job), None)  # the rows are those of this step
            self._begin((step.table, step.job), _Group(step.world_size, step.next_sequence))

    def next_deadline(self) -> float | None:
        """When the first incomplete group runs out of time, on the injected clock; None if none waits."""
        return min((group.deadline for group in self._groups.values() if group.waiting), default=None)

    def expire(self) -> list[tuple[list[tuple[CallContext, RankWrite]], RankMissing]]:
        """Drop the groups whose time is up; return their pushes with the error that each gets."""
        now = self._clock()
        expired = []
        for (table, job), group in self._groups.items():
            if not group.waiting or group.deadline > now:
                continue
            missing = sorted(set(range(group.world_size)) - set(group.waiting))
            error = RankMissing(
                f"ranks {missing} of job {job!r} did not push step {group.next_sequence} of table {table!r} within "
                f"{self._timeout_seconds:g} s; nothing of the step was applied here. Is the rank alive? "
                "(server setting sync_timeout_seconds)"
            )
            expired.append((list(group.waiting.values()), error))
            group.waiting.clear()
        return expired

    def drop_table(self, table: str) -> list[tuple[CallContext, RankWrite]]:
        """Forget the groups of a table; return the pushes that waited."""
        waiting: list[tuple[CallContext, RankWrite]] = []
        for key in [key for key in self._forgotten if key[0] == table]:
            del self._forgotten[key]
        for key in [key for key in self._groups if key[0] == table]:
            waiting.extend(self._groups.pop(key).waiting.values())
        return waiting

    def _group(self, table: str, member: SyncGroup) -> _Group:
        if not (1 <= member.world_size <= MAX_WORLD_SIZE and 0 <= member.rank < member.world_size):
            raise InvalidArgument(f"rank {member.rank} of world_size {member.world_size} is not a rank of a group")
        if member.sequence < 1:
            raise InvalidArgument(f"sequence {member.sequence} of job {member.job!r} must be >= 1")
        key = (table, member.job)
        if key in self._forgotten:
            raise StepMismatch(
                f"job {member.job!r} pushed nothing to table {table!r} while {self._max_groups} other groups did, so "
                "that its step is not known here any more; start all ranks anew from their last snapshot, under a new "
                "job name"
            )
        group = self._groups.pop(key, None)
        if group is None:
            group = _Group(world_size=member.world_size, next_sequence=member.sequence)
        self._begin(key, group)
        if group.world_size != member.world_size:
            raise StepMismatch(
                f"rank {member.rank} of job {member.job!r} believes in {member.world_size} ranks, the group has "
                f"{group.world_size}; start a new job name after changing the number of workers"
            )
        return group

    def _begin(self, key: tuple[str, str], group: _Group) -> None:
        """Add a group as the one that pushed last; where there are too many, forget the one that has not for the
        longest."""
        if len(self._groups) >= self._max_groups:
            idle = next((other for other, its in self._groups.items() if not its.waiting), None)
            if idle is not None:
                self._forgotten[idle] = replace(self._groups.pop(idle), applied={})
        if len(self._forgotten) > 4 * self._max_groups:
            del self._forgotten[next(iter(self._forgotten))]
        self._groups[key] = group

    @staticmethod
    def _require_step(table: str, member: SyncGroup, group: _Group) -> None:
        if member.sequence != group.next_sequence:
            raise StepMismatch(
                f"rank {member.rank} of job {member.job!r} is at step {member.sequence} of table {table!r}, its group "
                f"at {group.next_sequence}; restart all ranks from the same state"
            )


def _digest(write: RankWrite) -> bytes:
    """What tells one rank's part of a step from another: a checksum of all that the rows are changed by."""
    seen = xxhash.xxh3_128()
    parts: list[tuple[object, list[npt.NDArray[Any]]]] = []
    if isinstance(write, Push):
        parts.append((write.step_goes_on, [write.ids, write.gradients]))
    else:
        for one in write.inputs:
            names = sorted(one.arrays)
            settings = (write.model, names, sorted(one.settings.items()), one.seed, one.step, one.weight)
            parts.append((settings, [one.arrays[name] for name in names]))
    for told, arrays in parts:
        shapes = [(array.dtype.name, array.shape) for array in arrays]
        numbers = (write.lr, sorted(write.optimizer_scalars.items()), write.scale, _member(write).sample_count)
        seen.update(repr((told, shapes, numbers)).encode())
        for array in arrays:
            seen.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return seen.digest()


def _named(numbers: Mapping[str, float | None], names: list[str]) -> str:
    """``lr 0.1, momentum that of the table`` for those names."""
    values = [(name, numbers.get(name)) for name in names]
    return ", ".join(f"{name} {'that of the table' if value is None else value}" for name, value in values)


def _member(push: RankWrite) -> SyncGroup:
    assert push.group is not None
    return push.group
