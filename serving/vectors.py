"""The vectors of what a model looks up: the rows of its tables, of one moment, pooled as in training.

Tables lie in mapped files, which processes of a machine share by its page cache. Legend: N samples, L ids of the
longest bag, V vectors, D width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from geartrain.ams.kernels.embedding import BadId, FeatureIds, Lookup, MappedRows
from geartrain.ams.storage.tensor_file import map_tensors
from geartrain.ams.tables.row_table import RowTable
from geartrain.ams.values.errors import InvalidArgument, ModelDamaged
from geartrain.ams.values.placement import NUM_BUCKETS
from geartrain.ams.values.specs import Ids, Rows, TableSpec
from geartrain.workers.ctr.samples.click_samples import PADDING
from geartrain.workers.ctr.samples.features import SampleFeature

Floats = npt.NDArray[np.float32]
_AGAIN = "bring it back from a copy, or export the model again"


class MappedTables:
    """Tables in files (:mod:`geartrain.ams.storage.export.mapped_rows`), asked as they lie on the disk. Thread-safe.

    Nothing is read before it is asked for, and nothing is kept but by the system's page cache: a table may be larger
    than memory, and what is asked for often stays in it.
    """

    def __init__(self, files: Mapping[str, tuple[Path, Mapping[str, Any]]]) -> None:
        """``files``: of each table, and its specification. Raises ModelDamaged that names a file."""
        self.specs = {name: TableSpec.from_dict(fields) for name, (_, fields) in files.items()}
        arrays = [_mapped(path, self.specs[name]) for name, (path, _) in files.items()]
        self.num_rows = {name: len(ids) for name, (_, ids, _) in zip(files, arrays, strict=True)}
        self._numbers = {name: number for number, name in enumerate(files)}
        self._initial = [RowTable(spec, np.arange(NUM_BUCKETS)) for spec in self.specs.values()]
        self._shapes = [(spec.dim, spec.numpy_dtype) for spec in self.specs.values()]
        self._rows = MappedRows(arrays)

    def pull_together(self, tables: Mapping[str, Ids]) -> dict[str, Rows]:
        """Rows [N, D] of ids [N] of each table; one that is not there has its initial value, as in training."""
        numbers, ids = [self._numbers[name] for name in tables], list(tables.values())
        shapes = [self._shapes[number] for number in numbers]
        rows: list[Rows] = [np.empty((len(own), dim), dtype) for own, (dim, dtype) in zip(ids, shapes, strict=True)]
        for at, places in self._rows.pull(numbers, ids, out=rows).items():
            initial = np.empty((len(places), rows[at].shape[1]), rows[at].dtype)
            self._initial[numbers[at]].pull(ids[at][places], initial)
            rows[at][places] = initial
        return dict(zip(tables, rows, strict=True))


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
        """Raises ModelDamaged where a feature and its table differ."""
        self.features = tuple(features)
        self._tables = tables
        specs = tables.specs
        for feature in self.features:
            if feature.table not in specs or specs[feature.table].dim != feature.dim:
                what = f"has dim {specs[feature.table].dim}" if feature.table in specs else "is not there"
                raise ModelDamaged(
                    f"the table of feature {feature.name!r}, of dim {feature.dim}, {what}: network and tables are of "
                    "two models; export the model again"
                )

    def __call__(self, ids: Mapping[str, Ids]) -> dict[str, Floats]:
        """Of the features that are given the vectors [N, D], or [N, L, D] where they are not pooled.

        ``ids`` [N, L] of each, :data:`PADDING` where there is none. Raises InvalidArgument for an id that cannot be.
        """
        chosen = [feature for feature in self.features if feature.name in ids]
        tables = {name: at for at, name in enumerate(dict.fromkeys(feature.table for feature in chosen))}
        flat = {name: np.ascontiguousarray(own).reshape(-1) for name, own in ids.items()}
        asked = [
            FeatureIds(
                tables[feature.table], flat[feature.name], ids[feature.name].shape[1], None, feature.pooling, PADDING
            )
            for feature in chosen
        ]
        try:
            lookup = Lookup(asked, [None] * len(tables), 1)
        except BadId as bad:
            number, place = bad.args
            raise InvalidArgument(
                f"id {asked[number].ids[place]} of {chosen[number].of[0]!r} in sample "
                f"{place // ids[chosen[number].name].shape[1]} is out of range; ids lie in [0, 2^63)"
            ) from None
        pulled = self._tables.pull_together(dict(zip(tables, lookup.ids(), strict=True)))
        rows = [pulled[name] for name in tables]
        vectors = [np.empty((feature.num_vectors, rows[feature.table].shape[1]), np.float32) for feature in asked]
        lookup.pool(rows, out=vectors, keep_maxima=False)
        return {
            feature.name: found if feature.pooling is not None else found.reshape(*ids[feature.name].shape, feature.dim)
            for feature, found in zip(chosen, vectors, strict=True)
        }
