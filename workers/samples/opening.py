"""Opening of a source of samples by its files: Parquet, CSV, or sample trees."""

from __future__ import annotations

from collections.abc import Sequence

from geartrain.ams.values.errors import InvalidArgument
from geartrain.workers.samples.csv_lines import SUFFIXES as CSV
from geartrain.workers.samples.csv_lines import CsvRows
from geartrain.workers.samples.parquet import SUFFIXES as PARQUET
from geartrain.workers.samples.parquet import ParquetRows
from geartrain.workers.samples.urls import Sources, find_files


def open_rows(
    where: Sources,
    *,
    trees: bool | None = None,
    delimiter: str | None = None,
    list_delimiter: str = "|",
    names: Sequence[str] = (),
    header: bool = True,
) -> ParquetRows | CsvRows:
    """Return the rows of the files in ``where``; call its ``plan`` to set what is read.

    ``trees``: whether Parquet files are sample trees; None: as the first one says. ``delimiter``: of CSV; None: a tab
    in .tsv files, else a comma. ``names``: of the columns of CSV, replacing those in the first line, if there is one
    (``header``). If one of these is given, files with other suffixes than Parquet's are CSV.
    Raises SourceError, and InvalidArgument for files of both kinds.
    """
    files = [file.name for file in find_files(where, (*PARQUET, *CSV))]
    lines = [name for name in files if (not name.endswith(PARQUET) if delimiter or names else name.endswith(CSV))]
    if lines and len(lines) < len(files):
        other = next(name for name in files if name not in lines)
        raise InvalidArgument(
            f"{where} holds both Parquet and CSV files ({other} and {lines[0]}); give those of one kind, by a pattern "
            f"such as '*.parquet'"
        )
    if not lines:
        return ParquetRows(where, trees=trees)
    delimiter = delimiter or ("\t" if lines[0].endswith(".tsv") else ",")
    return CsvRows(where, delimiter=delimiter, list_delimiter=list_delimiter, names=names or None, header=header)
