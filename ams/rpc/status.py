"""Conversion between Geartrain's errors and gRPC status: a standard code, with the error's name in the metadata."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

import grpc

from geartrain.ams.rpc.carrier import AttemptFailed, CertificateRejected, ConnectionRefused, NotSent
from geartrain.ams.rpc.credentials import UNRESOLVED
from geartrain.ams.values import errors
from geartrain.ams.values.config import token_path

logger = logging.getLogger(__name__)

ERROR_KEY = "geartrain-error"
RETRY_AFTER_KEY = "geartrain-retry-after-seconds"
"""Metadata key of Busy's retry time: a decimal number."""
_LONGEST_RETRY_AFTER_SECONDS = 60.0
_MAX_DETAILS = 4000

_NO_CONNECTION = ("failed to connect to all addresses", *UNRESOLVED)
"""Beginnings of gRPC's error text for a call that was never sent."""

# Part of gRPC's error text for an unavailable peer -> our text.
_REASONS = {
    "connection refused": "connection refused",
    "wrong_version_number": "it has no certificate (--insecure), and this process has (security.folder: none)",
    "certificate has expired": "its certificate ran out (geartrain certs renew)",
    "certificate_verify_failed": "its certificate is of an authority that security.folder does not believe",
    "hostname verification": "its certificate is of another role, shard or cluster than was expected",
    "ssl handshake failed": "it does not believe the certificate of this process, or has none itself",
    "domain name not found": "the name of the host is not known",
    "name or service not known": "the name of the host is not known",
    "dns resolution failed": "the name of the host cannot be resolved",
    "errors resolving": "the name of the host cannot be resolved",
    "no route to host": "there is no route to the host",
    "network is unreachable": "its network cannot be reached",
    "timed out": "no connection in time",
    "timeout": "no connection in time",
    "connection reset": "the connection was lost",
    "socket closed": "the connection was lost",
    "http1.x server": "what listens there is a web server",
    "http2 settings": "what listens there does not speak gRPC",
}

_NOBODY = (
    "connection refused",
    "the name of the host is not known",
    "the name of the host cannot be resolved",
    "there is no route to the host",
    "its network cannot be reached",
)
"""Reasons by which no process can be listening there."""

# The most specific class first.
_CODES: tuple[tuple[type[errors.GeartrainError], grpc.StatusCode], ...] = (
    (errors.SpecMismatch, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.InvalidArgument, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.ConfigError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.TableNotFound, grpc.StatusCode.NOT_FOUND),
    (errors.GraphNotFound, grpc.StatusCode.NOT_FOUND),
    (errors.NotServed, grpc.StatusCode.NOT_FOUND),
    (errors.TableExists, grpc.StatusCode.ALREADY_EXISTS),
    (errors.Unavailable, grpc.StatusCode.UNAVAILABLE),
    (errors.Fenced, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.SyncError, grpc.StatusCode.ABORTED),
    (errors.SnapshotNotFound, grpc.StatusCode.NOT_FOUND),
    (errors.SnapshotDamaged, grpc.StatusCode.DATA_LOSS),
    (errors.SnapshotRefused, grpc.StatusCode.PERMISSION_DENIED),
    (errors.SnapshotFailed, grpc.StatusCode.ABORTED),
    (errors.StateDamaged, grpc.StatusCode.DATA_LOSS),
    (errors.StateError, grpc.StatusCode.ABORTED),
    (errors.Cancelled, grpc.StatusCode.CANCELLED),
    (errors.OutOfMemory, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.MessageTooLarge, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.ProtocolError, grpc.StatusCode.INVALID_ARGUMENT),
)


class Status(NamedTuple):
    """Status of a failed call."""

    code: grpc.StatusCode
    details: str
    trailing_metadata: tuple[tuple[str, str], ...]


def status_of(error: errors.GeartrainError) -> Status:
    """Return the status of a call that ends with ``error``."""
    code = next((code for kind, code in _CODES if isinstance(error, kind)), grpc.StatusCode.INTERNAL)
    metadata: tuple[tuple[str, str], ...] = ((ERROR_KEY, type(error).__name__),)
    if isinstance(error, errors.Busy):
        metadata += ((RETRY_AFTER_KEY, f"{error.retry_after_seconds:.3f}"),)
    details = str(error)
    return Status(code, details if len(details) <= _MAX_DETAILS else details[:_MAX_DETAILS] + " …", metadata)


def abort(servicer_context: grpc.ServicerContext, error: errors.GeartrainError) -> NoReturn:
    """Abort a call with ``error``."""
    status = status_of(error)
    servicer_context.set_trailing_metadata(status.trailing_metadata)
    servicer_context.abort(status.code, status.details)
    raise AssertionError("abort returns by raising")


def error_from(call: grpc.RpcError | grpc.Call, peer: str) -> errors.GeartrainError | AttemptFailed:
    """Return the meaning of a failed call to ``peer``: an error the peer raised on purpose, or a lost attempt."""
    assert isinstance(call, grpc.Call)
    code, details = call.code(), call.details() or ""
    metadata = dict(call.trailing_metadata() or ())
    if ERROR_KEY in metadata:
        named = errors.error_named(str(metadata[ERROR_KEY]))
        if issubclass(named, errors.Busy):
            return named(details, _retry_after_seconds(metadata))
        return named(details)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return errors.MessageTooLarge(
            f"{peer} or this client refused a message: {details}. Lower part_bytes, or raise max_message_bytes on "
            "both ends"
        )
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED):
        logger.debug("%s: %s: %s", peer, code.name, details)
        kind = NotSent if details.lower().startswith(_NO_CONNECTION) else AttemptFailed
        reason = _reason(code, details)
        if kind is NotSent and reason in _NOBODY:
            kind = ConnectionRefused
        elif kind is NotSent and reason == "the connection was lost":  # from a server that rejects the certificate
            kind, reason = (
                CertificateRejected,
                f"{reason}: it may want a certificate, or another than that of this process",
            )
        elif kind is NotSent and "certificate" in reason:
            kind = CertificateRejected
        return kind(f"{peer} does not answer: {reason}")
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        if code is grpc.StatusCode.PERMISSION_DENIED and (token := token_path()) is not None:
            return errors.AccessDenied(
                f"{peer} refuses this call to the token of this process, {token}: the token expired, was revoked, was "
                "signed by a key of another cluster, is of another job, or does not give the right; the log there says "
                "which. Have one made that gives it ('geartrain certs token') and write it to that file "
                "(security.token): this process reads it within a second"
            )
        return errors.AccessDenied(
            f"{peer} refuses this call to the certificate of this process, which has no token; its log says why. Renew "
            "the certificate ('geartrain certs renew'), set security.folder to the folder of a role that may call it, "
            "or have a token made that gives the right ('geartrain certs token') and name its file in security.token"
        )
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return errors.ProtocolError(f"{peer} does not speak this protocol: {details}; is it the right role and port?")
    return errors.InternalError(f"{peer}: {code.name}: {details}")


def _retry_after_seconds(metadata: Mapping[str, Any]) -> float:
    """Return the time until a retry; 1 second if the peer sent none that is valid."""
    try:
        seconds = float(metadata.get(RETRY_AFTER_KEY, 1.0))
    except ValueError:
        return 1.0
    return min(max(seconds, 0.0), _LONGEST_RETRY_AFTER_SECONDS) if math.isfinite(seconds) else 1.0


def _reason(code: grpc.StatusCode, details: str) -> str:
    """Return why a call was lost, in words; gRPC's text is for its own developers."""
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "no reply in time"
    if code is grpc.StatusCode.CANCELLED:
        return "the call was cancelled"
    lower = details.lower()
    return next((words for sign, words in _REASONS.items() if sign in lower), "the connection failed")
