"""ASGI app of a model service: requests in JSON or as a raw file, answers in JSON."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from pydantic_core import from_json  # more than twice as fast as json.loads
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from geartrain.ams.observe.metrics import metrics_text
from geartrain.ams.values.config import ServeConfig
from geartrain.ams.values.errors import GeartrainError, InvalidArgument, NotServed
from geartrain.ams.values.text import quoted
from geartrain.serving.answers import Operation, Question, TooSlow
from geartrain.serving.batching import Batcher
from geartrain.serving.catalog import Catalog
from geartrain.serving.folder import load_folder
from geartrain.serving.http.callers import OPEN_PATHS, Callers, Limits
from geartrain.serving.http.openapi import document, takes_files
from geartrain.serving.http.page import try_page
from geartrain.serving.http.refusals import RefusedRequest, json_response, refusal, refuse
from geartrain.serving.http.v2 import ASKED, InferenceRoutes
from geartrain.serving.metrics import RequestTarget, ServingCounts
from geartrain.serving.models.own_code import trust
from geartrain.serving.rates import ClientRates
from geartrain.serving.service import ModelService, open_models

logger = logging.getLogger(__name__)

_READERS = 16
"""Threads that read requests, such as by decoding pictures; at most half of them wait for a large one."""
_SMALL_BYTES = 65_536
"""Shorter bodies are read by the answering thread: a thread switch takes longer than most of them."""
_SMALL_ITEMS = 16
"""Answers to at most so many items are written at once; longer ones on a thread."""
_KINDS = ("", "application/json", "application/x-www-form-urlencoded", "application/octet-stream")
"""Content types of bodies; the third is curl's default."""
T = TypeVar("T")
_LEFT = 499
"""Status in the counters of a request whose client has left, as in other servers."""


class HttpQuestions:
    """Routes of a service. Used by one event loop."""

    def __init__(self, service: ModelService, callers: Callers, limits: Limits, rates: ClientRates | None) -> None:
        self.service, self.callers, self.limits = service, callers, limits
        self._rates = rates
        self._under_way = 0
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="questions")

    def routes(self) -> list[Route]:
        """Return all routes."""
        return [
            try_page(),
            *(Route(path, self._live) for path in ("/livez", "/v2/health/live")),
            Route("/readyz", self._ready),
            Route("/openapi.json", self._openapi),
            Route("/v1/models", self._models),
            Route("/v1/models/{name}", self._model),
            Route("/v1/models/{name}/classes/{label}/picture", self._picture),
            Route("/v1/models/{name}/rollback", self._rollback, methods=["POST"]),
            Route("/v1/models/{name}/canary", self._canary, methods=["POST"]),
            Route("/v1/models/{name}/{operation}", self._answer, methods=["GET", "POST"]),
            Route("/v1/{operation}", self._answer, methods=["GET", "POST"]),
            Route("/metrics", self._metrics),
            *InferenceRoutes(self.service, self.callers, self.limits, self.on_thread).routes(),
        ]

    def bounded(self, app: Any) -> Any:
        """Return ``app`` behind the checks of access and rate."""

        async def bounded(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            began, status = time.perf_counter(), _LEFT

            async def sent(message: Any) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = message["status"]
                await send(message)

            try:
                client = self.callers.require_known(request := Request(scope))
                if request.url.path not in OPEN_PATHS:
                    if self._rates is not None and (wait := self._rates.wait(client)):
                        raise RefusedRequest(429, self._rates.sentence(wait), wait)
                    if self._under_way >= self.limits.max_requests:
                        raise RefusedRequest(
                            503, f"{self._under_way} requests are in progress, the most; ask again", 1.0
                        )
            except GeartrainError as exc:
                await refusal(exc, scope["path"])(scope, receive, sent)
            else:
                self._under_way += 1
                try:
                    await app(scope, receive, sent)
                finally:
                    self._under_way -= 1
            finally:
                if scope["method"] == "POST":  # a question to a model
                    seconds = time.perf_counter() - began
                    self.service.counts.request(scope.get(ASKED, RequestTarget()), "http", str(status), seconds)

        return bounded

    async def on_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run a slow function on a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, function, *arguments)

    def close(self) -> None:
        """Stop the threads that read requests."""
        self._readers.shutdown(wait=False)

    async def _answer(self, request: Request) -> Response:
        parameters = dict(request.query_params)
        version = _number("version", parameters.pop("version")) if "version" in parameters else None
        catalog, model = self.service.catalog, request.path_params.get("name")
        try:
            lease = catalog.lease(model, version)
        except GeartrainError:  # a model's versions are shown only to clients that may query it
            self.callers.require(request, "read", catalog.find(model))
            raise
        with lease:
            self.callers.require(request, "read", lease.model)
            operation = lease.operation(request.path_params["operation"])
            if request.method != "POST":
                raise HTTPException(405, headers={"Allow": "POST"})
            request.scope[ASKED] = RequestTarget(lease.model, str(lease.servable.version), operation.name)
            body = await self.limits.body(request)
            kind = request.headers.get("content-type", "")
            read = functools.partial(_question, operation, body, kind, parameters, self.limits)
            ask = functools.partial(self.service.batcher.submit, lease, operation.name)
            try:
                asked = ask(read if len(body) <= _SMALL_BYTES else await self.on_thread(read))
                answered = await asyncio.wrap_future(asked)
            except TooSlow:
                answered = await asyncio.wrap_future(ask(await self.on_thread(read)))
            said = {"model": lease.model, "version": lease.servable.version, "created": lease.servable.created}
            if len(next(iter(answered.values()))) <= _SMALL_ITEMS:
                return json_response({**said, "answers": operation.write(answered)})
            # Not with asyncio.to_thread, whose threads may all wait for other processes of the service.
            return await self.on_thread(lambda: json_response({**said, "answers": operation.write(answered)}))

    async def _live(self, _: Request) -> Response:
        return json_response({"live": True})

    async def _ready(self, _: Request) -> Response:
        if why := await self.on_thread(self.service.unready_reason):
            raise RefusedRequest(503, f"not ready: {why}", 1.0)
        return json_response({"ready": True})

    async def _metrics(self, _: Request) -> Response:
        text, kind = await asyncio.to_thread(metrics_text, self.service.metrics, "serve", self.callers.cluster)
        return Response(text, 200, {"Content-Type": kind})

    async def _openapi(self, _: Request) -> Response:
        return json_response(document(self.service.catalog))

    async def _models(self, _: Request) -> Response:
        return json_response({"models": [self.service.catalog.state(name) for name in self.service.catalog.names]})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        self.callers.require(request, "read", name)
        state, follows = self.service.catalog.state(name), self.service.following.get(name)
        if follows is not None:
            state["following"] = follows
            if state["current"] is None:
                return json_response(state)
        with self.service.catalog.lease(name, state["current"]) as lease:
            operations = {
                operation.name: {"help": operation.help, "request": operation.request, "answer": operation.answer}
                for operation in lease.servable.operations.values()
            }
            kind, facts = lease.servable.kind, lease.servable.facts
            if follows is not None:  # of the version beside it, whatever the follower reports by now
                age = round(time.time() - lease.servable.created, 3)
                state["following"] = {**follows, "step": facts["training"]["step"], "age_seconds": age}
            return json_response({**state, "kind": kind, "facts": facts, "operations": operations})

    async def _picture(self, request: Request) -> Response:
        name = self.service.catalog.find(request.path_params["name"])
        self.callers.require(request, "read", name)
        label = _number("class", request.path_params["label"])
        version = _number("version", request.query_params["version"]) if "version" in request.query_params else None
        with self.service.catalog.lease(name, version) as lease:
            draw: Callable[[int], bytes | None] = getattr(lease.servable, "picture", lambda _: None)
            found = draw(label)
        if found is None:
            raise NotServed(f"{name!r} has no picture of class {label}; its fact 'pictures' says whether it has some")
        return Response(found, headers={"Cache-Control": "private, max-age=3600"}, media_type="image/png")

    async def _rollback(self, request: Request) -> Response:
        name, wish = await self._wish(request, "to")
        to = wish.get("to")
        if to is not None and not _is_version(to):
            raise InvalidArgument(f"to is {quoted(to)}; it must be the number of a version, as 90, or left out")
        current = await asyncio.to_thread(self.service.rollback, name, to)
        return json_response({"model": name, "current": current})

    async def _canary(self, request: Request) -> Response:
        name, wish = await self._wish(request, "version", "share")
        version, share = wish.get("version"), wish.get("share")
        if version is not None and not _is_version(version):
            raise InvalidArgument(f"version is {quoted(version)}; it must be the number of a version, as 120")
        await asyncio.to_thread(self.service.change, "canary", model=name, version=version, share=share)
        return json_response(self.service.catalog.state(name))

    async def _wish(self, request: Request, *names: str) -> tuple[str, Mapping[str, Any]]:
        """Return the model, and the body, of a request for a change."""
        name = self.service.catalog.find(request.path_params["name"])
        self.callers.require(request, "admin", name)
        wish = _json(await self.limits.body(request) or b"{}")
        if unknown := [key for key in wish if key not in names]:
            raise InvalidArgument(f"the body has {quoted(unknown[0])}; it may have {' and '.join(names)}")
        return name, wish


def build_app(
    service: ModelService,
    callers: Callers,
    limits: Limits | None = None,
    *,
    rates: ClientRates | None = None,
    closes: bool = False,
) -> Any:
    """Return a Starlette app within limits, for :class:`geartrain.serving.http.server.HttpServer` or another server."""
    limits = limits or Limits()
    if rates is None and limits.requests_per_second is not None:
        rates = ClientRates(limits.requests_per_second)
    questions = HttpQuestions(service, callers, limits, rates)

    @asynccontextmanager
    async def lifespan(_: object) -> AsyncIterator[None]:
        yield
        questions.close()
        if closes:
            await asyncio.to_thread(service.close)

    app = Starlette(
        routes=questions.routes(),
        lifespan=lifespan,
        exception_handlers={GeartrainError: refuse, HTTPException: refuse, Exception: refuse},
    )
    bounded = questions.bounded(app)
    if not callers.origins:
        return bounded
    # First: a browser's preflight has no token, and its page must be able to read a refusal.
    return CORSMiddleware(bounded, callers.origins, allow_methods=["GET", "POST"], allow_headers=["*"])


def serve_app(
    models: str | Path | Mapping[str, str | Path],
    *,
    max_batch: int = 64,
    max_wait_millis: float = 2.0,
    preprocessing: str | None = None,
    **limits: Any,
) -> Any:
    """Return an ASGI app that serves exported models, as 'geartrain serve' does, for any ASGI server.

        app = geartrain.serve_app("exported/")           # uvicorn module:app

    Access, host names and ports are up to that server. The models are closed at the end of the app's lifespan.

    Args:
        models: a folder, or folders by name; each of one version, or of several, of which the newest is served.
        max_batch: most items in a batch.
        max_wait_millis: longest wait of a request for others while some are being answered.
        preprocessing: user code that models name, ``"package.module:function"``; it runs only if it is given here.
        limits: fields of :class:`geartrain.serving.http.callers.Limits`, such as ``max_body_bytes``.

    Raises:
        ConfigError: there is no model.
        ModelDamaged: the newest version is not whole.
    """
    several = models if isinstance(models, Mapping) else {"": models}
    wanted = tuple(f"{name}={folder}" if name else str(folder) for name, folder in several.items())
    trust(preprocessing)
    catalog, counts = Catalog(load_folder), ServingCounts()
    batcher = Batcher(max_batch=max_batch, max_wait_seconds=max_wait_millis / 1000, on_batch=counts.batch)
    service = ModelService(catalog, batcher, counts)
    try:
        open_models(catalog, ServeConfig(models=wanted))
        return build_app(service, Callers("localhost:0", None, is_open=True), Limits(**limits), closes=True)
    except BaseException:
        service.close()
        raise


def _question(operation: Operation, body: bytes, kind: str, parameters: Mapping[str, str], limits: Limits) -> Question:
    """Read a body: JSON, or the raw file that an operation accepts."""
    given = {key: _value(text) for key, text in parameters.items()} if parameters else {}
    kind = kind.partition(";")[0].strip().lower()
    is_json = kind.endswith("json") or (not kind.startswith("image/") and body[:1024].lstrip()[:1] in (b"{", b"["))
    field = None if is_json else takes_files(operation)
    if kind not in _KINDS and not kind.startswith("image/") and not kind.endswith("+json"):
        raise RefusedRequest(
            415, f"content-type is {quoted(kind)}; send application/json" + (", or an image file" if field else "")
        )
    if field is None:
        said = {**given, **_json(body)}
        for value in said.values():
            if isinstance(value, list):
                limits.require_items(len(value))
        question = operation.read(said)
        limits.require_items(question.num_items)  # lists in lists, too
        return question
    if not body:
        raise InvalidArgument(f"the body is empty; send {field} in JSON, or the file itself (curl --data-binary @FILE)")
    files = np.empty(1, object)
    files[0] = body
    return operation.accept({field: files}, given)


def _json(body: bytes) -> Mapping[str, Any]:
    try:
        said = from_json(body)
    except (ValueError, RecursionError) as exc:
        raise InvalidArgument(f"the body is no JSON: {str(exc)[:200]}; GET /openapi.json has an example") from exc
    if not isinstance(said, dict):
        raise InvalidArgument(f"the body is {quoted(said)}; it must be a JSON object, as {{...}}")
    return said


def _value(text: str) -> Any:
    """Parse a query parameter: a number or a boolean where it is one."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, int | float | bool) else text


def _number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise InvalidArgument(f"{name} is {quoted(text)}; it must be a number, as 120")
    return int(text)


def _is_version(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
