"""Rows in messages of gRPC, as clients of other languages send them: for tests of the Shard service."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

from geartrain.ams.pb.v1 import shard_pb2, types_pb2
from geartrain.ams.rpc.channel import WAITS_KEY
from geartrain.ams.rpc.codec import framing
from geartrain.ams.rpc.services import SHARD, context_to_pb
from geartrain.ams.rpc.status import error_from
from geartrain.ams.values.errors import GeartrainError
from geartrain.ams.values.shard_messages import Assign, CallContext, Done, Pull, Push
from geartrain.ams.values.specs import Ids


def _code_of(dtype: np.dtype[Any]) -> types_pb2.DType.ValueType:
    return types_pb2.DType.Value(f"DTYPE_{dtype.name.upper()}")


def spans(count: int, bytes_per_id: int, part_bytes: int) -> list[tuple[int, int]]:
    """Cut 0 … count into the fewest runs of at most part_bytes."""
    parts = max(1, math.ceil(count / max(1, part_bytes // bytes_per_id)))
    return [(count * part // parts, count * (part + 1) // parts) for part in range(parts)]


def pull_message(table: str, ids: Ids, dtype: np.dtype[Any], context: CallContext, *, present: bool = False) -> bytes:
    """A pull of rows as ``dtype``."""
    asked = Pull(table=table, ids=ids, out=np.empty((0, 0), dtype))
    header: Any = SHARD[Pull].header.to_message(
        asked, context=context_to_pb(context), with_present=present, row_dtype=_code_of(dtype)
    )
    return framing.encode_framed(header, [(14, ids)])


def pulled(data: bytes, out: npt.NDArray[Any], present: npt.NDArray[Any] | None = None) -> None:
    """Write the rows of a reply, and which exist."""
    _, raw = framing.decode_framed(data, shard_pb2.PullReply)
    out[:] = framing.rows_from(raw.get(15), *out.shape, out.dtype)
    if present is not None:
        present[:] = np.frombuffer(raw[14], present.dtype)


def write_messages(write: Push | Assign, context: CallContext, part_bytes: int = 1 << 30) -> list[bytes]:
    """A write, in parts of at most so many bytes."""
    rows = write.gradients if isinstance(write, Push) else write.rows
    cuts = spans(len(write.ids), rows.shape[1] * rows.itemsize + 8, part_bytes)
    messages = []
    for index, (start, end) in enumerate(cuts):
        part = write
        if isinstance(part, Push) and part.batch is not None and part.batch.occurrences is not None:
            part = replace(part, batch=replace(part.batch, occurrences=part.batch.occurrences[start:end]))
        header: Any = SHARD[type(write)].header.to_message(part, context=context_to_pb(context))
        if isinstance(write, Push):
            header.gradient_dtype = _code_of(rows.dtype)
        if len(cuts) > 1:
            header.part.CopyFrom(shard_pb2.Part(index=index, count=len(cuts)))
        messages.append(framing.encode_framed(header, [(14, write.ids[start:end]), (15, rows[start:end])]))
    return messages


def outcome_of(kind: type[Push | Assign], replies: list[Callable[[], bytes]], peer: str = "shard") -> Any:
    """What the parts of a write come to: Done, or the error, a GeartrainError or AttemptFailed."""
    outcomes: list[Any] = []
    for reply in replies:
        try:
            outcomes.append(SHARD[kind].reply.decode(reply()))
        except grpc.RpcError as exc:
            outcomes.append(error_from(exc, peer))
        except GeartrainError as exc:
            outcomes.append(exc)
    errors = [outcome for outcome in outcomes if not isinstance(outcome, Done)]
    return (errors or [outcome for outcome in outcomes if not outcome.incomplete] or [None])[0]


class MessageShard:
    """One shard, as a client sees it that writes by messages alone."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])

    def write(
        self, context: CallContext, write: Push | Assign, seconds: float, *, says_that_it_waits: bool = True
    ) -> Future[Done]:
        """Send a write that is one message."""
        method = SHARD[type(write)]
        metadata = ((WAITS_KEY, "1"),) if says_that_it_waits else ()
        (data,) = write_messages(write, context)
        send: Any = self._channel.unary_unary(method.path)
        call = send.future(data, timeout=seconds, metadata=metadata)
        done: Future[Done] = Future()

        def settle(_: Any) -> None:
            outcome = outcome_of(type(write), [call.result])
            done.set_result(outcome) if isinstance(outcome, Done) else done.set_exception(outcome)

        call.add_done_callback(settle)
        return done

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()
