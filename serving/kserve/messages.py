"""Conversion of the inference protocol's messages to arrays and parameters, and of outputs to messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from geartrain.ams.values.errors import InvalidArgument
from geartrain.serving.answers import Operation
from geartrain.serving.kserve.datatypes import (
    BYTES,
    Array,
    array_of,
    checked,
    datatype_of,
    elements_of,
    from_raw,
    tensor_metadata,
    to_raw,
)
from geartrain.serving.kserve.pb import inference_pb2 as pb

CONTENTS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    BYTES: "bytes_contents",
}
"""Field of InferTensorContents for each datatype; FP16 has none."""
Metadata = pb.ModelMetadataResponse.TensorMetadata


def parameters_of(request: pb.ModelInferRequest) -> dict[str, Any]:
    """Return the parameters of a request. Raises InvalidArgument if one has no value."""
    found = {}
    for name, value in request.parameters.items():
        choice = value.WhichOneof("parameter_choice")
        if choice is None:
            raise InvalidArgument(f"parameter {name!r} has no value of a known type; give a bool, number or string")
        found[name] = getattr(value, choice)
    return found


def inputs_of(request: pb.ModelInferRequest, most_items: int) -> dict[str, Array]:
    """Return the tensors of a request by name. Raises InvalidArgument."""
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise InvalidArgument(
            f"there are {len(request.inputs)} inputs and {len(raw)} raw_input_contents; give none, or one for each"
        )
    arrays: dict[str, Array] = {}
    for at, tensor in enumerate(request.inputs):
        name = tensor.name
        if name in arrays:
            raise InvalidArgument(f"input {name!r} is given twice; give each once")
        dtype, shape = checked(name, tensor.datatype, tensor.shape, most_items)
        if raw:
            if tensor.HasField("contents"):
                raise InvalidArgument(f"input {name!r} has contents beside raw_input_contents; give it once")
            arrays[name] = from_raw(name, raw[at], dtype, shape)
        elif (field := CONTENTS.get(tensor.datatype)) is None:
            raise InvalidArgument(f"input {name!r} is {tensor.datatype}, which must be sent as raw_input_contents")
        else:
            arrays[name] = array_of(name, getattr(tensor.contents, field), dtype, shape)
    if not arrays:
        raise InvalidArgument("the request has no inputs; the model's metadata name them")
    return arrays


def response_of(
    request: pb.ModelInferRequest, version: int, operation: str, answered: Mapping[str, Array]
) -> pb.ModelInferResponse:
    """Return the answer to a request, in the encoding of the request."""
    response = pb.ModelInferResponse(model_name=request.model_name, model_version=str(version), id=request.id)
    response.parameters["operation"].string_param = operation
    is_raw = bool(request.raw_input_contents) or any(datatype_of(a.dtype) not in CONTENTS for a in answered.values())
    for name, array in answered.items():
        datatype = datatype_of(array.dtype)
        tensor = response.outputs.add(name=name, datatype=datatype, shape=array.shape)
        if is_raw:
            response.raw_output_contents.append(to_raw(array))
        else:
            getattr(tensor.contents, CONTENTS[datatype]).extend(elements_of(array))
    return response


def metadata_of(name: str, versions: Sequence[int], kind: str, operation: Operation) -> pb.ModelMetadataResponse:
    """Return a model's metadata, with inputs and outputs of ``operation``, which requests use by default."""
    inputs, outputs = (
        [Metadata(name=name, datatype=datatype, shape=shape) for name, datatype, shape in map(tensor_metadata, specs)]
        for specs in (operation.inputs, operation.outputs)
    )
    return pb.ModelMetadataResponse(
        name=name, versions=map(str, versions), platform=f"geartrain_{kind}", inputs=inputs, outputs=outputs
    )
