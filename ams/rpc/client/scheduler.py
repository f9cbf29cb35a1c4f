"""gRPC carrier to the scheduler."""

from __future__ import annotations

from typing import Any, TypeVar

from geartrain.ams.rpc.channel import CONNECT_SECONDS
from geartrain.ams.rpc.client.calls import GrpcCalls
from geartrain.ams.rpc.client.silence import ASK_AFTER_SECONDS, LONGEST_PAUSE_SECONDS, Peer, SilenceLog
from geartrain.ams.rpc.services import SCHEDULER
from geartrain.ams.values.config import MAX_MESSAGE_BYTES
from geartrain.ams.values.rpc import Rpc

R = TypeVar("R")


class GrpcSchedulerCarrier(GrpcCalls):
    """Carrier to the scheduler over gRPC: a :class:`geartrain.ams.rpc.carrier.SchedulerCarrier`."""

    pauses = ASK_AFTER_SECONDS, LONGEST_PAUSE_SECONDS

    def __init__(
        self,
        address: str,
        *,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        connect_seconds: float = CONNECT_SECONDS,
    ) -> None:
        super().__init__(
            SCHEDULER, "scheduler", address, max_message_bytes=max_message_bytes, connect_seconds=connect_seconds
        )
        self._as_peer = Peer("scheduler", address, f"geartrain health {address}")  # 'status' would ask it, too
        self._silence = SilenceLog()

    def call(self, request: Rpc[R], timeout_seconds: float | None) -> R:
        reply = super().call(request, timeout_seconds)
        if self._silence.named:
            self._silence.record_reply(self._as_peer)
        return reply

    def waited(self, call: Any, timeout_seconds: float | None) -> None:
        """Log if the scheduler does not even answer a health check."""
        wait = "until it does" if timeout_seconds is None else f"up to {timeout_seconds:g} s"
        self._silence.check(lambda: () if call.done() else (self._as_peer,), wait)
