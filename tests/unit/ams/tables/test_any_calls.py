"""Whatever calls come when, a table of any layout is a dictionary, and its increments make another table the same."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from geartrain.ams.kernels import memory
from geartrain.ams.tables.compiled_store import table_hash
from geartrain.ams.tables.row_table import RowTable
from geartrain.ams.values.errors import OutOfMemory
from geartrain.ams.values.optimizers.registry import Adam, Momentum, RowOptimizerSpec, SparseMomentum
from geartrain.ams.values.placement import bucket_of, buckets_of_shard, even_placement
from geartrain.ams.values.specs import Ids, TableSpec
from tests.specification.row_table import ReferenceTable
from tests.support.row_tables import Contents, contents_of, contents_of_reference, pulled, rest_of

DIM = 2
ALL_BUCKETS = np.arange(4096)
OWNED = [
    ALL_BUCKETS,
    buckets_of_shard(even_placement(4), 2),
    buckets_of_shard(even_placement(3), 1),
    np.array([0, 7, 63, 64, 4095]),
]
VAST = 2**61
PLACES = [0, 2**15 - 3, 2**24, 2**28 - 3, 2**33 - 3, 2**38, 2**60, VAST - 64]
"""Where ids of a vast table begin: on either side of what a page, and a node, of a set of positions holds."""
LAYOUTS = st.one_of(
    st.just((None, ALL_BUCKETS)),
    st.just((VAST, ALL_BUCKETS)),
    st.tuples(st.sampled_from([1, 10, 40, 100, 4097]), st.sampled_from(OWNED)),
)
STEPS = ["push"] * 6 + ["assign"] * 2 + ["remove"] * 2 + ["freeze"] * 2 + ["read", "thaw", "give up", "move", "refuse"]


class Model:
    """A table, a dictionary of the same rows, and a table that follows it by what each freeze holds."""

    def __init__(self, num_rows: int | None, owned: Ids, optimizer: RowOptimizerSpec) -> None:
        self.spec = TableSpec(name="t", dim=DIM, num_rows=num_rows, optimizer=optimizer)
        self.owned = owned
        ids = np.arange(40 if num_rows is None else num_rows) if num_rows != VAST else np.add.outer(PLACES, range(6))
        ids = ids.reshape(-1)
        self.legal = ids[np.isin(bucket_of(ids, dense=num_rows is not None), owned)]
        self.table, self.follower = RowTable(self.spec, owned), RowTable(self.spec, owned)
        self.dict = ReferenceTable(DIM, optimizer, self.spec.initializer, self.spec.seed, table_hash("t"))
        self.frozen: Contents | None = None
        self.moment = self.table.latest_moment

    def step(self, name: str, ids: Ids, seed: int) -> None:
        rows = np.random.default_rng(seed).standard_normal((len(ids), DIM)).astype(np.float32)
        match name:
            case "push":
                assert self.table.push(ids, rows) == self.dict.push(ids, rows, self.spec.optimizer.lr)
            case "assign":
                assert self.table.assign(ids, rows) == self.dict.assign(ids, rows)
            case "remove":
                there = [row_id for row_id in ids.tolist() if row_id in self.dict.rows]
                assert self.table.remove(np.concatenate([ids, ids[:2]])) == len(there)
                for row_id in there:
                    for parts in (self.dict.rows, self.dict.slots, self.dict.updates):
                        parts.pop(row_id, None)  # type: ignore[attr-defined]
            case "refuse":
                self.refuse(ids, seed)
            case "freeze" if self.frozen is None:
                self.frozen, self.read = contents_of_reference(self.dict, self.spec), Contents()
                self.held = self.table.freeze(since=self.moment)
                self.removed = np.concatenate([ids[:0], *self.table.frozen_removed(3)])
                self.next_moment = self.table.latest_moment
            case "read" if self.frozen is not None:
                for row_id, row, slot in zip(*self.table.read_frozen(7)[:3], strict=True):  # type: ignore[arg-type]
                    assert self.frozen[int(row_id)][:2] == (row.tobytes(), slot.tobytes())
                    assert self.read.setdefault(int(row_id), self.frozen[int(row_id)])
            case "give up" if self.frozen is not None:
                self.table.thaw(kept=False)
                self.frozen = None
            case "thaw" if self.frozen is not None:
                self.thaw(self.frozen)
            case "move" if self.frozen is None:
                old, self.table = self.table, RowTable(self.spec, self.owned)
                self.follower = RowTable(self.spec, self.owned)
                old.freeze()
                while len((part := old.read_frozen(13)).ids):
                    self.table.restore(*part)
                    self.follower.restore(*part)
                self.table.freeze()
                self.moment = self.table.latest_moment
                self.table.thaw(kept=True)

    def thaw(self, frozen: Contents) -> None:
        rest = rest_of(self.table, 5)
        assert not rest.keys() & self.read.keys(), "a row was read twice"
        assert rest.items() <= frozen.items(), "what a freeze holds is read as it was"
        assert len(rest) + len(self.read) == self.held
        self.table.thaw(kept=True)
        self.frozen = None
        assert len(set(self.removed.tolist())) == len(self.removed)
        self.follower.remove(self.removed)
        for row_id, (row, slot, number) in (self.read | rest).items():
            one_row, one_slot = (np.frombuffer(part, np.float32)[None] for part in (row, slot))
            steps = np.array([number]) if self.spec.step_bytes else None
            self.follower.restore(np.array([row_id]), one_row, one_slot, steps)
        assert contents_of(self.follower) == frozen, "increments say what came, changed and went"
        self.moment = self.next_moment

    def refuse(self, ids: Ids, seed: int) -> None:
        before, used = memory.memory_limit(), memory.memory_used()
        memory.set_memory_limit(used + seed % 2000)
        try:
            self.step("push", ids, seed)
        except OutOfMemory:
            # The freeze may refuse what had got its room.
            is_undone = memory.memory_used() == used or self.frozen is not None
            assert is_undone, "what was counted for a refused push still counts"
        finally:
            memory.set_memory_limit(before)

    def check(self, ids: Ids) -> None:
        present = np.zeros(len(ids), np.bool_)
        np.testing.assert_array_equal(pulled(self.table, ids), self.dict.pull(ids))
        self.table.pull(ids, np.empty((len(ids), DIM), np.float32), present=present)
        assert present.tolist() == [row_id in self.dict.rows for row_id in ids.tolist()]
        assert self.table.num_present == len(self.dict.rows)


@settings(deadline=None, max_examples=200)
@given(
    layout=LAYOUTS,
    optimizer=st.sampled_from([Momentum(0.5, momentum=0.5), SparseMomentum(0.5, momentum=0.5), Adam(0.1)]),
    steps=st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 60), st.integers(0, 2**31)), max_size=30),
)
def test_a_table_is_a_dictionary(
    layout: tuple[int | None, Ids], optimizer: RowOptimizerSpec, steps: list[tuple[str, int, int]]
) -> None:
    model = Model(*layout, optimizer)
    for name, percent, seed in steps:
        count = min(30, -(-len(model.legal) * percent // 100))
        ids = np.random.default_rng(seed).choice(model.legal, count, replace=False)
        model.step(name, ids, seed)
        model.check(model.legal[:20])
    for name in ("thaw", "freeze", "thaw"):
        model.step(name, model.legal[:0], 0)
    model.check(model.legal[-300:])
