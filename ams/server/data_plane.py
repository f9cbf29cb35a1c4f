"""Requests for rows that come over the data plane, handed to the shard."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt

from geartrain.ams.kernels import _core, ops
from geartrain.ams.observe import failpoints
from geartrain.ams.server.shard import Shard
from geartrain.ams.values.errors import InvalidRows
from geartrain.ams.values.shard_messages import Assign, CallContext, DataPlaneOffer, Done, Pull, Push, SyncGroup
from geartrain.ams.values.specs import DTYPES, Ids
from geartrain.ams.values.text import counted

Bits = npt.NDArray[Any]
"""[N, D]; half types as uint16."""
Settle = Callable[[Done | BaseException], None]
"""Takes the outcome of a write."""
Group = tuple[str, int, int, int, int]
_DTYPES = [np.dtype(dtype) for dtype in DTYPES.values()]


class DataPlanePort:
    """Where clients connect for pulls, pushes and assigns of one shard. Thread-safe.

    Listens from the first offer on.
    """

    def __init__(self, shard: Callable[[], Shard]) -> None:
        """``shard`` may raise a GeartrainError: then nothing is offered."""
        self._shard = shard
        self._lock = threading.Lock()
        self._server: _core.DataServer | None = None
        self._is_closed = False

    def offer(self) -> DataPlaneOffer:
        """What a client needs for one connection, or why there is none. Raises what ``shard`` raises."""
        try:
            with self._lock:
                if self._is_closed:
                    return DataPlaneOffer(reason="this shard is ending")
                if self._server is None:
                    self._server = _core.DataServer(_core.PythonHandler(RowHandler(self._shard())))
                socket, secret, _ = self._server.offer()
        except (OSError, RuntimeError) as exc:
            return DataPlaneOffer(reason=str(exc))
        return DataPlaneOffer(socket=socket, secret=secret)

    @property
    def num_connections(self) -> int:
        """Connections that there are."""
        return 0 if self._server is None else self._server.num_connections

    @property
    def num_mailboxes(self) -> int:
        """Pieces of memory that clients share with the shard."""
        return 0 if self._server is None else self._server.num_mailboxes

    def close(self) -> None:
        """Finish the call under way, end all connections, offer none. Idempotent."""
        with self._lock:
            self._is_closed = True
        if self._server is not None:
            self._server.close()


class RowHandler:
    """What the thread of a data plane calls, for one shard. Arrays are the caller's until the outcome is there."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    def pull(
        self,
        context: CallContext,
        table: str,
        ids: Ids,
        out: Bits,
        dtype_code: int,
        present: npt.NDArray[np.uint8] | None,
        required_sync: Group | None,
    ) -> None:
        """Write rows to ``out`` [N, D]. Raises the shard's GeartrainError."""
        self._require_meant(table, context, len(ids), out.shape[1], _DTYPES[dtype_code])
        pull = Pull(
            table=table,
            ids=ids,
            out=out.view(_DTYPES[dtype_code]),
            present=None if present is None else present.view(np.bool_),
            required_sync=_group(required_sync),
        )
        self._shard.run(context, pull).result()

    def push(
        self,
        context: CallContext,
        table: str,
        ids: Ids,
        gradients: Bits,
        dtype_code: int,
        lr: float | None,
        scale: float,
        scalars: Mapping[str, float],
        group: Group | None,
        step_goes_on: bool,
        settle: Settle,
    ) -> None:
        """Apply gradients; ``settle`` takes the outcome, unless this raises."""
        rows = gradients.view(_DTYPES[dtype_code])
        self._require_meant(table, context, len(ids), rows.shape[1], None)
        if group is not None:
            ids, rows = ids.copy(), rows.copy()  # others are waited for, the caller perhaps no longer
        ids, rows = ops.merged(ids, rows)
        push = Push(
            table=table,
            ids=ids,
            gradients=rows,
            lr=lr,
            scale=scale,
            optimizer_scalars=scalars,
            group=_group(group),
            step_goes_on=step_goes_on,
        )
        _settled(self._shard.run(context, push), settle, waits=group is not None)

    def assign(self, context: CallContext, table: str, ids: Ids, rows: Bits, dtype_code: int, settle: Settle) -> None:
        """Overwrite rows; as :meth:`push`."""
        self._require_meant(table, context, len(ids), rows.shape[1], _DTYPES[dtype_code])
        num_distinct = ops.num_distinct(ids)
        if num_distinct != len(ids):
            raise InvalidRows(f"{len(ids)} ids to assign hold {counted(len(ids) - num_distinct, 'duplicate')}")
        assign = Assign(table=table, ids=ids, rows=rows.view(_DTYPES[dtype_code]))
        _settled(self._shard.run(context, assign), settle, waits=False)

    def before_reply(self, has_writes: bool) -> None:
        """Raise ShardUnavailable unless what was done may be acknowledged."""
        if has_writes:
            failpoints.reach("shard.reply.before")
        self._shard.check_lease()

    def _require_meant(self, table: str, context: CallContext, num_rows: int, dim: int, dtype: Any) -> None:
        """Of a shard that came back empty the caller hears that, rather than that there is no such table."""
        self._shard.check_meant(table, context)
        spec = self._shard.spec(table)
        if dim != spec.dim or dtype not in (None, spec.numpy_dtype):
            theirs = "" if dtype is None else f"{dtype.name} "
            raise InvalidRows(
                f"{num_rows} rows are {theirs}of width {dim}; those of table {table!r} are {spec.numpy_dtype.name} of "
                f"width {spec.dim}"
            )


def _group(group: Group | None) -> SyncGroup | None:
    if group is None:
        return None
    job, world_size, rank, sequence, sample_count = group
    return SyncGroup(job=job, world_size=world_size, rank=rank, sequence=sequence, sample_count=sample_count)


def _settled(reply: Future[Any], settle: Settle, *, waits: bool) -> None:
    if waits:
        reply.add_done_callback(lambda done: settle(done.exception() or done.result()))
    else:
        settle(reply.result())
