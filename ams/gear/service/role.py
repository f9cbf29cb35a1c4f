"""The slow-gear role: its engine behind gRPC. It knows arrays; what computes them is injected."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from geartrain.ams.rpc.codec.gear import require_distinct
from geartrain.ams.rpc.ping import PingHandler
from geartrain.ams.rpc.server.binding import Call, Handlers, bind
from geartrain.ams.rpc.server.server import GrpcServer
from geartrain.ams.rpc.services import GEAR
from geartrain.ams.values.config import SlowGearRoleConfig
from geartrain.ams.values.errors import InvalidArgument, InvalidRows, MessageTooLarge
from geartrain.ams.values.gear_messages import (
    AskFeatures,
    DescribeGear,
    FeatureReply,
    FlushGradients,
    Freshness,
    GearHandler,
    GearState,
    HandOver,
    PushFeatureGradients,
    Taken,
)
from geartrain.ams.values.rpc import Ping

_BYTES_BESIDE = 16
"""Of an id in a reply, beside its vector."""


class GearService:
    """Checks requests and asks the handler: by type of request."""

    def __init__(self, handler: GearHandler, max_message_bytes: int) -> None:
        self._handler = handler
        self._max_message_bytes = max_message_bytes

        self.by_request: Handlers = {
            Ping: PingHandler("slowgear", self._incarnation),
            AskFeatures: self.features,
            PushFeatureGradients: self._push,
            FlushGradients: self._flush,
            DescribeGear: self._describe,
            HandOver: self._hand_over,
        }

    def features(self, ask: AskFeatures, _: Call) -> FeatureReply:
        """Dense features by id."""
        self._require_name(ask.name)
        require_distinct(ask.ids)
        age = ask.max_age_seconds
        if age is not None and not age >= 0:
            raise InvalidArgument(f"max_age_seconds is {age!r}; it must be >= 0")
        lag = None if ask.max_version_lag is None else min(ask.max_version_lag, 2**62)
        if (size := len(ask.ids) * (4 * self._handler.dim + _BYTES_BESIDE)) > self._max_message_bytes:
            raise MessageTooLarge(
                f"the features of {len(ask.ids)} ids take {size} bytes, the limit is {self._max_message_bytes}; ask "
                "for fewer at once (lower the client's part_bytes), or raise max_message_bytes on both ends"
            )
        return self._handler.features(ask.ids, Freshness(age, lag))

    def _push(self, push: PushFeatureGradients, _: Call) -> Taken:
        delivery, dim = push.delivery, self._handler.dim
        if not len(delivery.ids):
            delivery = replace(delivery, gradients_KD=np.empty((0, dim), np.float32))
        if delivery.gradients_KD.shape[1] != dim:
            raise InvalidRows(f"gradients have width {delivery.gradients_KD.shape[1]}, the features have {dim}")
        require_distinct(delivery.ids)
        if delivery.lr is not None and not (math.isfinite(delivery.lr) and delivery.lr >= 0):
            raise InvalidArgument(
                f"lr is {delivery.lr!r}; it must be finite and >= 0, or None for the dense table's own"
            )
        self._require_name(push.name)
        return self._handler.deliver(delivery, wait=push.wait, sent_to=push.sent_to)

    def _flush(self, flush: FlushGradients, _: Call) -> int:
        self._require_name(flush.name)
        self._handler.flush()
        return self._handler.dense_version

    def _describe(self, describe: DescribeGear, _: Call) -> GearState:
        return self._handler.describe(list(describe.sources))

    def _hand_over(self, left: HandOver, _: Call) -> None:
        self._require_name(left.name)
        if not left.process:
            raise InvalidArgument("process is empty; it must be that of the slow gear that leaves")
        self._handler.take_over(left.process, left.accounts)

    def _incarnation(self) -> int:
        return int(self._handler.describe([]).process.rpartition("#")[2])

    def _require_name(self, name: str) -> None:
        if name != self._handler.name:
            raise InvalidArgument(
                f"this slow gear serves {self._handler.name!r}, not {name!r}; look for its address again"
            )


class GearServer:
    """A slow gear on the network: start, serve until stopped."""

    def __init__(self, config: SlowGearRoleConfig) -> None:
        self._config = config
        self._server: GrpcServer | None = None
        self._ended = threading.Event()

    def bind(self) -> str:
        """Bind; return the address. Raises ConfigError (the port is in use)."""
        self._server = GrpcServer(
            self._config.listen, self._config.max_message_bytes, reflection=self._config.reflection
        )
        return self._server.address

    def serve(self, handler: GearHandler) -> None:
        """Answer calls."""
        assert self._server is not None, "bind() first"
        self._server.add(bind(GEAR, GearService(handler, self._config.max_message_bytes).by_request))
        self._server.start()
        self._server.ready()

    def end(self) -> None:
        """Let whoever waits know that it cannot go on."""
        self._ended.set()

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Block until stopped; False if the time ran out first."""
        return self._ended.wait(timeout_seconds)

    def stop(self, grace_seconds: float = 5.0, drain: Callable[[], None] = lambda: None) -> None:
        """``drain`` while calls are still answered, then finish those under way and end. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            drain()
            server.stop(grace_seconds)
        self._ended.set()
