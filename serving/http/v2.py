"""KServe's inference protocol over HTTP: tensors in JSON, or raw after it (the binary data extension)."""

from __future__ import annotations

import asyncio
import base64
import binascii
import itertools
import json
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.rpc import version as own_version
from geartrain.ams.values.text import quoted
from geartrain.serving.answers import Arrays
from geartrain.serving.http.callers import Callers, Limits
from geartrain.serving.http.refusals import json_response
from geartrain.serving.kserve.asking import EXTENSIONS, index_of, operation_of, version_of, wanted_of
from geartrain.serving.kserve.datatypes import (
    BYTES,
    Array,
    array_of,
    checked,
    datatype_of,
    elements_of,
    from_raw,
    tensor_metadata,
    to_raw,
)
from geartrain.serving.metrics import RequestTarget
from geartrain.serving.service import ModelService

ASKED = "geartrain.asked"
"""Key in the scope of a request: its model and operation, for counters."""
LENGTH_HEADER = "inference-header-content-length"
"""Header with the length of the JSON, where raw tensors follow."""
_BASE64 = {"content_type": "base64"}
_MAX_NESTED = 8
_OF_KIND: dict[str, tuple[type, ...]] = {"b": (bool,), "i": (int,), "u": (int,), "f": (int, float), "O": (str,)}
"""JSON types of the elements of a numpy kind."""


class InferenceRoutes:
    """Routes of the protocol for the models of an app."""

    def __init__(
        self, service: ModelService, callers: Callers, limits: Limits, on_thread: Callable[..., Awaitable[Any]]
    ) -> None:
        """``on_thread`` runs slow functions on a thread."""
        self._service, self._callers, self._limits, self._on_thread = service, callers, limits, on_thread

    def routes(self) -> list[Route]:
        """Return all routes."""
        model, version = "/v2/models/{name}", "/v2/models/{name}/versions/{version}"
        found = [
            Route("/v2", self._server),
            Route("/v2/health/ready", self._ready),
            Route("/v2/repository/index", self._index, methods=["POST"]),
        ]
        for path in (version, model):
            found += [
                Route(path, self._metadata),
                Route(f"{path}/ready", self._model_ready),
                Route(f"{path}/infer", self._infer, methods=["POST"]),
            ]
        return found

    async def _server(self, _: Request) -> Response:
        return json_response({"name": "geartrain", "version": own_version(), "extensions": EXTENSIONS})

    async def _ready(self, _: Request) -> Response:
        ready = not await self._on_thread(self._service.unready_reason)
        return json_response({"ready": ready}, 200 if ready else 503)

    async def _index(self, _: Request) -> Response:
        return json_response(index_of(self._service.catalog))

    async def _model_ready(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._callers.require(request, "read", name)
        with self._service.catalog.lease(name, version_of(request.path_params.get("version", ""))):
            return json_response({"name": name, "ready": True})

    async def _metadata(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._callers.require(request, "read", name)
        catalog = self._service.catalog
        with catalog.lease(name, version_of(request.path_params.get("version", ""))) as lease:
            operation = operation_of(lease, request.query_params.get("operation"))
            inputs, outputs = (
                [dict(zip(("name", "datatype", "shape"), tensor_metadata(spec), strict=True)) for spec in specs]
                for specs in (operation.inputs, operation.outputs)
            )
            versions = [str(loaded["version"]) for loaded in catalog.state(name)["loaded"]]
            said = {"name": name, "versions": versions, "platform": f"geartrain_{lease.servable.kind}"}
            return json_response({**said, "inputs": inputs, "outputs": outputs})

    async def _infer(self, request: Request) -> Response:
        name, version = request.path_params["name"], version_of(request.path_params.get("version", ""))
        self._callers.require(request, "read", name)
        with self._service.catalog.lease(name, version) as lease:
            body = await self._limits.body(request)
            length = request.headers.get(LENGTH_HEADER)
            asked, arrays = await self._on_thread(_read, body, length, self._limits.max_items)
            parameters = asked["parameters"]
            is_binary = parameters.pop("binary_data_output", False) is True
            operation = operation_of(lease, parameters.pop("operation", None))
            request.scope[ASKED] = RequestTarget(name, str(lease.servable.version), operation.name)
            question = await self._on_thread(operation.accept, arrays, parameters)
            self._limits.require_items(question.num_items)
            answered = await asyncio.wrap_future(self._service.batcher.submit(lease, operation.name, question))
            outputs = {output["name"]: output["parameters"] for output in asked["outputs"]}
            wanted = wanted_of(answered, list(outputs))
            raw = {name for name in wanted if outputs.get(name, {}).get("binary_data", is_binary) is True}
            said = {"model_name": name, "model_version": str(lease.servable.version)}
            if asked["id"]:
                said["id"] = asked["id"]
            said["parameters"] = {"operation": operation.name, "created": lease.servable.created}
            response: Response = await self._on_thread(_written, said, wanted, raw)
            return response


def _read(body: bytes, length: str | None, most_items: int) -> tuple[dict[str, Any], dict[str, Array]]:
    """Return the request, checked, and its tensors."""
    end = len(body)
    if length is not None:
        if not (length.isascii() and length.isdecimal() and len(length) < 12 and int(length) <= len(body)):
            raise InvalidArgument(f"{LENGTH_HEADER} is {quoted(length)}, and the body has {len(body)} bytes")
        end = int(length)
    try:
        said = json.loads(body[:end])
    except (ValueError, RecursionError) as exc:
        raise InvalidArgument(f"the body is no JSON: {str(exc)[:200]}; give {{'inputs': [...]}}") from exc
    asked = {
        "id": _field(said, "id", str, ""),
        "parameters": dict(_field(said, "parameters", dict, {})),
        "outputs": [
            {"name": _field(output, "name", str), "parameters": _field(output, "parameters", dict, {})}
            for output in _field(said, "outputs", list, [])
        ],
    }
    arrays: dict[str, Array] = {}
    for tensor in _field(said, "inputs", list):
        name = _field(tensor, "name", str)
        if name in arrays:
            raise InvalidArgument(f"input {quoted(name)} is given twice; give each once")
        shape = _field(tensor, "shape", list)
        if not all(type(size) is int and size < 2**63 for size in shape):
            raise InvalidArgument(f"input {quoted(name)} has shape {quoted(shape)}; it must be a list of whole numbers")
        dtype, sizes = checked(name, _field(tensor, "datatype", str), shape, most_items)
        parameters = _field(tensor, "parameters", dict, {})
        if (size := parameters.get("binary_data_size")) is None:
            arrays[name] = array_of(name, _elements(name, tensor.get("data"), dtype, parameters), dtype, sizes)
            continue
        if type(size) is not int or not 0 <= size <= len(body) - end:
            raise InvalidArgument(
                f"input {quoted(name)} has binary_data_size {quoted(size)}, and {len(body) - end} bytes are left; set "
                f"{LENGTH_HEADER} to the bytes of the JSON before them"
            )
        arrays[name] = from_raw(name, body[end : end + size], dtype, sizes)
        end += size
    if not arrays:
        raise InvalidArgument("the request has no inputs; the model's metadata name them")
    return asked, arrays


def _field(said: Any, name: str, kind: type, default: Any = None) -> Any:
    """Return a field of an object. Raises InvalidArgument: it is missing without a default, or of another type."""
    value = said.get(name) if isinstance(said, dict) else None
    if value is None and default is not None:
        return default
    if not isinstance(value, kind):
        raise InvalidArgument(f"{name} is {quoted(value)}; it must be {_KINDS[kind]}")
    return value


_KINDS: dict[type, str] = {str: "a text", list: "a list", dict: "an object"}


def _elements(name: str, data: Any, dtype: np.dtype[Any], parameters: Mapping[str, Any]) -> list[Any]:
    """Return the elements of a flat or nested list. Raises InvalidArgument if one is not of the tensor's type."""
    if not isinstance(data, list):
        raise InvalidArgument(f"input {quoted(name)} has data {quoted(data)}; give a list, flat or nested as its shape")
    elements: list[Any] = data
    for _ in range(_MAX_NESTED):
        if not (elements and all(isinstance(part, list) for part in elements)):
            break
        elements = list(itertools.chain.from_iterable(elements))
    kinds = _OF_KIND[dtype.kind]
    wrong = next(
        (one for one in elements if not isinstance(one, kinds) or (isinstance(one, bool) and bool not in kinds)), None
    )
    if wrong is not None or None in elements:
        raise InvalidArgument(f"input {quoted(name)} has an element {quoted(wrong)}, which is no {datatype_of(dtype)}")
    if datatype_of(dtype) != BYTES:
        return elements
    if parameters.get("content_type") != "base64":
        return [text.encode(errors="surrogatepass") for text in elements]
    try:
        return [base64.b64decode(text, validate=True) for text in elements]
    except (binascii.Error, ValueError) as exc:
        raise InvalidArgument(f"input {quoted(name)} has an element that is no base64: {exc}") from exc


def _written(said: dict[str, Any], answered: Arrays, raw: set[str]) -> Response:
    """Return the response; outputs in ``raw`` follow the JSON as bytes."""
    outputs, parts = [], []
    for name, array in answered.items():
        output: dict[str, Any] = {"name": name, "datatype": datatype_of(array.dtype), "shape": list(array.shape)}
        if name in raw:
            parts.append(to_raw(array))
            output["parameters"] = {"binary_data_size": len(parts[-1])}
        elif output["datatype"] == BYTES:
            try:
                output["data"] = [one.decode() for one in elements_of(array)]
            except UnicodeDecodeError:
                output["data"] = [base64.b64encode(one).decode() for one in elements_of(array)]
                output["parameters"] = _BASE64
        elif array.dtype.kind == "f" and not np.isfinite(array).all():
            output["data"] = [one if math.isfinite(one) else None for one in elements_of(array)]  # JSON has no NaN
        else:
            output["data"] = elements_of(array)
        outputs.append(output)
    response = json_response({**said, "outputs": outputs})
    if not parts:
        return response
    text = bytes(response.body)
    headers = {LENGTH_HEADER: str(len(text))}
    return Response(text + b"".join(parts), 200, headers, "application/octet-stream")
