"""The vectors of features: rows of their tables, pooled, of any kind of ids and rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from geartrain.ams.storage.export.mapped_rows import write_mapped
from geartrain.ams.tables.row_table import RowTable
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.placement import NUM_BUCKETS
from geartrain.ams.values.specs import TableSpec, Uniform
from geartrain.serving.vectors import FeatureVectors, MappedTables
from geartrain.workers.ctr.samples.features import SampleFeature


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", [1, 2])
def test_vectors_are_the_pooled_rows_of_training(tmp_path: Path, dtype: str, width: int) -> None:
    """Ids that are there, ids that are not, and none."""
    spec = TableSpec(name="t", dim=3, optimizer=SGD(0.1), dtype=dtype, initializer=Uniform(-1, 1), seed=3)
    rows = np.random.default_rng(0).standard_normal((4, 3)).astype(spec.numpy_dtype)
    write_mapped(tmp_path / "t", spec, 4, [(np.arange(4), rows)])
    pooled = SampleFeature(name="pooled", dim=3, of=("a",), table="t", pooling="mean")
    events = SampleFeature(name="events", dim=3, of=("a",), table="t", pooling=None)
    vectors = FeatureVectors(MappedTables({"t": (tmp_path / "t", spec.to_dict())}), [pooled, events])

    ids = np.array([[2, 9], [-1, -1], [7, -1], [3, 0]])[:, :width]
    missing = np.empty((10, 3), spec.numpy_dtype)
    RowTable(spec, np.arange(NUM_BUCKETS)).pull(np.arange(10), missing)
    known = np.concatenate([rows, missing[4:], np.zeros((1, 3), rows.dtype)]).astype(np.float32)  # -1 is the last
    wide = np.full((4, 5), 9, np.float32)
    found = vectors({"pooled": ids, "events": ids}, {"pooled": wide[:, 1:4]})
    np.testing.assert_array_equal(found["events"], known[ids])
    mean = known[ids].sum(1) / np.maximum(1, (ids >= 0).sum(1, keepdims=True))
    np.testing.assert_allclose(wide[:, 1:4], mean, rtol=1e-6)
    assert (wide[:, [0, 4]] == 9).all()
