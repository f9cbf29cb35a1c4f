"""Client of a graph service in another process, with retries until it answers, or the time is up."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from geartrain.ams.graph.building.neighbours import NeighbourTable
from geartrain.ams.graph.client.calls import OnBuilding
from geartrain.ams.rpc.carrier import AttemptFailed, CertificateRejected, remedy
from geartrain.ams.rpc.client.backoff import Backoff
from geartrain.ams.rpc.client.graph import GrpcGraphCarrier
from geartrain.ams.storage.snapshot.manifest import FileEntry
from geartrain.ams.values.config import ClientConfig
from geartrain.ams.values.errors import Cancelled, GraphUnavailable, InvalidArgument, InvalidIds
from geartrain.ams.values.graph_messages import (
    BuildGraph,
    CancelBuild,
    DescribeGraphs,
    ForgetGraph,
    GraphBuilt,
    GraphInfo,
    GraphsState,
    RestoreGraphs,
    SelectClasses,
    WriteGraphs,
)
from geartrain.ams.values.rpc import Rpc
from geartrain.ams.values.specs import Ids

logger = logging.getLogger(__name__)

T = TypeVar("T")


class RemoteGraphs:
    """Graphs of the role at an address, a :class:`geartrain.ams.graph.client.calls.GraphCalls`.

    Every call is idempotent and may be retried. A build whose service died is requested from the next one, which
    continues from the saved parts.
    """

    def __init__(self, address: str, config: ClientConfig) -> None:
        self._config = config
        self._carrier = GrpcGraphCarrier(address, max_message_bytes=config.max_message_bytes)
        self._remedy = f"start it with 'geartrain graph --listen {address}', or correct client.graph"

    def await_first_answer(self) -> None:
        """Wait for the service as long as the first connection to a role may take. Raises GraphUnavailable."""
        seconds = self._config.connect_timeout_seconds
        self._until_answered(lambda: self._carrier.greet(seconds), seconds)

    def build(
        self,
        table: str,
        k: int,
        *,
        step: int = 0,
        progress: OnBuilding | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> GraphBuilt:
        if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k < 2**31:
            raise InvalidArgument(f"k is {k!r}; it must be an integer from 1 to 2**31 - 1")
        asked, heard = False, 0.0

        def attempt() -> GraphBuilt:
            nonlocal asked, heard
            for told in self._carrier.stream(BuildGraph(table=table, k=k, step=step)):
                heard = time.monotonic()
                if told.built is not None:
                    return GraphBuilt(graph=told.built, resumed_pairs=told.resumed_pairs)
                if progress is not None and told.building is not None:
                    progress(told.building)
                if not asked and cancelled():
                    asked = True
                    self.cancel(table)
            raise AttemptFailed(f"the graph service at {self._carrier.address} ended its answer before the build")

        def unless_cancelled() -> GraphBuilt:
            if asked or cancelled():
                raise Cancelled(f"building the graph of table {table!r} was cancelled")
            return attempt()

        return self._until_answered(unless_cancelled, heard=lambda: heard)

    def cancel(self, table: str) -> bool:
        return self._call(CancelBuild(table=table))

    def select(self, table: str, labels: Ids, budget: int, *, seed: int, step: int, version: int | None = None) -> Ids:
        if getattr(labels, "dtype", None) != "int64" or labels.ndim != 1:
            raise InvalidIds(f"labels are {labels!r}; they must be an int64 array [B]")
        if not 1 <= budget < 2**63:
            raise InvalidArgument(f"budget is {budget!r}; it must be at least 1")
        select = SelectClasses(
            table=table, labels=labels, budget=budget, seed=seed % 2**64, step=step % 2**64, version=version
        )
        return self._call(select).ids

    def describe(self) -> GraphsState:
        return self._call(DescribeGraphs())

    def load(self, table: str) -> tuple[NeighbourTable, GraphInfo]:
        info, offsets, neighbours = self._until_answered(lambda: self._carrier.download(table))
        return NeighbourTable(offsets, neighbours, info.k), info

    def forget(self, table: str) -> None:
        """Drop the graph of a table. Not retried."""
        self._call(ForgetGraph(table=table), recovery_seconds=0.0)

    def write_snapshot(self, folder: str, snapshot_id: str, tables: Mapping[str, int]) -> list[FileEntry]:
        write = WriteGraphs(snapshot_id=snapshot_id, folder=folder, tables=tables)
        written = self._call(write, self._config.snapshot_timeout_seconds)
        return [FileEntry.model_validate_json(text) for text in written]

    def restore_snapshot(self, folder: str, tables: Mapping[str, int]) -> list[str]:
        restore = RestoreGraphs(folder=folder, tables=tuple(tables), incarnations=tuple(tables.values()))
        return list(self._call(restore, self._config.snapshot_timeout_seconds))

    def close(self) -> None:
        """Close the connection. Builds go on in the service."""
        self._carrier.close()

    def _call(
        self, request: Rpc[T], timeout_seconds: float | None = None, *, recovery_seconds: float | None = None
    ) -> T:
        timeout = self._config.attempt_timeout_seconds if timeout_seconds is None else timeout_seconds
        return self._until_answered(lambda: self._carrier.call(request, timeout), recovery_seconds)

    def _until_answered(
        self, call: Callable[[], T], recovery_seconds: float | None = None, heard: Callable[[], float] = lambda: 0.0
    ) -> T:
        """Retry until there is an answer; ``heard`` returns the time (time.monotonic) of the last sign of life."""
        wait = self._config.recovery_timeout_seconds if recovery_seconds is None else recovery_seconds
        backoff = Backoff(wait)
        backoff.count_from(time.monotonic())
        while True:
            try:
                return call()
            except AttemptFailed as exc:
                backoff.count_from(heard())
                if backoff.is_fresh:
                    logger.warning("%s; trying again for up to %g s. Else %s", exc, wait, self._remedy)
                if not backoff.pause():
                    what = remedy(exc) if isinstance(exc, CertificateRejected) else self._remedy
                    raise GraphUnavailable(f"{exc} (for {wait:g} s); {what}") from None
