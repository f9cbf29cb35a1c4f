"""Messages ⇄ protobuf: the headers. Raw bytes are the matter of grpc_framing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from geartrain.ams.pb.v1 import scheduler_pb2, shard_pb2, types_pb2
from geartrain.ams.rpc.carrier import Cursor
from geartrain.ams.values.errors import InvalidArgument, InvalidRows
from geartrain.ams.values.messages import CallContext, ShardState, SyncGroup, TableState
from geartrain.ams.values.specs import (
    DTYPES,
    SGD,
    Adam,
    Constant,
    DTypeName,
    Initializer,
    Momentum,
    Normal,
    RowOptimizerSpec,
    SparseMomentum,
    TableSpec,
    Uniform,
    Untouched,
)

_DTYPE_CODES: dict[DTypeName, types_pb2.DType.ValueType] = {
    "float32": types_pb2.DTYPE_FLOAT32,
    "float16": types_pb2.DTYPE_FLOAT16,
    "bfloat16": types_pb2.DTYPE_BFLOAT16,
}
_DTYPE_NAMES: dict[int, DTypeName] = {code: name for name, code in _DTYPE_CODES.items()}
_DTYPE_NAMES[types_pb2.DTYPE_UNSPECIFIED] = "float32"

_UNTOUCHED_CODES: dict[Untouched, types_pb2.Untouched.ValueType] = {
    "freeze": types_pb2.UNTOUCHED_FREEZE,
    "elapsed": types_pb2.UNTOUCHED_ELAPSED,
}
_UNTOUCHED_NAMES: dict[int, Untouched] = {code: name for name, code in _UNTOUCHED_CODES.items()}
_UNTOUCHED_NAMES[types_pb2.UNTOUCHED_UNSPECIFIED] = "freeze"


def context_to_pb(context: CallContext) -> types_pb2.CallContext:
    """Encode a call context."""
    return types_pb2.CallContext(
        stream=context.stream,
        incarnation=context.incarnation,
        sequence=context.sequence,
        oldest_unacknowledged=context.oldest_unacknowledged,
        shard_incarnation=context.shard_incarnation,
        cluster_version=context.cluster_version,
        table_incarnation=context.table_incarnation,
    )


def context_from_pb(pb: types_pb2.CallContext) -> CallContext:
    """Decode a call context."""
    return CallContext(
        stream=pb.stream,
        incarnation=pb.incarnation,
        sequence=pb.sequence,
        oldest_unacknowledged=pb.oldest_unacknowledged,
        shard_incarnation=pb.shard_incarnation,
        cluster_version=pb.cluster_version,
        table_incarnation=pb.table_incarnation,
    )


def group_to_pb(group: SyncGroup | None) -> types_pb2.SyncGroup | None:
    """Encode a rank's place in its sync group."""
    if group is None:
        return None
    return types_pb2.SyncGroup(
        job=group.job,
        world_size=group.world_size,
        rank=group.rank,
        sequence=group.sequence,
        sample_count=group.sample_count,
    )


def group_from_pb(pb: types_pb2.SyncGroup) -> SyncGroup:
    """Decode a rank's place in its sync group."""
    return SyncGroup(
        job=pb.job, world_size=pb.world_size, rank=pb.rank, sequence=pb.sequence, sample_count=pb.sample_count
    )


def dtype_to_pb(dtype: np.dtype[Any]) -> types_pb2.DType.ValueType:
    """Encode the dtype of gradients. Raises InvalidRows for one that no table takes."""
    for name, known in DTYPES.items():
        if dtype == known:
            return _DTYPE_CODES[name]  # type: ignore[index]
    raise InvalidRows(f"gradients have dtype {dtype}; use one of {', '.join(DTYPES)}")


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
        incarnation=spec.incarnation,
    )
    match spec.optimizer:
        case SGD() as sgd:
            pb.sgd.CopyFrom(types_pb2.Sgd(lr=sgd.lr, weight_decay=sgd.weight_decay))
        case Momentum() as momentum:
            pb.momentum.CopyFrom(
                types_pb2.Momentum(
                    lr=momentum.lr,
                    weight_decay=momentum.weight_decay,
                    momentum=momentum.momentum,
                    nesterov=momentum.nesterov,
                )
            )
        case SparseMomentum() as sparse:
            pb.sparse_momentum.CopyFrom(
                types_pb2.SparseMomentum(
                    lr=sparse.lr,
                    weight_decay=sparse.weight_decay,
                    momentum=sparse.momentum,
                    untouched=_UNTOUCHED_CODES[sparse.untouched],
                )
            )
        case Adam() as adam:
            pb.adam.CopyFrom(
                types_pb2.Adam(
                    lr=adam.lr,
                    weight_decay=adam.weight_decay,
                    beta1=adam.betas[0],
                    beta2=adam.betas[1],
                    epsilon=adam.eps,
                )
            )
    match spec.initializer:
        case Constant() as constant:
            pb.constant.CopyFrom(types_pb2.Constant(value=constant.value))
        case Uniform() as uniform:
            pb.uniform.CopyFrom(types_pb2.Uniform(low=uniform.low, high=uniform.high))
        case Normal() as normal:
            pb.normal.CopyFrom(types_pb2.Normal(mean=normal.mean, std=normal.std))
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
    )


def _untouched_from_pb(code: int) -> Untouched:
    if code not in _UNTOUCHED_NAMES:
        raise InvalidArgument(f"untouched has code {code}; known are {sorted(_UNTOUCHED_NAMES)}")
    return _UNTOUCHED_NAMES[code]


def _optimizer_from_pb(pb: types_pb2.TableSpec) -> RowOptimizerSpec:
    match pb.WhichOneof("optimizer"):
        case "sgd":
            return SGD(lr=pb.sgd.lr, weight_decay=pb.sgd.weight_decay)
        case "momentum":
            m = pb.momentum
            return Momentum(lr=m.lr, weight_decay=m.weight_decay, momentum=m.momentum, nesterov=m.nesterov)
        case "sparse_momentum":
            s = pb.sparse_momentum
            untouched = _untouched_from_pb(s.untouched)
            return SparseMomentum(lr=s.lr, weight_decay=s.weight_decay, momentum=s.momentum, untouched=untouched)
        case "adam":
            a = pb.adam
            return Adam(lr=a.lr, betas=(a.beta1, a.beta2), eps=a.epsilon, weight_decay=a.weight_decay)
        case _:
            raise InvalidArgument(
                f"the spec of table {pb.name!r} names no optimizer (sgd, momentum, sparse_momentum, adam)"
            )


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


def cursors_to_pb(cursors: Mapping[int, Cursor]) -> list[scheduler_pb2.StreamCursor]:
    """Encode the cursors of data streams. Raises InvalidArgument if one is no number from 0 on."""
    try:
        return [
            scheduler_pb2.StreamCursor(stream=stream, epoch=epoch, position=position)
            for stream, (epoch, position) in cursors.items()
        ]
    except (ValueError, TypeError) as exc:
        raise InvalidArgument(f"cursors map a stream to (epoch, position), numbers from 0 on: {exc}") from exc


def cursors_from_pb(cursors: Iterable[scheduler_pb2.StreamCursor]) -> dict[int, Cursor]:
    """Decode the cursors of data streams."""
    return {cursor.stream: Cursor(cursor.epoch, cursor.position) for cursor in cursors}


def state_to_pb(state: ShardState) -> shard_pb2.DescribeReply:
    """Encode the state of a shard."""
    return shard_pb2.DescribeReply(
        shard=state.shard,
        incarnation=state.incarnation,
        cluster_version=state.cluster_version,
        uptime_seconds=state.uptime_seconds,
        unix_seconds=state.unix_seconds,
        tables=[
            shard_pb2.TableState(
                spec=spec_to_pb(table.spec), rows=table.rows, memory_bytes=table.memory_bytes, pushes=table.pushes
            )
            for table in state.tables
        ],
    )


def state_from_pb(pb: shard_pb2.DescribeReply) -> ShardState:
    """Decode the state of a shard."""
    return ShardState(
        shard=pb.shard,
        incarnation=pb.incarnation,
        cluster_version=pb.cluster_version,
        uptime_seconds=pb.uptime_seconds,
        unix_seconds=pb.unix_seconds,
        tables=tuple(
            TableState(
                spec=spec_from_pb(table.spec), rows=table.rows, memory_bytes=table.memory_bytes, pushes=table.pushes
            )
            for table in pb.tables
        ),
    )
