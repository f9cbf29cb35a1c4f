"""Rows of samples in a topic's messages: a JSON object each, or several as an Arrow IPC stream."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.json

from geartrain.ams.values.errors import InvalidArgument, SourceDamaged, SourceError
from geartrain.ams.values.text import quoted
from geartrain.workers.samples.columns import ANY_64_BITS, ColumnPlan, Fill, NameRow, planned_columns, type_named

MAX_ROWS = 2**20
"""Most rows of one message."""


def position_of(offset: int, row: int = 0) -> int:
    """Return the stream position of a message's row: 1 + offset · 2^20 + row. 0 means: nothing was read yet."""
    return 1 + offset * MAX_ROWS + row


def place_of(position: int) -> tuple[int, int]:
    """Return the offset and the row of a position above 0."""
    return divmod(position - 1, MAX_ROWS)


class MessageRows(NamedTuple):
    """Rows of one message."""

    partition: int
    offset: int
    first: int
    """Number of the first row in the message."""
    size: int
    """Number of rows."""
    total: int
    """Number of all rows of the message."""
    content: Any

    @property
    def position_after(self) -> int:
        """Next position of the partition."""
        end = self.first + self.size
        return position_of(self.offset + 1) if end == self.total else position_of(self.offset, end)

    def split(self, count: int) -> tuple[MessageRows, MessageRows]:
        """Return the first ``count`` rows, and the others."""
        others = self._replace(first=self.first + count, size=self.size - count)
        return self._replace(size=count), others


class MessageFormat(Protocol):
    """Parser of messages to tables."""

    def rows(self, content: bytes) -> tuple[int, Any]:
        """Return the number of a message's rows, and its content as input of :meth:`table`. Raises ArrowException."""

    def table(self, rows: Sequence[MessageRows]) -> Any:
        """Return the rows as a table, before its columns are checked. Raises ArrowException."""


def plan_of(
    schema: Mapping[str, str],
    hash_strings: bool | Sequence[str] | Mapping[str, int],
    fill: Fill,
    who: str,
    fold: Collection[str] = (),
) -> ColumnPlan:
    """Return the plan of the messages' columns. Raises InvalidArgument."""
    if not isinstance(schema, Mapping) or not schema:
        raise InvalidArgument(f"schema is {quoted(schema)}; it must map columns to types, as {{'user': 'int64'}}")
    arrow = pa.schema([(name, type_named(name, kind).arrow) for name, kind in schema.items()])
    return planned_columns(schema, arrow, who, hash_strings, fill, fold)


class JsonMessages:
    """Messages of a JSON object each, with a key for each column; other keys are ignored."""

    def __init__(self, plan: ColumnPlan) -> None:
        # Lists get a fixed length only after the check: the parser has no such type.
        fields = []
        for name, kind in plan.types.items():
            item = ANY_64_BITS if name in plan.folds else kind.arrow.value_type if kind.is_list else kind.arrow
            fields.append((name, pa.list_(pa.field("item", item)) if kind.is_list else item))
        self._options = pyarrow.json.ParseOptions(
            explicit_schema=pa.schema(fields), unexpected_field_behavior="ignore", newlines_in_values=True
        )

    def rows(self, content: bytes) -> tuple[int, Any]:
        return 1, content

    def table(self, rows: Sequence[MessageRows]) -> Any:
        content = b"\n".join(part.content for part in rows)
        table = pyarrow.json.read_json(
            io.BytesIO(content),
            read_options=pyarrow.json.ReadOptions(use_threads=False, block_size=len(content) + 1),
            parse_options=self._options,
        )
        if table.num_rows != len(rows):
            raise pa.ArrowInvalid(f"{len(rows)} messages hold {table.num_rows} objects; each must be one")
        return table


class ArrowMessages:
    """Messages of an Arrow IPC stream each, of any number of rows."""

    def __init__(self, plan: ColumnPlan) -> None:
        self._plan = plan

    def rows(self, content: bytes) -> tuple[int, Any]:
        table = pa.ipc.open_stream(content).read_all()
        if table.num_rows > MAX_ROWS:
            raise pa.ArrowInvalid(f"it has {table.num_rows} rows; {MAX_ROWS} are the most")
        return table.num_rows, table

    def table(self, rows: Sequence[MessageRows]) -> Any:
        """Join the rows' tables. Raises also ColumnMismatch."""
        for part in rows:
            self._plan.require_in(part.content.schema, f"the message at offset {part.offset}", "schema")
        parts = [self._plan.aligned(part.content.slice(part.first, part.size)) for part in rows]
        if any(part.schema != parts[0].schema for part in parts):  # dictionaries do not join texts
            parts = [_decoded(part) for part in parts]
        return pa.concat_tables(parts, promote_options="permissive")


def _decoded(table: Any) -> Any:
    types = [kind.value_type if pa.types.is_dictionary(kind) else kind for kind in table.schema.types]
    return table.cast(pa.schema(list(zip(table.column_names, types, strict=True))))


FORMATS: dict[str, Callable[[ColumnPlan], MessageFormat]] = {"json": JsonMessages, "arrow": ArrowMessages}


class MessageTables:
    """Tables of samples from messages, with errors that name the bad message."""

    def __init__(self, topic: str, plan: ColumnPlan, form: MessageFormat) -> None:
        self._topic, self._plan, self._format = topic, plan, form
        self.finish: Callable[[Any, NameRow], Any] = lambda table, _: table
        """Processes every table at the end, and can name its rows. Raises SourceError."""
        self.time: str | None = None
        """Column of the times by which late labels are joined, which must be finite."""

    def rows(self, partition: int, offset: int, content: bytes | None) -> MessageRows:
        """Return all rows of a message. Raises SourceDamaged."""
        try:
            if content is None:
                raise pa.ArrowInvalid("it has no value")
            count, parsed = self._format.rows(content)
        except (pa.ArrowException, OSError) as exc:
            raise self._damaged(partition, offset, exc) from exc
        return MessageRows(partition, offset, 0, count, count, parsed)

    def table(self, rows: Sequence[MessageRows]) -> Any:
        """Return the samples. Raises SourceError that names the message."""
        try:
            return self._table(rows)
        except SourceError:
            self._require_each(rows)
            raise
        except pa.ArrowException as exc:
            self._require_each(rows)
            raise self._damaged(rows[0].partition, rows[0].offset, exc) from exc

    def sound(self, rows: Sequence[MessageRows]) -> tuple[list[MessageRows], list[SourceError]]:
        """Return the readable rows, and the errors of the others."""
        good: list[MessageRows] = []
        bad: list[SourceError] = []
        for part in rows:
            try:
                self._require_each([part])
                good.append(part)
            except SourceError as error:
                bad.append(error)
        return good, bad

    def _require_each(self, rows: Sequence[MessageRows]) -> None:
        for part in rows:
            try:
                self._table([part])
            except pa.ArrowException as exc:
                raise self._damaged(part.partition, part.offset, exc) from exc

    def _table(self, rows: Sequence[MessageRows]) -> Any:
        def name_row(row: int) -> str:
            for part in rows:
                if row < part.size:
                    place = f", row {part.first + row}" if part.total > 1 else ""
                    return f"{self._name(part.partition, part.offset)}{place}"
                row -= part.size
            return f"topic {self._topic!r}"

        table = self._plan.apply(self._format.table(rows), name_row)
        if self.time in table.column_names:
            times = table.column(self.time).to_numpy().astype(np.float64)
            if len(bad := np.flatnonzero(~np.isfinite(times))):
                row = f"{name_row(int(bad[0]))}: {self.time!r} is {times[bad[0]]}"
                raise SourceDamaged(f"{row}; labels that come late need finite times")
        return self.finish(table, name_row)

    def _name(self, partition: int, offset: int) -> str:
        return f"topic {self._topic!r}, partition {partition}, offset {offset}"

    def _damaged(self, partition: int, offset: int, exc: BaseException) -> SourceDamaged:
        return SourceDamaged(f"{self._name(partition, offset)}: the message cannot be read: {exc}")
