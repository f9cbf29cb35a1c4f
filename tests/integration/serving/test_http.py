"""A service over HTTP, on a real socket: answers, refusals, limits, and who leaves in between."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fastapi.openapi.models import OpenAPI

from geartrain.ams.values.config import split_address
from geartrain.ams.values.errors import ConfigError
from geartrain.serving.http.callers import Limits
from geartrain.serving.http.ports import held_port, joined_port, listening_socket
from geartrain.serving.http.server import MAX_HEADER_BYTES, HttpServer
from tests.support.fake_servable import EchoModel
from tests.support.http_service import ServedModels, served_models

ECHO = "/v1/echo"


@pytest.fixture
def model() -> EchoModel:
    return EchoModel(7)


@pytest.fixture
def served(model: EchoModel) -> Iterator[ServedModels]:
    with served_models({"glyphs": model}) as served:
        yield served


def test_an_answer_names_model_and_version(served: ServedModels) -> None:
    for path in (ECHO, "/v1/models/glyphs/echo", "/v1/models/glyphs/echo?version=7"):
        answer = served.ask("POST", path, {"numbers": [1, 2], "k": 3})
        assert answer.said == {"model": "glyphs", "version": 7, "created": 1.5, "answers": [[7, 3], [7, 6]]}
        assert answer.headers["Content-Type"] == "application/json"
    assert served.ask("POST", f"{ECHO}?k=5", {"numbers": [2]}).said["answers"] == [[7, 10]]


def test_a_file_is_sent_as_it_is(served: ServedModels) -> None:
    for kind in ("application/x-www-form-urlencoded", "image/png", "application/octet-stream", "IMAGE/PNG; q=1"):
        answer = served.ask("POST", "/v1/show?k=2", b"\x89PNG and no more", Content_Type=kind)
        assert answer.said["answers"] == [[7, 32]], kind
    assert served.ask("POST", "/v1/show", b"{no json", Content_Type="image/x").said["answers"] == [[7, 8]]
    assert "empty; send files in JSON, or the file itself" in served.refused(400, "POST", "/v1/show", b"")


@pytest.mark.parametrize(
    ("status", "path", "body", "headers", "sentence"),
    [
        (400, ECHO, b"{", {}, "the body is no JSON: "),
        (400, ECHO, b"[" * 100_000, {}, "the body is no JSON"),
        (400, ECHO, [1], {}, r"the body is [1]; it must be a JSON object"),
        (400, ECHO, {}, {}, "numbers is None; give a list of numbers"),
        (400, ECHO, {"numbers": [13]}, {}, "13 is no number"),
        (400, f"{ECHO}?version=x", {"numbers": [1]}, {}, "version is 'x'; it must be a number"),
        (404, f"{ECHO}?version=8", {"numbers": [1]}, {}, "version 8 of 'glyphs' is not served; served are 7"),
        (404, "/v1/embed", {}, {}, "'glyphs' has no operation 'embed'; it has echo, show"),
        (404, "/v1/models/faces/echo", {}, {}, "there is no model 'faces'; there is glyphs"),
        (404, "/v1/models/faces/echo/x", {}, {}, "GET /openapi.json says what there is"),
        (413, ECHO, {"numbers": [1] * 257}, {}, "the request has 257 items, the most is 256"),
        (415, ECHO, b"<x/>", {"Content_Type": "text/xml"}, "content-type is 'text/xml'; send application/json"),
        (415, "/v1/show", b"x", {"Content_Type": "text/xml"}, "send application/json, or an image file"),
        (421, ECHO, {"numbers": [1]}, {"Host": "evil.example"}, "not called 'evil.example'; ask it by its address"),
        (403, ECHO, {"numbers": [1]}, {"Origin": "http://evil.example"}, "'http://evil.example' may not send requests"),
        (403, ECHO, {"numbers": [1]}, {"Origin": "null"}, "pages of 'null' may not send requests"),
        (400, "/v1/models/glyphs/rollback", {"to": -1}, {}, "to is -1; it must be the number of a version"),
        (400, "/v1/models/glyphs/rollback", {"version": 1}, {}, "the body has 'version'; it may have to"),
        (404, "/v1/models/glyphs/rollback", {}, {}, "there is no version of 'glyphs' before 7"),
        (400, "/v1/models/glyphs/canary", {"version": 8}, {}, "share is None; it must be a part of the requests"),
    ],
)  # fmt: skip
def test_what_cannot_be_answered_is_said_in_a_sentence(
    served: ServedModels, status: int, path: str, body: Any, headers: dict[str, str], sentence: str
) -> None:
    assert sentence in served.refused(status, "POST", path, body, **headers)


def test_another_method_is_refused_and_a_page_of_this_host_is_not(served: ServedModels) -> None:
    assert "not asked by this method" in served.refused(405, "GET", ECHO)
    assert "'glyphs' has no operation 'nope'; it has echo, show" in served.refused(404, "GET", "/v1/nope")
    here = {"Origin": f"http://{served.address}"}
    assert served.ask("POST", ECHO, {"numbers": [1]}, **here).status == 200
    assert served.ask("GET", "/v1/models").headers["Access-Control-Allow-Origin"] is None


def test_a_class_beyond_any_is_refused(served: ServedModels) -> None:
    for number, status in (("9" * 5000, 400), ("x", 400), ("9", 404)):
        sentence = served.refused(status, "GET", f"/v1/models/glyphs/classes/{number}/picture")
        assert ("it must be a number" if status == 400 else "no picture of class 9") in sentence


def test_openapi_has_every_operation_with_its_schema_and_an_example(served: ServedModels) -> None:
    said = served.ask("GET", "/openapi.json").said
    OpenAPI.model_validate(said)
    echo = said["paths"]["/v1/models/glyphs/echo"]["post"]
    assert echo["requestBody"]["content"]["application/json"]["schema"] == EchoModel().operations["echo"].request
    example = echo["requestBody"]["content"]["application/json"]["schema"]["example"]
    assert served.ask("POST", "/v1/models/glyphs/echo", example).status == 200
    assert [item["name"] for item in echo["parameters"]] == ["version", "k"]
    assert "image/*" in said["paths"]["/v1/models/glyphs/show"]["post"]["requestBody"]["content"]
    assert {"/livez", "/readyz", "/v1/models", "/v1/models/glyphs"} < set(said["paths"])


def test_swap_canary_and_rollback(served: ServedModels) -> None:
    served.service.catalog.add("glyphs", EchoModel(8))
    assert served.ask("POST", ECHO, {"numbers": [1]}).said["version"] == 8
    assert served.ask("POST", "/v1/models/glyphs/rollback", {}).said == {"model": "glyphs", "current": 7}
    assert served.ask("POST", ECHO, {"numbers": [1]}).said["version"] == 7
    said = served.ask("POST", "/v1/models/glyphs/canary", {"version": 8, "share": 0.5}).said
    assert said["canary"] == {"version": 8, "share": 0.5}
    versions = [served.ask("POST", ECHO, {"numbers": [1]}).said["version"] for _ in range(4)]
    assert sorted(versions) == [7, 7, 8, 8]
    said = served.ask("GET", "/v1/models/glyphs").said
    assert (said["current"], said["held"], said["versions"], said["facts"]) == (7, True, [7, 8], {"classes": 3})
    assert served.ask("GET", "/v1/models").said["models"][0]["name"] == "glyphs"


def test_probes_say_whether_it_lives_and_is_ready(served: ServedModels) -> None:
    assert served.ask("GET", "/livez").said == {"live": True}
    assert served.ask("GET", "/readyz").said == {"ready": True}
    served.service.catalog.close()
    assert "not ready: it is ending" in served.refused(503, "GET", "/readyz")


def connected(served: ServedModels) -> socket.socket:
    return socket.create_connection(split_address(served.address), timeout=20)


def head(headers: str) -> bytes:
    return f"POST {ECHO} HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n\r\n".encode()


def answer_of(connection: socket.socket) -> http.client.HTTPResponse:
    response = http.client.HTTPResponse(connection)
    response.begin()
    return response


def test_a_body_that_is_too_long_is_cut_whether_or_not_it_says_so(model: EchoModel) -> None:
    with served_models({"glyphs": model}, Limits(max_body_bytes=1000)) as served:
        refused = served.refused(413, "POST", ECHO, b" " * 1001)
        assert "the body has 1001 bytes, the most is 1,000" in refused
        with connected(served) as connection:
            connection.sendall(
                f"POST {ECHO} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
            )
            for _ in range(3):
                connection.sendall(b"190\r\n" + b" " * 400 + b"\r\n")
            response = answer_of(connection)
            assert (response.status, response.headers["Connection"]) == (413, "close")
            assert b"the most is 1,000" in response.read()
        assert served.ask("POST", ECHO, {"numbers": [1]}).status == 200


def test_a_body_or_headers_that_never_end_are_cut_in_time(model: EchoModel) -> None:
    limits = Limits(body_seconds=0.2)
    with served_models({"glyphs": model}, limits, headers_seconds=0.2) as served:
        with connected(served) as connection:
            connection.sendall(head("Content-Length: 100") + b"{")
            response = answer_of(connection)
            assert response.status == 408
            assert "not there after 0.2 s, 1 bytes of it were" in json.loads(response.read())["error"]["message"]
            assert connection.recv(1) == b""
        for sent in (b"", b"GET /livez HTTP/1.1\r\nHost: "):
            with connected(served) as connection:
                connection.sendall(sent)
                assert connection.recv(1) == b""
        with connected(served) as connection:  # the second request of a connection, too
            connection.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert answer_of(connection).read() == b'{"live":true}'
            connection.sendall(b"GET /")
            assert connection.recv(1) == b""


@pytest.mark.parametrize("is_one", [True, False])
def test_headers_that_are_too_long_are_refused(served: ServedModels, is_one: bool) -> None:
    long = b"x" * (MAX_HEADER_BYTES + 1)
    header = b"X-Long: " + long if is_one else b"\r\n".join(b"X-%d: %s" % (at, long[:999]) for at in range(20))
    for end in (b"\r\n\r\n", b""):
        with connected(served) as connection:
            connection.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n" + header + end)
            response = answer_of(connection)
            assert response.status == 431
            assert "more than 16,384 bytes" in json.loads(response.read())["error"]["message"]
    with connected(served) as connection:
        connection.sendall(b"\x16\x03\x01 no HTTP\r\n\r\n")
        response = answer_of(connection)
        assert response.status == 400
        assert "was https meant" in json.loads(response.read())["error"]["message"]


def test_who_takes_no_answer_is_let_go() -> None:
    is_over = threading.Event()

    async def answers_on_and_on(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await receive()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            has_left = asyncio.create_task(receive())
            while not has_left.done():
                await send({"type": "http.response.body", "body": bytes(1 << 16), "more_body": True})
            is_over.set()

    listener = listening_socket("127.0.0.1:0", "serve")
    server = HttpServer(answers_on_and_on, listener, "127.0.0.1", name="test", take_seconds=0.2)
    try:
        with socket.create_connection(split_address(server.address), timeout=20) as deaf:
            deaf.sendall(head("Content-Length: 0"))
            assert is_over.wait(20)
    finally:
        server.stop(20)


def test_a_long_body_is_no_long_header(served: ServedModels) -> None:
    body = json.dumps({"numbers": [1], "padding": "x" * 3 * MAX_HEADER_BYTES}).encode()
    with connected(served) as connection:
        for _ in range(3):
            connection.sendall(head(f"Content-Length: {len(body)}") + body)
            response = answer_of(connection)
            assert response.status == 200
            response.read()


def test_a_client_is_told_when_it_asks_too_often_and_others_are_answered(model: EchoModel) -> None:
    with served_models({"glyphs": model}, Limits(requests_per_second=2.0)) as served:
        statuses = [served.ask("POST", ECHO, {"numbers": [1]}).status for _ in range(3)]
        assert statuses == [200, 200, 429]
        answer = served.ask("POST", ECHO, {"numbers": [1]})
        assert answer.headers["Retry-After"] == "1"
        assert "more than 2 requests per second; ask again in " in answer.said["error"]["message"]
        assert served.ask("GET", "/readyz").status == 200


def test_more_than_can_be_answered_is_refused_and_what_is_under_way_is_answered(model: EchoModel) -> None:
    model.may_answer.clear()
    with (
        served_models({"glyphs": model}, Limits(max_requests=3), max_queued=1) as served,
        ThreadPoolExecutor(3) as others,
    ):
        first = others.submit(served.ask, "POST", ECHO, {"numbers": [1]})
        assert model.is_asked.wait(20)
        waits = others.submit(served.ask, "POST", ECHO, {"numbers": [2]})
        while served.service.batcher.queued == 0:
            pass
        answer = served.ask("POST", ECHO, {"numbers": [3]})
        assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
        assert "1 item wait already, of 1 that may" in answer.said["error"]["message"]
        with connected(served) as slow:
            slow.sendall(
                f"POST {ECHO} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n".encode()
            )
            assert slow.recv(25).startswith(b"HTTP/1.1 100")
            assert "3 requests are in progress, the most" in served.refused(503, "POST", ECHO, {"numbers": [3]})
            assert served.ask("GET", "/livez").status == 200
        model.may_answer.set()
        assert [first.result(20).status, waits.result(20).status] == [200, 200]


def test_a_client_that_leaves_stops_no_batch(served: ServedModels, model: EchoModel) -> None:
    model.may_answer.clear()
    body = b'{"numbers": [1]}'
    with connected(served) as gone:
        gone.sendall(head(f"Content-Length: {len(body)}") + body)
        assert model.is_asked.wait(20)
    with ThreadPoolExecutor(1) as other:
        stays = other.submit(served.ask, "POST", ECHO, {"numbers": [2]})
        while served.service.batcher.queued == 0:
            pass
        model.may_answer.set()
        assert stays.result(20).said["answers"] == [[7, 2]]
    assert model.batches == [1, 1]


def test_a_short_question_that_takes_long_to_read_holds_nobody_up(served: ServedModels, model: EchoModel) -> None:
    with ThreadPoolExecutor(1) as other:
        slow = other.submit(served.ask, "POST", "/v1/show", b"slow to read")
        assert model.is_read.wait(20)
        assert served.ask("POST", ECHO, {"numbers": [2]}).said["answers"] == [[7, 2]]
        model.may_read.set()
        assert slow.result(20).said["answers"] == [[7, 12]]


def test_many_who_wait_for_other_processes_hold_no_answer_up(served: ServedModels) -> None:
    wait, waits = threading.Event(), threading.Semaphore(0)

    def everywhere(_: object) -> list[Any]:
        waits.release()
        assert wait.wait(30)
        return []

    served.service.everywhere = everywhere
    num = min(32, (os.cpu_count() or 1) + 4)  # threads of asyncio
    with ThreadPoolExecutor(num) as clients:
        metrics = [clients.submit(served.send, "GET", "/metrics") for _ in range(num)]
        try:
            assert all(waits.acquire(timeout=20) for _ in range(num))
            assert served.ask("POST", ECHO, {"numbers": [1] * 100}).status == 200
        finally:
            wait.set()
        assert [client.result(20) for client in metrics] == [200] * num


def test_what_is_under_way_is_answered_before_it_ends(served: ServedModels, model: EchoModel) -> None:
    model.may_answer.clear()
    with ThreadPoolExecutor(1) as other:
        asked = other.submit(served.ask, "POST", ECHO, {"numbers": [2]})
        assert model.is_asked.wait(20)
        ending = threading.Thread(target=served.server.stop, args=(20,))
        ending.start()
        while True:
            try:
                connected(served).close()
            except ConnectionError:
                break
        model.may_answer.set()
        assert asked.result(20).said["answers"] == [[7, 2]]
        ending.join(20)
        assert served.server.stop_reason is None


def test_a_port_in_use_is_said_in_a_sentence(served: ServedModels) -> None:
    with pytest.raises(
        ConfigError, match=f"cannot serve at '{served.address}': address already in use; --listen takes"
    ):
        listening_socket(served.address, "serve")


def test_a_port_of_workers_lets_nobody_else_in() -> None:
    with held_port("127.0.0.1:0", "--listen") as held:
        address = f"127.0.0.1:{held.getsockname()[1]}"
        in_use = f"cannot serve at '{address}': address already in use"
        for listens in (False, True):
            worker = joined_port(address)
            if listens:
                worker.listen()
            with worker, pytest.raises(ConfigError, match=f"{in_use}; --grpc takes an address"):
                held_port(address, "--grpc")
            with joined_port(address), pytest.raises(ConfigError, match=in_use):
                listening_socket(address, "serve")
