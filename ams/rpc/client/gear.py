"""gRPC carrier to a slow gear."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from geartrain.ams.rpc.channel import CONNECT_SECONDS
from geartrain.ams.rpc.client.calls import AwaitReply, GrpcCalls
from geartrain.ams.rpc.services import GEAR
from geartrain.ams.values.config import MAX_MESSAGE_BYTES, split_address
from geartrain.ams.values.errors import InvalidRows
from geartrain.ams.values.gear_messages import (
    AskFeatures,
    Delivery,
    DeliveryAck,
    DescribeGear,
    FeatureReply,
    FlushGradients,
    Freshness,
    GearAccount,
    GearState,
    HandOver,
    PushFeatureGradients,
)
from geartrain.ams.values.specs import Ids

_WAIT_SECONDS = 2.0


class GrpcGearCarrier(GrpcCalls):
    """Carrier to one slow gear.

    ``on_wait`` is called every two seconds during a wait for a reply: it may find that the slow gear is gone, and
    :meth:`close`, which ends the wait.
    """

    pauses = _WAIT_SECONDS, _WAIT_SECONDS

    def __init__(
        self,
        address: str,
        *,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        connect_seconds: float = CONNECT_SECONDS,
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        split_address(address)  # it was told by another process: raises ConfigError
        super().__init__(
            GEAR, "the slow gear", address, max_message_bytes=max_message_bytes, connect_seconds=connect_seconds
        )
        self._on_wait = on_wait

    def waited(self, call: Any, timeout_seconds: float | None) -> None:  # noqa: ARG002
        """Call ``on_wait``."""
        self._on_wait()

    def features(
        self, name: str, ids: Ids, dim: int, freshness: Freshness, timeout_seconds: float
    ) -> AwaitReply[FeatureReply]:
        """Ask for the features of distinct ids. Raises InvalidRows if they come in another number or width."""
        pending = self.start(
            AskFeatures(
                name=name, ids=ids, max_age_seconds=freshness.max_age_seconds, max_version_lag=freshness.max_version_lag
            ),
            timeout_seconds,
        )

        def await_reply() -> FeatureReply:
            reply = pending()
            if reply.vectors_KD.shape != (len(ids), dim) and (len(ids) or reply.vectors_KD.size):
                raise InvalidRows(f"features came as {list(reply.vectors_KD.shape)}; they must be [{len(ids)}, {dim}]")
            return reply

        return await_reply

    def deliver(
        self, name: str, delivery: Delivery, *, wait: bool, sent_to: str, timeout_seconds: float
    ) -> AwaitReply[DeliveryAck]:
        """Deliver gradients."""
        return self.start(
            PushFeatureGradients(name=name, delivery=delivery, wait=wait, sent_to=sent_to), timeout_seconds
        )

    def flush(self, name: str, timeout_seconds: float) -> AwaitReply[int]:
        """Ask for all waiting gradients to be applied; the reply is the dense version."""
        return self.start(FlushGradients(name=name), timeout_seconds)

    def describe(self, sources: Sequence[str], timeout_seconds: float) -> AwaitReply[GearState]:
        """Ask for its state."""
        return self.start(DescribeGear(sources=tuple(sources)), timeout_seconds)

    def hand_over(self, name: str, process: str, accounts: Mapping[str, GearAccount], timeout_seconds: float) -> None:
        """Report the accounts of ``process``, which shuts down."""
        self.call(HandOver(name=name, process=process, accounts=accounts), timeout_seconds)
