"""KServe's protocol over a real port: what people's clients send, what they are told, and who may ask."""

from __future__ import annotations

import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2

from geartrain.ams.rpc.credentials import Credentials
from geartrain.ams.rpc.tokens import SCHEME
from geartrain.ams.values.config import CLIENT, ServeConfig
from geartrain.launch.certificates import create_authority, issue
from geartrain.launch.tokens import create_token
from geartrain.serving.batching import Batcher
from geartrain.serving.catalog import Catalog
from geartrain.serving.http.callers import Callers
from geartrain.serving.kserve.datatypes import from_raw, to_raw
from geartrain.serving.kserve.pb import inference_pb2 as pb
from geartrain.serving.kserve.service import SERVICE, inference_server
from geartrain.serving.rates import ClientRates
from geartrain.serving.service import ModelService
from tests.support.role_process import RoleProcess
from tests.support.served_models import exported, picture, require_onnx
from tests.support.toy_servables import ToyServable

SECONDS = 30.0
MESSAGE_BYTES = 1 << 20
IMAGES = np.array([b"12345", b""], object)
NUMBERS = np.array([[1, 5, 3, 4], [9, 8, 7, 6]], np.float32)


class Served:
    """Models behind a port."""

    def __init__(
        self, stack: ExitStack, folder: str | None = None, per_second: float | None = None, **batching: Any
    ) -> None:
        self.catalog = Catalog()
        self.running, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()
        self.add(7)
        self.service = ModelService(self.catalog, Batcher(**batching))
        stack.callback(self.service.close)
        config = ServeConfig(max_items=8, max_body_bytes=MESSAGE_BYTES)
        self.rates = ClientRates(per_second)
        self.server = inference_server(
            "127.0.0.1:0", self.service, config, folder, self.rates, Callers("127.0.0.1:0", folder).client
        )
        stack.callback(self.server.stop, 0)
        self.server.ready()
        self.channel = stack.enter_context(grpc.insecure_channel(self.server.address))
        stack.callback(self.go_on.set)

    def add(self, version: int, **more: Any) -> ToyServable:
        def before() -> None:
            self.running.set()
            assert self.go_on.wait(SECONDS)

        servable = ToyServable(version, before)
        self.catalog.add("toy", servable, **more)
        return servable

    def call(self, method: str, request: Any, reply: type[Any], channel: Any = None, timeout: float = SECONDS) -> Any:
        rpc = (channel or self.channel).unary_unary(
            f"/{SERVICE}/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=reply.FromString,
        )
        return rpc(request, timeout=timeout)

    def infer(self, request: pb.ModelInferRequest, **more: Any) -> pb.ModelInferResponse:
        answer: pb.ModelInferResponse = self.call("ModelInfer", request, pb.ModelInferResponse, **more)
        return answer

    def refused(self, request: pb.ModelInferRequest, **more: Any) -> tuple[grpc.StatusCode, str]:
        with pytest.raises(grpc.RpcError) as caught:
            self.infer(request, **more)
        return caught.value.code(), caught.value.details()


@pytest.fixture
def served() -> Iterator[Served]:
    with ExitStack() as stack:
        yield Served(stack)


def of_images(images: Any = IMAGES, **more: Any) -> pb.ModelInferRequest:
    tensor = pb.ModelInferRequest.InferInputTensor(name="images", datatype="BYTES", shape=[len(images)])
    tensor.contents.bytes_contents.extend(images)
    return pb.ModelInferRequest(model_name="toy", inputs=[tensor], **more)


def of_numbers(**parameters: Any) -> pb.ModelInferRequest:
    tensor = pb.ModelInferRequest.InferInputTensor(name="numbers", datatype="FP32", shape=NUMBERS.shape)
    asked = pb.ModelInferRequest(model_name="toy", id="9", inputs=[tensor], raw_input_contents=[to_raw(NUMBERS)])
    for name, value in {"operation": "largest", **parameters}.items():
        setattr(asked.parameters[name], "string_param" if isinstance(value, str) else "int64_param", value)
    return asked


def test_the_first_operation_answers_in_the_form_of_the_request(served: Served) -> None:
    answer = served.infer(of_images(id="a"))
    lengths, versions, first = answer.outputs
    assert (answer.model_name, answer.model_version, answer.id) == ("toy", "7", "a")
    assert [*lengths.contents.int64_contents] == [5, 0] and [*versions.contents.int64_contents] == [7, 7]
    assert [*first.contents.bytes_contents] == [b"1234", b""] and not answer.raw_output_contents


def test_a_parameter_names_the_operation_and_the_others_are_its_own(served: Served) -> None:
    answer = served.infer(of_numbers(k=2))
    assert answer.parameters["operation"].string_param == "largest" and answer.id == "9"
    places, scores = (
        from_raw(tensor.name, raw, np.dtype(dtype), tuple(tensor.shape))
        for tensor, raw, dtype in zip(answer.outputs, answer.raw_output_contents, ("int64", "float32"), strict=True)
    )
    np.testing.assert_array_equal(places, [[1, 3], [0, 1]])
    np.testing.assert_array_equal(scores, [[5, 4], [9, 8]])
    wanted = of_numbers()
    wanted.outputs.add(name="scores")
    assert [tensor.name for tensor in served.infer(wanted).outputs] == ["scores"]


def test_metadata_name_versions_and_tensors(served: Served) -> None:
    served.add(8)
    found = served.call("ModelMetadata", pb.ModelMetadataRequest(name="toy"), pb.ModelMetadataResponse)
    assert (found.name, [*found.versions], found.platform) == ("toy", ["7", "8"], "geartrain_toy")
    assert [(t.name, t.datatype, [*t.shape]) for t in found.inputs] == [("images", "BYTES", [-1])]
    assert [t.name for t in found.outputs] == ["lengths", "versions", "first"]
    index = served.call("RepositoryIndex", pb.RepositoryIndexRequest(), pb.RepositoryIndexResponse)
    assert [(m.version, m.state, m.reason) for m in index.models] == [
        ("7", "READY", "previous"),
        ("8", "READY", "current"),
    ]
    server = served.call("ServerMetadata", pb.ServerMetadataRequest(), pb.ServerMetadataResponse)
    assert server.name == "geartrain" and server.version


def test_a_version_is_answered_by_that_one_and_none_is_answered_by_the_newest(served: Served) -> None:
    served.add(8)
    told = [[*served.infer(of_images(model_version=v)).outputs[1].contents.int64_contents] for v in ("7", "")]
    assert told == [[7, 7], [8, 8]]


def test_probes_tell_what_is_served(served: Served) -> None:
    assert served.call("ServerLive", pb.ServerLiveRequest(), pb.ServerLiveResponse).live
    assert served.call("ServerReady", pb.ServerReadyRequest(), pb.ServerReadyResponse).ready
    assert served.call("ModelReady", pb.ModelReadyRequest(name="toy", version="7"), pb.ModelReadyResponse).ready
    check = served.channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )
    reply = check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=SECONDS)
    assert reply.status == health_pb2.HealthCheckResponse.SERVING
    served.catalog.close()
    assert not served.call("ServerReady", pb.ServerReadyRequest(), pb.ServerReadyResponse).ready


@pytest.mark.parametrize(
    ("asked", "code", "sentence"),
    [
        (of_images(model_version="x"), "INVALID_ARGUMENT", "version 'x' is no number"),
        (of_images(model_version="9" * 30), "INVALID_ARGUMENT", "is no number"),
        (of_images(model_version="6"), "NOT_FOUND", "version 6 of 'toy' is not served; served are 7"),
        (pb.ModelInferRequest(model_name="toy"), "INVALID_ARGUMENT", "has no inputs"),
        (of_numbers(operation="embed"), "NOT_FOUND", "no operation 'embed'; it has lengths, largest"),
        (of_numbers(k=5), "INVALID_ARGUMENT", "k is 5; it must be in 1 … 4"),
        (of_images([b""] * 9), "INVALID_ARGUMENT", "has 9 items; one request takes 1 … 8"),
    ],
)
def test_what_cannot_be_answered_is_told_in_a_sentence(
    served: Served, asked: pb.ModelInferRequest, code: str, sentence: str
) -> None:
    told = served.refused(asked)
    assert told[0].name == code and sentence in told[1]
    lease = served.catalog.state("toy")["loaded"][0]
    assert lease["asking"] == 0, "a version is held for a request that was refused"


def test_a_model_that_is_not_there_is_not_found(served: Served) -> None:
    asked = of_images()
    asked.model_name = "other"
    assert served.refused(asked) == (grpc.StatusCode.NOT_FOUND, "there is no model 'other'; there is toy")


def test_bytes_that_are_no_request_and_those_beyond_the_limit_are_told(served: Served) -> None:
    call = served.channel.unary_unary(f"/{SERVICE}/ModelInfer")
    with pytest.raises(grpc.RpcError) as caught:
        call(b"\xff" * 10, timeout=SECONDS)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT and "ModelInferRequest" in caught.value.details()
    assert served.refused(of_images([b"x" * 2 * MESSAGE_BYTES]))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert served.infer(of_images()).model_version == "7"


def test_who_waits_no_longer_than_his_deadline_is_told_so_and_holds_nothing(served: Served) -> None:
    served.go_on.clear()
    assert served.refused(of_images(), timeout=0.2)[0] is grpc.StatusCode.DEADLINE_EXCEEDED
    assert served.running.wait(SECONDS)
    served.go_on.set()
    while served.catalog.state("toy")["loaded"][0]["asking"]:
        time.sleep(0.01)  # its version is let go of soon
    assert served.infer(of_images()).model_version == "7"


def test_who_asks_a_service_that_has_too_much_to_do_is_told_to_come_again() -> None:
    with ExitStack() as stack:
        served = Served(stack, max_queued=2, max_batch=2)
        served.go_on.clear()
        calls = [served.channel.unary_unary(f"/{SERVICE}/ModelInfer").future(of_images().SerializeToString())]
        assert served.running.wait(SECONDS)
        refused: list[tuple[grpc.StatusCode, str]] = []
        while not refused:
            call = served.channel.unary_unary(f"/{SERVICE}/ModelInfer").future(of_images().SerializeToString())
            calls.append(call)
            try:
                call.result(timeout=0.2)
            except grpc.FutureTimeoutError:
                continue
            except grpc.RpcError as exc:
                refused.append((exc.code(), exc.details()))
        assert refused[0][0] is grpc.StatusCode.UNAVAILABLE and "ask again" in refused[0][1]
        served.go_on.set()
        for call in calls[:2]:
            assert pb.ModelInferResponse.FromString(call.result(SECONDS)).model_version == "7"


def test_who_asks_too_often_is_told_when_to_ask_again_by_one_count_with_http() -> None:
    with ExitStack() as stack:
        served = Served(stack, per_second=0.001)
        assert served.infer(of_images()).model_version == "7"
        code, sentence = served.refused(of_images())
        assert code is grpc.StatusCode.UNAVAILABLE and sentence.startswith("more than 0.001 requests per second")
        assert served.call("ServerReady", pb.ServerReadyRequest(), pb.ServerReadyResponse).ready
        counted = [values[-2:] for name, values, _ in served.service.counts.read() if name == "serve_requests_total"]
        assert sorted(map(tuple, counted)) == [("grpc", "OK"), ("grpc", "UNAVAILABLE")]
        assert served.rates.wait("127.0.0.1") > 0, "whom HTTP knows by this address has asked, too"
        assert served.rates.wait("127.0.0.2") == 0


def test_a_model_that_fails_tells_no_more_than_that(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise RuntimeError("secret path")

    served.catalog.add("broken", ToyServable(1, fail))
    asked = of_images()
    asked.model_name = "broken"
    code, sentence = served.refused(asked)
    assert code is grpc.StatusCode.INTERNAL and "secret" not in sentence and "its log says why" in sentence
    assert "secret path" in caplog.text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    create_authority(tmp_path, "test")
    for role in ("serve", CLIENT):
        issue(tmp_path, tmp_path, [role])
    return tmp_path


def test_under_certificates_a_program_needs_a_token_that_reads_the_model(folder: Path) -> None:
    create_token(folder, "toys", ["to*=read"], 1)
    create_token(folder, "others", ["other=read,write"], 1)
    create_token(folder, "writers", ["to*=write"], 1)
    create_token(folder, "late", ["to*=read"], 1e-9)
    with ExitStack() as stack:
        served = Served(stack, str(folder))

        def asked_with(token: str | None) -> Callable[..., Any]:
            own = Credentials(str(folder), CLIENT, token and str(folder / token))
            return stack.enter_context(own.channel(served.server.address, [], "serve")).unary_unary

        for token, sentence in (
            (None, "it shows no token"),
            ("others.token", "no right to read 'toy'"),
            ("writers.token", "no right to read 'toy'"),
            ("late.token", "its token ran out"),
            ("toys.token", "OK"),
        ):
            call = asked_with(token)(f"/{SERVICE}/ModelInfer")
            try:
                answer = call(of_images().SerializeToString(), timeout=SECONDS)
                assert sentence == "OK" and pb.ModelInferResponse.FromString(answer).model_version == "7"
            except grpc.RpcError as exc:
                assert (exc.code().name, exc.details()) == ("PERMISSION_DENIED", sentence)
        texts = [(folder / f"{name}.token").read_text(encoding="utf-8").strip() for name in ("toys", "others")]
        clients = {Callers("127.0.0.1:0", str(folder)).client(f"{SCHEME}{text}", "x") for text in texts}
        assert len(clients) == 2 and "x" not in clients, "a token's requests are counted together, wherever it is"
        live = asked_with("others.token")(f"/{SERVICE}/ServerLive")
        assert pb.ServerLiveResponse.FromString(live(b"", timeout=SECONDS)).live
        with pytest.raises(grpc.RpcError) as caught:
            served.infer(of_images(), timeout=5)  # without a certificate
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_the_usual_client_of_the_protocol_is_answered(served: Served) -> None:
    triton = pytest.importorskip("tritonclient.grpc", reason="tritonclient[grpc] is not installed")
    client = triton.InferenceServerClient(served.server.address)
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("toy", "7")
    assert client.get_model_metadata("toy", as_json=True)["inputs"][0]["datatype"] == "BYTES"
    assert client.get_server_metadata().name == "geartrain"
    assert [model.name for model in client.get_model_repository_index().models] == ["toy"]
    image = triton.InferInput("images", [2], "BYTES")
    image.set_data_from_numpy(IMAGES)
    answer = client.infer("toy", [image], request_id="r")
    np.testing.assert_array_equal(answer.as_numpy("lengths"), [5, 0])
    assert [*answer.as_numpy("first")] == [b"1234", b""] and answer.get_response().id == "r"
    numbers = triton.InferInput("numbers", [2, 4], "FP32")
    numbers.set_data_from_numpy(NUMBERS)
    wanted = [triton.InferRequestedOutput("scores")]
    answer = client.infer("toy", [numbers], outputs=wanted, parameters={"operation": "largest", "k": 3})
    np.testing.assert_array_equal(answer.as_numpy("scores"), [[5, 4, 3], [9, 8, 7]])
    with pytest.raises(triton.InferenceServerException if hasattr(triton, "InferenceServerException") else Exception):
        client.infer("toy", [numbers])


def test_workers_share_the_port_of_grpc_and_say_together_what_they_count(tmp_path: Path) -> None:
    require_onnx()
    pytest.importorskip("prometheus_client", reason="needs pip install 'geartrain[metrics]'")
    model = exported(tmp_path / "m")
    flags = ["--listen=127.0.0.1:0", "--grpc=127.0.0.1:0", "--metrics=127.0.0.1:0", "--workers=2"]
    with RoleProcess("serve", str(model), *flags, errors=tmp_path / "log") as role:
        asked = of_images([picture(1)])
        asked.model_name = "m"

        def by_worker() -> dict[str, float]:
            with urllib.request.urlopen(f"http://{role.facts['metrics']}/metrics", timeout=SECONDS) as response:
                text = response.read().decode()
            lines = (line for line in text.splitlines() if line.startswith("geartrain_serve_items_total"))
            return {line.partition('worker="')[2].partition('"')[0]: float(line.rpartition(" ")[2]) for line in lines}

        calls = 0
        while set(by_worker()) != {"0", "1"}:  # each connection is of one of them
            assert calls < 200, by_worker()
            with grpc.insecure_channel(role.facts["grpc"], [("grpc.use_local_subchannel_pool", 1)]) as channel:
                answer = channel.unary_unary(f"/{SERVICE}/ModelInfer")(asked.SerializeToString(), timeout=SECONDS)
            assert pb.ModelInferResponse.FromString(answer).model_version == "1"
            calls += 1
        assert sum(by_worker().values()) == calls
