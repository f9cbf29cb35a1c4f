"""Which ids get rows: by what was pushed, whatever else happens to the table."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geartrain.ams.tables.counted_ids import CountedIds
from geartrain.ams.tables.row_table import RowTable
from geartrain.ams.values.admission.rules import Admission, MinCount, Probability
from geartrain.ams.values.errors import InvalidArgument, NonFinite
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.placement import bucket_of, buckets_of_shard, even_placement
from geartrain.ams.values.shard_messages import BatchFacts
from geartrain.ams.values.specs import Constant, DTypeName, Ids, TableSpec

ALL_BUCKETS = np.arange(4096)
EVERY = np.ones(4096, np.bool_)
SMALL = 1 << 16


def make_table(
    admission: Admission, *, dim: int = 1, buckets: Ids = ALL_BUCKETS, name: str = "t", **spec: Any
) -> RowTable:
    spec = {"initializer": Constant(0.5), **spec}
    return RowTable(TableSpec(name=name, dim=dim, optimizer=SGD(1.0), admission=admission, **spec), buckets)


def push(table: RowTable, ids: Ids, occurrences: Any = None, value: float = 1.0) -> int:
    counts = None if occurrences is None else np.asarray(occurrences, np.uint32)
    return table.push(ids, np.full((len(ids), table.spec.dim), value, np.float32), batch=BatchFacts(occurrences=counts))


def pulled(table: RowTable, ids: Ids) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
    out, present = np.empty((len(ids), table.spec.dim), table.spec.numpy_dtype), np.empty(len(ids), np.bool_)
    table.pull(ids, out, present)
    return out, present


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.dictionaries(st.integers(0, 11), st.integers(1, 4), min_size=1)),
        st.tuples(st.just("assign"), st.sets(st.integers(0, 11), max_size=2)),
        st.tuples(st.just("remove"), st.sets(st.integers(0, 11), max_size=2)),
        st.tuples(st.sampled_from(["freeze", "thaw", "move"]), st.none()),
    ),
    max_size=25,
)


@settings(deadline=None)
@given(
    STEPS, st.sampled_from([1, 2, 3, 5, 17, 300]), st.sampled_from([None, 12]), st.sampled_from(["float32", "bfloat16"])
)
def test_an_id_gets_its_row_at_the_push_that_brings_its_nth_occurrence(
    steps: list[tuple[str, Any]], n: int, num_rows: int | None, dtype: DTypeName
) -> None:
    table = make_table(MinCount(n, SMALL), num_rows=num_rows, dtype=dtype)
    rows: dict[int, float] = {}
    counts = dict.fromkeys(range(12), 0)
    frozen: CountedIds | None = None
    gradients = occurrences = 0
    for what, argument in steps:
        if what == "push":
            ids = np.array(list(argument), np.int64)
            refused = []
            for i, count in argument.items():
                if i not in rows:
                    counts[i] += count
                    if counts[i] < n:
                        refused.append(count)
                        continue
                    rows[i] = 0.5
                rows[i] -= 1.0
            before = table.num_present
            assert push(table, ids, list(argument.values())) == len(rows) - before
            gradients, occurrences = gradients + len(refused), occurrences + sum(refused)
        elif what in ("assign", "remove"):
            ids = np.array(list(argument), np.int64)
            if what == "assign":
                table.assign(ids, np.full((len(ids), 1), 2.0, table.spec.numpy_dtype))
                rows |= dict.fromkeys(argument, 2.0)
            else:  # one that was admitted is so for ever
                assert table.remove(ids) == len(rows.keys() & argument)
                rows = {i: row for i, row in rows.items() if i not in argument}
        elif what == "freeze" and frozen is None:
            table.freeze()
            frozen = frozen_admission(table)
            assert frozen is not None
            frozen = frozen._replace(counters=frozen.counters.copy())
        elif what == "thaw" and frozen is not None:
            after = frozen_admission(table)
            assert after is not None
            for item, other in zip(frozen, after, strict=True):
                np.testing.assert_array_equal(item, other)  # what was counted meanwhile is not in it
            table.thaw(kept=True)
            frozen = None
        elif what == "move" and frozen is None:
            table.freeze()
            counted, kept = frozen_admission(table), table.read_frozen(12)
            table.thaw(kept=True)
            table = make_table(MinCount(n, SMALL), num_rows=num_rows, dtype=dtype)
            table.restore(*kept)
            assert counted is not None
            table.restore_admission(counted, EVERY)
            gradients = occurrences = 0
        out, present = pulled(table, np.arange(12))
        np.testing.assert_array_equal(present, [i in rows for i in range(12)])
        np.testing.assert_array_equal(out[:, 0].astype(np.float32), [rows.get(i, 0.5) for i in range(12)])
        assert table.refused[1:] == (gradients, occurrences)
    waiting = sum(0 < count < n and i not in rows for i, count in counts.items())
    if all(what not in ("assign", "remove") for what, _ in steps):
        assert table.refused.ids == waiting


@pytest.mark.parametrize(("n", "load"), [(2, 1.0), (2, 0.4), (3, 1.0), (9, 1.0), (40, 1.0), (400, 1.0)])
def test_ids_are_admitted_too_early_as_often_as_the_formula_says(n: int, load: float) -> None:
    rule = MinCount(n, 1 << 18, false_positive_rate=0.05)
    table = make_table(rule, name=f"t{n}")
    random = np.random.default_rng(7)
    counted = int(rule.capacity * load)
    ids = random.permutation(np.unique(random.integers(0, 2**62, counted + 210_000)))[: counted + 200_000]
    push(table, ids[:counted], np.full(counted, n - 1))
    early = push(table, ids[counted:]) / 200_000
    assert early == pytest.approx(rule.false_positive_rate_at(counted), rel=0.2)
    if load == 1.0:
        assert early == pytest.approx(0.05, rel=0.2)


def test_few_counts_of_others_admit_nobody() -> None:
    """The formula is a bound: where the counted ids are far from their n-th occurrence, next to none is early."""
    rule = MinCount(9, 1 << 18, false_positive_rate=0.05)
    table = make_table(rule)
    ids = np.random.default_rng(7).permutation(2 * rule.capacity)
    push(table, ids[: rule.capacity], np.full(rule.capacity, 2))
    assert push(table, ids[rule.capacity :]) == 0


def test_shards_that_share_out_a_table_anew_forget_no_occurrence() -> None:
    """Two shards become three, and these become two: filters of few ranges are split and joined."""
    for rule in (MinCount(4, 1 << 18), MinCount(4, 4096, 0.001)):
        ids = np.arange(0, 60_000_000, 1_000_003)
        shards: list[RowTable] = []
        for number in (2, 3, 2, 1):
            counted = []
            for item in shards:
                item.freeze()
                state = frozen_admission(item)
                assert state is not None
                counted.append(state)
            placement = even_placement(number)
            shards = [make_table(rule, buckets=buckets_of_shard(placement, shard)) for shard in range(number)]
            for shard, table in enumerate(shards):
                owned = placement == shard
                for state in counted:
                    table.restore_admission(state, owned)
                own = ids[_owned(table, ids)]
                if number > 1:
                    assert push(table, own) == 0
        assert push(shards[0], ids) == len(ids)


def test_what_was_counted_is_read_in_pieces() -> None:
    table = make_table(MinCount(4, 1 << 18))
    push(table, np.arange(0, 60_000_000, 1_000_003))
    table.freeze()
    whole = frozen_admission(table)
    assert whole is not None
    pieces, start = [], 0
    while start >= 0:
        found = table.frozen_admission(start, 3 * whole.counters.shape[1])
        assert found is not None
        piece, start = found
        assert len(piece.ranges) <= 3
        pieces.append(piece)
    assert len(pieces) > 5
    for name in ("ranges", "counters", "waiting"):
        joined = np.concatenate([getattr(piece, name) for piece in pieces])
        np.testing.assert_array_equal(joined, getattr(whole, name))


def frozen_admission(table: RowTable) -> CountedIds | None:
    found = table.frozen_admission()
    assert found is None or found[1] == -1
    return found and found[0]


def _owned(table: RowTable, ids: Ids) -> npt.NDArray[np.bool_]:
    from geartrain.ams.values.placement import bucket_of

    return np.isin(bucket_of(ids, dense=False), table.owned_buckets)


def test_each_occurrence_admits_with_its_probability_and_the_same_pushes_admit_the_same() -> None:
    tables = [make_table(Probability(0.1)) for _ in range(2)]
    ids = np.arange(200_000)
    for step in range(3):
        created = [push(table, ids, np.full(len(ids), step + 1)) for table in tables]
        assert created[0] == created[1]
        expected = len(ids) * 0.9 ** (step * (step + 1) / 2) * (1 - 0.9 ** (step + 1))
        assert created[0] == pytest.approx(expected, rel=0.02)
    np.testing.assert_array_equal(*(pulled(table, ids)[1] for table in tables))
    assert tables[0].refused.ids == 0 and tables[0].refused.gradients > 300_000
    tables[0].freeze()
    state = frozen_admission(tables[0])
    assert state is not None and state.num_pushes == 3
    again = make_table(Probability(0.1))
    again.restore_admission(state, EVERY)
    assert push(again, ids) != push(make_table(Probability(0.1)), ids)  # it goes on with other chances


def test_a_push_that_is_refused_counts_nothing() -> None:
    table = make_table(MinCount(2, SMALL))
    for value in (np.nan, np.inf):
        with pytest.raises(NonFinite):
            push(table, np.arange(5), value=value)
    assert table.refused == (0, 0, 0)
    assert push(table, np.arange(5)) == 0
    assert push(table, np.arange(5)) == 5


def test_a_filter_of_another_size_is_not_taken_up() -> None:
    table = make_table(MinCount(2, SMALL))
    push(table, np.arange(5))
    table.freeze()
    state = frozen_admission(table)
    assert state is not None
    with pytest.raises(InvalidArgument, match="not what table 't' has counted"):
        make_table(MinCount(2, 3 * SMALL // 2)).restore_admission(state, EVERY)


def test_a_filter_is_memory_of_the_table() -> None:
    table = make_table(MinCount(2, 1 << 20))
    assert table.memory_bytes < 1 << 16
    push(table, np.arange(100_000))
    assert 1 << 20 <= table.memory_bytes < (1 << 20) + (1 << 16)


@pytest.mark.parametrize("num_shards", [2, 3, 5])
def test_a_shard_has_its_share_of_a_filter(num_shards: int) -> None:
    filters = 0
    for shard in range(num_shards):
        owned = buckets_of_shard(even_placement(num_shards), shard)
        table = make_table(MinCount(2, 1 << 20), buckets=owned)
        is_own = np.isin(bucket_of(np.arange(50_000), dense=False), owned)
        before = table.memory_bytes
        push(table, np.flatnonzero(is_own))
        filters += table.memory_bytes - before
    assert filters <= 1.5 * (1 << 20)
