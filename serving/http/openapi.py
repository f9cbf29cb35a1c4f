"""OpenAPI document of a service: each operation of each model with its schema and an example."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from geartrain.ams.values.rpc import version
from geartrain.serving.answers import Operation
from geartrain.serving.catalog import Catalog
from geartrain.serving.http.refusals import CODES

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["code", "message"],
            "properties": {
                "code": {"type": "string", "enum": list(CODES.values())},
                "message": {"type": "string", "description": "What is wrong, with the value, and what to do."},
            },
        }
    },
}
_REFUSED = {
    "description": "Not answered.",
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
}
_INTEGER = {"type": "integer"}
_FILE = {"schema": {"type": "string", "format": "binary"}}
_ROLLBACK = {
    "type": "object",
    "properties": {"to": {**_INTEGER, "description": "Default: that of the next lower number."}},
}
_CANARY = {
    "type": "object",
    "required": ["share"],
    "properties": {"version": _INTEGER, "share": {"type": "number", "minimum": 0, "maximum": 1}},
}


def takes_files(operation: Operation) -> str | None:
    """Return the input that a raw body can be, such as an image file; None without such an input, or with others."""
    (first, *others) = operation.inputs
    return first.name if not others and first.dtype == "object" and len(first.shape) == 1 else None


def document(catalog: Catalog) -> dict[str, Any]:
    """Return the whole document for the current models."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Geartrain",
            "version": version(),
            "description": "Models of 'geartrain serve'. An answer names the version that gave it.",
        },
        "paths": dict(_paths(catalog)),
        "components": {
            "schemas": {"Error": _ERROR},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _paths(catalog: Catalog) -> Iterator[tuple[str, Any]]:
    for path, what in {"/livez": "Whether the process lives.", "/readyz": "Whether it can be asked."}.items():
        yield path, {"get": _asked(what, None)}
    yield "/v1/models", {"get": _asked("The models, and which versions of them are served.", None)}
    for name in catalog.names:
        path = f"/v1/models/{name}"
        yield path, {"get": _asked("Facts of the model, its versions and operations.", None)}
        yield f"{path}/rollback", {"post": _asked("Make another version the current one.", _ROLLBACK, example={})}
        yield (
            f"{path}/canary",
            {
                "post": _asked(
                    "Send a part of the requests to another version.", _CANARY, example={"version": 1, "share": 0.1}
                )
            },
        )
        if (current := catalog.state(name)["current"]) is None:
            continue
        with catalog.lease(name, current) as lease:
            if lease.servable.facts.get("pictures"):
                asked = _asked("What a class looks like.", None)
                asked["responses"]["200"]["content"] = {"image/png": _FILE}
                integer = {"name": "label", "in": "path", "required": True, "schema": _INTEGER}
                yield f"{path}/classes/{{label}}/picture", {"get": {**asked, "parameters": [integer]}}
            for operation in lease.servable.operations.values():
                yield f"{path}/{operation.name}", {"post": _operation(operation)}


def _operation(operation: Operation) -> dict[str, Any]:
    answer = {
        "type": "object",
        "required": ["model", "version", "created", "answers"],
        "properties": {
            "model": {"type": "string"},
            "version": _INTEGER,
            "created": {"type": "number", "description": "Unix time of the moment of the training that it is of."},
            "answers": {"type": "array", "items": dict(operation.answer)},
        },
    }
    asked = _asked(operation.help, dict(operation.request), answer)
    asked["parameters"] = [
        {"name": "version", "in": "query", "schema": _INTEGER, "description": "Default: the current one."},
        *(
            {"name": name, "in": "query", "schema": schema}
            for name, schema in operation.request.get("properties", {}).items()
            if isinstance(schema, dict) and schema.get("type") in ("integer", "number", "boolean")
        ),
    ]
    if takes_files(operation):
        asked["requestBody"]["content"] |= {"image/*": _FILE, "application/octet-stream": _FILE}
    return asked


def _asked(what: str, body: Any, answer: Any = None, *, example: Any = None) -> dict[str, Any]:
    content = {"application/json": {"schema": answer or {"type": "object"}}}
    said: dict[str, Any] = {
        "summary": what,
        "responses": {"200": {"description": "The answer.", "content": content}, "4XX": _REFUSED, "5XX": _REFUSED},
        "security": [{}, {"token": []}],
    }
    if body is not None:
        shown = {"schema": body} if example is None else {"schema": body, "example": example}
        said["requestBody"] = {"required": example is None, "content": {"application/json": shown}}
    return said
