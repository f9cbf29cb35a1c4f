"""The client: tables as a program sees them.

Cost: one request per shard and operation, all shards at once, in one call of compiled code
(:mod:`~geartrain.ams.client.rows.row_calls`). N ids of a table of dim D travel as 8·N bytes, their rows as itemsize·N·D
bytes; ids that occur twice travel once. To and from a shard on this machine nothing of that travels: it lies in memory
that both share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, Self, Unpack, cast

import numpy as np
import numpy.typing as npt

from geartrain.ams.client.hosted_calls import HostedCalls
from geartrain.ams.client.rows.expire import ExpiredRows, expire_rows
from geartrain.ams.client.rows.push_options import (
    CHECK_FINITE,
    CHECK_PRODUCT,
    BatchSettings,
    PushOptions,
    table_facts,
)
from geartrain.ams.client.rows.row_calls import RowCalls
from geartrain.ams.client.rows.row_futures import PreparedCall
from geartrain.ams.client.rows.write_log import WriteLog
from geartrain.ams.client.shard_calls import ShardCalls
from geartrain.ams.client.table_writes import TableWrites, send_once
from geartrain.ams.client.writes import ClientStream, RowWrite
from geartrain.ams.kernels._core import ScatteredRows, TableFacts
from geartrain.ams.values.arrays import ids_array, like
from geartrain.ams.values.errors import InvalidArgument, TableNotFound
from geartrain.ams.values.expiry.rules import Expiry
from geartrain.ams.values.optimizers.registry import RowOptimizerSpec
from geartrain.ams.values.placement import NUM_BUCKETS
from geartrain.ams.values.shard_messages import (
    CallContext,
    Describe,
    Done,
    Reply,
    Request,
    ShardState,
    SyncGroup,
    TableState,
)
from geartrain.ams.values.specs import DTypeName, Ids, TableSpec, checked_wire_dtype
from geartrain.ams.values.text import counted


class Table:
    """A table of the cluster: pull, push, assign, remove. Thread-safe.

    ids are integers [N] in [0, num_rows) (any >= 0 in a hashed table), rows and gradients [N, dim]. numpy arrays and
    torch tensors are taken, and answered in kind. Once the table was dropped, every method raises TableNotFound, also
    where another was made under its name, unless this process has restored that one.
    """

    def __init__(
        self,
        spec: TableSpec,
        calls: ShardCalls,
        stream: ClientStream,
        wire_dtype: DTypeName | None = None,
        optimizer: RowOptimizerSpec | None = None,
    ) -> None:
        self.spec = spec
        """What it is. Its settings become others once this process has heard that they were altered."""
        self.optimizer = spec.optimizer if optimizer is None else spec.optimizer.with_numbers(optimizer)
        """That which it was opened with: modules on it begin with its numbers, whichever the table's are."""
        self._calls = calls
        self._stream = stream
        self.wire_dtype = checked_wire_dtype(wire_dtype, spec.name, spec.dtype)
        """How pulled rows and pushed gradients travel; None: in the table's type."""
        self._dtype = spec.numpy_dtype
        self.take_settings(spec)
        calls.opened(self)

    def take_settings(self, spec: TableSpec) -> None:
        """Go on with the settings of ``spec``, which is the same table: they were altered."""
        self.spec = spec
        self._facts = table_facts(spec, self.wire_dtype)
        self._writes = TableWrites(spec, self._facts, self._calls, self._stream)

    def __repr__(self) -> str:
        rows = "hashed" if self.spec.num_rows is None else counted(self.spec.num_rows, "row")
        wire = "" if self.wire_dtype is None else f", wire_dtype={self.wire_dtype!r}"
        spec = self.spec
        return f"Table({spec.name!r}, {rows}, dim={spec.dim}, {spec.dtype}, {spec.optimizer}{wire})"

    @property
    def write_log(self) -> WriteLog:
        """Which rows this client writes, of all its tables."""
        return self._calls.rows.write_log

    def with_wire(self, wire_dtype: DTypeName | None) -> Self:
        """The same table, whose rows travel as ``"bfloat16"``, ``"float16"`` or, with None, as they are. Raises
        InvalidArgument.
        """
        return type(self)(self.spec, self._calls, self._stream, wire_dtype, self.optimizer)

    @property
    def incarnation(self) -> int:
        """Which table of its name it is; that of the restored one after this process has restored it. 0: not known."""
        return self._calls.incarnation_of(self.spec)

    def pull(self, ids: Any) -> Any:
        """Read rows: [N] -> [N, dim] of the table's dtype. A row never written has its initial value; none is created.

        With a ``wire_dtype`` they are rounded to that. Raises InvalidIds, NonFinite (a row is beyond its range; the id
        is named), ShardUnavailable, ShardRestarted.
        """
        checked = ids_array(ids, self.spec.num_rows)
        out = np.empty((len(checked), self.spec.dim), self._dtype)
        self._calls.rows.pull(self._facts, self.incarnation, checked, out)
        return like(out, ids)

    def pull_async(self, ids: Any) -> Future[Any]:
        """:meth:`pull` in the background: sent at once where the request is small and shards are other processes."""
        if not self._is_sent_at_once(ids):
            return self._calls.background(self.pull, ids)

        def prepared() -> PreparedCall:
            checked = ids_array(ids, self.spec.num_rows)
            out = np.empty((len(checked), self.spec.dim), self._dtype)
            return self._calls.rows.pull_to_begin(self._facts, self.incarnation, checked, out, partial(like, out, ids))

        return self._calls.rows.begin(prepared)

    def present(self, ids: Any) -> npt.NDArray[np.bool_]:
        """Say which rows exist, [N] bool: were pushed or assigned."""
        checked = ids_array(ids, self.spec.num_rows)
        out = np.empty((len(checked), self.spec.dim), self._dtype)
        present = np.zeros(len(checked), np.bool_)
        self._calls.rows.pull(table_facts(self.spec, None), self.incarnation, checked, out, present=present)
        return present

    def version(self) -> int:
        """Return the table version: the writes applied to it on the shard that has had the fewest, assigns included.

        Of a table all of whose rows are in every write (dense ids, no shard without rows counts) that is the number of
        writes that are in every row pulled from now on. It goes on after a restore. Cost and errors are those of
        :meth:`versions`.
        """
        return min(self.versions())

    def versions(self) -> tuple[int, ...]:
        """Return the writes applied to the table by each shard, of dense ids by each that has rows, in their order.

        No row has changed while these have not, though their lowest, the table version, may stay where one moves: a
        write that was given up half way is on some shards only. Costs one small request per shard. Raises
        TableNotFound, ShardUnavailable, ShardRestarted.
        """
        shards: Sequence[int] = range(self._calls.view.num_shards)
        if self.spec.num_rows is not None:
            first_ids = np.arange(min(self.spec.num_rows, NUM_BUCKETS), dtype=np.int64)  # of every bucket that has any
            shards = [shard for shard, _ in self._calls.rows.routes(self._facts, first_ids)]
        return tuple(
            self._state_in(reply).writes for reply in self._calls.read([(shard, Describe()) for shard in shards])
        )

    def _state_in(self, reply: Reply) -> TableState:
        assert isinstance(reply, ShardState)
        for table in reply.tables:
            both = self.incarnation, table.spec.incarnation
            if table.spec.name == self.spec.name and (0 in both or both[0] == both[1]):
                return table
        raise TableNotFound(
            f"shard {reply.shard} has no table {self.spec.name!r} any more, or another: it was dropped; if there is "
            f"one again, open that: cluster.table({self.spec.name!r}), or make its head, dense module or slow gear anew"
        )

    def pull_into(
        self, ids: Ids, out: npt.NDArray[Any] | ScatteredRows, *, required_sync: SyncGroup | None = None
    ) -> None:
        """Read rows into ``out`` [N, dim] of the table's dtype, C-contiguous, without further copies.

        ``out`` may be rows of several arrays (float32). With ``required_sync``, raises StepMismatch unless exactly the
        group's writes before it are applied.
        """
        checked = self._checked_pull(ids, out)
        self._calls.rows.pull(self._facts, self.incarnation, checked, out, required_sync=required_sync)

    @property
    def state_width(self) -> int:
        """Numbers of a row's state, which :func:`pull_together` reads where ``out`` is so wide: the bytes of the row,
        its slots, and an int64: how often it was updated, -1 where it does not exist; then 0 up to a whole number. 0:
        it cannot be had, for rows move at steps that do not touch them, or travel as another type.
        """
        spec = self.spec
        if spec.counts_steps or self.wire_dtype is not None:
            return 0
        return -(-(spec.row_bytes + spec.slot_bytes + 8) // spec.numpy_dtype.itemsize)

    def shards_of(self, ids: Ids) -> list[tuple[int, Ids | None]]:
        """Each shard that owns some of the ids [N], and the places of those (None: all of them)."""
        return self._calls.rows.routes(self._facts, ids)

    @property
    def num_shards(self) -> int:
        """Of the cluster."""
        return self._calls.view.num_shards

    def _checked_pull(self, ids: Ids, out: npt.NDArray[Any] | ScatteredRows, *, may_be_states: bool = False) -> Ids:
        checked = ids_array(ids, self.spec.num_rows)
        if isinstance(out, ScatteredRows):
            return checked
        is_array = isinstance(out, np.ndarray)
        fits = is_array and out.shape == (len(checked), self.spec.dim)
        if is_array and not fits and may_be_states:
            fits = out.shape == (len(checked), self.state_width or -1)
        if not fits or out.dtype != self._dtype:
            found = f"{out.dtype} {out.shape}" if is_array else f"a {type(out).__name__}"
            raise InvalidArgument(
                f"out is {found}; it must be a numpy array of {self._dtype} ({len(checked)}, {self.spec.dim})"
            )
        if not out.flags.carray:
            raise InvalidArgument("out must be writable, aligned and C-contiguous; pass a fresh array")
        return checked

    def pull_into_async(
        self, ids: Ids, out: npt.NDArray[Any], *, required_sync: SyncGroup | None = None
    ) -> Future[None]:
        """:meth:`pull_into` in the background; ``out`` must be left alone until the future is done."""
        if not self._is_sent_at_once(ids):
            return self._calls.background(self.pull_into, ids, out, required_sync=required_sync)

        def prepared() -> PreparedCall:
            checked = self._checked_pull(ids, out)
            return self._calls.rows.pull_to_begin(
                self._facts, self.incarnation, checked, out, lambda: None, required_sync=required_sync
            )

        return self._calls.rows.begin(prepared)

    def push(self, ids: Any, gradients: Any, **options: Unpack[PushOptions]) -> Done:
        """Apply gradients with the table's optimizer, exactly once per shard; gradients of equal ids are summed.

        The options are ``lr``, ``scale``, ``optimizer_scalars``, ``group``, ``sequence``, and what the push says of
        its batch: ``occurrences``, ``step``, ``unix_seconds`` and ``pulled_at``. Each is described at
        :class:`~geartrain.ams.client.rows.push_options.PushOptions`. Raises InvalidArgument, InvalidIds, InvalidRows,
        NonFinite (nothing changed anywhere), StaleClient, SyncError, ShardUnavailable (whether that shard applied it is
        unknown; see :meth:`prepare_push`), DataPortClosed.
        """
        return send_once(self._writes.push(ids, gradients, options))

    def push_async(self, ids: Any, gradients: Any, **options: Unpack[PushOptions]) -> Future[Done]:
        """:meth:`push` in the background; the arrays must be left alone until the future is done.

        Waits while ``max_in_flight_writes`` of the client's are on their way.
        """
        if not self._is_sent_at_once(ids):
            return self._calls.background(self.push, ids, gradients, **options)
        return self._calls.rows.begin(lambda: self._writes.push(ids, gradients, options).to_begin())

    def prepare_push(
        self,
        ids: Any,
        gradients: Any,
        *,
        step_goes_on: bool = False,
        known_finite: bool = False,
        checked_on_send: bool = False,
        known_distinct: bool = False,
        **options: Unpack[PushOptions],
    ) -> RowWrite:
        """Check a push and number it, but send nothing: the write can be sent again after an error, applied once.

        The arrays must be left alone until the write is sent or abandoned.

        Args:
            ids: [N] of the rows.
            gradients: [N, dim]; those of equal ids are summed. Or rows of several arrays, of ids that rise.
            step_goes_on: More pushes of the same step follow, and rows that none of them has are to move once.
            known_finite: The caller has looked for NaN and infinity; else that is done here, a pass over the gradients.
            checked_on_send: Leave them to be found on the way if they reach no shard all the same: one that has all
                rows looks for itself, and then sending raises NonFinite.
            known_distinct: No id occurs twice; else they are merged here, a look at each.
            options: Those of :meth:`push`.

        Raises what :meth:`push` does before it sends.
        """
        check = CHECK_PRODUCT if known_finite else None if checked_on_send else CHECK_FINITE
        return self._writes.push(
            ids, gradients, options, check=check, step_goes_on=step_goes_on, known_distinct=known_distinct
        )

    def _is_sent_at_once(self, ids: Any) -> bool:
        # Rows that come are counted as those that go: one thread copies all replies to where they are wanted.
        return self._calls.rows.is_sent_at_once((8 + self.spec.row_bytes) * _count(ids))

    def assign(self, ids: Any, rows: Any, *, sequence: int | None = None) -> Done:
        """Overwrite rows [N, dim] of the table's dtype; their slots become zero. ids must be distinct. They travel
        as they are, whatever the ``wire_dtype``.

        ``sequence`` numbers the write as it does a :meth:`push`. Raises InvalidIds, InvalidRows, NonFinite,
        StaleClient, ShardUnavailable.
        """
        return send_once(self._writes.assign(ids, rows, sequence))

    def remove(self, ids: Any, *, sequence: int | None = None) -> int:
        """Take rows out, exactly once per shard; return how many went.

        From now on they are as rows that were never written: they read as their initial values, and a push begins from
        those, without slots. ids [N] may repeat; those that have no row are passed over. ``sequence`` numbers the write
        as it does a :meth:`push`; what takes more than ``part_bytes`` of ids is several writes, and cannot have one.
        Raises InvalidArgument, InvalidIds, StaleClient, ShardUnavailable (whether rows of that shard went is unknown).
        """
        return self._writes.remove(ids, sequence)

    def expire(
        self,
        rule: Expiry | None = None,
        *,
        dry_run: bool = False,
        progress: Callable[[ExpiredRows], None] | None = None,
    ) -> ExpiredRows:
        """Look at all rows now and remove those that a rule says, or the table's own ``expiry``; with ``dry_run`` count
        them.

        Shards look block by block, and answer others in between; ``progress`` is told of the rows so far after each.
        Raises InvalidArgument (there is no rule, or it asks for what the table does not keep), ShardUnavailable (some
        rows have gone; ask again).
        """
        context = replace(self._stream.caller or CallContext(), table_incarnation=self.incarnation)

        def ask(calls: list[tuple[int, Request]]) -> list[Reply]:
            outcomes = self._calls.deliver(calls, context)
            if error := next((outcome for outcome in outcomes if isinstance(outcome, BaseException)), None):
                raise error
            return cast("list[Reply]", outcomes)

        num_shards = self._calls.view.num_shards
        return expire_rows(ask, self.spec.name, num_shards, rule, dry_run=dry_run, progress=progress)

    def hosted(self, model: str) -> HostedCalls:
        """Return the way to a hosted model beside this table's rows; see :mod:`geartrain.ams.programs.hosted`."""
        return HostedCalls(self.spec, model, self._calls, partial(self._stream.numbers, self.spec.name, None))


def pull_together(pulls: Sequence[tuple[Table, Ids, npt.NDArray[Any]]]) -> list[list[int]]:
    """:meth:`Table.pull_into` of several tables: (table, distinct ids [N], out [N, dim] of its dtype) each.

    Tables of one cluster are read in one request to each shard. Where ``out`` is [N, ``table.state_width``] it gets the
    states. Returns of each the writes that every shard had applied
    to the table, what a push takes as ``pulled_at``; -1: it was not asked, or does not tell. Raises as pull_into does.
    """
    by_calls: dict[RowCalls, list[int]] = {}
    requests: list[tuple[TableFacts, int, Ids, npt.NDArray[Any]]] = []
    for number, (table, ids, out) in enumerate(pulls):
        requests.append((table._facts, table.incarnation, table._checked_pull(ids, out, may_be_states=True), out))
        by_calls.setdefault(table._calls.rows, []).append(number)
    writes: list[list[int]] = [[]] * len(pulls)
    for calls, numbers in by_calls.items():
        for number, of_table in zip(numbers, calls.pull_together([requests[n] for n in numbers]), strict=True):
            writes[number] = of_table
    return writes


def prepare_together(
    pushes: Iterable[tuple[Table, Ids, npt.NDArray[np.float32], BatchSettings]], **options: Unpack[PushOptions]
) -> Iterator[RowWrite]:
    """:meth:`Table.prepare_push` of tables with one optimizer: what their pushes have in common is looked at once.

    Each is of (table, distinct ids [N] in its range, finite gradients [N, dim], its batch). Raises as prepare_push.
    """
    settings: dict[str, Any] | None = None
    for table, ids, gradients, batch in pushes:
        if settings is None:
            settings = table._writes.settings_of(options)
            settings |= {"check": CHECK_PRODUCT, "step_goes_on": False, "are_distinct": True}
        yield table._writes.cut(ids, gradients, settings, batch)


def next_step(tables: Sequence[Table]) -> int:
    """Return the step after the largest that a push said to any of these tables of one cluster; 0: none said one.

    Costs one small request per shard. Raises as :meth:`Table.versions`.
    """
    calls = tables[0]._calls
    replies = calls.read([(shard, Describe()) for shard in range(calls.view.num_shards)])
    return max(table._state_in(reply).next_step for reply in replies for table in tables)


def _count(ids: Any) -> int:
    """How many ids there are; 0 if these are none, which is for others to say."""
    try:
        return len(ids)
    except TypeError:
        return 0
