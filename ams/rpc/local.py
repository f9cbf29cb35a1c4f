"""Local carrier: client and shard in one process. Arrays are passed by reference, nothing is copied or encoded."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

from geartrain.ams.kernels._core import Engine
from geartrain.ams.values.shard_messages import CallContext, Reply, Request


class RequestSink(Protocol):
    """Receiver of a local carrier's requests: a shard."""

    def submit(self, context: CallContext, request: Request) -> Future[Reply]:
        """Queue a request."""

    def run(self, context: CallContext, request: Request) -> Future[Reply]:
        """Queue a request, or complete it on this thread if the shard is idle."""

    @property
    def engine(self) -> Engine:
        """Engine for its row requests, on any thread."""


class LocalCarrier:
    """Carrier to a shard of this process."""

    def __init__(self, shard: RequestSink) -> None:
        self._shard = shard

    @property
    def engine(self) -> Engine:
        """Engine for row requests, on the caller's thread."""
        return self._shard.engine

    data_plane = None
    """None: rows do not travel."""

    def submit(
        self,
        context: CallContext,
        request: Request,
        timeout_seconds: float | None,  # noqa: ARG002
        *,
        alone: bool = False,
    ) -> Future[Reply]:
        """Submit a request to the shard. Nothing can be lost on the way, so there is no time-out."""
        return self._shard.run(context, request) if alone else self._shard.submit(context, request)

    def close(self) -> None:
        """Do nothing: the cluster closes the shard."""
