"""``geartrain samples compress``: converts Parquet or CSV to sample trees."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from geartrain.ams.values.arguments import boolean, integer, path_name
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.text import quoted
from geartrain.workers.samples.files import require_arrow

if TYPE_CHECKING:
    from geartrain.workers.samples.trees.writing import TreeReport
    from geartrain.workers.samples.urls import Sources

_AT_ONCE = 131_072
CODECS = ("zstd", "snappy", "lz4", "gzip", "brotli", "none")


def compress_samples(
    where: Sources,
    out: str | Path,
    levels: Sequence[str] | Mapping[str, Sequence[str]],
    *,
    sort: bool = False,
    columns: Sequence[str] | Mapping[str, str] | None = None,
    fill: Mapping[str, float | str] | None = None,
    fold: Sequence[str] = (),
    delimiter: str = ",",
    list_delimiter: str = "|",
    rows_per_group: int = 65_536,
    compression: str = "zstd",
    memory_bytes: int = 1 << 30,
) -> TreeReport:
    """Make prefix trees of samples, for :class:`TreeSamples`: data that neighbours share is written once.

        gt.compress_samples("clicks/", "clicks-trees", ["user", "page", "item"], sort=True)

    Args:
        where: Parquet or CSV files: a file, a folder, a pattern, a URL, or a list of them.
        out: A new local folder, written atomically.
        levels: Outermost first. Each has columns; neighbours that are equal in those of a level, and of all before it,
            are one node of it. A name alone is that of its column. A column that is in no level goes to the outermost
            one in which it is constant within a node.
        sort: First sort samples by the columns of all levels but the last; else only samples that are neighbours
            already share nodes. The sort is stable.
        columns: Columns to use, and with a mapping their types: needed for lists in CSV.
        fill: Replacement of missing values, by column.
        fold: Columns of any 64-bit integers, to map to ids with ``gt.fold_ids``.
        delimiter: Text between the values of CSV.
        list_delimiter: Text between the values of a list in CSV.
        rows_per_group: Samples of a row group; a larger tree continues in the next one.
        compression: Compression of the files: "zstd", "snappy", "lz4", "gzip", "brotli" or "none".
        memory_bytes: Larger data are sorted in temporary files in the folder of ``out``.

    Returns a report. Raises as :class:`ParquetSamples`, and InvalidArgument for impossible levels.
    """
    require_arrow()
    from geartrain.workers.samples.opening import open_rows
    from geartrain.workers.samples.trees.sorting import sort_keys, sorted_tables
    from geartrain.workers.samples.trees.writing import levels_named, write_trees

    named = levels_named(levels)
    rows_per_group = integer("rows_per_group", rows_per_group, 1)
    memory_bytes = integer("memory_bytes", memory_bytes, 1)
    if compression not in CODECS:
        raise InvalidArgument(f"compression is {quoted(compression)}; it must be one of {', '.join(CODECS)}")
    folder = Path(path_name("out", out, "the path of a new folder"))
    source = open_rows(where, trees=False, delimiter=delimiter, list_delimiter=list_delimiter)
    source.plan(columns, None, fill or {}, fold)

    def tables() -> Iterator[Any]:
        for rows in map(source.read, range(len(source.part_rows))):
            yield from (rows.slice(first, _AT_ONCE).table for first in range(0, max(1, rows.num_rows), _AT_ONCE))

    if not boolean("sort", sort) or not source.part_rows:
        return write_trees(tables, folder, named, rows_per_group=rows_per_group, compression=compression)
    first = source.read(0).slice(0, _AT_ONCE).table
    num_bytes = first.nbytes * sum(source.part_rows) // max(1, first.num_rows)
    keys = sort_keys(first.schema, list(named.values()))
    folder.parent.mkdir(parents=True, exist_ok=True)
    buckets = Path(tempfile.mkdtemp(prefix=f".{folder.name}.sorting-", dir=folder.parent))
    try:
        ordered = sorted_tables(tables, keys, num_bytes, buckets, memory_bytes)
        return write_trees(ordered, folder, named, rows_per_group=rows_per_group, compression=compression)
    finally:
        shutil.rmtree(buckets, ignore_errors=True)
