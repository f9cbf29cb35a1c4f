"""Rows of a float32 table that travel in 16 bits: the same by every way, and no gradient is lost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import geartrain as gt
from geartrain.ams.client.cluster import Cluster
from geartrain.ams.kernels import _core
from geartrain.ams.observe import failpoints
from geartrain.ams.values.errors import InvalidArgument, NonFinite, TableNotFound
from geartrain.ams.values.specs import DTYPES, DTypeName

WIRES: tuple[DTypeName, ...] = ("bfloat16", "float16")
DIM = 24


def rounded(rows: np.ndarray, wire: str) -> np.ndarray:
    return rows.astype(DTYPES[wire]).astype(np.float32)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("num_rows", [None, 5_000])
def test_pulled_rows_are_those_of_the_table_rounded_to_the_nearest(
    cluster: Cluster, wire: DTypeName, num_rows: int | None
) -> None:
    table = cluster.create_table("t", dim=DIM, optimizer=gt.SGD(1.0), num_rows=num_rows, seed=5)
    narrow = cluster.table("t", wire_dtype=wire)
    ids = np.random.default_rng(0).integers(0, 5_000, 700)
    distinct = np.unique(ids)[:400]
    narrow.assign(distinct, normal(1, len(distinct), DIM))
    np.testing.assert_array_equal(table.pull(distinct), normal(1, len(distinct), DIM))  # not rounded
    pulled = narrow.pull(ids)
    assert pulled.dtype == np.float32
    np.testing.assert_array_equal(pulled, rounded(table.pull(ids), wire))
    np.testing.assert_array_equal(narrow.present(ids), np.isin(ids, distinct))


def test_rows_that_moved_untouched_are_pulled_rounded(cluster: Cluster) -> None:
    optimizer = gt.SparseMomentum(lr=0.1, weight_decay=0.01, untouched="elapsed")
    table = cluster.create_table("t", dim=DIM, optimizer=optimizer, num_rows=100)
    for step in range(6):
        table.push([step, step + 50], normal(step, 2, DIM))
    np.testing.assert_array_equal(
        table.with_wire("bfloat16").pull(np.arange(100)), rounded(table.pull(np.arange(100)), "bfloat16")
    )


@pytest.mark.parametrize("wire", WIRES)
def test_a_gradient_without_feedback_is_applied_as_it_travels(cluster: Cluster, wire: DTypeName) -> None:
    optimizer = gt.SparseMomentum(lr=0.1)
    table = cluster.create_table("t", dim=DIM, optimizer=optimizer)
    twin = cluster.create_table("twin", dim=DIM, optimizer=optimizer, seed=0)
    lossy = table.with_wire(gt.WireFormat(wire, error_feedback=False))
    ids = np.random.default_rng(2).permutation(900)
    gradients = normal(3, 900, DIM)
    before, before_twin = table.pull(ids), twin.pull(ids)
    lossy.push(ids, gradients, scale=0.5)
    twin.push(ids, rounded(gradients, wire), scale=0.5)
    np.testing.assert_allclose(table.pull(ids) - before, twin.pull(ids) - before_twin, rtol=0, atol=1e-7)
    assert lossy.residual_bytes == 0


@pytest.mark.parametrize("wire", WIRES)
def test_what_was_sent_and_what_is_kept_is_the_sum_of_the_gradients(cluster: Cluster, wire: DTypeName) -> None:
    """In float64; the table sums what it is sent, for lr is 1, and another push of zeros brings what is kept."""
    table = cluster.create_table("t", dim=DIM, optimizer=gt.SGD(1.0), initializer=gt.Constant(0.0), num_rows=300)
    kept, lossy = table.with_wire(wire), table.with_wire(gt.WireFormat(wire, error_feedback=False))
    total = np.zeros((300, DIM))
    for step in range(20):
        ids = np.random.default_rng(step).integers(0, 300, 200)
        gradients = normal(100 + step, 200, DIM) * np.float32(10.0 ** -(step % 3))
        np.add.at(total, ids, 0.25 * gradients.astype(np.float64))
        kept.push(ids, gradients, scale=0.25)
    unit = 2.0**-8 if wire == "bfloat16" else 2.0**-11
    short = np.abs(table.pull(np.arange(300)) + total).max()
    assert 1e-6 < short <= unit * 2  # half a unit of the last gradient, at most
    for _ in range(3):
        kept.push(np.arange(300), np.zeros((300, DIM), np.float32), scale=0.25)
    np.testing.assert_allclose(-table.pull(np.arange(300)), total, rtol=0, atol=2e-6)
    for step in range(20):
        ids = np.random.default_rng(step).integers(0, 300, 200)
        lossy.push(ids, -normal(100 + step, 200, DIM) * np.float32(10.0 ** -(step % 3)), scale=0.25)
    assert np.abs(table.pull(np.arange(300))).max() > 20 * 2e-6


def test_small_gradients_beside_large_ones_arrive_with_feedback_alone() -> None:
    """A thousandth, pushed together with 1: less than half a unit of bfloat16 there, lost each time without."""
    with gt.local() as cluster:
        for name, feedback in (("kept", True), ("lost", False)):
            cluster.create_table(name, dim=1, optimizer=gt.SGD(1.0), initializer=gt.Constant(0.0), num_rows=1)
            table = cluster.table(name, wire_dtype=gt.WireFormat("bfloat16", error_feedback=feedback))
            for step in range(2_000):
                table.push([0, 0], np.array([[(-1.0) ** step], [1e-3]], np.float32))
        kept, lost = (float(cluster.table(name).pull([0])[0, 0]) for name in ("kept", "lost"))
        assert kept == pytest.approx(-2.0, abs=5e-3)
        assert abs(lost + 2.0) > 0.9


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_rounding_keeps_all_that_it_cuts_off(data: st.DataObject) -> None:
    """The compiled rounding against float64, whatever the numbers, the scale and the type are."""
    wire = data.draw(st.sampled_from(WIRES))
    scale = data.draw(st.sampled_from([1.0, 0.5, -2.0, 1 / 3, 1 / 65536, 0.0]))
    client = _core.RowsClient(np.zeros(4096, np.uint16), 1)
    facts = _core.TableFacts("t", 3, 0, True, {"float16": 1, "bfloat16": 2}[wire])
    residuals = _core.Residuals(3, 1 << 20, 50)
    given_sum, sent_sum = np.zeros((50, 3)), np.zeros((50, 3))
    largest = 1e-30
    for _ in range(data.draw(st.integers(1, 5))):
        ids = np.array(data.draw(st.lists(st.integers(0, 49), unique=True, max_size=30)), np.int64)
        seed, power = data.draw(st.integers(0, 1000)), data.draw(st.integers(-4, 4))
        gradients = normal(seed, len(ids), 3) * np.float32(10.0**power)
        write = prepared(client, facts, ids, gradients, residuals, scale)
        sent = sent_of(write, wire)
        given_sum[ids] += scale * gradients.astype(np.float64)
        sent_sum[ids] += scale * sent
        largest = max(largest, float(np.abs(scale * gradients).max(initial=0)))
    ids = np.arange(50)
    zeros = np.zeros((50, 3), np.float32)
    for _ in range(3):
        sent_sum += scale * sent_of(prepared(client, facts, ids, zeros, residuals, scale), wire)
    smallest = 2.0**-24 * abs(scale) if wire == "float16" else 0.0  # a number of that type
    np.testing.assert_allclose(sent_sum, given_sum, rtol=0, atol=2e-6 * largest + smallest)


def prepared(
    client: _core.RowsClient,
    facts: _core.TableFacts,
    ids: np.ndarray,
    gradients: np.ndarray,
    residuals: _core.Residuals | None,
    scale: float = 1.0,
) -> _core.PreparedWrite:
    return _core.PreparedWrite(
        client,
        facts,
        ids,
        gradients,
        0,
        is_assign=False,
        check=2,
        lr=None,
        scale=scale,
        scalars={},
        group=None,
        step_goes_on=False,
        every_shard=False,
        residuals=residuals,
    )


def sent_of(write: _core.PreparedWrite, wire: str) -> np.ndarray:
    _, _, bits, code, _ = write.part(0)
    assert code == {"float16": 1, "bfloat16": 2}[wire]
    return bits.view(DTYPES[wire]).astype(np.float64)


def test_ids_pushed_longest_ago_lose_what_was_cut_off_where_there_is_no_room() -> None:
    client = _core.RowsClient(np.zeros(4096, np.uint16), 1)
    facts = _core.TableFacts("t", 4, 0, False, 2)
    residuals = _core.Residuals(4, 3 * (4 * 4 + 84), 2**31)
    third = np.full((1, 4), 1 / 3, np.float32)
    for one in (7, 8, 9, 7, 10):
        prepared(client, facts, np.array([one]), third, residuals)
    assert (residuals.num_ids, residuals.num_dropped) == (3, 1)
    zeros = np.zeros((4, 4), np.float32)
    sent = sent_of(prepared(client, facts, np.array([7, 9, 10, 8]), zeros, residuals), "bfloat16")
    assert (sent[:3] != 0).all() and (sent[3] == 0).all()
    many = np.arange(1_000)
    prepared(client, facts, many, normal(0, 1_000, 4), residuals)
    assert residuals.num_ids == 3 and residuals.memory_bytes <= 3 * (4 * 4 + 84)


def test_a_push_sent_again_is_the_same_bytes_and_one_never_sent_leaves_no_trace() -> None:
    with gt.local() as cluster:
        table = cluster.create_table("t", dim=4, optimizer=gt.SGD(1.0), initializer=gt.Constant(0.0), num_rows=9)
        narrow = cluster.table("t", wire_dtype="bfloat16")
        narrow.push([1], np.full((1, 4), 1 / 3, np.float32))
        after_one = table.pull([1])
        dropped = narrow.prepare_push([1], np.full((1, 4), 0.7, np.float32))
        first, again = dropped._pending.calls(), dropped._pending.calls()  # type: ignore[union-attr]
        np.testing.assert_array_equal(first[0][1].gradients, again[0][1].gradients)
        dropped.abandon()
        for _ in range(3):
            narrow.push([1], np.zeros((1, 4), np.float32))
        assert (table.pull([1]) != after_one).all()
        np.testing.assert_allclose(table.pull([1]), -1 / 3, atol=1e-7)


def test_a_push_that_is_refused_leaves_no_trace() -> None:
    with gt.local(stream="job") as cluster:
        table = cluster.create_table("t", dim=2, optimizer=gt.SGD(1.0), initializer=gt.Constant(0.0))
        narrow, ids, small = table.with_wire("bfloat16"), [1], np.full((1, 2), 1.001, np.float32)
        narrow.push(ids, small)
        with pytest.raises(InvalidArgument, match="sequence"):
            narrow.push(ids, np.full((1, 2), 1001.0, np.float32), sequence=10**9)
        narrow.push(ids, np.zeros((1, 2), np.float32))
        np.testing.assert_allclose(table.pull(ids), -small, atol=1e-4)


def test_a_push_that_was_sent_and_broken_off_keeps_what_it_cut_off() -> None:
    with gt.local() as cluster:
        table = cluster.create_table("t", dim=2, optimizer=gt.SGD(1.0), initializer=gt.Constant(0.0))
        narrow, ids, small = table.with_wire("bfloat16"), [1], np.full((1, 2), 1.001, np.float32)
        write = narrow.prepare_push(ids, small)
        with failpoints.armed("client.reply.after=error"), pytest.raises(gt.errors.ShardUnavailable):
            write.send()
        write.abandon()
        narrow.push(ids, np.zeros((1, 2), np.float32))
        np.testing.assert_allclose(table.pull(ids), -small, atol=1e-4)


def test_what_was_cut_off_before_a_restore_is_not_added_after_it(tmp_path: Path) -> None:
    with gt.local() as cluster:
        table = cluster.create_table("t", dim=4, optimizer=gt.SGD(1.0), initializer=gt.Constant(0.0), num_rows=9)
        narrow = cluster.table("t", wire_dtype="bfloat16")
        saved = cluster.snapshot(tmp_path, "s").result()
        narrow.push([1], np.full((1, 4), 1 / 3, np.float32))
        cluster.restore(saved, replace=True)
        narrow.push([1], np.zeros((1, 4), np.float32))
        np.testing.assert_array_equal(table.pull([1]), 0)


@pytest.mark.parametrize("feedback", [True, False])
def test_numbers_beyond_float16_are_named_and_none_becomes_infinite(cluster: Cluster, feedback: bool) -> None:
    table = cluster.create_table("t", dim=2, optimizer=gt.SGD(1.0), initializer=gt.Constant(0.0), num_rows=50)
    narrow = table.with_wire(gt.WireFormat("float16", error_feedback=feedback))
    rows = np.zeros((50, 2), np.float32)
    rows[31, 1] = -70_000
    with pytest.raises(NonFinite, match=r"gradient of id 31 .*70000.0, beyond the range of float16 .65504.*bfloat16"):
        narrow.push(np.arange(50), rows)
    np.testing.assert_array_equal(table.pull(np.arange(50)), 0)
    table.assign(np.arange(50), rows)
    with pytest.raises(
        NonFinite, match=r"row of id 31 .* is beyond the range of float16; pull it with wire_dtype=.bfl"
    ):
        narrow.pull(np.arange(50))
    np.testing.assert_array_equal(narrow.pull(np.arange(31)), 0)
    assert np.isfinite(table.with_wire("bfloat16").pull([31])).all()
    with pytest.raises(NonFinite, match="NaN or infinity"):
        narrow.push([3], np.full((1, 2), np.nan, np.float32))


def test_the_wire_is_of_float32_tables_and_of_known_types() -> None:
    with gt.local() as cluster:
        cluster.create_table("half", dim=2, optimizer=gt.SGD(1.0), dtype="bfloat16")
        assert cluster.table("half", wire_dtype="bfloat16").wire_format is None
        with pytest.raises(
            InvalidArgument, match=r"wire_dtype is 'float16', and the rows of table 'half' are bfloat16"
        ):
            cluster.table("half", wire_dtype="float16")
        with pytest.raises(InvalidArgument, match="wire_dtype is 'int8'; it must be one of"):
            cluster.create_table("t", dim=2, optimizer=gt.SGD(1.0), wire_dtype="int8")  # type: ignore[arg-type]
        with pytest.raises(TableNotFound):
            cluster.table("t")
        with pytest.raises(InvalidArgument, match="residual_bytes"):
            gt.WireFormat("bfloat16", residual_bytes=0)


def test_half_the_bytes_travel(cluster: Cluster, messages: list[int]) -> None:
    table = cluster.create_table("t", dim=128, optimizer=gt.SGD(1.0), num_rows=1_000)
    ids, gradients = np.arange(1_000), normal(0, 1_000, 128)
    sizes = []
    for one in (table, table.with_wire("bfloat16")):
        messages.clear()
        one.push(ids, gradients)
        one.pull(ids)
        sizes.append(sum(messages))
    assert sizes == [0, 0] or sizes[1] < 0.55 * sizes[0]
