"""Tensors of the inference protocol: every type there and back, and no lie about a count or a shape believed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from geartrain.ams.values.errors import InvalidArgument
from geartrain.serving.kserve.asking import wanted_of
from geartrain.serving.kserve.datatypes import (
    BYTES,
    DTYPES,
    array_of,
    checked,
    datatype_of,
    elements_of,
    from_raw,
    to_raw,
)
from geartrain.serving.kserve.messages import CONTENTS, inputs_of, parameters_of, response_of
from geartrain.serving.kserve.pb import inference_pb2 as pb

ARRAYS = {
    datatype: np.array([[b"", b"\0\xff"], [b"image" * 50, "ü".encode()]], object)
    if datatype == BYTES
    else np.array([[0, 1], [1, 0]], bool)
    if datatype == "BOOL"
    else np.array([[np.finfo(dtype).max, -0.5], [np.inf, 0]], dtype)
    if dtype.kind == "f"
    else np.array([[np.iinfo(dtype).max, np.iinfo(dtype).min], [1, 0]], dtype)
    for datatype, dtype in DTYPES.items()
}


def request(datatype: str, shape: list[int], raw: bytes | None = None, **contents: Any) -> pb.ModelInferRequest:
    tensor = pb.ModelInferRequest.InferInputTensor(name="x", datatype=datatype, shape=shape)
    for field, values in contents.items():
        getattr(tensor.contents, field).extend(values)
    return pb.ModelInferRequest(inputs=[tensor], raw_input_contents=[] if raw is None else [raw])


@pytest.mark.parametrize("datatype", DTYPES)
@pytest.mark.parametrize("is_raw", [True, False])
def test_a_tensor_of_every_type_comes_back_as_it_was(datatype: str, is_raw: bool) -> None:
    array = ARRAYS[datatype]
    if is_raw:
        asked = request(datatype, [2, 2], to_raw(array))
    elif datatype in CONTENTS:
        asked = request(datatype, [2, 2], **{CONTENTS[datatype]: elements_of(array)})
    else:
        with pytest.raises(InvalidArgument, match="must be sent as raw_input_contents"):
            inputs_of(request(datatype, [2, 2]), 2)
        return
    answered = response_of(asked, 7, "echo", inputs_of(asked, 2))
    assert bool(answered.raw_output_contents) == is_raw and answered.model_version == "7"
    (tensor,) = answered.outputs
    assert (tensor.name, tensor.datatype, [*tensor.shape]) == ("x", datatype, [2, 2])
    data = (
        from_raw("x", answered.raw_output_contents[0], array.dtype, (2, 2))
        if is_raw
        else array_of("x", getattr(tensor.contents, CONTENTS[datatype]), array.dtype, (2, 2))
    )
    np.testing.assert_array_equal(data, array)
    assert data.dtype == array.dtype


def test_texts_go_as_bytes_of_utf_8() -> None:
    assert datatype_of("U7") == datatype_of(object) == BYTES
    assert elements_of(np.array(["ü", "b"])) == elements_of(np.array([b"\xc3\xbc", "b"], object)) == [b"\xc3\xbc", b"b"]


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        (request("FP8", [1]), "'FP8'; those known here are BOOL"),
        (request("FP32", []), "needs 1 … 8 dimensions"),
        (request("FP32", [1] * 9), "needs 1 … 8 dimensions"),
        (request("FP32", [1, -1]), "of 0 or more"),
        (request("FP32", [0, 4], b""), "has 0 items"),
        (request("FP32", [65, 4], b""), r"has 65 items; one request takes 1 … 64"),
        (request("FP32", [2, 2**62], b"1234"), "has 4 raw bytes"),
        (request("FP32", [1, 2], b"1234567"), "takes 8"),
        (request("BOOL", [2], b"\0\2"), "neither 0 nor 1"),
        (request("BYTES", [1], b"\1\0\0"), "does not hold 1 elements"),
        (request("BYTES", [1], b"\xff\xff\xff\xff1"), "does not hold 1 elements"),
        (request("BYTES", [1], b"\0\0\0\0" * 2), "does not hold 1 elements"),
        (request("BYTES", [2], b"\0\0\0\0"), "has 1 elements where its shape"),
        (request("FP32", [2], fp32_contents=[1.0]), "has 1 elements where its shape"),
        (request("FP32", [1], fp64_contents=[1.0]), "takes them in the field of FP32"),
        (request("INT8", [1], int_contents=[300]), "an element that is no INT8"),
        (request("UINT8", [1], uint_contents=[256]), "an element that is no UINT8"),
        (request("FP32", [1], b"1234", fp32_contents=[1.0]), "contents beside raw_input_contents"),
        (pb.ModelInferRequest(raw_input_contents=[b""]), "0 inputs and 1 raw_input_contents"),
        (pb.ModelInferRequest(), "has no inputs"),
        (
            pb.ModelInferRequest(inputs=[*request("FP32", [1], fp32_contents=[1.0]).inputs] * 2),
            "'x' is given twice",
        ),
    ],
)
def test_a_request_that_cannot_be_is_named(asked: pb.ModelInferRequest, complaint: str) -> None:
    with pytest.raises(InvalidArgument, match=complaint):
        inputs_of(asked, 64)


def test_parameters_are_values_and_one_without_is_named() -> None:
    asked = pb.ModelInferRequest()
    asked.parameters["k"].int64_param = 5
    asked.parameters["operation"].string_param = "embed"
    asked.parameters["share"].double_param = 0.5
    assert parameters_of(asked) == {"k": 5, "operation": "embed", "share": 0.5}
    asked.parameters["none"].SetInParent()
    with pytest.raises(InvalidArgument, match="parameter 'none' has no value"):
        parameters_of(asked)


def test_only_the_wanted_outputs_are_told() -> None:
    answered = {"ids": np.zeros((1, 5)), "scores": np.zeros((1, 5))}
    assert list(wanted_of(answered, ["scores"])) == ["scores"] and list(wanted_of(answered, [])) == ["ids", "scores"]
    with pytest.raises(InvalidArgument, match="output 'logits' is none of this operation's: ids, scores"):
        wanted_of(answered, ["logits"])


def test_the_shape_is_checked_before_anything_is_decoded() -> None:
    with pytest.raises(InvalidArgument, match="has 1000000 items"):
        checked("x", "BYTES", [1_000_000], 64)
