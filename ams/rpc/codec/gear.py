"""Encoding of features and their gradients, to and from a slow gear.

Legend: D width of a dense feature, K distinct ids.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from geartrain.ams.pb.v1 import gear_pb2
from geartrain.ams.rpc.codec import framing
from geartrain.ams.values.errors import InvalidArgument, InvalidIds, InvalidRows, NonFinite, ProtocolError
from geartrain.ams.values.gear_messages import Delivery, Failure, FeatureReply, PushFeatureGradients
from geartrain.ams.values.specs import Ids

_STAMPS = _KEYS = 14
_VECTORS = _GRADIENTS = 15
_FLOAT32 = np.dtype("<f4")
_MAX_SOURCE = 300
"""Most characters of a source: a stream's name and a suffix."""


def encode_features(reply: FeatureReply) -> bytes:
    """Encode the reply to a request for features."""
    header = gear_pb2.FeaturesReply(
        dense_version=reply.dense_version,
        failures=[
            gear_pb2.FeatureFailure(id=id_, error=failure.error, reason=failure.reason)
            for id_, failure in reply.failures.items()
        ],
    )
    stamps = np.concatenate([reply.versions.astype("<i8"), reply.times.astype("<f8").view("<i8")])
    vectors_KD = np.ascontiguousarray(reply.vectors_KD, _FLOAT32)
    return framing.encode_framed(header, [(_STAMPS, stamps), (_VECTORS, vectors_KD)])


def decode_features(data: bytes) -> FeatureReply:
    """Decode the reply; K and D follow from the number of bytes. Raises ProtocolError, InvalidRows."""
    header, raw = framing.decode_framed(data, gear_pb2.FeaturesReply)
    stamps, vectors_KD = _with_rows(raw.get(_STAMPS), raw.get(_VECTORS), "stamps")
    num_ids = len(vectors_KD)
    return FeatureReply(
        vectors_KD=vectors_KD,
        versions=stamps[:num_ids],
        times=stamps[num_ids:].view(np.float64),
        failures={failure.id: Failure(failure.error, failure.reason) for failure in header.failures},
        dense_version=header.dense_version,
    )


def encode_delivery(push: PushFeatureGradients) -> bytes:
    """Encode gradients."""
    delivery = push.delivery
    header = gear_pb2.PushFeatureGradientsRequest(
        name=push.name,
        source=delivery.source,
        incarnation=delivery.incarnation,
        sequence=delivery.sequence,
        lr=delivery.lr,
        wait=push.wait,
        sent_to=push.sent_to,
        lost=delivery.lost,
        table_incarnation=delivery.table_incarnation,
    )
    keys = np.concatenate([delivery.ids.astype("<i8"), delivery.versions.astype("<i8")])
    gradients_KD = np.ascontiguousarray(delivery.gradients_KD, _FLOAT32)
    return framing.encode_framed(header, [(_KEYS, keys), (_GRADIENTS, gradients_KD)])


def decode_delivery(data: bytes) -> PushFeatureGradients:
    """Decode gradients, as :func:`decode_features`. The receiver checks ids and learning rate.

    Raises ProtocolError, InvalidRows, InvalidArgument, NonFinite.
    """
    header, raw = framing.decode_framed(data, gear_pb2.PushFeatureGradientsRequest)
    keys, gradients_KD = _with_rows(raw.get(_KEYS), raw.get(_GRADIENTS), "keys")
    num_ids = len(gradients_KD)
    ids, versions = keys[:num_ids], keys[num_ids:]
    numbers = (header.incarnation, header.sequence)
    if not 1 <= len(header.source) <= _MAX_SOURCE or not all(1 <= number < 2**63 for number in numbers):
        raise InvalidArgument(
            f"source {header.source[:_MAX_SOURCE]!r}, incarnation and sequence {numbers}: a source has 1 … "
            f"{_MAX_SOURCE} characters, the numbers lie in [1, 2^63)"
        )
    if len(versions) and versions.min() < 0:
        raise InvalidArgument(f"dense version {versions.min()} of a feature is negative")
    if not np.isfinite(gradients_KD).all():
        bad = ids[~np.isfinite(gradients_KD).all(axis=1)]
        raise NonFinite(f"the gradients of {len(bad)} of {num_ids} ids are not finite, first that of id {bad[0]}")
    delivery = Delivery(
        source=header.source,
        incarnation=header.incarnation,
        sequence=header.sequence,
        ids=ids,
        gradients_KD=gradients_KD,
        versions=versions,
        lr=header.lr if header.HasField("lr") else None,
        lost=header.lost,
        table_incarnation=header.table_incarnation,
    )
    return PushFeatureGradients(name=header.name, delivery=delivery, wait=header.wait, sent_to=header.sent_to)


def require_distinct(ids: Ids) -> None:
    """Raise InvalidIds unless ids are distinct and not negative."""
    if len(ids) and ids.min() < 0:
        raise InvalidIds(f"id {ids.min()} is negative; ids lie in [0, 2**63)")
    ordered = np.sort(ids)
    if (twice := ordered[1:][ordered[1:] == ordered[:-1]]).size:
        raise InvalidIds(f"id {twice[0]} occurs twice; the ids of a request are distinct")


def _with_rows(
    pairs: memoryview | None, rows: memoryview | None, what: str
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Return two numbers for each id, [2 K], and their rows [K, D]."""
    given, row_bytes = len(pairs or b""), len(rows or b"")
    if given % 16:
        raise ProtocolError(f"{given} bytes of {what} came; each id needs 16")
    num_ids = given // 16
    if row_bytes % (4 * num_ids or 4) or (row_bytes and not num_ids):
        raise InvalidRows(f"{num_ids} ids came with {row_bytes} bytes of float32 rows, which is no whole row for each")
    if pairs is None:
        return np.empty(0, np.int64), np.empty((0, 0), np.float32)
    numbers = np.require(np.frombuffer(pairs, "<i8"), requirements="A")
    return numbers, framing.rows_from(rows, num_ids, row_bytes // (4 * num_ids) if num_ids else 0, _FLOAT32)
