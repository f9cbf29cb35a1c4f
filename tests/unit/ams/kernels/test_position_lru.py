"""The index of positions against its specification: the same ids kept, the same order of use, the same evictions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geartrain.ams.kernels.position_lru import PositionLru
from geartrain.ams.values.errors import InvalidArgument, InvalidIds
from tests.specification import position_lru as reference_lru

some_ids = st.lists(st.integers(0, 25) | st.integers(2**62, 2**63 - 1), max_size=12)
step = st.tuples(st.sampled_from(["find", "touch", "place", "remove", "oldest", "grow"]), some_ids)


def array(ids: list[int]) -> np.ndarray:
    return np.array(ids, np.int64)


class Both:
    """The compiled index and its specification, side by side; positions may differ by a renaming that never changes."""

    def __init__(self, capacity: int) -> None:
        self.ours, self.reference = PositionLru(capacity), reference_lru.ReferencePositionLru(capacity)
        self.names: dict[int, int] = {}

    def compare(self, positions: np.ndarray, expected: list[int]) -> None:
        assert [position < 0 for position in positions.tolist()] == [position < 0 for position in expected]
        assert positions.max(initial=-1) < self.ours.capacity

    def check(self) -> None:
        ids, positions = self.ours.oldest(10**6)
        assert ids.tolist() == self.reference.oldest(10**6) and len(self.ours) == len(ids)
        assert len(set(positions.tolist())) == len(positions), "two ids share a position"
        kept = {name: position for name, position in self.names.items() if name in set(ids.tolist())}
        now = dict(zip(ids.tolist(), positions.tolist(), strict=True))
        assert {item: now[item] for item in kept} == kept, "a position changed"
        self.names = now


@settings(max_examples=80, deadline=None)
@given(capacity=st.integers(1, 20), steps=st.lists(step, max_size=25))
def test_the_index_does_what_its_specification_says(capacity: int, steps: list[tuple[str, list[int]]]) -> None:
    both = Both(capacity)
    for name, ids in steps:
        if name in ("find", "touch"):
            found = both.ours.find(array(ids), touch=name == "touch")
            both.compare(found, both.reference.find(ids, touch=name == "touch"))
        elif name == "place":
            distinct = list(dict.fromkeys(ids))[: both.ours.capacity]
            both.names = {
                name: position for name, position in both.names.items() if name not in distinct
            }  # may lose it on the way
            positions, evicted = both.ours.place(array(distinct))
            expected, expected_evicted = both.reference.place(distinct)
            both.compare(positions, expected)
            assert evicted == expected_evicted
            assert positions.tolist() == both.ours.find(array(distinct), touch=False).tolist()
        elif name == "remove":
            both.compare(both.ours.remove(array(ids)), both.reference.remove(ids))
            both.names = {name: position for name, position in both.names.items() if name not in ids}
        elif name == "oldest":
            assert both.ours.oldest(len(ids))[0].tolist() == both.reference.oldest(len(ids))
        else:
            both.ours.grow(max(1, len(ids)) * 3)
            both.reference.grow(max(1, len(ids)) * 3)
        both.check()


def test_many_ids_come_and_go() -> None:
    rng = np.random.default_rng(0)
    ours, reference = PositionLru(3_000), reference_lru.ReferencePositionLru(3_000)
    for turn in range(60):
        ids = np.unique(rng.integers(0, 9_000, 700)).astype(np.int64)
        rng.shuffle(ids)
        if turn % 3 == 2:
            ours.remove(ids)
            reference.remove(ids.tolist())
        else:
            assert ours.place(ids)[1] == reference.place(ids.tolist())[1]
        assert ours.oldest(10_000)[0].tolist() == reference.oldest(10_000)


def test_wrong_arguments_name_the_range() -> None:
    with pytest.raises(InvalidArgument, match=r"capacity is 0; it must lie in \[1, 2147483646\]"):
        PositionLru(0)
    with pytest.raises(InvalidIds, match=r"3 ids were given at once; there are 2 positions: grow\(\) first"):
        PositionLru(2).place(array([1, 2, 3]))
    with pytest.raises(InvalidIds, match="int64 vector"):
        PositionLru(2).find(np.ones(2), touch=True)  # type: ignore[arg-type]
