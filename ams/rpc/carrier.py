"""Interface of carriers: requests without rows from a client to a shard, or to the scheduler.

Requests with rows are frames, whose carriers are compiled: ``csrc/carriers/connection.hpp``.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from geartrain.ams.kernels._core import Engine
from geartrain.ams.values.rpc import Rpc
from geartrain.ams.values.shard_messages import CallContext, Reply, Request

R = TypeVar("R")


class AttemptFailed(Exception):
    """An attempt got no reply: whether the shard saw the request is unknown. The caller may retry.

    Internal: a caller that stops retrying raises a GeartrainError with the same text, ``from None``.
    """


class NotSent(AttemptFailed):
    """No connection was made, or none was tried: the request was not sent."""


class CertificateRejected(NotSent):
    """The certificate of one end was rejected by the other, or is missing where one is required."""


class ConnectionRefused(NotSent):
    """The connection was refused, or there is no such host: no process listens at the address."""


_START = "start a cluster with 'geartrain up', or correct the address"
_CERTIFY = "give both ends certificates of one authority that have not run out (security.folder, 'geartrain certs')"
_LOOK = (
    "nothing refuses the connection: its process may be stopped or overloaded (let it go on, or end it and start it "
    "again), or a firewall may keep the two apart"
)


def remedy(exc: AttemptFailed) -> str:
    """Return what to do about an unresponsive role."""
    return _START if isinstance(exc, ConnectionRefused) else _CERTIFY if isinstance(exc, CertificateRejected) else _LOOK


class ShardCarrier(Protocol):
    """Carrier to one shard. Thread-safe."""

    def submit(
        self, context: CallContext, request: Request, timeout_seconds: float | None, *, alone: bool = False
    ) -> Future[Reply]:
        """Send a request without rows: those go by :attr:`engine` or :attr:`data_plane`.

        With ``alone`` the caller sends nothing else meanwhile, so that the carrier may complete the call on this thread
        before it returns, without a change of thread. The future holds the reply, the shard's GeartrainError, or
        AttemptFailed if no reply came within ``timeout_seconds``.
        """

    @property
    def engine(self) -> Engine | None:
        """Engine for row requests to a shard of this process, on the caller's thread; None: it is elsewhere."""

    @property
    def data_plane(self) -> Any:
        """Connection for the rows of a shard elsewhere: a :class:`~geartrain.ams.rpc.client.data_plane.DataPlane`;
        None: the shard is of this process.
        """

    def close(self) -> None:
        """Release the connection. Idempotent."""


class SchedulerCarrier(Protocol):
    """Carrier to the scheduler. Thread-safe."""

    def call(self, request: Rpc[R], timeout_seconds: float | None) -> R:
        """Return the reply to one of :mod:`geartrain.ams.values.scheduler_messages`.

        Raises the scheduler's GeartrainError, or AttemptFailed if no reply came within ``timeout_seconds``.
        """

    def close(self) -> None:
        """Release the connection. Idempotent."""
