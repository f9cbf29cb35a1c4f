"""Inference protocol over gRPC, for third-party clients."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import unquote

import grpc
from google.protobuf.message import DecodeError, Message

from geartrain.ams.rpc.credentials import Credentials
from geartrain.ams.rpc.server.rights import ANY, RequiredRights
from geartrain.ams.rpc.server.server import GrpcServer, ServedMethods, await_reply
from geartrain.ams.rpc.status import status_of
from geartrain.ams.rpc.tokens import METADATA_KEY
from geartrain.ams.values.config import ServeConfig
from geartrain.ams.values.errors import Busy, GeartrainError, InternalError, ProtocolError
from geartrain.ams.values.rpc import version as own_version
from geartrain.serving.answers import Arrays
from geartrain.serving.kserve.asking import EXTENSIONS, index_of, operation_of, version_of, wanted_of
from geartrain.serving.kserve.messages import inputs_of, metadata_of, parameters_of, response_of
from geartrain.serving.kserve.pb import inference_pb2 as pb
from geartrain.serving.metrics import RequestTarget
from geartrain.serving.rates import ClientRates
from geartrain.serving.service import ModelService

SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
Index = pb.RepositoryIndexResponse.ModelIndex
M = TypeVar("M", bound=Message)
_PROBES = ("ServerLive", "ServerReady")
_READERS = 16
"""Number of requests that are read at a time; at most half of them wait for a large picture."""
_ROOM_BYTES = 64 << 10
"""Bytes that a message may have beside its content."""


class InferenceService:
    """Handles the protocol's calls with the models of a service. Thread-safe."""

    def __init__(
        self,
        service: ModelService,
        most_items: int,
        rates: ClientRates,
        client_of: Callable[[str, str], str],
    ) -> None:
        """``most_items``: largest number of items of a request. ``client_of`` maps authorization and address to the
        client whose rate is counted."""
        self._service, self._catalog, self._most_items = service, service.catalog, most_items
        self._rates, self._client_of = rates, client_of
        self._readers = threading.Semaphore(_READERS)

    def bound(self) -> ServedMethods:
        """Return the methods by name, each with the right that a token needs: to read the named model."""
        methods: dict[str, tuple[type[Any], Callable[[Any, grpc.ServicerContext], Message], str]] = {
            "ServerLive": (pb.ServerLiveRequest, lambda *_: pb.ServerLiveResponse(live=True), ""),
            "ServerReady": (pb.ServerReadyRequest, self._server_ready, ""),
            "ServerMetadata": (pb.ServerMetadataRequest, self._server_metadata, ""),
            "RepositoryIndex": (pb.RepositoryIndexRequest, self._index, ""),
            "ModelReady": (pb.ModelReadyRequest, self._model_ready, "name"),
            "ModelMetadata": (pb.ModelMetadataRequest, self._model_metadata, "name"),
            "ModelInfer": (pb.ModelInferRequest, self._infer, "model_name"),
        }
        return ServedMethods(
            SERVICE,
            {
                name: _handler_of(kind, method if name in _PROBES else self._within_rate(method, name == "ModelInfer"))
                for name, (kind, method, _) in methods.items()
            },
            asks={name: _rights_of(kind, field) for name, (kind, _, field) in methods.items()},
        )

    def _within_rate(
        self, method: Callable[[Any, grpc.ServicerContext], Message], is_question: bool
    ) -> Callable[[Any, grpc.ServicerContext], Message]:
        def counted(request: Any, context: grpc.ServicerContext) -> Message:
            began = time.perf_counter()
            metadata = dict(context.invocation_metadata() or ())
            address = unquote(context.peer()).partition(":")[2].rpartition(":")[0].strip("[]")
            if wait := self._rates.wait(self._client_of(str(metadata.get(METADATA_KEY, "")), address)):
                refused = Busy(self._rates.sentence(wait), wait)
                if is_question:
                    code = status_of(refused).code.name
                    self._service.counts.request(RequestTarget(), "grpc", code, time.perf_counter() - began)
                raise refused
            return method(request, context)

        return counted

    def _server_ready(self, *_: object) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=not self._service.unready_reason())

    def _server_metadata(self, *_: object) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(name="geartrain", version=own_version(), extensions=EXTENSIONS)

    def _index(self, *_: object) -> pb.RepositoryIndexResponse:
        return pb.RepositoryIndexResponse(models=[Index(**one) for one in index_of(self._catalog)])

    def _model_ready(self, request: pb.ModelReadyRequest, _: object) -> pb.ModelReadyResponse:
        with self._catalog.lease(request.name, version_of(request.version)):
            return pb.ModelReadyResponse(ready=True)

    def _model_metadata(self, request: pb.ModelMetadataRequest, _: object) -> pb.ModelMetadataResponse:
        with self._catalog.lease(request.name, version_of(request.version)) as lease:
            versions = [loaded["version"] for loaded in self._catalog.state(request.name)["loaded"]]
            return metadata_of(request.name, versions, lease.servable.kind, operation_of(lease, None))

    def _infer(self, request: pb.ModelInferRequest, context: grpc.ServicerContext) -> pb.ModelInferResponse:
        began, asked, code = time.perf_counter(), RequestTarget(), grpc.StatusCode.CANCELLED
        try:
            with self._catalog.lease(request.model_name, version_of(request.model_version)) as lease:
                parameters = parameters_of(request)
                operation = operation_of(lease, parameters.pop("operation", None))
                asked = RequestTarget(lease.model, str(lease.servable.version), operation.name)
                with self._readers:
                    question = operation.accept(inputs_of(request, self._most_items), parameters)
                answer = self._service.batcher.submit(lease, operation.name, question)
                try:
                    answered: Arrays = await_reply(answer, context)
                except Exception as exc:
                    if answer.done() and answer.exception() is exc and not isinstance(exc, GeartrainError):
                        raise InternalError(f"{operation.name} of {lease.model!r} failed; its log says why") from exc
                    raise
                wanted = wanted_of(answered, [output.name for output in request.outputs])
                response = response_of(request, lease.servable.version, operation.name, wanted)
                code = grpc.StatusCode.OK
                return response
        except GeartrainError as exc:
            code = status_of(exc).code
            raise
        finally:
            self._service.counts.request(asked, "grpc", code.name, time.perf_counter() - began)


def inference_server(
    listen: str,
    service: ModelService,
    config: ServeConfig,
    folder: str | None,
    rates: ClientRates,
    client_of: Callable[[str, str], str],
) -> GrpcServer:
    """Start to serve the protocol at ``"host:port"`` with the certificates in ``folder``; the caller sets its health.

    ``rates`` and ``client_of`` as in :class:`InferenceService`. Raises ConfigError if the address cannot be bound.
    """
    credentials = Credentials(folder, "serve")
    most_bytes = config.max_body_bytes + _ROOM_BYTES
    server = GrpcServer(listen, most_bytes, credentials=credentials, is_shared=config.workers > 1)
    server.add(InferenceService(service, config.max_items, rates, client_of).bound())
    server.start()
    return server


def _parsed(kind: type[M], data: bytes) -> M:
    try:
        return kind.FromString(data)
    except DecodeError as exc:
        raise ProtocolError(f"{len(data)} bytes that are no {kind.DESCRIPTOR.full_name}: {exc}") from exc


def _handler_of(kind: type[Any], method: Callable[[Any, grpc.ServicerContext], Message]) -> Any:
    return lambda data, context: method(_parsed(kind, data), context).SerializeToString()


def _rights_of(kind: type[Any], field: str) -> Callable[[bytes], RequiredRights]:
    return lambda data: (
        RequiredRights("read", (getattr(_parsed(kind, data), field),)) if field else RequiredRights(ANY, ())
    )
