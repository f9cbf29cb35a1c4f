"""Messages between fast and slow gears: plain values, the same in one process and over the wire.

Legend: D width of a dense feature, K distinct ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from geartrain.ams.values.errors import GeartrainError, SampleError, error_named
from geartrain.ams.values.rpc import Rpc
from geartrain.ams.values.specs import Ids

Features = npt.NDArray[np.float32]


class Failure(NamedTuple):
    """Reason why an id has no dense feature, or no gradient."""

    error: str
    """Name of its class in :mod:`geartrain.ams.values.errors`."""
    reason: str


Failures = Mapping[int, Failure]


class Freshness(NamedTuple):
    """Bounds on the age of a cache's features."""

    max_age_seconds: float | None = None
    max_version_lag: int | None = None
    """Largest number of dense updates since the feature was computed."""


@dataclass(frozen=True, kw_only=True)
class FeatureReply:
    """Dense features of K distinct ids, in the order of the request."""

    vectors_KD: Features
    """[K, D] float32; zeros where there is a failure."""
    versions: npt.NDArray[np.int64]
    """[K]: dense version of the weights that computed each."""
    times: npt.NDArray[np.float64]
    """[K]: unix seconds at which each was computed."""
    failures: Failures
    dense_version: int
    """Dense version of the weights that the slow gear holds now."""

    def at(self, chosen: npt.NDArray[Any]) -> FeatureReply:
        """Return a part of the features; ``chosen`` are their indices, or a mask."""
        return replace(
            self, vectors_KD=self.vectors_KD[chosen], versions=self.versions[chosen], times=self.times[chosen]
        )


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """The feature gradients of one step of one fast gear: K *gradients*, one for each distinct id."""

    source: str
    """Name of the fast gear; after a tab, the name of one of its series of deliveries."""
    incarnation: int
    """Incarnation of the fast gear: a lower one than the highest seen of this source is refused."""
    sequence: int
    """Number of the delivery from 1, ascending within a source: a retry counts once."""
    ids: Ids
    """[K] int64, distinct."""
    gradients_KD: Features
    """[K, D] float32, finite."""
    versions: npt.NDArray[np.int64]
    """[K]: dense version of the feature of each gradient."""
    lr: float | None
    """Learning rate of the dense update that they become part of; None: that of the dense table."""
    table_incarnation: int = 0
    """Incarnation of the dense table that the fast gear knows: another one after a restore. 0: any."""
    lost: int = 0
    """Number of gradients that the fast gear counts as lost so far; see :class:`GearAccount`."""


@dataclass(frozen=True, kw_only=True)
class GearAccount:
    """Delivered gradients by outcome: ``received`` is always the sum of all others."""

    received: int = 0
    waiting: int = 0
    """Gradients in batches that are not full."""
    due: int = 0
    """Gradients in full batches before their backward pass."""
    applied: int = 0
    """Gradients in dense updates."""
    dropped_stale: int = 0
    """Gradients of stale features, dropped by the rule for them."""
    dropped_failed: int = 0
    """Gradients whose sample or backward pass failed."""
    non_finite: int = 0
    lost: int = 0
    """Gradients that a slow gear held, or had not reported as received or applied, when it died: an upper bound."""

    @property
    def adds_up(self) -> bool:
        """Whether each received gradient has one outcome."""
        others: int = sum(getattr(self, place.name) for place in fields(self) if place.name != "received")
        return self.received == others

    def __add__(self, other: GearAccount) -> GearAccount:
        names = [place.name for place in fields(self)]
        return GearAccount(**{name: getattr(self, name) + getattr(other, name) for name in names})


@dataclass(frozen=True, kw_only=True)
class DeliveryAck:
    """Acknowledgement of a delivery."""

    account: GearAccount
    """Account of the source."""
    dense_version: int
    process: str
    is_repeat: bool = False
    """Whether the delivery is a duplicate, not counted again."""


@dataclass(frozen=True, kw_only=True)
class GearState:
    """Description of a slow gear by itself."""

    name: str
    dim: int
    address: str
    process: str
    """Identity of the process whose account this is: "address#incarnation"."""
    partitions: tuple[int, ...]
    """Partitions that it holds now."""
    dense_version: int
    cache_hits: int
    cache_misses: int
    queued_ids: int
    """Ids queued for computation."""
    account: GearAccount
    uptime_seconds: float
    error: str = ""
    """Reason why due gradients are not applied; empty if they are."""
    gradients_per_id: int = 0
    """Gradients of an id in one backward pass."""
    lost: Mapping[str, int] = field(default_factory=dict)
    """Gradients lost with slow gears that died, by fast gear, as reported with its last delivery to this one."""
    taken_over: tuple[str, ...] = ()
    """Processes of slow gears that shut down, or that it replaces; their gradients are in the account."""
    keeps_gradients: bool = False
    """Whether its waiting gradients survive a kill, for a slow gear that is started in its place."""


@dataclass(frozen=True, kw_only=True)
class AskFeatures(Rpc[FeatureReply], name="Features"):
    """Ask for the dense features of distinct ids."""

    name: str
    """Name of the dense part, here and below: a slow gear refuses calls for another one."""
    ids: Ids
    max_age_seconds: float | None = None
    """Bound as of :class:`Freshness`."""
    max_version_lag: int | None = None


@dataclass(frozen=True, kw_only=True)
class PushFeatureGradients(Rpc[DeliveryAck]):
    """Deliver gradients."""

    name: str
    delivery: Delivery
    wait: bool
    """Reply once every update that the gradients made due is applied."""
    sent_to: str
    """Process of the slow gear that this was sent to before and that may have counted it: another one refuses."""


@dataclass(frozen=True, kw_only=True)
class FlushGradients(Rpc[int]):
    """Apply every gradient that waits, partial batches with their true count; the reply is the dense version."""

    name: str


@dataclass(frozen=True, kw_only=True)
class DescribeGear(Rpc[GearState]):
    """Ask for the state of a slow gear, with the account of these fast gears; none: of all."""

    sources: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class HandOver(Rpc[None]):
    """Report the accounts of a slow gear that shuts down. Idempotent."""

    name: str
    process: str
    """Process of the slow gear that shuts down."""
    accounts: Mapping[str, GearAccount]
    """Accounts by source."""


class GearPort(Protocol):
    """Slow gears of one dense part, as called by a fast gear: in its own process, or over the wire.

    Thread-safe. Every call may raise a GeartrainError.
    """

    @property
    def dense_version(self) -> int:
        """Highest dense version seen."""

    def features(self, ids: Ids) -> FeatureReply:
        """Return dense features of distinct ids [K] int64. Ids without one are in ``failures``, with zeros."""

    def deliver(self, delivery: Delivery) -> GearAccount:
        """Deliver gradients; in sync mode, return once every update that they made due is applied."""

    def flush(self) -> None:
        """Apply every gradient that waits, partial batches with their true count. Returns when that is done."""

    def account(self, source: str | None = None) -> GearAccount:
        """Return the account of one fast gear; None: of all."""

    def close(self) -> None:
        """Close it; gradients that wait in slow gears of this process are applied first. Idempotent."""


def process_at(address: str, incarnation: int) -> str:
    """Return the identity of a slow gear's process: a restart at the same address is another one."""
    return f"{address}#{incarnation}"


def address_of(process: str) -> str:
    """Return the address of a slow gear's process."""
    return process.partition("#")[0]


def family_of(source: str) -> str:
    """Return the fast gear of a series of deliveries."""
    return source.partition("\t")[0]


def first_error(failures: Failures, what: str) -> GeartrainError:
    """Return one error for all ``failures``, of which there is at least one; it names the first id."""
    failure = failures[min(failures)]
    kind = error_named(failure.error)
    others = sorted(failures)[1:]
    named = ", ".join(map(str, others[:8])) + (", …" if len(others) > 8 else "")
    more = f" (and {what} of {len(others)} more: {named})" if others else ""
    error = kind(f"{failure.reason}{more}")
    if isinstance(error, SampleError):
        error.ids = tuple(sorted(failures))
    return error


def without(ids: Ids, failures: Iterable[int]) -> npt.NDArray[np.bool_]:
    """Return whether each of ``ids`` [K] is not among the failures, [K] bool."""
    return ~np.isin(ids, np.fromiter(failures, np.int64))
