"""Vectors of a model's features: the rows of its tables, of one moment, pooled as in training.

Tables are in mapped files, which processes of a machine share through the page cache. Legend: N samples, L ids of the
longest bag, V vectors, D width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from geartrain.ams.kernels.embedding import FeatureIds, Lookup, MappedRows
from geartrain.ams.storage.tensor_file import map_tensors
from geartrain.ams.tables.row_table import RowTable
from geartrain.ams.values.errors import ModelDamaged
from geartrain.ams.values.placement import NUM_BUCKETS
from geartrain.ams.values.specs import Ids, Rows, TableSpec
from geartrain.workers.ctr.samples.click_samples import PADDING
from geartrain.workers.ctr.samples.features import SampleFeature

Floats = npt.NDArray[np.float32]
_AGAIN = "bring it back from a copy, or export the model again"


class MappedTables:
    """Tables in mapped files (:mod:`geartrain.ams.storage.export.mapped_rows`). Thread-safe.

    Rows are read on demand and cached by the system's page cache alone: a table may be larger than memory, and frequent
    rows stay in the cache.
    """

    def __init__(self, files: Mapping[str, tuple[Path, Mapping[str, Any]]]) -> None:
        """``files``: of each table, with its specification. Raises ModelDamaged that names a file."""
        self.specs = {name: TableSpec.from_dict(fields) for name, (_, fields) in files.items()}
        arrays = [_mapped(path, self.specs[name]) for name, (path, _) in files.items()]
        self.num_rows = {name: len(ids) for name, (_, ids, _) in zip(files, arrays, strict=True)}
        self._numbers = {name: number for number, name in enumerate(files)}
        self._initial = [RowTable(spec, np.arange(NUM_BUCKETS)) for spec in self.specs.values()]
        self._shapes = [(spec.dim, spec.numpy_dtype) for spec in self.specs.values()]
        self._rows = MappedRows(arrays)

    def pull(self, tables: Sequence[str], ids: Sequence[Ids], out: Sequence[Rows]) -> None:
        """Write the rows of ``ids`` [N] of each table to its ``out`` [N, D], which may be columns of a wider array.

        An absent row has its initial value, as in training; that of padding is zero.
        """
        numbers = [self._numbers[name] for name in tables]
        for at, places in self._rows.pull(numbers, ids, out=out).items():
            out[at][places] = 0
            places = places[ids[at][places] != PADDING]
            initial = np.empty((len(places), out[at].shape[1]), out[at].dtype)
            self._initial[numbers[at]].pull(ids[at][places], initial)
            out[at][places] = initial

    def have(self, table: str, ids: Ids) -> npt.NDArray[np.bool_]:
        """Return which of ``ids`` [N] have a stored row, not an initial one."""
        number = self._numbers[table]
        dim, dtype = self._shapes[number]
        found = np.ones(len(ids), np.bool_)
        for missing in self._rows.pull([number], [ids], out=[np.empty((len(ids), dim), dtype)]).values():
            found[missing] = False
        return found

    def rows(self, ids: Mapping[str, Ids]) -> list[Rows]:
        """Return the rows [N, D] of ids [N] of each table, by :meth:`pull`."""
        shapes = [self._shapes[self._numbers[name]] for name in ids]
        out = [np.empty((len(own), dim), dtype) for own, (dim, dtype) in zip(ids.values(), shapes, strict=True)]
        self.pull(list(ids), list(ids.values()), out)
        return out


def _mapped(path: Path, spec: TableSpec) -> tuple[Ids, Ids, Rows]:
    try:
        arrays = map_tensors(path, scattered=True)
        starts, ids, rows = (arrays[name] for name in ("starts", "ids", "weight"))
        if rows.dtype != spec.numpy_dtype or rows.shape != (len(ids), spec.dim):
            raise ModelDamaged(
                f"{path} has rows {rows.dtype} {list(rows.shape)}; those of table {spec.name!r} are {spec.dtype} "
                f"[{len(ids)}, {spec.dim}]. {_AGAIN.capitalize()}"
            )
        MappedRows([(starts, ids, rows)])
        return starts, ids, rows
    except OSError as exc:
        raise ModelDamaged(f"{path} cannot be read: {exc.strerror or exc}; {_AGAIN}") from exc
    except (ValueError, KeyError, TypeError) as exc:
        raise ModelDamaged(f"{path} is no table of a model: {exc}; {_AGAIN}") from exc


class FeatureVectors:
    """Looks up the vectors of a model's features. Thread-safe."""

    def __init__(self, tables: MappedTables, features: Sequence[SampleFeature]) -> None:
        """Raise ModelDamaged if a feature and its table differ."""
        self.features = tuple(features)
        self._tables = tables
        specs = tables.specs
        self._of_float32 = {name for name, spec in specs.items() if spec.numpy_dtype == np.float32}
        for feature in self.features:
            if feature.table not in specs or specs[feature.table].dim != feature.dim:
                what = f"has dim {specs[feature.table].dim}" if feature.table in specs else "is not there"
                raise ModelDamaged(
                    f"the table of feature {feature.name!r}, of dim {feature.dim}, {what}: network and tables are of "
                    "two models; export the model again"
                )

    def __call__(self, ids: Mapping[str, Ids], out: Mapping[str, Floats]) -> dict[str, Floats]:
        """Write the vectors of pooled features to ``out`` [N, D]; return those of the others [N, L, D].

        ``ids`` [N, L] are those of some features: >= 0, or :data:`PADDING` for none.
        """
        single, others = list[SampleFeature](), list[SampleFeature]()
        for feature in self.features:
            if feature.name in ids:
                is_row = feature.name in out and ids[feature.name].shape[1] == 1 and feature.table in self._of_float32
                (single if is_row else others).append(feature)
        if single:  # the row is the vector, whatever the pooling
            self._tables.pull(
                [feature.table for feature in single],
                [np.ascontiguousarray(ids[feature.name][:, 0]) for feature in single],
                [out[feature.name] for feature in single],
            )
        return self._looked_up(others, ids, out) if others else {}

    def _looked_up(
        self, features: Sequence[SampleFeature], ids: Mapping[str, Ids], out: Mapping[str, Floats]
    ) -> dict[str, Floats]:
        """Look up as :meth:`__call__`: each id once, then pooled."""
        tables = {name: at for at, name in enumerate(dict.fromkeys(feature.table for feature in features))}
        asked = []
        for feature in features:
            flat = np.ascontiguousarray(ids[feature.name]).reshape(-1)
            bags = ids[feature.name].shape[1]
            asked.append(FeatureIds(tables[feature.table], flat, bags, None, feature.pooling, PADDING))
        lookup = Lookup(asked, [None] * len(tables), 1)
        rows = self._tables.rows(dict(zip(tables, lookup.ids, strict=True)))
        vectors = lookup.pool(rows, keep_maxima=False)
        found = {}
        for feature, own in zip(features, vectors, strict=True):
            if feature.name in out:
                out[feature.name][:] = own
            else:
                found[feature.name] = own.reshape(*ids[feature.name].shape, feature.dim)
        return found
