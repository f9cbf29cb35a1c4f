"""Calls of a client to the scheduler: registration, and listing, creation, opening and removal of tables."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

from geartrain.ams.client.shard_calls import ShardCalls
from geartrain.ams.client.writes import ClientStream
from geartrain.ams.rpc.carrier import AttemptFailed, ConnectionRefused, SchedulerCarrier, remedy
from geartrain.ams.rpc.wire import require_same_wire
from geartrain.ams.values.config import ClientConfig
from geartrain.ams.values.errors import (
    ClusterNotReady,
    InvalidArgument,
    SchedulerUnavailable,
    ShardRestarted,
    ShardUnavailable,
    TableNotFound,
    being_restored,
)
from geartrain.ams.values.rpc import Rpc
from geartrain.ams.values.scheduler_messages import (
    AlterClusterTable,
    CheckCaller,
    ClusterView,
    CreateClusterTable,
    DescribeCluster,
    DropClusterTable,
    FenceJob,
    IssueIncarnation,
    PublishClusterTables,
    ShardCondition,
)
from geartrain.ams.values.specs import SETTINGS, TableSettings, TableSpec
from geartrain.ams.values.text import quoted

logger = logging.getLogger(__name__)
R = TypeVar("R")

_POLL_SECONDS = 0.05
SNAPSHOT_SECONDS = 5.0
"""Wait of a snapshot, during which training stands still, for a scheduler that does not answer."""
_TOLD_AFTER_SECONDS = 1.0
"""Wait for a cluster after which a message names what is missing."""


class SchedulerCalls:
    """Scheduler calls of one client. Thread-safe. Each raises SchedulerUnavailable without an answer."""

    def __init__(self, carrier: SchedulerCarrier, calls: ShardCalls, stream: ClientStream) -> None:
        """Logs, of the shards of ``calls``, those that keep the scheduler waiting; ``stream`` identifies the caller."""
        self.carrier = carrier
        self._calls = calls
        self._stream = stream

    def describe(self, timeout_seconds: float | None = None) -> ClusterView:
        """Return the present cluster; waits ``timeout_seconds``, by default ``attempt_timeout_seconds``."""
        return self._request(DescribeCluster(), "", timeout_seconds=timeout_seconds)

    def table(self, name: str) -> TableSpec:
        """Return the spec of a table that can be opened.

        Raises TableNotFound, TableBeingRestored, ShardRestarted, ClusterNotReady.
        """
        view = self.describe()
        tables = {spec.name: spec for spec in view.tables}
        if name in view.restoring_tables:
            raise being_restored(name)
        if name in view.incomplete_tables:
            raise ShardRestarted(
                f"table {name!r} is incomplete: a shard with rows of it was restarted, or its creation or drop was "
                "cut off; drop it (cluster.drop_table) and create it anew, or restore a snapshot in its place"
            )
        if name not in tables:
            view.require_registered(f"whether there is a table {quoted(name)}")
            known = [*map(repr, tables), *(f"{table!r} (incomplete)" for table in view.incomplete_tables)]
            raise TableNotFound(f"there is no table {quoted(name)}; tables: {', '.join(known) or 'none'}")
        return tables[name]

    def create_table(
        self, spec: TableSpec, *, reuse: bool = False, for_restore: bool = False, replace: bool = False
    ) -> TableSpec:
        """Create a table, as :class:`CreateClusterTable`; return its actual spec, with its incarnation.

        An existing one keeps its settings; differences are logged.
        """
        create = CreateClusterTable(
            spec=spec, reuse=reuse, caller=self._stream.caller, for_restore=for_restore, replace=replace
        )
        made = self._request(create, f"whether table {spec.name!r} was created is unknown", asks_shards=True)
        if made != spec:
            logger.warning("%s", kept_settings(made, spec))
        return made

    def alter_table(self, name: str, settings: TableSettings) -> TableSpec:
        """Change settings of a table, as :class:`AlterClusterTable`; return its present spec."""
        before = self.table(name)
        if fixed := settings.keys() - SETTINGS:
            raise InvalidArgument(
                f"{min(fixed)} of table {name!r} cannot be altered, only {', '.join(SETTINGS)} can. Create another "
                "table, or drop this one first"
            )
        wanted = dataclasses.replace(before, **settings)
        alter = AlterClusterTable(spec=wanted, settings=tuple(settings), caller=self._stream.caller)
        unknown = f"whether table {name!r} was altered is unknown, alter it again"
        altered = self._request(alter, unknown, asks_shards=True)
        self._calls.update_settings([altered])
        return altered

    def publish_tables(self, tables: Sequence[TableSpec]) -> None:
        """Open restored tables, all at once. Idempotent. After SchedulerUnavailable they may be open."""
        incarnations = {table.name: table.incarnation for table in tables}
        publish = PublishClusterTables(
            tables=tuple(incarnations), incarnations=tuple(incarnations.values()), caller=self._stream.caller
        )
        self._request(publish, f"whether tables {sorted(incarnations)} can be opened is unknown")

    def drop_table(self, name: str, incarnation: int = 0) -> None:
        """Remove a table, only if its incarnation is ``incarnation``; 0: any. Idempotent."""
        drop = DropClusterTable(table=name, caller=self._stream.caller, incarnation=incarnation)
        self._request(drop, f"whether table {name!r} was dropped is unknown", asks_shards=True)

    def fence_job(self, job: str, incarnation: int) -> None:
        """End the data stream leases of a job's lower incarnations."""
        self._request(
            FenceJob(job=job, incarnation=incarnation), f"whether job {job!r} was fenced is unknown, try again"
        )

    def check_caller(self) -> None:
        """Raise StaleClient if the scheduler knows that this process was superseded."""
        if (caller := self._stream.caller) is not None:
            self._request(CheckCaller(caller=caller), "", timeout_seconds=SNAPSHOT_SECONDS)

    def _request(
        self, request: Rpc[R], unknown: str, *, asks_shards: bool = False, timeout_seconds: float | None = None
    ) -> R:
        """Call the scheduler, retrying while a shard that it needs does not answer: a change cut off there is undone,
        and may be repeated. ``unknown`` is the sentence about the outcome if no answer comes."""
        self._calls.require_usable()
        naming: AbstractContextManager[None] = self._calls.naming_silent_shards() if asks_shards else nullcontext()
        backoff = self._calls.backoff()
        longest = self._calls.config.attempt_timeout_seconds
        with naming:
            while True:
                try:
                    return self.carrier.call(request, min(longest, timeout_seconds or longest))
                except AttemptFailed as exc:
                    raise SchedulerUnavailable(f"{exc}; {unknown}" if unknown else str(exc)) from None
                except ShardUnavailable:
                    if not (asks_shards and backoff.pause()):
                        raise
                    self._calls.require_usable()


def kept_settings(kept: TableSpec, other: TableSpec) -> str:
    """Return the message for a table that keeps settings which differ from the requested ones or a snapshot's."""
    return (
        f"table {kept.name!r} keeps its settings: {kept.unlike(other)}. cluster.alter_table({kept.name!r}, ...) and "
        "'geartrain table alter' change them; what a head or a group is given as its optimizer holds for its own pushes"
    )


def await_cluster(
    scheduler: SchedulerCarrier, address: str, config: ClientConfig, chosen: int
) -> tuple[ClusterView, int]:
    """Wait until all shards have registered; return the cluster and this process's incarnation: the ``chosen`` one or,
    if that is 0, one that the scheduler assigns.
    """
    start = time.monotonic()
    answered: ClusterView | None = None
    is_told = False
    while True:
        waited = time.monotonic() - start
        try:
            answered = scheduler.call(DescribeCluster(), config.connect_timeout_seconds)
            require_same_wire(f"the scheduler at {address}", answered.version, answered.wire, "this process")
            if answered.ready:
                taken = scheduler.call(IssueIncarnation(chosen=chosen), config.connect_timeout_seconds)
                return answered, taken
            absent = _absent_shards(answered)
            waits_for = f"{absent} not up; waiting up to {config.recovery_timeout_seconds:g} s ('geartrain status')"
        except ClusterNotReady as exc:  # the scheduler was restarted between the two calls
            answered = None
            if waited >= config.recovery_timeout_seconds:
                raise
            waits_for = str(exc)
        except AttemptFailed as exc:
            seconds = config.connect_timeout_seconds
            if isinstance(exc, ConnectionRefused):
                seconds = min(seconds, config.refused_timeout_seconds)
            if waited >= seconds:
                raise SchedulerUnavailable(f"{exc} (for {waited:.1f} s); {remedy(exc)}") from None
            waits_for = f"{exc}; waiting up to {seconds:g} s"
        if answered is not None and waited >= config.recovery_timeout_seconds:
            advice = remedy_for_absent((entry.state for entry in answered.shards), address)
            raise ClusterNotReady(f"{_absent_shards(answered)} not up after {waited:.1f} s; {advice}")
        if waited >= _TOLD_AFTER_SECONDS and not is_told:
            is_told = True
            logger.warning("%s", waits_for)
        time.sleep(_POLL_SECONDS)


def remedy_for_absent(states: Iterable[ShardCondition], scheduler: str) -> str:
    """Return the remedy for absent shards: start one that never registered; a lost one may come back."""
    start, states = f"'geartrain server --scheduler {scheduler}'", set(states)
    if states & {"silent", "lost"}:
        return (
            "one that is lost or silent may be stopped or out of reach: let it go on, and it has its rows still. In "
            f"place of one that ended, start {start} ('geartrain up' does it by itself) and restore a snapshot"
        )
    if "leaving" in states:
        return f"one that is leaving ends once running jobs have taken a snapshot; start {start} in its place"
    return f"start them with {start}"


def _absent_shards(view: ClusterView) -> str:
    """Return text such as ``shard 1 (lost) at 127.0.0.1:7001 of 2 is``."""
    absent = [entry for entry in view.shards if entry.state != "up"]
    named = ", ".join(
        f"{entry.shard} ({entry.state})" + (f" at {entry.address}" if entry.address else "") for entry in absent
    )
    is_single = len(absent) == 1
    return f"shard{'' if is_single else 's'} {named} of {view.num_shards} {'is' if is_single else 'are'}"
