"""Requests for rows as Python makes them, handed to a shard's engine, which works without the interpreter."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt

from geartrain.ams.kernels import ops
from geartrain.ams.kernels.engine import Engine, Waiter
from geartrain.ams.values.errors import InvalidRows
from geartrain.ams.values.shard_messages import Assign, CallContext, Done, Pull, Pulled, Push


def pull(
    engine: Engine, context: CallContext, request: Pull, waiter: Waiter | None = None, *, has_turn: bool = False
) -> Pulled:
    """Read rows; with ``has_turn`` in the turn that the caller has. Raises what the shard refuses it with.

    Nothing is read for a ``waiter`` who leaves before the turn has come (ShardUnavailable).
    """
    present = request.present
    if present is not None and (present.dtype != np.bool_ or not present.flags.carray):
        raise InvalidRows(f"present is {present.dtype} {list(present.shape)}; it must be a writable bool [M]")
    out, code = _bits(request.out, "out")
    if not request.out.flags.carray:
        raise InvalidRows("out must be writable, aligned and C-contiguous; pass a fresh array")
    writes = engine.pull(
        context.shard_incarnation,
        context.cluster_version,
        context.table_incarnation,
        request.table,
        ops.checked_ids(request.ids),
        out,
        code,
        None if request.positions is None else ops.checked_ids(request.positions, "positions"),
        None if present is None else present.view(np.uint8),
        request.required_sync,
        waiter,
        has_turn,
    )
    return Pulled(writes=writes)


def write(
    engine: Engine,
    context: CallContext,
    request: Push | Assign,
    waiter: Waiter | None = None,
    *,
    ids_are_distinct: bool,
    has_turn: bool = False,
) -> Done | Future[Done]:
    """Apply a write as :func:`pull` reads. A Future is that of one that waits for other ranks: its arrays are copied.

    Unless ``ids_are_distinct``, equal ids of a push are merged, and those of an assign are refused (InvalidRows).
    """
    ids = ops.checked_ids(request.ids)
    if isinstance(request, Assign):
        bits, code = _bits(request.rows, "rows")
        assigned: Done | Future[Done] = engine.assign(
            context, request.table, ids, bits, code, ids_are_distinct, waiter, has_turn
        )
        return assigned
    bits, code = _bits(request.gradients, "gradients")
    done: Done | Future[Done] = engine.push(
        context,
        request.table,
        ids,
        bits,
        code,
        request.lr,
        request.scale,
        request.optimizer_scalars,
        request.group,
        request.step_goes_on,
        request.batch,
        ids_are_distinct,
        waiter,
        has_turn,
    )
    return done


def _bits(rows: npt.NDArray[Any], label: str) -> tuple[npt.NDArray[Any], int]:
    bits, code = ops.as_bits(rows, label)
    if bits.ndim != 2:
        raise InvalidRows(f"{label} has shape {list(bits.shape)}; it must be [N, D]")
    return bits, code
