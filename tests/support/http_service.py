"""A service of fake models on a port of this process, and a client of it."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any, NamedTuple

from geartrain.serving.answers import Servable
from geartrain.serving.batching import Batcher
from geartrain.serving.catalog import Catalog
from geartrain.serving.http.app import build_app
from geartrain.serving.http.callers import Callers, Limits
from geartrain.serving.http.ports import listening_socket
from geartrain.serving.http.server import HttpServer
from geartrain.serving.service import ModelService


class Answer(NamedTuple):
    status: int
    said: Any
    headers: http.client.HTTPMessage


def answer_of(
    address: str, method: str, path: str, body: Any = None, tls: ssl.SSLContext | None = None, **headers: str
) -> Answer:
    """What a service answers; a body that is no bytes is sent as JSON. ``_`` in the name of a header is ``-``."""
    to = http.client.HTTPConnection(address, timeout=60)
    if tls is not None:
        to = http.client.HTTPSConnection(address, timeout=60, context=tls)
    with closing(to) as connection:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method, path, data, {name.replace("_", "-"): text for name, text in headers.items()})
        response = connection.getresponse()
        return Answer(response.status, json.loads(response.read()), response.headers)


def ask(address: str, method: str, path: str, *body: Any, **headers: str) -> tuple[int, Any]:
    """Status and body of :func:`answer_of`."""
    return answer_of(address, method, path, *body, **headers)[:2]


class ServedModels:
    """Its port and its client."""

    def __init__(self, service: ModelService, server: HttpServer) -> None:
        self.service, self.server, self.address = service, server, server.address

    def send(self, method: str, path: str) -> int:
        """The status of an answer that may be no JSON."""
        with closing(http.client.HTTPConnection(self.address, timeout=20)) as connection:
            connection.request(method, path)
            return connection.getresponse().status

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """See :func:`answer_of`."""
        return answer_of(self.address, method, path, body, **headers)

    def refused(self, status: int, method: str, path: str, body: Any = None, **headers: str) -> str:
        """The sentence of a refusal, whose form is checked."""
        answer = self.ask(method, path, body, **headers)
        assert answer.status == status, answer
        assert set(answer.said) == {"error"}
        assert set(answer.said["error"]) == {"code", "message"}
        return str(answer.said["error"]["message"])


@contextmanager
def served_models(
    models: Mapping[str, Servable], limits: Limits | None = None, *, listen: str = "127.0.0.1:0", **settings: Any
) -> Iterator[ServedModels]:
    """Serve them; ``settings`` are those of :class:`Batcher` and :class:`HttpServer`."""
    catalog = Catalog()
    for name, model in models.items():
        catalog.add(name, model)
    headers_seconds = settings.pop("headers_seconds", 10.0)
    service = ModelService(catalog, Batcher(**settings))
    app = build_app(service, Callers(listen, None), limits)
    server = HttpServer(
        app, listening_socket(listen, "serve"), "127.0.0.1", name="test", headers_seconds=headers_seconds
    )
    try:
        yield ServedModels(service, server)
    finally:
        server.stop(20)
        service.close()
