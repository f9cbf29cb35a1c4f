"""KServe's protocol over HTTP: tensors in JSON and raw behind it, and its own form of errors."""

from __future__ import annotations

import base64
import gzip
import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from geartrain.serving.http.callers import Limits
from geartrain.serving.http.v2 import LENGTH_HEADER
from tests.support.http_service import ServedModels, served_models
from tests.support.toy_servables import Largest, ToyServable

IMAGES = [b"12345", b"\xff\xfe"]


@pytest.fixture
def served() -> Iterator[ServedModels]:
    with served_models({"toy": ToyServable(7)}, Limits(max_items=8)) as service:
        yield service


def tensor(**more: Any) -> dict[str, Any]:
    images = [base64.b64encode(image).decode() for image in IMAGES]
    said = {"name": "images", "datatype": "BYTES", "shape": [2], "data": images}
    return {**said, "parameters": {"content_type": "base64"}, **more}


def numbers(**more: Any) -> dict[str, Any]:
    return {"name": "numbers", "datatype": "FP32", "shape": [1, 4], "data": [1, 5, 3, 4.5], **more}


def of_numbers(**more: Any) -> dict[str, Any]:
    return {"inputs": [numbers()], "parameters": {"operation": "largest", "k": 2}, **more}


def test_tensors_of_json_are_answered_by_name_and_type(served: ServedModels) -> None:
    answer = served.ask("POST", "/v2/models/toy/infer", {"id": "a", "inputs": [tensor()]})
    assert answer.status == 200
    assert answer.said == {
        "model_name": "toy",
        "model_version": "7",
        "id": "a",
        "parameters": {"operation": "lengths", "created": 1e9},
        "outputs": [
            {"name": "lengths", "datatype": "INT64", "shape": [2], "data": [5, 2]},
            {"name": "versions", "datatype": "INT64", "shape": [2], "data": [7, 7]},
            {
                "name": "first",
                "datatype": "BYTES",
                "shape": [2],
                "data": ["MTIzNA==", "//4="],
                "parameters": {"content_type": "base64"},
            },
        ],
    }


@pytest.mark.parametrize("data", [[1, 5, 3, 4.5], [[1, 5, 3, 4.5]]])
def test_data_may_be_flat_or_nested_and_an_operation_is_a_parameter(served: ServedModels, data: Any) -> None:
    asked = of_numbers(inputs=[numbers(data=data)], outputs=[{"name": "places"}])
    (places,) = served.ask("POST", "/v2/models/toy/versions/7/infer", asked).said["outputs"]
    assert places == {"name": "places", "datatype": "INT64", "shape": [1, 2], "data": [1, 3]}


def test_tensors_may_be_raw_behind_the_json(served: ServedModels) -> None:
    raw = np.array([[1, 5, 3, 4.5]], "<f4").tobytes()
    given = numbers(parameters={"binary_data_size": len(raw)})
    del given["data"]
    text = json.dumps(of_numbers(inputs=[given])).encode()
    answer = served.ask("POST", "/v2/models/toy/infer", text + raw, **{LENGTH_HEADER: str(len(text))})
    assert answer.said["outputs"][1]["data"] == [5, 4.5]


def test_numbers_that_json_lacks_are_null(served: ServedModels, monkeypatch: pytest.MonkeyPatch) -> None:
    answered = {"scores": np.array([[0.5, np.nan, -np.inf]])}
    monkeypatch.setattr(Largest, "run", lambda *_: answered)
    (scores,) = served.ask("POST", "/v2/models/toy/infer", of_numbers()).said["outputs"]
    assert scores == {"name": "scores", "datatype": "FP64", "shape": [1, 3], "data": [0.5, None, None]}


def test_what_a_server_is_and_has_is_told(served: ServedModels) -> None:
    assert served.ask("GET", "/v2").said["name"] == "geartrain"
    assert served.ask("GET", "/v2/health/live").said == {"live": True}
    assert served.ask("GET", "/v2/health/ready").said == {"ready": True}
    assert served.ask("GET", "/v2/models/toy/versions/7/ready").said == {"name": "toy", "ready": True}
    assert served.ask("POST", "/v2/repository/index", {}).said == [
        {"name": "toy", "version": "7", "state": "READY", "reason": "current"}
    ]
    found = served.ask("GET", "/v2/models/toy?operation=largest").said
    assert found["versions"] == ["7"] and found["platform"] == "geartrain_toy"
    assert found["inputs"] == [{"name": "numbers", "datatype": "FP32", "shape": [-1, 4]}]
    served.service.catalog.close()
    assert served.ask("GET", "/v2/health/ready").status == 503


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({}, "inputs is None; it must be a list"),
        ({"inputs": []}, "has no inputs"),
        ({"inputs": [5]}, "name is None; it must be a text"),
        ({"inputs": [tensor(), tensor()]}, "'images' is given twice"),
        ({"inputs": [tensor(shape=[9], data=["x"] * 9)]}, "has 9 items; one request takes 1 … 8"),
        ({"inputs": [tensor(shape=[1.5])]}, "must be a list of whole numbers"),
        ({"inputs": [tensor(shape=[True])]}, "must be a list of whole numbers"),
        ({"inputs": [tensor(data=["%%"] * 2)]}, "no base64"),
        ({"inputs": [tensor(data=[5, 6])]}, "an element 5, which is no BYTES"),
        ({"inputs": [tensor(data=None)]}, "has data None; give a list"),
        ({"inputs": [tensor(parameters={"binary_data_size": 4})]}, "0 bytes are left"),
        ({"inputs": [numbers(data=["1", 2, 3, 4])]}, "an element '1', which is no FP32"),
        ({"inputs": [numbers(data=[True, 2, 3, 4])]}, "an element True, which is no FP32"),
        ({"inputs": [numbers(data=[None, 2, 3, 4])]}, "an element None, which is no FP32"),
        ({"inputs": [numbers(data=[10**400, 2, 3, 4])]}, "that is no FP32"),
        ({"inputs": [numbers(datatype="INT64")]}, "an element 4.5, which is no INT64"),
        ({"inputs": [numbers(data=[[1, 2], 3, 4])]}, "an element"),
        (of_numbers(parameters=5), "parameters is 5; it must be an object"),
        (of_numbers(parameters={"operation": "largest", "k": 9}), "k is 9"),
        (of_numbers(outputs=[{"name": "x"}]), "output 'x' is none of this operation's: places, scores"),
    ],
)
def test_what_cannot_be_is_told_as_the_protocol_has_it(served: ServedModels, asked: Any, sentence: str) -> None:
    answer = served.ask("POST", "/v2/models/toy/infer", asked)
    assert answer.status == 400 and set(answer.said) == {"error"}
    assert sentence in answer.said["error"]
    assert served.service.catalog.state("toy")["loaded"][0]["asking"] == 0


@pytest.mark.parametrize("length", ["-1", "x", "9999", "9" * 30])
def test_a_length_that_cannot_be_is_told(served: ServedModels, length: str) -> None:
    answer = served.ask("POST", "/v2/models/toy/infer", b"{}", **{LENGTH_HEADER: length})
    assert answer.status == 400 and LENGTH_HEADER in answer.said["error"]


def test_what_is_not_there_is_not_found(served: ServedModels) -> None:
    for path in ("/v2/models/other/infer", "/v2/models/toy/versions/6/infer"):
        assert served.ask("POST", path, {"inputs": [tensor()]}).status == 404
    answer = served.ask("POST", "/v2/models/toy/infer", of_numbers(parameters={"operation": "embed"}))
    assert (answer.status, answer.said) == (404, {"error": "'toy' has no operation 'embed'; it has lengths, largest"})


def test_what_no_model_refuses_is_told_in_the_same_form(served: ServedModels) -> None:
    """Triton's client fails over any other."""
    for method, path, headers, status in (
        ("GET", "/v2/models/toy/config", {}, 404),
        ("GET", "/v2/models/toy/infer", {}, 405),
        ("GET", "/v2", {"Host": "evil.example"}, 421),
        ("GET", "/v2", {"Origin": "https://evil.example"}, 403),
    ):
        answer = served.ask(method, path, **headers)
        assert answer.status == status and isinstance(answer.said["error"], str)


def test_a_body_that_is_compressed_is_refused_by_its_name(served: ServedModels) -> None:
    for path in ("/v1/lengths", "/v2/models/toy/infer"):
        answer = served.ask("POST", path, gzip.compress(b"{}"), **{"Content-Encoding": "gzip"})
        assert answer.status == 415 and "content-encoding is 'gzip'; send the body without" in str(answer.said)


def test_every_question_is_counted_with_its_status(served: ServedModels) -> None:
    served.ask("POST", "/v2/models/toy/infer", {"inputs": [tensor()]})
    served.ask("POST", "/v2/models/toy/infer", {"inputs": []})
    served.ask("POST", "/v2/models/of-a-stranger/infer", {"inputs": []})
    served.ask("POST", "/v1/largest", {"numbers": [[1, 2, 3, 4]]})
    counted = {
        tuple(values): numbers[-1] for name, values, numbers in served.service.counts.read() if "requests" in name
    }
    assert counted == {
        ("toy", "7", "lengths", "http", "200"): 1,
        ("", "", "", "http", "400"): 1,
        ("", "", "", "http", "404"): 1,
        ("toy", "7", "largest", "http", "200"): 1,
    }


def test_counters_are_told_at_the_port_of_questions(served: ServedModels) -> None:
    pytest.importorskip("prometheus_client", reason="needs pip install 'geartrain[metrics]'")
    served.ask("POST", "/v1/largest", {"numbers": [[1, 2, 3, 4]]})
    with urllib.request.urlopen(f"http://{served.address}/metrics", timeout=20) as response:
        text = response.read().decode()
    assert 'geartrain_serve_requests_total{cluster="local",code="200",model="toy",operation="largest"' in text
    assert 'geartrain_serve_version{cluster="local",model="toy"} 7.0' in text
