"""The slow-gear role: its engine behind gRPC. It knows arrays; what computes them is injected."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import grpc

from geartrain.ams.pb.v1 import gear_pb2
from geartrain.ams.rpc import framing
from geartrain.ams.rpc import gear_client as codec
from geartrain.ams.rpc.server import GrpcServer
from geartrain.ams.values.config import SlowGearConfig
from geartrain.ams.values.errors import InvalidArgument, MessageTooLarge
from geartrain.ams.values.gear_messages import GearHandler

_IDS = 14
_BYTES_BESIDE = 16
"""Of an id in a reply, beside its vector."""


class GearService:
    """Decodes, asks the handler, encodes."""

    def __init__(self, handler: GearHandler, max_message_bytes: int) -> None:
        self._handler = handler
        self._max_message_bytes = max_message_bytes

    @property
    def methods(self) -> dict[str, Any]:
        """The methods by name, from encoded request to encoded reply."""
        return {
            "Features": self.features,
            "PushFeatureGradients": self.push,
            "FlushGradients": self.flush,
            "DescribeGear": self.describe,
            "HandOver": self.hand_over,
        }

    def features(self, data: bytes, _: grpc.ServicerContext) -> bytes:
        """Dense features by id."""
        request, raw = framing.decode_framed(data, gear_pb2.FeaturesRequest)
        self._require_name(request.name)
        ids, freshness = codec.decode_ids(raw.get(_IDS)), codec.decode_freshness(request)
        if (size := len(ids) * (4 * self._handler.dim + _BYTES_BESIDE)) > self._max_message_bytes:
            raise MessageTooLarge(
                f"the features of {len(ids)} ids take {size} bytes, the limit is {self._max_message_bytes}; ask for "
                "fewer at once (lower the client's part_bytes), or raise max_message_bytes on both ends"
            )
        return codec.encode_features(self._handler.features(ids, freshness))

    def push(self, data: bytes, _: grpc.ServicerContext) -> bytes:
        """Take gradients."""
        request, delivery = codec.decode_delivery(data, self._handler.dim)
        self._require_name(request.name)
        taken = self._handler.deliver(delivery, wait=request.wait, sent_to=request.sent_to)
        return gear_pb2.PushFeatureGradientsReply(
            account=codec.account_to_pb(taken.account),
            dense_version=taken.dense_version,
            process=taken.process,
            is_repeat=taken.is_repeat,
        ).SerializeToString()

    def flush(self, data: bytes, _: grpc.ServicerContext) -> bytes:
        """Apply what waits."""
        self._require_name(framing.parse(data, gear_pb2.FlushGradientsRequest).name)
        self._handler.flush()
        return gear_pb2.FlushGradientsReply(dense_version=self._handler.dense_version).SerializeToString()

    def describe(self, data: bytes, _: grpc.ServicerContext) -> bytes:
        """How it is."""
        request = framing.parse(data, gear_pb2.DescribeGearRequest)
        return codec.state_to_pb(self._handler.describe(list(request.sources))).SerializeToString()

    def hand_over(self, data: bytes, _: grpc.ServicerContext) -> bytes:
        """Take the account of one that leaves."""
        request = framing.parse(data, gear_pb2.HandOverRequest)
        self._require_name(request.name)
        if not request.process:
            raise InvalidArgument("process is empty; it must be that of the slow gear that leaves")
        accounts = {entry.source: codec.account_from_pb(entry.account) for entry in request.accounts}
        self._handler.take_over(request.process, accounts)
        return gear_pb2.HandOverReply().SerializeToString()

    def _require_name(self, name: str) -> None:
        if name != self._handler.name:
            raise InvalidArgument(
                f"this slow gear serves {self._handler.name!r}, not {name!r}; look for its address again"
            )


class GearServer:
    """A slow gear on the network: start, serve until stopped."""

    def __init__(self, config: SlowGearConfig) -> None:
        self._config = config
        self._server: GrpcServer | None = None
        self._ended = threading.Event()

    def bind(self) -> str:
        """Bind; return the address. Raises ConfigError (the port is in use)."""
        self._server = GrpcServer(self._config.listen, self._config.max_message_bytes)
        return self._server.address

    def serve(self, handler: GearHandler) -> None:
        """Answer calls."""
        assert self._server is not None, "bind() first"
        self._server.add(codec.GEAR_SERVICE, GearService(handler, self._config.max_message_bytes).methods)
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
