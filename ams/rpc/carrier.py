"""How requests without rows come from a client to one shard, or to the scheduler.

Those of rows are frames, whose carriers are compiled: ``csrc/carriers/connection.hpp``.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from geartrain.ams.kernels._core import Engine
from geartrain.ams.values.rpc import Rpc
from geartrain.ams.values.shard_messages import CallContext, Reply, Request

R = TypeVar("R")


class AttemptFailed(Exception):
    """One attempt did not come back: whether the shard saw the request is unknown. The caller may retry.

    No user sees it: who gives up raises a GeartrainError that says the same, ``from None``.
    """


class NotSent(AttemptFailed):
    """No connection came about, or none was tried: nobody has seen the request."""


class NotBelieved(NotSent):
    """One end does not believe the certificate of the other, or has none, or wants one."""


class NobodyThere(NotSent):
    """The connection was refused, or there is no such host: no process listens at the address."""


_START = "start a cluster with 'geartrain up', or correct the address"
_CERTIFY = "give both ends certificates of one authority that have not run out (security.folder, 'geartrain certs')"
_LOOK = (
    "nothing refuses the connection: its process may be stopped or overloaded (let it go on, or end it and start it "
    "again), or a firewall may keep the two apart"
)


def remedy(exc: AttemptFailed) -> str:
    """What to do about a role that was asked in vain."""
    return _START if isinstance(exc, NobodyThere) else _CERTIFY if isinstance(exc, NotBelieved) else _LOOK


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
