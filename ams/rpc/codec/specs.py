"""Table specs and dtypes ⇄ protobuf. Other values are encoded in ``messages.py``, raw bytes in ``framing.py``."""

from __future__ import annotations

from geartrain.ams.pb.v1 import types_pb2
from geartrain.ams.values.admission.rules import Admission, MinCount, Probability
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.expiry.rules import Expiry, expiry_from_json
from geartrain.ams.values.optimizers.registry import OPTIMIZERS, RowOptimizerSpec, optimizer_of
from geartrain.ams.values.specs import Constant, DTypeName, Initializer, Normal, TableSpec, Uniform

_DTYPE_CODES: dict[DTypeName, types_pb2.DType.ValueType] = {
    "float32": types_pb2.DTYPE_FLOAT32,
    "float16": types_pb2.DTYPE_FLOAT16,
    "bfloat16": types_pb2.DTYPE_BFLOAT16,
}
_DTYPE_NAMES: dict[int, DTypeName] = {code: name for name, code in _DTYPE_CODES.items()}
_DTYPE_NAMES[types_pb2.DTYPE_UNSPECIFIED] = "float32"


def dtype_from_pb(code: int) -> DTypeName:
    """Decode a dtype. Raises InvalidArgument."""
    if code not in _DTYPE_NAMES:
        raise InvalidArgument(f"dtype code {code} is unknown; known: {sorted(_DTYPE_NAMES)}")
    return _DTYPE_NAMES[code]


def spec_to_pb(spec: TableSpec) -> types_pb2.TableSpec:
    """Encode a table spec."""
    pb = types_pb2.TableSpec(
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
    )
    match spec.initializer:
        case Constant() as constant:
            pb.constant.CopyFrom(types_pb2.Constant(value=constant.value))
        case Uniform() as uniform:
            pb.uniform.CopyFrom(types_pb2.Uniform(low=uniform.low, high=uniform.high))
        case Normal() as normal:
            pb.normal.CopyFrom(types_pb2.Normal(mean=normal.mean, std=normal.std))
    match spec.admission:
        case Probability() as probability:
            pb.probability.CopyFrom(types_pb2.Probability(p=probability.p))
        case MinCount() as count:
            pb.min_count.CopyFrom(
                types_pb2.MinCount(n=count.n, max_bytes=count.max_bytes, false_positive_rate=count.false_positive_rate)
            )
    return pb


def spec_from_pb(pb: types_pb2.TableSpec) -> TableSpec:
    """Decode a table spec. Raises InvalidArgument if it is not a legal one."""
    return TableSpec(
        name=pb.name,
        dim=pb.dim,
        optimizer=_optimizer_from_pb(pb),
        num_rows=pb.num_rows if pb.HasField("num_rows") else None,
        initializer=_initializer_from_pb(pb),
        seed=pb.seed,
        dtype=dtype_from_pb(pb.dtype),
        slot_dtype=dtype_from_pb(pb.slot_dtype),
        incarnation=pb.incarnation,
        altered=pb.altered,
        admission=_admission_from_pb(pb),
        max_bytes=pb.max_bytes if pb.HasField("max_bytes") else None,
        expiry=expiry_from_pb(pb.expiry) if pb.HasField("expiry") else None,
    )


def expiry_to_pb(expiry: Expiry) -> types_pb2.Expiry:
    """Encode a rule by which rows go."""
    said = expiry.to_json()
    return types_pb2.Expiry(
        kind=said["kind"],
        every=said["every"],
        steps=said.get("steps"),
        seconds=said.get("seconds"),
        l2=said.get("l2"),
        rule=said.get("rule"),
    )


def expiry_from_pb(pb: types_pb2.Expiry) -> Expiry:
    """Decode a rule by which rows go. Raises InvalidArgument if it is not a legal one."""
    return expiry_from_json({field.name: value for field, value in pb.ListFields()})


def _admission_from_pb(pb: types_pb2.TableSpec) -> Admission | None:
    match pb.WhichOneof("admission"):
        case "probability":
            return Probability(pb.probability.p)
        case "min_count":
            return MinCount(pb.min_count.n, pb.min_count.max_bytes, pb.min_count.false_positive_rate)
        case _:
            return None


def _optimizer_from_pb(pb: types_pb2.TableSpec) -> RowOptimizerSpec:
    if not pb.HasField("optimizer"):
        raise InvalidArgument(f"the spec of table {pb.name!r} names no optimizer ({', '.join(OPTIMIZERS)})")
    return optimizer_of(pb.optimizer.name, pb.optimizer.scalars)


def _initializer_from_pb(pb: types_pb2.TableSpec) -> Initializer:
    match pb.WhichOneof("initializer"):
        case "constant":
            return Constant(pb.constant.value)
        case "uniform":
            return Uniform(pb.uniform.low, pb.uniform.high)
        case "normal":
            return Normal(pb.normal.mean, pb.normal.std)
        case _:
            return Normal()
