"""RPCs of all services: one declaration joins name, messages, value, codec and handler.

An RPC of a ``.proto`` file is declared by its request's value: a subclass of :class:`geartrain.ams.values.rpc.Rpc` of
the same name, in the service's module of values. Its messages are those of the service's descriptor, its codec follows
from the fields of both (:mod:`geartrain.ams.rpc.codec.messages`), and a role binds a handler to the value's type
(:func:`geartrain.ams.rpc.server.binding.bind`). So a new RPC costs a message, a value and a handler. Only RPCs with
rows have more of their own, below.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType, ModuleType
from typing import Any, get_args, get_origin

from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from geartrain.ams.pb.v1 import gear_pb2, graph_pb2, scheduler_pb2, shard_pb2, types_pb2
from geartrain.ams.rpc.codec import framing, hosted
from geartrain.ams.rpc.codec import gear as gear_codec
from geartrain.ams.rpc.codec.messages import FieldCodec, MessageCodec, is_record
from geartrain.ams.values import gear_messages, graph_messages, scheduler_messages
from geartrain.ams.values import rpc as common
from geartrain.ams.values import shard_messages as messages
from geartrain.ams.values.gear_messages import AskFeatures, PushFeatureGradients
from geartrain.ams.values.graph_messages import DownloadGraph
from geartrain.ams.values.rpc import Rpc
from geartrain.ams.values.shard_messages import Assign, CallContext, ComputeHosted, Pull, Push, UpdateHosted

_SMALL_BYTES = 16 << 10
_NOBODY = CallContext()
_CONTEXT = MessageCodec(CallContext, types_pb2.CallContext.DESCRIPTOR)


@dataclass(frozen=True)
class Codec:
    """Pair of functions from values to bytes and back."""

    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]


_AS_IT_IS = Codec(bytes, bytes)


@dataclass(frozen=True, kw_only=True)
class RowRpcParts:
    """Special parts of an RPC with rows."""

    outside_header: Collection[str] = ()
    """Fields of the request that are not in the header of its message. Its handler gets bytes, as rows may come another
    way: see :class:`geartrain.ams.server.service.ShardService`."""
    request: Codec | None = None
    reply: Codec | None = None


class Method:
    """One RPC of one service."""

    def __init__(self, kind: type[Rpc[Any]], descriptor: MethodDescriptor, own: RowRpcParts) -> None:
        self.name: str = descriptor.name
        self.path = f"/{descriptor.containing_service.full_name}/{self.name}"
        self.is_stream: bool = descriptor.server_streaming
        """Whether it streams replies."""
        self.takes_bytes = bool(own.outside_header)
        """Whether its handler decodes requests and encodes replies itself."""
        self._request = own.request
        self._message: Any = GetMessageClass(descriptor.input_type)
        self.fields = frozenset(descriptor.input_type.fields_by_name)
        """Fields of the request's message."""
        self._has_context = "context" in self.fields
        if own.request is None:
            self.header = MessageCodec(kind, descriptor.input_type, own.outside_header)
            """Codec of requests."""
        self.reply: Codec | MessageCodec | FieldCodec
        if own.reply is not None:
            self.reply = own.reply
        else:
            (reply,) = (get_args(base)[0] for base in kind.__orig_bases__ if get_origin(base) is Rpc)  # type: ignore[attr-defined]
            self.reply = (MessageCodec if is_record(reply) else FieldCodec)(reply, descriptor.output_type)

    def encode(self, request: Any, context: CallContext = _NOBODY) -> bytes:
        """Encode a request that is one message. Raises InvalidArgument."""
        if self._request is not None:
            return self._request.encode(request)
        given = {"context": context_to_pb(context)} if self._has_context else {}
        return self.header.encode(request, **given)

    def header_of(self, data: bytes) -> Any:
        """Return the message of a request; of a large one without its rows. Raises ProtocolError."""
        if len(data) <= _SMALL_BYTES:  # copying it is faster than splitting it
            return framing.parse(data, self._message)
        if self.takes_bytes or self._request is not None:
            return framing.decode_framed(data, self._message)[0]
        return self.header.split(data)[0]

    def decode(self, data: bytes) -> tuple[Any, CallContext]:
        """Return (request, caller) of an encoded request. Raises ProtocolError, or the error of an invalid value."""
        if self._request is not None:
            return self._request.decode(data), _NOBODY
        header, raw = self.header.split(data)
        context = context_from_pb(header.context) if self._has_context else _NOBODY
        return self.header.joined(header, raw), context


class Service:
    """RPCs of one service, by the types of their requests.

    Raises TypeError if an RPC has no value, a value no RPC, or a field of one no counterpart in the other.
    """

    def __init__(
        self,
        descriptor: ServiceDescriptor,
        values: ModuleType,
        own: Mapping[type, RowRpcParts] = MappingProxyType({}),
        *,
        role: str | None = None,
    ) -> None:
        self.name: str = descriptor.full_name
        self.role = role
        """Role of the certificate that a server of it must show; None: any."""
        kinds = _rpcs_of(common) | _rpcs_of(values)
        self._methods = {
            kinds[name]: Method(kinds[name], method, own.get(kinds[name], RowRpcParts()))
            for name, method in descriptor.methods_by_name.items()
            if name in kinds
        }
        known = {method.name for method in self._methods.values()}
        if unknown := {*descriptor.methods_by_name, *_rpcs_of(values)} - known:
            raise TypeError(f"service {self.name}: {sorted(unknown)} must be both an RPC and a value")

    def __getitem__(self, kind: type[Rpc[Any]]) -> Method:
        return self._methods[kind]

    def items(self) -> Collection[tuple[type[Rpc[Any]], Method]]:
        """Return all RPCs, by the type of their request."""
        return self._methods.items()


def _rpcs_of(values: ModuleType) -> dict[str, type[Rpc[Any]]]:
    found = vars(values).values()
    kinds = [kind for kind in found if isinstance(kind, type) and issubclass(kind, Rpc) and kind is not Rpc]
    return {kind.rpc_name: kind for kind in kinds}


def context_to_pb(context: CallContext) -> types_pb2.CallContext:
    """Encode the caller's context."""
    return _CONTEXT.to_message(context)  # type: ignore[return-value]


def context_from_pb(pb: types_pb2.CallContext) -> CallContext:
    """Decode the caller's context."""
    return _CONTEXT.from_message(pb)  # type: ignore[no-any-return]


def _service(file: Any, name: str) -> ServiceDescriptor:
    return file.DESCRIPTOR.services_by_name[name]  # type: ignore[no-any-return]


SHARD = Service(
    _service(shard_pb2, "Shard"),
    messages,
    {
        Pull: RowRpcParts(outside_header=("ids", "out", "present"), reply=_AS_IT_IS),
        Push: RowRpcParts(outside_header=("ids", "gradients")),
        Assign: RowRpcParts(outside_header=("ids", "rows")),
        ComputeHosted: RowRpcParts(
            outside_header=("inputs",), reply=Codec(hosted.encode_computed, hosted.decode_computed)
        ),
        UpdateHosted: RowRpcParts(outside_header=("inputs",)),
    },
    role="server",
)
SCHEDULER = Service(_service(scheduler_pb2, "Scheduler"), scheduler_messages, role="scheduler")
GRAPH = Service(
    _service(graph_pb2, "Graph"), graph_messages, {DownloadGraph: RowRpcParts(reply=_AS_IT_IS)}, role="graph"
)
GEAR = Service(
    _service(gear_pb2, "Gear"),
    gear_messages,
    {
        AskFeatures: RowRpcParts(reply=Codec(gear_codec.encode_features, gear_codec.decode_features)),
        PushFeatureGradients: RowRpcParts(request=Codec(gear_codec.encode_delivery, gear_codec.decode_delivery)),
    },
    role="slowgear",
)
