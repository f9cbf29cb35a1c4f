"""Encoding of table specs and dtypes in protobuf. Other values: ``messages.py``, raw bytes: ``framing.py``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Literal

from geartrain.ams.pb.v1 import types_pb2
from geartrain.ams.values.admission.rules import MinCount, Probability
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.expiry.rules import Expiry, expiry_from_json
from geartrain.ams.values.optimizers.registry import OPTIMIZERS, optimizer_of
from geartrain.ams.values.specs import Constant, DTypeName, Normal, TableSpec, Uniform

_DTYPE_CODES: dict[DTypeName, types_pb2.DType.ValueType] = {
    "float32": types_pb2.DTYPE_FLOAT32,
    "float16": types_pb2.DTYPE_FLOAT16,
    "bfloat16": types_pb2.DTYPE_BFLOAT16,
}
_DTYPE_NAMES: dict[int, DTypeName] = {code: name for name, code in _DTYPE_CODES.items()}
_DTYPE_NAMES[types_pb2.DTYPE_UNSPECIFIED] = "float32"
_PARTS: dict[str, type[Any]] = {
    "constant": Constant,
    "uniform": Uniform,
    "normal": Normal,
    "probability": Probability,
    "min_count": MinCount,
}
"""Initializers and admission rules by field of the message; their own fields have the same names in both."""
_PART_NAMES = {kind: name for name, kind in _PARTS.items()}


def dtype_from_pb(code: int) -> DTypeName:
    """Decode a dtype. Raises InvalidArgument."""
    if code not in _DTYPE_NAMES:
        raise InvalidArgument(f"dtype code {code} is unknown; known: {sorted(_DTYPE_NAMES)}")
    return _DTYPE_NAMES[code]


def spec_to_pb(spec: TableSpec) -> types_pb2.TableSpec:
    """Encode a table spec."""
    parts: dict[str, Any] = {
        _PART_NAMES[type(part)]: asdict(part) for part in (spec.initializer, spec.admission) if part is not None
    }
    return types_pb2.TableSpec(
        name=spec.name,
        dim=spec.dim,
        num_rows=spec.num_rows,
        seed=spec.seed,
        dtype=_DTYPE_CODES[spec.dtype],
        slot_dtype=_DTYPE_CODES[spec.slot_dtype],
        optimizer=types_pb2.Optimizer(name=spec.optimizer.name, scalars=spec.optimizer.scalars()),
        incarnation=spec.incarnation,
        altered=spec.altered,
        max_bytes=spec.max_bytes,
        expiry=None if spec.expiry is None else expiry_to_pb(spec.expiry),
        **parts,
    )


def spec_from_pb(pb: types_pb2.TableSpec) -> TableSpec:
    """Decode a table spec. Raises InvalidArgument if it is not a legal one."""
    if not pb.HasField("optimizer"):
        raise InvalidArgument(f"the spec of table {pb.name!r} names no optimizer ({', '.join(OPTIMIZERS)})")
    return TableSpec(
        name=pb.name,
        dim=pb.dim,
        optimizer=optimizer_of(pb.optimizer.name, pb.optimizer.scalars),
        num_rows=pb.num_rows if pb.HasField("num_rows") else None,
        initializer=_part(pb, "initializer") or Normal(),
        seed=pb.seed,
        dtype=dtype_from_pb(pb.dtype),
        slot_dtype=dtype_from_pb(pb.slot_dtype),
        incarnation=pb.incarnation,
        altered=pb.altered,
        admission=_part(pb, "admission"),
        max_bytes=pb.max_bytes if pb.HasField("max_bytes") else None,
        expiry=expiry_from_pb(pb.expiry) if pb.HasField("expiry") else None,
    )


def expiry_to_pb(expiry: Expiry) -> types_pb2.Expiry:
    """Encode an expiry rule."""
    return types_pb2.Expiry(**expiry.to_json())


def expiry_from_pb(pb: types_pb2.Expiry) -> Expiry:
    """Decode an expiry rule. Raises InvalidArgument if it is not a legal one."""
    return expiry_from_json({field.name: value for field, value in pb.ListFields()})


def _part(pb: types_pb2.TableSpec, which: Literal["initializer", "admission"]) -> Any:
    """Return the spec's initializer or admission rule; None: it has none."""
    name = pb.WhichOneof(which)
    if name is None:
        return None
    message = getattr(pb, name)
    return _PARTS[name](**{field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields})
