"""A model of clicks is asked with values of the kinds that it was trained on: by processes, as people do."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from geartrain.serving.kserve.datatypes import datatype_of, from_raw, to_raw
from geartrain.serving.kserve.pb import inference_pb2 as pb
from geartrain.serving.kserve.service import SERVICE
from tests.support.command_line import typed
from tests.support.http_service import ask
from tests.support.role_process import RoleProcess
from tests.support.served_models import require_onnx

pa = pytest.importorskip("pyarrow", reason="samples from files need the extra data")
pq = pytest.importorskip("pyarrow.parquet", reason="samples from files need the extra data")

BIG = 2**53 + 1
"""No number of JavaScript: it comes as its digits."""
USERS, ITEMS, NUMBER = 12, 20, 800


def columns(texts: bool) -> dict[str, Any]:
    """Clicks of users on items of their own parity; users and items as integers, or as their digits."""
    random = np.random.default_rng(0)
    user, item = random.integers(USERS, size=NUMBER), random.integers(ITEMS, size=NUMBER)
    tags = [random.integers(5, size=count).tolist() for count in random.integers(3, size=NUMBER)]
    of: dict[str, Any] = {"click": (user + item) % 2, "time": np.arange(NUMBER)}
    if texts:
        tags = pa.array([[str(tag) for tag in some] for some in tags], pa.list_(pa.string()))
        return {**of, "user": [str(BIG + one) for one in user], "item": [str(one) for one in item], "tags": tags}
    return {**of, "user": BIG + user, "item": item, "tags": tags}


def geartrain(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "geartrain", *arguments], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs and exports of one training on integers and one on texts, and the samples of both."""
    require_onnx()
    folder = tmp_path_factory.mktemp("kinds")
    for name in ("integers", "texts"):
        data = folder / f"{name}.parquet"
        pq.write_table(pa.table({**columns(name == "texts"), "is_new": np.arange(NUMBER) % 2 == 0}), data)
        settings = ["--set", "dim=4", "--set", "steps=60", "--set", "batch_size=50", "--set", "row_lr=0.1"]
        for arguments in (
            ("worker", "ctr", "--data", data, "--out", folder / f"run-{name}", *settings, "--set", "history=3"),
            ("export", folder / f"run-{name}", "--to", folder / f"model-{name}"),
        ):
            done = (geartrain if name == "integers" and arguments[0] == "worker" else typed)(*map(str, arguments))
            assert done.returncode == 0, done.stderr
    return folder


def scores(folder: Path, run: str, samples: Path, command: Any = typed) -> list[float]:
    done = command("predict", str(folder / f"run-{run}"), str(samples), "--json")
    assert done.returncode == 0, done.stderr
    found: list[float] = json.loads(done.stdout)
    assert np.std(found) > 0.1, "a model that knows nothing shows nothing"
    return found


def refused(folder: Path, run: str, samples: Path) -> str:
    done = typed("predict", str(folder / f"run-{run}"), str(samples))
    assert (done.returncode, done.stdout) == (2, "")
    return " ".join(done.stderr.split())


def changed(folder: Path, name: str, **of: Any) -> Path:
    table = {**columns(name == "texts"), "is_new": np.arange(NUMBER) % 2 == 0, **of}
    pq.write_table(pa.table(table), folder / "changed.parquet")
    return folder / "changed.parquet"


def test_digits_of_integers_are_scored_as_the_integers(folder: Path) -> None:
    by_digits = scores(folder, "integers", folder / "texts.parquet", geartrain)
    assert by_digits == scores(folder, "integers", folder / "integers.parquet")


def test_files_of_another_kind_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    """Field, value, what training had, and what to do."""
    assert "sample 0: item is 1" in refused(folder, "texts", folder / "integers.parquet")
    names = [f"u{number}" for number in range(NUMBER)]
    sentence = refused(folder, "integers", changed(tmp_path, "integers", user=names))
    assert "sample 0: user is 'u0'; the model was trained on integers there: give an integer from 0" in sentence
    for digits in ("07", "+7", " 7", "7.0", "٧", str(2**63)):
        sentence = refused(folder, "integers", changed(tmp_path, "integers", item=["7"] * (NUMBER - 1) + [digits]))
        assert f"sample {NUMBER - 1}: item is {digits!r}; the model was trained on integers there" in sentence
    for values, said in (
        ([[7]] * NUMBER, "[7]; the model was trained on single integers there"),
        ([True] * NUMBER, "True; the model was trained on integers there"),
        ([7.0] * NUMBER, "7.0; the model was trained on integers there"),
    ):
        assert f"sample 0: item is {said}" in refused(folder, "integers", changed(tmp_path, "integers", item=values))
    assert "is_new is 'yes'; the model was trained on true and false" in refused(
        folder, "texts", changed(tmp_path, "texts", is_new=["yes"] * NUMBER)
    )


def test_a_run_goes_on_with_samples_of_its_kinds_alone(folder: Path) -> None:
    done = typed(
        "worker",
        "ctr",
        "--resume",
        str(folder / "run-texts"),
        "--data",
        str(folder / "integers.parquet"),
        "--steps",
        "5",
    )
    assert done.returncode == 2
    assert "the model was trained on texts there" in " ".join(done.stderr.split())


SAMPLES: dict[str, dict[str, Any]] = {
    "integers": {"user": BIG + 3, "item": 4, "tags": [1, 2], "is_new": True, "history": [[5, 1]]},
    "texts": {"user": str(BIG + 3), "item": "4", "tags": ["1", "2"], "is_new": True, "history": [["5", 1]]},
}
OTHERS: list[tuple[str, dict[str, Any], str]] = [
    ("integers", {"user": "anna"}, "field 'user' of sample 0 is 'anna'; the model was trained on integers there"),
    ("integers", {"item": True}, "field 'item' of sample 0 is True; the model was trained on integers there"),
    ("integers", {"item": "04"}, "field 'item' of sample 0 is '04'; the model was trained on integers there"),
    ("integers", {"item": [4]}, "field 'item' of sample 0 is [4]; the model was trained on single integers there"),
    ("integers", {"tags": ["a"]}, "field 'tags' of sample 0 is 'a'; the model was trained on lists of integers there"),
    ("integers", {"history": [["a", 1]]}, "field 'history' of sample 0 is 'a'; the model was trained on lists of int"),
    ("integers", {"history": [[4, "yes"]]}, "field 'history' of sample 0 is 'yes'; the model was trained on"),
    ("integers", {"is_new": 2}, "field 'is_new' of sample 0 is 2; the model was trained on true and false there"),
    ("texts", {"item": 4}, "field 'item' of sample 0 is 4; the model was trained on texts there: give the text"),
    ("texts", {"tags": ["1", 2]}, "field 'tags' of sample 0 is 2; the model was trained on lists of texts there"),
    ("texts", {"history": [[5, 1]]}, "field 'history' of sample 0 is 5; the model was trained on lists of texts"),
    ("texts", {"is_new": "true"}, "field 'is_new' of sample 0 is 'true'; the model was trained on true and false"),
]


@pytest.fixture(scope="module")
def serving(folder: Path) -> Iterator[RoleProcess]:
    models = [f"{name}={folder}/model-{name}" for name in SAMPLES]
    with RoleProcess("serve", *models, "--listen=127.0.0.1:0", "--grpc=127.0.0.1:0") as serving:
        yield serving


def test_requests_of_another_kind_are_refused_by_name(serving: RoleProcess) -> None:
    for name, changes, sentence in OTHERS:
        status, said = ask(
            serving.address, "POST", f"/v1/models/{name}/click", {"samples": [{**SAMPLES[name], **changes}]}
        )
        assert (status, sentence in said["error"]["message"]) == (400, True), said
    sample = SAMPLES["integers"]
    plain, digits = (
        ask(serving.address, "POST", "/v1/models/integers/click", {"samples": [one]})[1]["answers"]
        for one in (sample, {**SAMPLES["texts"], "tags": ["1", 2], "is_new": 1})
    )
    assert plain == digits
    one = {"item": sample["item"]}
    context = {field: value for field, value in sample.items() if field != "item"}
    rank = {"context": context, "candidates": [one, {"item": "5"}], "k": 2}
    status, said = ask(serving.address, "POST", "/v1/models/integers/rank", rank)
    assert status == 200
    assert {best["candidate"]: best["probability"] for best in said["answers"][0]}[0] == plain[0]["probability"]
    status, said = ask(
        serving.address, "POST", "/v1/models/integers/rank", {**rank, "candidates": [one, {"item": "x"}]}
    )
    assert (status, "field 'item' of candidate 1 is 'x'; the" in said["error"]["message"]) == (400, True), said


def tensors(name: str, **changes: Any) -> dict[str, np.ndarray]:
    """The sample as arrays of the inference protocol, with padding behind its list."""
    sample = {**SAMPLES[name], **changes}
    (event,) = sample.pop("history")
    arrays: dict[str, Any] = {**sample, "history_items": event[0], "history_outcomes": event[1]}
    arrays["tags"] = [*sample["tags"], -1 if name == "integers" else ""]
    return {
        field: np.array([[one.encode() for one in np.ravel(value)]], object)
        if np.asarray(value).dtype.kind == "U"
        else np.atleast_2d(value)
        for field, value in arrays.items()
    }


def test_tensors_of_another_kind_are_refused_by_name(serving: RoleProcess) -> None:
    """Over the inference protocol texts are BYTES."""
    with grpc.insecure_channel(serving.facts["grpc"]) as channel:
        infer = channel.unary_unary(
            f"/{SERVICE}/ModelInfer",
            request_serializer=pb.ModelInferRequest.SerializeToString,
            response_deserializer=pb.ModelInferResponse.FromString,
        )

        def asked(model: str, arrays: dict[str, np.ndarray]) -> float:
            request = pb.ModelInferRequest(model_name=model)
            for name, array in arrays.items():
                request.inputs.add(name=name, datatype=datatype_of(array.dtype), shape=array.shape)
                request.raw_input_contents.append(to_raw(array))
            return float(from_raw("p", infer(request, timeout=30).raw_output_contents[0], np.dtype("f8"), (1,))[0])

        for name, sample in SAMPLES.items():
            status, said = ask(serving.address, "POST", f"/v1/models/{name}/click", {"samples": [sample]})
            assert (status, asked(name, tensors(name))) == (200, said["answers"][0]["probability"])
        digits = tensors("texts")
        assert asked("integers", digits) == asked("integers", tensors("integers"))
        for model, arrays, sentence in (
            ("texts", tensors("texts", item=4), "a value of array 'item' is 4; the model was trained on texts there"),
            ("integers", tensors("integers", item="x"), "array 'item' is 'x'; the model was trained on integers there"),
            ("integers", tensors("integers", item=True), "array 'item' is True; the model was trained on integers"),
            ("integers", tensors("integers", item=[4, -1]), "array 'item' is [1, 2]; the model was trained on single"),
            ("integers", {**tensors("integers"), "item": np.array([2**64 - 1], np.uint64)}, "array 'item' is 1844674"),
        ):
            with pytest.raises(grpc.RpcError, match=re.escape(sentence)):
                asked(model, arrays)
        status, said = ask(
            serving.address,
            "POST",
            "/v2/models/texts/infer",
            {"inputs": [{"name": name, "datatype": "INT64", "shape": [1], "data": [1]} for name in tensors("texts")]},
        )
        assert (status, "the model was trained on texts there" in said["error"]) == (400, True), said
