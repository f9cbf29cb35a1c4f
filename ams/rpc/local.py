"""The local carrier: client and shard in one process. Arrays are handed over, nothing is copied or encoded."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

from geartrain.ams.kernels._core import Engine
from geartrain.ams.values.shard_messages import CallContext, Reply, Request


class RequestSink(Protocol):
    """What a local carrier delivers to: a shard."""

    def submit(self, context: CallContext, request: Request) -> Future[Reply]:
        """Queue a request."""

    def run(self, context: CallContext, request: Request) -> Future[Reply]:
        """The same, but done on this thread before it returns if the shard is idle."""

    @property
    def engine(self) -> Engine:
        """What answers its requests for rows, on any thread."""


class LocalCarrier:
    """Hands requests to a shard of this process."""

    def __init__(self, shard: RequestSink) -> None:
        self._shard = shard

    @property
    def engine(self) -> Engine:
        """What answers requests for rows on the caller's own thread."""
        return self._shard.engine

    data_plane = None
    """See :class:`ShardCarrier`. Nothing travels."""

    def submit(
        self,
        context: CallContext,
        request: Request,
        timeout_seconds: float | None,  # noqa: ARG002
        *,
        alone: bool = False,
    ) -> Future[Reply]:
        """See :class:`ShardCarrier`. Nothing can be lost on the way, so there is no time-out."""
        return self._shard.run(context, request) if alone else self._shard.submit(context, request)

    def close(self) -> None:
        """The shard belongs to the cluster, which closes it."""
