"""Strangers at a service of models: malformed requests over HTTP and gRPC, and connections that end, hang or never end.

Honest clients ask beside them, and look at every answer. No request may kill the process, be told of a bug of it, or
leave memory or files behind. ``python -m tests.faults.serve_strangers --attacks 100_000`` makes as many against one
service; the campaign's ``serve`` makes fewer with each seed.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import http.client
import io
import json
import random
import socket
import struct
import time
import urllib.parse
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from PIL import Image

from geartrain.ams.values.config import split_address
from geartrain.serving.kserve.pb import inference_pb2 as pb
from tests.faults.strangers import _H2_PREFACE, Attacked, Outcome, Scene, _frame, _text, require_flat, run_strangers
from tests.integration.rows.test_malformed_requests import damaged
from tests.support.role_process import RoleProcess
from tests.support.served_models import exported

_SECONDS = 60.0
BODY_SECONDS = 2.0
"""For headers and bodies, so that what hangs is gone soon."""
_HELD = 48
"""Connections of one attacker that hang."""
_INFER = "/inference.GRPCInferenceService/ModelInfer"
_FELL = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
_LEFT = (ConnectionError, http.client.HTTPException, TimeoutError, OSError)


def drawn(seed: int, kind: str = "PNG", size: tuple[int, int] = (20, 24)) -> bytes:
    """An image file of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def bomb(width: int, height: int, rows: int) -> bytes:
    """A PNG that says it is so large, with so many of its rows, all of one color."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    packed = zlib.compressobj(9)
    row = bytes(min(width + 1, 1 << 20))
    data = b"".join(packed.compress(row) for _ in range(rows)) + packed.flush()
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


BOMBS = [bomb(50_000, 50_000, 10), bomb(2**31 - 1, 2**31 - 1, 1), bomb(4000, 4000, 4000), bomb(0, 10, 1)]
IMAGES = [drawn(1), drawn(2, "JPEG"), drawn(3, "BMP"), drawn(4, "GIF"), drawn(5, "TIFF"), drawn(6, "PPM")]


class ServeAttacker:
    """What one attacker has: the ports, connections that hang, chance."""

    def __init__(self, addresses: dict[str, str], _: Path, seed: int) -> None:
        self.chance = random.Random(seed)
        self._http, self._grpc = split_address(addresses["http"]), addresses["grpc"]
        self._held: deque[socket.socket] = deque()
        self._kept: http.client.HTTPConnection | None = None
        self._channel = grpc.insecure_channel(self._grpc, [("grpc.use_local_subchannel_pool", 1)])

    def lines(self) -> None:
        """Request lines and headers that are none, or too much."""
        chance = self.chance
        line = chance.choice(
            [
                b"GET / HTTP/1.1",
                b"POST /v1/classify HTTP/1.1",
                b"GET / HTTP/9.9",
                b"GET /%00%ff%zz/../../etc/passwd HTTP/1.1",
                b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + chance.randbytes(40),
                _H2_PREFACE,
                b"GET /" + b"a" * chance.choice([10, 5_000, 70_000]) + b" HTTP/1.1",
                chance.randbytes(60),
            ]
        )
        headers = chance.choice(
            [
                b"Host: localhost\r\n",
                b"Host: evil.example\r\n",
                b"Host: localhost\r\nContent-Length: -1\r\n",
                b"Host: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n",
                b"Host: localhost\r\nContent-Length: " + b"9" * 30 + b"\r\n",
                b"Host: localhost\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n",
                b"Host: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
                b"Host: localhost\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n",
                b"Host: localhost\r\nX: " + b"y" * chance.choice([100, 20_000, 200_000]) + b"\r\n",
                b"Host: localhost\r\n" + b"".join(b"h%d: v\r\n" % n for n in range(chance.choice([10, 3_000]))),
                b"Host: localhost\r\nExpect: 100-continue\r\nContent-Length: 10\r\n",
                b"Host: localhost\r\nUpgrade: websocket\r\nConnection: upgrade\r\nSec-WebSocket-Key: eA==\r\n",
                b"Host: localhost\r\n: empty\r\n\x00\x01: x\r\n",
            ]
        )
        data = line + b"\r\n" + headers + b"Connection: close\r\n\r\n" + chance.randbytes(chance.choice([0, 10]))
        self._say(damaged(data, chance) if chance.random() < 0.3 else data)

    def paths(self) -> None:
        """Routes, methods and parameters that are not there, or not of the kind that they must be."""
        chance = self.chance
        known = [
            "/v1/models",
            "/v1/models/m",
            "/v1/classify",
            "/v1/models/m/classify",
            "/v1/models/m/rollback",
            "/metrics",
        ]
        known += [
            "/v1/models/m/canary",
            "/v2",
            "/v2/models/m",
            "/v2/models/m/ready",
            "/v2/repository/index",
            "/openapi.json",
        ]
        parts = ["v1", "v2", "models", "m", "classify", "infer", "versions", "rollback", "canary", "ready", "..", "%2e"]
        parts += ["\u00e4", "%ff", "a" * 300, "", "health", "repository", "index", "-1", "1e9", "9" * 40, "metrics"]
        path = "/" + "/".join(chance.choices(parts, k=chance.randint(1, 6)))
        path = chance.choice(known) if chance.random() < 0.6 else path
        values = ["-1", "x", "9" * 400, "NaN", "1e999", "[]", "{}", "true", "null", "%00", "1.5", ""]
        query = "&".join(f"{chance.choice(['k', 'version', 'x', ''])}={chance.choice(values)}" for _ in range(2))
        bodies = [b"", b"{}", b'{"to": "x"}', b'{"to": -5}', b'{"to": 1e400}', b'{"share": 7}', b'{"share": "a"}']
        bodies += [b'{"version": true, "share": 0.1}', b'{"version": 99999999999999999999, "share": NaN}']
        method = chance.choice(
            ["GET", "GET", "GET", "POST", "POST", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "BREW"]
        )
        kind = chance.choice(["application/json", "text/html", "image/png", "multipart/form-data; boundary=x", "\xff"])
        self._ask(
            method,
            urllib.parse.quote(f"{path}?{query}", safe="/?=&%[]{}:,"),
            chance.choice(bodies),
            {"Content-Type": kind},
        )

    def bodies(self) -> None:
        """JSON that is none, or of other values than an operation takes."""
        chance = self.chance
        image = base64.b64encode(IMAGES[0]).decode()
        values: list[Any] = [
            None,
            True,
            0,
            -1,
            1.5,
            1e308,
            10**400,
            "",
            "x",
            "\ud800",
            image,
            [],
            {},
            [[]],
            [image] * 300,
        ]
        values += [float("nan"), float("-inf"), [None], [image, 5], {"a": image}, "data:image/png;base64,", image[:-3]]
        values += ["=" * 50, "A" * 100_001, [[image, image]], [[1.0] * 16], [[float("nan")] * 16], [[1e39] * 16], 2**63]
        operation, fields = chance.choice(
            [
                ("classify", ["images", "k"]),
                ("embed", ["images"]),
                ("nearest", ["features", "k"]),
                ("verify", ["pairs"]),
            ]
        )
        said: dict[str, Any] = {"images": {"images": [image]}, "pairs": {"pairs": [[image, image]]}}.get(fields[0], {})
        for name in chance.choices([*fields, *fields, "", "x", "k", "images", "\0"], k=chance.choice([0, 1, 1, 2])):
            said[name] = chance.choice(values)
        body = json.dumps(said).encode()
        match chance.randrange(8):
            case 0:
                body = b"[" * chance.choice([10, 1_000, 200_000]) + body
            case 1:
                body = b'{"images":' * chance.choice([1_000, 50_000]) + b"1"
            case 2:
                body = damaged(body, chance)
            case 3:
                body = chance.randbytes(chance.randint(0, 200))
            case 4:
                body = (
                    b'{"k": '
                    + b"9" * chance.choice([100, 4_000, 100_000])
                    + b', "images": ["'
                    + image.encode()
                    + b'"]}'
                )
            case _:
                pass
        self._ask("POST", f"/v1/{operation}", body, {"Content-Type": "application/json"})

    def pictures(self) -> None:
        """Files that are no images, are cut, or would be very large."""
        data = self._picture()
        query = self.chance.choice(["", "?k=3", "?k=0", "?k=x", "?k=99999999999"])
        kind = self.chance.choice(["image/png", "application/octet-stream", "application/x-www-form-urlencoded"])
        self._ask("POST", f"/v1/{self.chance.choice(['classify', 'embed'])}{query}", data, {"Content-Type": kind})

    def tensors(self) -> None:
        """Requests of KServe's protocol over HTTP, some of their values lies about names, types, shapes and sizes."""
        chance = self.chance
        image = base64.b64encode(self._picture(good=0.6)).decode()
        tensor: dict[str, Any] = {"name": "images", "datatype": "BYTES", "shape": [1], "data": [image]}
        tensor["parameters"] = {"content_type": "base64"}
        said: dict[str, Any] = {"inputs": [tensor], "parameters": {"k": 2}, "outputs": [{"name": "ids"}], "id": "a"}
        shapes: list[Any] = [[2], [-1], [0], [], [1] * 40, [2**62], [2**64], [1.5], "x", [True], [[1]], [1, 16], [257]]
        datas: list[Any] = [
            [image] * 2,
            [[[[image]]]],
            [1.0] * 16,
            [True],
            [None],
            "x",
            {},
            [1, [2]],
            [10**400],
            [],
            None,
        ]
        lies: list[tuple[dict[str, Any], str, list[Any]]] = [
            (tensor, "name", ["features", "x", "", 5, None, "\ud800"]),
            (tensor, "datatype", ["FP32", "INT64", "BOOL", "FP16", "FP8", "", 7, None]),
            (tensor, "shape", shapes),
            (tensor, "data", datas),
            (tensor, "parameters", [{}, [], 5, *({"binary_data_size": n} for n in (0, -1, 16, 1 << 40, "x", True))]),
            (said, "inputs", [[tensor, tensor], tensor, [], None, [5], [None]]),
            (said, "parameters", [{"operation": name} for name in ("embed", "nearest", "x", 5, {}, None)]),
            (said, "parameters", [{"k": "x"}, {"k": 1e300}, {"k": None}, {"x": 1}, {"binary_data_output": True}, 5]),
            (said, "outputs", [[{"name": "scores", "parameters": {"binary_data": True}}], [{"name": "x"}], 5, [5], []]),
            (said, "id", ["", 5, "\ud800", "x" * 10_000]),
        ]
        for into, key, values in chance.choices(lies, k=chance.choice([0, 1, 1, 2])):
            into[key] = chance.choice(values)
        body = json.dumps(said).encode()
        headers = {"Content-Type": "application/json"}
        if chance.random() < 0.2:
            told = chance.choice([str(len(body)), str(len(body)), "-1", "x", "9" * 30, "5", "1e3"])
            headers["Inference-Header-Content-Length"] = told
            body += chance.randbytes(16)
        if chance.random() < 0.1:
            body = damaged(body, chance)
        version = chance.choice(["", "", "", "/versions/1", "/versions/x", "/versions/" + "9" * 30])
        self._ask("POST", f"/v2/models/{chance.choice(['m'] * 9 + ['x'])}{version}/infer", body, headers)

    def half_open(self) -> None:
        """Connections that say nothing, a part of the headers, or a part of the body, and stay."""
        head = b"POST /v1/classify HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n"
        said = self.chance.choice([b"", head[: self.chance.randrange(len(head))], head + b"\r\nabc"])
        to = self._http if self.chance.random() < 0.7 else split_address(self._grpc)
        with contextlib.suppress(*_LEFT):
            ours = socket.create_connection(to, _SECONDS)
            ours.sendall(said if to == self._http else _H2_PREFACE[: self.chance.randrange(25)])
            self._held.append(ours)
        while len(self._held) > _HELD:
            self._held.popleft().close()
        for ours in self.chance.sample(list(self._held), min(3, len(self._held))):  # slow, but alive
            with contextlib.suppress(*_LEFT):
                ours.settimeout(1.0)
                ours.sendall(b"x")

    def endless(self) -> None:
        """A body without an end."""
        part = b"10000\r\n" + bytes(1 << 16) + b"\r\n"
        with contextlib.suppress(*_LEFT), socket.create_connection(self._http, _SECONDS) as ours:
            ours.sendall(b"POST /v1/classify HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
            began = time.monotonic()
            while time.monotonic() - began < _SECONDS:  # the service ends it
                ours.sendall(part)
            raise AssertionError(f"a body without an end is taken for {_SECONDS} s")

    def leavers(self) -> None:
        """A good request whose client is gone before the answer."""
        body = self.chance.choice(IMAGES[:3])
        head = b"POST /v1/classify HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
        data = head + body
        with contextlib.suppress(*_LEFT), socket.create_connection(self._http, _SECONDS) as ours:
            ours.sendall(data[: self.chance.randint(1, len(data))] if self.chance.random() < 0.3 else data)
            if self.chance.random() < 0.7:
                ours.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset

    def messages(self) -> None:
        """Messages of gRPC, some of whose values are lies, and some of whose bytes are damaged."""
        chance = self.chance
        request = pb.ModelInferRequest(model_name="m", id="a")
        tensor = request.inputs.add(name="images", datatype="BYTES", shape=[1])
        image = self._picture(good=0.6)
        if chance.random() < 0.5:
            raw = len(image).to_bytes(4, "little") + image
            request.raw_input_contents.append(damaged(raw, chance) if chance.random() < 0.3 else raw)
        else:
            tensor.contents.bytes_contents.append(image)
        for lie in chance.choices(range(8), k=chance.choice([0, 1, 1, 2])):
            match lie:
                case 0:
                    tensor.name = chance.choice(["features", "pairs", "", "x" * 1000])
                case 1:
                    tensor.datatype = chance.choice(["FP32", "INT64", "FP16", "?", ""])
                case 2:
                    del tensor.shape[:]
                    tensor.shape.extend(chance.choice([[], [0], [-1], [2**62, 2], [257], [1] * 60, [100, 0], [1, 16]]))
                case 3:
                    tensor.contents.fp32_contents.extend([float("nan")] * 16)
                case 4:
                    request.model_name, request.model_version = (
                        chance.choice(["m", "x"]),
                        chance.choice(["1", "x", "-1"]),
                    )
                case 5:
                    request.raw_input_contents.append(chance.randbytes(chance.choice([0, 4, 64])))
                case 6:
                    request.outputs.add(name=chance.choice(["ids", "x", ""]))
                case _:
                    value = request.parameters[chance.choice(["operation", "k", "x"])]
                    value.string_param = chance.choice(["embed", "verify", "nearest", "x", "\0"])
                    if chance.random() < 0.5:
                        value.int64_param = chance.choice([0, -1, 3, 2**62])
                    elif chance.random() < 0.3:
                        value.double_param = float("nan")
        data = request.SerializeToString()
        self._call(_INFER, damaged(data, chance) if chance.random() < 0.2 else data)

    def calls(self) -> None:
        """Other calls, unknown ones, empty ones, and those that are cancelled at once."""
        chance = self.chance
        name = chance.choice(["ServerReady", "ModelReady", "ModelMetadata", "RepositoryIndex", "ModelStreamInfer", "X"])
        data = chance.choice([b"", chance.randbytes(20), b"\x0a\x01m", b"\x0a\xff\xff\xff\xff\x7f"])
        if chance.random() < 0.5:
            self._call(f"/inference.GRPCInferenceService/{name}", data)
            return
        request = pb.ModelInferRequest(model_name="m")
        tensor = request.inputs.add(name="images", datatype="BYTES", shape=[1])
        tensor.contents.bytes_contents.append(IMAGES[0])
        call = self._channel.unary_unary(_INFER).future(request.SerializeToString(), timeout=_SECONDS)
        if chance.random() < 0.5:
            time.sleep(0.001)
        call.cancel()

    def http2(self) -> None:
        """Frames of HTTP/2 that are damaged, or a call whose message never comes."""
        chance = self.chance
        told = {
            ":method": "POST",
            ":scheme": "http",
            ":path": _INFER,
            "te": "trailers",
            "content-type": "application/grpc",
        }
        head = b"".join(b"\0" + _text(name) + _text(value) for name, value in told.items())
        data = b"\0" + chance.choice([5, 2**31]).to_bytes(4, "big") + b"\x0a\x01m"
        frames = _frame(4, 0, 0, b"") + _frame(1, 4, 1, head) + _frame(0, chance.choice([0, 1]), 1, data)
        self._say(_H2_PREFACE + damaged(frames, chance), split_address(self._grpc))

    def _picture(self, good: float = 0.1) -> bytes:
        """A file; so many of them are images."""
        chance = self.chance
        if chance.random() < good:
            return chance.choice(IMAGES)
        if chance.random() < 0.03:
            return chance.choice(BOMBS)
        data = chance.choice(IMAGES)
        match chance.randrange(5):
            case 0:
                return data[: chance.randrange(len(data))]
            case 1:
                return chance.randbytes(chance.randrange(300))
            case 2:
                return chance.choice(
                    [b"", b"<svg/>", b"%PDF-1.4", b"PK\3\4" + bytes(30), b"GIF89a" + b"\xff" * 9, b"BM" + b"\xff" * 60]
                )
            case _:
                return damaged(data, chance)

    def _say(self, data: bytes, to: tuple[str, int] | None = None) -> None:
        """Connect, say it, and read until the service has let go."""
        with contextlib.suppress(*_LEFT), socket.create_connection(to or self._http, _SECONDS) as ours:
            ours.sendall(data)
            ours.shutdown(socket.SHUT_WR)
            said = b""
            while part := ours.recv(1 << 16):
                said += part
            assert not said.startswith(b"HTTP/1.1 500"), (data[:300], said)

    def _ask(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> None:
        """Make a request of HTTP that is well-formed as such; its answer must be one, and no 500."""
        if self._kept is None or self.chance.random() < 0.05:
            self._close()
            self._kept = http.client.HTTPConnection(*self._http, timeout=_SECONDS)
        try:
            self._kept.request(method, path, body, {"Host": "localhost", **headers})
            answer = self._kept.getresponse()
            text = answer.read()
        except (ValueError, UnicodeError):  # which a client of HTTP does not send
            self._close()
            return
        except (ConnectionError, http.client.HTTPException):
            self._close()
            return
        assert answer.status != 500, (method, path, body[:300], text)
        if answer.status >= 400 and method != "HEAD":
            assert "error" in json.loads(text), (method, path, text[:300])

    def _close(self) -> None:
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    def _call(self, path: str, data: bytes) -> None:
        try:
            self._channel.unary_unary(path)(data, timeout=_SECONDS)
        except grpc.RpcError as exc:
            assert exc.code() not in (*_FELL, grpc.StatusCode.DEADLINE_EXCEEDED), (
                path,
                data[:300],
                exc.code(),
                exc.details(),
            )


KINDS: dict[str, tuple[Callable[[ServeAttacker], None], int]] = {
    "request lines and headers": (ServeAttacker.lines, 30),
    "paths and parameters": (ServeAttacker.paths, 60),
    "JSON": (ServeAttacker.bodies, 60),
    "image files": (ServeAttacker.pictures, 60),
    "tensors over HTTP": (ServeAttacker.tensors, 60),
    "connections that hang": (ServeAttacker.half_open, 6),
    "bodies without an end": (ServeAttacker.endless, 1),
    "clients that leave": (ServeAttacker.leavers, 20),
    "messages of gRPC": (ServeAttacker.messages, 60),
    "other calls": (ServeAttacker.calls, 20),
    "HTTP/2": (ServeAttacker.http2, 10),
}
"""What it is, and how many in a row."""


def ask_honestly(pipe: Any, addresses: dict[str, str], _: str, calls: Any, pause: Any) -> None:
    """Clients of HTTP and gRPC with good questions, whose answers must stay as they were at first."""
    images = [drawn(seed) for seed in range(10, 18)]
    kept = http.client.HTTPConnection(*split_address(addresses["http"]), timeout=_SECONDS)
    channel = grpc.insecure_channel(addresses["grpc"], [("grpc.use_local_subchannel_pool", 1)])

    def over_http(image: bytes) -> Any:
        kept.request("POST", "/v1/classify?k=2", image, {"Host": "localhost", "Content-Type": "image/png"})
        answer = kept.getresponse()
        text = answer.read()
        assert answer.status == 200, (answer.status, text)
        return json.loads(text)["answers"]

    def over_grpc(image: bytes) -> Any:
        request = pb.ModelInferRequest(model_name="m")
        request.parameters["k"].int64_param = 2
        request.inputs.add(name="images", datatype="BYTES", shape=[1]).contents.bytes_contents.append(image)
        answer = channel.unary_unary(_INFER)(request.SerializeToString(), timeout=_SECONDS)
        return [[*output.contents.int64_contents] for output in pb.ModelInferResponse.FromString(answer).outputs]

    first = [(over_http(image), over_grpc(image)) for image in images]
    pipe.send("ready")
    while True:
        for image, (by_http, by_grpc) in zip(images, first, strict=True):
            found = over_http(image)
            assert [[one["id"] for one in item] for item in found] == [[one["id"] for one in item] for item in by_http]
            assert over_grpc(image) == by_grpc
            calls.value += 2
            time.sleep(pause.value)


@contextlib.contextmanager
def served(folder: Path) -> Iterator[Attacked]:
    """One process that serves a small model by both protocols."""
    folder.mkdir(parents=True, exist_ok=True)
    model = exported(folder / "m")
    flags = ["--listen=127.0.0.1:0", "--grpc=127.0.0.1:0", f"--body-seconds={BODY_SECONDS}"]
    with RoleProcess("serve", str(model), *flags, errors=folder / "log") as role:
        addresses = {"http": role.facts["address"], "grpc": role.facts["grpc"]}
        yield addresses, {"serve": role.facts["pid"]}, [role.process]


SERVICE = Scene(roles=served, honest=ask_honestly, attacker=ServeAttacker, kinds=KINDS, rest_seconds=2 * BODY_SECONDS)


def serve_strangers(seed: int, folder: Path) -> int:
    """One seed of the campaign."""
    outcome = Outcome()
    run_strangers(seed, folder, outcome, scene=SERVICE, windows=0)
    print(outcome)
    require_flat(outcome)
    return sum(outcome.counts.values())


if __name__ == "__main__":
    import tempfile

    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--attacks", type=int, default=100_000)
    parser.add_argument("--attackers", type=int, default=1, help="processes")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    said = Outcome()
    with tempfile.TemporaryDirectory() as at:
        limits = {"attacks": given.attacks, "attackers": given.attackers, "windows": 0}
        run_strangers(given.seed, Path(at) / "run", said, scene=SERVICE, **limits)
    print(said)
    require_flat(said)
