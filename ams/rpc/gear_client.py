"""The way to a slow gear over gRPC, and what travels there as bytes.

Legend: D width of a dense feature, K distinct ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, TypeVar

import grpc
import numpy as np
import numpy.typing as npt

from geartrain.ams.pb.v1 import gear_pb2
from geartrain.ams.rpc import framing
from geartrain.ams.rpc.carrier import AttemptFailed, NotSent
from geartrain.ams.rpc.shard_client import CONNECT_SECONDS, channel_options
from geartrain.ams.rpc.status import error_from
from geartrain.ams.values.config import MAX_MESSAGE_BYTES, split_address
from geartrain.ams.values.errors import InvalidArgument, InvalidIds, NonFinite, ProtocolError
from geartrain.ams.values.gear_messages import Delivery, Failure, FeatureReply, Freshness, GearAccount, GearState, Taken
from geartrain.ams.values.interrupts import aside
from geartrain.ams.values.specs import Ids

GEAR_SERVICE = "geartrain.ams.v1.Gear"
_IDS = _STAMPS = _KEYS = 14
_VECTORS = _GRADIENTS = 15
_FLOAT32 = np.dtype("<f4")
_COUNTS = [field.name for field in fields(GearAccount) if field.name != "lost"]
_WAIT_SECONDS = 2.0
_MAX_SOURCE = 300
"""Characters: a stream's name and what is said of it behind."""

R = TypeVar("R")
Pending = Callable[[], R]
"""A call under way: waits for its reply; may raise the service's GeartrainError, or AttemptFailed."""


class GrpcGearCarrier:
    """Calls one slow gear. Thread-safe.

    ``on_wait`` is called every two seconds that a reply is waited for: it may find that the slow gear is gone, and
    :meth:`close`, which ends the wait.
    """

    def __init__(
        self,
        address: str,
        *,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        connect_seconds: float = CONNECT_SECONDS,
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        split_address(address)  # it was told by another process: raises ConfigError
        self.address = address
        self._on_wait = on_wait
        self._channel = grpc.insecure_channel(address, options=channel_options(max_message_bytes, connect_seconds))

    def features(
        self, name: str, ids: Ids, dim: int, freshness: Freshness, timeout_seconds: float
    ) -> Pending[FeatureReply]:
        """Ask for the features of distinct ids."""
        header = gear_pb2.FeaturesRequest(
            name=name, max_age_seconds=freshness.max_age_seconds, max_version_lag=freshness.max_version_lag
        )
        data = framing.encode_framed(header, [(_IDS, np.ascontiguousarray(ids, "<i8"))])
        reply = self._begin("Features", data, timeout_seconds)
        return lambda: decode_features(reply(), len(ids), dim)

    def deliver(
        self, name: str, delivery: Delivery, *, wait: bool, sent_to: str, timeout_seconds: float
    ) -> Pending[Taken]:
        """Hand gradients over."""
        reply = self._begin("PushFeatureGradients", encode_delivery(name, delivery, wait, sent_to), timeout_seconds)

        def settle() -> Taken:
            told = framing.parse(reply(), gear_pb2.PushFeatureGradientsReply)
            return Taken(
                account=account_from_pb(told.account),
                dense_version=told.dense_version,
                process=told.process,
                is_repeat=told.is_repeat,
            )

        return settle

    def flush(self, name: str, timeout_seconds: float) -> Pending[int]:
        """Ask it to apply all that waits; the reply is its dense version."""
        request = gear_pb2.FlushGradientsRequest(name=name)
        reply = self._begin("FlushGradients", request.SerializeToString(), timeout_seconds)
        return lambda: framing.parse(reply(), gear_pb2.FlushGradientsReply).dense_version

    def describe(self, sources: Sequence[str], timeout_seconds: float) -> Pending[GearState]:
        """Ask how it is."""
        request = gear_pb2.DescribeGearRequest(sources=sources)
        reply = self._begin("DescribeGear", request.SerializeToString(), timeout_seconds)
        return lambda: state_from_pb(framing.parse(reply(), gear_pb2.DescribeGearReply))

    def hand_over(self, name: str, process: str, accounts: Mapping[str, GearAccount], timeout_seconds: float) -> None:
        """Tell it what became of the gradients that ``process`` was given."""
        request = gear_pb2.HandOverRequest(
            name=name,
            process=process,
            accounts=[
                gear_pb2.SourceAccount(source=source, account=account_to_pb(account))
                for source, account in accounts.items()
            ],
        )
        self._begin("HandOver", request.SerializeToString(), timeout_seconds)()

    def close(self) -> None:
        """Close the channel."""
        aside(self._channel.close)

    def _begin(self, method: str, data: bytes, timeout_seconds: float) -> Pending[bytes]:
        peer = f"the slow gear at {self.address}"
        try:
            method_call: Any = self._channel.unary_unary(f"/{GEAR_SERVICE}/{method}")
            call = aside(partial(method_call.future, data, timeout=timeout_seconds))
        except ValueError as exc:  # how gRPC says it
            raise NotSent(f"{peer}: the connection is closed") from exc

        def settle() -> bytes:
            while True:
                try:
                    reply: bytes = aside(partial(call.result, _WAIT_SECONDS))
                    return reply
                except grpc.FutureTimeoutError:
                    self._on_wait()
                except grpc.RpcError as exc:
                    raise error_from(exc, peer) from exc
                except grpc.FutureCancelledError as exc:
                    raise AttemptFailed(f"{peer}: the connection was closed") from exc

        return settle


def decode_ids(raw: memoryview | None) -> Ids:
    """Read distinct ids [K]. Raises ProtocolError, InvalidIds."""
    ids = framing.ids_from(raw)
    _require_distinct(ids)
    return ids


def decode_freshness(request: gear_pb2.FeaturesRequest) -> Freshness:
    """Read which features will do. Raises InvalidArgument."""
    age = request.max_age_seconds if request.HasField("max_age_seconds") else None
    if age is not None and not age >= 0:
        raise InvalidArgument(f"max_age_seconds is {age!r}; it must be >= 0")
    lag = min(request.max_version_lag, 2**62) if request.HasField("max_version_lag") else None
    return Freshness(age, lag)


def encode_features(reply: FeatureReply) -> bytes:
    """Encode the reply to a request for features."""
    header = gear_pb2.FeaturesReply(
        dense_version=reply.dense_version,
        failures=[
            gear_pb2.FeatureFailure(id=one, error=failure.error, reason=failure.reason)
            for one, failure in reply.failures.items()
        ],
    )
    stamps = np.concatenate([reply.versions.astype("<i8"), reply.times.astype("<f8").view("<i8")])
    vectors_KD = np.ascontiguousarray(reply.vectors_KD, _FLOAT32)
    return framing.encode_framed(header, [(_STAMPS, stamps), (_VECTORS, vectors_KD)])


def decode_features(data: bytes, num_ids: int, dim: int) -> FeatureReply:
    """Decode it. Raises ProtocolError, InvalidRows."""
    header, raw = framing.decode_framed(data, gear_pb2.FeaturesReply)
    stamps = _pairs(raw.get(_STAMPS), num_ids, "stamps")
    return FeatureReply(
        vectors_KD=framing.rows_from(raw.get(_VECTORS), num_ids, dim, _FLOAT32),
        versions=stamps[:num_ids],
        times=stamps[num_ids:].view(np.float64),
        failures={failure.id: Failure(failure.error, failure.reason) for failure in header.failures},
        dense_version=header.dense_version,
    )


def encode_delivery(name: str, delivery: Delivery, wait: bool, sent_to: str) -> bytes:
    """Encode gradients."""
    header = gear_pb2.PushFeatureGradientsRequest(
        name=name,
        source=delivery.source,
        incarnation=delivery.incarnation,
        sequence=delivery.sequence,
        lr=delivery.lr,
        wait=wait,
        sent_to=sent_to,
        lost=delivery.lost,
    )
    keys = np.concatenate([delivery.ids.astype("<i8"), delivery.versions.astype("<i8")])
    gradients_KD = np.ascontiguousarray(delivery.gradients_KD, _FLOAT32)
    return framing.encode_framed(header, [(_KEYS, keys), (_GRADIENTS, gradients_KD)])


def decode_delivery(data: bytes, dim: int) -> tuple[gear_pb2.PushFeatureGradientsRequest, Delivery]:
    """Decode them. Raises ProtocolError, InvalidIds, InvalidRows, InvalidArgument, NonFinite."""
    header, raw = framing.decode_framed(data, gear_pb2.PushFeatureGradientsRequest)
    keys_raw = raw.get(_KEYS)
    num_ids = (0 if keys_raw is None else len(keys_raw)) // 16
    keys = _pairs(keys_raw, num_ids, "keys")
    ids, versions = keys[:num_ids], keys[num_ids:]
    gradients_KD = framing.rows_from(raw.get(_GRADIENTS), num_ids, dim, _FLOAT32)
    lr = header.lr if header.HasField("lr") else None
    _require_distinct(ids)
    numbers = (header.incarnation, header.sequence)
    if not 1 <= len(header.source) <= _MAX_SOURCE or not all(1 <= number < 2**63 for number in numbers):
        raise InvalidArgument(
            f"source {header.source[:_MAX_SOURCE]!r}, incarnation and sequence {numbers}: a source has 1 … "
            f"{_MAX_SOURCE} characters, the numbers lie in [1, 2^63)"
        )
    if lr is not None and not (np.isfinite(lr) and lr >= 0):
        raise InvalidArgument(f"lr is {lr!r}; it must be finite and >= 0")
    if len(versions) and versions.min() < 0:
        raise InvalidArgument(f"dense version {versions.min()} of a feature is negative")
    if not np.isfinite(gradients_KD).all():
        bad = ids[~np.isfinite(gradients_KD).all(axis=1)]
        raise NonFinite(f"the gradients of {len(bad)} of {num_ids} ids are not finite, first that of id {bad[0]}")
    return header, Delivery(
        source=header.source,
        incarnation=header.incarnation,
        sequence=header.sequence,
        ids=ids,
        gradients_KD=gradients_KD,
        versions=versions,
        lr=lr,
        lost=header.lost,
    )


def account_to_pb(account: GearAccount) -> gear_pb2.GearAccount:
    """Encode an account."""
    return gear_pb2.GearAccount(**{name: getattr(account, name) for name in _COUNTS})


def account_from_pb(account: gear_pb2.GearAccount) -> GearAccount:
    """Decode an account."""
    return GearAccount(**{name: getattr(account, name) for name in _COUNTS})


def state_to_pb(state: GearState) -> gear_pb2.DescribeGearReply:
    """Encode how a slow gear is."""
    return gear_pb2.DescribeGearReply(
        name=state.name,
        dim=state.dim,
        address=state.address,
        process=state.process,
        partitions=state.partitions,
        dense_version=state.dense_version,
        cache_hits=state.cache_hits,
        cache_misses=state.cache_misses,
        queued_ids=state.queued_ids,
        account=account_to_pb(state.account),
        uptime_seconds=state.uptime_seconds,
        error=state.error,
        taken_over=state.taken_over,
        lost=state.lost,
        gradients_per_id=state.gradients_per_id,
    )


def state_from_pb(state: gear_pb2.DescribeGearReply) -> GearState:
    """Decode how a slow gear is."""
    return GearState(
        name=state.name,
        dim=state.dim,
        address=state.address,
        process=state.process,
        partitions=tuple(state.partitions),
        dense_version=state.dense_version,
        cache_hits=state.cache_hits,
        cache_misses=state.cache_misses,
        queued_ids=state.queued_ids,
        account=account_from_pb(state.account),
        uptime_seconds=state.uptime_seconds,
        error=state.error,
        taken_over=tuple(state.taken_over),
        lost=dict(state.lost),
        gradients_per_id=state.gradients_per_id,
    )


def _pairs(raw: memoryview | None, num_ids: int, what: str) -> npt.NDArray[np.int64]:
    given = 0 if raw is None else len(raw)
    if given != 16 * num_ids:
        raise ProtocolError(f"{given} bytes of {what} came; {num_ids} ids need {16 * num_ids}")
    if raw is None:
        return np.empty(0, np.int64)
    return np.require(np.frombuffer(raw, "<i8"), requirements="A")


def _require_distinct(ids: Ids) -> None:
    if len(ids) and ids.min() < 0:
        raise InvalidIds(f"id {ids.min()} is negative; ids lie in [0, 2**63)")
    ordered = np.sort(ids)
    if (twice := ordered[1:][ordered[1:] == ordered[:-1]]).size:
        raise InvalidIds(f"id {twice[0]} occurs twice; the ids of a request are distinct")
