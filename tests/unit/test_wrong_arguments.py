"""Arguments of the wrong type are named in an error of ours, as wrong values are."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import geartrain as gt
from geartrain.ams.client.cluster import Cluster
from geartrain.ams.values.errors import (
    ConfigError,
    GeartrainError,
    InvalidArgument,
    InvalidIds,
    InvalidRows,
    Unavailable,
)

anything: Any = gt


@pytest.mark.parametrize(
    ("call", "error", "named"),
    [
        (lambda: anything.local("2"), ConfigError, "num_shards is '2'; it must be an integer"),
        (lambda: anything.local(2.5), ConfigError, "num_shards is 2.5"),
        (lambda: anything.connect(None), ConfigError, "address is None; .*'host:port'"),
        (lambda: anything.connect(7000), ConfigError, "address is 7000"),
        (lambda: anything.connect("http://127.0.0.1:7000"), ConfigError, "is a URL; leave out http://"),
        (
            lambda: anything.connect("127.0.0.1:7000", config={}),
            ConfigError,
            "config is {}; it must be a gt.Client",
        ),
        (lambda: anything.SGD("0.1"), InvalidArgument, "lr is '0.1'; it must be a number"),
        (lambda: anything.SGD(True), InvalidArgument, "lr is True"),
        (lambda: anything.Momentum(0.1, momentum="0.9"), InvalidArgument, "momentum is '0.9'"),
        (lambda: anything.SparseMomentum(0.1, momentum=None), InvalidArgument, "momentum is None"),
        (lambda: anything.Constant("0"), InvalidArgument, "value is '0'"),
        (lambda: anything.Uniform(0, "1"), InvalidArgument, "high is '1'"),
        (lambda: anything.Normal([0]), InvalidArgument, r"mean is \[0\]"),
    ],
)
def test_a_value_of_the_wrong_type_is_named(
    call: Callable[[], object], error: type[GeartrainError], named: str
) -> None:
    with pytest.raises(error, match=named):
        call()


@pytest.mark.parametrize("dtype", [torch.float16, np.float16, np.dtype("float16"), "torch.float16"])
@pytest.mark.parametrize("name", ["dtype", "slot_dtype"])
def test_a_dtype_in_place_of_its_name_is_refused_with_the_name(dtype: Any, name: str) -> None:
    said = f"{name} is .*float16.*; it must be its name, 'float16'"
    with gt.local() as cluster:
        with pytest.raises(InvalidArgument, match=said):
            cluster.create_table("t", dim=2, optimizer=gt.SGD(0.1), **{name: dtype})
        with pytest.raises(InvalidArgument, match=said):
            gt.ClassHead(cluster, "t", num_classes=4, dim=2, config=gt.HeadConfig(**{name: dtype}))


@pytest.mark.parametrize("dtype", [torch.int64, "half", None, ["float16"]])
def test_a_dtype_that_rows_cannot_have_is_refused_with_those_they_can(dtype: Any) -> None:
    said = "dtype is .*; it must be one of 'float32', 'float16'"
    with gt.local() as cluster, pytest.raises(InvalidArgument, match=said):
        cluster.create_table("t", dim=2, optimizer=gt.SGD(0.1), dtype=dtype)


def test_numbers_of_numpy_are_numbers() -> None:
    assert gt.SGD(float(np.float32(0.5))) == gt.SGD(np.float32(0.5))  # type: ignore[arg-type]
    gt.Constant(np.int64(1))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with gt.local(1) as cluster:
        yield cluster


IDS = np.arange(4)
ONES = np.ones((4, 3), np.float32)
HEAD: dict[str, Any] = {"num_classes": 9, "dim": 4}
READ_ONLY = ONES.copy()
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda it: it.table.push(IDS, ONES, lr="0.1"), "lr is '0.1'; it must be a number"),
        (lambda it: it.table.push(IDS, ONES, scale="2"), "scale is '2'; it must be a number"),
        (lambda it: it.table.push(IDS, ONES, scale=None), "scale is None; it must be a number"),
        (lambda it: it.table.push(IDS, [[1.0, 2.0, 3.0], [1.0]]), r"rows are no rectangle of numbers \[4, 3\]"),
        (lambda it: it.table.pull_into(IDS, READ_ONLY), "out must be writable, aligned and C-contiguous"),
        (lambda it: it.table.pull_into(IDS, np.asfortranarray(ONES)), "out must be writable, aligned and C-contiguous"),
        (lambda it: it.table.pull_into(IDS, [0.0]), "out is a list; it must be a numpy array"),
        (lambda it: it.cluster.create_table("x", dim=True, optimizer=gt.SGD(1)), "dim is True; it must be an integer"),
        (
            lambda it: it.cluster.create_table("x", dim=2, optimizer=gt.SGD(1), seed=1.5),
            "seed is 1.5; it must be an integer",
        ),
        (lambda it: it.cluster.create_table("x", dim=2, optimizer=gt.SGD(1), seed=None), "seed is None"),
        (lambda it: it.cluster.create_table("x", dim=2, optimizer=gt.SGD(1), num_rows=2.0), r"num_rows .* is 2.0"),
        (lambda it: it.cluster.fence("job", 0), "incarnation is 0; it must be an integer from 1"),
        (lambda it: it.cluster.fence("job", 2**70), "incarnation is 1180591620717411303424"),
        (lambda it: it.cluster.fence("job", "1"), "incarnation is '1'"),
        (lambda it: it.cluster.fence(None, 1), "job is None; it must have"),
        (
            lambda it: it.cluster.streams("job", worker="w", num_streams=0),
            "num_streams is 0; it must be an integer >= 1",
        ),
        (lambda it: it.cluster.snapshot("/nowhere", step=None), "step is None; it must be an integer >= 0"),
        (lambda it: it.cluster.snapshot(None), "path is None; it must be the name of a folder, or a URL"),
        (lambda it: it.cluster.snapshot(""), "path is ''"),
        (lambda it: it.cluster.snapshot("/nowhere", name=3), "name is 3; it must be 1 to 100"),
        (lambda it: it.cluster.snapshot("/nowhere", tables=3), "tables is 3; it must be a list of names"),
        (lambda it: it.cluster.snapshot("/nowhere", values=[1]), r"values is \[1\]; it must be a dict"),
        (lambda it: it.cluster.snapshot("/nowhere", files=["a"]), r"files is \['a'\]; it must be a dict"),
        (lambda it: it.cluster.snapshot("/nowhere", files={3: b""}), "a file is called 3"),
        (lambda it: it.cluster.snapshot("/nowhere", parent=4), "path is 4"),
        (lambda it: it.cluster.restore(5), "path is 5"),
        (lambda it: it.table.pull([[1], [2, 3]]), "ids are no array of numbers"),
        (lambda it: it.table.pull(torch.arange(4).to_sparse()), "ids are a tensor of layout torch.sparse_coo"),
        (lambda it: it.table.push(IDS, torch.ones(4, 3).to_sparse()), "rows are a tensor of layout torch.sparse_coo"),
        (lambda it: it.table.push(IDS, torch.ones(4, 3, device="meta")), "rows are a meta tensor"),
        (
            lambda it: gt.RowOptimizer(*[gt.ClassHead(it.cluster, "r", **HEAD)] * 2),
            "given to RowOptimizer twice",
        ),
        (lambda it: gt.RowOptimizer(gt.ClassHead(it.cluster, "s", **HEAD), lr="a"), "lr is 'a'; it must be a number"),
        (lambda it: it.cluster.acknowledge("x"), "sequence is 'x'"),
        (
            lambda it: gt.ClassHead(it.cluster, "h", num_classes=0, dim=4),
            "num_classes is 0; it must be an integer >= 1",
        ),
        (lambda it: gt.ClassHead(it.cluster, "h", num_classes="9", dim=4), "num_classes is '9'"),
        (lambda _: gt.memory_report(num_classes=-1, dim=4, rows="pull"), r"num_classes is -1; .* >= 1"),
        (lambda _: gt.ClassHead("host:1", "h", num_classes=9, dim=4), r"cluster is 'host:1'; .* need one \(gt.local"),
        (
            lambda it: gt.ClassHead(it.cluster, "h", **HEAD, sync="x"),
            "sync is 'x'; it must be True or False",
        ),
        (lambda it: gt.ClassHead(it.cluster, "h", **HEAD, reuse=1), "reuse is 1"),
        (lambda _: anything.HeadConfig(rows_cache_bytes="1"), "rows_cache_bytes is '1'"),
        (lambda _: gt.HeadConfig(logits_cache_bytes=-1), "logits_cache_bytes is -1"),
        (lambda it: gt.ClassHead(it.cluster, "h", **HEAD, config="x"), "config is 'x'; it must be a gt.HeadConfig"),
        (lambda it: gt.ClassHead(it.cluster, "k", num_classes=9, dim=4).predict(torch.ones(1, 4), "1"), "k is '1'"),
        (
            lambda it: gt.export_class_weights(gt.ClassHead(it.cluster, "e", num_classes=9, dim=4), None),
            "path is None; it must be the name of a file",
        ),
        (
            lambda it: gt.import_class_weights(gt.ClassHead(it.cluster, "i", num_classes=9, dim=4), None),
            "path is None; it must be the name of a file",
        ),
        (lambda _: gt.PartialFC("0.1"), "sample_rate is '0.1'; it must be a number"),
        (lambda it: it.cluster.drop_table(None), "table name None must be a string"),
        (lambda it: gt.EmbeddingGroup(it.cluster, "g", None), r"the fields of 'g' are None; give a list: \[gt.Field"),
        (lambda it: gt.EmbeddingGroup(it.cluster, "g", gt.Field("a", dim=4)), r"are Field\(name='a'.*; give a list"),
        (lambda it: gt.EmbeddingGroup(it.cluster, "g", [gt.Field("a", dim=4)], reuse="x"), "reuse is 'x'"),
        (lambda it: gt.attach(5, it.cluster, name="a"), "module is 5; it must be a torch.nn.Module"),
        (lambda _: gt.attach(torch.nn.Linear(2, 2), None, name="a"), r"cluster is None; give that of gt.local\(\)"),
        (lambda it: gt.attach(torch.nn.Linear(2, 2), it.cluster, name="a", reuse="x"), "reuse is 'x'"),
        (
            lambda it: gt.attach(torch.nn.Linear(2, 2), it.cluster, name="a", wait_seconds="1"),
            "wait_seconds is '1'; it must be a number",
        ),
    ],
)
def test_arguments_of_calls_are_named(cluster: Cluster, call: Callable[[Any], object], named: str) -> None:
    table = cluster.create_table("t", dim=3, optimizer=gt.SGD(1.0), reuse=True)
    with pytest.raises(GeartrainError, match=named):
        call(SimpleNamespace(cluster=cluster, table=table))


def test_masked_values_are_no_numbers(cluster: Cluster) -> None:
    table = cluster.create_table("masked", dim=3, optimizer=gt.SGD(1.0), initializer=gt.Constant(0))
    some = np.ma.masked_array(ONES, mask=ONES * np.arange(4)[:, None] == 2)
    with pytest.raises(InvalidRows, match="rows hold 3 masked values"):
        table.push(IDS, some)
    with pytest.raises(InvalidRows, match="rows hold 3 masked values"):
        table.assign(IDS, some)
    with pytest.raises(InvalidRows, match="rows hold 3 masked values"):
        table.assign(IDS, list(some))
    with pytest.raises(InvalidIds, match="ids hold 1 masked value,"):
        table.pull(np.ma.masked_array(IDS, mask=IDS == 2))
    assert not table.present(IDS).any()

    table.assign(IDS, np.ma.masked_array(ONES, mask=False))  # none of which is masked
    assert (table.pull(IDS) == 1).all()


def test_a_module_of_masked_arrays_that_is_half_imported_is_none_yet(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = cluster.create_table("half", dim=3, optimizer=gt.SGD(1.0))
    monkeypatch.setitem(sys.modules, "numpy.ma", ModuleType("numpy.ma"))  # as another thread that imports it leaves it
    table.push(IDS, ONES)


def test_lists_of_numbers_are_rows(cluster: Cluster) -> None:
    table = cluster.create_table("lists", dim=2, optimizer=gt.SGD(1.0), initializer=gt.Constant(0))
    table.push([1, 2], [[1, 2], [3, 4]])
    table.assign([1], [[7.0, 8.0]])
    assert table.pull([1, 2]).tolist() == [[7, 8], [-3, -4]]


def test_tensors_that_wait_to_be_negated_are_rows(cluster: Cluster) -> None:
    table = cluster.create_table("negated", dim=2, optimizer=gt.SGD(1.0), initializer=gt.Constant(0))
    waits = torch.complex(torch.zeros(1, 2), torch.ones(1, 2)).conj().imag
    assert waits.is_neg()
    table.push([1], waits)
    assert table.pull([1]).tolist() == [[1, 1]]


def test_integers_of_numpy_are_integers(cluster: Cluster) -> None:
    table = cluster.create_table("n", dim=np.int64(2), optimizer=gt.SGD(1.0), num_rows=np.int32(9))  # type: ignore[arg-type]
    assert type(table.spec.dim) is int and type(table.spec.num_rows) is int


def test_values_of_numpy_and_torch_are_what_they_hold(cluster: Cluster) -> None:
    gt.ClassHead(cluster, "v", **HEAD, reuse=np.True_)
    head = gt.ClassHead(cluster, "v", **HEAD, reuse=np.bool_(True), sync=np.False_)  # type: ignore[arg-type]
    assert gt.RowOptimizer(head, lr=torch.tensor(0.25)).param_groups[0]["lr"] == 0.25  # type: ignore[arg-type]


@pytest.mark.parametrize("sequence", [1.0, True, "1", 0])
def test_a_number_of_a_write_is_an_integer(sequence: Any) -> None:
    with gt.local(stream="job/rank0") as cluster:
        table = cluster.create_table("t", dim=3, optimizer=gt.SGD(1.0))
        with pytest.raises(InvalidArgument, match=f"sequence is {sequence!r}; it must be an integer"):
            table.push(IDS, ONES, sequence=sequence)
        assert not table.present(IDS).any()


@pytest.mark.parametrize(
    "call",
    [
        lambda it: it.table.pull(IDS),
        lambda it: it.table.pull_async(IDS),
        lambda it: it.table.push(IDS, ONES),
        lambda it: it.cluster.create_table("x", dim=2, optimizer=gt.SGD(1)),
        lambda it: it.cluster.drop_table("t"),
        lambda it: it.cluster.status(),
        lambda it: it.cluster.table("t"),
    ],
)
def test_a_closed_cluster_says_so(call: Callable[[Any], object]) -> None:
    with gt.local(1) as cluster:
        table = cluster.create_table("t", dim=3, optimizer=gt.SGD(1.0))
        table.pull_async(IDS).result()
    with pytest.raises(Unavailable, match="this cluster is closed; use it inside the 'with' block"):
        call(SimpleNamespace(cluster=cluster, table=table))
