"""Initial values: functions of (seed, table, id, column), equal to the numpy reference bit by bit."""

import statistics

import numpy as np
import pytest

from geartrain.ams.tables.compiled_store import table_hash
from geartrain.ams.tables.row_table import RowTable
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.specs import Constant, DTypeName, Initializer, Normal, TableSpec, Uniform
from tests.specification import ops as reference

ALL_BUCKETS = np.arange(4096)
IDS = np.concatenate([np.arange(20), np.random.default_rng(0).integers(0, 2**63 - 1, 180), [2**32, 2**63 - 2]])


def initial_rows(
    initializer: Initializer, *, seed: int = 0, name: str = "t", dim: int = 70, dtype: DTypeName = "float32"
) -> np.ndarray:
    spec = TableSpec(name=name, dim=dim, optimizer=SGD(0.1), initializer=initializer, seed=seed, dtype=dtype)
    out = np.empty((len(IDS), dim), spec.numpy_dtype)
    RowTable(spec, ALL_BUCKETS).pull(IDS, out)
    return out


@pytest.mark.parametrize("initializer", [Constant(0.3), Uniform(-0.5, 0.25), Uniform(1, 1), Normal(), Normal(2, 0.5)])
@pytest.mark.parametrize("dim", [1, 3, 64, 65, 130])
@pytest.mark.parametrize("seed", [0, 7, 2**64 - 1])
def test_initial_values_equal_the_reference_bit_by_bit(initializer: Initializer, dim: int, seed: int) -> None:
    ours = initial_rows(initializer, seed=seed, dim=dim)
    theirs = [reference.initial_row(initializer, seed, table_hash("t"), i, dim) for i in IDS.tolist()]
    np.testing.assert_array_equal(ours.view(np.uint32), np.stack(theirs).view(np.uint32))


def test_philox_gives_the_published_words() -> None:
    """Known answers of the Random123 library, kat_vectors, philox4x32 10 rounds."""
    zeros, ones = np.zeros((1, 4), np.uint32), np.full((1, 4), 2**32 - 1, np.uint32)
    assert reference.philox4x32((0, 0), zeros).tolist() == [[0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]]
    assert reference.philox4x32((2**32 - 1, 2**32 - 1), ones).tolist() == [
        [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    ]


def test_the_normal_quantile_agrees_with_the_standard_library() -> None:
    extremes = np.array([0, 1, 2**31, 2**32 - 1], np.uint32)
    words = np.concatenate([extremes, np.random.default_rng(1).integers(0, 2**32, 5000, np.uint32)])
    exact = [statistics.NormalDist().inv_cdf((int(word) + 0.5) / 2**32) for word in words]
    np.testing.assert_allclose(reference.inverse_normal_cdf(words), exact, rtol=1e-13, atol=1e-15)


def test_initial_values_depend_on_seed_table_id_and_column() -> None:
    rows = initial_rows(Normal())
    assert len(np.unique(rows)) > 0.99 * rows.size
    assert not np.any(rows == initial_rows(Normal(), seed=1))
    assert not np.any(rows == initial_rows(Normal(), name="u"))
    np.testing.assert_array_equal(rows[:, :5], initial_rows(Normal(), dim=5))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_tables_round_the_float32_value_to_nearest(dtype: DTypeName) -> None:
    half = initial_rows(Normal(0, 1), dtype=dtype)
    np.testing.assert_array_equal(half, initial_rows(Normal(0, 1)).astype(half.dtype))


def test_uniform_values_fill_the_interval_and_never_reach_its_end() -> None:
    rows = initial_rows(Uniform(0, 1e-45 + 1.0))
    assert 0 <= rows.min() < 1e-3 and 1 - 1e-3 < rows.max() < 1
    tiny = np.nextafter(np.float32(1), np.float32(2))
    assert set(np.unique(initial_rows(Uniform(1, float(tiny))))) == {np.float32(1)}


def test_an_initial_value_beyond_the_storage_type_is_refused() -> None:
    for initializer in (Constant(1e6), Uniform(0, 1e6), Normal(0, 2e4)):
        with pytest.raises(InvalidArgument, match="float16 ends at 65504"):
            initial_rows(initializer, dtype="float16")
