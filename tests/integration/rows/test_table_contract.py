"""What a table promises, over every carrier."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.table import Table
from geartrain.ams.client.writes import ClientStream
from geartrain.ams.values import errors
from geartrain.ams.values.optimizers.registry import SGD, AdamW, SparseMomentum
from geartrain.ams.values.specs import Constant, Normal
from tests.specification.optimizers import UpdateStep, updated

rng = np.random.default_rng(7)


def some_ids(count: int, limit: int = 10_000) -> np.ndarray:
    return rng.permutation(limit)[:count].astype(np.int64)


def test_a_row_that_was_never_written_has_its_initial_value_and_is_not_created(cluster: Cluster) -> None:
    table = cluster.create_table("t", dim=8, optimizer=SGD(0.1), initializer=Normal(std=1.0), seed=3)
    ids = some_ids(100)
    first, again = table.pull(ids), table.pull(ids[::-1].copy())
    np.testing.assert_array_equal(first, again[::-1])
    assert first.std() == pytest.approx(1.0, abs=0.15)
    assert not table.present(ids).any()
    assert cluster.status().tables[0].rows == 0


def test_initial_values_do_not_depend_on_the_number_of_shards(cluster: Cluster) -> None:
    from geartrain.ams.client.factory import local

    table = cluster.create_table("t", dim=8, optimizer=SGD(0.1), seed=3)
    with local(5) as other:
        same = other.create_table("t", dim=8, optimizer=SGD(0.1), seed=3)
        np.testing.assert_array_equal(table.pull(np.arange(300)), same.pull(np.arange(300)))


def test_a_push_carries_numbers_of_the_optimizer(cluster: Cluster) -> None:
    table = cluster.create_table("t", dim=8, optimizer=AdamW(lr=0.1), initializer=Constant(0.5))
    ids, distinct = np.array([7, 3, 7]), np.array([3, 7])
    rows, moments = np.full((2, 8), 0.5), np.zeros((2, 16))
    for step in range(1, 6):
        gradients = rng.normal(size=(3, 8)).astype(np.float32)
        optimizer = AdamW(0.1 / step, (0.9 - 0.1 * step, 0.99), weight_decay=0.02 * step)
        table.push(ids, gradients, lr=optimizer.lr, optimizer_scalars=table.spec.optimizer.scalars_of_push(optimizer))
        summed = np.stack([gradients[1], gradients[0] + gradients[2]])
        rows, moments = updated(optimizer, rows, moments, summed, UpdateStep(optimizer.lr, t=step, dtype=np.float64))
    np.testing.assert_allclose(table.pull(distinct), rows, rtol=1e-5, atol=1e-6)


def test_gradients_of_equal_ids_are_summed_and_equal_ids_pull_equal_rows(cluster: Cluster) -> None:
    table = cluster.create_table("t", dim=4, optimizer=SGD(1.0), initializer=Constant(0.0))
    ids = np.array([5, 9, 5, 5, 9, 2])
    table.push(ids, np.ones((6, 4), np.float32))
    np.testing.assert_array_equal(table.pull(ids)[:, 0], [-3, -2, -3, -3, -2, -1])


def test_assigned_rows_are_read_back_and_their_momentum_is_forgotten(cluster: Cluster) -> None:
    table = cluster.create_table("t", dim=4, optimizer=SparseMomentum(lr=1.0, momentum=0.5), initializer=Constant(0.0))
    ids = some_ids(50)
    table.push(ids, np.ones((50, 4), np.float32))
    rows = rng.normal(size=(50, 4)).astype(np.float32)
    assert table.assign(ids, rows).created == 0
    np.testing.assert_array_equal(table.pull(ids), rows)
    table.push(ids, np.zeros((50, 4), np.float32))
    np.testing.assert_array_equal(table.pull(ids), rows)


@pytest.mark.parametrize("num_rows", [None, 10_000])
def test_a_removed_row_is_as_one_that_was_never_written(cluster: Cluster, num_rows: int | None) -> None:
    table = cluster.create_table("t", dim=4, optimizer=SparseMomentum(lr=1.0, momentum=0.5), num_rows=num_rows)
    ids, gradients = some_ids(200), rng.normal(size=(200, 4)).astype(np.float32)
    initial = table.pull(ids)
    table.push(ids, gradients)
    pushed, versions = table.pull(ids), table.versions()
    assert table.remove(np.concatenate([ids[:50], ids[:3], np.setdiff1d(np.arange(300), ids)[:5]])) == 50
    assert table.versions() > versions, "whoever keeps rows must see that some changed"
    assert table.present(ids).tolist() == [False] * 50 + [True] * 150
    np.testing.assert_array_equal(table.pull(ids), np.concatenate([initial[:50], pushed[50:]]))
    assert cluster.status().tables[0].rows == 150
    assert table.remove(ids[:50]) == 0
    assert table.push(ids[:50], gradients[:50]).created == 50
    np.testing.assert_array_equal(table.pull(ids[:50]), pushed[:50])


def test_a_numbered_removal_that_is_sent_again_removes_nothing_anew(cluster: Cluster) -> None:
    table = Table(
        cluster.create_table("t", dim=4, optimizer=SGD(1.0)).spec, cluster._calls, ClientStream(8, "job/rank0", 1)
    )
    ids = np.arange(20)
    table.push(ids, np.ones((20, 4), np.float32), sequence=1)
    assert table.remove(ids, sequence=2) == 20
    table.push(ids, np.ones((20, 4), np.float32), sequence=3)
    assert table.remove(ids, sequence=2) == 20, "the answer of the first time"
    assert table.present(ids).all()
    with pytest.raises(errors.InvalidArgument, match="3000000 ids to remove are several"):
        table.remove(np.arange(3_000_000), sequence=4)


def test_the_table_version_is_the_writes_that_every_shard_with_rows_has(cluster: Cluster) -> None:
    table = cluster.create_table(
        "t", dim=4, optimizer=SGD(1.0), num_rows=2
    )  # fewer rows than some clusters have shards
    other = cluster.create_table("u", dim=4, optimizer=SGD(1.0), num_rows=100)
    assert (table.version(), other.version()) == (0, 0)
    table.assign(np.arange(2), np.zeros((2, 4), np.float32))
    for _ in range(3):
        table.push(np.arange(2), np.ones((2, 4), np.float32))
    other.push(np.array([0]), np.ones((1, 4), np.float32))
    assert (table.version(), other.version()) == (4, int(cluster.num_shards == 1))
    cluster.drop_table("t")
    with pytest.raises(errors.TableNotFound, match="no table 't' any more"):
        table.version()
    with pytest.raises(errors.TableNotFound):
        table.remove([1])


def test_large_payloads_arrive_whole(cluster: Cluster) -> None:
    table = cluster.create_table("t", dim=64, optimizer=SGD(1.0), num_rows=20_000, initializer=Constant(0.0))
    ids = some_ids(20_000, 20_000)
    gradients = rng.normal(size=(20_000, 64)).astype(np.float32)
    assert table.push(ids, gradients).created == 20_000
    np.testing.assert_array_equal(table.pull(ids), -gradients)
    assert cluster.status().tables[0].rows == 20_000
    rows = rng.normal(size=(20_000, 64)).astype(np.float32)
    table.assign(ids, rows)
    np.testing.assert_array_equal(table.pull(ids), rows)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_rows_travel_as_such(cluster: Cluster, dtype: str) -> None:
    table = cluster.create_table("t", dim=8, optimizer=SGD(1.0), initializer=Constant(0.0), dtype=dtype)  # type: ignore[arg-type]
    numpy_dtype = np.float16 if dtype == "float16" else ml_dtypes.bfloat16
    table.push(np.array([3]), np.full((1, 8), -0.5, numpy_dtype))
    rows = table.pull(np.array([3]))
    assert rows.dtype == numpy_dtype
    np.testing.assert_array_equal(rows.astype(np.float32), 0.5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torch_in_gives_torch_out(cluster: Cluster, dtype: str) -> None:
    table = cluster.create_table("t", dim=8, optimizer=SGD(1.0), initializer=Constant(0.0), dtype=dtype)  # type: ignore[arg-type]
    ids = torch.tensor([1, 2, 1])
    table.push(ids, torch.ones(3, 8, dtype=getattr(torch, dtype)))
    rows = table.pull(ids)
    assert isinstance(rows, torch.Tensor) and rows.dtype == getattr(torch, dtype)
    assert rows[:, 0].tolist() == [-2.0, -1.0, -2.0]


def test_pulls_and_pushes_in_the_background_give_futures(cluster: Cluster) -> None:
    table = cluster.create_table("t", dim=4, optimizer=SGD(1.0), initializer=Constant(0.0))
    pushes = [table.push_async(np.arange(10), np.ones((10, 4), np.float32)) for _ in range(20)]
    for push in pushes:
        push.result()
    np.testing.assert_array_equal(table.pull_async(np.arange(10)).result(), -20.0)


def test_an_empty_pull_and_an_empty_push_are_legal(cluster: Cluster) -> None:
    table = cluster.create_table("t", dim=4, optimizer=SGD(1.0))
    none = np.empty(0, np.int64)
    assert table.pull(none).shape == (0, 4)
    assert table.push(none, np.empty((0, 4), np.float32)).created == 0


def test_a_table_is_not_reused_by_accident(cluster: Cluster) -> None:
    cluster.create_table("t", dim=4, optimizer=SGD(1.0))
    with pytest.raises(errors.TableExists, match="reuse=True"):
        cluster.create_table("t", dim=4, optimizer=SGD(1.0))
    cluster.create_table("t", dim=4, optimizer=SGD(1.0), reuse=True)
    with pytest.raises(errors.SpecMismatch, match="its dim is 4, not 5; no table can be altered in that"):
        cluster.create_table("t", dim=5, optimizer=SGD(2.0), reuse=True)
    assert cluster.table("t").spec.dim == 4
    cluster.drop_table("t")
    with pytest.raises(errors.TableNotFound, match="'t'"):
        cluster.table("t")


ONE_ROW = np.array([3]), np.ones((1, 4), np.float32)
STALE_CALLS = {
    "pull": lambda t: t.pull(ONE_ROW[0]),
    "present": lambda t: t.present(ONE_ROW[0]),
    "push": lambda t: t.push(*ONE_ROW),
    "assign": lambda t: t.assign(*ONE_ROW),
    "compute": lambda t: t.hosted("softmax").compute("logits", lambda _: ()),
    "update": lambda t: t.hosted("softmax").prepare_update(lambda _: ()).send(),
}


@pytest.mark.parametrize("dim", [4, 8])
@pytest.mark.parametrize("name", STALE_CALLS)
def test_whoever_has_a_dropped_table_open_does_not_touch_the_next_one_of_its_name(
    cluster: Cluster, name: str, dim: int
) -> None:
    def made(dim: int) -> Table:
        return cluster.create_table("t", dim=dim, optimizer=SGD(1.0), num_rows=100, initializer=Constant(0.0))

    stale = made(4)
    stale.push(*ONE_ROW)
    cluster.drop_table("t")
    table = made(dim)
    with pytest.raises(errors.TableNotFound, match="table 't' was dropped, and another"):
        STALE_CALLS[name](stale)
    with pytest.raises(errors.TableNotFound, match="'t'"):
        stale.version()
    assert (table.version(), table.present(np.arange(100)).any()) == (0, False)
    table.push(ONE_ROW[0], np.ones((1, dim), np.float32))
    np.testing.assert_array_equal(cluster.table("t").pull(ONE_ROW[0]), -np.ones((1, dim)))


def test_a_numbered_write_to_a_dropped_table_is_no_repetition_of_one_to_the_next(cluster: Cluster) -> None:
    calls = cluster._calls
    stream = ClientStream(8, "job/rank0", 1)

    def made() -> Table:
        spec = cluster.create_table("t", dim=4, optimizer=SGD(1.0), num_rows=100, initializer=Constant(0.0)).spec
        return Table(spec, calls, stream)

    stale = made()
    cluster.drop_table("t")
    made().push(*ONE_ROW, sequence=5)
    with pytest.raises(errors.TableNotFound, match="was dropped, and another"):
        stale.push(*ONE_ROW, sequence=5)


def test_a_table_of_a_peer_that_does_not_number_them_is_whichever_there_is(cluster: Cluster) -> None:
    table = cluster.create_table("t", dim=4, optimizer=SGD(1.0), num_rows=100, initializer=Constant(0.0))
    unknown = Table(replace(table.spec, incarnation=0), cluster._calls, ClientStream(8))
    unknown.push(np.arange(100), np.ones((100, 4), np.float32))
    np.testing.assert_array_equal(unknown.pull(ONE_ROW[0]), -ONE_ROW[1])
    assert unknown.version() == table.version() == 1


BAD_CALLS = {
    "negative id": (lambda t: t.pull(np.array([4, -7])), errors.InvalidIds, "-7 at index 1"),
    "id beyond num_rows": (lambda t: t.push(np.array([100]), np.ones((1, 4), np.float32)), errors.InvalidIds, "100"),
    "float ids": (lambda t: t.pull(np.array([1.5])), errors.InvalidIds, "float64"),
    "two-dimensional ids": (lambda t: t.pull(np.zeros((2, 2), np.int64)), errors.InvalidIds, r"\(2, 2\)"),
    "wrong width": (lambda t: t.push(np.array([1]), np.ones((1, 5), np.float32)), errors.InvalidRows, r"\(1, 5\)"),
    "wrong count": (lambda t: t.assign(np.array([1, 2]), np.ones((1, 4), np.float32)), errors.InvalidRows, r"\(1, 4\)"),
    "wrong dtype": (lambda t: t.push(np.array([1]), np.ones((1, 4), np.int32)), errors.InvalidRows, "int32"),
    "float64 gradients": (lambda t: t.push(np.array([1]), np.ones((1, 4))), errors.InvalidRows, "float64"),
    "NaN": (lambda t: t.push(np.array([1, 2]), _with_nan()), errors.NonFinite, r"id 2"),
    "infinite scale": (
        lambda t: t.push(np.array([1]), np.ones((1, 4), np.float32), scale=float("inf")),
        errors.NonFinite,
        "inf",
    ),
    "sum of duplicates": (
        lambda t: t.push(np.array([0, 99, 99]), np.full((3, 4), 3e38, np.float32)),
        errors.NonFinite,
        "id 99",
    ),
    "product with scale": (
        lambda t: t.push(np.array([0, 99]), np.full((2, 4), 1e30, np.float32), scale=1e20),
        errors.NonFinite,
        "1e[+]20",
    ),
    "infinite lr": (
        lambda t: t.push(np.array([1]), np.ones((1, 4), np.float32), lr=float("inf")),
        errors.InvalidArgument,
        "inf",
    ),
    "unknown number of the optimizer": (
        lambda t: t.push(np.array([1]), np.ones((1, 4), np.float32), optimizer_scalars={"momentum": 0.9}),
        errors.InvalidArgument,
        "a push for sgd cannot carry 'momentum'; it can carry weight_decay",
    ),
    "number of the optimizer out of range": (
        lambda t: t.push(np.array([1]), np.ones((1, 4), np.float32), optimizer_scalars={"weight_decay": -1.0}),
        errors.InvalidArgument,
        "weight_decay is -1.0",
    ),
    "duplicate assign": (
        lambda t: t.assign(np.array([3, 1, 2, 1]), np.ones((4, 4), np.float32)),
        errors.InvalidArgument,
        "1 duplicate: id 1 is at positions 1 and 3; give each id once",
    ),
}


def _with_nan() -> np.ndarray:
    rows = np.ones((2, 4), np.float32)
    rows[1, 2] = np.nan
    return rows


@pytest.mark.parametrize("name", BAD_CALLS)
def test_a_bad_call_names_the_value_and_changes_nothing(cluster: Cluster, name: str) -> None:
    call, kind, text = BAD_CALLS[name]
    table = cluster.create_table("t", dim=4, optimizer=SGD(1.0), num_rows=100)
    before = table.pull(np.arange(100))
    with pytest.raises(kind, match=text):
        call(table)
    np.testing.assert_array_equal(table.pull(np.arange(100)), before)
    assert cluster.status().tables[0].rows == 0
    table.push(np.array([1]), np.ones((1, 4), np.float32))  # and the shard goes on serving


def test_closing_twice_is_harmless_and_a_closed_cluster_says_so(cluster: Cluster) -> None:
    table = cluster.create_table("t", dim=4, optimizer=SGD(1.0))
    cluster.close()
    cluster.close()
    with pytest.raises(errors.Unavailable, match="closed"):
        table.pull(np.array([1]))
