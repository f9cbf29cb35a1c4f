"""A stand-in for ``geartrain serve`` with answers written here, for what asks one over HTTP."""

from __future__ import annotations

import asyncio
import io
import json
import math
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import uvicorn
from PIL import Image, ImageDraw
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from geartrain.serving.http.page import try_page

NEXT = [("水", 0.61), ("U+6C37", 0.58), ("承", 0.41), ("求", 0.33)]
FIELDS = ["user", "item", "age", "gender", "occupation", "genre", "hour", "weekday", "device", "city", "query", "price"]
_IMAGES = {"type": "array", "items": {"type": "string", "contentEncoding": "base64"}}


ITEM = {
    "anyOf": [{"type": "integer"}, {"type": "array", "maxItems": 0}],
    "x-choices": [
        {"value": 50, "title": "Star Wars (1977)", "others": {"genre": ["Action", "War"], "price": 3}},
        {"value": 8, "title": "Babe (1995)", "others": {"genre": ["Comedy"]}},
    ],
}


def _sample() -> dict[str, Any]:
    one: list[dict[str, Any]] = [{"type": "integer"}, {"type": "string"}]
    fields: dict[str, Any] = {name: {"anyOf": [*one, {"type": "array", "items": {"anyOf": one}}]} for name in FIELDS}
    event = {"type": "array", "items": {"anyOf": one}, "description": "[item, outcome]"}
    fields["history"] = {"anyOf": [{"type": "array", "items": event}]}
    fields["item"] = ITEM
    fields["occupation"] = {**fields["occupation"], "anyOf": [*one, {"type": "array", "maxItems": 0}]}
    fields["occupation"]["x-choices"] = [{"value": name} for name in ("artist", "writer")]
    fields["genre"]["x-choices"] = [{"value": name} for name in ("Comedy", "Drama")]
    return {"type": "object", "properties": fields}


SAMPLE = {name: 7 * i + 1 for i, name in enumerate(FIELDS)} | {
    "user": 2**62 + 1,
    "occupation": "writer",
    "genre": ["Comedy"],
    "history": [[31, 1], [1204, 0]],
}
OTHER = SAMPLE | {"user": [], "item": 50, "genre": ["Drama"]}
BASE = -0.4
OPERATIONS: dict[str, dict[str, Any]] = {
    "classify": {"help": "The best classes of pictures.", "request": {"properties": {"images": _IMAGES}}},
    "verify": {"help": "Whether two pictures show the same.", "request": {"type": "object"}},
    "embed": {"help": "Features of pictures.", "request": {"properties": {"images": _IMAGES}}},
    "nearest": {
        "help": "The classes nearest to features.",
        "request": {
            "properties": {"features": {"type": "array", "items": {"type": "array", "items": {"type": "number"}}}},
            "example": {"features": [[1.0, 0.0, 0.0]]},
        },
    },
    "click": {
        "help": "The probability that a sample is clicked.",
        "request": {
            "type": "object",
            "properties": {"samples": {"type": "array", "items": _sample()}, "explain": {"type": "boolean"}},
            "examples": [{"samples": [SAMPLE]}, {"samples": [OTHER]}],
        },
    },
    "rank": {
        "help": "Candidates by the probability of a click in one context.",
        "request": {
            "type": "object",
            "properties": {
                "context": {"type": "object", "properties": {"user": {"type": "integer"}, "hour": {"type": "integer"}}},
                "candidates": {
                    "type": "array",
                    "items": {"properties": {"item": ITEM, "genre": {"type": "string"}}},
                },
                "k": {"type": "integer"},
            },
            "example": {
                "context": {"user": 5, "hour": 20},
                "candidates": [{"item": 12, "genre": "drama"}, {"item": 99, "genre": "comedy"}],
                "k": 1,
            },
        },
    },
    "items": {
        "help": "Items of the tree for a history.",
        "request": {
            "type": "object",
            "properties": {"history": {"type": "array", "items": {"type": "integer"}}, "k": {"type": "integer"}},
            "example": {"history": [4, 8, 15], "k": 5},
        },
    },
}


class StandInService:
    """Serves "glyphs", "signs", "faces", "clicks" and "tree" until :meth:`stop`, and again after :meth:`start`."""

    def __init__(self) -> None:
        self.current = 120
        self.canary: int | None = None
        """Of "glyphs"."""
        self.asked: list[tuple[str, str, bytes]] = []
        """Operation, query and body of each request, as they came."""
        self.best = "永"
        """The best class of pictures."""
        self.verifies = True
        """Whether there is a threshold of pairs."""
        self.best_score = 0.83
        self.refusal: tuple[int, str] | None = None
        """Status and sentence of every answer."""
        self.holding: asyncio.Event | None = None
        """Where there is one, the next request waits for it; its answer is made before."""
        self.token = ""
        self.is_empty = False
        self.port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def start(self) -> None:
        """Listen, at the port of before if there is one."""
        listening = socket.create_server(("127.0.0.1", self.port))
        self.port = listening.getsockname()[1]
        name = "/v1/models/{name}"
        routes = [
            try_page(),
            Route("/v1/models", self._models),
            Route(name, self._model),
            Route(f"{name}/classes/{{label:int}}/picture", self._picture),
            Route(f"{name}/{{operation}}", self._answer, methods=["POST"]),
        ]
        app = Starlette(routes=routes)
        self._server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, args=[listening], daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()

    def call_soon(self, function: Callable[[], None]) -> None:
        """Call it where requests are answered."""
        self._loop.call_soon_threadsafe(function)

    def _serve(self, listening: socket.socket) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._server.serve(sockets=[listening]))

    def _state(self, name: str) -> dict[str, Any]:
        current = self.current if name == "glyphs" else 90
        versions = sorted({current - 30, current, *([self.canary] if self.canary and name == "glyphs" else [])})
        return {
            "name": name,
            "kind": name if name in ("clicks", "tree") else "pictures",
            "current": current,
            "canary": {"version": self.canary, "share": 0.1} if self.canary and name == "glyphs" else None,
            "held": False,
            "loaded": [
                {"version": version, "created": time.time() - 200, "asked": len(self.asked)} for version in versions
            ],
            "versions": versions,
        }

    async def _models(self, request: Request) -> Response:
        if self.token and request.headers.get("authorization") != f"Bearer {self.token}":
            told = {"error": {"code": "unauthenticated", "message": "no token; send one as 'Authorization: Bearer'"}}
            return JSONResponse(told, 401)
        names = [] if self.is_empty else ["glyphs", "signs", "faces", "clicks", "tree"]
        return JSONResponse({"models": [self._state(name) for name in names]})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        names = {
            "glyphs": ["classify", "verify", "embed", "nearest"],
            "signs": ["classify"],
            "faces": ["verify", "classify"],
            "clicks": ["click", "rank"],
            "tree": ["items"],
        }[name]
        look = {"kind": "photo" if name == "faces" else "ink", "size": 32, "channels": 1}
        index = {"kind": "hnsw", "recall_at_1": 0.9931}
        known = {"classes": 40_992, "dim": 128, "precision": "fp32", "index": index, "preprocessing": look}
        if self.verifies:
            known["verify"] = {"threshold": 0.35, "accuracy": 0.9975, "pairs": 6000}
        if name == "glyphs":
            known |= {"score": "cosine", "sure_from": {"score": 0.5, "precision": 0.95, "share": 0.8, "images": 600}}
        if name == "signs":
            known |= {"classes": 200, "pictures": True}
        facts = known if "classify" in names else {"training": "movielens", "score": "log-odds"}
        return JSONResponse(self._state(name) | {"facts": facts, "operations": {one: OPERATIONS[one] for one in names}})

    async def _picture(self, request: Request) -> Response:
        label, file = request.path_params["label"], io.BytesIO()
        sheet = Image.new("L", (32, 32), 255)
        ImageDraw.Draw(sheet).line([(4, 4), (label % 32, 28), (28, 8)], 0, 3)
        sheet.save(file, "PNG")
        return Response(file.getvalue(), media_type="image/png")

    async def _answer(self, request: Request) -> Response:
        name, operation = request.path_params["name"], request.path_params["operation"]
        body = await request.body()
        self.asked.append((operation, request.url.query, body))
        if self.refusal is not None:
            status, message = self.refusal
            told = {"error": {"code": "bad_request", "message": message}}
            return JSONResponse(told, status, {"Retry-After": "1"} if status == 503 else {})
        version = int(request.query_params.get("version", self._state(name)["current"]))
        count = len(json.loads(body)["samples"]) if operation == "click" else 1
        answers = [self._item(operation, body)] * count
        if name == "signs":
            answers = [[one | {"class": f"sign-{one['id']:03}"} for one in answers[0]]]
        holding, self.holding = self.holding, None
        if holding is not None:
            await holding.wait()
        return JSONResponse({"model": name, "version": version, "created": time.time() - 200, "answers": answers})

    def _item(self, operation: str, body: bytes) -> Any:
        if operation in ("classify", "nearest"):
            scores = [(self.best, self.best_score), *((name, score * self.best_score) for name, score in NEXT)]
            return [{"class": name, "id": i, "score": score} for i, (name, score) in enumerate(scores)]
        asked = json.loads(body)
        if operation == "verify":
            first, second = asked["pairs"][0]
            decided = {"same": first == second, "threshold": 0.35} if self.verifies else {}
            return {"score": 0.97 if first == second else 0.12, **decided}
        if operation == "click":
            sizes = {name: (-1) ** i * 1.3 / (i + 1) for i, name in enumerate(SAMPLE)} | {"query": 0.0}
            unseen = [name for name, value in asked["samples"][0].items() if value in (404, "astronaut")]
            odds = BASE + sum(sizes.values())
            explained = {"base": BASE, "contributions": sizes, "unseen": unseen}
            return {"probability": 1 / (1 + math.exp(-odds))} | (explained if asked.get("explain") else {})
        if operation == "rank":
            return [{"candidate": i, "probability": 0.4 / (i + 1)} for i in range(len(asked["candidates"]))]
        if operation == "items":
            named = [{"title": "Star Wars (1977)"}, *[{}] * asked["k"]]
            return [{"item": 2**62 + i, **named[i], "score": 0.9 - i / 10} for i in range(asked["k"])]
        return [0.1, -0.2, 0.3]
