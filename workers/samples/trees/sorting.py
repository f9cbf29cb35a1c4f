"""External sort of samples by some columns, which makes those that belong together neighbours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.strings import hash_strings
from geartrain.workers.samples.columns import type_of
from geartrain.workers.samples.trees.writing import ReadAll

_MIXER = np.uint64(0x9E3779B97F4A7C15)


def sorted_tables(tables: ReadAll, keys: Sequence[str], num_bytes: int, folder: Path, memory_bytes: int) -> ReadAll:
    """Sort the samples of ``tables`` by ``keys``, stably.

    If the ``num_bytes`` in all exceed ``memory_bytes``, they are first put into buckets, files in ``folder``, by the
    first key; then the buckets are sorted, one at a time, and follow one another.
    """
    num_buckets = -(-num_bytes // memory_bytes)
    if num_buckets <= 1:
        whole = list(tables())
        ordered = _by(pa.concat_tables(whole), keys) if whole else None
        return lambda: iter([] if ordered is None else [ordered])
    paths = [folder / f"bucket-{number}.arrow" for number in range(num_buckets)]
    with ExitStack() as stack:
        writers: list[Any] = []
        for table in tables():
            if not writers:
                writers = [stack.enter_context(pa.ipc.new_file(path, table.schema)) for path in paths]
            bucket = _bucket(table.column(keys[0]), num_buckets)
            for number, writer in enumerate(writers):
                writer.write_table(table.filter(pa.array(bucket == number)))

    def buckets() -> Iterator[Any]:
        for path in paths:
            with pa.memory_map(str(path)) as opened:
                yield _by(pa.ipc.open_file(opened).read_all(), keys)

    return buckets


def _by(table: Any, keys: Sequence[str]) -> Any:
    order = pa.compute.sort_indices(table, sort_keys=[(key, "ascending") for key in keys])
    return table.combine_chunks().take(order)


def _bucket(column: Any, num_buckets: int) -> Any:
    if type_of(column.type).item == "string":  # type: ignore[union-attr]
        codes = hash_strings(column).view(np.uint64)
    else:
        values = column.to_numpy()
        codes = (values.view(np.int64) if values.dtype == np.float64 else values.astype(np.int64)).view(np.uint64)
    return ((codes * _MIXER) >> np.uint64(33)) % np.uint64(num_buckets)


def sort_keys(schema: Any, levels: Sequence[Sequence[str]]) -> list[str]:
    """Return the columns to sort by: those of all levels but the last that are no lists."""
    keys = [name for own in levels[:-1] for name in own if not type_of(schema.field(name).type).is_list]  # type: ignore[union-attr]
    if not keys:
        raise InvalidArgument(
            f"none of the columns {', '.join(repr(name) for own in levels[:-1] for name in own)} can be sorted by, for "
            "they are lists; name one of single values first"
        )
    return keys
