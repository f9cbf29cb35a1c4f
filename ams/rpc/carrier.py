"""What a carrier is: the way from a client to one shard, or to the scheduler."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from geartrain.ams.kernels.engine import Engine
from geartrain.ams.values.rpc import Rpc
from geartrain.ams.values.shard_messages import CallContext, Reply, Request

R = TypeVar("R")


class AttemptFailed(Exception):
    """One attempt did not come back: whether the shard saw the request is unknown. The caller may retry.

    No user sees it: who gives up raises a GeartrainError that says the same, ``from None``.
    """


class NotSent(AttemptFailed):
    """No connection came about, or none was tried: nobody has seen the request."""


class NobodyThere(NotSent):
    """The connection was refused, or there is no such host: no process listens at the address."""


class ShardCarrier(Protocol):
    """The way to one shard. Thread-safe."""

    def submit(
        self, context: CallContext, request: Request, timeout_seconds: float | None, *, alone: bool = False
    ) -> Future[Reply]:
        """Send a request that carries no rows: those go by :attr:`engine` or :attr:`data_plane`.

        With ``alone`` the caller has nothing to send beside it, so that the carrier may finish it on this thread,
        before it returns: that saves the changes of thread. The future holds the reply, the
        shard's GeartrainError, or AttemptFailed if no reply came within ``timeout_seconds``.
        """

    @property
    def engine(self) -> Engine | None:
        """What answers requests for rows of a shard of this process, on the caller's own thread."""

    @property
    def data_plane(self) -> Any:
        """The connection for the rows of a shard elsewhere: a :class:`~geartrain.ams.rpc.client.data_plane.DataPlane`;
        None: it is of this process.
        """

    def close(self) -> None:
        """Release the connection. Idempotent."""


class SchedulerCarrier(Protocol):
    """The way to the scheduler. Thread-safe."""

    def call(self, request: Rpc[R], timeout_seconds: float | None) -> R:
        """Return the reply to one of :mod:`geartrain.ams.values.scheduler_messages`.

        Raises the scheduler's GeartrainError, or AttemptFailed if no reply came within ``timeout_seconds``.
        """

    def close(self) -> None:
        """Release the connection. Idempotent."""


def gather(futures: Sequence[Future[Any]]) -> Future[list[Any]]:
    """Return a future of all results in order, done when every one is; it holds the first error if any failed."""
    joint: Future[list[Any]] = Future()
    remaining = len(futures)
    lock = threading.Lock()

    def one_done(_: Future[Any]) -> None:
        nonlocal remaining
        with lock:
            remaining -= 1
            if remaining:
                return
        error = next((e for future in futures if (e := future.exception()) is not None), None)
        if error is not None:
            joint.set_exception(error)
        else:
            joint.set_result([future.result() for future in futures])

    for future in futures:
        future.add_done_callback(one_done)
    if not futures:
        joint.set_result([])
    return joint
